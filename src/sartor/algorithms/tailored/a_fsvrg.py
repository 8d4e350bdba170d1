"""A-FSVRG (Zhao et al. 2024): FSVRG whose model the server accelerates by a third exchange.

These are the rounds of MA-FSVRG and GA-FSVRG before their models part (``ma_fsvrg.py``, ``ga_fsvrg.py``), and
what both share afterwards; what clients do is in ``exchanges.py``. Equation numbers are those of
"Tailored Federated Learning With Adaptive Central Acceleration on Diversified Global Models". The server's
models are the rows of a matrix, here of one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, register
from sartor.algorithms.server.grouping import Groups, by_rule, group
from sartor.algorithms.tailored.exchanges import gradients_at, scaled_model, survey, trained_model
from sartor.algorithms.variance_reduction.fsvrg import (
    FSVRGHyper,
    aggregation_scale,
    exchange_counts,
    feature_counts,  # noqa: F401  (nodes run what a method's module has by name, so also what that asks)
    scaling,  # noqa: F401
)
from sartor.client.local import require_plain_sgd
from sartor.federation.exchange import ClientFunction, Replies
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class AFSVRGHyper(FSVRGHyper):
    """A-FSVRG's hyper-parameters. The number of local steps K is ``local.steps``."""

    lr: float = setting(12.0, "local learning rate; client i takes α_l / n_i", symbol="α_l", low=0)
    server_lr: float = setting(0.02, "server learning rate, of the acceleration", symbol="α_g", low=0)
    beta1: float = setting(0.0, "decay of the first moment", symbol="β1", low=0, below=1)
    beta2: float = setting(0.999, "decay of the second moment", symbol="β2", low=0, below=1)
    epsilon: float = setting(1e-8, "added to the second moment, under the root", symbol="ε", above=0)
    as_printed: tuple[str, ...] = setting(
        (),
        "what to take by the paper's letter: A over all clients (59), factors counted twice (62) (63)",
        choices=("scaling", "moments"),
    )


H = TypeVar("H", bound=AFSVRGHyper)


@dataclass(frozen=True)
class AFSVRGServer:
    """The models and moments, one row each; what the last round saw, one entry per client of it."""

    w: Tensor
    """The accelerated models ŵ_c."""
    m: Tensor
    """First moments of the gradients."""
    v: Tensor
    """Second moments, entry by entry."""
    updates: int
    """How many rounds have moved the models: r in the exponent of (64)."""
    clients: Tensor
    """Who took part to the end of the last round."""
    groups: Tensor
    """The group that each was put into."""
    preferences: Tensor
    """The model that each had chosen to train."""
    present: Tensor | None = None
    """Which client has which feature at all."""


