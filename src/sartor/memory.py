"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path


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
