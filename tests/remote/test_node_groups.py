"""Nodes whose clients have models of their own: they build them, and give what a simulation gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, part_of

from helpers import classification
from sartor.remote.messages import BadMessage, Parts
from sartor.remote.node import Node, _groups_of
from sartor.remote.policy import Policy
from sartor.remote.serve import Service, serve_on
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment
from sartor.runs.result import Result

BLOCKS = [[0, 3], [1, 4], [2, 5]]
"""Each node has clients of both groups."""


def told(method: str, **tables: Any) -> Experiment:
    hyper = {"hyper": {"predict": "classifier"}} if method == "fedproto" else {}
    given = {
        "rounds": 3,
        "local": {"batch": 8},
        "model": {"name": "mlp", "hidden": 8},
        "models": [
            {"name": "mlp", "hidden": 8, "clients": ["client 0", 5]},
            {"name": "twice", "every": 3, "first": 1},
        ],
        "evaluate": {"every": 1, "personal_models": "yes"},
        **hyper,
        **tables,
    }
    experiment: Experiment = experiment_of(method, **given)
    return experiment


def node(data: Any, block: list[int], folder: Path) -> Node:
    return Node(lambda experiment: part_of(data, block), folder, policy=Policy(personal_models=True))


@pytest.fixture
def twice() -> Any:
    """Another network with as many features, by name."""
    from dataclasses import dataclass

    from torch import nn

    from sartor.model.networks import MODELS, register_model

    @register_model("twice")
    @dataclass(frozen=True)
    class Twice:
        head = "4"

        def build(self, shape: Any, classes: int) -> nn.Module:
            first, second = nn.Linear(64, 12), nn.Linear(12, 8)
            return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(8, classes))

    yield Twice
    MODELS.remove("twice")


@pytest.mark.parametrize("method", ["fedproto"])
def test_nodes_give_what_a_simulation_gives(twice: Any, method: str, tmp_path: Path) -> None:
    data = classification()
    simulated = execute(told(method), data=data, store=False)
    started: set[int] = set()

    def forgets(place: int, parts: Parts) -> Parts:
        """Every node is started anew once, in another round each."""
        if place not in started and grid.at[place].round == place:
            started.add(place)
            grid.at[place] = node(data, BLOCKS[place - 1], tmp_path / str(place))
        return parts

    nodes = {place: node(data, block, tmp_path / str(place)) for place, block in enumerate(BLOCKS, 1)}
    grid = HereGrid(nodes, forgets)
    real = serve_on(grid, told(method), Service(min_nodes=3), out=tmp_path / "run")
    assert len(started) == 3
    same(real, simulated)
    sizes = [len(row) for row in real.personal or ()]
    assert sizes[1] == sizes[4] == 64 * 12 + 12 + 12 * 8 + 8 + 8 * 4 + 4
    assert sizes[0] == sizes[2] == 64 * 8 + 8 + 8 * 4 + 4


def same(real: Result, simulated: Result) -> None:
    assert real.personal is not None
    assert simulated.personal is not None
    for one, other in zip(real.personal, simulated.personal, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert real.clients["model"] == simulated.clients["model"]
    assert real.clients["personal_local_accuracy"] == simulated.clients["personal_local_accuracy"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "it does not say which model each client has"),
        ({"groups": [0], "entries": [0]}, "it does not say which model each client has"),
        ({"groups": [0, 1], "entries": [0, 3]}, "it names models that the experiment does not have"),
        ({"groups": [0, 2], "entries": [0, 1]}, "it names groups that there are not"),
    ],
)
def test_what_a_server_may_not_say(header: dict[str, Any], message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        _groups_of(header, 2, 2)
    of, entries = _groups_of({"groups": [1, 0], "entries": [0, 2]}, 2, 2)
    assert (of == np.array([1, 0])).all()
    assert entries == [0, 2]