@register
class AFSVRG(Algorithm[H, AFSVRGServer]):
    """FSVRG with central acceleration: an adaptive step of the server after the mean of the local models.

    Local steps are those of SVRG, at α_i = α_l / n_i. The mean of the local models is the plain one of (26);
    that of gradients has the weights p'_i. Λ and A are for models that are one linear layer on raw features;
    for others they are the identity, which the log says once. ``local.weight_decay`` is an L2 term of the
    loss: it stays outside of the bracket with Λ, and it is part of the gradient that accelerates. The factors
    (1 − β) stand in (64) alone: printed in (62) and (63) too, they make the step 1/√(1 − β2) times as long.
    Evaluated: ŵ. Traffic: w, then w and its anchor, then the mean down; ∇f_i, the local model, ∇f_i up; at
    the start one number per feature each way.
    """

    name = "a-fsvrg"
    family = "global"
    paper = "Zhao et al. 2024"
    server_keeps = "ŵ, moments m and v, which client has which feature"
    client_keeps = "scaling Λ_i of the features"
    traffic = "4 / 3, in three exchanges"
    unprotected = (("samples", SEES_SAMPLES),)
    refuses = (("augment", "corrects by gradients over the samples as they are"),)

    def exchanges(self) -> int:
        """Survey, training, and the gradients at what came of it."""
        return 3

    def start(self, federation: Federation) -> AFSVRGServer:
        """One model; the clients' feature counts are exchanged."""
        require_plain_sgd(federation.local, self.name)
        present = exchange_counts(federation, self.name, "Λ") if self.hyper.scaled else None
        w = federation.initial()[None]
        zero, nobody = torch.zeros_like(w), torch.zeros(0, dtype=torch.int64, device=w.device)
        return AFSVRGServer(w, zero, zero, 0, nobody, nobody, nobody, present)

    def round(self, server: AFSVRGServer, federation: Federation, cohort: np.ndarray) -> AFSVRGServer:
        """Anchors and choices, local training and grouping, acceleration: three exchanges."""
        first = federation.map(survey, np.sort(cohort), {"w": server.w})
        able = np.flatnonzero(first.counts)  # without samples a client has neither model nor gradient
        if not len(able):
            return server
        g = self.anchors(server, federation, first)
        choice = first["loss"].argmin(dim=1)[able]  # (18)
        each = {"w": server.w[choice], "g": g[choice]}
        second = federation.map(self.training(server, federation), first.clients[able], each=each)
        trained = second["trained"]
        found = self.grouped(server, federation, trained, first.mean("gradient"))  # (52)
        found = by_rule(found, trained, federation.reducer)
        scale = self.scale(server, federation, second)
        w = server.w + scale * self.change(server, federation, found, scale)  # (60)
        third = federation.map(gradients_at, second.clients, {"w": w})
        gradient = third.mean("gradient") + federation.local.weight_decay * w  # (61)
        remained = np.searchsorted(first.clients[able], second.clients)
        return replace(
            self.accelerated(server, w, gradient),
            clients=second.index,
            groups=found.members,
            preferences=choice[remained],
        )

    # What MA-FSVRG and GA-FSVRG do in their own way -----------------------------------------------

    def anchors(self, server: AFSVRGServer, federation: Federation, first: Replies) -> Tensor:
        """The mean gradient of every model over the clients of the round."""
        return first.mean("gradient")  # (16)

    def training(self, server: AFSVRGServer, federation: Federation) -> ClientFunction:
        """What clients do in exchange 2."""
        return trained_model if server.present is None else scaled_model

    def grouped(self, server: AFSVRGServer, federation: Federation, trained: Tensor, g: Tensor) -> Groups:
        """What came back in groups; here there is one, and its representative is the plain mean."""
        return group(trained, server.w, 1, key=0)

    def change(
        self, server: AFSVRGServer, federation: Federation, found: Groups, scale: Tensor | float
    ) -> Tensor:
        """ŵ*_c − ŵ_c, before it is scaled."""
        return found.representatives - server.w

    # The server's step ----------------------------------------------------------------------------

    def scale(self, server: AFSVRGServer, federation: Federation, second: Replies) -> Tensor | float:
        """A_r: rare features move further."""
        if server.present is None:
            return 1.0
        printed = "scaling" in self.hyper.as_printed
        having = server.present if printed else server.present[second.clients]
        return aggregation_scale(federation.task, having.sum(dim=0), len(second))  # (59)

    def accelerated(self, server: AFSVRGServer, w: Tensor, g: Tensor) -> AFSVRGServer:
        """A step against the gradients at w, each entry in units of its own size."""
        hyper, updates = self.hyper, server.updates + 1
        beta1, beta2 = hyper.beta1, hyper.beta2
        printed = "moments" in hyper.as_printed
        m = torch.add((1 - beta1 if printed else 1.0) * g, server.m, alpha=beta1)  # (62)
        v = torch.addcmul(beta2 * server.v, g, g, value=1 - beta2 if printed else 1.0)  # (63)
        rate = hyper.server_lr * (1 - beta1) * math.sqrt((1 - beta2**updates) / (1 - beta2))
        w = torch.addcdiv(w, m, (v + hyper.epsilon).sqrt_(), value=-rate)  # (64)
        return replace(server, w=w, m=m, v=v, updates=updates)

    def shared(self, server: AFSVRGServer) -> Tensor:
        """The one model."""
        return server.w[0]
