"""FedDC (Gao et al. 2022): local drift decoupled and corrected."""

from __future__ import annotations

from dataclasses import dataclass

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
class FedDCHyper(Hyper):
    """FedDC's hyper-parameters."""

    lr: float = setting(0.1, "local learning rate", symbol="η", above=0)
    alpha: float = setting(0.1, "weight of the penalty that ties y_i + h_i to w", symbol="α", above=0)


@dataclass(frozen=True)
class FedDCServer(Server):
    """The global model, the mean of all drifts, and the mean of all control variates."""

    h: Tensor
    c: Tensor


def local_training(
    client: Client, hyper: FedDCHyper, w: Tensor, c: Tensor, h_i: Tensor, c_i: Tensor
) -> Reply:
    """K_i penalised and corrected steps; the drift and the control variate stay with the client."""
    correction = c - c_i

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch) + hyper.alpha * (y + h_i - w) + correction  # step 1

    delta = client.descend(w, direction, lr=hyper.lr) - w
    work = client.work(hyper.lr)
    pace = torch.where(work > 0, 1 / work, torch.zeros_like(work))  # 1 / (K_i η); 0: no step was taken
    c_new = torch.where(work > 0, c_i - c - delta * pace, c_i)  # step 2
    reply = Reply(delta=delta, pace=pace)
    return reply.keep(h_i=h_i + delta, c_i=c_new)  # step 2


@register
class FedDC(Algorithm[FedDCHyper, FedDCServer]):
    """A drift variable between local and global model, with SCAFFOLD's correction of the gradients.

    Variant: the authors' code, whose c_i removes the correction that was applied, not the letter of the
    paper, whose g_i is the raw last update. The drifts' mean h runs over all clients, drawn or not: a mean
    over the drawn ones does not converge. Means are weighted by samples. A client's change and its work give
    the server both its new drift and its new control variate, so one vector goes up. Local steps are plain
    SGD, weight decay being part of the loss. Evaluated: w after aggregation, the drifts' mean included.
    """

    name = "feddc"
    family = "global"
    paper = "Gao et al. 2022"
    server_keeps = "w, mean drift h, mean control variate c"
    client_keeps = "drift h_i, control variate c_i"
    traffic = "2 / 1"

    def start(self, federation: Federation) -> FedDCServer:
        """The initial model; no drift and no correction."""
        require_plain_sgd(federation.local, self.name)
        w = federation.initial()
        federation.declare(h_i=torch.zeros_like(w), c_i=torch.zeros_like(w))
        return FedDCServer(w, torch.zeros_like(w), torch.zeros_like(w))

    def round(self, server: FedDCServer, federation: Federation, cohort: np.ndarray) -> FedDCServer:
        """Local training at the cohort, then the means over the cohort and over all clients."""
        replies = federation.map(local_training, cohort, {"w": server.w, "c": server.c})
        if not replies.counts.any():
            return server
        p = replies.n / federation.sizes.sum()  # of all clients, not of those who answered
        pace = replies["pace"]
        h = server.h + replies.sum("delta", p)  # step 3
        c = server.c - (p * (pace > 0)).sum() * server.c - replies.sum("delta", p * pace)  # step 3
        w = server.w + replies.mean("delta") + h  # step 3
        return FedDCServer(w, h, c)
