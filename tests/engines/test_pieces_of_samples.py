"""What only adds up takes the samples of all clients in narrow pieces at once, and counts the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_pieces import Again, captures  # noqa: F401
from test_schedule import check_turns
from torch import Tensor, nn

from helpers import classification, federation_of, method, play
from sartor.client.local import Batches, Client
from sartor.data.clients import ClientData
from sartor.engines import schedule
from sartor.engines.schedule import in_pieces, piece_width, turn_table
from sartor.engines.stacked.engine import StackedEngine
from sartor.engines.stacked.graphs import Graphs
from sartor.federation.exchange import Reply
from sartor.model.task import Task
from sartor.runs.evaluation import Cell, evaluate
from sartor.runs.settings import Evaluate

SIZES = (0, 1, 9, 40, 7, 24, 16, 3, 155, 12)
NETWORKS = {
    "dense": lambda: nn.Linear(5, 4),
    "statistics": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 4)),
}


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12), st.sampled_from([1, 2, 16, 32]), st.integers(1, 70)
)
def test_every_sample_is_in_one_piece(sizes: list[int], width: int, size: int) -> None:
    counts = np.array(sizes, dtype=np.int64)
    made = in_pieces(Batches("test", size, summed=1), counts, width)
    assert made.rows is not None
    assert made.turns is not None
    assert made.shape.steps == len(made.stretches)
    assert len(made.rows) == made.shape.steps * made.shape.lanes
    check_turns(made.rows[:, None], made.turns[:, None], -(-counts // width))
    given = (torch.from_numpy(part) for part in (counts, made.rows, made.turns))
    begin, real = turn_table(made.batches, *given, width, made.shape.places)
    taken = [
        place
        for first, many in zip(begin.tolist(), real.tolist(), strict=True)
        for place in range(first, first + many)
    ]
    assert taken == [
        client * made.shape.places + place for client, many in enumerate(sizes) for place in range(many)
    ]
    # No more samples are held at once than if every client had its batch.
    most = size * len(sizes)
    assert made.shape.lanes <= schedule.bucket(max(1, -(-most // width)))


def test_pieces_are_as_wide_as_costs_least() -> None:
    batches, unlike = Batches("test", 500, summed=101), np.array([390, 100, 60, 30, 10, 3])
    assert piece_width(batches, unlike, 10**5, 0) == 16
    assert piece_width(batches, unlike, 10**5, 10**8) == 390  # a copy of a large model for each
    assert piece_width(Batches("test", 500, summed=10**7), unlike, 10**5, 0) == 390  # large sums
    assert piece_width(batches, np.full(6, 390), 10**5, 0) == 390
    assert piece_width(batches, np.full(6, 10_000), 10**5, 0) == 500
    assert piece_width(batches, np.zeros(3, dtype=np.int64), 10**5, 0) == 1


class Centred(nn.Module):
    """A layer that mixes the samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def cells(engine: str, name: str, network: Any, times: int = 1, **settings: Any) -> dict[str, Cell]:
    """What is evaluated after a round, and how often."""
    torch.manual_seed(0)
    data: ClientData = classification(SIZES, shape=(5,), dtype=torch.float64)
    made = federation_of(engine, Task(network().double(), classes=4), data, local={"batch": 4}, **settings)
    algorithm = method(name, made)
    server = play(algorithm, made, [[0, 3, 5, 8]])
    found = [evaluate(algorithm, server, made, Evaluate(personal_pooled="yes")) for _ in range(times)]
    return found[-1]


def same(found: dict[str, Cell], expected: dict[str, Cell]) -> None:
    assert found.keys() == expected.keys()
    for name, cell in found.items():
        np.testing.assert_array_equal(cell.n, expected[name].n)
        np.testing.assert_allclose(cell.loss, expected[name].loss, rtol=1e-9)
        for score, values in cell.scores.items():
            np.testing.assert_array_equal(values, expected[name].scores[score])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, traced: None) -> list[Any]:
    """Every plan of pieces, which are taken here as on CUDA, and narrow ones."""
    made: list[Any] = []

    def noted(*arguments: Any) -> Any:
        made.append(in_pieces(*arguments))
        return made[-1]

    monkeypatch.setattr(StackedEngine, "keeps_lanes", True)
    monkeypatch.setattr(schedule, "NARROWEST", 2)
    monkeypatch.setattr("sartor.engines.stacked.engine.in_pieces", noted)
    return made


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedupdate", "ifca"])
def test_pieces_count_what_the_loop_counts(
    captures: list[Again],  # noqa: F811
    plans: list[Any],
    name: str,
    network: str,
    graphs: bool,
) -> None:
    """One shared model or several, personal ones that are kept or trained; captured when they come again."""
    expected = cells("loop", name, NETWORKS[network])
    same(cells("stacked", name, NETWORKS[network], times=4, graphs=graphs), expected)
    assert plans
    assert any(graph.whole for graph in captures) is graphs


