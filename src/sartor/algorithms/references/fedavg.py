"""FedAvg (McMahan et al. 2017), and FedUpdate: FedAvg followed by local fine-tuning (Jiang et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from torch import Tensor

from sartor.algorithms.base import TRAINS_FOR_EVALUATION, Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Call, ClientFunction, Reply, Step, personal
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedAvgHyper(Hyper):
    """FedAvg's hyper-parameters."""

    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)


H = TypeVar("H", bound=FedAvgHyper)


def local_training(client: Client, hyper: FedAvgHyper, w: Tensor) -> Reply:
    """K_i steps y ← y − η g_i(y) from w; the change Δ_i = y − w goes back."""
    return Reply(delta=client.descend(w, lr=hyper.lr) - w)


@register
class FedAvg(Algorithm[H, Server]):
    """Average the changes of models trained locally from the global one.

    The delta form w ← w + η_g Σ p'_i Δ_i, with p'_i = n_i / Σ n_j over those who answered. Evaluated: w.
    """

    name = "fedavg"
    sums_only = True
    family = "global"
    paper = "McMahan et al. 2017"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    training: ClassVar[ClientFunction] = staticmethod(local_training)
    """What clients do, and what methods replace whose server averages as this one."""

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the weighted mean of the changes."""
        step = Step("w", self.hyper.server_lr)
        replies = federation.map(self.training, cohort, shared={"w": server.w}, fold={"delta": step})
        return replace(server, w=replies.moved("delta", server.w, step.rate))


@dataclass(frozen=True)
class FedUpdateHyper(FedAvgHyper):
    """FedUpdate's hyper-parameters."""

    finetune_epochs: int = setting(
        5, "epochs of fine-tuning before a client uses its model", symbol="F", low=0
    )
    finetune_lr: float | None = setting(
        None, "learning rate of fine-tuning; not set: `lr`", symbol="η_p", low=0
    )


@personal
def fine_tuning(client: Client, hyper: FedUpdateHyper, w: Tensor) -> Reply:
    """F epochs of descent on the client's training data from w, with a stream of batches of its own."""
    rate = hyper.or_lr(hyper.finetune_lr)
    return Reply(w=client.descend(w, lr=rate, epochs=hyper.finetune_epochs, stream="finetune"))


@register
class FedUpdate(FedAvg[FedUpdateHyper]):
    """FedAvg whose model every client fine-tunes on its training data before use.

    The personal model is made anew from w at every evaluation and thrown away: training never sees it.
    Clients that were never drawn fine-tune too. Evaluated: the fine-tuned model (personal) and w (shared).
    """

    name = "fedupdate"
    unprotected = (("samples", TRAINS_FOR_EVALUATION),)
    family = "personal"
    paper = "Jiang et al. 2019"

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """Fine-tune the global model at the client."""
        return Call(fine_tuning, shared={"w": server.w})
