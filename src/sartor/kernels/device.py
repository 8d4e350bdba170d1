"""Where clients train: how much memory is free, how arrays get there, with how many digits it computes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from sartor.memory import free_memory

OWN_PAGES = 1 << 20
"""Bytes from which a tensor of :func:`room_for` has pages of its own."""


SHARED = 0.9
"""How much of a GPU's memory processes that share it have in all; the rest is what PyTorch does not count."""

_SHARES: list[float] = []
"""The part of a GPU's memory that this process may have, where others are there too."""


def share_device(processes: int) -> None:
    """From now on this process is one of so many that share a GPU, and may have its part of the memory.

    PyTorch refuses more: who runs out of memory then is who takes too much, and not somebody else.
    """
    _SHARES[:] = [SHARED / processes]
    torch.cuda.set_per_process_memory_fraction(_SHARES[0])


def untaken_bytes(device: torch.device) -> int:
    """Memory of a GPU that PyTorch has not taken yet, and may take in this process."""
    free, total = torch.cuda.mem_get_info(device)
    for share in _SHARES:
        free = min(free, max(0, int(share * total) - torch.cuda.memory_reserved(device)))
    return int(free)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device that this process may have, or of the machine for the CPU."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return untaken_bytes(device) + int(idle)
    return free_memory()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device; without waiting for the device to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def room_for(shape: Sequence[int], dtype: torch.dtype, device: torch.device, filled: bool = True) -> Tensor:
    """Zeros of this shape, which will all be ``filled``, or some of them.

    On a host, many of them take no memory before something is written there, and give it back to the system
    with the tensor. What PyTorch allocates would stay with the process, in pieces that seldom fit again.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_PAGES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if filled and hasattr(mmap, "MADV_HUGEPAGE"):  # there in a third of the time
        with suppress(OSError):  # a system without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def room_for_rows(count: int, like: Tensor, filled: bool = True) -> Tensor:
    """Room for so many rows like these."""
    return room_for((count, *like.shape[1:]), like.dtype, like.device, filled)


def rows_at(places: np.ndarray, rows: Tensor) -> Tensor:
    """A copy of the rows at these places, in room of its own."""
    if rows.device.type != "cpu":
        stretch = in_a_row(places)
        if stretch is not None:
            return rows[stretch].clone()
        return rows.index_select(0, to_device(places, rows.device))
    return torch.index_select(rows, 0, torch.from_numpy(places), out=room_for_rows(len(places), rows))


def put_rows(places: np.ndarray, rows: Tensor, values: Tensor) -> None:
    """Write values to the rows at these places, each given once."""
    stretch = in_a_row(places)
    if stretch is None:
        rows.index_copy_(0, to_device(places, rows.device), values)
    else:
        rows[stretch].copy_(values)


def in_a_row(places: np.ndarray) -> slice | None:
    """The stretch of places that follow each other, which are copied in half the time; None of others.

    >>> in_a_row(np.array([3, 4, 5])), in_a_row(np.array([3, 5]))
    (slice(3, 6, None), None)
    """
    if not len(places) or (places[1:] != places[:-1] + 1).any():
        return None
    return slice(int(places[0]), int(places[0]) + len(places))


class Computing:
    """What clients compute in: nothing is recorded for gradients, and CUDA has so many digits of float32.

    Those are all (``full``) or those of ``tf32``; ``usual`` leaves it to PyTorch, whose way is tf32 for
    convolutions and float32 for matrix products. No generator, as it is entered in every
    call, and rounds of small models wait for their host.
    """

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def __enter__(self) -> None:
        self._recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        if self._precision != "usual":
            products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
            self._before = products.allow_tf32, convolutions.allow_tf32
            products.allow_tf32 = convolutions.allow_tf32 = self._precision == "tf32"

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._recorded)
        if self._precision != "usual":
            products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
            products.allow_tf32, convolutions.allow_tf32 = self._before
