"""FedDF (Lin et al. 2020): the server distils the ensemble of its clients' models on public samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.own_models.mutual import divergence
from sartor.algorithms.split_models.prototypes import need_classes
from sartor.client.local import Client
from sartor.federation.exchange import Call, PerGroup, Replies, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Pass
from sartor.model.optimizers import adam
from sartor.model.task import Task
from sartor.settings import setting


@dataclass(frozen=True)
class FedDFHyper(Hyper):
    """FedDF's hyper-parameters."""

    server_lr: float = setting(0.001, "learning rate of the distillation (Adam)", low=0)
    server_steps: int = setting(50, "steps of the distillation in a round", symbol="N", low=0)
    server_batch: int = setting(128, "public samples in a step", low=1)


@dataclass(frozen=True)
class Prototypical:
    """A model for each group of clients."""

    w: tuple[Tensor, ...]


def local_training(client: Client, hyper: FedDFHyper, w: Tensor) -> Reply:
    """K_i steps from the group's model; the change goes back."""
    return Reply(delta=client.descend(w, lr=hyper.lr) - w)


@personal
def group_model(client: Client, hyper: FedDFHyper, w: Tensor) -> Reply:
    """The model of the client's group."""
    return Reply(w=w)


def ensemble(server: Prototypical, replies: Replies, tasks: tuple[Task, ...], x: Tensor) -> Tensor:
    """The mean scores of samples over all clients' models, of whatever group."""
    total: Tensor | None = None
    every: list[Tensor] = []
    for group, part in replies.by_group.items():
        models = server.w[group] + part["delta"]
        every.append(torch.vmap(lambda w, task=tasks[group]: task.outputs(w, x))(models))
        scores = every[-1].sum(dim=0)
        total = scores if total is None else total + scores
    assert total is not None
    if replies.reducer.rule is not None:
        rows = torch.cat(every)
        return replies.reducer.sum("scores", rows, torch.full_like(rows[:, 0, 0], 1 / len(rows)))
    return total / len(replies)


@register
class FedDF(Algorithm[FedDFHyper, Prototypical]):
    """Models are averaged in each group of clients, then learn from the mean scores of all clients' models.

    The public samples are those of ``[public]``; they are used at the server alone. Variant: a fixed number
    of Adam's steps at one rate, each on public samples drawn at random, without validation or early end; a
    group's model is distilled in every round that one of its clients answers in. Float buffers are frozen.
    Evaluated: the group's model (personal), which with one group is the shared model.
    """

    name = "feddf"
    family = "global"
    paper = "Lin et al. 2020"
    server_keeps = "a model for each group"
    client_keeps = "nothing"
    traffic = "1 / 1"
    buffers = "freeze"
    own_models = True
    public = True

    def start(self, federation: Federation) -> Prototypical:
        """The initial model of every group."""
        need_classes(federation, self.name)
        device = federation.public.device
        return Prototypical(tuple(task.initial(device) for task in federation.tasks))

    def round(self, server: Prototypical, federation: Federation, cohort: np.ndarray) -> Prototypical:
        """Local training at the cohort, the mean of each group, then its distillation."""
        replies = federation.map(local_training, cohort, {"w": PerGroup(server.w)})
        models = list(server.w)
        for group, part in replies.by_group.items():
            models[group] = self.distilled(
                server, replies, federation, group, models[group] + part.mean("delta")
            )
        return Prototypical(tuple(models))

    def distilled(
        self, server: Prototypical, replies: Replies, federation: Federation, group: int, w: Tensor
    ) -> Tensor:
        """A group's model after its steps towards the ensemble's scores."""
        hyper, x, task = self.hyper, federation.public, federation.tasks[group]
        optimizer = adam(0.9, 0.999, 1e-8, corrected=True)
        memory = optimizer.init(w)
        for step in range(hyper.server_steps):
            key = random.fold(random.fold(federation.stream("distil"), federation.round), step)
            drawn = random.uniform(key, len(x), x.device).argsort()[: hyper.server_batch]
            teacher = ensemble(server, replies, federation.tasks, x[drawn])

            def objective(w: Tensor, x: Tensor = x[drawn], teacher: Tensor = teacher) -> tuple[Tensor, Pass]:
                outputs = task.outputs(w, x)
                return divergence(teacher, outputs).mean(), Pass(outputs, None, None)

            direction, memory = optimizer.update(task.differentiate(objective, w)[0], memory, w)
            w = w - hyper.server_lr * direction
        return w

    def shared(self, server: Prototypical) -> Tensor | None:
        """The model, where all clients have the same."""
        return server.w[0] if len(server.w) == 1 else None

    def personalize(self, server: Prototypical, cohort: np.ndarray) -> Call | None:
        """The model of the client's group."""
        return None if len(server.w) == 1 else Call(group_model, {"w": PerGroup(server.w)})
