"""FedProto (Tan et al. 2022): clients share the mean features of their classes, and no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.separate import own_model
from sartor.errors import SartorError
from sartor.federation.base import Federation
from sartor.federation.exchange import Call, Replies, Reply
from sartor.local import Client
from sartor.settings import setting
from sartor.task import Batch


@dataclass(frozen=True)
class FedProtoHyper(Hyper):
    """FedProto's hyper-parameters."""

    alignment: float = setting(
        1.0, "weight of the distance between features and their class's prototype", symbol="λ", low=0
    )
    predict: str = setting(
        "prototypes",
        "how a client predicts: by the nearest prototype, or by its own classifier",
        choices=("prototypes", "classifier"),
    )


@dataclass(frozen=True)
class Prototypes:
    """The mean features of every class, and which classes have one."""

    prototypes: Tensor
    known: Tensor


def no_prototypes(federation: Federation, method: str) -> Prototypes:
    """The start; a model without a declared head, or data without classes, is refused."""
    classes = federation.task.classes
    if classes is None:
        raise SartorError(f"{method}: needs data with classes; model {federation.task.name} has none")
    w = federation.task.initial(federation.device)
    return Prototypes(w.new_zeros(classes, feature_size(federation)), w.new_zeros(classes))


def feature_size(federation: Federation) -> int:
    """How many numbers the head of the model is given for a sample."""
    task, x = federation.task, federation.samples["train"].x[:1]
    return task.features(task.initial(federation.device), x).flatten(1).shape[1]


def one_hot(batch: Batch, classes: int, dtype: torch.dtype) -> Tensor:
    """A row for every sample with 1 at its class; padding has none."""
    hot = (batch.y[:, None] == torch.arange(classes, device=batch.y.device)).to(dtype)
    return hot if batch.weight is None else hot * batch.weight[:, None].to(dtype)


def class_counts(client: Client, classes: int) -> Tensor:
    """n_i^j: how many training samples of each class the client has."""
    dtype = client.task.dtype
    like = client.n.new_zeros(classes, dtype=dtype)
    return client.sum(lambda batch: one_hot(batch, classes, dtype).sum(dim=0), like)


def class_sums(client: Client, w: Tensor, like: Tensor, columns: Callable[[Tensor], Tensor]) -> Tensor:
    """Sums over the training samples of each class of some columns made of their features."""

    def add(batch: Batch) -> Tensor:
        z = client.task.features(w, batch.x, client.buffers).flatten(1)
        return one_hot(batch, len(like), z.dtype).T @ columns(z)

    return client.sum(add, like)


def with_count(z: Tensor) -> Tensor:
    """The features and a 1: summed, they give the class's sum and how many there are."""
    return torch.cat([z, torch.ones_like(z[:, :1])], dim=1)


def distance(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean squared difference between features and their class's prototype; 0 where it has none."""
    return known[y] * ((z.flatten(1) - prototypes[y]) ** 2).mean(dim=1)


def merged(server: Prototypes, replies: Replies) -> Prototypes:
    """C^j = Σ n_ij C_i^j / Σ n_ij over the clients that hold j; a class nobody holds keeps its prototype."""
    sums = replies.sum("sums")
    counts = sums[:, -1:]
    means = torch.where(counts > 0, sums[:, :-1] / counts.clamp(min=1), server.prototypes)  # step 3
    return Prototypes(means, torch.where(counts[:, 0] > 0, 1, server.known))


def nearest(z: Tensor, prototypes: Tensor, allowed: Tensor) -> Tensor:
    """Scores that are highest for the nearest allowed prototype.

    −‖z − C^j‖² up to ‖z‖², which is the same for all j. A class that is not allowed has less than all others.
    """
    scores = 2 * z @ prototypes.T - (prototypes * prototypes).sum(dim=1)
    return torch.where(allowed, scores, scores.amin(dim=1, keepdim=True) - 1)


def local_training(
    client: Client, hyper: FedProtoHyper, prototypes: Tensor, known: Tensor, w_i: Tensor
) -> Reply:
    """K_i steps on the loss plus λ times the distance to the prototypes; then the own class means."""

    def direction(y: Tensor, batch: Batch) -> Tensor:
        def penalty(z: Tensor) -> Tensor:
            return hyper.alignment * distance(z, batch.y, prototypes, known)  # step 1

        return client.grad(y, batch, penalty=penalty)

    y = client.descend(w_i, direction, lr=hyper.lr)
    like = torch.cat([prototypes, known[:, None]], dim=1)
    return Reply(sums=class_sums(client, y, like, with_count)).keep(w_i=y)  # step 2


def by_prototypes(
    client: Client, hyper: FedProtoHyper, prototypes: Tensor, known: Tensor, w_i: Tensor
) -> Reply:
    """Predict the nearest prototype among the classes of the client's training data."""
    own = (class_counts(client, len(known)) > 0) & (known > 0)
    allowed = torch.where(own.any(), own, known > 0)
    allowed = torch.where(allowed.any(), allowed, torch.ones_like(allowed))
    buffers = client.buffers

    def predict(x: Tensor) -> Tensor:
        return nearest(client.task.features(w_i, x, buffers).flatten(1), prototypes, allowed)

    return Reply(w=predict, model=w_i, classes=allowed.to(w_i.dtype))


@register
class FedProto(Algorithm):
    """Every client trains its own model, drawn to class means of features that the server averages.

    Variant: the class means are weighted by their samples, without the second normalisation that is printed;
    the distance is the mean squared difference of every sample, as in the authors' code, and a class without
    a prototype has none. Prototypes are taken in a pass of their own after training, in evaluation mode. A
    class that is absent in a round keeps its prototype. Float buffers stay with the client. Evaluated: the
    client's model after its last training, predicting by the nearest prototype after aggregation among the
    classes of its training data (of all, where none of them has one), or by its own classifier (``predict``).
    A newcomer has the initial model.
    """

    name = "fedproto"
    family = "personal"
    paper = "Tan et al. 2022"
    server_keeps = "a prototype of each class"
    client_keeps = "its model"
    traffic = "classes × features / classes × features"
    buffers = "local"
    Hyper = FedProtoHyper

    def start(self, federation: Federation) -> Prototypes:
        """No prototypes; every client starts from the initial model."""
        federation.declare(w_i=federation.task.initial(federation.device))
        return no_prototypes(federation, self.name)

    def round(self, server: Prototypes, federation: Federation, cohort: np.ndarray) -> Prototypes:
        """Local training at the cohort, then the means of its class means."""
        sent = {"prototypes": server.prototypes, "known": server.known}
        return merged(server, federation.map(local_training, cohort, sent))

    def shared(self, server: Prototypes) -> None:
        """There is no shared model."""

    def personalize(self, server: Prototypes, cohort: np.ndarray) -> Call:
        """The client's own model, predicting as the setting says."""
        if self.hyper.predict == "classifier":
            return Call(own_model)
        return Call(by_prototypes, {"prototypes": server.prototypes, "known": server.known})
