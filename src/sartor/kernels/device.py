"""Where clients train: how much memory is free, how arrays get there, with how many digits it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from sartor.memory import free_memory


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, or of the machine for the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return free_memory()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device; without waiting for the device to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@contextmanager
def digits(precision: str) -> Iterator[None]:
    """Compute on CUDA in all digits of float32 (``full``) or in ``tf32``; ``usual`` leaves it to PyTorch.

    PyTorch's way is tf32 for convolutions and float32 for matrix products.
    """
    if precision == "usual":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
