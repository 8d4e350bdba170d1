"""Memory where clients train: how much is free, and how arrays get there."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, or of the machine for the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return 2 << 30


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device; without waiting for the device to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
