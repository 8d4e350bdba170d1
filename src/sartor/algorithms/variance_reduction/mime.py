"""Mime and MimeSVRG (Karimireddy et al. 2021): clients mimic a centralised optimiser.

The statistics s of a base optimiser (momentum m, second moment v) belong to the server and stay frozen while
clients take steps with them. They change once per round, by the mean gradient at w: never by the changes of
the models, which carry the clients' drift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.client.local import Client, Direction, require_plain_sgd
from sartor.federation.exchange import ClientFunction, Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class MimeHyper(Hyper):
    """Mime's hyper-parameters."""

    optimizer: str = setting("momentum", "the base optimiser", choices=("sgd", "momentum", "adam"))
    beta: float = setting(0.9, "momentum, Adam's first moment", symbol="β", low=0, below=1)
    beta2: float = setting(0.99, "Adam's second moment", symbol="β2", low=0, below=1)
    epsilon: float = setting(1e-3, "added to the root of Adam's second moment", symbol="ε", above=0)


@dataclass(frozen=True)
class MimeServer(Server):
    """The global model and the base optimiser's statistics, those that it has."""

    m: Tensor | None = None
    v: Tensor | None = None

    def statistics(self) -> dict[str, Tensor]:
        """What clients are sent of them."""
        return {name: value for name, value in (("m", self.m), ("v", self.v)) if value is not None}


def step(hyper: MimeHyper, e: Tensor, m: Tensor | None, v: Tensor | None) -> Tensor:
    """U(e, s): the base optimiser's step from the gradient estimate e with frozen statistics."""
    moved = e if m is None else (1 - hyper.beta) * e + hyper.beta * m
    return moved if v is None else moved / (v.sqrt() + hyper.epsilon)


def gradient_at(client: Client, hyper: Hyper, w: Tensor) -> Reply:
    """∇f_i(w) over all of the client's samples."""
    return Reply(gradient=client.full_gradient(w))


def correction(client: Client, w: Tensor, c: Tensor) -> Direction:
    """Step 2: g_i(y) − g_i(w) + c, gradients at y and at w on one batch, with the same dropout masks."""
    return lambda y, batch: client.grad(y, batch) - client.grad(w, batch, track=False) + c


def corrected_training(
    client: Client, hyper: MimeHyper, w: Tensor, c: Tensor, m: Tensor | None = None, v: Tensor | None = None
) -> Reply:
    """Mime's local steps: the base optimiser's, from corrected gradients."""
    corrected = correction(client, w, c)
    y = client.descend(w, lambda y, batch: step(hyper, corrected(y, batch), m, v), lr=hyper.lr)
    return Reply(delta=y - w)


def svrg_training(client: Client, hyper: Hyper, w: Tensor, c: Tensor) -> Reply:
    """MimeSVRG's local steps: against the corrected gradients themselves."""
    return Reply(delta=client.descend(w, correction(client, w, c), lr=hyper.lr) - w)


def corrected_round(
    server: MimeServer, federation: Federation, cohort: np.ndarray, training: ClientFunction
) -> tuple[Tensor, Tensor] | None:
    """The model after local training with the mean gradient c at w, and c; None where nobody trained."""
    first = federation.map(gradient_at, cohort, {"w": server.w}, fold=["gradient"])  # step 1
    c = first.mean("gradient") if first.counts.any() else torch.zeros_like(server.w)
    shared = {"w": server.w, "c": c, **server.statistics()}
    second = federation.map(training, first.clients, shared, fold=["delta"])  # step 2
    return (server.w + second.mean("delta"), c) if second.counts.any() else None  # step 3


class Mimic(Algorithm[MimeHyper, MimeServer]):
    """What Mime and MimeLite have in common: the statistics, and what they refuse."""

    family = "global"
    paper = "Karimireddy et al. 2021"
    server_keeps = "w, statistics s of the base optimiser"
    client_keeps = "nothing"
    refuses = (("augment", "corrects by gradients over the samples as they are"),)

    def start(self, federation: Federation) -> MimeServer:
        """The initial model; statistics start at zero, without bias correction."""
        kind = self.hyper.optimizer
        require_plain_sgd(federation.local, self.name, weight_decay=kind == "sgd")
        w = federation.initial()
        m = None if kind == "sgd" else torch.zeros_like(w)
        return MimeServer(w, m, torch.zeros_like(w) if kind == "adam" else None)

    def refreshed(self, server: MimeServer, w: Tensor, g: Tensor) -> MimeServer:
        """s ← V(g, s), with g the mean gradient at the model that the round started from."""
        hyper, m, v = self.hyper, server.m, server.v
        m = None if m is None else (1 - hyper.beta) * g + hyper.beta * m  # step 4
        v = None if v is None else (1 - hyper.beta2) * g * g + hyper.beta2 * v  # step 4
        return MimeServer(w, m, v)


@register
class Mime(Mimic):
    """A centralised optimiser's steps at the clients, their gradients corrected as in SVRG.

    Variant: Mime with full local gradients, the base optimiser SGD, momentum (1 − β) e + β m, or Adam
    without bias correction. Means are weighted by samples: those of models, c and statistics alike. A client
    that leaves between the exchanges leaves the round. Evaluated: w after aggregation. Traffic: w, then w, c
    and s down (a client that holds w between the exchanges saves one); ∇f_i(w), then the change up.
    """

    name = "mime"
    sums_only = True
    traffic = "3 + |s| / 2, in two exchanges"
    unprotected = (("samples", SEES_SAMPLES),)

    def exchanges(self) -> int:
        """Gradients first, then training."""
        return 2

    def round(self, server: MimeServer, federation: Federation, cohort: np.ndarray) -> MimeServer:
        """The gradients at w, then local training with their mean."""
        after = corrected_round(server, federation, cohort, corrected_training)
        return server if after is None else self.refreshed(server, *after)  # step 4


@register
class MimeSVRG(Algorithm[Hyper, MimeServer]):
    """SVRG at the clients: each round's model is the anchor of its local steps.

    Variant: ``mime`` with SGD as base optimiser, y ← y − η (g_i(y) − g_i(w) + c). With partial participation
    c is the mean over the round's clients, and the model keeps fluctuating with the cohorts. Evaluated: w
    after aggregation. Traffic: w, then w and c down; ∇f_i(w), then the change up.
    """

    name = "mimesvrg"
    sums_only = True
    unprotected = (("samples", SEES_SAMPLES),)
    family = "global"
    paper = "Karimireddy et al. 2021"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "3 / 2, in two exchanges"
    refuses = (("augment", "corrects by gradients over the samples as they are"),)

    def exchanges(self) -> int:
        """Gradients first, then training."""
        return 2

    def start(self, federation: Federation) -> MimeServer:
        """The initial model; SGD has no statistics."""
        require_plain_sgd(federation.local, self.name)
        return MimeServer(federation.initial())

    def round(self, server: MimeServer, federation: Federation, cohort: np.ndarray) -> MimeServer:
        """The gradients at w, then local training with their mean."""
        after = corrected_round(server, federation, cohort, svrg_training)
        return server if after is None else MimeServer(after[0])
