"""FedADC (Ozfatura et al. 2021): the server's momentum, spread over the clients' local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client, require_plain_sgd
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class FedADCHyper(Hyper):
    """FedADC's hyper-parameters."""

    lr: float = setting(0.1, "local learning rate", symbol="η", above=0)
    beta_local: float = setting(
        0.9, "share of the momentum that the local steps add", symbol="β_local", low=0, below=1
    )
    beta_global: float = setting(0.9, "momentum", symbol="β_global", low=0, below=1)
    nesterov: bool = setting(False, "take local gradients after the step along the momentum")
    server_lr: float = setting(1.0, "server learning rate", symbol="α", low=0)


@dataclass(frozen=True)
class FedADCServer(Server):
    """The global model and the momentum, in units of a gradient."""

    momentum: Tensor


def local_training(client: Client, hyper: FedADCHyper, w: Tensor, momentum: Tensor) -> Reply:
    """H_i steps that together add β_local M, whatever H_i; what goes back is the sum of their directions."""
    rate = client.rate(hyper.lr)
    share = hyper.beta_local * momentum / client.steps().clamp(min=1)  # step 1: m̄_i = β_local M / H_i

    def direction(y: Tensor, batch: Batch) -> Tensor:
        if hyper.nesterov:
            return share + client.grad(y - rate * share, batch)  # step 2, Nesterov
        return client.grad(y, batch) + share  # step 2, heavy ball

    y = client.descend(w, direction, lr=hyper.lr)
    return Reply(d=(w - y) / rate, rate=w.new_ones(()) * rate)


@register
class FedADC(Algorithm[FedADCHyper, FedADCServer]):
    """Momentum that also steers the local steps, so that it holds their drift together.

    Variant: FedADC in its heavy-ball form, or Nesterov's with ``nesterov``; not the follow-up FedADC+ with
    self-distillation. The momentum is kept in gradient units: w − y_i is divided by the rate of the round,
    so a decaying rate does not rescale it. Clients may take unequal numbers of steps; each adds exactly
    β_local M, which the server takes off again. Local steps are plain SGD, weight decay being part of the
    loss. Evaluated: w after aggregation.
    """

    name = "fedadc"
    family = "global"
    paper = "Ozfatura et al. 2021"
    server_keeps = "w, momentum M"
    client_keeps = "nothing"
    traffic = "2 / 1"
    refuses = (("schedule_over", "spreads the momentum evenly over the steps"),)

    def start(self, federation: Federation) -> FedADCServer:
        """The initial model and no momentum."""
        require_plain_sgd(federation.local, self.name)
        w = federation.initial()
        return FedADCServer(w, torch.zeros_like(w))

    def round(self, server: FedADCServer, federation: Federation, cohort: np.ndarray) -> FedADCServer:
        """Local training along the momentum, then the server's momentum step."""
        hyper, shared = self.hyper, {"w": server.w, "momentum": server.momentum}
        replies = federation.map(local_training, cohort, shared, fold=["d"])
        if not replies.counts.any():  # nobody trained: nothing was added that could be taken off
            return server
        momentum = replies.mean("d") + (hyper.beta_global - hyper.beta_local) * server.momentum  # step 3
        w = server.w - hyper.server_lr * replies["rate"][0] * momentum  # step 3
        return replace(server, w=w, momentum=momentum)
