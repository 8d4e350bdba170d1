"""What a step of local training is made of: the optimiser of the settings, and parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sartor import nests, random
from sartor.model.batch import Batch
from sartor.model.optimizers import Optimizer, adagrad, adam, chain, clip, decay, momentum

if TYPE_CHECKING:
    from sartor.client.settings import Local


def optimizer_of(local: Local, apart: Sequence[int] = ()) -> Optimizer:
    """The local optimiser: clipping, weight decay, then momentum, Adam or Adagrad; AdamW decays at the end.

    ``apart`` are the lengths of models that lie one behind the other, each with a norm of its own.
    """
    first, second = local.momentum, local.epsilon
    cut = [clip(local.clip, tuple(apart))] if local.clip else []
    decayed = [decay(local.weight_decay)] if local.weight_decay else []
    if local.optimizer == "adagrad":
        return chain(*cut, *decayed, adagrad(first, second or 1e-10))
    if local.optimizer == "sgd":
        moved = [momentum(first, nesterov=local.nesterov)] if first else []
        return chain(*cut, *decayed, *moved)
    moments = adam(first or 0.9, local.beta2, second or 1e-8, corrected=True)
    if local.optimizer == "adamw":
        return chain(*cut, moments, *decayed)
    return chain(*cut, *decayed, moments)


def parts(batch: Batch, size: int) -> list[tuple[Tensor | float, Batch]]:
    """A batch in parts of at most so many samples, each with its share of the real ones.

    The mean of a quantity over the batch is the sum of its means over the parts, times their shares. A part
    without a real sample has a share of 0, and weights under which its own mean is a number.
    """
    length = nests.length(batch.y)
    if length <= size:
        return [(1.0, batch)]
    found: list[tuple[Tensor | float, Batch]] = []
    for place, first in enumerate(range(0, length, size)):
        rows = slice(first, min(first + size, length))
        x, y = nests.rows((batch.x, batch.y), rows)
        # The first part draws what the batch would, as a client whose batch is not divided does.
        key = random.stream(0, "micro", batch.key, place) if place else batch.key
        share: Tensor | float = (rows.stop - rows.start) / length
        weight = batch.weight
        if weight is not None:
            whole, weight = weight.sum(), weight[rows]
            share = weight.sum() / whole
            weight = torch.where(share > 0, weight, 1.0)
        importance = None if batch.importance is None else batch.importance[rows]
        found.append((share, Batch(x, y, weight, key, importance)))
    return found


def kept(share: Tensor | float, after: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Buffers after a part of a batch: those before it where it had no real sample."""
    if after is None or before is None or isinstance(share, float):
        return after
    return torch.where(share > 0, after, before)
