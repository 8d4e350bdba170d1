"""TWAFL (Chen, Sun and Jin 2019): deep layers are sent less often, and old models count less."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.errors import SettingError
from sartor.federation.exchange import Reply, changes
from sartor.federation.federation import Federation
from sartor.model.parts import Part
from sartor.model.task import Task
from sartor.settings import setting


@dataclass(frozen=True)
class TWAFLHyper(Hyper):
    """TWAFL's hyper-parameters."""

    base: float = setting(math.e / 2, "a model that is s rounds old weighs a^−s", symbol="a", low=1)
    layerwise: bool = setting(True, "whether the head is sent in some rounds only; false: always")
    cycle: int = setting(15, "rounds of a cycle", low=1)
    deep_rounds: int = setting(5, "rounds at the end of a cycle in which the head is sent too", low=0)
    concurrency: int = setting(0, "clients at work at once; 0: everyone who is drawn", low=0)
    deadline: float = setting(1.0, "virtual time at which a round ends", above=0)


@dataclass(frozen=True)
class TWAFLServer(Server):
    """The global model and the last model of every client, [N, d].

    ``stamps``, [parts, N], holds the round in which the training of each part began; −1: never seen.
    """

    models: Tensor
    stamps: Tensor


@changes(w="w")
def train_all(client: Client, hyper: TWAFLHyper, w: Tensor) -> Reply:
    """K_i steps from w; the whole model goes back."""
    return Reply(w=client.descend(w, lr=hyper.lr))


@changes(shallow=lambda task, w: task.part("body").take(w))
def train_shallow(client: Client, hyper: TWAFLHyper, w: Tensor) -> Reply:
    """K_i steps from w; everything but the head goes back."""
    return Reply(shallow=client.task.part("body").take(client.descend(w, lr=hyper.lr)))


def parts_of(task: Task, layerwise: bool) -> list[Part]:
    """The shallow and the deep part, or the whole model as one."""
    if not layerwise:
        return [Part("all", (slice(0, task.size),))]
    if "head" not in task.parts:
        raise SettingError(
            f"hyper.layerwise: model {task.name} declares no head, whose layers are sent less often; "
            "set hyper.layerwise to false, or declare one"
        )
    return [task.part("body"), task.part("head")]


def time_weights(stamps: Tensor, n: Tensor, base: float) -> Tensor:
    """n_k a^−(t − t_k) over their sum, for the clients ever seen; all 0 where there are none.

    The present round t cancels; ages count from the newest model, so that nothing vanishes where all are old.

    >>> time_weights(torch.tensor([4, 3, -1]), torch.tensor([1.0, 2.0, 9.0]), 2.0).tolist()
    [0.5, 0.5, 0.0]
    """
    newest = stamps.max()
    weights = torch.where(stamps >= 0, n * base ** (stamps - newest).to(n.dtype), 0.0)
    total = weights.sum()
    return torch.where(total > 0, weights / total, 0.0)


@register
class TWAFL(Algorithm[TWAFLHyper, TWAFLServer]):
    """Average the last models of all clients, older ones for less; the head is uploaded in some rounds only.

    w = Σ n_k a^−(t − t_k) w^k / Σ n_k a^−(t − t_k), part by part, over the clients seen so far; t_k is the
    round in which client k got the model that it trained. The paper prints the sum without the denominator:
    the weights then add up to less than one whenever someone is absent, and the model shrinks each round.
    ``layerwise = false`` has the weights alone. Evaluated: w.
    """

    name = "twafl"
    family = "asynchronous"
    paper = "Chen, Sun and Jin 2019"
    server_keeps = "w, the last model of every client (N × d)"
    client_keeps = "nothing"
    traffic = "1 / 1 (in most rounds without the head)"

    def start(self, federation: Federation) -> TWAFLServer:
        """The initial model; nobody has been seen."""
        w = federation.initial()
        parts = parts_of(federation.task, self.hyper.layerwise)
        stamps = federation.table(len(parts), fill=-1, dtype=torch.int64).T.contiguous()
        return TWAFLServer(w, w.expand(federation.clients, -1).clone(), stamps)

    def round(self, server: TWAFLServer, federation: Federation, cohort: np.ndarray) -> TWAFLServer:
        """Start who is idle, store what arrives, average all stored models."""
        hyper, parts = self.hyper, parts_of(federation.task, self.hyper.layerwise)
        place = (federation.round - 1) % hyper.cycle
        deep = not hyper.layerwise or place >= hyper.cycle - hyper.deep_rounds
        function = train_all if deep else train_shallow
        federation.dispatch(function, cohort, {"w": server.w}, concurrency=hyper.concurrency)
        models, stamps = server.models, server.stamps.clone()
        for replies in federation.arrivals(within=hyper.deadline):  # a late upload may be of the other kind
            clients = replies.index
            began = federation.round - replies.age
            if "w" in replies.values:
                models = models.index_copy(0, clients, replies["w"])
                stamps[:, clients] = began
            else:
                models = models.index_copy(0, clients, parts[0].put(models[clients], replies["shallow"]))
                stamps[0, clients] = began
        w, n = server.w, federation.sizes.to(models.dtype)
        for part, seen in zip(parts, stamps, strict=True):
            weights = time_weights(seen, n, hyper.base)
            mean = federation.reducer.sum("w", part.take(models), weights)
            w = part.put(w, torch.where(weights.sum() > 0, mean, part.take(w)))
        return replace(server, w=w, models=models, stamps=stamps)

    def welcome(self, server: TWAFLServer, federation: Federation) -> TWAFLServer:
        """Newcomers have not been seen; the model is what it is."""
        return replace(self.start(federation), w=server.w)
