"""What ComFed's client mechanisms share, and the plain one, Sgd; the others extend it, each in its file.

A mechanism is what a client does against drifting away from the others, and how the server puts together
what comes back. Line numbers are those of the paper's algorithm 2 (Nguyen et al. 2022); ``comfed.py``
combines a mechanism with a server optimizer. With ``as_printed`` the equations are those of the paper by
their letter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper
from sartor.algorithms.server.optimizers import Sgd, State
from sartor.client.local import Client, Direction, refuse
from sartor.federation.exchange import Replies, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting

TINY = 1e-30
"""Stands for a divisor of zero where the dividend is zero too: clients that took no step."""


@dataclass(frozen=True)
class Mechanism(Hyper):
    """What every client mechanism can be told."""

    local_beta: float = setting(
        0.0, "share of the server's momentum in the local direction; 0: none", symbol="β", low=0, below=1
    )
    as_printed: bool = setting(False, "the paper's equations by their letter")


H = TypeVar("H", bound=Mechanism)


def solve(
    client: Client,
    hyper: Mechanism,
    w: Tensor,
    direction: Direction,
    m: Tensor | None,
    mu: float = 0.0,
    measured: bool = False,
) -> dict[str, Tensor]:
    """Local training: Δ_i = y − w and, where it is needed, its work η‖a_i‖₁, so that Δ_i = −work · mean d.

    With the server's momentum m the local direction is (1 − β) d + β m, where d is the mechanism's. The
    solver itself, run on unit gradients, gives the work: exact with momentum, weight decay and a proximal
    term, alone or together.
    """
    beta = 0.0 if m is None else hyper.local_beta

    def mixed(y: Tensor, batch: Batch) -> Tensor:
        d = direction(y, batch)
        return d if m is None else (1 - beta) * d + beta * m

    reply = {"delta": client.descend(w, mixed, lr=hyper.lr) - w}
    if measured or m is not None:
        moved = client.descend(w.new_zeros(1), lambda u, batch: 1 + (1 - beta) * mu * u, lr=hyper.lr)
        reply["work"] = -moved[0]
    return reply


def sgd(client: Client, hyper: Mechanism, w: Tensor, m: Tensor | None = None) -> Reply:
    """Line 8: y ← y − η g_i(y)."""
    return Reply(**solve(client, hyper, w, client.grad, m))


@dataclass(frozen=True, kw_only=True)
class ComFedServer(State):
    """Model, moments, and what the mechanism needs; None where the method has no such thing."""

    c: Tensor | None = None
    """Control variate: the mean of all c_i."""
    momentum: Tensor | None = None
    """The server's momentum as a gradient, for the local steps."""


class ComFed(Algorithm[H, ComFedServer]):
    """Sgd: plain local training (line 8), averaged with the weights p'_i of those who answered.

    ``as_printed``: line 18 prints Σ Δ_i, without weights, which with ten clients makes steps ten times as
    long; section III-A of the paper has the weights. With ``local_beta`` β the local direction is
    (1 − β) g_i + β m, where m is the server's momentum as a gradient: the mean direction of the last rounds,
    −Σ p'_i Δ_i / Σ p'_i η‖a_i‖₁, with the decay of the server optimizer. Evaluated: w.
    """

    client_function: ClassVar[Callable[..., Reply]] = staticmethod(sgd)
    folds: ClassVar[tuple[str, ...]] = ("delta",)
    """Of which replies only the mean by p'_i or the sum is asked for."""
    client_keeps = "nothing"
    traffic = "1 / 1"
    sums_only = True

    def start(self, federation: Federation) -> ComFedServer:
        """The initial model; nothing remembered."""
        if self.hyper.local_beta:
            why = "has hyper.local_beta, which needs a local optimiser that is linear in the gradients"
            refuse(federation.local, self.name, why, "optimizer", "clip")
        w = federation.initial()
        momentum = torch.zeros_like(w) if self.hyper.local_beta else None
        return self.optimizer.start(ComFedServer(w=w, momentum=momentum))

    @property
    def optimizer(self) -> Sgd:
        """The server optimizer: the other half of a pair's hyper-parameters."""
        both: object = self.hyper
        assert isinstance(both, Sgd), "the hyper-parameters of a pair are made by comfed.cell"
        return both

    def round(self, server: ComFedServer, federation: Federation, cohort: np.ndarray) -> ComFedServer:
        """Local training at the cohort, aggregation (lines 18-20), server step (lines 23-26)."""
        hyper, optimizer = self.hyper, self.optimizer
        sent = {"w": server.w, "c": server.c, "m": server.momentum}
        sent = {name: value for name, value in sent.items() if value is not None}
        replies = federation.map(self.client_function, cohort, shared=sent, fold=self.folds)
        if not replies.counts.sum():
            return server  # nobody trained: the server's momentum does not move the model alone
        if server.momentum is not None:
            decay = optimizer.decay
            work = replies.mean("work", self.weights(replies)).clamp(min=TINY)
            mean = -replies.mean("delta", self.weights(replies)) / work
            server = replace(server, momentum=decay * server.momentum + (1 - decay) * mean)
        delta, server = self.aggregate(server, replies, federation)
        factor = federation.local.round_factor(torch.tensor(federation.round))
        rate = hyper.lr if factor is None else hyper.lr * float(factor)
        step, server = optimizer.step(server, delta, rate)
        return replace(server, w=server.w + step)

    def weights(self, replies: Replies) -> Tensor | None:
        """The weights of the clients' changes; None: p'_i."""
        return None

    def aggregate(
        self, server: ComFedServer, replies: Replies, federation: Federation
    ) -> tuple[Tensor, ComFedServer]:
        """Line 18: the round's Δ, and the server with what else the replies change."""
        if self.hyper.as_printed:
            return replies.sum("delta"), server
        return replies.mean("delta", self.weights(replies)), server
