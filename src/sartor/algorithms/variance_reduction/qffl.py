"""q-FFL and its solver q-FedAvg (Li et al. 2020): fair resource allocation, larger losses weigh more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.settings import setting

TINY = 1e-10
"""Added to a loss before it is raised to q − 1 < 0, as the authors do."""


@dataclass(frozen=True)
class QFFLHyper(Hyper):
    """q-FFL's hyper-parameters."""

    lr: float = setting(0.1, "local learning rate, of which L = 1/η is the Lipschitz constant", above=0)
    q: float = setting(1.0, "how much larger losses weigh; 0: not at all", symbol="q", low=0)
    weights: str = setting(
        "samples",
        "p_k = n_k / n in the objective, or all clients alike",
        symbol="p",
        choices=("samples", "uniform"),
    )


def local_training(client: Client, hyper: QFFLHyper, w: Tensor) -> Reply:
    """The loss at the received model, local training from it, and both as a step and its curvature."""
    q, rate = hyper.q, client.rate(hyper.lr)
    loss = client.loss(w) + TINY  # step 1: F_k of this client's training data at w
    g = (w - client.descend(w, lr=hyper.lr)) / rate  # step 2: G = L (w − y), L = 1/η
    curvature = q * loss ** (q - 1) * (g @ g) + loss**q / rate  # step 3: h_k
    return Reply(delta=loss**q * g, curvature=curvature)  # step 3: Δ_k = F_k^q G


@register
class QFFL(Algorithm[QFFLHyper, Server]):
    """Minimise Σ p_k F_k^{q+1} / (q+1), so that clients with larger losses weigh more.

    Variant: q-FedAvg of the authors' code, F_k being each client's own training loss at the received model,
    in evaluation mode. The authors draw clients with probability p_k and add up without weights; cohorts
    here are drawn uniformly, so the sums carry p_k. ``weights = "uniform"`` leaves them out. Evaluated: w
    after aggregation.
    """

    name = "q-ffl"
    sums_only = True
    family = "global"
    paper = "Li et al. 2020"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    unprotected = (("samples", SEES_SAMPLES),)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then a step whose length the curvatures set."""
        replies = federation.map(local_training, cohort, {"w": server.w})
        if not replies.counts.any():
            return server
        uniform = (replies.n > 0).to(replies.dtype)  # a client without samples has no loss
        p = uniform if self.hyper.weights == "uniform" else replies.weights
        return replace(server, w=server.w - replies.sum("delta", p) / replies.sum("curvature", p))  # step 4
