"""Captured pieces on CUDA: sampled cohorts of ragged clients, clients apart, and a run that goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_unstackable import Sign
from torch import Tensor, nn

from helpers import classification, federation_of, method, play, resnet18
from sartor.engines import schedule
from sartor.engines.stacked.engine import StackedEngine
from sartor.engines.stacked.graphs import STRIDES, Graphs
from sartor.federation import Federation
from sartor.model.task import Task
from sartor.runs.evaluation import evaluate
from sartor.runs.settings import Evaluate

pytestmark = pytest.mark.cuda

SIZES = (5, 17, 33, 64, 7, 16, 90, 2, 41, 20)
COHORTS = [[0, 3, 5, 6], [1, 2, 4, 9], [3, 6, 7, 8], [0, 1, 2, 7], [4, 5, 8, 9], [2, 3, 6, 9]]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 4))


def groups() -> nn.Module:
    return resnet18(lambda channels: nn.GroupNorm(4, channels), 8, 1, 4)


def federation(
    build: Callable[[], nn.Module],
    engine: str,
    device: str,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Federation:
    data = classification(SIZES, shape=(1, 8, 8), classes=4, dtype=dtype)
    task = Task(build().to(dtype), classes=4)
    return federation_of(engine, task, data, local={"batch": 8}, device=device, **settings)


def weights(made: Federation, name: str = "fedavg", cohorts: list[list[int]] = COHORTS) -> Tensor:
    w: Tensor = play(method(name, made), made, cohorts).w
    return w.cpu()


@pytest.mark.parametrize("way", ["together", "apart"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
def test_sampled_cohorts_equal_the_loop(name: str, way: str) -> None:
    expected = weights(federation(convolutions, "loop", "cpu"), name)
    made = federation(convolutions, "stacked", "cuda", way=way)
    torch.testing.assert_close(weights(made, name), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("way", ["together", "apart"])
def test_a_deep_network_equals_the_loop(way: str) -> None:
    expected = weights(federation(groups, "loop", "cpu"), cohorts=COHORTS[:3])
    made = federation(groups, "stacked", "cuda", way=way)
    torch.testing.assert_close(weights(made, cohorts=COHORTS[:3]), expected, rtol=1e-7, atol=1e-7)


class Signs(nn.Module):
    """A convolution whose outputs are signs, by a function that has no rule for many clients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.output = nn.Conv2d(1, 4, 3), nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(Sign.apply(self.convolution(x)).flatten(1))  # type: ignore[no-untyped-call]
        return scores


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
def test_steps_of_a_model_that_cannot_be_stacked_are_captured(name: str) -> None:
    expected = weights(federation(Signs, "loop", "cpu"), name)
    made = federation(Signs, "stacked", "cuda", way="apart")
    torch.testing.assert_close(weights(made, name), expected, rtol=1e-8, atol=1e-8)
    assert isinstance(made.engine, StackedEngine)
    assert made.engine.graphs.wanted


def plain() -> nn.Module:
    """Two convolutions whose images go from one to the other, laid."""
    torch.manual_seed(0)
    first, second = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), (nn.Conv2d(4, 6, 2), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(24, 4))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "ifca"])
@pytest.mark.parametrize(
    ("build", "dtype", "within"), [(convolutions, torch.float64, 1e-9), (plain, torch.float32, 1e-4)]
)
def test_pieces_of_samples_count_what_the_loop_counts(
    name: str,
    build: Callable[[], nn.Module],
    dtype: torch.dtype,
    within: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "NARROWEST", 2)
    cells = []
    for engine, device, times in (("loop", "cpu", 1), ("stacked", "cuda", 4)):
        made = federation(build, engine, device, dtype)
        algorithm = method(name, made)
        server = play(algorithm, made, COHORTS[:1])
        for _ in range(times):  # as it stands, in pieces, and captured as a whole
            found = evaluate(algorithm, server, made, Evaluate(personal_pooled="yes"))
        cells.append(found)
    assert isinstance(made.engine, StackedEngine)
    assert any(plan.shape.pieces for plan in made.engine._plans.values())
    for name, cell in cells[0].items():
        np.testing.assert_array_equal(cells[1][name].n, cell.n)
        np.testing.assert_allclose(cells[1][name].loss, cell.loss, rtol=within)
        if dtype is torch.float64:
            np.testing.assert_array_equal(cells[1][name].scores["accuracy"], cell.scores["accuracy"])


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("fedavg", convolutions),
        ("ditto", convolutions),
        ("fedupdate", convolutions),
        ("ifca", plain),  # clients say which of the shared models they prefer, of which all is counted
        ("ma-fsvrg", plain),
    ],
)
def test_evaluations_in_chunks_count_the_same_whenever_they_come(
    name: str, build: Callable[[], nn.Module], lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short; also with steps of pieces that are captured before the parts around them."""
    monkeypatch.setattr(schedule, "NARROWEST", 2)
    if lasting:
        monkeypatch.setattr(Graphs, "lasting", lambda *_: True)
    expected = None
    for engine, device, chunk in (("loop", "cpu", 0), ("stacked", "cuda", 3)):
        made = federation(build, engine, device, chunk=chunk)
        algorithm = method(name, made)
        server = play(algorithm, made, COHORTS[:1])
        for _ in range(5 if chunk else 1):
            found = evaluate(algorithm, server, made, Evaluate(personal_pooled="no"))
            made.round += 1 if name != "fedupdate" else 0  # which trains, by a round's batches
            for cell, counted in (expected or found).items():
                np.testing.assert_allclose(found[cell].loss, counted.loss, rtol=1e-8)
                np.testing.assert_array_equal(found[cell].scores["accuracy"], counted.scores["accuracy"])
        expected = expected or found


def test_no_cohort_needs_a_capture_of_its_own() -> None:
    made = federation(convolutions, "stacked", "cuda", torch.float32)
    assert isinstance(made.engine, StackedEngine)
    weights(made)
    graphs = made.engine.graphs
    known = list(graphs.taken), dict(graphs.parts)
    weights(made, cohorts=COHORTS[::-1])
    assert (list(graphs.taken), dict(graphs.parts)) == known
    assert len(graphs.taken) <= 4  # widths of 1, 2, 3 and 4 clients
    assert all(set(steps._captured) <= set(STRIDES) for steps in graphs.taken.values())


def test_going_on_gives_the_same_to_the_bit() -> None:
    """Rounds in a new process have nothing captured yet, and whole calls come only later."""
    whole = federation(groups, "stacked", "cuda", torch.float32)
    algorithm = method("fedavg", whole)
    server = algorithm.start(whole)
    servers = []
    for cohort in COHORTS * 2:
        servers.append(server)
        server = algorithm.round(server, whole, torch.tensor(cohort).numpy())
        whole.round += 1
    again = federation(groups, "stacked", "cuda", torch.float32)
    algorithm.start(again)
    again.round = whole.round - 3
    resumed = servers[-3]
    for cohort in (COHORTS * 2)[-3:]:
        resumed = algorithm.round(resumed, again, torch.tensor(cohort).numpy())
        again.round += 1
    assert torch.equal(resumed.w, server.w)
