"""How much memory there is, and giving back what is not needed any more."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

GROWN = 256 << 20
"""Bytes that a process may grow by before it looks whether it can give any back."""

OFTEN = 1.0
"""Seconds between two looks."""


def free_memory() -> int:
    """Bytes of the machine's memory that can be had."""
    return min(_available(), _allowed())


def _available() -> int:
    """What the machine could give, with what it only keeps of files that were read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return 2 << 30


def _allowed() -> int:
    """What the container that this runs in, if any, leaves to it."""
    try:
        most, held = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, most - held)
    except (OSError, ValueError):  # there is none, or it has no limit
        return 1 << 62


class Idle:
    """Memory that this process holds and does not use.

    The C library keeps what is freed for what comes next. Where large things of several sizes come and go, as
    the models of many clients do on a CPU, holes are left between them that fit nothing, and a process grows
    with every round: 40 clients with 50,890 weights each by 8 MB, to gigabytes. Of glibc one can ask that it
    give whole pages back; of others one need not, or cannot.
    """

    def __init__(self) -> None:
        self._least, self._looked = _resident(), time.monotonic()

    def give_back(self) -> None:
        """Give back what is idle, if the process has grown by much; to be called as often as one likes."""
        if time.monotonic() - self._looked < OFTEN:
            return
        if _resident() - self._least > max(GROWN, self._least // 4):
            _trim()
            self._least = _resident()
        self._looked = time.monotonic()


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where that is not told."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def _trim() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library
        return
