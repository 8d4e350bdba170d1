"""Semi-synchronous FedAvg: rounds end by the clock, and a late change still counts, for less."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sartor.algorithms.asynchronous.aging import (
    AsyncServer,
    CompensatedHyper,
    ages_of,
    compensated,
    first_server,
    local_training,
    weights_by_age,
)
from sartor.algorithms.base import Algorithm, register
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class SemiSyncHyper(CompensatedHyper):
    """Semi-synchronous FedAvg's hyper-parameters."""

    deadline: float = setting(1.0, "virtual time at which a round ends", symbol="T_d", above=0)
    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)
    quorum: float = setting(
        0.0, "share of those at work whose answers end a round early; 0: only `deadline` does", low=0, high=1
    )
    most_age: int = setting(5, "work older than so many rounds is called off", symbol="s_max", low=0)
    keep_mass: bool = setting(
        False, "divide by Σ n_i instead of Σ n_i c(s_i): a round of old answers is then a small step"
    )


@register
class FedAvgSemiSync(Algorithm[SemiSyncHyper, AsyncServer]):
    """Rounds with a deadline; a late change is used in the round in which it arrives, for less.

    w ← w + η_g Σ r_i Δ_i with r_i = n_i c(s_i) / Σ n_j c(s_j), each Δ_i against the model its client started
    from. Work older than ``most_age`` rounds is called off. With nobody late it is FedAvg, with
    ``most_age = 0`` FedAvg without stragglers. Evaluated: w.
    """

    name = "fedavg-semisync"
    family = "asynchronous"
    paper = "FedAvg with a deadline"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"

    def start(self, federation: Federation) -> AsyncServer:
        """The initial model."""
        return AsyncServer(**first_server(self.hyper, federation))

    def round(self, server: AsyncServer, federation: Federation, cohort: np.ndarray) -> AsyncServer:
        """Call off what is too old, start who is idle, use what arrives in time."""
        hyper, w = self.hyper, server.w
        federation.cancel(federation.running[federation.round - federation.running_since > hyper.most_age])
        federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
        enough = int(np.ceil(hyper.quorum * len(federation.running)))
        replies = federation.collect(enough or None, hyper.deadline)
        drift = w - replies.given["w"]
        change, square = compensated(hyper, replies["delta"], replies["work"], drift, server.square)
        changed = replace(replies, values={"change": change})
        weights = replies.n * weights_by_age(hyper, ages_of(replies))
        if hyper.keep_mass:
            step = changed.sum("change", weights / replies.n.sum())
        else:
            step = changed.mean("change", weights)
        return AsyncServer(w + hyper.server_lr * step, square)
