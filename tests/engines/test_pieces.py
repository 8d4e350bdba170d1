"""Captured pieces of a call: any cohort is made of the same ones, and they give what plain steps give.

There is no CUDA here. A graph is played by a function that is called again and writes its results where the
first call left them, which is what a replay does.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engines import network
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from helpers import classification, federation_of, method, play
from sartor.client.local import Batches, Client
from sartor.data.clients import ClientData
from sartor.engines import ways
from sartor.engines.schedule import Usual, plan, usual, usual_lanes
from sartor.engines.stacked.engine import StackedEngine
from sartor.engines.stacked.graphs import Graphs
from sartor.errors import NotStackable
from sartor.federation import Federation
from sartor.federation.exchange import Reply
from sartor.model.task import Task

SIZES = (0, 1, 9, 40, 7, 24, 16, 3, 55, 12)
COHORTS = [[0, 3, 5, 8], [1, 2, 4, 9], [3, 6, 7, 8]]


class Again:
    """What stands for a graph.

    It is replayed as on a device: where graphs of its pool that were captured later lay what they give, it
    may have computed something, so that is lost.
    """

    def __init__(
        self, graphs: Graphs, work: Callable[[], Any], into: Sequence[Tensor], pool: str, later: list[Again]
    ) -> None:
        self.graphs, self.whole, self.pool, self.later = graphs, graphs._whole, pool, later
        before = [place.clone() for place in into]  # which a capture leaves as they are
        self.work, self.replays = work, 0
        self.given = tree_map_only(Tensor, lambda value: value.contiguous().clone(), work())
        for place, value in zip(into, before, strict=True):
            place.copy_(value)
        self.places = into or tree_leaves(self.given)

    def replay(self) -> None:
        self.replays += 1
        for other in self.later[self.later.index(self) + 1 :]:
            if (other.graphs, other.pool) == (self.graphs, self.pool):
                other.lose()
        self.graphs._whole, before = self.whole, self.graphs._whole
        for place, value in zip(self.places, tree_leaves(self.work()), strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)
        self.graphs._whole = before

    def lose(self) -> None:
        """Have anything where this lays what it gives."""
        for value in tree_leaves(self.given):
            if isinstance(value, Tensor):
                value.fill_(torch.nan if value.is_floating_point() else 1)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """Engines on a CPU capture as they do on CUDA; every capture is noted."""
    noted: list[Again] = []
    pools = inspect.signature(Graphs.capture).parameters["pool"].default

    def capture(
        self: Graphs, work: Callable[[], Any], into: Sequence[Tensor] = (), pool: str = pools
    ) -> tuple[Any, Any]:
        before = torch.get_rng_state()
        made = Again(self, work, into, pool, noted)
        noted.append(made)
        assert torch.equal(before, torch.get_rng_state())
        return made, made.given

    usual = Graphs.__init__

    def wanted(self: Graphs, device: torch.device, wanted: bool) -> None:
        usual(self, device, wanted)
        self.wanted = wanted

    monkeypatch.setattr(Graphs, "__init__", wanted)
    monkeypatch.setattr(Graphs, "capture", capture)
    monkeypatch.setattr(Graphs, "aside", lambda self, work: work())
    return noted


def vectors(sizes: tuple[int, ...] = SIZES) -> ClientData:
    return classification(sizes, shape=(5,), classes=4, dtype=torch.float64)


def federation(engine: str = "stacked", **settings: Any) -> Federation:
    return federation_of(engine, network(), vectors(), local={"batch": 4}, **settings)


def weights(made: Federation, name: str = "fedavg", cohorts: list[list[int]] = COHORTS) -> Tensor:
    return play(method(name, made), made, cohorts).w


@pytest.mark.parametrize(
    ("name", "way"),
    [("fedavg", "together"), ("scaffold", "apart"), ("ditto", "together"), ("ditto", "apart")],
)
def test_pieces_give_what_the_loop_gives(captures: list[Again], name: str, way: str) -> None:
    expected = weights(federation("loop"), name)
    torch.testing.assert_close(weights(federation(way=way), name), expected, rtol=1e-9, atol=1e-9)
    assert captures


def test_no_cohort_needs_a_capture_of_its_own(captures: list[Again]) -> None:
    made = federation()
    weights(made)
    weights(made, cohorts=[[0, 1, 2, 8], [4, 5, 6, 7], [0, 1, 4, 7], [3, 5, 6, 8]])
    engine = made.engine
    assert isinstance(engine, StackedEngine)
    (program,) = engine.programs.values()
    assert {kind[1] for kind in program.taken} <= {1, 2, 3, 4}
    assert (
        len(captures) <= 2 + 3 * 4
    )  # what comes before and after the steps; 1, 4 and 16 steps of each width


def test_equal_clients_are_captured_as_a_whole(captures: list[Again]) -> None:
    made = federation_of("stacked", network(), vectors((8,) * 6), local={"batch": 4})
    weights(made, cohorts=[[0, 1, 2], [3, 4, 5], [1, 2, 3], [0, 4, 5]])
    assert [graph.replays for graph in captures] == [2]


def test_a_long_call_of_equal_clients_is_made_of_steps(captures: list[Again]) -> None:
    data, local = vectors((8,) * 2), {"batch": 1, "epochs": 17}
    made = federation_of("stacked", network(), data, local=local)
    found = weights(made, cohorts=[[0, 1]] * 2)
    expected = weights(federation_of("loop", network(), data, local=local), cohorts=[[0, 1]] * 2)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    # 136 = 8 · 16 + 8 · 1, twice; four in a row are not wanted often enough
    assert sorted(graph.replays for graph in captures)[-2:] == [16, 16]


@pytest.mark.parametrize("settings", [{"chunk": 2}, {"lanes": 1}, {"lanes": 3}, {"chunk": 3, "way": "apart"}])
def test_chunk_lanes_and_way_do_not_matter(captures: list[Again], settings: dict[str, Any]) -> None:
    torch.testing.assert_close(
        weights(federation(**settings)), weights(federation("loop")), rtol=1e-9, atol=1e-9
    )


def test_everyone_is_not_filled_up(captures: list[Again]) -> None:
    """Cohorts of any size have one of few; that there are 17 clients is always so."""
    data = vectors((8,) * 17)
    made = federation_of("stacked", network(), data, local={"batch": 4})
    cohorts: list[Any] = [range(17), range(9, 16), range(17)]
    found = weights(made, cohorts=cohorts)
    expected = weights(federation_of("loop", network(), data, local={"batch": 4}), cohorts=cohorts)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    engine = made.engine
    assert isinstance(engine, StackedEngine)
    assert {key[2] for key in engine.programs} == {17, 7}  # type: ignore[index]


def test_what_is_forgotten_is_captured_again(captures: list[Again]) -> None:
    made = federation()
    first = weights(made)
    assert isinstance(made.engine, StackedEngine)
    made.engine.graphs.forget()
    made.round = 0
    known = len(captures)
    assert torch.equal(weights(federation()), first)
    assert len(captures) > known


# How many lanes --------------------------------------------------------------------------------------------


def test_lanes_are_those_to_be_expected_of_a_cohort() -> None:
    """The mean of the longest among all cohorts, by counting them."""
    counts = np.array([1, 2, 3, 10])
    pairs = [(a, b) for place, a in enumerate(counts) for b in counts[place + 1 :]]
    longest, total = np.mean([max(pair) for pair in pairs]), 2 * counts.mean()
    once = np.ones_like(counts)
    assert usual_lanes(counts, once, 2) == int(np.ceil(total / longest)) == 2
    assert usual_lanes(counts, once, 4) == 2  # 16 steps, of which the longest takes 10
    million = usual(Batches(size=1), np.arange(10**6), 1000)
    assert million == Usual(501, 10**6 - 1, alike=False)
    assert usual(Batches(size=1), np.array([5]), 1) == Usual(1, 5, alike=True)
    assert usual(Batches(size=1), np.zeros(3, dtype=np.int64), 2).lanes == 2


def test_any_cohort_has_as_many_lanes() -> None:
    rng = np.random.default_rng(0)
    sizes = (rng.pareto(1.0, 60) * 20).astype(np.int64) + 1
    batches, shapes = Batches(size=5), set()
    for _ in range(50):
        cohort = rng.choice(60, 8, replace=False)
        shape = plan(batches, sizes[cohort], rounded=True, expected=usual(batches, sizes, 8)).shape
        shapes.add((shape.lanes, shape.width, shape.full))
    assert len(shapes) == 1


def test_stretches_are_the_steps_between_changes() -> None:
    made = plan(Batches(size=1), np.array([5, 2, 2]), lanes=2)
    assert made.rows is not None
    assert [stretch[:3] for stretch in made.stretches] == [(2, 2, 1), (2, 2, 1), (1, 2, 1)]
    first = 0
    for steps, lanes, *_ in made.stretches:
        rows = made.rows[first : first + steps * lanes].reshape(steps, lanes)
        assert (rows == rows[0]).all()
        first += steps * lanes


# What cannot be stacked ------------------------------------------------------------------------------------


def branching(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=w if client.loss(w) > 1 else 2 * w)


def test_a_function_that_cannot_be_stacked_runs_on_the_loop_if_nobody_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    w = network().initial()
    expected = federation("loop").map(branching, [1, 2, 3], {"w": w})["w"]
    made = federation(otherwise="loop")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(made.map(branching, [1, 2, 3], {"w": w})["w"], expected)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "branching runs on the loop engine" in told
    with pytest.raises(NotStackable):
        federation().map(branching, [1, 2, 3], {"w": w})


# The way ---------------------------------------------------------------------------------------------------


def test_apart_has_every_layer_by_its_usual_name() -> None:
    """Convolutions, BatchNorm and dropout: each lane by itself, with the padding left out."""
    data = classification((5, 9, 2), shape=(1, 8, 8))
    found = {}
    for engine, settings in (("loop", {}), ("stacked", {"way": "apart"})):
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 3, 3),
            torch.nn.BatchNorm2d(3),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Flatten(),
            torch.nn.Linear(108, 4),
        ).double()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        made = federation_of(
            engine, Task(model, classes=4), data.map(lambda x: x.double()), local={"batch": 4}, **settings
        )
        found[engine] = weights(made, cohorts=[[0, 1, 2]] * 2)
    torch.testing.assert_close(found["stacked"], found["loop"], rtol=1e-9, atol=1e-9)


def test_a_way_is_measured_once(tmp_path: Path) -> None:
    path, measures = tmp_path / "cache" / "ways.json", []

    def measure() -> dict[str, float]:
        measures.append(1)
        return {"together": 2.0, "apart": 1.0}

    assert [ways.remembered(path, "model", measure) for _ in range(2)] == ["apart", "apart"]
    assert len(measures) == 1
    assert ways.remembered(path, "other", lambda: {"together": 1.0, "apart": 3.0}) == "together"
    assert set(json.loads(path.read_text())) == {"model", "other"}
    path.write_text("no figures")
    assert ways.remembered(path, "model", measure) == "apart"


def test_both_ways_are_measured() -> None:
    data = classification((4, 6), shape=(1, 8, 8))
    made = federation_of("stacked", network(), vectors(), local={"batch": 4})
    assert set(ways.measured(network(), vectors(), made.settings, 3)) == {"together", "apart"}
    assert ways.choose_way(network(), data, made.settings, 3, Path("/nowhere")) == "together"
