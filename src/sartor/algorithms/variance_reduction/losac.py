"""LoSAC (Chen et al. 2021), reconstructed: a global gradient estimate that every local step refreshes."""

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

Known = tuple[Tensor, Tensor]
"""e and φ."""


@dataclass(frozen=True)
class LoSACServer(Server):
    """The global model and the estimate G = Σ p_i φ_i of the global gradient."""

    g: Tensor


def local_training(client: Client, hyper: Hyper, w: Tensor, g: Tensor, p: Tensor, phi_i: Tensor) -> Reply:
    """K_i steps; the client's last gradient φ_i, and with it its copy of G, changes at each of them.

    Carried is e = h − φ, the local estimate less the client's own last gradient, rather than h: for a single
    client it is zero to the bit, and the steps are SGD's.
    """

    def direction(y: Tensor, batch: Batch, known: Known) -> tuple[Tensor, Known]:
        e, phi = known
        r = client.grad(y, batch)
        return r + e, (e + (p - 1) * (r - phi), r)  # step 2: r − φ + h; h + p (r − φ), less the new φ = r

    y, (_, phi) = client.descend_with(w, direction, (g - phi_i, phi_i), lr=hyper.lr)  # steps 1, 2
    change = phi - phi_i
    # The client adds what it sends, so that its rounding is the server's and G stays the mean of all φ_i.
    return Reply(delta=y - w, change=change).keep(phi_i=phi_i + change)  # step 3


@register
class LoSAC(Algorithm[Hyper, LoSACServer]):
    """Reconstructed: control variates whose local copy is refreshed at every step rather than every round.

    Variant: the paper's abstract says that the estimate of the global full gradient is updated after each
    local step; the rest is filled in from SAGA and SCAFFOLD, so results should be labelled "LoSAC
    (reconstructed)". One φ_i per client; estimates start at zero. p_i = n_i / n over all clients, cohorts may
    be partial. Local steps are plain SGD without weight decay. Evaluated: w after aggregation.
    """

    name = "losac"
    sums_only = True
    family = "global"
    paper = "Chen et al. 2021 (reconstructed)"
    server_keeps = "w, gradient estimate G"
    client_keeps = "its last gradient φ_i"
    traffic = "2 / 2"
    unprotected = (("central", "it weighs clients by their share of all samples"),)
    refuses = (("micro", "refreshes its estimate with the gradient of every batch"),)

    def start(self, federation: Federation) -> LoSACServer:
        """The initial model; no gradient is known yet."""
        require_plain_sgd(federation.local, self.name, weight_decay=False)
        w = federation.initial()
        federation.declare(phi_i=torch.zeros_like(w))
        return LoSACServer(w, torch.zeros_like(w))

    def round(self, server: LoSACServer, federation: Federation, cohort: np.ndarray) -> LoSACServer:
        """Local training at the cohort, then the means: over the cohort for w, over all clients for G."""
        p = federation.sizes.to(server.w.dtype) / federation.sizes.sum()
        shared, each = {"w": server.w, "g": server.g}, {"p": p[cohort]}
        replies = federation.map(local_training, cohort, shared, each)
        w = server.w + replies.mean("delta")  # step 4
        return LoSACServer(w, server.g + replies.sum("change", p[replies.clients]))  # step 4
