"""Elastic aggregation (Chen et al. 2023): entries that the clients' outputs hang on move less than others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting


@dataclass(frozen=True)
class ElasticHyper(Hyper):
    """Elastic aggregation's hyper-parameters."""

    tau: float = setting(0.5, "the step of the most sensitive entries", symbol="τ", low=0)
    mu: float = setting(0.95, "how long a batch is remembered in the sensitivity", symbol="μ", low=0, below=1)


def sensitivity(client: Client, mu: float, w: Tensor) -> Tensor:
    """Ω_i: the running mean over batches of |∂ mean ‖F(x; w)‖² / ∂w|, which needs no labels."""
    task, buffers = client.task, client.buffers

    def add(omega: Tensor, batch: Batch) -> Tensor:
        def objective(w: Tensor) -> tuple[Tensor, Pass]:
            outputs = task.outputs(w, batch.x, buffers)
            return batch.mean((outputs**2).flatten(1).sum(dim=1)), Pass(outputs, None, None)

        return mu * omega + (1 - mu) * task.differentiate(objective, w)[0].abs()  # step 1

    omega = client.scan(add, torch.zeros_like(w), client.batches(epochs=1, stream="sensitivity"))
    batches = client.steps(epochs=1).to(w.dtype)
    return omega / (1 - mu**batches).clamp(min=torch.finfo(w.dtype).tiny)  # a mean, whatever their number


def local_training(client: Client, hyper: ElasticHyper, w: Tensor) -> Reply:
    """The sensitivities at the received model, then FedAvg's training from it."""
    omega = sensitivity(client, hyper.mu, w)
    return Reply(delta=client.descend(w, lr=hyper.lr) - w, omega=omega)


@register
class Elastic(Algorithm[ElasticHyper, Server]):
    """FedAvg whose step is shorter in entries that the clients' outputs are sensitive to, longer in others.

    Variant: sensitivity as the paper's abstract has it, of the output and without labels, for every single
    entry; public re-implementations take the loss, and one number for each tensor. It is measured in one pass
    over the training data in evaluation mode, and is a mean, with few batches too. Float buffers are
    averaged by samples. Evaluated: w after aggregation.
    """

    name = "elastic"
    family = "global"
    paper = "Chen et al. 2023"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 2"
    unprotected = (("samples", SEES_SAMPLES),)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the mean of the changes with a step for every entry."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        most = replies["omega"].amax(dim=0)
        ratio = torch.where(most > 0, replies.mean("omega") / most.clamp(min=torch.finfo(most.dtype).tiny), 0)
        return replace(server, w=server.w + (1 + self.hyper.tau - ratio) * replies.mean("delta"))  # step 2
