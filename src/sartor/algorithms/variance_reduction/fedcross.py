"""FedCross (Hu et al. 2024): several models wander among the clients and take a little of one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.references.fedavg import local_training
from sartor.algorithms.server.similarity import cosines, mean_model
from sartor.algorithms.server.weights import weights_of
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedCrossHyper(Hyper):
    """FedCross's hyper-parameters."""

    alpha: float = setting(0.99, "share of itself that a model keeps", symbol="α", low=0.5, high=1)
    models: int = setting(
        0, "models that wander; 0: one for each client of the first round's cohort", symbol="K", low=0
    )
    partner: str = setting(
        "lowest",
        "the model whose share each takes: the least or the most similar one, or one after the other",
        choices=("lowest", "highest", "in-order"),
    )


@dataclass(frozen=True)
class FedCrossServer:
    """The models, [K, d], and whose share each took last."""

    models: Tensor
    partners: Tensor


def partners_of(models: Tensor, how: str, round: int) -> Tensor:
    """For each model the other one whose share it takes; itself where it is alone.

    >>> partners_of(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), "lowest", 1).tolist()
    [2, 2, 0]
    """
    own = torch.arange(len(models), device=models.device)
    if len(models) == 1:
        return own
    if how == "in-order":
        return (own + round % (len(models) - 1) + 1) % len(models)
    similar = cosines(models, models)
    if how == "lowest":
        similar = -similar
    return similar.fill_diagonal_(-torch.inf).argmax(dim=1)


@register
class FedCross(Algorithm[FedCrossHyper, FedCrossServer]):
    """K models are handed to other clients in every round, and each takes a small share of one partner.

    Variant: the paper's Algorithm 1 without its two ways to begin faster. The models are dealt to the cohort
    anew by a shuffle; where there are more clients than models several train one, whose change is then their
    mean by samples, and a model that nobody answers for stays as it is and takes its share all the same.
    Similarity is the cosine between whole models; the first of equals counts. Evaluated: the plain mean of
    the K models (shared), which nobody trains.
    """

    name = "fedcross"
    family = "global"
    paper = "Hu et al. 2024"
    server_keeps = "K models"
    client_keeps = "nothing"
    traffic = "1 / 1"
    quadratic = True

    def start(self, federation: Federation) -> FedCrossServer:
        """Equal models; one stands for all until it is known how many there are."""
        w = federation.initial()[None]
        return FedCrossServer(w, torch.zeros(1, dtype=torch.int64, device=w.device))

    def round(self, server: FedCrossServer, federation: Federation, cohort: np.ndarray) -> FedCrossServer:
        """Deal the models, train them, then let each take a share of its partner."""
        models = server.models
        if len(models) == 1:
            models = models.expand(self.hyper.models or len(cohort), -1)
        key = random.fold(federation.stream("cross"), federation.round)
        deal = random.uniform(key, len(models), models.device).argsort()
        cohort = np.sort(cohort)
        dealt = deal[federation.tensor(np.arange(len(cohort)) % len(models))]
        replies = federation.map(local_training, cohort, each={"w": models[dealt]})
        model = dealt[federation.tensor(np.searchsorted(cohort, replies.clients))]
        numbers = range(len(models))
        changes = [replies.sum("delta", weights_of(replies, True, model == number)) for number in numbers]
        trained = models + torch.stack(changes)
        partners = partners_of(trained, self.hyper.partner, federation.round)
        crossed = trained + (1 - self.hyper.alpha) * (trained[partners] - trained)
        return FedCrossServer(crossed, partners)

    def shared(self, server: FedCrossServer) -> Tensor:
        """The mean of the models."""
        return mean_model(server.models)

    def observe(self, server: FedCrossServer) -> dict[str, Any]:
        """Whose share each model took."""
        return {"partners": server.partners}
