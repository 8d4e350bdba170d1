"""Steps in a row give to the bit what a traced step gives again and again, with less to do in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_narrowing import five_lanes, run, widths_of  # noqa: F401
from torch import Tensor, fx
from torch.nn import functional as F

from sartor.engines.stacked import engine as stacked
from sartor.engines.stacked import row, trace
from sartor.engines.stacked.recording import recorded
from sartor.engines.stacked.row import Parts, Row, beforehand_of, parts_of
from sartor.kernels.views import straighten

aten = torch.ops.aten
X, Y = torch.randn(40, 3), torch.randint(0, 2, (40,))
STEPS = 4


def sgd(x: Tensor, y: Tensor, scale: Tensor, w: Tensor, index: Tensor, real: Tensor) -> list[Tensor]:
    """A lane's step with a small network; some of its samples are real."""
    weight = (torch.arange(5) < real).to(w.dtype)

    def loss(w: Tensor) -> Tensor:
        first, second, bias = w.split([12, 8, 2])
        hidden = torch.relu(F.linear(x[index], first.view(4, 3)))
        scores = F.linear(hidden, second.view(2, 4), bias) * scale.sum()
        return (F.cross_entropy(scores, y[index], reduction="none") * weight).sum() / weight.sum()

    return [torch.sub(w, torch.func.grad(loss)(w), alpha=0.1)]


def itself(x: Tensor, y: Tensor, scale: Tensor, w: Tensor, index: Tensor, real: Tensor) -> list[Tensor]:
    """The layers of which a step is made lie in the model that it changes."""
    return [w - torch.cat([w[11:], w[:11]]) * 1]


def shifted(x: Tensor, y: Tensor, scale: Tensor, w: Tensor, index: Tensor, real: Tensor) -> list[Tensor]:
    return [torch.sub(w, torch.cat([w[11:], w[:11]]), alpha=0.5)]


def in_place(x: Tensor, y: Tensor, scale: Tensor, w: Tensor, index: Tensor, real: Tensor) -> list[Tensor]:
    counted = torch.zeros_like(w)
    counted += real
    return [w - counted.sum()]


def counting(x: Tensor, y: Tensor, scale: Tensor, w: Tensor, index: Tensor, real: Tensor) -> list[Tensor]:
    """Nothing is written over that changes its kind."""
    return [w.to(torch.float64) + real]


def inputs_of(lanes: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """What stays the same, models, and turns of [steps, lanes, …]."""
    torch.manual_seed(lanes)
    turns = [torch.randint(0, 40, (STEPS, lanes, 5)), torch.randint(1, 6, (STEPS, lanes))]
    return [X, Y, torch.ones(3)], torch.randn(lanes, 22), turns


def graph_of(step: Callable[..., list[Tensor]], lanes: int) -> fx.GraphModule:
    given, model, turns = inputs_of(lanes)
    dims = (None, None, None, 0, 0, 0)
    graph = recorded(
        lambda inputs: torch.vmap(step, dims)(*inputs), [*given, model, *(turn[0] for turn in turns)]
    )
    straighten(graph)
    graph.recompile()
    return graph


def taken(graph: fx.GraphModule, lanes: int, steps: int = STEPS) -> list[Tensor]:
    given, model, turns = inputs_of(lanes)
    found = [model]
    for turn in range(steps):
        found = graph.forward(*given, found[0], *(column[turn] for column in turns))
    return found


def operations(function: Any) -> list[str]:
    return [str(node.target) for node in function.__self__.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("step", [sgd, itself, shifted, in_place])
def test_steps_in_a_row_are_the_same_to_the_bit(step: Callable[..., list[Tensor]]) -> None:
    graph = graph_of(step, 3)
    given, model, turns = inputs_of(3)
    made = Row(graph, 3, 1, parts_of(graph, 3, 1))
    (found,) = made(given, [model], turns)
    assert torch.equal(found, taken(graph, 3)[0])
    assert not found.is_inference()


def test_a_model_is_written_over_layer_by_layer() -> None:
    graph = graph_of(sgd, 3)
    given, model, turns = inputs_of(3)
    parts = parts_of(graph, 3, 1)
    assert len(parts.endings) == 1
    made = Row(graph, 3, 1, parts)
    assert made(given, [model], turns)[0] is model
    each, once = operations(made._body), operations(made._once)
    assert not any("method cat" in name or "split" in name for name in each)
    assert sum("sub_" in name for name in each) == 3
    assert any("sum" in name for name in once)  # of what all steps are given
    assert len(each) + 8 < len(operations(graph.forward))


TWO: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], list[Tensor]], int]] = {
    "read later": (lambda a, b, g: [a - g, b + a], 1),
    "kept": (lambda a, b, g: [a - g, a], 0),
    "a view of it kept": (lambda a, b, g: [a - g, a.view(2, 6).view(3, 4)], 0),
    "one for the other": (lambda a, b, g: [b, a], 0),
    "crosswise": (lambda a, b, g: [b - g, a - g], 0),
    "both": (lambda a, b, g: [a - g, b + g], 2),
}


