"""FedLC (Zhang et al. 2022): scores calibrated by how many samples of each class the client has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Server, register
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.algorithms.split_models.prototypes import class_counts, need_classes, one_hot
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting

LEAST = 1e-8
"""Stands for the count of a class that the client does not have: its score is lowered by 100 τ."""


@dataclass(frozen=True)
class FedLCHyper(FedAvgHyper):
    """FedLC's hyper-parameters."""

    tau: float = setting(1.0, "how much rare classes' scores are lowered", symbol="τ", low=0)
    as_printed: bool = setting(False, "leave the true class out of the sum, which has no lower bound")


def without_true(scores: Tensor, hot: Tensor) -> Tensor:
    """−log(e^{s_y} / Σ_{c≠y} e^{s_c}) of every sample; ``hot`` is 1 at the true class."""
    others = torch.where(hot > 0, torch.full_like(scores, -torch.inf), scores)
    return torch.logsumexp(others, dim=1) - (scores * hot).sum(dim=1)


def calibrated_training(client: Client, hyper: FedLCHyper, w: Tensor) -> Reply:
    """K_i steps on the loss of scores from which τ n_c^(−1/4) has been taken."""
    task, classes = client.task, client.task.classes or 0
    margin = hyper.tau * class_counts(client, classes).clamp(min=LEAST) ** -0.25  # step 1

    def direction(y: Tensor, batch: Batch) -> Tensor:
        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y, batch)
            scores = run.outputs - margin
            if hyper.as_printed:
                return batch.mean(
                    without_true(scores, one_hot(batch._replace(weight=None), classes, y.dtype))
                ), run
            return batch.mean(task.loss_function(scores, batch.y)), run  # step 2

        return client.differentiate(objective, y)[0]

    return Reply(delta=client.descend(w, direction, lr=hyper.lr) - w)


@register
class FedLC(FedAvg[FedLCHyper]):
    """FedAvg whose clients lower the scores of a class the more, the fewer samples of it they have.

    Variant: the paper's margins with the softmax over all classes. The print sums over the other classes
    alone, a loss that falls without bound as the true score grows; ``as_printed`` takes it. A class that the
    client lacks counts as 1e-8 samples: its score hardly enters the sum, so it is hardly pushed down. The
    counts are the client's own and stay with it. Evaluated: w after aggregation, without margins.
    """

    name = "fedlc"
    unprotected = (("samples", SEES_SAMPLES),)
    paper = "Zhang et al. 2022"
    training = staticmethod(calibrated_training)

    def start(self, federation: Federation) -> Server:
        """The initial model; data without classes is refused."""
        need_classes(federation, self.name)
        return super().start(federation)
