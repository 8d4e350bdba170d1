"""FML (Shen et al. 2020): every client's own model and a shared one, the meme, teach each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.own_models.mutual import divergence, passes
from sartor.algorithms.references.separate import own_model
from sartor.algorithms.split_models.prototypes import need_classes
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting


@dataclass(frozen=True)
class FMLHyper(Hyper):
    """FML's hyper-parameters."""

    alpha: float = setting(
        0.5, "weight of the labels in the own model's loss; the rest is the meme's", symbol="α", low=0, high=1
    )
    beta: float = setting(
        0.5, "weight of the labels in the meme's loss; the rest is the own model's", symbol="β", low=0, high=1
    )


def local_training(client: Client, hyper: FMLHyper, w: Tensor, w_i: Tensor) -> Reply:
    """K_i steps of both models; the meme's change goes back, the own model stays."""
    size, alpha, beta = client.task.size, hyper.alpha, hyper.beta

    def direction(y: Tensor, batch: Batch) -> Tensor:
        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            own, meme = passes(client, y[:size], y[size:], batch)
            labels = client.task.loss_function(own.outputs, batch.y)
            losses = alpha * labels + (1 - alpha) * divergence(meme.outputs, own.outputs)
            labels = client.task.common.loss_function(meme.outputs, batch.y)
            losses = losses + (beta * labels + (1 - beta) * divergence(own.outputs, meme.outputs))
            return batch.mean(losses), own

        return client.differentiate(objective, y)[0]

    y = client.descend(torch.cat([w_i, w]), direction, lr=hyper.lr, apart=(size, len(w)))
    return Reply(delta=y[size:] - w).keep(w_i=y[:size])


@register
class FML(Algorithm[FMLHyper, Server]):
    """Clients keep models of their own and exchange a small shared one; both learn from each other.

    ``[model]`` is the meme, which all clients train and the server averages; a client's own model is that of
    its entry in ``[[models]]``, and never leaves it. Variant: each model follows the gradient of its own loss
    alone, the other's scores being constant; the memes' changes are averaged with the weights p'_i. Float
    buffers are frozen. Evaluated: the client's own model (personal) and the meme (shared). A newcomer's own
    model is the initial one.
    """

    name = "fml"
    sums_only = True
    family = "personal"
    paper = "Shen et al. 2020"
    server_keeps = "the meme w"
    client_keeps = "its model"
    traffic = "meme / meme"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    buffers = "freeze"
    own_models = True

    def start(self, federation: Federation) -> Server:
        """The initial meme; every client starts from the initial model of its group."""
        need_classes(federation, self.name)
        federation.declare(w_i=federation.initial_models())
        return Server(federation.initial())

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Mutual training at the cohort, then the weighted mean of the memes' changes."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model)
