"""Settings for tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _full_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """Convolutions use TF32 on CUDA by default; equality with a CPU needs all digits."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed and not request.path.name.startswith("test_cuda")
    yield
    torch.backends.cudnn.allow_tf32 = allowed
