"""What a GPU's kernels need."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, which comes with PyTorch for CUDA."""
    return importlib.util.find_spec("triton") is not None


def has_tensor_cores(device: torch.device) -> bool:
    """Whether kernels run on this device whose products are made of numbers in tf32."""
    if device.type != "cuda" or torch.version.cuda is None or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
