"""FedDyn (Acar et al. 2021): a regulariser that changes until the clients' optima agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class FedDynHyper(Hyper):
    """FedDyn's hyper-parameters."""

    alpha: float = setting(0.01, "weight of the regulariser that ties y to w", symbol="α", above=0)


@dataclass(frozen=True)
class FedDynServer(Server):
    """The global model and the mean of all duals."""

    state: Tensor


def local_training(client: Client, hyper: FedDynHyper, w: Tensor, dual: Tensor) -> Reply:
    """K_i steps on f_i(y) − ⟨λ_i, y⟩ + α/2 ‖y − w‖²; the dual λ_i stays with the client."""

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch) - dual + hyper.alpha * (y - w)  # step 1

    delta = client.descend(w, direction, lr=hyper.lr) - w
    return Reply(delta=delta).keep(dual=dual - hyper.alpha * delta)  # step 2


@register
class FedDyn(Algorithm[FedDynHyper, FedDynServer]):
    """Each client's loss gets a linear and a quadratic term, after which all clients have one optimum.

    Variant: the paper's algorithm 1 with the squared norm. Means are weighted by samples, that of the duals
    over all clients, drawn or not; the authors' code weighs all alike and divides α by a client's share
    instead. No gradient is clipped. Any local optimiser will do, as λ_i follows from where it ends.
    Evaluated: w after aggregation, the duals' mean included.
    """

    name = "feddyn"
    sums_only = True
    family = "global"
    paper = "Acar et al. 2021"
    server_keeps = "w, mean dual h"
    client_keeps = "dual λ_i"
    traffic = "1 / 1"
    sums_only = True

    def start(self, federation: Federation) -> FedDynServer:
        """The initial model; all duals are zero."""
        w = federation.initial()
        federation.declare(dual=torch.zeros_like(w))
        return FedDynServer(w, torch.zeros_like(w))

    def round(self, server: FedDynServer, federation: Federation, cohort: np.ndarray) -> FedDynServer:
        """Local training at the cohort, then the mean of the cohort and of all duals."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        if not replies.counts.any():
            return server
        delta = replies.mean("delta")
        share = replies.n.sum() / federation.sizes.sum()  # of all samples, those of whoever answered
        state = server.state - self.hyper.alpha * share * delta  # step 3
        return FedDynServer(server.w + delta - state / self.hyper.alpha, state)  # step 4
