"""FedAsync (Xie et al. 2019): every model that arrives is mixed in at once, an old one for less."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.asynchronous.aging import (
    AsyncServer,
    CompensatedHyper,
    compensated,
    first_server,
    weights_by_age,
)
from sartor.algorithms.base import Algorithm, register
from sartor.client.local import Client
from sartor.federation.exchange import Reply, changes
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class FedAsyncHyper(CompensatedHyper):
    """FedAsync's hyper-parameters."""

    alpha: float = setting(0.6, "weight of an arriving model", symbol="α", above=0, high=1)
    rho: float = setting(0.005, "pull of local training towards its start", symbol="ρ", low=0)
    form: str = setting(
        "model", "what is mixed: the model that arrives, or its change", choices=("model", "delta")
    )
    arrivals: int = setting(1, "answers in a round; 0: those that arrive by `deadline`", low=0)
    deadline: float = setting(0.0, "virtual time at which a round ends; 0: none", low=0)

    def __post_init__(self) -> None:
        """A model that is mixed in has no change to be corrected."""
        if self.form == "model" and self.compensation != "none":
            raise ValueError("compensation is for changes; set form to 'delta'")


@dataclass(frozen=True)
class FedAsyncServer(AsyncServer):
    """The global model and how many updates it has had."""

    version: int = 0


@changes(w="w")
def proximal_training(client: Client, hyper: FedAsyncHyper, w: Tensor, version: Tensor) -> Reply:
    """K_i steps y ← y − η (g_i(y) + ρ (y − w)) from w; y goes back.

    ``version`` stays with the job on the server's side.
    """

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch) + hyper.rho * (y - w)

    return Reply(w=client.descend(w, direction, lr=hyper.lr), work=client.work(hyper.lr))


@register
class FedAsync(Algorithm[FedAsyncHyper, FedAsyncServer]):
    """Mix every arriving model at once, with a weight that falls with its staleness.

    w ← (1 − a) w + a y with a = α s(t − τ), one arrival after the other; t counts the server's updates. A
    round is one arrival, or as many as ``arrivals`` and ``deadline`` say. ``form = "delta"`` adds a (y − w_τ)
    instead, so that a stale model does not pull w back to where it started. Clients weigh alike, so fast ones
    count more. Evaluated: w.
    """

    name = "fedasync"
    family = "asynchronous"
    paper = "Xie et al. 2019"
    server_keeps = "w, its version"
    client_keeps = "nothing"
    reduces = "nothing"
    traffic = "1 / 1"

    def start(self, federation: Federation) -> FedAsyncServer:
        """The initial model, not yet updated."""
        return FedAsyncServer(**first_server(self.hyper, federation))

    def round(self, server: FedAsyncServer, federation: Federation, cohort: np.ndarray) -> FedAsyncServer:
        """Start who is idle, then take the next arrivals one by one."""
        hyper, w, square = self.hyper, server.w, server.square
        shared = {"w": w, "version": torch.tensor(server.version)}
        federation.dispatch(proximal_training, cohort, shared, concurrency=hyper.concurrency)
        replies = federation.collect(hyper.arrivals or None, hyper.deadline or None)
        y, start, work = replies["w"], replies.given["w"], replies["work"]
        versions = server.version + federation.tensor(np.arange(len(replies)))
        ages = (versions - replies.given["version"]).to(w.dtype)
        for place, a in enumerate(hyper.alpha * weights_by_age(hyper, ages)):
            if hyper.form == "model":
                w = (1 - a) * w + a * y[place]
                continue
            one = slice(place, place + 1)
            change, square = compensated(hyper, y[one] - start[one], work[one], w - start[one], square)
            w = w + a * change[0]
        return FedAsyncServer(w, square, server.version + len(replies))
