"""FedALA (Zhang et al. 2023): every client learns how much of the global model to take, entry by entry."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Algorithm, Server, register
from sartor.algorithms.mixing.ala import FedALAHyper, Mixing, top_layers
from sartor.client.local import Client
from sartor.federation.exchange import Call, NobodyAnswered, Reply, personal
from sartor.federation.federation import Federation

UNTRAINED, TRAINED, FITTED = 0, 1, 2
"""What a client has done: nothing; trained, so that it has a model to mix; learnt weights at length."""


@dataclass(frozen=True)
class FedALAServer(Server):
    """The global model, and what each client has done."""

    phase: Tensor


def mixed(
    client: Client, hyper: FedALAHyper, w: Tensor, phase: Tensor, least: int, own: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The mixture a client starts from and its weights, which learn for a pass from phase ``least`` on."""
    # A client without a model of its own has the received one: the mixture is that, whatever the weights.
    own = torch.where(phase > UNTRAINED, own, top_layers(client.task, hyper.layers).take(w))
    mixing = Mixing(client, hyper, w, own)
    weights = mixing.one_pass(weights, phase >= least)
    return mixing.model(weights), weights


def first_weights(client: Client, hyper: FedALAHyper, w: Tensor, own: Tensor, weights: Tensor) -> Reply:
    """Learn mixing weights at length, the first time that there is something to mix."""
    return Reply().keep(weights=Mixing(client, hyper, w, own).until_steady(weights))


def local_training(
    client: Client, hyper: FedALAHyper, w: Tensor, phase: Tensor, own: Tensor, weights: Tensor
) -> Reply:
    """K_i steps from the mixture; whoever has learnt weights at length before learns for a pass."""
    start, weights = mixed(client, hyper, w, phase, FITTED, own, weights)
    y = client.descend(start, lr=hyper.lr)  # step 3
    top = top_layers(client.task, hyper.layers).take(y)
    own = torch.where(client.steps() > 0, top, own)  # a client without samples keeps what it had
    return Reply(delta=y - w).keep(own=own, weights=weights)


@personal
def mixture(
    client: Client, hyper: FedALAHyper, w: Tensor, phase: Tensor, own: Tensor, weights: Tensor
) -> Reply:
    """The mixture of the global and the own model, its weights learnt for a pass."""
    return Reply(w=mixed(client, hyper, w, phase, TRAINED, own, weights)[0])


@register
class FedALA(Algorithm[FedALAHyper, FedALAServer]):
    """Before it trains, a client learns on its data how much of the new global model each entry should take.

    Variant: the authors' library, for clients that are drawn alone. Weights are learnt on the first batches
    of passes with a stream of their own: at length when the client is drawn for the second time, in an
    exchange of its own, until the losses of ten passes are steady or ``first_epochs``; for one pass later on.
    Evaluated: the mixture of the global model after aggregation with the client's own, its weights learnt for
    a pass on the training data (personal), and the global model (shared). A newcomer has the global model.
    """

    name = "fedala"
    sums_only = True
    family = "personal"
    paper = "Zhang et al. 2023"
    server_keeps = "w, who has trained"
    client_keeps = "its last top layers, mixing weights"
    traffic = "1 / 1"
    unprotected = (("samples", SEES_SAMPLES),)

    def start(self, federation: Federation) -> FedALAServer:
        """The initial model; mixing weights of 1 take the global model whole."""
        w = federation.initial()
        own = top_layers(federation.task, self.hyper.layers).take(w)
        federation.declare(own=own, weights=torch.ones_like(own))
        return self.welcome(FedALAServer(w, w), federation)

    def round(self, server: FedALAServer, federation: Federation, cohort: np.ndarray) -> FedALAServer:
        """Weights at length for those who need them, local training, then the mean of the changes."""
        before = server.phase.cpu().numpy()
        phase = before.copy()
        first = cohort[before[cohort] == TRAINED]
        if len(first):
            with suppress(NobodyAnswered):  # they have another chance when they are drawn again
                phase[federation.map(first_weights, first, {"w": server.w}).clients] = FITTED
        each = {"phase": torch.from_numpy(before[cohort])}
        replies = federation.map(local_training, cohort, {"w": server.w}, each, fold=["delta"])
        trained = replies.clients[replies.counts > 0]
        phase[trained] = np.maximum(phase[trained], TRAINED)
        w = server.w + replies.mean("delta")  # step 4
        return FedALAServer(w, torch.from_numpy(phase).to(server.phase.device))

    def welcome(self, server: FedALAServer, federation: Federation) -> FedALAServer:
        """Newcomers have not trained."""
        phase = federation.table(fill=UNTRAINED, dtype=torch.int64)
        return replace(server, phase=phase)

    def personalize(self, server: FedALAServer, cohort: np.ndarray) -> Call:
        """The mixture of the global model and the client's own."""
        return Call(mixture, {"w": server.w}, {"phase": server.phase[cohort]})
