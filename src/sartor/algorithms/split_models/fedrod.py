"""FedRoD (Chen & Chao 2022): a generic head with a balanced loss, a personal head with the plain one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.linear_heads import affine
from sartor.algorithms.split_models.prototypes import class_counts, feature_size, need_classes
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.nests import Nest

LEAST = 1e-6
"""Stands for the count of a class that the client does not have, whose logarithm is needed."""


def local_training(client: Client, hyper: Hyper, w: Tensor, p_i: Tensor) -> Reply:
    """K_i steps of body and generic head on the balanced loss, and of the personal head on the plain one."""
    task, size = client.task, len(w)
    classes = task.classes or 0
    prior = class_counts(client, classes).clamp(min=LEAST).log()

    def direction(both: Tensor, batch: Batch) -> Tensor:
        def objective(both: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(both[:size], batch)
            z = task.noted_features(run).flatten(1).detach()
            balanced = task.loss_function(run.outputs + prior, batch.y)  # step 1
            together = run.outputs.detach() + affine(both[size:], z, classes)
            return batch.mean(balanced + task.loss_function(together, batch.y)), run  # step 2

        return client.differentiate(objective, both)[0]

    y = client.descend(torch.cat([w, p_i]), direction, lr=hyper.lr)
    return Reply(delta=y[:size] - w).keep(p_i=y[size:])


@personal
def both_heads(client: Client, hyper: Hyper, w: Tensor, p_i: Tensor) -> Reply:
    """Predict by G(z) + P(z)."""
    task, buffers = client.task, client.buffers

    def predict(x: Nest) -> Tensor:
        z = task.features(w, x, buffers).flatten(1)
        outputs: Tensor = task.outputs(w, x, buffers)
        return outputs + affine(p_i, z, task.classes or 0)

    return Reply(w=predict, head=p_i)


@register
class FedRoD(Algorithm[Hyper, Server]):
    """Body and generic head learn from a class-balanced loss and are shared; a personal head is added on top.

    Variant: balanced softmax, which adds the logarithms of the client's class counts to the scores; a linear
    personal head on the features, from zero, that learns from G(z) + P(z) and sends no gradient into body and
    generic head. The hypernetwork of the paper is left out. Evaluated: G(z) + P(z) after aggregation with the
    client's head as its last training left it (personal), and G alone (shared). A newcomer has P = 0: its
    model is the generic one.
    """

    name = "fedrod"
    sums_only = True
    family = "personal"
    paper = "Chen & Chao 2022"
    server_keeps = "w: body and generic head"
    client_keeps = "personal head P_i"
    traffic = "1 / 1"
    unprotected = (("samples", SEES_SAMPLES),)

    def start(self, federation: Federation) -> Server:
        """The initial model; every personal head is zero."""
        classes = need_classes(federation, self.name)
        w = federation.initial()
        federation.declare(p_i=w.new_zeros(classes * (feature_size(federation) + 1)))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the weighted mean of the changes of body and generic head."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 3

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The shared model with the client's head on top."""
        return Call(both_heads, {"w": server.w})
