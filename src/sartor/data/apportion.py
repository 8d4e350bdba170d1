"""Whole numbers from shares, by the method of the largest remainder.

Every split of samples comes down to one question: how many of a total does each of several shares get?
Rounding down loses samples, rounding cumulative sums favours the last; the largest remainder stays within
one of the exact share everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def apportion(total: int, shares: npt.ArrayLike, caps: npt.ArrayLike | None = None) -> Counts:
    """Whole numbers that sum to ``total`` and lie within one of ``total * shares / sum(shares)``.

    With ``caps`` none exceeds its cap, and what a full one cannot take is divided among the others by their
    shares, or by room where they have none. The caps must have room for the total.

    >>> apportion(10, [1, 1, 1]).tolist()
    [4, 3, 3]
    >>> apportion(10, [8, 1, 1], caps=[5, 9, 9]).tolist()
    [5, 3, 2]
    """
    weight = np.array(shares, np.float64)
    if caps is None:
        return _shares(total, weight)
    room = np.array(caps, np.int64)
    if total > room.sum():
        raise ValueError(f"{total} do not fit into caps of {room.sum()} in all")
    counts = np.zeros(len(weight), np.int64)
    while total > 0:
        open_ = np.where(room > 0, weight, 0.0)
        if not open_.sum() > 0:
            open_ = room.astype(np.float64)
        wanted = _shares(total, open_)
        if (wanted <= room).all():
            return counts + wanted
        # Fill those that overflow and divide again: a full one never takes part again, so this ends.
        filled = np.where(wanted > room, room, 0)
        counts += filled
        total -= int(filled.sum())
        room -= filled
    return counts


def round_to(total: int, exact: npt.NDArray[np.float64]) -> Counts:
    """Non-negative numbers rounded to whole ones that sum to ``total``; the largest remainders go up.

    The total is at least the sum of the numbers rounded down and at most that of the numbers rounded up.
    """
    counts = np.floor(exact + 1e-9).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def _shares(total: int, weight: npt.NDArray[np.float64]) -> Counts:
    """``total`` divided by weights that do not all vanish; ties go to the first."""
    # Scaled first by the largest weight: dividing by a sum of subnormal weights would overflow.
    weight = weight / weight.max()
    return round_to(total, total * (weight / weight.sum()))


def cut(
    index: Counts, labels: npt.NDArray[np.int64], fraction: float, random: np.random.Generator
) -> tuple[Counts, Counts]:
    """A client's samples in two: ``(kept, taken)``, the taken a fraction of each class, in random choice.

    Something is taken and something kept where there are two samples and the fraction is above 0. A class
    is kept before it is taken, so that none is only among the taken unless there is no other way.
    """
    n = len(index)
    if n < 2 or fraction <= 0:
        return index, index[:0]
    total = min(max(1, round(fraction * n)), n - 1)
    classes, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    spare = sizes - 1
    if spare.sum() < total:
        spare = sizes
    number = apportion(total, sizes, spare)
    taken = np.zeros(n, bool)
    for position in range(len(classes)):
        rows = np.flatnonzero(inverse == position)
        taken[random.permutation(rows)[: number[position]]] = True
    return index[~taken], index[taken]
