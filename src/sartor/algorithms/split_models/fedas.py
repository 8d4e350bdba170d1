"""FedAS (Yang et al. 2024): the received body is aligned with the own one, and sharp bodies weigh more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.prototypes import class_sums, feature_size, one_hot, with_count
from sartor.client.local import Client
from sartor.errors import SartorError
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting


@dataclass(frozen=True)
class FedASHyper(Hyper):
    """FedAS's hyper-parameters."""

    alignment_epochs: int = setting(1, "epochs in which the received body is aligned; 0: none", low=0)
    alignment_lr: float | None = setting(None, "learning rate of the alignment; none: that of `lr`", low=0)
    fisher: bool = setting(True, "weigh bodies by their Fisher information; else by samples")


@dataclass(frozen=True)
class FedASServer(Server):
    """The body; ``blank`` has a row for each class in the size of the features, and a number."""

    blank: Tensor


def aligned(client: Client, hyper: FedASHyper, start: Tensor, last: Tensor, blank: Tensor) -> Tensor:
    """The received body, trained until its features are near the class means of the client's last model.

    ``last`` is that model with its float buffers behind it. Running statistics stay as they are.
    """
    task, size, received = client.task, client.task.size, client.buffers
    if received is not None:
        client.buffers = last[size:]
    sums = class_sums(client, last[:size], blank, with_count)
    client.buffers = received
    means = sums[:, :-1] / sums[:, -1:].clamp(min=1)

    def direction(y: Tensor, batch: Batch) -> Tensor:
        hot = one_hot(batch, len(blank), y.dtype)
        share = (hot / hot.sum(dim=0).clamp(min=1)).sum(dim=1)  # each class of the batch counts alike

        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y, batch)
            z = task.noted_features(run).flatten(1)
            return (share * ((z - means[batch.y]) ** 2).mean(dim=1)).sum(), run

        return client.differentiate(objective, y)[0]

    rate = hyper.lr if hyper.alignment_lr is None else hyper.alignment_lr
    body, epochs = task.part("body").mask(start), hyper.alignment_epochs
    y = client.descend(start, direction, lr=rate, epochs=epochs, only=body, stream="align")
    client.buffers = received
    return y


def fisher_trace(client: Client, y: Tensor) -> Tensor:
    """Σ over the training batches of ‖∇ loss‖², in evaluation mode."""

    def add(total: Tensor, batch: Batch) -> Tensor:
        g = client.grad(y, batch, track=False, frozen=lambda path: True)
        return total + g @ g

    return client.scan(add, y.new_zeros(()), client.batches(epochs=1, stream="fisher"))


def local_training(
    client: Client, hyper: FedASHyper, body: Tensor, blank: Tensor, own: Tensor, trained: Tensor
) -> Reply:
    """Align the received body, train it with the own head, and find how much it knows."""
    part, size = client.task.part("body"), client.task.size
    start = part.put(own[:size], body)
    if hyper.alignment_epochs:
        start = torch.where(trained > 0, aligned(client, hyper, start, own, blank), start)
    y = client.descend(start, lr=hyper.lr)
    moved = client.n > 0
    kept = y if client.buffers is None else torch.cat([y, client.buffers])
    fisher = fisher_trace(client, y) if hyper.fisher else y.new_zeros(())
    reply = Reply(delta=part.take(y) - body, fisher=fisher)
    ones = torch.ones_like(trained)
    return reply.keep(own=torch.where(moved, kept, own), trained=torch.where(moved, ones, trained))


@personal
def own_model(client: Client, hyper: FedASHyper, body: Tensor, own: Tensor, trained: Tensor) -> Reply:
    """The client's model with its float buffers; the new body under the initial head where it has none."""
    size = client.task.size
    if client.buffers is not None:
        client.buffers = torch.where(trained > 0, own[size:], client.buffers)
    return Reply(w=torch.where(trained > 0, own[:size], client.task.part("body").put(own[:size], body)))


@register
class FedAS(Algorithm[FedASHyper, FedASServer]):
    """A client aligns the received body with its last model before it trains; the server weighs by Fisher.

    Variant: the authors' code. The received body is trained for an epoch until its features are near the
    class means that the client's last model gives, then body and personal head are trained together; bodies
    are averaged with weights ∝ Σ ‖∇ loss‖² over the batches, after training. A client that never trained has
    no model to align with and takes the body as it is. Alignment leaves running statistics alone. Evaluated:
    the client's model after its last training; a newcomer has the body under the initial head.
    """

    name = "fedas"
    family = "personal"
    paper = "Yang et al. 2024"
    server_keeps = "body"
    client_keeps = "its last model, with float buffers"
    traffic = "|body| / |body|"
    unprotected = (("samples", SEES_SAMPLES),)
    refuses = (
        ("micro", "lets the classes of a whole batch count alike"),
        ("mixup", "compares features with those of a sample's class"),
    )

    def start(self, federation: Federation) -> FedASServer:
        """The initial body; every client has the initial model."""
        task = federation.task
        if task.classes is None:
            raise SartorError(f"{self.name}: needs data with classes; model {task.name} has none")
        w = federation.initial()
        federation.declare(own=torch.cat([w, federation.initial_buffers()]), trained=w.new_zeros(()))
        blank = w.new_zeros(task.classes, feature_size(federation) + 1)
        return FedASServer(task.part("body").take(w), blank)

    def round(self, server: FedASServer, federation: Federation, cohort: np.ndarray) -> FedASServer:
        """Local training at the cohort, then the mean of the bodies' changes by what they know."""
        sent = {"body": server.w, "blank": server.blank}
        replies = federation.map(local_training, cohort, sent)
        if not replies.counts.any():
            return server
        weights = replies["fisher"] if self.hyper.fisher else None
        return replace(server, w=server.w + replies.mean("delta", weights))

    def shared(self, server: FedASServer) -> None:
        """A body alone is no model."""

    def personalize(self, server: FedASServer, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model, {"body": server.w})
