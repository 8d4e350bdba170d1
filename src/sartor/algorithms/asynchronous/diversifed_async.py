"""DiversiFed that waits for nobody: z_i is made from the last known models, older ones counting for less."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.asynchronous.aging import AsyncHyper, weights_by_age
from sartor.algorithms.base import register
from sartor.algorithms.mixing.diversifed import (
    DiversiFedHyper,
    DiversiFedServer,
    Diversifying,
    Targets,
    first_server,
)
from sartor.algorithms.mixing.last_models import near_target
from sartor.algorithms.server.similarity import mixtures
from sartor.federation.exchange import NobodyAnswered
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class DiversiFedAsyncHyper(AsyncHyper, DiversiFedHyper):
    """DiversiFed's hyper-parameters, and those of asynchronous methods."""

    deadline: float = setting(1.0, "virtual time at which a round ends", above=0)


@dataclass(frozen=True)
class DiversiFedAsyncServer(DiversiFedServer):
    """Besides, the round in which the training of each known model began; 0 for a client not known."""

    began: Tensor = field(kw_only=True)


@register
class DiversiFedAsync(Diversifying[DiversiFedAsyncHyper, DiversiFedAsyncServer]):
    """DiversiFed by the clock: whoever is idle trains near z_i, made from the last known models of all.

    z_i = w_i − α Σ_j c(s_j) β_ij (w_i − w_j): a model pulls or pushes for less the older it is, where s_j
    counts the rounds by which it is older than one that started in the last round. With nobody late it is
    DiversiFed. Evaluated: w_i after its last local training that has arrived.
    """

    name = "diversifed-async"
    family = "personal, asynchronous"

    def start(self, federation: Federation) -> DiversiFedAsyncServer:
        """Everyone has the initial model; nobody is known yet."""
        began = federation.table(dtype=torch.int64)
        return DiversiFedAsyncServer(**vars(first_server(federation)), began=began)

    def round(
        self, server: DiversiFedAsyncServer, federation: Federation, cohort: np.ndarray
    ) -> DiversiFedAsyncServer:
        """z_i for those who are idle, then the models that arrive."""
        hyper = self.hyper
        idle = np.setdiff1d(cohort, federation.running)
        clients = federation.tensor(idle)
        ages = (federation.round - 1 - server.began).clamp(min=0).double()
        targets = Targets(server, hyper, weights_by_age(hyper, ages))
        z = mixtures(server.models, clients, targets)
        pull = hyper.lam / hyper.alpha * server.known[clients]
        each = {"target": z, "pull": pull}
        federation.dispatch(near_target, idle, each=each, concurrency=hyper.concurrency)
        known = replace(server, coefficients=targets.coefficients, seen=targets.seen())
        try:
            replies = federation.collect(within=hyper.deadline)
        except NobodyAnswered:
            return known
        arrived = replies.index
        began = server.began.index_copy(0, arrived, federation.round - replies.age)
        return replace(known, **server.received(replies), began=began)
