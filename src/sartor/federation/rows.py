"""Rows of client states in files, and how damage to them is found.

Two stores stand on this. A simulation's table (``states.py``) holds the latest row of every client: rows are
read and written by place, and a checkpoint is the index of a file that grows. A node's journal
(:mod:`sartor.remote.journal`) holds what was kept of each exchange until a server says whether it counts:
small files that are written whole, and moved or removed as one. Neither layout serves the other, so they
share what is the same: a row is bytes with a checksum. Both could be tables of SQLite; it writes a cohort
four to eight times as slowly and does not tell when a row is damaged (``bench/rows.py``).
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from sartor.errors import DataError, SartorError


class RowFile:
    """A file of rows of one size, read and written by position.

    It is not mapped into memory: pages of a mapped file count as memory of the process. Without a path it
    is a temporary file that goes when the process does.
    """

    def __init__(self, path: Path | None, row_bytes: int, mode: str) -> None:
        self._row_bytes = row_bytes
        self._name = str(path or tempfile.gettempdir())
        try:
            if path is None:
                self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            else:
                if mode == "w+b":
                    path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open(mode, buffering=0)
        except OSError as error:
            raise DataError(f"{self._name}: client states cannot be opened: {error.strerror}") from error

    def read(self, places: np.ndarray) -> np.ndarray:
        """The rows at these places as bytes, [places, bytes of a row]."""
        rows = np.empty((len(places), self._row_bytes), np.uint8)
        for order, first in _stretches(places):
            stretch = np.empty((len(order), self._row_bytes), np.uint8)
            self._file.seek(first * self._row_bytes)
            # A system reads at most 2 GB at once.
            view, done = stretch.data.cast("B"), 0
            while done < len(view):
                count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise DataError(f"{self._name}: cut short; the client states in it are lost")
                done += count
            rows[order] = stretch
        return rows

    def write(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Put rows at these places; the file grows as needed."""
        try:
            for order, first in _stretches(places):
                self._file.seek(first * self._row_bytes)
                view = np.ascontiguousarray(rows[order]).data.cast("B")
                while len(view):
                    view = view[self._file.write(view) :]
        except OSError as error:
            raise SartorError(
                f"{self._name}: client states cannot be written: {error.strerror}; "
                "make room, or set engine.states to memory"
            ) from error

    def sync(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _stretches(places: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Runs of neighbouring places: where they stand in ``places``, and the first of them."""
    order = np.argsort(places, kind="stable")
    breaks = np.flatnonzero(np.diff(places[order]) != 1) + 1
    for part in np.split(order, breaks):
        if len(part):
            yield part, int(places[part[0]])


def row_bytes(rows: Tensor) -> np.ndarray:
    """The rows as bytes, [rows, bytes of a row]; a view where the rows are contiguous."""
    return rows[:, None].flatten(1).contiguous().view(torch.uint8).numpy()


def checksums(rows: np.ndarray) -> np.ndarray:
    """The CRC-32 of each row of bytes."""
    return np.array([zlib.crc32(row) for row in rows], dtype=np.uint32)
