"""FedAMP and HeurFedAMP (Huang et al. 2021): attentive message passing between similar clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.mixing.last_models import Models, near_target
from sartor.algorithms.references.separate import own_model
from sartor.algorithms.server.similarity import cosines, mixtures, others_of, softmax_over, squared_distances
from sartor.federation.exchange import Call
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedAMPHyper(Hyper):
    """FedAMP's hyper-parameters."""

    lam: float = setting(1.0, "weight of the attention-inducing term", symbol="λ", low=0)
    alpha: float = setting(1e4, "step of the server on that term, in the first rounds", symbol="α_k", above=0)
    alpha_decay: float = setting(0.1, "factor on α_k after every `alpha_rounds` rounds", above=0, high=1)
    alpha_rounds: int = setting(30, "rounds between two decays of α_k", low=1)
    sigma: float = setting(1e6, "squared distance beyond which attention fades", symbol="σ", above=0)
    start: str = setting(
        "u", "where local training starts: the client's own model, or u_i", choices=("w", "u")
    )


H = TypeVar("H", bound=FedAMPHyper)


@dataclass(frozen=True)
class FedAMPServer(Models):
    """The known models, and how much of its own model a client got in the last round, on average."""

    own_share: Tensor


@register
class FedAMP(Algorithm[H, FedAMPServer]):
    """Every client trains near a mixture u_i of all models in which those near its own weigh more.

    ξ_ij = α_k A'(‖w_i − w_j‖²) with A(x) = 1 − e^{−x/σ}; ξ_ii is the rest. Where the others would take more
    than all, their weights are scaled to 1. The penalty is λ/(2 α_k) ‖w − u_i‖², a squared norm with a
    gradient, and no stronger than 1/(2 η): then its part of a step leads to u_i, and more would lead beyond,
    which α_k comes to in more rounds than the paper's 100. The paper leaves the start of local training open;
    with its α_k the penalty is too weak to carry anything, so it is u_i here (``start = "w"``: the client's
    own model). For all clients in every round, as the paper; with some of them, absent ones count with their
    last known model and those that never trained not at all. BatchNorm statistics stay with the client.
    Evaluated: w_i after its last local training; a newcomer has the initial model until it trains.
    """

    name = "fedamp"
    family = "personal"
    paper = "Huang et al. 2021"
    server_keeps = "the last model of every client (N × d); its work is N² d"
    client_keeps = "w_i"
    traffic = "1 / 1"
    buffers = "local"
    quadratic = True
    reduces = "rows"

    def start(self, federation: Federation) -> FedAMPServer:
        """Everyone has the initial model; nobody is known yet."""
        w = federation.initial()
        federation.declare(w_i=w)
        return FedAMPServer(**Models.initial(federation), own_share=w.new_ones(()))

    def attention(self, server: FedAMPServer, clients: Tensor, alpha: float) -> Tensor:
        """ξ_ij of other clients for the clients i, [n, N], where α_k is ``alpha``."""
        others = others_of(clients, server.known)
        x = squared_distances(server.models[clients], server.models)
        xi = torch.where(
            others, alpha / self.hyper.sigma * torch.exp(-x / self.hyper.sigma), 0.0
        )  # α_k A'(x)
        return xi / xi.sum(dim=1, keepdim=True).clamp(min=1)

    def rate(self, round: int) -> float:
        """α_k of a round; rounds count from 1."""
        hyper = self.hyper
        return float(hyper.alpha * hyper.alpha_decay ** (max(round - 1, 0) // hyper.alpha_rounds))

    def pull(self, alpha: float) -> float:
        """λ/α_k, and no more than a step of η can follow."""
        most = 1 / self.hyper.lr if self.hyper.lr else math.inf
        return max(-most, min(self.hyper.lam / alpha, most))

    def round(self, server: FedAMPServer, federation: Federation, cohort: np.ndarray) -> FedAMPServer:
        """u_i for the cohort from all known models, then local training near it."""
        clients = federation.tensor(cohort)
        alpha = self.rate(federation.round)
        own: list[Tensor] = []

        def weights(some: Tensor) -> Tensor:
            xi = self.attention(server, some, alpha)
            own.append(1 - xi.sum(dim=1))
            return xi.scatter(1, some[:, None], own[-1][:, None])  # ξ_ii = 1 − Σ_j ξ_ij

        u = mixtures(server.models, clients, weights)
        pull = torch.full_like(server.known[clients], self.pull(alpha))
        replies = federation.map(near_target, cohort, each={"target": u, "pull": pull})
        share = torch.cat(own).mean().to(u.dtype)
        return replace(server, **server.received(replies), own_share=share)

    def shared(self, server: FedAMPServer) -> None:
        """There is no shared model."""

    def personalize(self, server: FedAMPServer, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model)

    def welcome(self, server: FedAMPServer, federation: Federation) -> FedAMPServer:
        """Newcomers have the initial model."""
        return self.start(federation)

    def observe(self, server: FedAMPServer) -> dict[str, Any]:
        """ξ_ii, on average over the last cohort."""
        return {"own_share": server.own_share}


@dataclass(frozen=True)
class HeurFedAMPHyper(FedAMPHyper):
    """HeurFedAMP's hyper-parameters."""

    lam: float = setting(
        1.0, "weight of the attention-inducing term; below 0 it pushes models apart", symbol="λ"
    )
    sigma: float = setting(25.0, "how much larger cosines weigh more", symbol="σ", low=0)
    own: float = setting(0.5, "weight of a client's own model in u_i", symbol="ξ_ii", low=0, high=1)


@register
class HeurFedAMP(FedAMP[HeurFedAMPHyper]):
    """FedAMP with attention from the angles between models: ξ_ij ∝ e^{σ cos(w_i, w_j)}, ξ_ii a constant.

    Made for large networks, whose distances say little. All else is as in FedAMP: when u_i is made, where
    training starts, what is evaluated (w_i after its last local training), what a newcomer has (the initial
    model).
    """

    name = "heurfedamp"

    def attention(self, server: FedAMPServer, clients: Tensor, alpha: float) -> Tensor:
        """ξ_ij of other clients for the clients i, [n, N]: (1 − ξ_ii) times a softmax of cosines."""
        similar = cosines(server.models[clients], server.models)
        others = others_of(clients, server.known)
        return (1 - self.hyper.own) * softmax_over(self.hyper.sigma * similar, others)
