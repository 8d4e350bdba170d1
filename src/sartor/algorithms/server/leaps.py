"""Leaps of LGA and PLGA: what a straggler's model would be by now, guessed from its last upload.

Equation numbers are those of "Personalized Heterogeneous FL with Gradient Similarity".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.federation.exchange import Replies
from sartor.model.parts import Part


@dataclass(frozen=True)
class Uploads:
    """Of every client's last upload: where it started, the global model after that, its update; [N, d]."""

    start: Tensor
    after: Tensor
    update: Tensor
    known: Tensor
    """Whether there is one, [N]."""

    @staticmethod
    def none(clients: int, w: Tensor) -> Uploads:
        """Those of clients that have uploaded nothing."""
        rows = w.new_zeros(clients, len(w))
        return Uploads(rows, rows, rows, torch.zeros(clients, dtype=torch.bool, device=w.device))

    def rows(self, clients: Tensor) -> Uploads:
        """Those of some clients."""
        return Uploads(self.start[clients], self.after[clients], self.update[clients], self.known[clients])

    def received(self, replies: Replies, history: dict[int, Tensor], now: int) -> Uploads:
        """The last uploads with those that arrived; w^{t1} of who is in time is not known yet."""
        clients = replies.index
        after = [history[min(now, now - age + 1)] for age in replies.ages.tolist()]
        return Uploads(
            self.start.index_copy(0, clients, replies.given["w"]),
            self.after.index_copy(0, clients, torch.stack(after)),
            self.update.index_copy(0, clients, replies["delta"]),
            self.known.index_fill(0, clients, True),
        )


def agreement(uploads: Uploads, stages: list[Part]) -> dict[str, Tensor]:
    """S̄ = e^S / (e + e^S) (9)(13) with S the cosine between the server's step after t0 and the upload (8).

    S̄ lies between 1 / (1 + e²) and 1/2. A step of length 0 has S = 0.
    """
    result = {}
    for stage in stages:
        step, update = stage.take(uploads.after - uploads.start), stage.take(uploads.update)
        sizes = torch.linalg.vector_norm(step, dim=1) * torch.linalg.vector_norm(update, dim=1)
        cosine = torch.where(sizes > 0, (step * update).sum(dim=1) / sizes, 0.0).clamp(-1, 1)
        result[stage.name] = torch.sigmoid(cosine - 1)
    return result


def leap(uploads: Uploads, agreed: Tensor, w: Tensor, base: str, compensation: str) -> Tensor:
    """ŵ_k − w^τ of stragglers, [m, d] (10)(11); ``agreed`` is S̄ for every entry of the models."""
    u = uploads.update
    sign = {"printed": 1.0, "dc-asgd": -1.0, "none": 0.0}[compensation]
    change = sign * agreed * u * u * (w - uploads.after) + u
    return change if base == "current" else uploads.start - w + change
