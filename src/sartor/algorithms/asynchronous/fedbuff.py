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

    concurrency: int = setting(0, "clients at work at once; 0: as many as are drawn", low=0)
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

    A round is one step. Whoever has finished is replaced at once by an idle client of the round's cohort, the
    same one again where there is no other, so that as many are at work at any time; what ends at the same
    instant arrives together. Where nobody is left to fill the buffer it waits for the next round. The sum is
    divided by K_b and not by Σ c(s_i), which would give old answers their weight back. Evaluated: w.
    """

    name = "fedbuff"
    family = "asynchronous"
    paper = "Nguyen et al. 2022"
    server_keeps = "w, the buffer"
    client_keeps = "nothing"
    reduces = "nothing"
    traffic = "1 / 1"

    def start(self, federation: Federation) -> FedBuffServer:
        """The initial model and an empty buffer."""
        first = first_server(self.hyper, federation)
        return FedBuffServer(**first, buffer=torch.zeros_like(first["w"]))

    def round(self, server: FedBuffServer, federation: Federation, cohort: np.ndarray) -> FedBuffServer:
        """Fill the buffer while everyone is at work, then step."""
        hyper, w, square, held = self.hyper, server.w, server.square, server.held
        buffer = torch.zeros_like(w) if server.buffer is None else server.buffer
        while held < hyper.buffer:
            federation.dispatch(
                local_training, cohort, {"w": w}, concurrency=hyper.concurrency or len(cohort)
            )
            try:
                replies = federation.collect_next(hyper.buffer - held)
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
