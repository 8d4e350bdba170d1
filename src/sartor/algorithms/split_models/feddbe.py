"""FedDBE (Zhang et al. 2023): a private bias of the features, and a pull of their mean to everyone's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import ASKS_EVERYONE, MORE_THAN_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.prototypes import feature_size
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.nests import Nest
from sartor.settings import setting


@dataclass(frozen=True)
class FedDBEHyper(Hyper):
    """FedDBE's hyper-parameters."""

    kappa: float = setting(1.0, "pull of the mean features to everyone's", symbol="κ", low=0)
    mu: float = setting(
        0.1, "share of a batch in the running mean of the features", symbol="μ", low=0, high=1
    )
    bias: bool = setting(True, "whether clients learn a bias of their features")


@dataclass(frozen=True)
class FedDBEServer(Server):
    """The global model and everyone's mean features, once they are known."""

    mean: Tensor
    measured: Tensor


def running_mean(batch: Batch, z: Tensor, r: Tensor, mu: float) -> Tensor:
    """r ← (1 − μ) r + μ times the mean features of the batch."""
    z = z.flatten(1)
    mean = z.mean(dim=0) if batch.weight is None else batch.weight @ z / batch.weight.sum()
    return (1 - mu) * r + mu * mean


def first_mean(client: Client, hyper: FedDBEHyper, w: Tensor, zero: Tensor) -> Reply:
    """The running mean of the features while the initial model trains; the trained model is thrown away."""
    received = client.buffers

    def direction(y: Tensor, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y, batch)
            return batch.mean(client.task.loss_function(run.outputs, batch.y)), run

        gradient, run = client.differentiate(objective, y)
        return gradient, running_mean(batch, client.task.noted_features(run), r, hyper.mu)

    _, r = client.descend_with(w, direction, zero, lr=hyper.lr, stream="first")  # step 1
    client.buffers = received
    return Reply(mean=r)


def local_training(client: Client, hyper: FedDBEHyper, w: Tensor, mean: Tensor, b_i: Tensor) -> Reply:
    """K_i steps of model and bias on the loss of head(z + b_i) plus κ times the pull of the mean features."""
    task, size = client.task, len(w)

    def direction(both: Tensor, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        def objective(both: Tensor) -> tuple[Tensor, Pass]:
            b = both[size:]
            run = client.forward(both[:size], batch, change=lambda z: z + b.view(z.shape[1:]))
            pull = 0.5 * (running_mean(batch, task.noted_features(run), r, hyper.mu) - mean) ** 2
            loss = batch.mean(task.loss_function(run.outputs, batch.y))
            return loss + hyper.kappa * pull.mean(), run  # step 2

        gradient, run = client.differentiate(objective, both)
        return gradient, running_mean(batch, task.noted_features(run), r, hyper.mu)

    start = torch.cat([w, b_i])
    only = None if hyper.bias else torch.arange(len(start), device=w.device) < size
    y, _ = client.descend_with(start, direction, torch.zeros_like(mean), lr=hyper.lr, only=only)
    return Reply(delta=y[:size] - w).keep(b_i=y[size:])


@personal
def with_bias(client: Client, hyper: FedDBEHyper, w: Tensor, b_i: Tensor) -> Reply:
    """Predict by head(z + b_i)."""
    task, buffers = client.task, client.buffers

    def predict(x: Nest) -> Any:
        return task.outputs(w, x, buffers, change=lambda z: z + b_i.view(z.shape[1:]))

    return Reply(w=predict, bias=b_i)


@register
class FedDBE(Algorithm[FedDBEHyper, FedDBEServer]):
    """A private bias takes up what differs between features, whose mean is drawn to everyone's.

    Variant: the first author's library. Before the first round every client trains the initial model once and
    sends the running mean of its features; their weighted mean z̄ is everyone's and stays. That touches all
    clients, and its traffic counts. The running mean r starts from 0 in every round and passes no gradient
    from one batch to the next. Bias and model are trained by the same optimiser. Evaluated: head(z + b_i)
    after aggregation with the client's bias as its last training left it (personal), and w without a bias
    (shared). A newcomer has b_i = 0.
    """

    name = "feddbe"
    sums_only = True
    family = "personal"
    paper = "Zhang et al. 2023"
    server_keeps = "w, mean features z̄"
    client_keeps = "bias b_i of the features"
    traffic = "1 / 1 (once |features| up, by everyone)"
    unprotected = (("central", ASKS_EVERYONE), ("samples", MORE_THAN_SAMPLES))
    refuses = (("micro", "has a running mean of the features of whole batches"),)

    def start(self, federation: Federation) -> FedDBEServer:
        """The initial model; no bias, and the mean features are not known yet."""
        w = federation.initial()
        zero = w.new_zeros(feature_size(federation))
        federation.declare(b_i=zero)
        return FedDBEServer(w, zero, w.new_zeros(()))

    def round(self, server: FedDBEServer, federation: Federation, cohort: np.ndarray) -> FedDBEServer:
        """Local training at the cohort, then the weighted mean of the changes; z̄ before the first round."""
        if not server.measured:
            everyone = np.arange(federation.clients)
            sent = {"w": server.w, "zero": torch.zeros_like(server.mean)}
            replies = federation.map(first_mean, everyone, sent)
            server = replace(server, mean=replies.mean("mean"), measured=torch.ones_like(server.measured))
        replies = federation.map(local_training, cohort, {"w": server.w, "mean": server.mean}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 3

    def personalize(self, server: FedDBEServer, cohort: np.ndarray) -> Call:
        """The shared model with the client's bias."""
        return Call(with_bias, {"w": server.w})
