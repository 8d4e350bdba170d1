"""How a learning rate changes: from round to round, or from step to step of a client's training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rate at time t = 0, 1, 2, …: rounds or steps.

    It rises evenly over the first ``warmup`` of them. From then on it is constant, falls by ``factor`` after
    ``every`` of them, or falls along half a cosine to ``end``, which it has after ``length`` of them.
    """

    kind: str = "constant"
    every: int = 1
    factor: float = 1.0
    end: float = 0.0
    warmup: int = 0

    def at(self, t: Tensor, length: int | Tensor) -> Tensor:
        """The factor at these times, in float64.

        >>> Schedule("cosine", end=0.2, warmup=2).at(torch.arange(6), 6).tolist()[:3]
        [0.5, 1.0, 1.0]
        """
        t = t.double()
        since = (t - self.warmup).clamp(min=0)
        factor = torch.ones_like(t)
        if self.kind == "step":
            factor = torch.pow(torch.full_like(t, self.factor), torch.floor(since / self.every))
        elif self.kind == "cosine":
            # A length may be a number of each client, as steps are.
            span = (torch.zeros_like(t) + length - self.warmup).clamp(min=1)
            down = torch.cos(math.pi * (since / span).clamp(max=1))
            factor = self.end + (1 - self.end) * (1 + down) / 2
        return factor * ((t + 1) / self.warmup).clamp(max=1) if self.warmup else factor
