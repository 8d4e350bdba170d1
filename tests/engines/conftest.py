"""Settings for tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Convolutions use TF32 on CUDA by default; equality with a CPU needs all digits."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed
