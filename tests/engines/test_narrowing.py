"""Fewer lanes when few have a client left, and steps of any width by two others, change no number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_engines import as_allowed, assert_close, network, vectors
from test_pieces import Again, captures  # noqa: F401
from test_schedule import BATCHES, COUNTS, SIZES, check_turns
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import METHODS, classification, federation_of, method, play
from sartor.algorithms import registered
from sartor.client.local import Batches
from sartor.data.clients import ClientData
from sartor.engines.schedule import Plan, bucket, pack, plan, usual
from sartor.engines.stacked import engine as stacked
from sartor.engines.stacked import trace
from sartor.engines.stacked.recording import recorded
from sartor.engines.stacked.widths import of_width
from sartor.federation import Federation
from sartor.kernels.views import quicken
from sartor.model.task import Task

SIZES_OF_TEN = (0, 1, 9, 40, 7, 24, 16, 3, 55, 12)
COHORTS = [[0, 3, 5, 6, 8], [1, 2, 4, 6, 9], [2, 3, 5, 7, 8]]


def in_steps(made: Plan, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and turns of a plan, [steps, lanes]; a lane that a step does not have is spare."""
    assert made.rows is not None
    assert made.turns is not None
    widths = [stretch.lanes for stretch in made.stretches for _ in range(stretch.steps)]
    assert len(widths) == made.shape.steps
    there = np.arange(made.shape.lanes) < np.array(widths, dtype=np.int64)[:, None]
    rows, turns = np.full(there.shape, clients), np.zeros(there.shape, dtype=np.int64)
    rows[there], turns[there] = made.rows, made.turns
    return rows, turns


@given(COUNTS, st.integers(1, 8))
def test_lanes_that_have_a_client_left_come_first(counts: list[int], lanes: int) -> None:
    rows, _ = pack(np.array(counts), lanes)
    busy = rows < len(counts)
    assert (busy[:, 1:] <= busy[:, :-1]).all()


@given(BATCHES, SIZES, st.integers(0, 14))
def test_a_plan_that_narrows_is_the_same_without_idle_lanes(
    batches: Batches, sizes: list[int], lanes: int
) -> None:
    n = np.array(sizes, dtype=np.int64)
    counts = np.array([batches.count(size) for size in sizes])
    made, wide = plan(batches, n, lanes, narrows=True), plan(batches, n, lanes)
    assert made.shape == wide.shape
    if wide.rows is None:
        assert made.rows is None
        return
    rows, turns = in_steps(made, len(sizes))
    check_turns(rows, turns, counts)
    np.testing.assert_array_equal(rows, wide.rows.reshape(rows.shape))
    for stretch, step in zip(
        made.stretches, np.cumsum([0, *(s.steps for s in made.stretches)]), strict=False
    ):
        assert (rows[step : step + stretch.steps] == rows[step]).all()
        busy = int((rows[step] < len(sizes)).sum())
        assert stretch.lanes == min(made.shape.lanes, bucket(busy, 4))


@given(BATCHES, SIZES, st.integers(0, 14), st.booleans(), st.booleans())
def test_a_client_moves_into_its_lane_and_back(
    batches: Batches, sizes: list[int], lanes: int, narrows: bool, exact: bool
) -> None:
    """Whoever takes a step lies in its lane, and nobody moves who stays there."""
    n = np.array(sizes, dtype=np.int64)
    made = plan(batches, n, lanes, narrows=narrows, exact=exact)
    if made.rows is None:
        return
    taken, held = np.zeros(len(n)), np.full(max((s.lanes for s in made.stretches), default=0), np.nan)
    begin = moved = 0
    for stretch, ((who, left), (into, come)) in zip(made.stretches, made.moves, strict=True):
        held[into] = taken[come]
        held[: stretch.lanes] += stretch.steps
        taken[who] = held[left]
        begin, moved = begin + stretch.steps * stretch.lanes, moved + len(come)
    np.testing.assert_array_equal(taken, [batches.count(size) for size in sizes])
    if not exact:
        assert moved == np.count_nonzero(taken)


def test_every_thread_has_as_many_lanes() -> None:
    batches, sizes = Batches(size=1), np.array([10, 10, 20, 40])
    lanes = [usual(batches, sizes, 4, threads).lanes for threads in (1, 2, 3, 4)]
    assert usual(batches, sizes, 4).lanes == 2
    assert lanes == [2, 2, 2, 2]
    assert [usual(batches, np.arange(100), 10, threads).lanes for threads in (1, 2, 4, 9)] == [6, 6, 8, 6]
    assert usual(batches, np.arange(100), 5, 2).lanes == 4


# Whole runs ------------------------------------------------------------------------------------------------


def convolutions() -> Task:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 4)
    return Task(nn.Sequential(*layers).double(), classes=4)


def dense() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double(), classes=4, head="2")


