"""FedGH (Yi et al. 2023): the server trains one head for all on the class means of the clients' features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, register
from sartor.algorithms.split_models.prototypes import class_sums, feature_size, with_count
from sartor.client.local import Client
from sartor.errors import SettingError
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Pass
from sartor.model.task import Task
from sartor.nests import Nest
from sartor.settings import setting


@dataclass(frozen=True)
class FedGHHyper(Hyper):
    """FedGH's hyper-parameters."""

    server_lr: float = setting(0.1, "learning rate of the head at the server", symbol="η_θ", low=0)
    server_steps: int = setting(10, "steps of the head at the server in a round", low=0)


@dataclass(frozen=True)
class Head:
    """The head that all clients share."""

    head: Tensor


def inputs_of(task: Task) -> int:
    """How many features the head of a model takes: the second dimension of its first weight."""
    task.part("head")
    weights = [shape for name, shape in task.shapes.items() if name.startswith(f"{task.head_path}.")]
    if not weights or len(weights[0]) != 2:
        raise SettingError(f"fedgh: model {task.name}: its head {task.head_path!r} is no dense layer")
    return weights[0][1]


def local_training(client: Client, hyper: FedGHHyper, head: Tensor, w_i: Tensor) -> Reply:
    """K_i steps of the own model with the shared head; then the sums of its features by class."""
    y = client.descend(client.task.part("head").put(w_i, head), lr=hyper.lr)
    like = y.new_zeros(client.task.classes or 0, inputs_of(client.task) + 1)
    return Reply(sums=class_sums(client, y, like, with_count)).keep(w_i=y)


@personal
def with_head(client: Client, hyper: FedGHHyper, head: Tensor, w_i: Tensor) -> Reply:
    """The client's model with the shared head."""
    return Reply(w=client.task.part("head").put(w_i, head))


def scores(task: Task, head: Tensor, x: Nest, features: Tensor) -> Tensor:
    """What a head makes of features; ``x`` is a sample that the body is given for nothing."""
    w = task.part("head").put(task.initial(head.device), head)
    many = nests.rows(x, torch.zeros(len(features), dtype=torch.int64, device=features.device))
    outputs: Tensor = task.outputs(w, many, change=lambda z: features.view(z.shape))
    return outputs


@register
class FedGH(Algorithm[FedGHHyper, Head]):
    """Every client has a body of its own under one head, which the server trains on class means of features.

    All heads are alike, a dense layer; before training a client puts the shared one on its model. Variant:
    the server's steps are on all class means of the round at once, each counted once; the means are taken in
    a pass of their own after training, in evaluation mode. Float buffers stay with the client. Evaluated: the
    client's model after its last training with the shared head after the server's. A newcomer has the initial
    body.
    """

    name = "fedgh"
    family = "personal"
    paper = "Yi et al. 2023"
    server_keeps = "a head"
    client_keeps = "its model"
    reduces = "nothing"
    traffic = "head / classes × features"
    unprotected = (("samples", SEES_SAMPLES),)
    buffers = "local"
    own_models = True

    def start(self, federation: Federation) -> Head:
        """The initial head of the first group; every client starts from the initial model of its group."""
        task = federation.tasks[0]
        if task.classes is None:
            raise SettingError(f"fedgh: needs data with classes; model {task.name} has none")
        if {inputs_of(own) for own in federation.tasks} != {feature_size(federation)} or len(
            {own.part("head").size for own in federation.tasks}
        ) > 1:
            raise SettingError("fedgh: the heads of all models must be one dense layer of the same size")
        federation.declare(w_i=federation.initial_models())
        return Head(task.part("head").take(task.initial(federation.initial().device)))

    def round(self, server: Head, federation: Federation, cohort: np.ndarray) -> Head:
        """Local training at the cohort, then the server's steps on the class means."""
        replies = federation.map(local_training, cohort, {"head": server.head})
        sums = replies["sums"].flatten(0, 1)
        here, task, x = sums[:, -1], federation.tasks[0], federation.blank_sample()
        means = sums[:, :-1] / here.clamp(min=1)[:, None]
        weight = (here > 0).to(means.dtype)
        labels = torch.arange(task.classes or 0, device=means.device).repeat(len(replies))
        head = server.head

        def objective(head: Tensor) -> tuple[Tensor, Pass]:
            outputs = scores(task, head, x, means)
            return (weight * task.loss_function(outputs, labels)).sum() / weight.sum(), Pass(
                outputs, None, None
            )

        for _ in range(self.hyper.server_steps):
            head = head - self.hyper.server_lr * task.differentiate(objective, head)[0]
        return Head(head)

    def shared(self, server: Head) -> None:
        """There is no shared model."""

    def personalize(self, server: Head, cohort: np.ndarray) -> Call:
        """The client's model with the shared head."""
        return Call(with_head, {"head": server.head})
