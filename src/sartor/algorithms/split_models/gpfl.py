"""GPFL (Zhang et al. 2023): features are made general and personal at once, by embeddings of the classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor import random
from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.linear_heads import affine, linear_head, linear_layer, normalised
from sartor.algorithms.split_models.prototypes import class_counts
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting

TINY = 1e-24
"""The square below which the distance to the embeddings has no gradient."""


@dataclass(frozen=True)
class GPFLHyper(Hyper):
    """GPFL's hyper-parameters."""

    lam: float = setting(1.0, "pull of general features to their class's embedding", symbol="λ", low=0)
    mu: float = setting(0.0, "weight decay of embeddings and valve", symbol="μ", low=0)


@dataclass(frozen=True)
class GPFLServer(Server):
    """The model, whose head is the initial one and stays so; the embeddings, and the valve's parameters."""

    embeddings: Tensor
    valve: Tensor


def passed(valve: Tensor, z: Tensor, context: Tensor) -> Tensor:
    """The conditional valve: ReLU(z (1 + γ) + β), both a linear layer, ReLU and LayerNorm of the context."""
    half, size = len(valve) // 2, z.shape[1]

    def condition(vector: Tensor) -> Tensor:
        scale, shift = vector[-2 * size :].view(2, size)
        return normalised(affine(vector[: -2 * size], context, size).relu(), scale, shift)

    return (z * (condition(valve[:half]) + 1) + condition(valve[half:])).relu()


def contexts(client: Client, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """The plain mean of the embeddings, and their mean by the client's shares of the classes."""
    share = class_counts(client, len(embeddings)) / client.n.clamp(min=1)
    return embeddings.mean(dim=0), share @ embeddings


def local_training(
    client: Client, hyper: GPFLHyper, body: Tensor, embeddings: Tensor, valve: Tensor, p_i: Tensor
) -> Reply:
    """K_i steps of body, personal head, embeddings and valve."""
    task, classes, size = client.task, len(embeddings), client.task.size
    general, own = contexts(client, embeddings)
    head = task.part("head")

    def direction(y: Tensor, batch: Batch) -> Tensor:
        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y[:size], batch)
            z = task.noted_features(run).flatten(1)
            learnt, gate = y[size : size + embeddings.numel()], y[size + embeddings.numel() :]
            scores = affine(head.take(y[:size]), passed(gate, z, own), classes)
            common = passed(gate, z, general)
            cosines = F.normalize(common) @ F.normalize(learnt.view_as(embeddings)).T
            losses = task.loss_function(scores, batch.y) + task.loss_function(cosines, batch.y)
            squares = ((common - embeddings[batch.y]) ** 2).sum(dim=1)
            total = squares.sum() if batch.weight is None else batch.weight @ squares
            return batch.mean(losses) + hyper.lam * total.clamp(min=TINY).sqrt(), run

        g = client.differentiate(objective, y)[0]
        return g + torch.cat([torch.zeros_like(y[:size]), hyper.mu * y[size:]])

    model = head.put(task.part("body").put(body.new_zeros(size), body), p_i)
    y = client.descend(torch.cat([model, embeddings.flatten(), valve]), direction, lr=hyper.lr)
    learnt, gate = y[size : size + embeddings.numel()], y[size + embeddings.numel() :]
    reply = Reply(
        delta=task.part("body").take(y[:size]) - body,
        embeddings=learnt.view_as(embeddings) - embeddings,
        valve=gate - valve,
    )
    return reply.keep(p_i=head.take(y[:size]))


@personal
def own_head(
    client: Client, hyper: GPFLHyper, w: Tensor, embeddings: Tensor, valve: Tensor, p_i: Tensor
) -> Reply:
    """Predict by the personal head on personal features."""
    task, buffers = client.task, client.buffers
    _, own = contexts(client, embeddings)

    def predict(x: Tensor) -> Tensor:
        z = task.features(w, x, buffers).flatten(1)
        return affine(p_i, passed(valve, z, own), len(embeddings))

    return Reply(w=predict, head=p_i)


@register
class GPFL(Algorithm[GPFLHyper, GPFLServer]):
    """Embeddings of the classes guide features that are common, and open the way to those of the client.

    Variant: the authors' code, whose loss has three terms: the personal head's, the cosines to the
    embeddings, and λ times the distance of a batch's general features to the received embeddings of their
    classes, which is the root of the sum over the batch. Conditions are made of the received embeddings. The
    head must be one linear layer. Evaluated: the personal head of the client's last training on personal
    features of the aggregated body, valve and embeddings; a newcomer has the initial head and its own shares
    of the classes.
    """

    name = "gpfl"
    sums_only = True
    family = "personal"
    paper = "Zhang et al. 2023"
    server_keeps = "body, embeddings of the classes, conditional valve"
    client_keeps = "personal head"
    traffic = "|body| + |embeddings| + |valve| / the same"
    unprotected = (("samples", SEES_SAMPLES),)
    refuses = (
        ("micro", "takes the root of a sum over a whole batch"),
        ("mixup", "compares features with the embedding of a sample's class"),
    )

    def start(self, federation: Federation) -> GPFLServer:
        """The initial model; embeddings and valve drawn by the seed."""
        classes, size = linear_head(federation, self.name)
        w = federation.initial()
        federation.declare(p_i=federation.task.part("head").take(w))
        draws = random.normal(federation.stream("embeddings"), classes * size, w.device)
        norm = torch.cat([w.new_ones(size), w.new_zeros(size)])
        halves = [torch.cat([linear_layer(federation, name, size, size), norm]) for name in ("γ", "β")]
        return GPFLServer(w, draws.view(classes, size).to(w.dtype), torch.cat(halves))

    def round(self, server: GPFLServer, federation: Federation, cohort: np.ndarray) -> GPFLServer:
        """Local training at the cohort, then the weighted means of all that is shared."""
        body = federation.task.part("body")
        sent = {"body": body.take(server.w), "embeddings": server.embeddings, "valve": server.valve}
        replies = federation.map(local_training, cohort, sent, fold=["delta", "embeddings", "valve"])
        return replace(
            server,
            w=body.put(server.w, sent["body"] + replies.mean("delta")),
            embeddings=server.embeddings + replies.mean("embeddings"),
            valve=server.valve + replies.mean("valve"),
        )

    def shared(self, server: GPFLServer) -> None:
        """A body alone is no model."""

    def personalize(self, server: GPFLServer, cohort: np.ndarray) -> Call:
        """The client's head on its personal features."""
        return Call(own_head, {"w": server.w, "embeddings": server.embeddings, "valve": server.valve})