class Words(nn.Module):
    """Each number of a sample is taken for a word, of which each client has vectors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.head = nn.Embedding(7, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.vectors((4 * x).long().remainder(7)).mean(1))  # type: ignore[no-any-return]


def words() -> Task:
    torch.manual_seed(0)
    return Task(Words().double(), classes=4)


MODELS: dict[str, tuple[Callable[[], Task], tuple[int, ...]]] = {
    "dense": (dense, (5,)),
    "statistics and dropout": (network, (5,)),
    "convolutions": (convolutions, (1, 8, 8)),
    "words": (words, (5,)),
}


def data_for(shape: tuple[int, ...]) -> ClientData:
    return classification(SIZES_OF_TEN, shape=shape, classes=4, dtype=torch.float64)


def run(
    model: str, name: str = "fedavg", engine: str = "stacked", **settings: Any
) -> tuple[Tensor, Federation]:
    task, shape = MODELS[model]
    made = federation_of(engine, task(), data_for(shape), local={"batch": 4}, **settings)
    return play(method(name, made), made, COHORTS).w, made


@pytest.fixture
def graphs_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of inputs of every step that is traced."""
    seen: list[int] = []
    plain = trace.Tracer._traced

    def noted(
        self: trace.Tracer, program: Any, function: Any, inputs: list[Tensor], spec: Any, step: bool = True
    ) -> Any:
        seen.extend([len(inputs)] * step)
        return plain(self, program, function, inputs, spec, step=step)

    monkeypatch.setattr(trace.Tracer, "_traced", noted)
    return seen


def widths_of(made: Federation) -> set[int]:
    assert isinstance(made.engine, stacked.StackedEngine)
    (program,) = made.engine.programs.values()
    return {kind[1] for kind in program.steps}


