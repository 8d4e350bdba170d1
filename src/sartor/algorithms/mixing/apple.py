"""APPLE (Luo & Wu 2022): every personal model is a learned mixture of all clients' core models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.server.tables import rows
from sartor.client.local import Client, refuse
from sartor.federation.exchange import Call, Reply, changes, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class AppleHyper(Hyper):
    """APPLE's hyper-parameters."""

    lr: float = setting(0.1, "learning rate of the core model", symbol="η", above=0)
    mixing_lr: float = setting(0.001, "learning rate of the mixing weights", symbol="η_p", low=0)
    mu: float = setting(0.1, "how strongly the mixing weights are held near p0", symbol="μ", low=0)
    horizon: int = setting(20, "rounds after which p0 no longer holds them", symbol="L", low=0)
    fading: str = setting(
        "cosine", "how the hold of p0 fades over these rounds", symbol="λ(r)", choices=("cosine", "epsilon")
    )
    anchor: str = setting(
        "samples", "p0: n_j / n, or the client's own core alone", symbol="p0", choices=("samples", "own")
    )


@dataclass(frozen=True)
class AppleServer:
    """The core models, [N, d], p0 of all clients, and which core is whose (−1: a newcomer has none)."""

    cores: Tensor
    shares: Tensor
    places: Tensor


class _Mixture:
    """w_i = Σ_j p_ij c_j with the client's own core apart from those it was sent."""

    def __init__(self, hyper: AppleHyper, cores: Tensor, shares: Tensor, place: Tensor) -> None:
        self.cores = cores
        self.own = (torch.arange(len(cores), device=cores.device) == place).to(cores.dtype)
        self.anchor = self.own if hyper.anchor == "own" else shares

    def weights(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """p_i, and p_ii."""
        p = self.anchor + shift
        return p, p @ self.own

    def model(self, core: Tensor, shift: Tensor) -> Tensor:
        """Step 1: w_i."""
        p, p_own = self.weights(shift)
        return (p * (1 - self.own)) @ self.cores + p_own * core


@changes(core=lambda task, cores, place: cores.index_select(0, place[None])[0])
def local_training(
    client: Client,
    hyper: AppleHyper,
    cores: Tensor,
    shares: Tensor,
    hold: Tensor,
    place: Tensor,
    core: Tensor,
    shift: Tensor,
) -> Reply:
    """K_i steps of the client's core c_i and of its p_i = p0 + ``shift``; the core goes back, p_i stays."""
    mixture, size = _Mixture(hyper, cores, shares, place), len(core)
    ratio, decay = hyper.mixing_lr / hyper.lr, client.local.weight_decay

    def direction(both: Tensor, batch: Batch) -> Tensor:
        c_i, shift = both[:size], both[size:]
        _, p_own = mixture.weights(shift)
        g = client.grad(mixture.model(c_i, shift), batch)  # step 2: G
        inner = torch.where(mixture.own > 0, c_i @ g, cores @ g)  # ⟨G, c_j⟩
        mixing = ratio * (inner + hold * hyper.mu * shift)  # λ(r) μ (p_ij − p0_j)
        # Weight decay is for models: what descend will add for the mixing weights is taken off.
        return torch.cat([p_own * g, mixing - decay * shift])

    both = client.descend(torch.cat([core, shift]), direction, lr=hyper.lr)
    return Reply(core=both[:size]).keep(core=both[:size], shift=both[size:])  # step 3


@personal
def mixed_model(
    client: Client,
    hyper: AppleHyper,
    cores: Tensor,
    shares: Tensor,
    place: Tensor,
    core: Tensor,
    shift: Tensor,
) -> Reply:
    """w_i of the current cores."""
    return Reply(w=_Mixture(hyper, cores, shares, place).model(core, shift))


@register
class Apple(Algorithm[AppleHyper, AppleServer]):
    """A client learns a core model and the weights with which it mixes all clients' cores into its own model.

    For all clients in every round, as the paper: a few silos, each of which downloads all N cores. The hold
    of p0 has the gradient μ (p − p0) and fades over the first L rounds. Weights are not constrained and may
    be negative. All cores start from the initial model, so that w_i starts as it too. Of absent clients the
    last core is used. Momentum and weight decay of ``local`` are allowed; Adam and clipping are not: the two
    rates would lose their meaning. BatchNorm statistics stay with the client. Evaluated: w_i with the current
    cores, after aggregation; a newcomer mixes them by p0 = n_j / n.
    """

    name = "apple"
    family = "personal"
    paper = "Luo & Wu 2022"
    server_keeps = "N core models (N × d)"
    client_keeps = "p_i (N numbers), its core"
    traffic = "N / 1"
    buffers = "local"
    quadratic = True
    reduces = "rows"

    def start(self, federation: Federation) -> AppleServer:
        """Equal cores, mixed by p0."""
        refuse(federation.local, self.name, "is defined for SGD steps with two rates", "optimizer", "clip")
        w, clients = federation.initial(), federation.clients
        sizes = federation.sizes.double()
        shares = (sizes / sizes.sum().clamp(min=1)).to(w.dtype)
        federation.declare(core=w, shift=torch.zeros_like(shares))
        return AppleServer(w.expand(clients, -1).clone(), shares, torch.arange(clients, device=w.device))

    def hold(self, round: int) -> float:
        """λ(r), r being the number of rounds that are over; rounds count from 1."""
        over, horizon = max(round - 1, 0), self.hyper.horizon
        if over >= horizon:
            return 0.0
        return (
            (1 + math.cos(math.pi * over / horizon)) / 2
            if self.hyper.fading == "cosine"
            else 1e-3 ** (over / horizon)
        )

    def round(self, server: AppleServer, federation: Federation, cohort: np.ndarray) -> AppleServer:
        """Local training of cores and mixing weights at the cohort; the new cores replace the old."""
        shared = {"cores": server.cores, "shares": server.shares, "hold": self.hold(federation.round)}
        place = server.places[federation.tensor(cohort)]
        replies = federation.map(local_training, cohort, shared, {"place": place})
        answered = server.places[replies.index]
        cores = torch.where(replies.trusted("core")[:, None], replies["core"], server.cores[answered])
        return replace(server, cores=server.cores.index_copy(0, answered, cores))

    def shared(self, server: AppleServer) -> None:
        """There is no shared model."""

    def personalize(self, server: AppleServer, cohort: np.ndarray) -> Call:
        """The client's mixture of the current cores."""
        place = rows(server.places, cohort)
        return Call(mixed_model, {"cores": server.cores, "shares": server.shares}, {"place": place})

    def welcome(self, server: AppleServer, federation: Federation) -> AppleServer:
        """Newcomers have no core and mix those there are by the samples behind them."""
        federation.declare(core=server.cores[0], shift=torch.zeros_like(server.shares))
        places = torch.full((federation.clients,), -1, device=server.places.device)
        return replace(server, places=places)
