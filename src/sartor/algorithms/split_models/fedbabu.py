"""FedBABU (Oh et al. 2022): a body trained under a head that nobody trains, then fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from sartor.algorithms.base import TRAINS_FOR_EVALUATION, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.fedper import train_inside
from sartor.algorithms.split_models.fedrep import train_outside
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class FedBABUHyper(Hyper):
    """FedBABU's hyper-parameters."""

    fixed: tuple[str, ...] = setting(
        ("head",), "module paths of the layers that stay as they are first; `head` is the declared head"
    )
    finetune: str = setting(
        "model", "what a client fine-tunes: all, or one of the parts", choices=("model", "body", "head")
    )
    finetune_epochs: int = setting(
        5, "epochs of fine-tuning before a client uses its model", symbol="F", low=0
    )
    finetune_lr: float | None = setting(
        None, "learning rate of fine-tuning; not set: `lr`", symbol="η_p", low=0
    )


def body_training(client: Client, hyper: FedBABUHyper, body: Tensor, fixed: Tensor) -> Reply:
    """K_i steps of the body under the fixed layers."""
    part, _ = client.task.select(hyper.fixed)
    rest = client.task.rest(part)
    w = part.put(rest.put(body.new_zeros(client.task.size), body), fixed)
    return Reply(delta=rest.take(train_outside(client, w, hyper.fixed, lr=hyper.lr)) - body)  # step 1


@personal
def fine_tuning(client: Client, hyper: FedBABUHyper, w: Tensor) -> Reply:
    """F epochs on the client's training data from w, with a stream of batches of its own."""
    lr = hyper.or_lr(hyper.finetune_lr)
    epochs, stream = hyper.finetune_epochs, "finetune"
    if hyper.finetune == "body":
        return Reply(w=train_outside(client, w, hyper.fixed, lr=lr, epochs=epochs, stream=stream))
    if hyper.finetune == "head":
        return Reply(w=train_inside(client, w, hyper.fixed, lr=lr, epochs=epochs, stream=stream))
    return Reply(w=client.descend(w, lr=lr, epochs=epochs, stream=stream))  # step 3


@register
class FedBABU(Algorithm[FedBABUHyper, Server]):
    """Only the body is trained and averaged, under the initial head; each client fine-tunes before use.

    Variant: the paper's, which fine-tunes the whole model for 5 epochs. The head does not move, by momentum
    and weight decay neither, and its BatchNorm and dropout layers are as in evaluation. It is sent once, at
    the start. Evaluated: the fine-tuned model (personal) and the body under the initial head (shared).
    Clients that were never drawn, and newcomers, fine-tune too; training never sees it.
    """

    name = "fedbabu"
    sums_only = True
    family = "personal"
    paper = "Oh et al. 2022"
    server_keeps = "w: body and initial head"
    client_keeps = "the initial head"
    traffic = "|body| / |body|"
    sums_only = True
    unprotected = (("samples", TRAINS_FOR_EVALUATION),)

    def start(self, federation: Federation) -> Server:
        """The initial model; every client has its fixed layers."""
        w = federation.initial()
        federation.declare(fixed=federation.task.select(self.hyper.fixed)[0].take(w))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Training of the body at the cohort, then the weighted mean of the bodies' changes."""
        rest = federation.task.rest(federation.task.select(self.hyper.fixed)[0])
        body = rest.take(server.w)
        replies = federation.map(body_training, cohort, {"body": body}, fold=["delta"])
        return replace(server, w=rest.put(server.w, body + replies.mean("delta")))  # step 2

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """Fine-tune the model at the client."""
        return Call(fine_tuning, {"w": server.w})
