"""What lies before and after the scans of a client function is traced on a CPU once it has come often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engines import network
from torch import Tensor

from helpers import classification, federation_of, method
from sartor.engines.stacked import trace
from sartor.engines.stacked.engine import StackedEngine
from sartor.engines.stacked.trace import Program
from sartor.federation import Federation
from sartor.runs.evaluation import evaluate
from sartor.runs.settings import Evaluate

SIZES = (1, 9, 40, 7, 24)


def played(
    name: str, rounds: int = 6, cohort: tuple[int, ...] = (0, 2, 3)
) -> tuple[Federation, list[Tensor], list[float]]:
    """A federation after some rounds, its models and what they lose, round by round."""
    data = classification(SIZES, shape=(5,), classes=4, dtype=torch.float64)
    made = federation_of("stacked", network(), data, local={"batch": 4})
    algorithm = method(name, made)
    server, models, losses = algorithm.start(made), [], []
    for _ in range(rounds):
        server = algorithm.round(server, made, torch.tensor(cohort).numpy())
        made.round += 1
        shared = algorithm.shared(server)
        assert shared is not None
        models.append(shared)
        cells = evaluate(algorithm, server, made, Evaluate(personal_pooled="no"))
        losses += [float(cell.loss.sum()) for cell in cells.values()]
    return made, models, losses


def programs(made: Federation) -> list[Program]:
    assert isinstance(made.engine, StackedEngine)
    return [*made.engine.programs.values()]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedupdate", "ifca", "ma-fsvrg"])
def test_traced_parts_give_the_same_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace.Tracer, "_repeats", lambda *_: False)
    made, models, losses = played(name)
    assert not any(program.parts for program in programs(made))
    monkeypatch.undo()
    monkeypatch.setattr(trace, "UNTRACED", 2)
    made, found, lost = played(name)
    assert all(map(torch.equal, found, models))
    assert lost == losses
    traced = [part for program in programs(made) for part in program.parts.values()]
    assert traced
    assert None not in traced


def test_parts_are_traced_when_they_have_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "UNTRACED", 4)
    for rounds, traced in ((4, False), (5, True)):
        made, *_ = played("fedavg", rounds)
        assert all(bool(program.parts) is traced for program in programs(made))


@pytest.mark.parametrize("fault", ["fails", "gives something else"])
def test_a_part_that_cannot_be_traced_runs_as_it_stands(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, models, losses = played("ditto")
    monkeypatch.setattr(trace, "UNTRACED", 1)
    own = trace.Tracer._traced

    def wrong(tracer: Any, *arguments: Any, step: bool = True, **options: Any) -> Any:
        made = own(tracer, *arguments, step=step, **options)
        if step:
            return made
        if fault == "fails":
            raise RuntimeError("no such graph")
        run = made.run
        made.run = lambda inputs: [value + 1 for value in run(inputs)]
        return made

    monkeypatch.setattr(trace.Tracer, "_traced", wrong)
    made, found, lost = played("ditto")
    assert all(map(torch.equal, found, models))
    assert lost == losses
    parts = [part for program in programs(made) for part in program.parts.values()]
    assert parts == [None] * len(parts)
    assert parts
