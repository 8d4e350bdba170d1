"""Whether a loss that is one number for a batch is the mean of its samples' losses.

Weights of classes, targets that are ignored and overlaps of whole batches make it another number, but only
where targets differ. So it is tried on pairs of samples with unlike targets and unlike losses, and on all of
them; what does not show there is not taken for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sartor import nests
from sartor.nests import Nest

MOST = 1024
"""Unlike targets that are tried, of every leaf."""
FEWEST = 32
"""Samples in the whole batch, so that a share of them is less than all."""
NUMBERS = 1 << 20
"""Numbers in outputs and targets of what is tried."""
COMMON = 16
"""Values that targets have most often, each of which is tried."""


def is_mean(loss: Callable[[Any, Any], Tensor], trials: Sequence[Any], y: Nest) -> bool:
    """Whether a loss is a mean over samples, by the outputs of some models for the same samples.

    ``y`` are all targets there are; each is tried with whatever outputs. False where that cannot be told.

    >>> y, outputs = torch.arange(6) % 3, torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.4, 0.3]])
    >>> weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 2.0]))
    >>> [is_mean(loss, [outputs], y) for loss in (torch.nn.CrossEntropyLoss(), weighted)]
    [True, False]
    """
    each = sum(leaf[:1].numel() for leaf in nests.leaves((trials[0], y)))
    most = min(max(NUMBERS // each, 4), MOST)
    y = unlike(y, most)
    held, length = nests.length(y), nests.length(trials[0])
    if held < 2:
        return False
    rows = torch.arange(min(max(held, FEWEST), most))
    order = torch.randperm(held, generator=torch.Generator().manual_seed(0))
    y = nests.rows(y, order[rows % held])
    told = torch.zeros(len(rows), dtype=torch.bool)
    for outputs in trials:
        given = nests.rows(outputs, (rows + rows // held) % length), y
        pairs = nests.mapped(lambda leaf: torch.stack([leaf[:-1], leaf[1:]], 1), given)
        try:
            whole, two = loss(*given), torch.vmap(loss)(*pairs).double()
            one = torch.vmap(lambda *single: loss(*nests.rows(single, None)))(*given)
        except Exception:  # it cannot be undone either
            return False
        if one.shape != rows.shape or two.shape != rows[1:].shape:
            return False
        tolerance = 64 * torch.finfo(one.dtype).eps
        one = one.double()
        size = (one[:-1].abs() + one[1:].abs()) / 2
        if not _equal(two, (one[:-1] + one[1:]) / 2, tolerance * size):
            return False
        if not _equal(whole.double(), one.mean(), tolerance * one.abs().mean()):
            return False
        differ = (one[:-1] - one[1:]).abs() > 16 * tolerance * size
        told[:-1] |= differ
        told[1:] |= differ
    return bool(told.all())


def unlike(y: Nest, most: int) -> Nest:
    """Targets that differ from each other, on the CPU: about so many by each leaf.

    One of every value where a target is one number, else those in which a common value occurs most and least.
    """
    found = torch.unique(torch.cat([_places(leaf, most) for leaf in nests.leaves(y)]))
    few = nests.mapped(lambda leaf: leaf[found.to(leaf.device)].cpu(), y)
    flat = torch.cat([leaf.reshape(len(found), -1).double() for leaf in nests.leaves(few)], 1)
    flat = flat.where(~flat.isnan(), torch.finfo(flat.dtype).max)
    return nests.rows(few, _firsts(torch.unique(flat, dim=0, return_inverse=True)[1]))


def _places(leaf: Tensor, most: int) -> Tensor:
    """Samples whose targets in this leaf are unlike."""
    flat = leaf.reshape(len(leaf), -1)
    if flat.is_floating_point():
        flat = flat.double()
    if flat.shape[1] == 1:
        values, inverse, counts = torch.unique(flat[:, 0], return_inverse=True, return_counts=True)
        common = counts.topk(min(COMMON, most, len(values))).indices
        return _firsts(inverse)[torch.cat([common.cpu(), _spread(len(values), most)])]
    spread = _spread(len(flat), min(most, max(NUMBERS // max(flat.shape[1], 1), 4)))
    part = flat[spread.to(flat.device)].cpu()
    values, counts = torch.unique(part, return_counts=True)
    common = values[counts.topk(min(COMMON, len(values))).indices]
    held = torch.stack([part.isnan().sum(1), *((part == value).sum(1) for value in common)])
    extreme = torch.cat([held.argmax(1), held.argmin(1), _spread(len(part), most)[: max(most // 2, 2)]])
    return spread[extreme]


def _spread(length: int, most: int) -> Tensor:
    """Places from the first to the last, at equal distances."""
    return torch.linspace(0, length - 1, min(length, most)).round().long()


def _firsts(group: Tensor) -> Tensor:
    """The first place of each group, on the CPU."""
    group = group.cpu()
    places = torch.full((int(group.max()) + 1,), len(group))
    return places.scatter_reduce(0, group, torch.arange(len(group)), "amin")


def _equal(value: Tensor, other: Tensor, within: Tensor) -> bool:
    """Whether numbers are equal but for so much, and not finite in the same places."""
    finite = other.isfinite()
    return torch.equal(value.isfinite(), finite) and bool(((value - other).abs() <= within)[finite].all())
