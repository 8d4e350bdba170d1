"""Numbers of tables and figures that no training gives: operations counted, work timed, equations followed.

An entry whose ``cell`` is ``computed`` names one of :data:`COMPUTED` as its ``score``. A computation is given
the settings of the cell, which are its own and no experiment's, the method with its hyper-parameters, the
device and the seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm, make
from sartor.algorithms.mixing.diversifed import coefficients
from sartor.algorithms.server.similarity import distances
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.data.partitions import Partition, make_partition
from sartor.engines import make_federation
from sartor.errors import SettingError
from sartor.federation.exchange import Replies
from sartor.federation.federation import Federation
from sartor.model.networks import MODELS
from sartor.model.task import Task
from sartor.settings import build, unknown

Settings = Mapping[str, Any]
REPEATS = 5
"""How often a piece of work is timed; the best counts."""


def computed(score: str, settings: Settings, method: Settings, device: str | None, seed: int) -> float:
    """A number by the name of its computation."""
    if score not in COMPUTED:
        raise unknown("score", score, COMPUTED, what="computation")
    return COMPUTED[score](settings, method, device or "cpu", seed)


# Operations -------------------------------------------------------------------------------------------------


def step_flops(module: nn.Module, shape: tuple[int, ...], batch: int) -> int:
    """Operations of the products and convolutions of a step: forward, backward and no update.

    A multiplication and an addition are two. Nothing is computed: the module is copied to the meta device.

    >>> step_flops(nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), (2, 3), batch=5) == 2 * 2 * 5 * 6 * 4
    True
    """
    module = module.to("meta")
    x = torch.empty(batch, *shape, device="meta")
    y = torch.empty(batch, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(F.cross_entropy(module(x), y))
    return int(counter.get_total_flops())


def _network(settings: Settings) -> nn.Module:
    """A network by its name and settings, without numbers in it."""
    model = dict(settings["model"])
    choice: Any = build(MODELS[model.pop("name")], model, "model")
    with torch.device("meta"):
        module: nn.Module = choice.build(tuple(settings["shape"]), settings["classes"])
    return module


def client_flops(settings: Settings, method: Settings, device: str, seed: int) -> float:
    """Billions of operations of a client's training in a round: all batches of all its epochs."""
    module, shape = _network(settings), tuple(settings["shape"])
    samples, batch = settings["samples"], settings["batch"]
    sizes = [batch] * (samples // batch) + [samples % batch] * bool(samples % batch)
    return float(settings["epochs"] * sum(step_flops(module, shape, size) for size in sizes) / 1e9)


def server_flops(settings: Settings, method: Settings, device: str, seed: int) -> float:
    """Billions of operations of the distances between all clients' models, which are products here."""
    size = sum(parameter.numel() for parameter in _network(settings).parameters())
    models = torch.empty(settings["clients"], size, device="meta")
    with FlopCounterMode(display=False) as counter:
        distances(models, models)
    return float(counter.get_total_flops() / 1e9)


# The server's work ------------------------------------------------------------------------------------------


def idle_federation(module: nn.Module, features: int, clients: int, device: str) -> Federation:
    """Clients with two samples each, whose replies are drawn and not computed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * clients, features, generator=generator)
    y = torch.arange(2 * clients) % 10
    split = Split(x, y, np.arange(clients) * 2, np.full(clients, 2))
    names = tuple(f"client {number}" for number in range(clients))
    data = ClientData(names, split, split, None, x[:10], y[:10], 10, "random", "random")
    local = Local(weight_decay=1e-4)
    return make_federation("loop", Task(module, classes=10), data, local=local, device=device)


def central_round(
    algorithm: Algorithm[Any, Any], federation: Federation, answers: int, models: int, means: bool = True
) -> Callable[[], Any]:
    """The server's work in a round of MA-FSVRG or GA-FSVRG on drawn replies, as a function.

    That is the means of gradients (17) and (61), unless they are left out, grouping, scaling and
    acceleration.
    """
    task, device = federation.task, federation.engine.device
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    w, trained = draw(models, task.size), draw(answers, task.size)
    values = {"gradient": draw(answers, models, task.size)} if means else {}
    replies = Replies(np.arange(answers), np.full(answers, 2), values, device, torch.float32)
    start = replace(algorithm.start(federation), w=w, m=torch.zeros_like(w), v=torch.zeros_like(w))
    federation.round = algorithm.hyper.threshold + 1
    fixed = draw(models, task.size)
    work: Any = algorithm

    def one_round() -> Any:
        g = replies.mean("gradient") if means else fixed
        found = work.grouped(start, federation, trained, g)
        scale = work.scale(start, federation, replies)
        moved = start.w + scale * work.change(start, federation, found, scale)
        gradient = (replies.mean("gradient") if means else fixed) + federation.local.weight_decay * moved
        return work.accelerated(start, moved, gradient)

    return one_round


def seconds(work: Callable[[], Any], device: str, repeats: int) -> list[float]:
    """How long a piece of work takes, time by time; the first, for warming up, is left out."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return taken[1:]


@cache
def _central_seconds(name: str, clients: int, share: int, models: int, features: int, device: str) -> float:
    federation = idle_federation(nn.Linear(features, 10), features, clients, device)
    algorithm = make(registered()[name], groups=models)
    work = central_round(algorithm, federation, clients * share // 100, models)
    return min(seconds(work, device, REPEATS))


def central_cost(settings: Settings, method: Settings, device: str, seed: int) -> float:
    """The server's time in a round, against that with the fewest models and answers."""
    name, size = method["algorithm"], (settings["clients"], settings["features"])

    def taken(share: int, models: int) -> float:
        return _central_seconds(name, size[0], share, models, size[1], device)

    return taken(settings["share"], settings["models"]) / taken(*settings["least"])


# Partitions and equations -----------------------------------------------------------------------------------


def _dirichlet(settings: Settings, seed: int) -> Partition:
    labels = np.repeat(np.arange(settings["classes"]), settings["each"])
    spec = {"name": "dirichlet", "by": "client", "alpha": settings["alpha"], "train": settings["samples"]}
    return make_partition(labels, spec, settings["clients"], seed)


def held_classes(settings: Settings, method: Settings, device: str, seed: int) -> float:
    """How many classes a client holds, on average."""
    return float((_dirichlet(settings, seed).counts() > 0).sum(axis=1).mean())


def largest_share(settings: Settings, method: Settings, device: str, seed: int) -> float:
    """Which share of a client's samples is of its largest class, on average."""
    counts = _dirichlet(settings, seed).counts()
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


def distance_force(settings: Settings, method: Settings, device: str, seed: int) -> float:
    """How fast a step of DiversiFed's distance loss (5) changes the distance to one of two other models.

    Below 0 it pulls together, above 0 it pushes apart. ``item`` 1 and 2 are the loss's two terms by
    themselves, 0 is the whole, whose force is −β_ij D_ij (10).
    """
    near = torch.tensor([settings["distances"]], dtype=torch.float64)
    tau, item, to = settings["tau"], settings["item"], settings["to"]
    if item == 0:
        beta = coefficients(near, torch.ones_like(near, dtype=torch.bool), tau)
        return float(-(beta * near)[0, to - 1])
    if item not in (1, 2):
        raise SettingError(f"item: the loss has two terms, 1 and 2, and 0 for both, got {item!r}")
    softmax = (near / tau).softmax(dim=1)[0]
    own = 1.0 if to == item else 0.0
    return float(-(own - softmax[to - 1]) / (2 * tau))


COMPUTED: dict[str, Callable[[Settings, Settings, str, int], float]] = {
    "client flops": client_flops,
    "server flops": server_flops,
    "central cost": central_cost,
    "held classes": held_classes,
    "largest share": largest_share,
    "distance force": distance_force,
}
"""The computations by name."""
