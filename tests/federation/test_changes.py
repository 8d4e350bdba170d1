"""Models that clients reply pass the way up as changes: which are declared, what transforms see, what comes
out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from test_engines import plain, vectors
from test_transforms import COHORTS, ENGINES, Carry
from torch import Tensor

from helpers import METHODS, federation_of, play, task_and_data
from sartor.algorithms import make, registered
from sartor.client.local import Client
from sartor.federation import Reply
from sartor.federation.exchange import changes
from sartor.federation.transforms import Transform
from sartor.runs.run import tensors_of
from sartor.transforms.norms import Clip, Scale

STILL = 1e-200
"""A learning rate that moves nothing and can be divided by."""
MODELS = {
    "a-fsvrg": {"trained"},
    "apple": {"core"},
    "diversifed": {"w"},
    "diversifed-async": {"w"},
    "fedamp": {"w"},
    "fedasync": {"w"},
    "fedbn": {"norms"},
    "fedcac": {"y"},
    "fedfomo": {"w"},
    "fedpac": {"y"},
    "ga-fsvrg": {"trained"},
    "heurfedamp": {"w"},
    "ma-fsvrg": {"trained"},
    "ma-fsvrg-async": {"trained"},
    "twafl": {"shallow"},
}
"""The methods whose clients reply models in the first round, and which quantities those are."""


@dataclass(frozen=True)
class Seen(Transform):
    """What passes is noted."""

    def apply(self, key: Any, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        PASSED.append(value.clone())
        return value, state


PASSED: list[Tensor] = []


@dataclass(frozen=True)
class Whole(Transform):
    """A transform that leaves values as they are, bit by bit, in a part of its own."""

    parts = ("same",)

    def apply(self, key: Any, value: Tensor, state: Any) -> tuple[Any, Any]:
        return {"same": value}, state

    def receive(self, parts: Any, like: Tensor) -> Tensor:
        return parts["same"]


def small() -> tuple[Any, Any]:
    """Two clients with few samples, of which some are for validation."""
    task, data = task_and_data((5, 7))
    return task, replace(data, validation=data.test)


def one_round(name: str, *transforms: Transform, lr: float = 0.05, **settings: Any) -> tuple[Any, Any, Any]:
    """A server and its federation after a round of a method; with the model they began with."""
    task, data = small()
    kind = registered()[name]
    federation = federation_of(
        "loop", task, data, local={"batch": 8, "steps": 1}, transforms=transforms, buffers=kind.buffers
    )
    algorithm = make(kind, lr=lr, **settings)
    federation.hyper = algorithm.hyper
    return play(algorithm, federation, [[0, 1]]), federation, task.initial()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("central", "fedmd")])
def test_every_model_that_is_replied_is_declared(name: str) -> None:
    """Where nothing is learnt a model is what was sent, to the bit, and its change is nothing.

    So no part of the initial model may pass the way up.
    """
    PASSED.clear()
    _, _, w = one_round(name, Seen(), lr=STILL)
    for value in PASSED:
        few = value.numel() < 3 or not value.any()
        assert few or not torch.isin(value, w[w != 0]).all(), f"{name} replies a model that is not declared"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_methods_that_reply_models_are_those(name: str) -> None:
    """Without the declarations the same quantities would pass as models."""
    for quantity in MODELS[name]:
        PASSED.clear()
        one_round(name, Seen(of=(quantity,)), lr=STILL)
        assert len(PASSED) == 2, quantity
        assert not any(value.any() for value in PASSED), quantity


@pytest.mark.parametrize("name", ["spfl", "ma-fsvrg", "twafl", "fedfomo", "apple", "diversifed", "fedpac"])
def test_what_is_clipped_is_the_change(name: str) -> None:
    """A clip far below a model's norm keeps models near where they began, instead of near zero."""
    bound = 1e-3
    server, _, w = one_round(name, Clip(norm=bound), lr=0.5)
    assert float(w.norm()) > 100 * bound
    for key, value in tensors_of(server):
        if value.shape[-1:] == w.shape and key in ("w", "models", "cores"):
            apart = torch.linalg.vector_norm(value.view(-1, len(w)) - w, dim=1)
            assert float(apart.max()) < 30 * bound, key  # an accelerated server takes steps of its own
            assert float(apart.max()) > 0, key


