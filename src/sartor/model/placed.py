"""A module called with other tensors in the place of its own, as :func:`torch.func.functional_call` does.

That looks for every tensor's place anew, which takes longer than a small network's pass. Here places are
looked for once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Place = tuple[dict[str, Any], str]
"""Where a module holds a tensor: among its parameters or buffers, by name."""


class Placed:
    """A module with the places of its tensors; those of a tensor that has several names are filled together.

    >>> layer = Placed(nn.Linear(2, 1))
    >>> layer({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, (torch.ones(2),), {}).tolist()
    [3.0]
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._own: dict[str, tuple[Place, Tensor]] = {}
        alike: defaultdict[int, list[Place]] = defaultdict(list)
        for path, layer in module.named_modules(remove_duplicate=False):
            for held in (layer._parameters, layer._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        self._own[f"{path}.{name}" if path else name] = (held, name), tensor
                        alike[id(tensor)].append((held, name))
        self._places = {key: alike[id(tensor)] for key, (_, tensor) in self._own.items()}

    def __call__(self, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns with these tensors; where it puts others in their place, those are left."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return functional_call(self.module, tensors, args, dict(kwargs))  # which says that it cannot
        try:
            for key, value in tensors.items():
                for held, name in self._places[key]:
                    held[name] = value
            return self.module(*args, **kwargs)
        finally:
            for key in tensors:
                (held, name), _ = self._own[key]
                tensors[key] = held[name]
            for (held, name), value in self._own.values():
                held[name] = value
