"""FedDisco (Ye et al. 2023): clients whose classes are out of balance weigh less in the mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.prototypes import class_counts, need_classes
from sartor.client.local import Client
from sartor.federation.exchange import Replies, Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedDiscoHyper(Hyper):
    """FedDisco's hyper-parameters."""

    a: float = setting(0.5, "how much a discrepancy takes from a client's weight", symbol="a", low=0)
    b: float = setting(0.1, "added to every weight", symbol="b", low=0)
    measure: str = setting(
        "kl", "how far a client's classes are from equal ones", symbol="d", choices=("kl", "l2")
    )


def discrepancy(counts: Tensor, measure: str) -> Tensor:
    """The distance between the shares of the classes and equal ones: KL(D_i ‖ T), or ‖D_i − T‖."""
    shares = counts / counts.sum().clamp(min=1)
    distance = torch.linalg.vector_norm(shares - 1 / len(counts))
    return torch.xlogy(shares, shares * len(counts)).sum() if measure == "kl" else distance


def local_training(client: Client, hyper: FedDiscoHyper, w: Tensor) -> Reply:
    """FedAvg's training; the client's discrepancy, one number, goes along."""
    d = discrepancy(class_counts(client, client.task.classes or 0), hyper.measure)
    return Reply(delta=client.descend(w, lr=hyper.lr) - w, discrepancy=d)


def disco_weights(replies: Replies, hyper: FedDiscoHyper) -> Tensor:
    """ReLU(p'_i − a d_i + b), brought to sum 1; p'_i where none is left. Who has no samples has none."""
    here = replies.n > 0
    d = torch.where(here, replies["discrepancy"], 0)
    if hyper.measure == "kl":
        d = d / d.sum().clamp(min=torch.finfo(d.dtype).tiny)  # step 1
    weights = torch.where(here, torch.relu(replies.weights - hyper.a * d + hyper.b), 0)  # step 2
    return torch.where(weights.sum() > 0, weights / weights.sum(), replies.weights)


@register
class FedDisco(Algorithm[FedDiscoHyper, Server]):
    """FedAvg whose weights also say how near a client's classes are to equal shares.

    Variant: the authors' code, with equal shares as the target and divergences brought to sum 1 over the
    cohort (``l2`` distances are taken as they are). A client sends one number, its discrepancy, and no
    counts. Float buffers are averaged by samples. Evaluated: w after aggregation.
    """

    name = "feddisco"
    family = "global"
    paper = "Ye et al. 2023"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    unprotected = (("samples", SEES_SAMPLES),)

    def start(self, federation: Federation) -> Server:
        """The initial model; data without classes is refused."""
        need_classes(federation, self.name)
        return Server(federation.initial())

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the mean of the changes by these weights."""
        replies = federation.map(local_training, cohort, {"w": server.w})
        return replace(
            server, w=server.w + replies.sum("delta", disco_weights(replies, self.hyper))
        )  # step 3
