"""SPFL that waits for nobody: similarities and models are made of everyone's last known updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.asynchronous.aging import AsyncHyper, weights_by_age
from sartor.algorithms.base import register
from sartor.algorithms.server.similarity import mean_model
from sartor.algorithms.server.stages import cosines_by_stage
from sartor.algorithms.spfl.spfl import (
    Similar,
    SPFLHyper,
    SPFLServer,
    local_training,
    mixing_weights,
    moved,
)
from sartor.federation.exchange import NobodyAnswered
from sartor.federation.federation import Federation
from sartor.federation.reduction import Reducer
from sartor.model.parts import Part
from sartor.settings import setting


@dataclass(frozen=True)
class SPFLAsyncHyper(AsyncHyper, SPFLHyper):
    """SPFL's hyper-parameters, and those of asynchronous methods."""

    deadline: float = setting(1.0, "virtual time at which a round ends", above=0)


@dataclass(frozen=True)
class SPFLAsyncServer(SPFLServer):
    """Besides, the last update of every client, [N, d], and the round in which its training began.

    −1: never heard of.
    """

    updates: Tensor
    began: Tensor
    round: int = 0

    @property
    def ages(self) -> Tensor:
        """How many rounds old the last updates are; −1 for a client never heard of."""
        return torch.where(self.began >= 0, self.round - self.began, -1)


@register
class SPFLAsync(Similar[SPFLAsyncHyper, SPFLAsyncServer]):
    """SPFL that waits for nobody: a client that answers gets a model from everyone's last known updates.

    w_{g,i} ← w_{g,i} + α Σ_j ω_ij Δ_j for the clients i that answered in this round, over all clients j ever
    heard of, with ω_ij ∝ c(s_j) |D_j| S̄(i,j): an update s_j rounds old counts for less, and so does what its
    age says of similarity, as a refresh takes c(s_i) c(s_j) cos(Δ_i, Δ_j) over the last known updates. In a
    refresh those who start, start from the mean of all models. With nobody late it is SPFL. Evaluated:
    w_{g,i}.
    """

    name = "spfl-async"
    family = "personal, asynchronous"
    server_keeps = "w_{g,i} and the last update of every client (N × d), similarities (N × N) per stage"

    def start(self, federation: Federation) -> SPFLAsyncServer:
        """Everyone has the initial model; nobody has been heard of."""
        return self._unheard(federation, federation.initial())

    def _unheard(self, federation: Federation, w: Tensor) -> SPFLAsyncServer:
        first = self.equal_models(federation, w)
        began = federation.table(fill=-1, dtype=torch.int64)
        return SPFLAsyncServer(**vars(first), updates=torch.zeros_like(first.models), began=began)

    def round(self, server: SPFLAsyncServer, federation: Federation, cohort: np.ndarray) -> SPFLAsyncServer:
        """Start who is idle; whoever answers gets a new model from all last known updates."""
        hyper, stages = self.hyper, self.stages(federation)
        starts = self.starts(server, federation)
        each = {"w": starts[federation.tensor(cohort)]}
        started = federation.tensor(
            federation.dispatch(local_training, cohort, each=each, concurrency=hyper.concurrency)
        )
        models = server.models.index_copy(0, started, starts[started])
        known = replace(server, models=models, round=federation.round)
        try:
            replies = federation.collect(within=hyper.deadline)
        except NobodyAnswered:
            return known
        clients = replies.index
        updates = known.updates.index_copy(0, clients, replies["delta"])
        began = known.began.index_copy(0, clients, federation.round - replies.age)
        known = replace(known, updates=updates, began=began)
        heard = torch.nonzero(began >= 0).flatten()
        trust = weights_by_age(hyper, known.ages[heard].double())
        if self.is_refresh(federation):
            # What is known of older updates is nearer to 0, where nothing is known.
            similar = cosines_by_stage(known.cosines, updates[heard], heard, stages, trust)
            known = replace(known, cosines=similar)
        counts = trust * federation.sizes[heard].double()
        weights = {
            name: mixing_weights(cosine[clients[:, None], heard[None, :]], counts, hyper)
            for name, cosine in known.cosines.items()
        }
        mixed = self.mix(models[clients], updates[heard], weights, stages, federation.reducer)
        return replace(known, models=models.index_copy(0, clients, mixed))

    def mix(
        self, start: Tensor, delta: Tensor, weights: dict[str, Tensor], stages: list[Part], reducer: Reducer
    ) -> Tensor:
        """The models, moved by the last known updates."""
        return moved(start, delta, weights, stages, self.hyper.alpha, reducer)

    def welcome(self, server: SPFLAsyncServer, federation: Federation) -> SPFLAsyncServer:
        """A newcomer gets the mean of the models."""
        return self._unheard(federation, mean_model(server.models))

    def observe(self, server: SPFLAsyncServer) -> dict[str, Any]:
        """The similarities S̄ of every stage, and the ages of the last updates."""
        return {**super().observe(server), "ages": server.ages}
