"""FedCP (Zhang et al. 2023): a policy parts every sample's features between a personal and a global head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.linear_heads import affine, linear_head, linear_layer, normalised
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting

BANDWIDTHS = (10, 15, 20, 50)
"""Of the Gaussian kernels in the discrepancy, as in the authors' code."""


@dataclass(frozen=True)
class FedCPHyper(Hyper):
    """FedCP's hyper-parameters."""

    lam: float = setting(1.0, "weight of the discrepancy to the global features", symbol="λ", low=0)


@dataclass(frozen=True)
class FedCPServer(Server):
    """Body and global head as one model, and the policy's parameters."""

    policy: Tensor


def shares(policy: Tensor, z: Tensor, context: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
    """r and s = 1 − r: how much of each feature goes to the personal head and to the global one.

    The policy is a linear layer to twice the features, LayerNorm and ReLU; ``noise`` is Gumbel's.
    """
    size = z.shape[1]
    scale, shift = policy[-4 * size :].view(2, 2 * size)
    hidden = normalised(affine(policy[: -4 * size], z * context, 2 * size), scale, shift).relu()
    both = (hidden + noise).view(len(z), 2, size).softmax(dim=1)
    return both[:, 0], both[:, 1]


def context_of(head: Tensor, classes: int) -> Tensor:
    """The client's information: the sum of its head's rows, to unit length."""
    total = head[:-classes].view(classes, -1).sum(dim=0)
    length: Tensor = torch.linalg.vector_norm(total)
    return total / length.clamp(min=1e-12)


def discrepancy(x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """The mean discrepancy of two sets of features, over the real samples of a batch."""
    real = x.new_ones(len(x)) if weight is None else weight

    def mean(a: Tensor, b: Tensor) -> Tensor:
        squares = (a * a).sum(dim=1)[:, None] + (b * b).sum(dim=1) - 2 * a @ b.T
        kernels = sum((torch.exp(-0.5 * squares / width) for width in BANDWIDTHS), torch.zeros_like(squares))
        return real @ kernels @ real / real.sum() ** 2

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


def gumbel(key: int | Tensor, like: Tensor) -> Tensor:
    """Gumbel's noise for twice the features of every sample."""
    draws = random.uniform(key, 2 * like.numel(), like.device).clamp(min=2.0**-53)
    return -torch.log(-torch.log(draws)).to(like.dtype).view(len(like), -1)


def local_training(client: Client, hyper: FedCPHyper, w: Tensor, policy: Tensor, p_i: Tensor) -> Reply:
    """K_i steps of body, personal head and policy; the global head and the received body stay."""
    task, size, classes, received = client.task, len(w), client.task.classes or 0, client.buffers
    general = task.part("head").take(w)
    context, stream = context_of(p_i, classes), client.stream("policy")

    def direction(all_: Tensor, batch: Batch, turn: Tensor) -> tuple[Tensor, Tensor]:
        reference = task.features(w, batch.x, received).flatten(1)
        noise = gumbel(random.fold(stream, turn), reference)

        def objective(all_: Tensor) -> tuple[Tensor, Pass]:
            own, gate = all_[size : size + len(p_i)], all_[size + len(p_i) :]
            run = client.forward(all_[:size], batch)
            z = task.noted_features(run).flatten(1)
            r, s = shares(gate, z, context, noise)
            outputs = affine(own, r * z, classes) + affine(general, s * z, classes)
            loss = batch.mean(task.loss_function(outputs, batch.y))
            return loss + hyper.lam * discrepancy(z, reference, batch.weight), run

        return client.differentiate(objective, all_)[0], turn + 1

    start = torch.cat([w, p_i, policy])
    moving = torch.cat([task.part("body").mask(w), torch.ones_like(start[size:], dtype=torch.bool)])
    y, _ = client.descend_with(start, direction, torch.zeros_like(client.n), lr=hyper.lr, only=moving)
    own, gate = y[size : size + len(p_i)], y[size + len(p_i) :]
    model = task.part("head").put(y[:size], (own + general) / 2)
    model = torch.where(client.n > 0, model, w)  # without samples nothing is mixed in
    return Reply(delta=model - w, policy=gate - policy).keep(p_i=own)


@personal
def both_heads(client: Client, hyper: FedCPHyper, w: Tensor, policy: Tensor, p_i: Tensor) -> Reply:
    """Predict by both heads, each with the features that the policy gives it."""
    task, buffers, classes = client.task, client.buffers, client.task.classes or 0
    general, context = task.part("head").take(w), context_of(p_i, classes)

    def predict(x: Tensor) -> Tensor:
        z = task.features(w, x, buffers).flatten(1)
        r, s = shares(policy, z, context, 0.0)
        return affine(p_i, r * z, classes) + affine(general, s * z, classes)

    return Reply(w=predict, head=p_i)


@register
class FedCP(Algorithm[FedCPHyper, FedCPServer]):
    """A learned policy parts every feature of every sample between a personal head and the global one.

    Variant: the authors' code. The policy sees the features times the sum of the personal head's rows, and
    its softmax has Gumbel's noise in training; at prediction it has none here. A client sends the mean of
    its head and the global one. The head must be one linear layer. The received body's features, which the
    trained ones are held near to, are taken in evaluation mode. Evaluated: both heads with the aggregated
    body, global head and policy, and the client's head as its last training left it; a newcomer has the
    initial head.
    """

    name = "fedcp"
    sums_only = True
    family = "personal"
    paper = "Zhang et al. 2023"
    server_keeps = "w: body and global head; the policy"
    client_keeps = "personal head"
    traffic = "1 + |policy| / 1 + |policy|"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    refuses = (("micro", "compares the features of whole batches"),)

    def start(self, federation: Federation) -> FedCPServer:
        """The initial model, whose head everyone has; a policy drawn by the seed."""
        _, size = linear_head(federation, self.name)
        w = federation.initial()
        federation.declare(p_i=federation.task.part("head").take(w))
        norm = torch.cat([w.new_ones(2 * size), w.new_zeros(2 * size)])
        return FedCPServer(w, torch.cat([linear_layer(federation, "policy", size, 2 * size), norm]))

    def round(self, server: FedCPServer, federation: Federation, cohort: np.ndarray) -> FedCPServer:
        """Local training at the cohort, then the weighted means of models and policies."""
        sent = {"w": server.w, "policy": server.policy}
        replies = federation.map(local_training, cohort, sent, fold=["delta", "policy"])
        w, policy = server.w + replies.mean("delta"), server.policy + replies.mean("policy")
        return replace(server, w=w, policy=policy)

    def shared(self, server: FedCPServer) -> None:
        """The global head alone is no model: it has never seen whole features."""

    def personalize(self, server: FedCPServer, cohort: np.ndarray) -> Call:
        """Both heads and the policy."""
        return Call(both_heads, {"w": server.w, "policy": server.policy})
