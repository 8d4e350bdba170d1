"""FedProto (Tan et al. 2022): clients share the mean features of their classes, and no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, register
from sartor.algorithms.references.separate import own_model
from sartor.algorithms.split_models.prototypes import (
    Prototypes,
    class_counts,
    class_sums,
    distance,
    merged,
    no_prototypes,
    with_count,
)
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


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


@personal
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
class FedProto(Algorithm[FedProtoHyper, Prototypes]):
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
    sums_only = True
    family = "personal"
    paper = "Tan et al. 2022"
    server_keeps = "a prototype of each class"
    client_keeps = "its model"
    traffic = "classes × features / classes × features"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    refuses = (("mixup", "compares features with those of a sample's class"),)
    buffers = "local"
    own_models = True

    def start(self, federation: Federation) -> Prototypes:
        """No prototypes; every client starts from the initial model of its group."""
        federation.declare(w_i=federation.initial_models())
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
