"""What rules count by: weighted order statistics of rows, distances, and how many attackers there may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from sartor.kernels.gpu import HAS_TRITON

SORTED, CACHED, DEVICE = 1 << 22, 1 << 19, 1 << 24
"""Numbers taken at once: to sort them, to work on whole rows within a cache, and on a device."""

FEW, COUNTED = 16, 128
"""Rows of equal weight up to so many are ordered by comparing whole rows, more of them by sorting columns;
and rows up to so many on CUDA by counting, whatever their weights."""

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
    few = equal and len(rows) <= FEW
    up_to = torch.arange(1, len(rows) + 1)[:, None] / len(rows)
    for columns in blocks(rows, CACHED if few else SORTED):
        block = rows[:, columns]
        if equal:
            made[columns] = make((compared if few else ordered)(block), up_to)
        else:
            made[columns] = make(*ordered_with(block, weights.float()))
    return made


def compared(rows: Tensor) -> Tensor:
    """The numbers of every column in order, by a network that compares whole rows.

    No number is moved by itself and no place is kept: a few dozen short operations in place of a sort.
    """
    values = list(rows)
    for i, j in comparators(len(rows)):
        values[i], values[j] = torch.minimum(values[i], values[j]), torch.maximum(values[i], values[j])
    return torch.stack(values)


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


def by_counting(rows: Tensor) -> bool:
    """Whether a kernel finds what stands in the middle of columns, for which no host has to be waited for."""
    there = rows.is_cuda and HAS_TRITON and rows.dtype in (torch.float32, torch.float64)
    return there and len(rows) <= COUNTED


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

    if by_counting(rows):
        from sartor.kernels import orders_triton

        found: Tensor = orders_triton.median(rows, weights)
        return found
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

    if by_counting(rows):
        from sartor.kernels import orders_triton

        found: Tensor = orders_triton.trimmed_mean(rows, weights, share)
        return found
    return by_columns(rows, weights, inner)


def mean_near_median(rows: Tensor, chosen: Tensor, near: int) -> Tensor:
    """The plain mean of so many numbers of every column, those nearest to its median among chosen rows.

    >>> mean_near_median(torch.tensor([[1.0], [2.0], [4.0], [90.0]]), torch.tensor([0, 1, 2]), 2)
    tensor([1.5000])
    """

    def mean(ordered: Tensor, cumulative: Tensor) -> Tensor:
        values, count = ordered.T, len(ordered)
        middle = (values[:, (count - 1) // 2] + values[:, count // 2])[:, None] / 2
        places = (values - middle).abs().topk(near, dim=1, largest=False).indices
        return middle[:, 0] + (values.gather(1, places) - middle).mean(dim=1)

    if by_counting(rows):
        from sartor.kernels import orders_triton

        weights = torch.zeros(len(rows), device=rows.device).index_fill(0, chosen, 1 / len(chosen))
        found: Tensor = orders_triton.mean_near_median(rows, weights, near)
        return found
    return by_columns(rows[chosen], torch.ones(len(chosen)), mean)
