"""Gradients that tell little of any one sample: DP-SGD (Abadi et al. 2016) inside a client's local loop.

Every sample's gradient is scaled down to a norm of C, they are added up, and noise of deviation z·C is added
before the sum is divided by the number of samples. Each batch is drawn anew among all of the client's
samples, so many of them, which is what the account goes by. A method that trains that way is handed a
:class:`Covered` batch, of which it can have such a gradient and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sartor import nests, random
from sartor.errors import SettingError
from sartor.model.batch import Batch
from sartor.model.layers import Frozen
from sartor.model.task import Task

SECRET = int.from_bytes(os.urandom(7), "little")
"""What noise is drawn from where it is not to follow from the seed: this process's own."""
PURPOSE = 0x6E6F697365
"""Sets the noise of a batch apart from what else is drawn for it."""


@dataclass(frozen=True)
class SampleNoise:
    """How gradients are noised."""

    clip: float
    noise: float
    """Its deviation as a multiple of ``clip``."""
    secret: int | None = None
    """What noise is drawn from besides the seed."""


class Covered:
    """A batch whose samples are seen through noised gradients alone."""

    def __init__(self, batch: Batch, descent: int, only: Tensor | None = None) -> None:
        self._batch, self._descent, self._only = batch, descent, only
        self.taken = 0
        """How many gradients were taken of it."""

    def next_key(self, secret: int | None) -> int | Tensor:
        """A key of its own for every gradient of every batch of every descent of a round."""
        key: int | Tensor = random.fold(self._batch.key, PURPOSE)
        for value in (self._descent, self.taken, secret or 0):
            key = random.fold(key, value)
        self.taken += 1
        return key

    def __getattr__(self, name: str) -> NoReturn:
        raise unseen("looks at the samples of a batch")


def unseen(what: str) -> SettingError:
    """The error where a method would see samples past the noise."""
    return SettingError(
        f"privacy.mode = 'samples': the method {what}, which noised gradients do not cover; take one of "
        "those that `sartor algorithms --private samples` lists"
    )


def noised_gradient(
    task: Task, w: Tensor, covered: Covered, buffers: Tensor | None, frozen: Frozen, noise: SampleNoise
) -> Tensor:
    """(Σ_j min(1, C / ‖g_j‖) g_j + N(0, (z C)²)) / B; what does not move has no part in a gradient."""
    batch, only, key = covered._batch, covered._only, covered.next_key(noise.secret)
    count = nests.length(batch.y)

    def of_one(x: Any, y: Any, place: Tensor) -> Tensor:
        x, y = nests.mapped(lambda leaf: leaf[None], (x, y))
        drawn = random.fold(batch.key, place)  # what layers draw is each sample's own
        gradient, _ = task.grad_and_buffers(w, Batch(x, y, None, drawn), buffers, frozen)
        gradient = gradient if only is None else torch.where(only, gradient, 0)
        norm: Tensor = torch.linalg.vector_norm(gradient)
        bounded = torch.where(norm > noise.clip, gradient * (noise.clip / norm), gradient)
        return torch.where(norm.isfinite(), bounded, 0.0)  # else one sample could be seen

    rows: Tensor = torch.vmap(of_one)(batch.x, batch.y, torch.arange(count, device=w.device))
    total = rows.sum(dim=0) if batch.weight is None else batch.weight @ rows
    if noise.noise:
        drawn = random.normal(key, w.numel(), w.device).to(w.dtype)
        total = total + noise.noise * noise.clip * drawn
    return total / batch.size
