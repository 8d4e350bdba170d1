"""How near models are to each other: distances, cosines, mixtures of models, and cutting a group in two.

Models are rows of a matrix. Distances come from a Gram matrix in double precision around the mean model, so
that what all models have in common cancels nothing away; differences below its resolution are taken for
none, so equal models are at distance exactly 0. Columns are taken a block at a time, and rows too (see
:func:`mixtures`), so that ten thousand clients need no matrix of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 22
"""Numbers held at once: of the models in double precision, and of a matrix of pairs."""

RESOLUTION = 1e-12
"""Squared distances below this share of the squared sizes are rounding of the Gram matrix, and count as 0."""


def squared_distances(rows: Tensor, models: Tensor) -> Tensor:
    """‖row_i − model_j‖² for every pair, in float64, [n, N].

    >>> squared_distances(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0], [4.0, 6.0]])).tolist()
    [[0.0, 25.0]]
    """
    shape = (len(rows), len(models))
    gram = torch.zeros(shape, dtype=torch.float64, device=models.device)
    sizes = torch.zeros_like(gram)
    for columns in _blocks(models):
        block = models[:, columns].double()
        centre = block.mean(dim=0)
        own, block = rows[:, columns].double() - centre, block - centre
        gram += own @ block.T
        sizes += (own * own).sum(dim=1)[:, None] + (block * block).sum(dim=1)
    squared = sizes - 2 * gram
    return torch.where(squared > RESOLUTION * sizes, squared, 0.0)


def distances(rows: Tensor, models: Tensor) -> Tensor:
    """‖row_i − model_j‖ for every pair, in float64, [n, N]; exactly 0 for equal models."""
    return squared_distances(rows, models).sqrt()


def cosines(rows: Tensor, models: Tensor) -> Tensor:
    """The cosine of the angle between every row and every model, in float64, [n, N]; 0 for a zero vector.

    >>> cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, -3.0], [-1.0, 0.0]])).tolist()
    [[1.0, 0.0, -1.0]]
    """
    gram = torch.zeros((len(rows), len(models)), dtype=torch.float64, device=models.device)
    own_sizes, sizes = gram.new_zeros(len(rows)), gram.new_zeros(len(models))
    for columns in _blocks(models):
        own, block = rows[:, columns].double(), models[:, columns].double()
        gram += own @ block.T
        own_sizes += (own * own).sum(dim=1)
        sizes += (block * block).sum(dim=1)
    product = own_sizes.sqrt()[:, None] * sizes.sqrt()
    return torch.where(product > 0, gram / product, 0.0).clamp(-1.0, 1.0)


def inner_products(rows: Tensor) -> Tensor:
    """The inner products of all pairs of rows, in float64, [n, n].

    >>> inner_products(torch.tensor([[1.0, 2.0], [0.0, 3.0]])).tolist()
    [[5.0, 6.0], [6.0, 9.0]]
    """
    inner = torch.zeros((len(rows), len(rows)), dtype=torch.float64, device=rows.device)
    for columns in _blocks(rows):
        block = rows[:, columns].double()
        inner += block @ block.T
    return inner


def softmax_over(scores: Tensor, those: Tensor) -> Tensor:
    """Row by row the softmax over the entries that ``those``, a boolean matrix, marks; 0 elsewhere."""
    return scores.masked_fill(~those, float("-inf")).softmax(dim=1).nan_to_num(0.0)


def mixtures(models: Tensor, clients: Tensor, coefficients: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ_j c_ij model_j for the clients i, [n, d], accumulated in float64.

    ``coefficients`` gives the rows c_i, [n, N], of some of the clients; it is asked for a chunk at a time.

    >>> models = torch.tensor([[0.0, 4.0], [2.0, 0.0]])
    >>> mixtures(models, torch.arange(2), lambda some: torch.full((len(some), 2), 0.5).double()).tolist()
    [[1.0, 2.0], [1.0, 2.0]]
    """
    mixed = models.new_empty(len(clients), models.shape[1])
    size = max(1, BLOCK // max(1, len(models)))
    for first in range(0, len(clients), size):
        weights = coefficients(clients[first : first + size])
        for columns in _blocks(models):
            mixed[first : first + size, columns] = (weights @ models[:, columns].double()).to(models.dtype)
    return mixed


def mean_model(models: Tensor) -> Tensor:
    """The plain mean; that of equal models is the model to the bit."""
    first = models[0]
    return first + (models - first).mean(dim=0)


def others_of(clients: Tensor, known: Tensor) -> Tensor:
    """Which models a client is compared with, [n, N]: those known of others; none for a client not known."""
    everyone = torch.arange(len(known), device=known.device)
    return (known > 0) & (known[clients] > 0)[:, None] & (clients[:, None] != everyone)


def two_groups(similarity: np.ndarray) -> np.ndarray:
    """Cut a group in two so that the largest similarity across the cut is as small as it can be.

    That is single linkage: the weakest edge of a maximum spanning tree is cut. True marks the side without
    the first member.

    >>> two_groups(np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])).tolist()
    [False, False, True]
    """
    members = len(similarity)
    inside = np.zeros(members, dtype=bool)
    inside[0] = True
    nearest, parent = similarity[0].copy(), np.zeros(members, dtype=np.int64)
    edges: list[tuple[float, int]] = []
    for _ in range(members - 1):  # Prim: the member most like one of those inside comes in
        new = int(np.argmax(np.where(inside, -np.inf, nearest)))
        edges.append((float(nearest[new]), new))
        inside[new] = True
        closer = ~inside & (similarity[new] > nearest)
        nearest[closer], parent[closer] = similarity[new][closer], new
    side = np.zeros(members, dtype=bool)
    cut = min(range(len(edges)), key=lambda place: edges[place][0])
    side[edges[cut][1]] = True
    for _, new in edges[cut + 1 :]:  # a member comes in after its parent
        side[new] = side[parent[new]]
    return side


def _blocks(models: Tensor) -> Iterator[slice]:
    """Columns such that all models' numbers in them fit into a block."""
    width = max(1, BLOCK // max(1, len(models)))
    for first in range(0, models.shape[1], width):
        yield slice(first, first + width)
