"""FSVRG (Konečný et al. 2016): federated SVRG, scaled for features that few clients or samples have."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import ASKS_EVERYONE, SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.variance_reduction.mime import gradient_at
from sartor.client.local import Client, require_plain_sgd
from sartor.federation.exchange import NobodyAnswered, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.settings import setting

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FSVRGHyper(Hyper):
    """FSVRG's hyper-parameters."""

    lr: float = setting(1.0, "step of a round; each of T_k local steps takes h / T_k", symbol="h", low=0)
    scaled: bool = setting(True, "scale by feature frequencies, where the model is linear in raw features")


@dataclass(frozen=True)
class FSVRGServer(Server):
    """The global model and, for scaled ones, which client has which feature at all."""

    present: Tensor | None = None


def feature_counts(client: Client, hyper: FSVRGHyper, zero: Tensor) -> Reply:
    """n_k^j: how many of the client's samples have feature j, that is, have it other than zero."""

    def add(counts: Tensor, batch: Batch) -> Tensor:
        present: Tensor = (batch.x.flatten(1) != 0).to(counts.dtype)
        return counts + (present.sum(0) if batch.weight is None else batch.weight @ present)

    return Reply(counts=client.scan(add, zero, client.batches(epochs=1)))


def scaling(client: Client, hyper: FSVRGHyper, counts: Tensor, frequency: Tensor) -> Reply:
    """S_k: s_k^j = φ^j / φ_k^j, 1 for a feature that the client does not have."""
    own = counts / client.n.clamp(min=1)
    return Reply().keep(s_k=torch.where(counts > 0, frequency / own, torch.ones_like(own)))


def anchored_descent(client: Client, w: Tensor, g: Tensor, scale: Tensor | float, rate: Tensor) -> Tensor:
    """Local steps of SVRG from w, which is their anchor: both gradients are of the same batch."""

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return scale * (client.grad(y, batch) - client.grad(w, batch, track=False)) + g  # step 2

    return client.descend(w, direction, lr=rate)


def plain_training(
    client: Client, hyper: FSVRGHyper, w: Tensor, g: Tensor, scale: Tensor | float = 1.0
) -> Reply:
    """One step of SVRG per batch, anchored at w."""
    rate = hyper.lr / client.steps().clamp(min=1).to(w.dtype)  # h_k = h / T_k
    return Reply(delta=anchored_descent(client, w, g, scale, rate) - w)


def scaled_training(client: Client, hyper: FSVRGHyper, w: Tensor, g: Tensor, s_k: Tensor) -> Reply:
    """The same, with every feature's steps scaled to its frequency everywhere."""
    return plain_training(client, hyper, w, g, client.task.by_feature(s_k))


def exchange_counts(federation: Federation, name: str, symbol: str) -> Tensor | None:
    """Have every client keep its scaling ``s_k``; returns which client has which feature, ``[N, features]``.

    None for a model that has no raw features, which the log says. Who does not answer keeps a scaling of 1
    and counts as having every feature: where nobody does, A is 1.
    """
    task = federation.task
    features = task.raw_features
    if features is None:
        log.warning("%s: model %s is not linear in raw features: %s and A are 1", name, task.name, symbol)
        return None
    zero = federation.initial().new_zeros(features)
    federation.declare(s_k=torch.ones_like(zero))
    present = federation.table(features, fill=True, dtype=torch.bool)
    try:
        replies = federation.map(feature_counts, np.arange(federation.clients), {"zero": zero})
        present[replies.clients] = replies["counts"] > 0
        frequency = replies.sum("counts") / replies.n.sum().clamp(min=1)  # φ^j = n^j / n
        federation.map(scaling, replies.clients, {"frequency": frequency}, {"counts": replies["counts"]})
    except NobodyAnswered:
        log.warning(
            "%s: nobody answered when feature counts were exchanged: unknown %s and A are 1", name, symbol
        )
    return present


def aggregation_scale(task: Task, holders: Tensor, clients: int) -> Tensor:
    """A as a vector like w, from how many of these clients have each feature: 1 where none has it."""
    a = torch.where(holders > 0, clients / holders.clamp(min=1).to(task.dtype), 1)
    return task.by_feature(a)


@register
class FSVRG(Algorithm[FSVRGHyper, FSVRGServer]):
    """SVRG at the clients, with steps scaled for features that are rare or at few clients.

    Variant: FSVRG with mini-batches, h_k = h / T_k for T_k local steps. The scalings S_k and A are for models
    that are one linear layer on raw features; for others they are the identity, which the log says once.
    Frequencies φ^j are those over all clients, exchanged once at the start; A counts the clients of the
    round. Who does not answer at the start has S_k = 1, and every feature as far as A goes. Biases have scale
    1, and weight decay stays outside of the scaled bracket. The paper has all clients in each round.
    Evaluated: w after aggregation. Traffic: w, then w and G down; ∇f_k(w), then the change up; at the start
    one number per feature each way.
    """

    name = "fsvrg"
    sums_only = True
    family = "global"
    paper = "Konečný et al. 2016"
    server_keeps = "w, which client has which feature"
    client_keeps = "scaling S_k of the features"
    traffic = "3 / 2, in two exchanges"
    unprotected = (("central", ASKS_EVERYONE), ("samples", SEES_SAMPLES))
    refuses = (("augment", "corrects by gradients over the samples as they are"),)

    def exchanges(self) -> int:
        """Gradients first, then training."""
        return 2

    def start(self, federation: Federation) -> FSVRGServer:
        """The initial model; the clients' feature counts are exchanged."""
        require_plain_sgd(federation.local, self.name)
        present = exchange_counts(federation, self.name, "S") if self.hyper.scaled else None
        return FSVRGServer(federation.initial(), present)

    def round(self, server: FSVRGServer, federation: Federation, cohort: np.ndarray) -> FSVRGServer:
        """The gradients at w, then local training with their mean, then the scaled step."""
        first = federation.map(gradient_at, cohort, {"w": server.w}, fold=["gradient"])
        g = first.mean("gradient") if first.counts.any() else torch.zeros_like(server.w)  # step 1
        training = plain_training if server.present is None else scaled_training
        second = federation.map(training, first.clients, {"w": server.w, "g": g}, fold=["delta"])  # step 2
        if not second.counts.any():
            return server
        delta = second.mean("delta")
        if server.present is not None:
            holders = server.present[second.clients].sum(dim=0)  # ω^j
            delta = aggregation_scale(federation.task, holders, len(second)) * delta
        return replace(server, w=server.w + delta)  # step 3