@pytest.fixture
def five_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "usual", lambda *_: stacked.Usual(5, max(SIZES_OF_TEN), False))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("traced", "five_lanes")
def test_two_traced_widths_serve_all_others(
    model: str, graphs_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what steps as they stand give; the loop's numbers up to rounding."""
    found, made = run(model)
    assert widths_of(made) == {1, 2, 3, 4, 5}
    assert len(graphs_traced) == 2
    monkeypatch.setattr(trace, "UNTRACED", 10**6)
    assert torch.equal(found, run(model)[0])
    torch.testing.assert_close(found, run(model, engine="loop")[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["scaffold", "ditto"])
def test_narrowing_changes_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of methods that keep something; chunks and lanes that are set."""
    found, _ = run("dense", name)
    for settings in ({"chunk": 3}, {"lanes": 2}, {"way": "apart"}):
        torch.testing.assert_close(run("dense", name, **settings)[0], found, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(stacked.StackedEngine, "narrows", False)
    assert torch.equal(run("dense", name)[0], found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("five_lanes")
def test_every_method_goes_over_to_other_widths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "UNTRACED", 2)
    data, task = vectors(), network()
    policy = registered()[name].buffers

    def left(engine: str) -> dict[str, Tensor]:
        def made(local: dict[str, float]) -> Federation:
            return federation_of(engine, task, data, local={"batch": 4, **local}, buffers=policy)

        return as_allowed(name, made)

    assert_close(left("loop"), left("stacked"), 1e-9)


def test_short_runs_are_not_traced(graphs_traced: list[int]) -> None:
    _, made = run("dense")
    assert not widths_of(made)
    assert not graphs_traced


@pytest.mark.usefixtures("traced", "five_lanes")
def test_a_step_that_does_not_follow_from_others_is_traced(
    graphs_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run("dense")
    for wrong in (lambda *_: None, lambda one, *_: one[1]):  # unlike; of another width
        graphs_traced.clear()
        monkeypatch.setattr(trace, "of_width", wrong)
        found, made = run("dense")
        assert len(graphs_traced) == len(widths_of(made)) > 2
        assert torch.equal(found, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("traced", "five_lanes")
def test_a_lane_is_given_the_same_by_any_width(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which steps of other widths are checked on CUDA: by one of more lanes, and of fewer."""
    own, checked = trace.Tracer._widened, []

    def widened(
        tracer: Any, program: Any, key: trace.Kind, known: Any, arguments: Any, right: Callable[..., bool]
    ) -> bool:
        def both(given: list[Tensor]) -> bool:
            for kind in known[:2]:
                agrees = partial(trace._agrees, arguments, program.steps[kind].run, kind[1])
                assert agrees(given)
                for lane in range(key[1]):
                    wrong = [value.index_fill(0, torch.tensor([lane]), 7) for value in given]
                    assert not agrees(wrong)
                checked.append((key[1], kind[1]))
            return right(given)

        return own(tracer, program, key, known, arguments, both)

    monkeypatch.setattr(trace.Tracer, "_widened", widened)
    expected, _ = run(model, engine="loop")
    found, _ = run(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert any(lanes < other for lanes, other in checked)


def test_captured_steps_may_narrow(captures: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """What is captured is of a few widths, whoever is drawn."""
    expected, _ = run("dense", engine="loop")
    monkeypatch.setattr(stacked.StackedEngine, "narrows", True)
    found, made = run("dense")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    play(method("fedavg", made), made, [[0, 1, 2, 4, 8], [3, 4, 5, 6, 7], [5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    # What comes before and after the steps; 1, 4, 16 and 64 steps of each width.
    assert len(captures) <= 2 + 4 * len(widths_of(made))


# Graphs ----------------------------------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], lanes: int) -> fx.GraphModule:
    return make_fx(function)(torch.ones(lanes, 3))


def test_sizes_grow_with_the_lanes() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x.reshape(-1).reshape(x.shape[0], 3).sum(1, keepdim=True).expand(len(x), 3 * len(x) + 1)

    made = of_width((2, graph_of(doubled, 2)), (5, graph_of(doubled, 5)), 4)
    assert made is not None
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(made(x), doubled(x))


def test_a_single_lane_lies_as_one_of_many() -> None:
    """Of what is viewed in all models, PyTorch would say that the next lane is as near as it can be."""

    def layer(w: Tensor) -> Tensor:
        return w[:, 2:8].view(len(w), 2, 3).transpose(1, 2)

    models = torch.arange(40.0).view(4, 10)
    one = models[:1]
    assert layer(one).stride() != layer(models).stride()
    graphs = [recorded(lambda given: [layer(*given)], [models[:lanes]]) for lanes in (2, 4)]
    made = of_width((2, graphs[0]), (4, graphs[1]), 1)
    assert made is not None
    (found,) = made.forward(one)
    assert torch.equal(found, layer(one))
    assert found.stride() == layer(models).stride()


def test_graphs_that_are_unlike_say_nothing() -> None:
    def known(x: Tensor) -> Tensor:
        return x + 1

    constant = torch.tensor([1.0, 2.0, 3.0])
    for other in (
        lambda x: x - 1,
        lambda x: x + 1.0,
        lambda x: (x + 1) * 2,
        lambda x: x.add(1, alpha=2),
        lambda x: x + constant,
    ):
        assert of_width((2, graph_of(known, 2)), (4, graph_of(other, 4)), 3) is None
    # Half a size, the other operand, and a constant of another value.
    assert of_width((2, graph_of(lambda x: x + 1, 2)), (4, graph_of(lambda x: x + 2, 4)), 3) is None
    one, two = (lambda x: (x + 1) - (x + 2)), (lambda x: -((x + 2) - (x + 1)))
    assert of_width((2, graph_of(one, 2)), (4, graph_of(two, 4)), 3) is None
    tables = [graph_of(partial(torch.add, other=torch.full((3,), value)), 2) for value in (0.0, 1.0)]
    assert of_width((2, tables[0]), (3, tables[1]), 4) is None
    assert of_width((2, tables[0]), (3, tables[0]), 4) is not None


@pytest.mark.parametrize("operation", ["stacked_product", "completed_product"])
def test_how_sums_are_divided_does_not_grow_with_the_lanes(operation: str) -> None:
    """Steps traced for cohorts of two sizes divide them in two ways, from which no third follows."""

    def product(terms: int, lanes: int) -> fx.GraphModule:
        more = {"stacked_product": (), "completed_product": (None, None, False)}[operation]

        def step(x: Tensor) -> Any:
            x = x[:, :, None].expand(len(x), 3, 128)
            return getattr(torch.ops.sartor, operation)(x, x.transpose(1, 2), None, False, terms, *more)

        return graph_of(step, lanes)

    assert of_width((4, product(64, 4)), (8, product(128, 8)), 2) is None
    made = of_width((4, product(64, 4)), (8, product(64, 8)), 2)
    assert made is not None
    x = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(made(x), product(64, 2)(x))


def test_quicker_names_are_of_the_same_operations() -> None:
    def operations(x: Tensor) -> Any:
        index = torch.tensor([[0, 1, 1]]).expand(3, 3)
        square = torch.stack([x, x * 2, x - 1])
        sums = torch.bmm(square, square.transpose(1, 2)).sum([1], keepdim=True)
        picked = x.gather(1, index).scatter_add(1, index, -x).index_select(0, index[0])
        parts = x.split([1, 2], dim=1)
        return sums, picked / 3, parts[0].unsqueeze(2), x.relu() * (x < 1), torch.sub(x, picked, alpha=0.3)

    x = torch.randn(3, 3, dtype=torch.float64)
    graph = make_fx(operations)(x)
    expected = graph(x)
    before = {node.target for node in graph.graph.nodes}
    quicken(graph)
    graph.recompile()
    assert len(before & {node.target for node in graph.graph.nodes}) < len(before) / 2
    for one, other in zip(graph(x), expected, strict=True):
        assert torch.equal(one, other)
