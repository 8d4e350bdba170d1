"""IFCA (Ghosh et al. 2020): several global models, each client trains the one that suits it best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, register
from sartor.algorithms.server.weights import weights_of
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting

ROUNDING = 64
"""By so many roundings two losses may differ that are equal: another engine adds them up in another order."""


@dataclass(frozen=True)
class IFCAHyper(Hyper):
    """IFCA's hyper-parameters."""

    clusters: int = setting(2, "number of global models", symbol="k", low=1)
    weighted: bool = setting(False, "weigh clients by their samples; else all alike")
    several: str = setting(
        "all", "of what there are k: whole models, or heads on one shared body", choices=("all", "head")
    )
    start: str = setting(
        "auto",
        "how the k begin: signs, those of the initial numbers drawn anew; same, all equal, and whom a client "
        "trains first is drawn; auto: signs for a named model, same for your own, which may be trained",
        choices=("auto", "signs", "same"),
    )


@dataclass(frozen=True)
class IFCAServer:
    """The models, [k, d], and how many clients trained each in the last round."""

    models: Tensor
    members: Tensor


def models_apart(federation: Federation, count: int, stream: str, where: Tensor | None = None) -> Tensor:
    """The initial model, and copies of it with the signs of its numbers (``where``, or all) drawn anew."""
    w = federation.initial()
    models = [w]
    for index in range(1, count):
        draws = random.uniform(random.fold(federation.stream(stream), index), len(w), w.device)
        models.append(torch.where(draws < 0.5 if where is None else where & (draws < 0.5), -w, w))
    return torch.stack(models)


def losses(client: Client, models: Tensor, split: str = "train") -> Tensor:
    """The mean loss of each of several models over a split, in one pass and in evaluation mode."""

    def of_batch(batch: Batch) -> Tensor:
        each: Tensor = client.task.each(
            lambda w: batch.mean(client.task.losses(w, batch, client.buffers)), models
        )
        return each

    return client.mean(of_batch, models[:, 0], split)


def nearest(client: Client, models: Tensor) -> Tensor:
    """argmin_j f_i(w_j) on the client's training data; the smallest j of several."""
    return losses(client, models).argmin()


def local_training(client: Client, hyper: IFCAHyper, models: Tensor, body: Tensor | None = None) -> Reply:
    """Choose a model, then K_i steps from it. Of several that are equally good one is drawn.

    Where a ``body`` comes along, ``models`` are heads on it.
    """
    if body is not None:
        whole = client.task.part("body").put(models.new_zeros(client.task.size), body)
        models = client.task.part("head").put(whole, models)
    loss = losses(client, models)
    draws = random.uniform(client.stream("ifca"), len(models), models.device)
    best = loss.min()
    equal = loss - best <= ROUNDING * torch.finfo(loss.dtype).eps * best.abs()
    choice = torch.where(equal, draws, -1.0).argmax()  # step 1
    w = models[choice[None]][0]
    return Reply(delta=client.descend(w, lr=hyper.lr) - w, choice=choice)  # step 2


@personal
def nearest_model(client: Client, hyper: Hyper, models: Tensor) -> Reply:
    """The model with the lowest loss on the client's training data; of one there is nothing to try."""
    if len(models) == 1:
        return Reply(w=models[0])
    return Reply(w=models[nearest(client, models)[None]][0])


@personal
def nearest_row(client: Client, hyper: Hyper, models: Tensor) -> Reply:
    """Which of the models that is."""
    alone = torch.zeros((), dtype=torch.int64, device=models.device)
    return Reply(row=alone if len(models) == 1 else nearest(client, models))


@register
class IFCA(Algorithm[IFCAHyper, IFCAServer]):
    """k global models; in every round a client trains the one with the lowest loss on its training data.

    Variant: model averaging, the mean over a model's members of the round, all alike as in the authors' code
    (``weighted``: by samples); a model without members stays as it is. Equal models would never part: the
    first is the initial model and the others have the signs of its numbers drawn anew, which keeps the law
    of their sizes; or all are the initial model, as one that was trained would lose all by that, and whom
    clients train first is drawn. ``several = "head"`` has k heads on one body, the mean over all clients, as
    the authors' variant for deep networks. BatchNorm statistics stay with the client. Evaluated: the model
    with the lowest loss on the client's training data (personal), chosen anew each time, also for a newcomer;
    and all k (shared).
    """

    name = "ifca"
    family = "personal"
    paper = "Ghosh et al. 2020"
    server_keeps = "k models"
    client_keeps = "nothing"
    traffic = "k / 1"
    unprotected = (
        ("local", "its clients send whole numbers, their choices"),
        ("samples", SEES_SAMPLES),
    )
    buffers = "local"

    def start(self, federation: Federation) -> IFCAServer:
        """The initial model, and copies of it, with other signs where its numbers say nothing yet."""
        hyper, task, w = self.hyper, federation.task, federation.initial()
        signs = hyper.start == "signs" or (hyper.start == "auto" and task.drawn)
        where = task.part("head").mask(w) if hyper.several == "head" else torch.ones_like(w, dtype=torch.bool)
        models = models_apart(federation, hyper.clusters, "ifca", where & signs)
        return IFCAServer(models, w.new_zeros(hyper.clusters))

    def round(self, server: IFCAServer, federation: Federation, cohort: np.ndarray) -> IFCAServer:
        """Choice and local training at the cohort, then a mean for every model."""
        hyper, models = self.hyper, server.models
        sent = {"models": models}
        if hyper.several == "head":
            head, body = federation.task.part("head"), federation.task.part("body")
            sent = {"models": head.take(models), "body": body.take(models[0])}
        replies = federation.map(local_training, cohort, sent)
        chosen = [replies["choice"] == place for place in range(hyper.clusters)]
        moved = torch.stack(
            [
                w + replies.sum("delta", weights_of(replies, hyper.weighted, members))  # step 3
                for w, members in zip(models, chosen, strict=True)
            ]
        )
        if hyper.several == "head":
            everyones = models[0] + replies.sum("delta", weights_of(replies, hyper.weighted))
            moved = head.put(everyones, head.take(moved))
        return IFCAServer(moved, torch.stack(chosen).sum(dim=1).to(moved.dtype))

    def shared(self, server: IFCAServer) -> Tensor:
        """The k models."""
        return server.models

    def personalize(self, server: IFCAServer, cohort: np.ndarray) -> Call:
        """The model that suits the client's training data best."""
        return Call(nearest_model, shared={"models": server.models}, row=nearest_row)

    def observe(self, server: IFCAServer) -> dict[str, Any]:
        """How many clients of the last round trained each model."""
        return {"members": server.members}
