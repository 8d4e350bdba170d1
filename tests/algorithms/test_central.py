"""All data in one place: the same as one client that has everything, and nothing that could be deployed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from test_lockstep import SEEDS, SIZES, alone, assert_same_run, prepared, together
from torch import nn
from typer.testing import CliRunner

from helpers import RAGGED, federation_of, method, play, task_and_data
from sartor.algorithms.references.central import Central
from sartor.commands.main import app
from sartor.data.clients import ClientData, lazy_clients
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.model.task import Task
from sartor.runs.cost import estimate
from sartor.transforms.norms import Clip, Scale

TOTAL = sum(RAGGED)


def joined(data: ClientData) -> ClientData:
    """One client with everyone's training data."""
    everything = np.array([len(data.train.y)])
    train = dataclasses.replace(data.train, start=np.zeros(1, dtype=np.int64), count=everything)
    test = dataclasses.replace(data.test, start=np.zeros(1, dtype=np.int64), count=np.array([3]))
    return dataclasses.replace(data, names=("everyone",), train=train, test=test)


def normalised() -> Task:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)
    ).double()
    return Task(module, classes=4)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_it_is_fedavg_with_one_client_that_has_everything(engine: str) -> None:
    _, data = task_and_data()
    task, local = normalised(), {"batch": 8, "momentum": 0.5}
    found = []
    for name, own, cohort in (("central", data, list(range(6))), ("fedavg", joined(data), [0])):
        federation = federation_of(engine, task, own, local=local)
        w = play(method(name, federation, lr=0.05), federation, [cohort] * 2).w
        found.append((w, federation.buffers))
    (w, buffers), (expected, others) = found
    assert not torch.equal(w, task.initial())
    assert torch.equal(w, expected)
    assert torch.allclose(buffers, others, rtol=1e-12)  # FedAvg's move by their changes


def steps_taken(local: dict[str, Any], cohort: int, **hyper: Any) -> int:
    """T, of a cohort of so many."""
    _, data = task_and_data()
    federation = federation_of("loop", Task(nn.Linear(5, 4).double(), classes=4), data, local=local)
    algorithm = method("central", federation, **hyper)
    assert isinstance(algorithm, Central)
    return algorithm.hyper.steps or algorithm._steps(federation, cohort)


def test_a_round_is_as_much_work_as_the_cohorts() -> None:
    whole = -(-TOTAL // 8)
    assert steps_taken({"batch": 8}, 6) == whole
    assert steps_taken({"batch": 8, "epochs": 3}, 6) == 3 * whole
    assert steps_taken({"batch": 8, "epochs": 3}, 2) == whole
    assert steps_taken({"batch": 8, "epochs": (2, 4)}, 6) == 3 * whole, "the mean of what is drawn"
    assert steps_taken({"batch": 8, "steps": 5}, 4) == 20
    assert steps_taken({"batch": 0, "epochs": 2}, 1) == 1, "at least one"
    assert steps_taken({"epochs": 0}, 6) == 0
    assert steps_taken({"batch": 8}, 6, steps=7) == 7


def test_nothing_is_sent_and_nobody_is_away() -> None:
    """Drop-outs, deadlines and transforms are of messages, of which there are none."""
    task, data = task_and_data()
    usual = federation_of("loop", task, data, local={"batch": 8})
    expected = play(method("central", usual), usual, [[0, 1]] * 3).w
    hard = federation_of(
        "loop",
        task,
        data,
        local={"batch": 8},
        conditions=Conditions(dropout=0.9, deadline=0.1),
        answers=lambda round, numbers: numbers < 0,
        transforms=(Clip(norm=1e-3), Scale(factor=0.5, of=("delta",))),
    )
    assert torch.equal(play(method("central", hard), hard, [[2, 5]] * 3).w, expected)
    assert (hard.traffic.down, hard.traffic.up, hard.now, hard.updates) == (0, 0, 3.0, 3)


def test_rounds_differ_in_their_batches() -> None:
    task, data = task_and_data()
    moves = []
    for round in (1, 2):
        federation = federation_of("loop", task, data, local={"batch": 8, "steps": 1})
        algorithm = method("central", federation)
        server = algorithm.start(federation)
        federation.round = round
        moves.append(algorithm.round(server, federation, np.arange(1)).w)
    assert not torch.equal(*moves)


def test_several_seeds_in_one_batch_are_what_they_are_alone(tmp_path: Path) -> None:
    setups = [prepared("central", seed, sizes) for seed, sizes in zip(SEEDS, SIZES, strict=True)]
    for one, other in zip(alone(setups, tmp_path, "loop"), together(setups, tmp_path), strict=True):
        assert_same_run(one, other)


def test_its_cost_is_measured_with_all_clients() -> None:
    setup = prepared("central", 0)
    cost = estimate(setup.experiment, data=setup.data, task=setup.task)
    assert cost["measured_clients"] == setup.data.clients
    assert cost["bytes"] == {"down": 0, "up": 0}


def refused(federation: Federation) -> str:
    with pytest.raises(SartorError) as error:
        method("central", federation).start(federation)
    return str(error.value)


def test_it_is_refused_where_the_data_are_apart(tmp_path: Path) -> None:
    task, data = task_and_data()
    grid = HereGrid(nodes_of(data, task, [[0, 1, 2], [3, 4, 5]], tmp_path))
    distant = federation_on(grid, experiment_of("central"), task, method="central")
    assert refused(distant) == (
        "central: needs the data of all clients in one place, but they are on other machines"
    )

    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((6, 5)), np.arange(6) % 4

    lazy = lazy_clients(6, fetch, n_train=4, n_test=2, classes=4)
    assert "fetched client by client (lazy data)" in refused(federation_of("loop", task, lazy))
    local = federation_of("loop", task, data, buffers="local")
    with pytest.raises(SettingError, match=r"model\.buffers = 'local': central has one model"):
        method("central", local).start(local)


@pytest.mark.parametrize("command", [["serve"], ["flower-app", "FOLDER"]])
def test_it_cannot_be_deployed(command: list[str], tmp_path: Path) -> None:
    words = [str(tmp_path / "app") if word == "FOLDER" else word for word in command]
    shown = CliRunner().invoke(app, [*words, "central"])
    assert shown.exit_code == 2
    assert shown.stderr == (
        "sartor: central: needs the data of all clients in one place, so it cannot be deployed; "
        "`sartor run central` simulates it where the data are\n"
    )
    assert not (tmp_path / "app").exists()
