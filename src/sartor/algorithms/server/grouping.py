"""Grouping of vectors: principal components by the Gram matrix, then Lloyd's iterations among them.

The vectors are the rows of ``[m, d]``, few and long, so everything comes from their inner products, a matrix
``[m, m]``; one of ``d × d`` never exists. The rows are read twice, piece by piece: once for the products and
once for the groups' representatives. Products are taken in the rows' precision relative to the first row,
which all others are near to; what is done with them is done in float64. Nothing depends on the signs of
eigenvectors: distances between coordinates do not, and seeds are drawn among the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sartor import random
from sartor.federation.reduction import Reducer

PIECE = 2**13
"""Columns worked on at once: so many of 160 rows stay in a processor's cache."""

BLOCK = 80
"""Rows of a product at once; of the symmetric matrix, blocks left of the diagonal are not computed."""

COINCIDE = 1e-6
"""Starts nearer to each other than this share of the rows' spread coincide."""


@dataclass(frozen=True)
class Groups:
    """Rows in groups, and a vector that stands for each group."""

    members: Tensor
    """The group of every row, ``[m]``."""
    representatives: Tensor
    """One row per group, ``[groups, d]``."""


def group(
    rows: Tensor,
    starts: Tensor,
    groups: int,
    key: int | Tensor,
    *,
    most: int = 100,
    enough: float = 0.0,
    unmoved: Tensor | None = None,
) -> Groups:
    """Group rows ``[m, d]`` by their first ``groups − 1`` principal components.

    Lloyd's iterations begin at ``starts``, one row per group, or a single row for groups that are new. Groups
    that start at the same place would stay one: all but the first of them get their start from a row of
    another place, drawn by k-means++ with the stream ``key``, and if all start at one place, all do. They end
    when no row changes its group, after ``most`` of them, or when all distances add up to ``enough``. A
    representative is the mean of its group's rows, projected, or for a group without rows its row of
    ``unmoved``, its start if nothing else is given.

    >>> rows = torch.tensor([[0.0, 0.0, 1.0], [0.1, 0.0, 1.0], [5.0, 5.0, 1.0]])
    >>> found = group(rows, rows[:1], 2, random.stream(0, "groups"))
    >>> bool(found.members[0] == found.members[1]), bool(found.members[0] == found.members[2])
    (True, False)
    """
    inner, cross, between = _products(rows, starts)
    points, axes = _components(inner, groups - 1, torch.finfo(rows.dtype).eps)
    # Uᵀ(start − μ), U = Σ_i (row_i − μ) axes_i; the axes add up to zero, so that only the products remain.
    centres = (axes.T @ (cross - inner.mean(dim=1, keepdim=True))).T
    again = _coinciding(points, centres, between)
    if len(starts) < groups:
        again = None
    if again is None:
        centres = seeds(points, points[:0], groups, key)
    elif again.any():
        centres[again] = seeds(points, centres[~again], int(again.sum()), key)
    members, centres = lloyd(points, centres, most=most, enough=enough)
    representatives = _combined(rows, centres @ axes.T + 1 / len(rows))
    if again is not None:
        numbers = torch.arange(groups, device=rows.device)
        stays = ~again & ~(members == numbers[:, None]).any(dim=1)
        representatives[stays] = (starts if unmoved is None else unmoved)[stays]
    return Groups(members, representatives)


def by_rule(found: Groups, rows: Tensor, reducer: Reducer) -> Groups:
    """The same groups; where the experiment has a rule in place of means, it makes their representatives."""
    if reducer.rule is None:
        return found
    numbers = torch.arange(len(found.representatives), device=rows.device)
    belongs = (found.members == numbers[:, None]).to(rows.dtype)
    size = belongs.sum(dim=1, keepdim=True)
    made = reducer.sums("trained", rows, belongs / size.clamp(min=1))
    return Groups(found.members, torch.where(size > 0, made, found.representatives))


def lloyd(points: Tensor, centres: Tensor, *, most: int = 100, enough: float = 0.0) -> tuple[Tensor, Tensor]:
    """The group of every point and the groups' centres, by k-means from these centres.

    Ties go to the group that comes first; a group without points keeps its centre.

    >>> points = torch.tensor([[0.0], [1.0], [10.0]])
    >>> lloyd(points, torch.tensor([[0.0], [4.0]]))
    (tensor([0, 0, 1]), tensor([[ 0.5000],
            [10.0000]]))
    """
    numbers = torch.arange(len(centres), device=points.device)
    members = _squares(points, centres).argmin(dim=1)  # (40), (54)
    for _ in range(most):
        belongs = (members == numbers[:, None]).to(points.dtype)
        size = belongs.sum(dim=1, keepdim=True)
        centres = torch.where(size > 0, belongs @ points / size.clamp(min=1), centres)  # (41), (55)
        squares = _squares(points, centres)
        if enough and float(squares.gather(1, members[:, None]).sqrt().sum()) <= enough:  # (42), (56)
            break
        before, members = members, squares.argmin(dim=1)
        if torch.equal(before, members):
            break
    return members, centres


