"""VRL-SGD (Liang et al. 2019): variance-reduced local SGD."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client, require_plain_sgd
from sartor.errors import SartorError
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class VRLHyper(Hyper):
    """VRL-SGD's hyper-parameters."""

    lr: float = setting(0.1, "local learning rate", symbol="η", above=0)


@dataclass(frozen=True)
class VRLServer(Server):
    """The global model and the work of the period that led to it."""

    work: Tensor
    """K η: the largest of any client, where they differ."""


def local_training(
    client: Client, hyper: VRLHyper, w: Tensor, work: Tensor, d_i: Tensor, y_i: Tensor
) -> Reply:
    """Finish the last period with its average w, then K_i steps corrected by D_i."""
    d_i = torch.where(client.steps() > 0, d_i + (w - y_i) / work, d_i)  # step 3, of the finished period
    y = client.descend(w, lambda y, batch: client.grad(y, batch) - d_i, lr=hyper.lr)  # step 1
    return Reply(delta=y - w, work=client.work(hyper.lr)).keep(d_i=d_i, y_i=y)


@register
class VRLSGD(Algorithm[VRLHyper, VRLServer]):
    """Every client subtracts how far its gradients deviate from everyone's, as its last periods showed.

    Variant: VRL-SGD without warm-up. D_i ← D_i + (w − y_i) / (K η) needs the average w of the period, so a
    client keeps D_i and y_i and does this step when the next message brings w. The paper has equal K; here
    every client divides by the largest K_i η of the period, which keeps Σ p_i D_i = 0, without which the
    limit is not the optimum. All clients have to take part in every round: a cohort of some, or a client
    that does not answer, is refused. Local steps are plain SGD, weight decay being part of the loss.
    Evaluated: w after aggregation. Traffic: half of SCAFFOLD's.
    """

    name = "vrl-sgd"
    family = "global"
    paper = "Liang et al. 2019"
    server_keeps = "w"
    client_keeps = "deviation D_i, last model y_i"
    traffic = "1 / 1"

    def start(self, federation: Federation) -> VRLServer:
        """The initial model; no client deviates yet."""
        require_plain_sgd(federation.local, self.name)
        w = federation.initial()
        federation.declare(d_i=torch.zeros_like(w), y_i=w)
        return VRLServer(w, w.new_ones(()))

    def round(self, server: VRLServer, federation: Federation, cohort: np.ndarray) -> VRLServer:
        """Local training at all clients, then the mean."""
        clients, cure = federation.clients, "set cohort.fraction to 1, or take scaffold, feddc or losac"
        if len(cohort) < clients:
            raise SartorError(f"vrl-sgd: needs all {clients} clients in a round, not {len(cohort)}; {cure}")
        replies = federation.map(local_training, cohort, {"w": server.w, "work": server.work})
        if len(replies) < clients:
            gone = federation.names[np.setdiff1d(cohort, replies.clients)[0]]
            raise SartorError(f"vrl-sgd: client {gone!r} did not answer in round {federation.round}; {cure}")
        work = replies["work"].max()
        # Without any step there is nothing to divide, and w = y_i: any divisor will do.
        return VRLServer(server.w + replies.mean("delta"), torch.where(work > 0, work, 1))  # step 2
