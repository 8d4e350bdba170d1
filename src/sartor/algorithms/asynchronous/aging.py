"""What methods share that do not wait for everyone: settings, weights by age, delay compensation.

All of them put idle clients of the round's cohort to work and take what arrives in virtual time; they differ
in when a round ends and in what an answer of a certain age is worth. An answer's age counts the server's
rounds since the client got its model (FedAsync: the server's updates).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sartor.algorithms.base import Hyper, Server
from sartor.algorithms.server.staleness import KINDS, adaptive_factors, compensate, decay
from sartor.client.local import Client, require_plain_sgd
from sartor.federation.exchange import Replies, Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class AsyncHyper(Hyper):
    """What asynchronous methods have in common: who works, and what an age takes away."""

    concurrency: int = setting(0, "clients at work at once; 0: everyone who is drawn", low=0)
    staleness: str = setting("polynomial", "how an answer's weight falls with its age", choices=KINDS)
    exponent: float = setting(0.5, "polynomial: weight (1 + age)^−a", symbol="a", low=0)
    slope: float = setting(10.0, "hinge: weight 1 / (a (age − b) + 1)", symbol="a", low=0)
    grace: float = setting(4.0, "hinge: the age up to which the weight is 1", symbol="b", low=0)


@dataclass(frozen=True)
class CompensatedHyper(AsyncHyper):
    """With the delay compensation of DC-ASGD."""

    compensation: str = setting(
        "none",
        "correction of stale changes for what the model has moved since",
        choices=("none", "dc-asgd", "dc-asgd-adaptive"),
    )
    lam: float = setting(0.04, "factor of the compensation", symbol="λ", low=0)
    lam_adaptive: float = setting(2.0, "factor of the adaptive compensation", symbol="λ0", low=0)
    square_memory: float = setting(
        0.95, "adaptive compensation: weight of the old mean square", symbol="m", low=0, below=1
    )


def weights_by_age(hyper: AsyncHyper, ages: Tensor) -> Tensor:
    """c(age) of the method's settings."""
    return decay(ages, hyper.staleness, hyper.exponent, hyper.slope, hyper.grace)


def ages_of(replies: Replies) -> Tensor:
    """The ages of collected replies in rounds, as numbers beside them."""
    return replies.age.to(replies.dtype)


def local_training(client: Client, hyper: Hyper, w: Tensor) -> Reply:
    """K_i steps from w: the change Δ_i, and Σ_k η_k of the steps."""
    return Reply(delta=client.descend(w, lr=hyper.lr) - w, work=client.work(hyper.lr))


@dataclass(frozen=True)
class AsyncServer(Server):
    """The global model, and DC-ASGD's mean square where it is adaptive."""

    square: Tensor | None = None


def first_server(hyper: CompensatedHyper, federation: Federation) -> dict[str, Any]:
    """The start of a method with compensation; local optimisers for which that has no meaning are refused."""
    if hyper.compensation != "none":
        require_plain_sgd(federation.local, "hyper.compensation")
    w = federation.initial()
    return {"w": w, "square": torch.zeros_like(w) if hyper.compensation == "dc-asgd-adaptive" else None}


def compensated(
    hyper: CompensatedHyper, change: Tensor, work: Tensor, drift: Tensor, square: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Changes, one row each, corrected for the drift of the model since they started; and the mean square."""
    if hyper.compensation == "none":
        return change, square
    if square is None:
        return compensate(change, work, drift, hyper.lam), None
    factors, square = adaptive_factors(change, work, square, hyper.square_memory, hyper.lam_adaptive)
    return compensate(change, work, drift, factors), square
