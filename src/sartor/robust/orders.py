"""What rules count by: weighted order statistics of rows, distances, and how many attackers there may be."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 22
"""Numbers that are sorted at once."""

EPSILON = 1e-6
"""Weights that add up to a share within this are taken to do so exactly."""


def attackers_of(share: float, rows: int, most: int) -> int:
    """f: a share of so many rows, rounded up, but ``most`` at most and never less than 0."""
    return max(0, min(math.ceil(share * rows - EPSILON), most))


def by_columns(rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``make`` gives of a block of columns ``[columns, n]``, a number each, for all columns of rows."""
    made = rows.new_empty(rows.shape[1])
    width = max(1, BLOCK // max(1, len(rows)))
    for first in range(0, rows.shape[1], width):
        made[first : first + width] = make(rows[:, first : first + width].T.contiguous())
    return made


def distances_from(centre: Tensor, rows: Tensor) -> Tensor:
    """‖row_i − centre‖ of every row."""
    return torch.stack([torch.linalg.vector_norm(row - centre) for row in rows])


def median(rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted median of every column: half of the weight on either side.

    Where the weights can be cut exactly in two, it is the middle of the two numbers beside the cut, so that
    with equal weights it is the usual median.

    >>> rows = torch.tensor([[1.0], [2.0], [30.0]])
    >>> median(rows, torch.tensor([0.4, 0.3, 0.3])), median(rows, torch.tensor([0.2, 0.3, 0.5]))
    (tensor([2.]), tensor([16.]))
    """

    def middle(columns: Tensor) -> Tensor:
        values, cumulative = ordered(columns, weights)
        low = (cumulative < 0.5 - EPSILON).sum(dim=1, keepdim=True).clamp(max=len(weights) - 1)
        high = (cumulative <= 0.5 + EPSILON).sum(dim=1, keepdim=True).clamp(max=len(weights) - 1)
        below, above = (values.gather(1, place.expand(len(values), 1))[:, 0] for place in (low, high))
        return below + (above - below) / 2

    return by_columns(rows, middle)


def trimmed_mean(rows: Tensor, weights: Tensor, share: float) -> Tensor:
    """The weighted mean of every column without ``share`` of the weight at either end.

    A row at the border counts with what is left of its weight.

    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [90.0]])
    >>> trimmed_mean(rows, torch.full((4,), 0.25), 0.25)
    tensor([3.])
    """

    def inner(columns: Tensor) -> Tensor:
        values, cumulative = ordered(columns, weights)
        edges = cumulative.clamp(share, 1 - share)
        kept = torch.diff(edges, dim=1, prepend=torch.full_like(edges[:, :1], share))
        first = values[:, len(weights) // 2, None]  # from the middle on: equal numbers have that mean exactly
        inside = torch.where(kept > 0, values - first, 0)
        return first[:, 0] + (kept.to(values.dtype) * inside).sum(dim=1) / (1 - 2 * share)

    return by_columns(rows, inner)


def ordered(columns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of every column in order, and the weight up to each; one row of these where all are equal.

    On a CPU numpy sorts, which has vector instructions for it and is ten times as fast.
    """
    n = len(weights)
    by_numpy = columns.device.type == "cpu" and columns.dtype in (torch.float32, torch.float64)
    if bool(weights.max() - weights.min() <= EPSILON / n):
        values = torch.from_numpy(np.sort(columns.numpy(), axis=1)) if by_numpy else columns.sort(dim=1)[0]
        return values, torch.arange(1, n + 1, device=columns.device)[None] / n
    if by_numpy:
        order = torch.from_numpy(np.argsort(columns.numpy(), axis=1))
        values = columns.gather(1, order)
    else:
        values, order = columns.sort(dim=1)
    return values, weights.float()[order].cumsum(dim=1)
