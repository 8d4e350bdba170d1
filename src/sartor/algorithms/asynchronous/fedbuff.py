"""FedBuff (Nguyen et al. 2022): a step of the server for every so many changes that arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

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
from sartor.federation.exchange import NobodyAnswered
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedBuffHyper(CompensatedHyper):
    """FedBuff's hyper-parameters."""

    buffer: int = setting(10, "answers that make a step of the server", symbol="K_b", low=1)
    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)
    weights: str = setting(
        "uniform", "whether a client counts once, or by n_i N / n", choices=("uniform", "examples")
    )


@dataclass(frozen=True)
class FedBuffServer(AsyncServer):
    """The global model and the buffer that is being filled."""

    buffer: Tensor | None = None
    held: int = 0


@register
class FedBuff(Algorithm[FedBuffHyper, FedBuffServer]):
    """Collect K_b changes of any age, then take one step: w ← w + η_g / K_b Σ c(s_i) Δ_i.

    A round is one step. Where fewer than K_b clients are at work, those who are done start again from the
    same model until the buffer is full; where nobody is left to fill it, it waits for the next round. The sum
    is divided by K_b and not by Σ c(s_i), which would give old answers their weight back. Evaluated: w.
    """

    name = "fedbuff"
    family = "asynchronous"
    paper = "Nguyen et al. 2022"
    server_keeps = "w, the buffer"
    client_keeps = "nothing"
    traffic = "1 / 1"

    def start(self, federation: Federation) -> FedBuffServer:
        """The initial model and an empty buffer."""
        first = first_server(self.hyper, federation)
        return FedBuffServer(**first, buffer=torch.zeros_like(first["w"]))

    def round(self, server: FedBuffServer, federation: Federation, cohort: np.ndarray) -> FedBuffServer:
        """Fill the buffer, then step."""
        hyper, w, square, held = self.hyper, server.w, server.square, server.held
        buffer = torch.zeros_like(w) if server.buffer is None else server.buffer
        while held < hyper.buffer:
            federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
            try:
                replies = federation.collect(hyper.buffer - held)
            except NobodyAnswered:
                return FedBuffServer(w, square, buffer, held)
            drift = w - replies.given["w"]
            change, square = compensated(hyper, replies["delta"], replies["work"], drift, square)
            weights = weights_by_age(hyper, ages_of(replies))
            if hyper.weights == "examples":
                weights = weights * replies.n / federation.sizes.to(w.dtype).mean()
            buffer = buffer + replace(replies, values={"change": change}).sum("change", weights)
            held += len(replies)
        step = hyper.server_lr / hyper.buffer * buffer
        return FedBuffServer(w + step, square, torch.zeros_like(buffer), 0)
