"""Whole numbers on their way to a device, which the host does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

HALF = 1 << 17
"""Numbers in a half of the room."""


class Pinned:
    """Memory that a GPU reads by itself, while the host goes on.

    To ask for such memory takes longer than to write into it, so there is room for many calls. It is used in
    turn: before one half is written again, the device must have read what was there.
    """

    def __init__(self, device: torch.device, half: int = HALF) -> None:
        self._device, self._size = device, half
        self._room: Tensor | None = None
        self._read: list[Any] = []
        """When the device has read each half."""
        self._half = self._end = 0

    def put(self, numbers: np.ndarray) -> Tensor:
        """The numbers where the device can read them, which its stream is to be told before the next are put.

        On a CPU they are where they should be.
        """
        if self._device.type == "cpu":
            return torch.from_numpy(numbers)
        if numbers.size > self._size:
            return torch.from_numpy(numbers).pin_memory()
        if self._room is None:
            self._room = torch.empty(2 * self._size, dtype=torch.int64, pin_memory=True)
            self._read = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        if self._end + numbers.size > self._size:
            self._read[self._half].record(torch.cuda.current_stream(self._device))
            self._half, self._end = 1 - self._half, 0
            self._read[self._half].synchronize()
        begin = self._half * self._size + self._end
        self._end += numbers.size
        there = self._room[begin : begin + numbers.size]
        there.numpy()[:] = numbers
        return there
