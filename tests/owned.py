"""Files as users write them: an algorithm, a model, a transform and data of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from sartor import extensions
from sartor.algorithms import registered
from sartor.data.sources import SOURCES
from sartor.model.networks import MODELS

ALGORITHM = '''
from dataclasses import dataclass, replace

from sartor import Algorithm, Reply, register, setting
from sartor.algorithms import Hyper


def train(client, hyper, w):
    return Reply(delta=client.descend(w, lr=hyper.lr) - w)


@register
class OwnAverage(Algorithm):
    """FedAvg that takes a part of the step."""

    name, family, paper = "own-avg", "own", "nobody's"
    server_keeps, client_keeps, traffic = "w", "nothing", "1 / 1"

    @dataclass(frozen=True)
    class Hyper(Hyper):
        factor: float = setting(1.0, "share of the step that is taken", low=0)

    def round(self, server, federation, cohort):
        replies = federation.map(train, cohort, shared={"w": server.w})
        return replace(server, w=server.w + self.hyper.factor * replies.mean("delta"))
'''

MODEL = """
from dataclasses import dataclass
from math import prod

from torch import nn

from sartor import register_model, setting


@register_model("own-net")
@dataclass(frozen=True)
class OwnNet:
    width: int = setting(5, "units", low=1)
    head = "2"

    def build(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), self.width), nn.Linear(self.width, classes))


def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))
"""

TRANSFORM = """
import torch

from sartor import Transform, register_transform


@register_transform("own-signs")
@dataclass(frozen=True)
class OwnSigns(Transform):
    parts = ("signs", "scale")

    def init(self, like):
        return {"error": torch.zeros_like(like)}

    def apply(self, key, value, state):
        wanted = value + state["error"]
        scale = wanted.abs().mean()
        signs = torch.where(wanted < 0, -1, 1).to(torch.int8)
        return {"signs": signs, "scale": scale}, {"error": wanted - scale * signs}

    def receive(self, parts, like):
        return parts["signs"].to(like.dtype) * parts["scale"]
"""

DATA = """
import numpy as np

from sartor import register_data


@register_data("own-blobs")
def own_data(seed, clients):
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, (clients, 30))
    return {f"c{k}": (generator.normal(size=(30, 4)) + y[k][:, None], y[k]) for k in range(clients)}


def load():
    return own_data(0, 4)
"""


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported and registered meanwhile is forgotten."""
    monkeypatch.setattr(extensions, "_IMPORTED", {})
    for registry in (registered(), MODELS, SOURCES):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.startswith(extensions.PREFIX) and name not in before]:
        del sys.modules[name]
