"""Where clients are at home: the process of a run that has a client's data and state, and does its work.

A run in one process has all its clients at home there. Over several processes (:mod:`sartor.engines.sharded`)
every client has one home, which follows from the data and the number of processes alone; so all of them know
it, and a checkpoint can be resumed by another number of processes, whose clients are then at home elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor


class Homes:
    """All clients are at home in this process, the only one.

    >>> homes = Homes(5)
    >>> homes.count, homes.here(np.array([4, 2])).tolist()
    (5, [0, 1])
    """

    rank, ranks = 0, 1
    beside = 1
    """How many processes of the run are on this machine."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    @property
    def count(self) -> int:
        """How many clients are at home here."""
        return self.clients

    def here(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these clients are at home here, by their places among them."""
        return np.arange(len(numbers))

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The row that each of these clients has in a table of its home."""
        return numbers

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The clients that have these rows in a table of this home."""
        return rows

    def gathered(self, numbers: np.ndarray, values: list[Tensor]) -> list[Tensor]:
        """Values of these clients, of which each home gives its own in their order: a row for every one."""
        return values


def home_folder(folder: Path, rank: int, ranks: int) -> Path:
    """The folder of one home's files."""
    return folder if ranks == 1 else folder / f"{rank}-of-{ranks}"
