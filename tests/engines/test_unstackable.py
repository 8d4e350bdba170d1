"""Models that no ``vmap`` takes, but whose steps are the same operations every time: those are captured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engines import assert_close, ended
from test_pieces import Again, captures  # noqa: F401
from test_task import Branching, Drawing, Remembering, spectral
from torch import Tensor, nn

import sartor
from helpers import classification, federation_of
from sartor.data.clients import ClientData
from sartor.engines import choose_engine, ways
from sartor.engines.stacked.recording import recorded
from sartor.engines.stacked.trace import Tracer
from sartor.errors import NotStackable
from sartor.model.task import Task

CLASSES = 3
SIZES = (0, 1, 9, 40, 7, 24, 16)
COHORTS = [[0, 3, 5], [1, 2, 4, 6], [3, 5, 6]]


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a clipped line: written as most such functions are, without a rule for
    many clients at once.
    """

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        passed: Tensor = gradient * (x.abs() < 1)
        return passed


class StraightThrough(nn.Module):
    """Its hidden units are signs; it keeps a table that it makes when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.output = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 6, dtype=x.dtype, device=x.device)
        scores: Tensor = self.output(Sign.apply(self.body(x.flatten(1) * self.table)))  # type: ignore[no-untyped-call]
        return scores


class Recurrent(nn.Module):
    """Reads its inputs one after the other."""

    def __init__(self, cells: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.output = cells(2, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.cells(x.view(-1, 3, 2))[0][:, -1])
        return scores


class Counting(Branching):
    """Takes as many of its inputs as there are in them."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(x) * len(torch.nonzero(x > 0))
        return result


class Reading(Branching):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(x) * float(x.detach().cpu().numpy().max())
        return result


def data() -> ClientData:
    return classification(SIZES, shape=(6,), classes=CLASSES, dtype=torch.float64)


def task_of(kind: Callable[[], nn.Module]) -> Task:
    torch.manual_seed(0)
    return Task(kind().double(), classes=CLASSES, name="mine", head=None if kind is spectral else "output")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            (StraightThrough, name)
            for name in ("fedavg", "scaffold", "ditto", "fedrep", "spfl", "diversifed")
        ),
        (spectral, "fedavg"),
        (Remembering, "scaffold"),
        (partial(Recurrent, nn.GRU), "fedavg"),
        (partial(Recurrent, nn.LSTM), "ditto"),
    ],
)
def test_captured_steps_give_what_the_loop_gives(
    kind: Callable[[], nn.Module],
    name: str,
    captures: list[Again],  # noqa: F811
) -> None:
    found = []
    for engine, settings in (("loop", {}), ("stacked", {"way": "apart"})):
        task = task_of(kind)
        made = federation_of(engine, task, data(), local={"batch": 4, "epochs": 2}, **settings)
        found.append(ended(name, made, COHORTS))
    assert_close(*found, 1e-9)
    moved = [value - task.initial() for value in found[0].values() if value.shape[-1:] == (task.size,)]
    assert any(float(change.abs().max()) > 1e-3 for change in moved)
    assert captures


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Branching, "branches on the data"),
        (Counting, "branches on the data"),
        (Reading, "numpy"),
        (Drawing, "draws at random"),
    ],
)
def test_steps_that_follow_from_the_samples_are_not_captured(
    kind: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    task, train = task_of(kind), data().train
    with pytest.raises(NotStackable, match=rf"mine cannot be stacked.*{reason}.*loop"):
        federation_of("stacked", task, data(), way="apart")
    assert choose_engine("auto", task, "cuda", train.x, train.y, "auto") == "loop"
    assert re.search(rf"mine runs on the loop engine, as it cannot be stacked \(.*{reason}", caplog.text)


def test_what_a_trace_cannot_hold_is_refused() -> None:
    for ragged in (torch.nonzero, lambda value: value[value > 0], torch.unique):
        with pytest.raises(RuntimeError, match="as much as a tensor says"):
            recorded(lambda given: [ragged(given[0])], [torch.ones(3)])  # noqa: B023
    always = torch.tensor([1.0, 0.0, 2.0])
    graph = recorded(lambda given: [given[0][torch.nonzero(always)[:, 0]] + always[always > 0]], [always])
    graph.recompile()
    assert graph.forward(torch.tensor([1.0, 2.0, 3.0]))[0].tolist() == [2.0, 5.0]


def test_a_gpu_runs_such_a_model_apart_and_a_cpu_on_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    task, made = task_of(StraightThrough), data()
    x, y = made.train.x, made.train.y
    assert choose_engine("auto", task, "cuda", x, y, "auto") == "stacked"
    assert choose_engine("stacked", task, "cuda", x, y, "auto") == "stacked"
    settings = replace(federation_of("loop", task, made).settings, device="cuda")
    assert ways.choose_way(task, made, settings, 3, Path("/nowhere")) == "apart"
    assert not caplog.text
    assert choose_engine("auto", task, "cpu", x, y, "auto") == "loop"
    assert choose_engine("auto", task, "cuda", x, y, "together") == "loop"
    assert "setup_context" in caplog.text
    with pytest.raises(NotStackable, match="setup_context"):
        choose_engine("stacked", task, "cpu", x, y, "auto")


def test_what_captured_steps_fail_on_the_loop_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a device says of a capture; but not where the engine was asked for."""
    expected = ended("fedavg", federation_of("loop", task_of(StraightThrough), data()), COHORTS)

    def refused(*given: Any, **settings: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Tracer, "steps", refused)
    made = federation_of("stacked", task_of(StraightThrough), data(), way="apart", otherwise="loop")
    assert_close(expected, ended("fedavg", made, COHORTS), 0)
    assert "runs on the loop engine: operation not permitted" in caplog.text
    with pytest.raises(RuntimeError, match="not permitted"):
        ended("fedavg", federation_of("stacked", task_of(StraightThrough), data(), way="apart"), COHORTS)


def test_the_trial_leaves_a_module_as_it_was() -> None:
    """What it keeps of a pass has numbers."""
    task, train = task_of(StraightThrough), data().train
    assert task.why_not_stackable(train.x, train.y, apart=True) is None
    outputs = task.outputs(task.initial(), train.x[:2])
    assert type(outputs) is Tensor
    assert float(outputs.abs().sum()) > 0


def test_a_run_from_python_whose_clients_are_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"rounds": 3, "seed": 1, "data": data(), "cohort": {"fraction": 0.5}}
    models = [StraightThrough().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    alone = sartor.run("ditto", model=models[0], engine="loop", store=False, **settings)
    apart = sartor.run(
        "ditto",
        model=models[1],
        engine={"name": "stacked", "way": "apart"},
        out=tmp_path / "run",
        **settings,
    )
    assert apart.summary["engine"] == "stacked"
    one, other = (run.summary["accuracy"] for run in (alone, apart))
    assert one == other
    for client in range(len(SIZES)):
        assert alone.personal is not None
        assert apart.personal is not None
        torch.testing.assert_close(apart.personal[client], alone.personal[client], rtol=1e-9, atol=1e-9)
