"""What rules count by: weighted order statistics of rows, distances, and how many attackers there may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

SORTED, CACHED, DEVICE = 1 << 22, 1 << 19, 1 << 24
"""Numbers taken at once: to sort them, to work on whole rows within a cache, and on a device."""

FEW = 16
"""Rows up to so many are ordered by comparing whole rows, more of them by sorting columns."""

EPSILON = 1e-6
"""Weights that add up to a share within this are taken to do so exactly."""


def attackers_of(share: float, rows: int, most: int) -> int:
    """f: a share of so many rows, rounded up, but ``most`` at most and never less than 0."""
    return max(0, min(math.ceil(share * rows - EPSILON), most))


def blocks(rows: Tensor, numbers: int) -> Iterator[slice]:
    """Columns with about so many numbers, one block after the other; on a device as many as keep it busy."""
    numbers = numbers if rows.device.type == "cpu" else DEVICE
    width = max(1, numbers // max(1, len(rows)))
    return (slice(first, first + width) for first in range(0, rows.shape[1], width))


def by_columns(rows: Tensor, weights: Tensor, make: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """For all columns of rows what ``make`` gives of a block's numbers in order and the weight up to each.

    Both are ``[n, columns]``; where weights are equal the latter is ``[n, 1]`` and on the host, so that what
    follows from it costs a device nothing. A number for every column is expected.
    """
    shares, made = weights.cpu().float(), rows.new_empty(rows.shape[1])
    equal = bool(shares.max() - shares.min() <= EPSILON / len(shares))
    few = len(rows) <= FEW and (equal or not by_numpy(rows))  # carrying weights along, numpy is ahead
    up_to = torch.arange(1, len(rows) + 1)[:, None] / len(rows)
    for columns in blocks(rows, CACHED if few else SORTED):
        block = rows[:, columns]
        if equal:
            made[columns] = make((compared if few else ordered)(block), up_to)
        else:
            made[columns] = make(*(compared_with if few else ordered_with)(block, weights.float()))
    return made


def compared(rows: Tensor) -> Tensor:
    """The numbers of every column in order, by a network that compares whole rows.

    No number is moved by itself and no place is kept: a few dozen short operations in place of a sort.
    """
    values = list(rows)
    for i, j in comparators(len(rows)):
        values[i], values[j] = torch.minimum(values[i], values[j]), torch.maximum(values[i], values[j])
    return torch.stack(values)


def compared_with(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of every column in order by the same network, and the weight up to each.

    Weights go with their numbers. Equal numbers stay where they are, so that neither is counted twice.

    >>> compared_with(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), torch.tensor([0.75, 0.25]))
    (tensor([[2., 1.],
            [3., 4.]]), tensor([[0.2500, 0.7500],
            [1.0000, 1.0000]]))
    """
    pairs = list(zip(rows, weights[:, None].expand_as(rows), strict=True))
    for i, j in comparators(len(rows)):
        first, second = pairs[i], pairs[j]
        swap = first[0] > second[0]
        pairs[i] = torch.where(swap, second[0], first[0]), torch.where(swap, second[1], first[1])
        pairs[j] = torch.where(swap, first[0], second[0]), torch.where(swap, first[1], second[1])
    values, shares = zip(*pairs, strict=True)
    return torch.stack(values), torch.stack(shares).cumsum(dim=0)


def comparators(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of places that, put in order one pair after the other, order n numbers (Batcher 1968).

    >>> list(comparators(3))
    [(0, 1), (0, 2), (1, 2)]
    """
    sizes = [1 << power for power in range((n - 1).bit_length())]
    for size in sizes:  # of the groups that are in order already, two of which are merged
        for apart in (step for step in reversed(sizes) if step <= size):
            for i in range(apart % size, n - apart):
                if (i - apart % size) // apart % 2 == 0 and i // (2 * size) == (i + apart) // (2 * size):
                    yield i, i + apart


def ordered(rows: Tensor) -> Tensor:
    """The numbers of every column in order.

    On a CPU numpy sorts, which has vector instructions for it and is ten times as fast.
    """
    columns = rows.T.contiguous()
    return (torch.from_numpy(np.sort(columns.numpy())) if by_numpy(rows) else columns.sort()[0]).T


def ordered_with(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of every column in order, and the weight up to each."""
    columns = rows.T.contiguous()
    if by_numpy(rows):
        order = torch.from_numpy(np.argsort(columns.numpy()))
        values = columns.gather(1, order)
    else:
        values, order = columns.sort()
    return values.T, weights[order].cumsum(dim=1).T


def by_numpy(rows: Tensor) -> bool:
    """Whether numpy can sort them."""
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def distances_from(centre: Tensor, rows: Tensor) -> Tensor:
    """‖row_i − centre‖ of every row."""
    norm = torch.linalg.vector_norm
    apart = [norm(rows[:, some] - centre[some], dim=1) for some in blocks(rows, CACHED)]
    found: Tensor = norm(torch.stack(apart), dim=0)
    return found


def median(rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted median of every column: half of the weight on either side.

    Where the weights can be cut exactly in two, it is the middle of the two numbers beside the cut, so that
    with equal weights it is the usual median.

    >>> rows = torch.tensor([[1.0], [2.0], [30.0]])
    >>> median(rows, torch.tensor([0.4, 0.3, 0.3])), median(rows, torch.tensor([0.2, 0.3, 0.5]))
    (tensor([2.]), tensor([16.]))
    """

    def middle(values: Tensor, cumulative: Tensor) -> Tensor:
        low, high = (cumulative < 0.5 - EPSILON).sum(dim=0), (cumulative <= 0.5 + EPSILON).sum(dim=0)
        return torch.lerp(at(values, low), at(values, high), 0.5)

    return by_columns(rows, weights, middle)


def at(values: Tensor, places: Tensor) -> Tensor:
    """The number at a place of every column, each its own or one for all; past the last it is the last."""
    places = places.clamp(max=len(values) - 1)
    return values[int(places)] if len(places) == 1 else values.gather(0, places[None])[0]


def trimmed_mean(rows: Tensor, weights: Tensor, share: float) -> Tensor:
    """The weighted mean of every column without ``share`` of the weight at either end.

    A row at the border counts with what is left of its weight.

    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [90.0]])
    >>> trimmed_mean(rows, torch.full((4,), 0.25), 0.25)
    tensor([3.])
    """

    def inner(values: Tensor, cumulative: Tensor) -> Tensor:
        edges = cumulative.clamp(share, 1 - share)
        kept = torch.diff(edges, dim=0, prepend=torch.full_like(edges[:1], share)).to(values)
        first = values[len(values) // 2]  # from the middle on: equal numbers have that mean exactly
        inside = torch.where(kept > 0, values - first, 0)
        return first + (kept * inside).sum(dim=0) / (1 - 2 * share)

    return by_columns(rows, weights, inner)
