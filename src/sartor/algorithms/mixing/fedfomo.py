"""FedFomo (Zhang et al. 2021): first-order model optimisation, towards others' models that help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, register
from sartor.algorithms.mixing.ifca import losses
from sartor.algorithms.mixing.last_models import Models
from sartor.client.local import Client
from sartor.errors import SettingError
from sartor.federation.exchange import Call, Reply, changes, personal
from sartor.federation.federation import Federation
from sartor.settings import setting

TINY = 1e-30
"""Stands for a distance of zero where the weight is zero anyway."""


@dataclass(frozen=True)
class FedFomoHyper(Hyper):
    """FedFomo's hyper-parameters."""

    models: int = setting(5, "models that a client weighs, its own among them", symbol="M", low=1)
    epsilon: float = setting(
        0.3, "share of clients that get models at random, in the first round", symbol="ε", low=0, high=1
    )
    epsilon_fall: float = setting(0.05, "by how much that share falls every round", low=0, high=1)


@dataclass(frozen=True)
class FedFomoServer(Models):
    """The known models, what they gained whom so far, [N, N], and which of them are on offer."""

    preferences: Tensor
    offered: Tensor


def gains(client: Client, previous: Tensor, models: Tensor) -> Tensor:
    """a_n = (L(θ_prev) − L(θ_n)) / ‖θ_n − θ_prev‖ on validation data; 0 for a model that is θ_prev."""
    loss = losses(client, torch.cat([previous[None], models]), "validation")
    distance = (models - previous).norm(dim=1)
    return torch.where(distance > 0, (loss[0] - loss[1:]) / distance.clamp(min=TINY), 0.0)  # step 2


def towards(previous: Tensor, models: Tensor, gain: Tensor, otherwise: Tensor) -> Tensor:
    """θ_prev + Σ a⁺_n (θ_n − θ_prev) with a⁺ = max(a, 0) / Σ max(a, 0); ``otherwise`` if none is positive."""
    positive = gain.clamp(min=0)
    total = positive.sum()
    share = positive / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, previous + share @ (models - previous), otherwise)  # step 3


@changes(w="known")
def local_training(
    client: Client, hyper: FedFomoHyper, others: Tensor, there: Tensor, theta: Tensor, previous: Tensor
) -> Reply:
    """Move towards the models that help, then K_i steps from there.

    ``theta`` is the client's last model, ``previous`` the one its last training started from; ``there`` is 0
    for places in ``others`` that hold no model.
    """
    models = torch.cat([theta[None], others])
    gain = gains(client, previous, models) * torch.cat([there.new_ones(1), there])
    begin = towards(previous, models, gain, otherwise=theta)
    y = client.descend(begin, lr=hyper.lr)  # step 4
    return Reply(w=y, gain=gain[1:]).keep(theta=y, previous=begin)


@personal
def own_model(client: Client, hyper: FedFomoHyper, theta: Tensor) -> Reply:
    """The client's model as it is."""
    return Reply(w=theta)


@register
class FedFomo(Algorithm[FedFomoHyper, FedFomoServer]):
    """A client weighs other clients' models by how much they lower its validation loss, and moves to them.

    Its own last model is always among the M that it weighs; the server sends M − 1 others, those that gained
    this client most so far (ties at random), or with probability ε any. On offer are the models that the last
    round brought. Variant: Euclidean norms as in the paper (the authors' code takes L1), gains added as they
    are, and where no model helps the client goes on from its own last model. Needs validation data, which
    n_i does not count. BatchNorm statistics stay with the client. Evaluated: θ_i after its last local
    training; a newcomer has the initial model until it trains.
    """

    name = "fedfomo"
    needs_validation = True
    family = "personal"
    paper = "Zhang et al. 2021"
    server_keeps = "the last model of every client (N × d), preferences (N × N)"
    client_keeps = "θ_i, and the model its last training started from"
    traffic = "M − 1 / 1, and M − 1 numbers up"
    unprotected = (("samples", SEES_SAMPLES),)
    buffers = "local"
    quadratic = True
    reduces = "rows"

    def start(self, federation: Federation) -> FedFomoServer:
        """Everyone has the initial model; nothing is on offer."""
        if "validation" not in federation.splits:
            raise SettingError(
                "fedfomo: clients weigh models on validation data and there is none; set data.validation=0.2"
            )
        return self._fresh(federation)

    def _fresh(self, federation: Federation) -> FedFomoServer:
        w, clients = federation.initial(), federation.clients
        federation.declare(theta=w, previous=w)
        preferences, offered = w.new_zeros(clients, clients), w.new_zeros(clients)
        return FedFomoServer(**Models.initial(federation), preferences=preferences, offered=offered)

    def round(self, server: FedFomoServer, federation: Federation, cohort: np.ndarray) -> FedFomoServer:
        """Models for the cohort, weighing and local training there, then what was gained."""
        clients = federation.tensor(cohort)
        chosen, there = self._choose(server, federation, clients)
        known = server.models[clients]  # for transforms: what the new model is a change of
        each = {"others": server.models[chosen], "there": there.to(known.dtype), "known": known}
        replies = federation.map(local_training, cohort, each=each)
        order = np.argsort(cohort)
        places = order[np.searchsorted(cohort[order], replies.clients)]
        answered, received = replies.index, server.received(replies)
        theirs = chosen[federation.tensor(places)]
        rows = answered[:, None].expand_as(theirs)
        return FedFomoServer(
            **received,
            preferences=server.preferences.index_put((rows, theirs), replies["gain"], accumulate=True),
            offered=torch.zeros_like(server.offered).index_copy(0, answered, received["known"][answered]),
        )

    def _choose(
        self, server: FedFomoServer, federation: Federation, clients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Step 1: M − 1 other clients for each of these, [n, M − 1], and which of the places are filled."""
        everyone = len(server.known)
        count = min(self.hyper.models, everyone) - 1
        key = random.fold(random.fold(federation.stream("fedfomo"), federation.round), clients)
        assert isinstance(key, Tensor)
        epsilon = self.hyper.epsilon - self.hyper.epsilon_fall * max(federation.round - 1, 0)
        explores = random.uniform(random.fold(key, 1)[:, None], 1, clients.device) < epsilon  # type: ignore[index]
        score = torch.where(explores, 0.0, server.preferences[clients])
        others = clients[:, None] != torch.arange(everyone, device=clients.device)
        score = score.masked_fill(~((server.offered > 0) & others), float("-inf"))
        # A stable sort of a random order: ties are broken by chance, on every device alike.
        order = random.uniform(random.fold(key, 0)[:, None], everyone, clients.device).argsort(dim=1)  # type: ignore[index]
        ranked = score.gather(1, order).argsort(dim=1, descending=True, stable=True)
        chosen = order.gather(1, ranked)[:, :count]
        return chosen, score.gather(1, chosen) > float("-inf")

    def shared(self, server: FedFomoServer) -> None:
        """There is no shared model."""

    def personalize(self, server: FedFomoServer, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model)

    def welcome(self, server: FedFomoServer, federation: Federation) -> FedFomoServer:
        """Newcomers have the initial model."""
        return self._fresh(federation)

    def observe(self, server: FedFomoServer) -> dict[str, Any]:
        """What each client's model gained every other so far."""
        return {"preferences": server.preferences}
