"""MimeLite (Karimireddy et al. 2021): clients mimic a centralised optimiser, their gradients uncorrected."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, register
from sartor.algorithms.variance_reduction.mime import MimeHyper, MimeServer, Mimic, step
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation


def lite_training(
    client: Client, hyper: MimeHyper, w: Tensor, m: Tensor | None = None, v: Tensor | None = None
) -> Reply:
    """MimeLite's local steps: the plain mini-batch gradient. ∇f_i(w) is sent if there are statistics."""
    y = client.descend(w, lambda y, batch: step(hyper, client.grad(y, batch), m, v), lr=hyper.lr)  # step 2
    return Reply(delta=y - w) if m is None else Reply(delta=y - w, gradient=client.full_gradient(w))


@register
class MimeLite(Mimic):
    """A centralised optimiser's steps at the clients, on plain mini-batch gradients.

    Variant: as ``mime``, without the correction and so with one exchange per round; with the base optimiser
    SGD it is FedAvg. Evaluated: w after aggregation. Traffic: w and s down; the change up and, where there
    are statistics, ∇f_i(w).
    """

    name = "mimelite"
    sums_only = True
    traffic = "1 + |s| / 2"
    unprotected = (("samples", SEES_SAMPLES),)

    def round(self, server: MimeServer, federation: Federation, cohort: np.ndarray) -> MimeServer:
        """Local training, then new statistics from the gradients at w."""
        replies = federation.map(
            lite_training, cohort, {"w": server.w, **server.statistics()}, fold=["delta", "gradient"]
        )
        if not replies.counts.any():
            return server
        w = server.w + replies.mean("delta")  # step 4
        return self.refreshed(server, w, w if server.m is None else replies.mean("gradient"))
