"""FedBN (Li et al. 2021): FedAvg with every BatchNorm layer private, for clients whose inputs differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, changes, personal
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedBNHyper(Hyper):
    """FedBN's hyper-parameters."""

    fallback: bool = setting(
        True, "whether clients also send their BatchNorm layers, whose mean a newcomer starts from"
    )


@dataclass(frozen=True)
class FedBNServer(Server):
    """The global model, in whose BatchNorm entries newcomers' values stand, and newcomers' statistics."""

    statistics: Tensor


def assemble(client: Client, w: Tensor, statistics: Tensor, own: Tensor, trained: Tensor) -> Tensor:
    """The server's model with the client's BatchNorm layers, or a newcomer's where it never trained."""
    norms, _ = client.task.norms()
    if client.buffers is not None:
        client.buffers = torch.where(trained > 0, client.buffers, statistics)
    return norms.put(w, torch.where(trained > 0, own, norms.take(w)))


@changes(norms=lambda task, w: task.norms()[0].take(w), statistics="statistics")
def local_training(
    client: Client, hyper: FedBNHyper, w: Tensor, statistics: Tensor, own: Tensor, trained: Tensor
) -> Reply:
    """K_i steps with the client's own BatchNorm layers, which stay; the change of all others goes back."""
    norms, _ = client.task.norms()
    y = client.descend(assemble(client, w, statistics, own, trained), lr=hyper.lr)
    reply = Reply(delta=client.task.rest(norms).take(y - w))
    if hyper.fallback:
        reply.sent["norms"] = norms.take(y)
        reply.sent["statistics"] = statistics if client.buffers is None else client.buffers
    moved = client.steps() > 0  # a client without samples keeps what it had
    own = torch.where(moved, norms.take(y), own)
    return reply.keep(own=own, trained=torch.where(moved, torch.ones_like(trained), trained))


@personal
def own_model(
    client: Client, hyper: FedBNHyper, w: Tensor, statistics: Tensor, own: Tensor, trained: Tensor
) -> Reply:
    """The server's model with the client's BatchNorm layers."""
    return Reply(w=assemble(client, w, statistics, own, trained))


@register
class FedBN(Algorithm[FedBNHyper, FedBNServer]):
    """FedAvg whose clients keep scale, shift and running statistics of every BatchNorm layer.

    Variant: BatchNorm is found by the type of the layer; means are weighted by samples. Float buffers stay
    with the client. Evaluated: the model after aggregation with the client's BatchNorm layers as its last
    training left them. A newcomer, and a client drawn for the first time, has the mean of the BatchNorm
    layers of the last round's clients. For that clients send theirs, which nobody else uses; with
    ``fallback = false`` they do not, and a newcomer has the initial ones.
    """

    name = "fedbn"
    sums_only = True
    family = "personal"
    paper = "Li et al. 2021"
    server_keeps = "all but BatchNorm layers; their mean, for newcomers"
    client_keeps = "BatchNorm layers with statistics"
    traffic = "1 / 1"
    unprotected = (("central", "it averages norms and statistics, which are no changes"),)
    buffers = "local"

    def start(self, federation: Federation) -> FedBNServer:
        """The initial model, whose BatchNorm layers are everyone's first."""
        task, w = federation.task, federation.initial()
        federation.declare(own=task.norms()[0].take(w), trained=w.new_zeros(()))
        return FedBNServer(w, federation.initial_buffers())

    def round(self, server: FedBNServer, federation: Federation, cohort: np.ndarray) -> FedBNServer:
        """Local training at the cohort, then the weighted mean of what is not BatchNorm."""
        sent = {"w": server.w, "statistics": server.statistics}
        replies = federation.map(local_training, cohort, sent)
        norms, _ = federation.task.norms()
        others = federation.task.rest(norms)
        w = others.put(server.w, others.take(server.w) + replies.mean("delta"))
        if not self.hyper.fallback or not replies.counts.any():
            return replace(server, w=w)
        return FedBNServer(norms.put(w, replies.mean("norms")), replies.mean("statistics"))

    def shared(self, server: FedBNServer) -> Tensor | None:
        """The model a newcomer gets, where BatchNorm layers have a mean."""
        return server.w if self.hyper.fallback else None

    def personalize(self, server: FedBNServer, cohort: np.ndarray) -> Call:
        """The global model with the client's BatchNorm layers."""
        return Call(own_model, {"w": server.w, "statistics": server.statistics})
