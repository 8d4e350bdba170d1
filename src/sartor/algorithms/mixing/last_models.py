"""What methods share whose server keeps every client's last model: that record, training near a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sartor.client.local import Client
from sartor.federation.exchange import Replies, Reply, changes
from sartor.federation.federation import Federation
from sartor.model.batch import Batch


@dataclass(frozen=True)
class Models:
    """The last model of every client that the server knows, [N, d], and whether it has trained at all."""

    models: Tensor
    known: Tensor

    @staticmethod
    def initial(federation: Federation) -> dict[str, Any]:
        """Everyone has the initial model, and nobody has trained."""
        w = federation.initial()
        return {"models": w.expand(federation.clients, -1).clone(), "known": w.new_zeros(federation.clients)}

    def received(self, replies: Replies) -> dict[str, Any]:
        """The same with the models ``w`` of those who answered.

        A model that the experiment's rule would not use is not known: it is no other's, and has no others.
        """
        clients = torch.as_tensor(replies.clients, device=self.models.device)
        return {
            "models": self.models.index_copy(0, clients, replies["w"]),
            "known": self.known.index_copy(0, clients, replies.trusted("w").to(self.known.dtype)),
        }


class Near(Protocol):
    """Hyper-parameters that say where training near a target starts."""

    @property
    def lr(self) -> float:
        """Local learning rate."""

    @property
    def start(self) -> str:
        """``w``: at the client's own model; else at the target."""


@changes(w="target")
def near_target(client: Client, hyper: Near, target: Tensor, pull: Tensor, w_i: Tensor) -> Reply:
    """K_i steps on f_i(w) + pull/2 ‖w − target‖², from the client's own model or from the target."""

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch) + pull * (y - target)  # DiversiFed's (7)

    y = client.descend(w_i if hyper.start == "w" else target, direction, lr=hyper.lr)
    return Reply(w=y).keep(w_i=y)
