"""ComFed's client mechanisms: what a client does against drifting away from the others.

Line numbers are those of the paper's algorithm 2 (Nguyen et al. 2022); ``comfed.py`` combines a mechanism
with a server optimizer. With ``as_printed`` the equations are those of the paper by their letter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.algorithms.base import Hyper
from sartor.federation.exchange import Reply
from sartor.local import Client, Direction
from sartor.settings import setting
from sartor.task import Batch

TINY = 1e-30
"""Stands for a divisor of zero where the dividend is zero too: clients that took no step."""


@dataclass(frozen=True)
class Mechanism(Hyper):
    """What every client mechanism can be told."""

    local_beta: float = setting(
        0.0, "share of the server's momentum in the local direction; 0: none", symbol="β", low=0, below=1
    )
    as_printed: bool = setting(False, "the paper's equations by their letter")


@dataclass(frozen=True)
class Prox(Mechanism):
    """What Prox can be told."""

    mu: float = setting(0.005, "pull towards the global model", symbol="μ", low=0)


@dataclass(frozen=True)
class Scaf(Mechanism):
    """What Scaf can be told."""

    option: str = setting(
        "I", "new c_i: I, the gradient at w; II, the mean gradient of the local steps", choices=("I", "II")
    )
    weighted: bool = setting(False, "weigh Δ_i and c_i by the clients' samples; else all clients alike")


@dataclass(frozen=True)
class Nova(Mechanism):
    """What Nova can be told."""

    mu: float = setting(0.0, "pull towards the global model", symbol="μ", low=0)


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


def pulled(client: Client, mu: float, w: Tensor) -> Direction:
    """Line 10: g_i(y) + μ (y − w)."""
    return lambda y, batch: client.grad(y, batch) + mu * (y - w)


def sgd(client: Client, hyper: Mechanism, w: Tensor, m: Tensor | None = None) -> Reply:
    """Line 8: y ← y − η g_i(y)."""
    return Reply(**solve(client, hyper, w, client.grad, m))


def prox(client: Client, hyper: Prox, w: Tensor, m: Tensor | None = None) -> Reply:
    """Line 10: y ← y − η (g_i(y) + μ (y − w))."""
    return Reply(**solve(client, hyper, w, pulled(client, hyper.mu, w), m, hyper.mu))


def nova(client: Client, hyper: Nova, w: Tensor, m: Tensor | None = None) -> Reply:
    """Lines 8, 11 and 14: Δ_i with η‖a_i‖₁ and η K_i."""
    direction = pulled(client, hyper.mu, w) if hyper.mu else client.grad
    reply = solve(client, hyper, w, direction, m, hyper.mu, measured=True)
    return Reply(**reply, steps=client.work(hyper.lr))


def scaf(client: Client, hyper: Scaf, w: Tensor, c: Tensor, c_i: Tensor, m: Tensor | None = None) -> Reply:
    """Lines 9, 12 and 15: y ← y − η (g_i(y) + c − c_i), then the new c_i, which stays at the client."""
    old = c if hyper.as_printed else c_i  # line 4 prints c_i ← c
    at_w = client.full_gradient(w) if hyper.option == "I" else w  # before the buffers move
    reply = solve(client, hyper, w, lambda y, batch: client.grad(y, batch) + (c - old), m)
    distance = client.work(hyper.lr)
    if hyper.option == "I":
        new = at_w
    else:
        mean = -reply["delta"] / distance.clamp(min=TINY)
        if m is not None:
            mean = (mean - hyper.local_beta * m) / (1 - hyper.local_beta)
        new = old - c + mean
    new = torch.where(distance > 0, new, old)  # without a step there is nothing new to know
    return Reply(**reply, control=new - old).keep(c_i=new)