@pytest.mark.parametrize("engine", ENGINES)
def test_the_server_has_models_and_clients_send_changes(engine: str) -> None:
    """What arrives is where it began and half of its change, also where rows and transforms down differ."""
    task, data = task_and_data()

    @changes(w="w", second=lambda task, row: row[:2], third="reference")
    def moved(client: Client, hyper: Any, w: Tensor, row: Tensor) -> Reply:
        return Reply(w=w + 2.0, second=row[:2] + client.number, third=3 * row, other=torch.full((2,), 8.0))

    w, rows = torch.arange(3.0).double(), torch.arange(18.0).double().view(6, 3)
    each = {"row": rows, "reference": 2 * rows}
    plain = federation_of(engine, task, data)
    found = plain.map(moved, range(6), {"w": w}, each)
    assert torch.equal(found["w"], (w + 2).expand(6, -1))
    assert plain.traffic.down == 6 * 2 * 24  # what is for transforms alone is not sent
    half = (Scale(place="down", factor=0.5), Scale(factor=0.5), Whole(), Clip(place="server", norm=1e9))
    federation = federation_of(engine, task, data, transforms=half)
    found = federation.map(moved, range(6), {"w": w}, each)
    numbers = torch.arange(6.0).double()[:, None]
    assert torch.equal(found["w"], (w / 2 + 1).expand(6, -1))
    assert torch.equal(found["second"], rows[:, :2] / 2 + numbers / 2)
    assert torch.equal(found["third"], rows + 0.5 * (1.5 * rows - rows))
    assert torch.equal(found["other"], torch.full((6, 2), 4.0))
    assert federation.traffic.down == 6 * (3 * 24 + 8)


def test_only_what_transforms_are_for_passes_as_a_change() -> None:
    """With a transform for something else models arrive to the bit."""
    for name in ("twafl", "fedfomo"):
        plain, _, _ = one_round(name)
        other, _, _ = one_round(name, Scale(factor=1.0, of=("gain",)) if name == "fedfomo" else Scale(of=()))
        for (key, one), (_, two) in zip(tensors_of(plain), tensors_of(other), strict=True):
            if name == "fedfomo":
                assert torch.equal(one, two), key
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["ma-fsvrg", "twafl", "fedfomo", "apple", "diversifed-async"])
def test_engines_agree_on_changes(name: str) -> None:
    found = []
    for engine in ENGINES:
        task, data = task_and_data()
        data = replace(data, validation=data.test)
        transforms = (Clip(norm=0.05), Carry(), Scale(place="down", factor=1.01))
        settings: dict[str, Any] = {"local": {"batch": 8}, "buffers": registered()[name].buffers}
        federation = federation_of(engine, task, data, transforms=transforms, **settings)
        algorithm = make(registered()[name], lr=0.05)
        federation.hyper = algorithm.hyper
        cohorts = [range(6)] * 2 if name == "apple" else COHORTS
        found.append(dict(tensors_of(play(algorithm, federation, cohorts))))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["fedfomo", "fedcac"])
def test_nodes_send_the_changes_that_a_simulation_does(name: str, tmp_path: Path) -> None:
    data = replace(vectors(), validation=vectors().test)
    task = plain()
    transforms, policy = (Clip(norm=0.05),), registered()[name].buffers
    found = []
    grid = HereGrid(nodes_of(data, task, [[0, 3], [1, 4], [2, 5]], tmp_path))
    tables = [{"name": "clip", "norm": 0.05}]
    experiment = experiment_of(name, local={"batch": 8}, transforms=tables)
    settings: dict[str, Any] = {"buffers": policy, "transforms": transforms}
    for federation in (
        federation_of("loop", task, data, local={"batch": 8}, workers=1, **settings),
        federation_on(grid, experiment, task, **settings),
    ):
        algorithm = make(registered()[name], lr=0.05)
        federation.hyper = algorithm.hyper
        found.append((dict(tensors_of(play(algorithm, federation, COHORTS))), federation.traffic))
    for key, value in found[0][0].items():
        assert torch.equal(found[1][0][key], value), key
    assert found[0][1] == found[1][1]
