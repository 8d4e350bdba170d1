"""How much memory is free where clients train."""

from __future__ import annotations

import os

import torch


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
