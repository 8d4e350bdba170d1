"""A method that mypy accepts, and mistakes that it names: `make lint` checks this file.

Where mypy did not notice one of the mistakes, it would say that its comment ignores nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, zeros_like

from sartor import Algorithm, Client, Reply, register, setting
from sartor.algorithms import Hyper, Server
from sartor.federation import Federation


@dataclass(frozen=True)
class MyHyper(Hyper):
    server_lr: float = setting(1.0, "server learning rate", low=0)


@dataclass(frozen=True)
class MyServer(Server):
    momentum: Tensor


def local_training(client: Client, hyper: MyHyper, w: Tensor) -> Reply:
    return Reply(delta=client.descend(w, lr=hyper.lr) - w)


@register
class Mine(Algorithm[MyHyper, MyServer]):
    """FedAvg with a momentum."""

    name, family, paper = "mine", "global", "a test"
    server_keeps, client_keeps, traffic = "w, a momentum", "nothing", "1 / 1"

    def start(self, federation: Federation) -> MyServer:
        w = federation.initial()
        return MyServer(w, zeros_like(w))

    def round(self, server: MyServer, federation: Federation, cohort: np.ndarray) -> MyServer:
        replies = federation.map(local_training, cohort, shared={"w": server.w})
        momentum = 0.9 * server.momentum + replies.mean("delta")
        return replace(server, w=server.w + self.hyper.server_lr * momentum, momentum=momentum)


def mistaken_training(client: Client, hyper: MyHyper, w: Tensor) -> Reply:
    return Reply(delta=client.descend(w, lr=hyper.learning_rate) - w)  # type: ignore[attr-defined]


class Mistaken(Algorithm[MyHyper, MyServer]):
    """Names that its hyper-parameters and its state do not have, and another state than its own."""

    def start(self, federation: Federation) -> MyServer:
        return Server(federation.initial())  # type: ignore[return-value]

    def round(self, server: MyServer, federation: Federation, cohort: np.ndarray) -> MyServer:
        momentum = 0.9 * server.v  # type: ignore[attr-defined]
        return replace(server, w=server.w + self.hyper.sever_lr * momentum)  # type: ignore[attr-defined]
