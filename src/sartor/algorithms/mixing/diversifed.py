"""DiversiFed: similar personal models are pulled together, dissimilar ones pushed apart.

The server's loss for a client (4) is the mean over the others j of log softmax_j(‖w_i − w_j‖ / τ); one step
of gradient descent on it (6) gives z_i, and the client trains near z_i (7). Equation numbers are the
paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.mixing.last_models import Models, near_target
from sartor.algorithms.references.separate import own_model
from sartor.algorithms.server.similarity import distances, mixtures, others_of, softmax_over
from sartor.federation.exchange import Call
from sartor.federation.federation import Federation
from sartor.settings import setting

MOST_OBSERVED = 256
"""With up to so many clients the coefficients between all of them are kept, to be recorded and plotted."""


@dataclass(frozen=True)
class DiversiFedHyper(Hyper):
    """DiversiFed's hyper-parameters."""

    lam: float = setting(2.0, "weight of the distance loss", symbol="λ", low=0)
    tau: float = setting(1.0, "temperature that scales distances", symbol="τ", above=0)
    alpha: float = setting(1.0, "step of the server on the distance loss", symbol="α", above=0)
    start: str = setting(
        "w", "where local training starts: the client's own model, or z_i", choices=("w", "z")
    )


@dataclass(frozen=True)
class DiversiFedServer(Models):
    """The known models, and what the last round did with them."""

    coefficients: Tensor | None = None
    """β_ij by which client i was last attracted to j (negative: pushed away); None with many clients."""
    seen: dict[str, Tensor] = field(default_factory=dict)
    """Numbers of the last round to record."""


def coefficients(distance: Tensor, others: Tensor, tau: float) -> Tensor:
    """β_ij = (1/(N−1) − softmax_j(D_ij/τ)) / (τ D_ij) over the others (10); 0 where D_ij = 0.

    The gradient of (4) is Σ_j β_ij (w_i − w_j): β_ij > 0 pulls w_i towards w_j.
    """
    mean = 1.0 / others.sum(dim=1, keepdim=True).clamp(min=1).to(distance.dtype)
    beta = (mean - softmax_over(distance / tau, others)) / (tau * distance)
    return torch.where(others & (distance > 0), beta, 0.0)


class Targets:
    """z_i = w_i − α Σ_j β_ij (w_i − w_j) (6)(8) as coefficients of all models, and what is recorded.

    ``trust``, one factor for each model, makes some of them count for less.
    """

    def __init__(self, server: DiversiFedServer, hyper: DiversiFedHyper, trust: Tensor | None = None) -> None:
        self.server, self.hyper, self.trust = server, hyper, trust
        self.coefficients = server.coefficients
        self.pairs = {name: server.models.new_zeros(2, dtype=torch.float64) for name in ("pulled", "pushed")}

    def __call__(self, clients: Tensor) -> Tensor:
        """The rows of some clients."""
        models, known = self.server.models, self.server.known
        others = others_of(clients, known)
        distance = distances(models[clients], models)
        beta = coefficients(distance, others, self.hyper.tau)
        if self.trust is not None:
            beta = beta * self.trust
        for name, which in (("pulled", beta > 0), ("pushed", beta < 0)):
            self.pairs[name] += torch.stack([which.sum(), (distance * which).sum()])
        if self.coefficients is not None:
            self.coefficients = self.coefficients.index_copy(0, clients, beta.to(self.coefficients.dtype))
        mixed = self.hyper.alpha * beta
        return mixed.scatter(1, clients[:, None], 1 - mixed.sum(dim=1, keepdim=True))  # (9)

    def seen(self) -> dict[str, Tensor]:
        """Which share of the pairs is pulled together, and the mean distances."""
        (pulled, near), (pushed, far) = self.pairs["pulled"], self.pairs["pushed"]
        return {
            "attracted": pulled / (pulled + pushed).clamp(min=1),
            "distance": (near + far) / (pulled + pushed).clamp(min=1),
            "distance_attracted": near / pulled.clamp(min=1),
            "distance_repelled": far / pushed.clamp(min=1),
        }


H = TypeVar("H", bound=DiversiFedHyper)
S = TypeVar("S", bound=DiversiFedServer)


def first_server(federation: Federation) -> DiversiFedServer:
    """Everyone has the initial model; nobody is known yet."""
    federation.declare(w_i=federation.initial())
    clients, small = federation.clients, federation.clients <= MOST_OBSERVED
    beta = federation.table(clients) if small else None
    return DiversiFedServer(**Models.initial(federation), coefficients=beta)


class Diversifying(Algorithm[H, S]):
    """What DiversiFed with and without waiting have in common."""

    paper = "DiversiFed"
    server_keeps = "the last model of every client (N × d); its work is N² d"
    client_keeps = "w_i"
    traffic = "1 / 1"
    buffers = "local"
    quadratic = True
    reduces = "rows"

    def shared(self, server: S) -> None:
        """There is no shared model."""

    def personalize(self, server: S, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model)

    def welcome(self, server: S, federation: Federation) -> S:
        """Newcomers have the initial model: the first training has no pull."""
        return self.start(federation)

    def observe(self, server: S) -> dict[str, Any]:
        """The share of pairs that attract, mean distances, and all β_ij of a small federation."""
        beta = {} if server.coefficients is None else {"coefficients": server.coefficients}
        return {**server.seen, **beta}


@register
class DiversiFed(Diversifying[DiversiFedHyper, DiversiFedServer]):
    """Every client trains near z_i, which lies nearer to similar models and farther from dissimilar ones.

    The server keeps the last model of every client. z_i is made for those who take part, from the last known
    models of all clients that ever trained: absent ones count with their last model, those that never
    trained not at all. A client's first training has no pull, as round 0 of the paper. Local training
    approximates (7) from the client's own w_i; ``start = "z"`` starts it from z_i. λ = 0 is Separate.
    BatchNorm statistics stay with the client. Evaluated: w_i after its last local training; a newcomer has
    the initial model until it trains.
    """

    name = "diversifed"
    family = "personal"

    def start(self, federation: Federation) -> DiversiFedServer:
        """Everyone has the initial model; nobody is known yet."""
        return first_server(federation)

    def round(self, server: DiversiFedServer, federation: Federation, cohort: np.ndarray) -> DiversiFedServer:
        """z_i for the cohort from all known models, then local training near it."""
        clients = federation.tensor(cohort)
        targets = Targets(server, self.hyper)
        z = mixtures(server.models, clients, targets)
        pull = self.hyper.lam / self.hyper.alpha * server.known[clients]
        replies = federation.map(near_target, cohort, each={"target": z, "pull": pull})
        return replace(
            server, **server.received(replies), coefficients=targets.coefficients, seen=targets.seen()
        )
