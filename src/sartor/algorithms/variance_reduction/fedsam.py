"""FedSAM (Qu et al. 2022, Caldarola et al. 2022): sharpness-aware steps at the clients, averaged as usual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.model.batch import Batch
from sartor.settings import setting

TINY = 1e-16
"""Added to the norm that a gradient is divided by, as the authors do."""


@dataclass(frozen=True)
class FedSAMHyper(FedAvgHyper):
    """FedSAM's hyper-parameters."""

    rho: float = setting(0.1, "how far uphill the gradient is taken", symbol="ρ", low=0)


def sharpness_aware_training(client: Client, hyper: FedSAMHyper, w: Tensor) -> Reply:
    """K_i steps against the gradient ρ uphill of the local model, on the same batch."""

    def direction(y: Tensor, batch: Batch) -> Tensor:
        uphill = client.grad(y, batch)
        above = y + hyper.rho / (torch.linalg.vector_norm(uphill) + TINY) * uphill  # step 1
        return client.grad(above, batch, track=False)  # step 2

    return Reply(delta=client.descend(w, direction, lr=hyper.lr) - w)


@register
class FedSAM(FedAvg[FedSAMHyper]):
    """FedAvg whose clients look for flat minima: each step follows the gradient of a point uphill.

    Variant: SAM with one norm over the whole model, as in both papers; neither its adaptive form nor weight
    averaging at the server. A step takes two gradients on its batch. BatchNorm statistics are those of the
    first pass, at the model itself. Evaluated: w after aggregation.
    """

    name = "fedsam"
    gradients_a_step = 2
    paper = "Qu et al. 2022, Caldarola et al. 2022"
    refuses = (("micro", "takes its gradient uphill of the whole batch's"),)
    training = staticmethod(sharpness_aware_training)