def seeds(points: Tensor, kept: Tensor, count: int, key: int | Tensor) -> Tensor:
    """``count`` points, drawn one after the other by k-means++.

    The chance of a point grows with the square of its distance from what is ``kept`` or drawn; the first one
    is drawn evenly where nothing is kept.

    >>> points = torch.tensor([[0.0], [0.0], [7.0]])
    >>> seeds(points, points[:1], 1, random.stream(0, "groups"))
    tensor([[7.]])
    """
    drawn, chance = [], points.new_ones(len(points))
    if len(kept):
        chance = _squares(points, kept).amin(dim=1)
    for place, draw in enumerate(random.uniform(key, count, points.device).to(points.dtype)):
        cumulative = chance.cumsum(dim=0)
        index = torch.searchsorted(cumulative, (draw * cumulative[-1])[None], right=True)
        drawn.append(points[index.clamp(max=len(points) - 1)])
        nearest = _squares(points, drawn[-1])[:, 0]
        chance = nearest if place == 0 and not len(kept) else torch.minimum(chance, nearest)
    return torch.cat(drawn) if drawn else points[:0]


def _coinciding(points: Tensor, centres: Tensor, between: Tensor) -> Tensor | None:
    """Which starts coincide with an earlier one, on the plane and off it; None if all are at one place."""
    near = _squares(centres, centres) <= COINCIDE**2 * points.square().sum(dim=1).mean()
    own = between.diagonal()
    near &= own + own[:, None] - 2 * between <= COINCIDE * own.max()
    again = near.tril(diagonal=-1).any(dim=1)
    return None if len(again) > 1 and bool(again[1:].all()) else again


def _components(inner: Tensor, rank: int, precision: float) -> tuple[Tensor, Tensor]:
    """Coordinates ``[m, rank]`` of the rows along their principal axes, and the axes in terms of the rows.

    ``inner`` are the rows' products relative to any origin. Axes beyond the rows' rank are zero.
    """
    m = len(inner)
    centred = inner - inner.mean(dim=0) - inner.mean(dim=1, keepdim=True) + inner.mean()
    values, vectors = torch.linalg.eigh((centred + centred.T) / 2)
    number = min(rank, m)
    values, vectors = values[m - number :].flip(0), vectors[:, m - number :].flip(1)
    real = values > precision * m * inner.diagonal().max()
    root = torch.where(real, values, 0).sqrt()
    points = vectors * root  # (38), (50)
    axes = vectors * torch.where(real, 1 / torch.where(real, root, 1), 0)
    return points, axes - axes.mean(dim=0)


def _products(rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of rows with rows, rows with others and others with others, from the first row."""
    m, device = len(rows), rows.device
    inner = torch.zeros(m, m, dtype=torch.float64, device=device)
    cross = torch.zeros(m, len(others), dtype=torch.float64, device=device)
    between = torch.zeros(len(others), len(others), dtype=torch.float64, device=device)
    for piece in _pieces(rows):
        x, y = rows[:, piece] - rows[0, piece], others[:, piece] - rows[0, piece]
        for first in range(0, m, BLOCK):
            inner[first : first + BLOCK, first:] += x[first : first + BLOCK] @ x[first:].T
        cross += x @ y.T
        between += y @ y.T
    inner = inner.triu()
    return inner + inner.triu(diagonal=1).T, cross, between


def _combined(rows: Tensor, coefficients: Tensor) -> Tensor:
    """Linear combinations ``[c, d]`` of the rows whose coefficients ``[c, m]`` add up to one."""
    combined = torch.empty(len(coefficients), rows.shape[1], dtype=rows.dtype, device=rows.device)
    coefficients = coefficients.to(rows.dtype)
    for piece in _pieces(rows):
        combined[:, piece] = coefficients @ (rows[:, piece] - rows[0, piece]) + rows[0, piece]
    return combined


def _pieces(rows: Tensor) -> Iterator[slice]:
    return (slice(first, first + PIECE) for first in range(0, rows.shape[1], PIECE))


def _squares(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances ``[points, centres]``, by differences: equal points have distance zero."""
    return (points[:, None] - centres).square().sum(dim=2)
