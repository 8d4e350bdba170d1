"""IFCA (Ghosh et al. 2020): several global models, each client trains the one that suits it best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.server.weights import weights_of
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.task import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class IFCAHyper(Hyper):
    """IFCA's hyper-parameters."""

    clusters: int = setting(2, "number of global models", symbol="k", low=1)
    weighted: bool = setting(False, "weigh clients by their samples; else all alike")


@dataclass(frozen=True)
class IFCAServer:
    """The models, [k, d], and how many clients trained each in the last round."""

    models: Tensor
    members: Tensor


def models_apart(federation: Federation, count: int, stream: str) -> Tensor:
    """The initial model, and copies of it with the signs of its numbers drawn anew, [count, d]."""
    w = federation.initial()
    models = [w]
    for index in range(1, count):
        draws = random.uniform(random.fold(federation.stream(stream), index), len(w), w.device)
        models.append(torch.where(draws < 0.5, -w, w))
    return torch.stack(models)


def losses(client: Client, models: Tensor, split: str = "train") -> Tensor:
    """The mean loss of each of several models over a split, in one pass and in evaluation mode."""

    def of_batch(batch: Batch) -> Tensor:
        each = [batch.mean(client.task.losses(w, batch, client.buffers)) for w in models.unbind()]
        return torch.stack(each)

    return client.mean(of_batch, models[:, 0], split)


def nearest(client: Client, models: Tensor) -> Tensor:
    """argmin_j f_i(w_j) on the client's training data; the smallest j of several."""
    return losses(client, models).argmin()


def local_training(client: Client, hyper: IFCAHyper, models: Tensor) -> Reply:
    """Choose a model, then K_i steps from it."""
    choice = nearest(client, models)  # step 1
    w = models.index_select(0, choice[None])[0]
    return Reply(delta=client.descend(w, lr=hyper.lr) - w, choice=choice)  # step 2


@personal
def nearest_model(client: Client, hyper: Hyper, models: Tensor) -> Reply:
    """The model with the lowest loss on the client's training data."""
    return Reply(w=models.index_select(0, nearest(client, models)[None])[0])


@register
class IFCA(Algorithm[IFCAHyper, IFCAServer]):
    """k global models; in every round a client trains the one with the lowest loss on its training data.

    Variant: model averaging, the mean over a model's members of the round, all alike as in the authors' code
    (``weighted``: by samples); a model without members stays as it is. Equal models would never part, so the
    first is the initial model and the others have the signs of its numbers drawn anew, which keeps the law
    of their sizes. BatchNorm statistics stay with the client. Evaluated: the model with the lowest loss on
    the client's training data (personal), chosen anew each time, also for a newcomer; and all k (shared).
    """

    name = "ifca"
    family = "personal"
    paper = "Ghosh et al. 2020"
    server_keeps = "k models"
    client_keeps = "nothing"
    traffic = "k / 1"
    buffers = "local"

    def start(self, federation: Federation) -> IFCAServer:
        """The initial model, and copies of it with other signs."""
        models = models_apart(federation, self.hyper.clusters, "ifca")
        return IFCAServer(models, models.new_zeros(self.hyper.clusters))

    def round(self, server: IFCAServer, federation: Federation, cohort: np.ndarray) -> IFCAServer:
        """Choice and local training at the cohort, then a mean for every model."""
        replies = federation.map(local_training, cohort, {"models": server.models})
        chosen = [replies["choice"] == place for place in range(self.hyper.clusters)]
        moved = [
            w + replies.sum("delta", weights_of(replies, self.hyper.weighted, members))  # step 3
            for w, members in zip(server.models, chosen, strict=True)
        ]
        return IFCAServer(torch.stack(moved), torch.stack(chosen).sum(dim=1).to(moved[0].dtype))

    def shared(self, server: IFCAServer) -> Tensor:
        """The k models."""
        return server.models

    def personalize(self, server: IFCAServer, cohort: np.ndarray) -> Call:
        """The model that suits the client's training data best."""
        return Call(nearest_model, shared={"models": server.models})

    def observe(self, server: IFCAServer) -> dict[str, Any]:
        """How many clients of the last round trained each model."""
        return {"members": server.members}
