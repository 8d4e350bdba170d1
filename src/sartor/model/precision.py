"""Training in bfloat16: products and convolutions in few digits, weights and norms in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_NORMS = frozenset({F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm})


class _FullNorms(TorchFunctionMode):
    """Normalises in float32 on a CPU as well: autocast does so on CUDA alone, and vmap needs one type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMS and args and args[0].dtype == torch.bfloat16:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def half_precision(device: str) -> Iterator[None]:
    """PyTorch's mixed precision in bfloat16.

    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    >>> with half_precision("cpu"):
    ...     layer(x).dtype
    torch.bfloat16
    """
    with torch.autocast(device, torch.bfloat16), _FullNorms():
        yield
