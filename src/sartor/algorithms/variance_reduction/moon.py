"""MOON (Li et al. 2021): model-contrastive federated learning."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class MOONHyper(Hyper):
    """MOON's hyper-parameters."""

    mu: float = setting(1.0, "weight of the contrastive term", symbol="μ", low=0)
    temperature: float = setting(0.5, "temperature of the contrastive term", symbol="τ", above=0)


def contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """−log(e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})) of every sample.

    A softmax over two is a sigmoid of their difference, so this is softplus((cos_prev − cos_glob) / τ).
    """
    z, z_global, z_previous = (value.flatten(1) for value in (z, z_global, z_previous))
    gap = F.cosine_similarity(z, z_previous) - F.cosine_similarity(z, z_global)
    return F.softplus(gap / temperature)


def local_training(client: Client, hyper: MOONHyper, w: Tensor, previous: Tensor, seen: Tensor) -> Reply:
    """K_i steps on the loss plus μ times the contrastive term; the trained model is kept for next time."""
    received, task = client.buffers, client.task
    w_prev, b_prev = previous[: task.size], previous[task.size :]

    def direction(y: Tensor, batch: Batch) -> Tensor:
        z_global = task.features(w, batch.x, received)  # step 1: frozen, in evaluation mode
        z_previous = task.features(w_prev, batch.x, b_prev)  # step 1

        def penalty(z: Tensor) -> Tensor:
            return hyper.mu * seen * contrast(z, z_global, z_previous, hyper.temperature)  # step 2

        return client.grad(y, batch, penalty=penalty)

    y = client.descend(w, direction, lr=hyper.lr)
    previous = y if client.buffers is None else torch.cat([y, client.buffers])
    seen = torch.where(client.steps() > 0, torch.ones_like(seen), seen)
    return Reply(delta=y - w).keep(previous=previous, seen=seen)  # step 3


@register
class MOON(Algorithm[MOONHyper, Server]):
    """A contrastive term draws features towards the global model's and away from the client's last ones.

    Variant: the authors' code, with the features that go into the model's declared head. The projection head
    of the paper is part of the model: to have it, put a small network between body and output layer and
    declare the output layer as ``head``. The two models compared with are frozen, in evaluation mode and
    with the BatchNorm statistics of their time. A client that has not trained yet has no term. Evaluated: w
    after aggregation.
    """

    name = "moon"
    sums_only = True
    family = "global"
    paper = "Li et al. 2021"
    server_keeps = "w"
    client_keeps = "its last local model, with float buffers"
    traffic = "1 / 1"
    unprotected = (("samples", MORE_THAN_SAMPLES),)

    def start(self, federation: Federation) -> Server:
        """The initial model; nobody has trained yet."""
        task = federation.task
        task.part("head")  # an error that says how to declare it, before any training
        w = federation.initial()
        previous = torch.cat([w, federation.initial_buffers()])
        federation.declare(previous=previous, seen=w.new_zeros(()))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the weighted mean of the changes."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 4
