"""What a GPU's kernels need."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None and any(
    map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))
)
"""Whether Triton can run: it comes with PyTorch for CUDA, and needs a compiler of C."""


def has_tensor_cores(device: torch.device) -> bool:
    """Whether kernels run on this device whose products are made of numbers in tf32."""
    if device.type != "cuda" or torch.version.cuda is None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
