"""FedEM (Marfoq et al. 2021): every client's data is a mixture of the same few distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, register
from sartor.algorithms.mixing.ifca import models_apart
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting


@dataclass(frozen=True)
class FedEMHyper(Hyper):
    """FedEM's hyper-parameters."""

    components: int = setting(3, "models that are mixed", symbol="M", low=1)


@dataclass(frozen=True)
class FedEMServer:
    """The components, [M, d], and the float buffers of each."""

    models: Tensor
    statistics: Tensor

    @property
    def rows(self) -> Tensor:
        """What clients are sent: each component with its float buffers behind it."""
        return torch.cat([self.models, self.statistics], dim=1)


class Components:
    """The received models, and what they say of a client's samples."""

    def __init__(self, client: Client, models: Tensor) -> None:
        size = client.task.size
        self.client, self.models, self.statistics = client, models[:, :size], models[:, size:]

    def of(self, place: int, statistics: Tensor) -> Tensor | None:
        """A component's float buffers; None for a model without any."""
        return None if self.client.buffers is None else statistics[place]

    def responsibilities(self, batch: Batch, pi: Tensor) -> Tensor:
        """q(z = m) of every sample, in evaluation mode."""
        task, rows = self.client.task, enumerate(self.models)
        losses = [task.losses(w, batch, self.of(place, self.statistics)) for place, w in rows]
        return torch.softmax(pi.log() - torch.stack(losses, dim=1), dim=1)  # E-step

    def shares(self, pi: Tensor) -> Tensor:
        """π after one step of EM on all training samples; as it was without any."""

        def add(batch: Batch) -> Tensor:
            q = self.responsibilities(batch, pi)
            return q.sum(dim=0) if batch.weight is None else batch.weight @ q

        n = self.client.n
        return torch.where(n > 0, self.client.sum(add, pi) / n.clamp(min=1), pi)  # M-step


def local_training(client: Client, hyper: FedEMHyper, models: Tensor, pi: Tensor, trained: Tensor) -> Reply:
    """π by the received models, then K_i steps of every component on the loss weighted by q."""
    received = Components(client, models)
    given, task, size = client.buffers, client.task, client.task.size

    def direction(y: Tensor, batch: Batch, statistics: Tensor) -> tuple[Tensor, Tensor]:
        q = received.responsibilities(batch, pi)
        gradients, after = [], []
        for place, w in enumerate(y.view(hyper.components, size)):

            def objective(w: Tensor, place: int = place) -> tuple[Tensor, Pass]:
                run = client.forward(w, batch)
                return batch.mean(q[:, place] * task.loss_function(run.outputs, batch.y)), run  # M-step

            client.buffers = received.of(place, statistics)
            gradients.append(client.differentiate(objective, w)[0])
            after.append(statistics[place] if client.buffers is None else client.buffers)
        client.buffers = given
        return torch.cat(gradients), torch.stack(after)

    start = received.models.reshape(-1)
    y, statistics = client.descend_with(
        start, direction, received.statistics, lr=hyper.lr, apart=[size] * hyper.components
    )
    client.buffers = given
    delta = torch.cat([y.view(hyper.components, size), statistics], dim=1) - models
    trained = torch.where(client.n > 0, torch.ones_like(trained), trained)
    return Reply(delta=delta).keep(pi=received.shares(pi), trained=trained)


@personal
def mixture(client: Client, hyper: FedEMHyper, models: Tensor, pi: Tensor, trained: Tensor) -> Reply:
    """Predict by Σ_m π_m p_m(y | x); whoever never trained finds its π by one step of EM."""
    received = Components(client, models)
    pi = torch.where(trained > 0, pi, received.shares(pi))
    statistics = [received.of(place, received.statistics) for place in range(hyper.components)]

    def predict(x: Tensor) -> Tensor:
        task, rows = client.task, zip(received.models, statistics, strict=True)
        outputs = torch.stack([task.outputs(w, x, own) for w, own in rows])
        if task.classes is None:
            mean: Tensor = torch.tensordot(pi, outputs, 1)
            return mean
        return (pi.log()[:, None, None] + outputs.log_softmax(dim=-1)).logsumexp(dim=0)

    return Reply(w=predict, pi=pi)


@register
class FedEM(Algorithm[FedEMHyper, FedEMServer]):
    """M models for all, mixed at every client by weights of its own that EM finds.

    Variant: the paper's Algorithm 1, client and server. Responsibilities are those of the received models in
    evaluation mode, with the π of the client's last round. Components start apart: the first is the initial
    model, the others have the signs of its numbers drawn anew. BatchNorm statistics belong to a component and
    are averaged with it. Evaluated: the mixture of the components' probabilities after aggregation with π as
    the client's last training left it; a newcomer finds π on its training data by one step from equal shares.
    """

    name = "fedem"
    sums_only = True
    family = "personal"
    paper = "Marfoq et al. 2021"
    server_keeps = "M models, with float buffers"
    client_keeps = "π_i (M numbers)"
    traffic = "M / M"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    refuses = (("micro", "hands the statistics of its components on from batch to batch"),)

    def start(self, federation: Federation) -> FedEMServer:
        """Models that are apart, in equal shares."""
        models = models_apart(federation, self.hyper.components, "fedem")
        statistics = federation.initial_buffers().expand(len(models), -1).clone()
        pi = models.new_full((len(models),), 1 / len(models))
        federation.declare(pi=pi, trained=pi.new_zeros(()))
        return FedEMServer(models, statistics)

    def round(self, server: FedEMServer, federation: Federation, cohort: np.ndarray) -> FedEMServer:
        """A step of EM at the cohort, then the weighted mean of every component."""
        replies = federation.map(local_training, cohort, {"models": server.rows}, fold=["delta"])
        moved, size = server.rows + replies.mean("delta"), federation.task.size
        return FedEMServer(moved[:, :size], moved[:, size:])

    def shared(self, server: FedEMServer) -> None:
        """There is no shared model: components are mixed by each client's own weights."""

    def personalize(self, server: FedEMServer, cohort: np.ndarray) -> Call:
        """The client's mixture."""
        return Call(mixture, {"models": server.rows})

    def observe(self, server: FedEMServer) -> dict[str, Any]:
        """How far the components are from one another on average."""
        centred = server.models - server.models.mean(dim=0)
        return {"spread": centred.norm(dim=1).mean()}