@pytest.mark.parametrize("name", TWO)
def test_what_is_read_later_is_not_written_over(name: str) -> None:
    step, written = TWO[name]
    both, turns = [torch.randn(3, 4), torch.randn(3, 4)], torch.randn(STEPS, 3, 4)
    graph = recorded(lambda inputs: step(*inputs), [*both, turns[0]])
    graph.recompile()
    expected = both
    for turn in turns:
        expected = step(*expected, turn)
    parts = parts_of(graph, 0, 2)
    assert len(parts.endings) == written
    found = Row(graph, 0, 2, parts)([], [leaf.clone() for leaf in both], [turns])
    assert all(map(torch.equal, found, expected))


def test_a_result_of_another_kind_is_not_written_over() -> None:
    graph = graph_of(counting, 2)
    assert parts_of(graph, 3, 1).endings == ()


def test_a_step_that_writes_is_not_parted() -> None:
    assert parts_of(graph_of(in_place, 3), 3, 1) == Parts()


def test_what_follows_from_turns_is_computed_for_all_of_them() -> None:
    graphs = {lanes: graph_of(sgd, lanes) for lanes in (2, 4, 3)}
    told = beforehand_of((2, graphs[2]), (4, graphs[4]), 3, 2)
    assert told is not None
    assert told.fits(graphs[3])
    given, model, turns = inputs_of(3)
    found = told(given, [turn.flatten(0, 1) for turn in turns])
    columns = [*turns, *(column.unflatten(0, (STEPS, 3)) for column in found)]
    parts = parts_of(graphs[3], 3, 1)
    made = Row(graphs[3], 3, 1, parts, told.places)
    (after,) = made(given, [model], columns)
    assert torch.equal(after, taken(graphs[3], 3)[0])
    assert len(operations(made._body)) + 4 < len(operations(Row(graphs[3], 3, 1, parts)._body))


def test_samples_themselves_are_gathered_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "LITTLE", 5 * 8)  # a batch has five targets of 8 bytes, and 15 numbers of 4
    one, other = ((lanes, graph_of(sgd, lanes)) for lanes in (2, 4))
    told = beforehand_of(one, other, 3, 2)
    assert told is not None
    given, _, turns = inputs_of(3)
    assert all(column[0].numel() <= 5 for column in told(given, [turn.flatten(0, 1) for turn in turns]))


def embedded(x: Tensor, y: Tensor, scale: Tensor, w: Tensor, index: Tensor, real: Tensor) -> list[Tensor]:
    """A lane's words have places in the vectors of all lanes by its number."""
    return [w - 0.1 * torch.func.grad(lambda w: F.embedding(y[index], w.view(11, 2)).square().sum())(w)]


def test_a_lane_has_its_number_in_all_turns() -> None:
    graphs = {lanes: graph_of(embedded, lanes) for lanes in (2, 4, 3)}
    told = beforehand_of((2, graphs[2]), (4, graphs[4]), 3, 2)
    assert told is not None
    given, model, turns = inputs_of(3)
    columns = [
        column.unflatten(0, (STEPS, 3)) for column in told(given, [turn.flatten(0, 1) for turn in turns])
    ]
    made = Row(graphs[3], 3, 1, Parts(), told.places)
    (after,) = made(given, [model], [*turns, *columns])
    assert torch.equal(after, taken(graphs[3], 3)[0])


def test_other_operations_do_not_fit() -> None:
    told = beforehand_of((2, graph_of(sgd, 2)), (4, graph_of(sgd, 4)), 3, 2)
    assert told is not None
    assert not told.fits(graph_of(shifted, 3))
    assert beforehand_of((2, graph_of(sgd, 2)), (4, graph_of(shifted, 4)), 3, 2) is None
    assert beforehand_of((2, graph_of(shifted, 2)), (4, graph_of(shifted, 4)), 3, 2) is None


# Whole runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["dense", "statistics and dropout", "words"])
@pytest.mark.usefixtures("traced", "five_lanes")
def test_all_widths_are_told_beforehand(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = run(model)
    assert isinstance(made.engine, stacked.StackedEngine)
    (program,) = made.engine.programs.values()
    assert any(told is not None for told in program.beforehand.values())
    assert sum(True in step.rows for step in program.steps.values()) > 1
    monkeypatch.setattr(trace, "UNTRACED", 10**6)
    assert torch.equal(found, run(model)[0])


@pytest.mark.usefixtures("traced", "five_lanes")
@pytest.mark.parametrize("wrong", ["another operation", "other layers", "numbers of lanes"])
def test_a_row_that_is_wrong_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "words" if wrong == "numbers of lanes" else "dense"
    expected, _ = run(model)
    if wrong == "another operation":
        monkeypatch.setattr(row, "_OVER", {aten.sub.Tensor: aten.add_.Tensor})
    elif wrong == "numbers of lanes":
        monkeypatch.setattr(row, "_counts_lanes", lambda *given: False)
    else:
        own = row._sizes
        monkeypatch.setattr(row, "_sizes", lambda *given: own(*given)[::-1])
    found, made = run(model)
    assert widths_of(made)
    assert torch.equal(found, expected)
