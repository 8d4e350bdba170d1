"""Differences on the way down: what clients have, what the server knows of it, who was away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from safetensors.torch import load_file
from test_engines import plain, vectors
from torch import Tensor

import sartor
from helpers import federation_of, play, task_and_data
from sartor.algorithms import make, registered
from sartor.client.local import Client
from sartor.errors import SettingError
from sartor.federation import Reply, changes
from sartor.runs.cost import estimate
from sartor.runs.experiment import from_mapping
from sartor.runs.run import tensors_of
from sartor.transforms.difference import Difference
from sartor.transforms.norms import Scale
from sartor.transforms.quantised import Int8
from sartor.transforms.sparse import TopK

ENGINES = ("loop", "stacked")
SENT = (Difference(), TopK(place="down", share=0.2))


def told(client: Client, hyper: Any, w: Tensor, own: Tensor) -> Reply:
    return Reply(w=w, own=own)


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_follow_what_they_are_sent(engine: str) -> None:
    """What stays gets to them in the end, number by number; whoever is away stays where it was."""
    task, data = task_and_data()
    federation = federation_of(engine, task, data, transforms=SENT)
    size = 40
    start, goal = torch.zeros(size).double(), torch.arange(1.0, size + 1).double()
    own = torch.zeros(6, size).double()
    has = torch.zeros(6, size).double()
    federation.map(told, range(6), {"w": start}, {"own": own})
    for round, cohort in enumerate([range(6), [0, 1, 2], [0], [0], [0], range(6)], 2):
        federation.round = round
        numbers = list(cohort)
        replies = federation.map(told, numbers, {"w": goal}, {"own": own[numbers]})
        for row, number in zip(replies["w"], numbers, strict=True):
            missing = goal - has[number]
            places = missing.abs().topk(8).indices
            has[number, places] = goal[places]
            assert torch.equal(row, has[number])
    assert torch.equal(has[0], goal)  # a fifth of the numbers each time
    assert int((has[5] != 0).sum()) == 16


def test_lossless_differences_arrive_up_to_rounding_and_are_counted() -> None:
    task, data = task_and_data()
    federation = federation_of("stacked", task, data, transforms=(Difference(of=("w",)),))
    own = torch.ones(6, 3).double()
    for round in range(1, 4):
        federation.round = round
        w = torch.full((5,), 0.1 * round).double()
        replies = federation.map(told, range(6), {"w": w}, {"own": own})
        torch.testing.assert_close(replies["w"], w.expand(6, -1), rtol=1e-14, atol=0)
        assert torch.equal(replies["own"], own)
    whole, each = 6 * 40, 6 * (40 + 24 + 8)
    assert federation.traffic.down == whole + 3 * each


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_that_is_lost_moves_neither_end(engine: str) -> None:
    """Else the next difference would be to something that the client does not have."""
    task, data = task_and_data()

    def answers(round: int, numbers: np.ndarray) -> np.ndarray:
        return ~((numbers == 3) & (round == 2))

    federation = federation_of(engine, task, data, transforms=(Difference(),), answers=answers)
    own = torch.zeros(6, 2).double()
    for round in range(1, 4):
        federation.round = round
        replies = federation.map(told, range(6), {"w": torch.full((4,), float(round)).double()}, {"own": own})
        assert torch.equal(replies["w"], torch.full((len(replies), 4), float(round)).double())


def test_a_snapshot_stays_as_it_was() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, transforms=(Difference(),))
    w, own = torch.ones(3).double(), torch.zeros(6, 2).double()
    federation.map(told, range(6), {"w": w}, {"own": own})
    saved = federation.snapshot()
    for _ in range(2):
        federation.restore(saved)
        federation.map(told, range(6), {"w": 5 * w}, {"own": own})
        assert all(bool((saved[name] <= 1).all()) for name in saved if name.startswith("transforms."))
        assert sum(name.startswith("transforms.known") for name in saved) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_changes_are_from_what_the_client_has(engine: str) -> None:
    """A model trained from what arrived is sent back as a change of that, not of what the server meant."""
    task, data = task_and_data()

    @changes(w="w")
    def moved(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=w + 1.0 + client.number, got=w)

    federation = federation_of(engine, task, data, transforms=(*SENT, Scale(factor=0.5, of=("w",))))
    for round in (1, 2):
        federation.round = round
        w = torch.arange(10.0).double() * round
        replies = federation.map(moved, range(6), {"w": w})
        step = 0.5 * (1 + torch.arange(6.0).double())[:, None]
        torch.testing.assert_close(replies["w"], replies["got"] + step, rtol=1e-14, atol=0)
    assert not torch.equal(replies["got"][0], w)


@pytest.mark.parametrize("name", ["fedavg", "spfl", "fedasync", "fedbuff"])
def test_engines_agree_on_differences(name: str) -> None:
    found = []
    for engine in ENGINES:
        task, data = task_and_data()
        transforms = (*SENT, Int8(place="down", block=4), TopK(share=0.5))
        federation = federation_of(engine, task, data, local={"batch": 8}, transforms=transforms)
        algorithm = make(registered()[name], lr=0.05)
        federation.hyper = algorithm.hyper
        found.append(dict(tensors_of(play(algorithm, federation, [[0, 2, 3], [1, 2, 4], range(6)]))))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["fedavg", "fedasync"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(name: str, tmp_path: Path) -> None:
    tables = [
        {"name": "difference"},
        {"name": "top-k", "place": "down", "share": 0.3},
        {"name": "top-k", "share": 0.1},
        {"name": "qsgd"},
    ]
    settings: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "local": {"steps": 2},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 1},
        "delay": {"name": "lognormal"},
        "cohort": {"count": 3},
        "experiment": {"transforms": tables},
    }
    whole = sartor.run(name, rounds=4, out=tmp_path / "whole", **settings)
    sartor.run(name, rounds=2, out=tmp_path / "half", **settings)
    resumed = sartor.resume(tmp_path / "half", rounds=4)
    for key in ("model_sha256", "bytes_up", "bytes_down"):
        assert resumed.summary[key] == whole.summary[key]


def test_nodes_have_what_a_simulation_has(tmp_path: Path) -> None:
    """The same bits and bytes, with nodes that keep what they got."""
    data, task = vectors(), plain()
    tables = [{"name": "difference"}, {"name": "top-k", "place": "down", "share": 0.2}]
    grid = HereGrid(nodes_of(data, task, [[number] for number in range(6)], tmp_path))
    experiment = experiment_of("fedavg", local={"batch": 8}, transforms=tables)
    found = []
    for federation in (
        federation_of("loop", task, data, local={"batch": 8}, workers=1, transforms=SENT),
        federation_on(grid, experiment, task, transforms=SENT),
    ):
        algorithm = make(registered()["fedavg"], lr=0.05)
        federation.hyper = algorithm.hyper
        found.append((play(algorithm, federation, [[0, 2], [1, 2, 4], range(6)]).w, federation.traffic))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_it_stands_first_on_the_way_down() -> None:
    tables = [{"name": "int8", "place": "down"}, {"name": "difference"}]
    with pytest.raises(SettingError, match="difference comes first on the way down"):
        from_mapping({"transforms": tables})
    for tables in (
        [{"name": "top-k", "place": "down"}],
        [{"name": "difference", "of": ["w"]}, {"name": "sign", "place": "down"}],
    ):
        with pytest.raises(SettingError, match="on the way down would add what it leaves out of a model"):
            from_mapping({"transforms": tables})
        alone = [*tables[:-1], {**tables[-1], "feedback": False}]
        assert len(from_mapping({"transforms": alone}).transforms) == len(tables)
    with pytest.raises(SettingError, match=r"transforms\[0\]\.place: must be one of down"):
        from_mapping({"transforms": [{"name": "difference", "place": "up"}]})


def test_seeds_that_run_together_have_differences_of_their_own(tmp_path: Path) -> None:
    tables = [{"name": "difference"}, {"name": "top-k", "place": "down", "share": 0.3}, {"name": "int8"}]
    quick = {"local": {"steps": 4}, "evaluate": {"every": 0}}
    experiment = {"rounds": 3, "data": {"clients": 4}, "transforms": tables, **quick}
    found = []
    for together in ("yes", "no"):
        settings: dict[str, Any] = {"seeds": [0, 1], "engine": "stacked", "references": False}
        out = tmp_path / together
        sartor.compare(["fedavg"], out=out, together=together, experiment=experiment, **settings)
        runs = sorted(path.parent for path in out.rglob("summary.json"))
        found.append([load_file(run / "models.safetensors")["server.w"] for run in runs])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[0][0], found[0][1], rtol=1e-2)


def test_an_estimate_has_the_servers_table_of_all_clients() -> None:
    """A row for each client and what all began with, besides the model."""
    given: dict[str, Any] = {"data": {"name": "digits", "clients": 12}, "cohort": {"count": 3}}
    plain, kept = (
        estimate(from_mapping({**given, "transforms": tables}))["memory"]
        for tables in ([], [{"name": "difference"}])
    )
    assert plain["server"] == plain["model"]
    assert kept["server"] == pytest.approx((1 + 1 + 12) * plain["model"])
