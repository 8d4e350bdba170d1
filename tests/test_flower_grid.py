"""A federation of nodes gives what a simulation gives: real nodes and messages, in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from helpers import federation_of
from sartor.algorithms import algorithms
from sartor.federation import Federation
from sartor.federation.flower import FlowerFederation
from test_engines import as_allowed, network, plain, vectors

BLOCKS = [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_nodes_give_what_a_simulation_gives(name: str) -> None:
    # Answers that arrive one by one move the server's float buffers one by one; a simulation's come together.
    data, task = vectors(), plain() if name == "fedbuff" else network()
    policy = algorithms()[name].buffers
    made: list[tuple[HereGrid, FlowerFederation]] = []

    def simulated(local: dict[str, float]) -> Federation:
        return federation_of("loop", task, data, local={"batch": 8, **local}, buffers=policy, workers=1)

    def deployed(local: dict[str, float]) -> Federation:
        grid = HereGrid(nodes_of(data, task, BLOCKS))
        experiment = experiment_of(name, local={"batch": 8, **local})
        made.append((grid, federation_on(grid, experiment, task, buffers=policy)))
        return made[-1][1]

    expected = as_allowed(name, simulated)
    found = as_allowed(name, deployed)
    grid, federation = made[-1]
    federation.farewell()
    found |= {key: kept(grid, key[len("state.") :]) for key in expected if key.startswith("state.")}
    assert found.keys() == expected.keys()
    for key in expected:
        assert torch.equal(found[key], expected[key]), key


def kept(grid: HereGrid, name: str) -> Tensor:
    """A state of all clients, from their nodes, who are told first what counts."""
    rows = {number: row for node in grid.at.values() for number, row in node.states(name).items()}
    return torch.stack([rows[number] for number in sorted(rows)])
