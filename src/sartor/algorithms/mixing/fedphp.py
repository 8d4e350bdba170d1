"""FedPHP (Li et al. 2021): each client hands its past models on, and they teach it after every round."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.mixing.discrepancy import mean_discrepancy
from sartor.client.local import Client, refuse
from sartor.errors import SartorError
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting

TEMPERATURE = 4.0
"""Of the private model's scores, as the authors have it."""


@dataclass(frozen=True)
class FedPHPHyper(Hyper):
    """FedPHP's hyper-parameters."""

    lam: float = setting(0.1, "share of the teaching in the loss", symbol="λ", low=0, high=1)
    transfer: str = setting(
        "kd", "what teaches: the private model's scores, or its features", choices=("kd", "mmd")
    )
    momentum: float = setting(
        0.9, "most that is kept of the private model in a round", symbol="μ", low=0, high=1
    )
    horizon: int = setting(
        20, "rounds of a client after which so much is kept; before, in proportion", symbol="Q", low=1
    )


def teaching(client: Client, hyper: FedPHPHyper, run: Pass, taught: Tensor, batch: Batch) -> Tensor:
    """How far the local model is from the private one on a batch: by scores, or by features."""
    if hyper.transfer == "mmd":
        return mean_discrepancy(client.task.noted_features(run), taught, batch)
    return -batch.mean((taught * run.outputs.log_softmax(dim=1)).sum(dim=1))


def local_training(client: Client, hyper: FedPHPHyper, w: Tensor, p_i: Tensor, turns: Tensor) -> Reply:
    """K_i steps on (1 − λ) f_i plus λ times the teaching; what comes out is mixed into the private model.

    ``p_i`` is the private model with its own float buffers behind it.
    """
    task, size = client.task, client.task.size
    lam = hyper.lam * (turns > 0).to(w.dtype)  # there is no private model before the first training
    statistics = None if client.buffers is None else p_i[size:]

    def direction(y: Tensor, batch: Batch) -> Tensor:
        if hyper.transfer == "mmd":
            taught = task.features(p_i[:size], batch.x, statistics)
        else:
            taught = (task.outputs(p_i[:size], batch.x, statistics) / TEMPERATURE).softmax(dim=1)

        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y, batch)
            loss = batch.mean(task.loss_function(run.outputs, batch.y))
            return (1 - lam) * loss + lam * teaching(client, hyper, run, taught, batch), run  # step 1

        return client.differentiate(objective, y)[0]

    y = client.descend(w, direction, lr=hyper.lr)
    own = y if client.buffers is None else torch.cat([y, client.buffers])
    mu = hyper.momentum * (turns / hyper.horizon).clamp(max=1)
    moved = client.steps() > 0  # a client without samples keeps what it had
    kept = torch.where(moved, mu * p_i + (1 - mu) * own, p_i)  # step 2
    return Reply(delta=y - w).keep(p_i=kept, turns=turns + moved.to(turns.dtype))


@personal
def private_model(client: Client, hyper: FedPHPHyper, w: Tensor, p_i: Tensor, turns: Tensor) -> Reply:
    """p_i with its buffers; a client that never trained has the global model."""
    size = client.task.size
    if client.buffers is not None:
        client.buffers = torch.where(turns > 0, p_i[size:], client.buffers)
    return Reply(w=torch.where(turns > 0, p_i[:size], w))


@register
class FedPHP(Algorithm[FedPHPHyper, Server]):
    """FedAvg, and at every client a running mean of its models, which teaches what comes from the server.

    Variant: the authors' code, by scores at temperature 4 or by the discrepancy of features. How much of the
    private model is kept grows with the client's own rounds up to ``horizon``, which they set to the rounds
    that a client is expected to train in. The private model is in evaluation mode, with float buffers of its
    own; before a client's first training there is none, and no teaching. No gradient is clipped. Evaluated:
    p_i after its last local training (personal) and w (shared); a newcomer has w.
    """

    name = "fedphp"
    sums_only = True
    family = "personal"
    paper = "Li et al. 2021"
    server_keeps = "w"
    client_keeps = "private model p_i, with float buffers; its rounds"
    traffic = "1 / 1"
    sums_only = True
    unprotected = (("samples", MORE_THAN_SAMPLES),)

    def start(self, federation: Federation) -> Server:
        """The initial model; nobody has a private one."""
        if self.hyper.transfer == "mmd":
            federation.task.part("head")  # an error that says how to declare it, before any training
            refuse(federation.local, self.name, "compares the features of whole batches by mmd", "micro")
        elif federation.task.classes is None:
            name = federation.task.name
            raise SartorError(f"fedphp: hyper.transfer = 'kd' needs data with classes; model {name} has none")
        w = federation.initial()
        federation.declare(p_i=torch.cat([w, federation.initial_buffers()]), turns=w.new_zeros(()))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the weighted mean of the changes."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 3

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The client's private model, or w where it never trained."""
        return Call(private_model, {"w": server.w})
