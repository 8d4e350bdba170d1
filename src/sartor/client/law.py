"""How much a client trains in a round, where that differs from client to client and from round to round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor import random


@dataclass(frozen=True)
class Law:
    """Epochs that are drawn for each client and round: from ``least`` to ``most``, all alike.

    Of the clients the share ``partial`` does less than that, any number from 1 on alike.
    """

    least: int
    most: int
    partial: float = 0.0

    @property
    def mean(self) -> float:
        """The epochs to be expected."""
        whole = range(self.least, self.most + 1)
        return sum((1 - self.partial) * e + self.partial * max(e / 2, 1) for e in whole) / len(whole)

    def epochs(self, seed: int | Tensor, round: Tensor, number: Tensor) -> Tensor:
        """The epochs of clients in their rounds: the same integers on every device.

        >>> Law(2, 5).epochs(0, torch.tensor(1), torch.arange(8)).tolist()
        [2, 4, 3, 5, 4, 2, 2, 3]
        """
        key = random.stream(seed, "epochs", round, number)
        draws = [random.uniform(random.fold(key, place), 1, number.device) for place in range(3)]
        spread, who, cut = (draw.view(number.shape) for draw in draws)
        drawn = self.least + (spread * (self.most - self.least + 1)).long()
        fewer = 1 + (cut * (drawn - 1)).long()
        return torch.where((who < self.partial) & (drawn > 1), fewer, drawn)
