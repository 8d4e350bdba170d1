"""What a call is told of its clients: whole numbers in one array, which travels faster than several.

Where the same clients are asked round after round, only the rounds and the keys that follow from them differ.
What a call of many rounds to come will be told is then made in one go, and lies on the device before they
come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

AHEAD = 256
"""Rounds of which a device is told at once, where they follow each other."""

ROOM = 1 << 16
"""Numbers that it is told at once, unless those of a single call are more."""

OfRounds = Callable[[np.ndarray], np.ndarray]
"""What follows from rounds: for one of each client, or for several in a column, a row each."""


class Told:
    """What calls of the same clients are told, whatever the round.

    ``parts`` are those of any round, and ``changing`` says what stands in some of them, by their places.
    """

    def __init__(self, who: bytes, parts: Sequence[np.ndarray], changing: Mapping[int, OfRounds]) -> None:
        self._who, self._joined = who, joined(parts)
        ends = np.cumsum([part.size + part.size % 2 for part in parts]).tolist()
        begins = [0, *ends]
        self._changing = [
            (slice(begins[place], begins[place] + parts[place].size), of) for place, of in changing.items()
        ]
        self._last: int | None = None

    @property
    def length(self) -> int:
        """How many numbers a call is told."""
        return len(self._joined)

    def mark(self, rounds: np.ndarray) -> tuple[bytes, bytes]:
        """What the call of these rounds is known by."""
        return self._who, rounds.tobytes()

    def numbers(self, rounds: np.ndarray) -> np.ndarray:
        """What a call is told whose clients are in these rounds; or in those of a column, a row for each."""
        told = np.empty((*rounds.shape[:-1], self.length), dtype=np.int64)
        told[...] = self._joined
        for span, of in self._changing:
            told[..., span] = of(rounds)
        return told

    def coming(self, rounds: np.ndarray, most: int) -> tuple[np.ndarray, list[tuple[bytes, bytes]]]:
        """What the call of these rounds is told, and the next ones if it followed on the last; their marks.

        There are ``most`` of them at most, a row each.
        """
        first = int(rounds[0])
        alike = bool((rounds == first).all())
        count = most if alike and self._last == first - 1 else 1
        self._last = first + count - 1 if alike else None
        if count == 1:
            return self.numbers(rounds)[None], [self.mark(rounds)]
        column = np.arange(first, first + count)[:, None]
        return self.numbers(column), [self.mark(row) for row in np.repeat(column, len(rounds), axis=1)]


def most_told(length: int) -> int:
    """How many calls can be told of at once that are told so many numbers each."""
    return max(1, min(AHEAD, ROOM // max(1, length)))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays in one; each begins where 16 bytes do, as kernels read them."""
    found = np.zeros(sum(part.size + part.size % 2 for part in parts), dtype=np.int64)
    end = 0
    for part in parts:
        found[end : end + part.size] = part.ravel()
        end += part.size + part.size % 2
    return found


def parted(joined: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """Those arrays again, as tensors."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = joined.split_with_sizes([size + size % 2 for size in sizes])
    for part, size, shape in zip(parts, sizes, shapes, strict=True):
        exact = part[:size] if size % 2 else part
        yield exact if len(shape) == 1 else exact.view(shape)
