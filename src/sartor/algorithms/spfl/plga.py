"""PLGA: LGA that makes every client a model of its own, by how far its updates agree with the server's.

Equation numbers are those of "Personalized Heterogeneous FL with Gradient Similarity".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.server.leaps import Uploads
from sartor.algorithms.server.stages import spread_out, stages_of
from sartor.algorithms.server.tables import rows
from sartor.algorithms.spfl.lga import Counted, Leaping, LGAHyper, LGAServer, no_uploads
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation


@dataclass(frozen=True, kw_only=True)
class PLGAServer(LGAServer):
    """Besides, the personal model of every client, [N, d]; zeros for a client that never uploaded."""

    personal: Tensor


@personal
def own_part(client: Client, hyper: LGAHyper, w: Tensor) -> Reply:
    """The model that the server made for the client."""
    return Reply(w=w)


def personal_models(uploads: Uploads, agreed: Tensor, model: Tensor, present: Tensor) -> Tensor:
    """w^{t0} + (1 − S̄)(ŵ_k − w^{t0}) + S̄ (w^τ − w^{t0}) (12)(14), ``present`` being w^τ."""
    start = uploads.start
    return start + (1 - agreed) * (model - start) + agreed * (present - start)


@register
class PLGA(Leaping[PLGAServer]):
    """LGA with a personal model for every client: between its own model and the global one by S̄.

    w_k^p = w^{t0} + (1 − S̄)(ŵ_k − w^{t0}) + S̄ (w^τ − w^{t0}) (14), for stragglers with their leap ŵ_k. A
    client in time has its fresh model in place of ŵ_k, and the new global model both for w^{t1} and for w^τ.
    A client that never uploaded has w. Training starts from w as in LGA. Evaluated: w_k^p (personal) and w
    (shared).
    """

    name = "plga"
    family = "personal, asynchronous"
    server_keeps = "w, four models for every client (N × d)"
    traffic = "2 / 1"

    def first(self, federation: Federation, w: Tensor) -> PLGAServer:
        """Nobody has uploaded, or has a personal model."""
        first = no_uploads(federation, w)
        return PLGAServer(**vars(first), personal=torch.zeros_like(first.uploads.start))

    def finished(self, server: PLGAServer, w: Tensor, federation: Federation, counted: Counted) -> PLGAServer:
        """A new personal model for whoever counted, which is sent to it."""
        clients, stages = counted.clients, stages_of(federation.task)
        own = server.uploads.rows(clients)
        agreed = spread_out({name: value[clients] for name, value in server.sngs.items()}, stages, own.update)
        present = torch.where(counted.late[:, None], w, server.w)
        made = personal_models(own, agreed, w + counted.changes, present)
        federation.traffic.down += made.nbytes
        return replace(server, personal=server.personal.index_copy(0, clients, made))

    def personalize(self, server: PLGAServer, cohort: np.ndarray) -> Call:
        """The model that the server made for the client."""
        known = rows(server.uploads.known, cohort)[:, None]
        return Call(own_part, each={"w": torch.where(known, rows(server.personal, cohort), server.w)})
