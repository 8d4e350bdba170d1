"""FedNTD (Lee et al. 2022): what the global model knows of the classes that are not true is not forgotten."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, Server, register
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.algorithms.split_models.prototypes import need_classes
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting


@dataclass(frozen=True)
class FedNTDHyper(FedAvgHyper):
    """FedNTD's hyper-parameters."""

    beta: float = setting(1.0, "weight of the distillation", symbol="β", low=0)
    temperature: float = setting(1.0, "temperature of the distillation", symbol="τ", above=0)


def not_true_distance(scores: Tensor, teacher: Tensor, y: Tensor, temperature: float) -> Tensor:
    """τ² KL(teacher ‖ student) of every sample, both over the classes that are not the true one."""
    true = y[:, None] == torch.arange(scores.shape[1], device=y.device)

    def shares(scores: Tensor) -> Tensor:
        return (scores / temperature).masked_fill(true, -torch.inf).log_softmax(dim=1).masked_fill(true, 0)

    known = shares(teacher)
    weights = known.exp().masked_fill(true, 0)
    return temperature**2 * (weights * (known - shares(scores))).sum(dim=1)


def distilled_training(client: Client, hyper: FedNTDHyper, w: Tensor) -> Reply:
    """K_i steps on the loss plus β times the distance to what w says of the classes that are not true."""
    task, received = client.task, client.buffers

    def direction(y: Tensor, batch: Batch) -> Tensor:
        teacher = task.outputs(w, batch.x, received)  # step 1: frozen, in evaluation mode

        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y, batch)
            distance = not_true_distance(run.outputs, teacher, batch.y, hyper.temperature)  # step 2
            return batch.mean(task.loss_function(run.outputs, batch.y) + hyper.beta * distance), run

        return client.differentiate(objective, y)[0]

    return Reply(delta=client.descend(w, direction, lr=hyper.lr) - w)


@register
class FedNTD(FedAvg[FedNTDHyper]):
    """FedAvg whose clients hold on to the global model's scores of the classes that are not the true one.

    Variant: the authors' code, with the factor τ² and their τ = β = 1. The global model is frozen and in
    evaluation mode, with the BatchNorm statistics that were received; the authors leave it in training mode.
    Evaluated: w after aggregation.
    """

    name = "fedntd"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    paper = "Lee et al. 2022"
    refuses = (("mixup", "distils the classes that are not the sample's"),)
    training = staticmethod(distilled_training)

    def start(self, federation: Federation) -> Server:
        """The initial model; data without classes is refused."""
        need_classes(federation, self.name)
        return super().start(federation)
