"""Ditto (Li et al. 2021): a personal model beside the global one, held near to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.client.settings import Local
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class DittoHyper(Hyper):
    """Ditto's hyper-parameters."""

    lam: float = setting(1.0, "pull of the personal model towards the global one", symbol="λ", low=0)
    personal_lr: float | None = setting(
        None, "learning rate of the personal model; not set: `lr`", symbol="η_p", low=0
    )
    personal_epochs: int = setting(0, "epochs of the personal model; 0: as many steps as the global", low=0)


def local_training(client: Client, hyper: DittoHyper, w: Tensor, v_i: Tensor, trained: Tensor) -> Reply:
    """FedAvg's training from w, then v ← v − η_p (g_i(v) + λ (v − w)) with the w that was received.

    ``v_i`` is the personal model with its own float buffers behind it: the two models' statistics are apart.
    """
    size = client.task.size
    y = client.descend(w, lr=hyper.lr)  # step 2
    buffers = client.buffers
    if buffers is not None:
        client.buffers = v_i[size:]

    def direction(v: Tensor, batch: Batch) -> Tensor:
        return client.grad(v, batch) + hyper.lam * (v - w)  # step 3

    rate = hyper.or_lr(hyper.personal_lr)
    v = client.descend(v_i[:size], direction, lr=rate, epochs=hyper.personal_epochs or None)
    v = v if client.buffers is None else torch.cat([v, client.buffers])
    client.buffers = buffers
    trained = torch.where(client.steps() > 0, torch.ones_like(trained), trained)
    return Reply(delta=y - w).keep(v_i=v, trained=trained)


@personal
def personal_model(client: Client, hyper: DittoHyper, w: Tensor, v_i: Tensor, trained: Tensor) -> Reply:
    """v_i with its buffers; a client that never trained has the global model."""
    size = client.task.size
    if client.buffers is not None:
        client.buffers = torch.where(trained > 0, v_i[size:], client.buffers)
    return Reply(w=torch.where(trained > 0, v_i[:size], w))


@register
class Ditto(Algorithm[DittoHyper, Server]):
    """FedAvg, and at every client a personal model v_i trained on f_i(v) + λ/2 ‖v − w‖².

    Variant: the paper's algorithm 1 with the pull towards the w that was received, not the one trained
    locally from it. Both models see the same batches, as in the authors' code; changes are weighed by
    samples, so that w is FedAvg's for every λ, and v_i is Separate's for λ = 0. v_i starts at the initial
    model and moves only in rounds in which its client takes part. Evaluated: v_i after its last local
    training (personal) and w (shared); a newcomer has w.
    """

    name = "ditto"
    sums_only = True
    family = "personal"
    paper = "Li et al. 2021"
    server_keeps = "w"
    client_keeps = "v_i, with float buffers"
    traffic = "1 / 1"

    def gradients(self, local: Local, n: Any) -> Any:
        """Those of the global model and of the personal one."""
        epochs = self.hyper.personal_epochs
        own = replace(local, epochs=epochs, partial=0.0, steps=0) if epochs else local
        return super().gradients(local, n) + super().gradients(own, n)

    def start(self, federation: Federation) -> Server:
        """The initial model, for the server and for every client."""
        w = federation.initial()
        federation.declare(v_i=torch.cat([w, federation.initial_buffers()]), trained=w.new_zeros(()))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Both trainings at the cohort, then the weighted mean of the changes of w."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 4

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The client's v_i, or w where it never trained."""
        return Call(personal_model, shared={"w": server.w})
