"""Where answers wait that arrive in the time of another exchange than their own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sartor.federation.exchange import NobodyAnswered, Replies
from sartor.federation.federation import Federation

Waiting = dict[str, dict[str, Tensor]]
"""Answers that have arrived and are not used yet, by what they are: ``loss``, ``trained`` or ``gradient``."""


class Inbox:
    """Answers of any exchange and age; each is used when it is its exchange's turn."""

    def __init__(self, federation: Federation, waiting: Waiting) -> None:
        self.federation, self.waiting = federation, dict(waiting)

    @property
    def clients(self) -> np.ndarray:
        """Whose answers are waiting."""
        waiting = [answers["clients"].cpu().numpy() for answers in self.waiting.values()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *waiting])

    def wait(self, within: float) -> None:
        """Take in whatever arrives within this time."""
        with suppress(NobodyAnswered):
            for replies in self.federation.arrivals(within=within):
                kind = next(name for name in ("loss", "trained", "gradient") if name in replies.values)
                new = {
                    **replies.values,
                    "clients": replies.index,
                    "began": self.federation.round - replies.age,
                }
                if kind == "trained":
                    new["start"] = replies.given["w"]
                old = self.waiting.get(kind, {})
                self.waiting[kind] = {
                    name: torch.cat([old[name], value]) if old else value for name, value in new.items()
                }

    def take(self, kind: str) -> Replies | None:
        """The answers of one kind, in the order of the clients' numbers; None where there are none."""
        if kind not in self.waiting:
            return None
        values = self.waiting.pop(kind)
        order = values["clients"].argsort()
        values = {name: value[order] for name, value in values.items()}
        clients, began = (values.pop(name).cpu().numpy() for name in ("clients", "began"))
        federation, counts = self.federation, self.federation.sizes[clients].cpu().numpy()
        ages = federation.round - began
        replies = Replies(clients, counts, values, order.device, federation.task.dtype, ages)
        return replace(replies, reducer=federation.reducer)
