"""Separate: every client trains alone. The reference that a personalised method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation


@dataclass(frozen=True)
class Nothing:
    """The server of a method that has none."""


def local_training(client: Client, hyper: Hyper, w_i: Tensor) -> Reply:
    """K_i steps from the client's own model, which stays with the client."""
    return Reply().keep(w_i=client.descend(w_i, lr=hyper.lr))


@personal
def own_model(client: Client, hyper: Hyper, w_i: Tensor) -> Reply:
    """The client's model as it is."""
    return Reply(w=w_i)


@register
class Separate(Algorithm[Hyper, Nothing]):
    """Every client trains its own model, from a common start, and shares nothing.

    A client trains in the rounds in which it is drawn, so that it does the same work as under the other
    methods. BatchNorm statistics stay with the client. Evaluated: w_i.
    """

    name = "separate"
    sums_only = True
    family = "personal"
    paper = "local training"
    server_keeps = "nothing"
    client_keeps = "w_i"
    reduces = "nothing"
    traffic = "0 / 0"
    buffers = "local"
    own_models = True

    def exchanges(self) -> int:
        """Nothing leaves a client."""
        return 0

    def start(self, federation: Federation) -> Nothing:
        """Every client starts from the initial model."""
        federation.declare(w_i=federation.initial_models())
        return Nothing()

    def round(self, server: Nothing, federation: Federation, cohort: np.ndarray) -> Nothing:
        """Local training at the cohort; nothing comes back."""
        federation.map(local_training, cohort)
        return server

    def shared(self, server: Nothing) -> None:
        """There is no shared model."""

    def personalize(self, server: Nothing, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model)