@pytest.mark.parametrize("settings", [{"chunk": 3}, {"evaluation_batch": 5}])
def test_chunks_and_several_steps_count_the_same(
    captures: list[Again],  # noqa: F811
    plans: list[Any],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sartor.engines.stacked.engine.piece_width", lambda *_: 2)
    expected = cells("loop", "fedavg", NETWORKS["statistics"])
    same(cells("stacked", "fedavg", NETWORKS["statistics"], times=4, **settings), expected)
    assert max(plan.shape.steps for plan in plans) > 1 or "chunk" in settings


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedupdate", "ifca"])
def test_evaluations_in_chunks_count_the_same_whenever_they_come(
    captures: list[Again],  # noqa: F811
    plans: list[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where memory is short: parts are captured after steps, which must not write over what those give."""
    monkeypatch.setattr(Graphs, "lasting", lambda *_: True)
    expected = cells("loop", name, NETWORKS["dense"])
    for times in range(1, 6):
        same(cells("stacked", name, NETWORKS["dense"], times=times, chunk=4), expected)
    assert plans
    assert {graph.pool for graph in captures} == {"parts", "calls and steps"}


def evaluated_by_rounds(name: str, rounds: int) -> list[bool]:
    """For every round with an evaluation, whether steps of pieces were held for it."""
    torch.manual_seed(0)
    data: ClientData = classification(SIZES, shape=(5,), dtype=torch.float64)
    made = federation_of(
        "stacked", Task(nn.Linear(5, 4).double(), classes=4), data, local={"batch": 4}, chunk=3
    )
    algorithm, held = method(name, made), []
    server = algorithm.start(made)
    for _ in range(rounds):
        engine = made.engine
        assert isinstance(engine, StackedEngine)
        before = set(engine.graphs.places)
        evaluate(algorithm, server, made, Evaluate(personal_pooled="no"))
        held.append(set(engine.graphs.places) != before)
        made.round += 1
    return held


def test_an_evaluation_holds_no_copies_of_models(
    captures: list[Again],  # noqa: F811
    plans: list[Any],
) -> None:
    """Chunks of unlike clients have pieces of the same number: in one round, nothing comes again."""
    assert evaluated_by_rounds("ditto", 4) == [False] * 4
    assert plans
    assert any(graph.whole for graph in captures)


def loss_after(client: Client, hyper: Any, w: Tensor) -> Reply:
    """A client function of one's own that trains, and adds something up."""
    trained = client.descend(w, lambda w, batch: client.grad(w, batch), lr=0.1)
    return Reply(loss=client.evaluate(trained, "train", ())["loss"])


def test_pieces_of_cohorts_that_change_are_captured(
    captures: list[Again],  # noqa: F811
    plans: list[Any],
) -> None:
    torch.manual_seed(0)
    sizes = (41, 23, 155, 39, 25, 155, 37, 27, 155, 35, 29, 155)
    data: ClientData = classification(sizes, shape=(5,), dtype=torch.float64)
    task, cohorts = Task(nn.Linear(5, 4).double(), classes=4), np.arange(12).reshape(4, 3)
    found: dict[str, list[Tensor]] = {}
    held = []
    for engine in ("loop", "stacked"):
        made = federation_of(engine, task, data, local={"batch": 4})
        found[engine] = []
        for cohort in cohorts:
            replies = made.map(loss_after, cohort, shared={"w": made.initial()})
            found[engine].append(replies["loss"])
            made.round += 1
            if isinstance(made.engine, StackedEngine):
                lanes = {plan.shape.lanes for plan in plans}
                held.append(any(place[1][1] in lanes for place in made.engine.graphs.places))
    torch.testing.assert_close(found["stacked"], found["loop"])
    assert plans
    assert not any(held[:2])
    assert held[-1]


def test_batches_stay_whole_where_samples_mix_or_lanes_are_few(plans: list[Any]) -> None:
    def mixing() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), Centred(), nn.Linear(6, 4))

    same(cells("stacked", "ditto", mixing), cells("loop", "ditto", mixing))
    cells("stacked", "ditto", NETWORKS["dense"], lanes=3)
    assert not plans


def test_little_is_padded_however_unlike_clients_are() -> None:
    """Clients as Dirichlet's law with α = 0.1 makes them."""
    sizes = np.maximum(1, (390 * np.exp(-np.linspace(0, 5, 100))).astype(np.int64))
    batches = Batches("test", 500, summed=101)
    made = in_pieces(batches, sizes, piece_width(batches, sizes, 118_794, 0))
    assert made.shape.steps == 1
    assert made.shape.lanes * made.shape.width < 1.25 * sizes.sum()
    assert 100 * sizes.max() > 4 * sizes.sum()
