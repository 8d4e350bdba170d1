"""FedAvg by the clock, the two plain ways: stragglers are dropped, or averaged as they are when they come."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sartor.algorithms.asynchronous.aging import local_training
from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class ClockedFedAvgHyper(Hyper):
    """The hyper-parameters of FedAvg by the clock."""

    concurrency: int = setting(0, "clients at work at once; 0: everyone who is drawn", low=0)
    deadline: float = setting(1.0, "virtual time at which a round ends", symbol="T_d", above=0)
    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)


@register
class FedAvgSync(Algorithm[ClockedFedAvgHyper, Server]):
    """FedAvg that drops stragglers: whoever has not answered when the round ends is called off.

    Clients that are always late never count. Evaluated: w.
    """

    name = "fedavg-sync"
    sums_only = True
    family = "asynchronous"
    paper = "McMahan et al. 2017, stragglers dropped"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Call off who is late from the last round, then FedAvg with those who are in time."""
        hyper = self.hyper
        federation.cancel(federation.running)
        federation.dispatch(local_training, cohort, {"w": server.w}, concurrency=hyper.concurrency)
        replies = federation.collect(within=hyper.deadline)
        return Server(server.w + hyper.server_lr * replies.mean("delta"))


@register
class FedAvgAsync(Algorithm[ClockedFedAvgHyper, Server]):
    """FedAvg that averages stale models as they are, in the round in which they arrive.

    w ← w + η_g Σ p'_i (y_i − w): a model that started long ago pulls w back to there. Evaluated: w.
    """

    name = "fedavg-async"
    family = "asynchronous"
    paper = "McMahan et al. 2017, late models averaged"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Start who is idle, then average the models that arrive."""
        hyper, w = self.hyper, server.w
        federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
        replies = federation.collect(within=hyper.deadline)
        # y_i − w in this order: for a client that started from w itself it is Δ_i to the bit.
        changes = replace(replies, values={"change": replies.given["w"] - w + replies["delta"]})
        return Server(w + hyper.server_lr * changes.mean("change"))
