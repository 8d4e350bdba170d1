"""FedPAC (Xu et al. 2023): features drawn to common prototypes, and for each client its best mix of heads."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, register
from sartor.algorithms.server.simplex import head_mix
from sartor.algorithms.split_models.fedper import train_inside
from sartor.algorithms.split_models.fedrep import train_outside
from sartor.algorithms.split_models.prototypes import (
    Prototypes,
    class_sums,
    distance,
    merged,
    no_prototypes,
    with_count,
)
from sartor.client.local import Client
from sartor.federation.exchange import Call, NobodyAnswered, Reply, changes, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.model.task import Penalty
from sartor.settings import setting

HEAD = ("head",)


@dataclass(frozen=True)
class FedPACHyper(Hyper):
    """FedPAC's hyper-parameters; the ``local`` settings say how long the body is trained."""

    lr: float = setting(0.01, "learning rate of the body", symbol="η", low=0)
    head_lr: float | None = setting(
        None, "learning rate of the head; not set: ten times `lr`, as the authors have 0.1 and 0.01", low=0
    )
    head_epochs: int = setting(1, "epochs of the head, before the body's", low=0)
    alignment: float = setting(
        1.0, "weight of the distance between features and their class's prototype", symbol="λ", low=0
    )
    combine: bool = setting(True, "whether clients get a mix of heads; if not, each keeps its own")


@dataclass(frozen=True)
class FedPACServer(Prototypes):
    """The global model and the prototypes; for plots, how much of its own head a client gets on average."""

    w: Tensor
    own_share: Tensor


def assemble(client: Client, w: Tensor, head: Tensor, trained: Tensor) -> Tensor:
    """The global body with the client's head, or with the global one where it never trained."""
    part, _ = client.task.select(HEAD)
    return part.put(w, torch.where(trained > 0, head, part.take(w)))


def with_square(z: Tensor) -> Tensor:
    """The features, and the square of their norm."""
    return torch.cat([z, (z * z).sum(dim=1, keepdim=True)], dim=1)


@changes(y="w")
def local_training(
    client: Client,
    hyper: FedPACHyper,
    w: Tensor,
    prototypes: Tensor,
    known: Tensor,
    head: Tensor,
    trained: Tensor,
) -> Reply:
    """Statistics of the received features; then the head, then the body with aligned features."""
    start = assemble(client, w, head, trained)
    like = torch.cat([prototypes, known[:, None]], dim=1)
    n = client.n.clamp(min=1)
    moments = class_sums(client, start, like, with_square) / n
    h, square = moments[:, :-1], moments[:, -1].sum()  # h_ic = p_c μ_c, and the mean of ‖z‖²
    variance = ((square - (h * h).sum()) / n).clamp(min=0)  # step 2

    def penalty(batch: Batch) -> Penalty:
        return lambda z: hyper.alignment * distance(z, batch.y, prototypes, known)

    rate = 10 * hyper.lr if hyper.head_lr is None else hyper.head_lr
    y = train_inside(client, start, HEAD, lr=rate, epochs=hyper.head_epochs)  # step 1
    y = train_outside(client, y, HEAD, lr=hyper.lr, penalty=penalty)
    sums = class_sums(client, y, like, with_count)
    reply = Reply(y=y, h=h, variance=variance, sums=sums)
    moved = client.steps() > 0  # a client without samples keeps what it had
    head = torch.where(moved, client.task.select(HEAD)[0].take(y), head)
    return reply.keep(head=head, trained=torch.where(moved, torch.ones_like(trained), trained))


def receive(client: Client, hyper: FedPACHyper, mix: Tensor) -> Reply:
    """Keep the head that the server mixed."""
    return Reply().keep(head=mix)


@personal
def own_model(client: Client, hyper: FedPACHyper, w: Tensor, head: Tensor, trained: Tensor) -> Reply:
    """The global body with the client's head."""
    return Reply(w=assemble(client, w, head, trained))


@register
class FedPAC(Algorithm[FedPACHyper, FedPACServer]):
    """FedRep with features aligned by prototypes, whose clients get the mix of heads that suits them best.

    Variant: the authors' two phases; the distance to a prototype is the mean squared difference, none for a
    class without one; statistics are of the received body, prototypes of the trained one. The mix is the
    exact optimum over the simplex, with nothing cut off, among the clients of the round that have samples.
    Evaluated: the body after aggregation with the head mixed for the client when it last took part
    (personal), and the mean of all models (shared). A newcomer, and a client drawn for the first time, has
    the mean of the heads. Traffic: w and prototypes, then a head, down; model, h, V and class sums up.
    """

    name = "fedpac"
    family = "personal"
    paper = "Xu et al. 2023"
    server_keeps = "w, a prototype of each class"
    client_keeps = "head"
    traffic = "1 + |head| / 1 + statistics, in two exchanges"
    unprotected = (("samples", SEES_SAMPLES),)
    refuses = (("mixup", "compares features with those of a sample's class"),)
    quadratic = True

    def start(self, federation: Federation) -> FedPACServer:
        """The initial model, whose head everyone has; no prototypes."""
        start = no_prototypes(federation, self.name)
        w = federation.initial()
        federation.declare(head=federation.task.part("head").take(w), trained=w.new_zeros(()))
        return FedPACServer(start.prototypes, start.known, w, w.new_ones(()))

    def round(self, server: FedPACServer, federation: Federation, cohort: np.ndarray) -> FedPACServer:
        """Local training at the cohort, the mean of models and prototypes, and a mix of heads for each."""
        sent = {"w": server.w, "prototypes": server.prototypes, "known": server.known}
        replies = federation.map(local_training, cohort, sent)
        if not replies.counts.any():
            return server
        changes = replace(replies, values={"delta": replies["y"] - server.w})
        common = merged(server, replies)
        w = server.w + changes.mean("delta")  # step 3
        own_share = server.own_share
        if self.hyper.combine:
            here = np.flatnonzero(replies.counts)
            h, variance = replies["h"][here], replies["variance"][here]
            a = head_mix(h, variance).to(w.dtype)
            own_share = a.diagonal().mean()
            heads = federation.task.part("head").take(replies["y"][here])
            with suppress(NobodyAnswered):  # whoever the mix does not reach stays with its own head
                mixed = federation.reducer.sums("y", heads, a)
                federation.map(receive, replies.clients[here], each={"mix": mixed})
        return FedPACServer(common.prototypes, common.known, w, own_share)

    def shared(self, server: FedPACServer) -> Tensor:
        """The mean of all models."""
        return server.w

    def personalize(self, server: FedPACServer, cohort: np.ndarray) -> Call:
        """The global body with the client's head."""
        return Call(own_model, {"w": server.w})

    def observe(self, server: FedPACServer) -> dict[str, Any]:
        """How much of its own head a client gets on average."""
        return {"own_share": server.own_share}
