"""Some samples of a client, and what a pass over them gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from sartor import nests
from sartor.nests import Nest


class Batch(NamedTuple):
    """Some samples of one client: inputs and targets, nests of tensors.

    ``weight`` is 1 for a real sample and 0 for padding; None when all are real. ``importance`` is how much a
    sample counts, 1 on average over a client's training samples; None when all count the same.
    """

    x: Nest
    y: Nest
    weight: Tensor | None = None
    key: Tensor | int = 0
    importance: Tensor | None = None

    @property
    def size(self) -> Tensor | int:
        """The number of real samples."""
        return nests.length(self.y) if self.weight is None else self.weight.sum()

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the real samples of a quantity that has one entry per sample, by their importance."""
        if self.importance is not None:
            values = values * self.importance.to(values.dtype)
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum()


class Mixed(NamedTuple):
    """Targets of samples that are mixed of two, and the share of the first; a row each."""

    one: Nest
    other: Nest
    share: Tensor


class Pass(NamedTuple):
    """What a pass over a batch in training mode gives; no features where no head is declared."""

    outputs: Any
    features: Tensor | None
    buffers: Tensor | None
