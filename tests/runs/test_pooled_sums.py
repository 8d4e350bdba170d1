"""Where the pooled test data are the clients' own, what they count is added up, and is what a pass counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same_cells, classification, federation_of, play
from sartor.algorithms import make, registered
from sartor.data.clients import ClientData, Split, from_clients
from sartor.data.partitions import apply, make_partition
from sartor.data.sources import Source
from sartor.engines.base import LocalEngine
from sartor.model.task import Task
from sartor.runs import evaluation
from sartor.runs.evaluation import Cell, evaluate
from sartor.runs.settings import Evaluate


def own() -> ClientData:
    """Ragged clients whose test samples are the pooled ones."""
    return classification((9, 4, 20, 1, 14), shape=(5,), dtype=torch.float64)


def official() -> ClientData:
    """The same with a test set of which some samples are nobody's, in an order of its own."""
    data = own()
    x, y = classification((7,), shape=(5,), seed=1, dtype=torch.float64).train.x, torch.arange(7) % 4
    pooled_x, pooled_y = torch.cat([x, data.test.x]), torch.cat([y, data.test.y])
    order = torch.randperm(len(pooled_y), generator=torch.Generator().manual_seed(1))
    places = torch.argsort(order)[7:].numpy()
    return replace(data, pooled_x=pooled_x[order], pooled_y=pooled_y[order], places=places)


def network(*layers: nn.Module) -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 4)).double(), classes=4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits that clients are asked about."""
    seen: list[str] = []
    made = evaluation.evaluation_of

    def noted(function: Any, splits: str, tallies: str) -> Any:
        seen.extend(splits.split("+"))
        return made(function, splits, tallies)

    monkeypatch.setattr(evaluation, "evaluation_of", noted)
    return seen


def cells_of(
    data: ClientData, engine: str = "loop", name: str = "fedavg", task: Task | None = None, **settings: Any
) -> dict[str, Cell]:
    """All cells after a round with some of the clients."""
    algorithm = make(registered()[name])
    more = {"local": {"batch": 4}, "buffers": algorithm.buffers, "hyper": algorithm.hyper}
    federation = federation_of(engine, task or network(nn.ReLU()), data, evaluation_batch=3, **more)
    server = play(algorithm, federation, [[0, 2, 4]])
    return evaluate(algorithm, server, federation, Evaluate(**settings))


def by_a_pass(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **settings: Any) -> dict[str, Cell]:
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "adds_up", False)
        return cells_of(*arguments, **settings)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("name", ["fedavg", "fedupdate"])
@pytest.mark.parametrize("data", [own, official])
def test_sums_are_what_a_pass_counts(
    data: Any, name: str, engine: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cells_of(data(), engine, name)
    assert asked.count("test") == 1
    assert "pooled" not in asked or name == "fedupdate"  # personal models are others
    assert ("rest" in asked) == (data is official)
    expected = by_a_pass(monkeypatch, data(), engine, name)
    assert_same_cells(found, expected, rtol=1e-12)
    assert [cell.extra for cell in found.values()] == [cell.extra for cell in expected.values()]


@pytest.mark.parametrize("name", ["ifca", "ma-fsvrg"])
def test_several_models_add_up_with_what_no_client_was_given(
    name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an official test set is dealt out but for a few samples."""
    expected = by_a_pass(monkeypatch, official(), "stacked", name)
    assert "rest" not in asked
    assert_same_cells(cells_of(official(), "stacked", name), expected, rtol=1e-12)
    assert "rest" in asked


class Centred(nn.Module):
    """A layer that mixes the samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def test_a_pass_is_made_where_sums_might_be_others(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (
        {"clients": 3},
        {"name": "ifca", "task": network(nn.BatchNorm1d(6))},
        {"name": "fedbn", "task": network(nn.BatchNorm1d(6))},
        {"task": network(Centred())},
    ):
        asked.clear()
        found = cells_of(own(), **settings)["shared_pooled"]
        assert "pooled" in asked
        np.testing.assert_array_equal(
            found.loss, by_a_pass(monkeypatch, own(), **settings)["shared_pooled"].loss
        )


# What is nobody's ------------------------------------------------------------------------------------------


def test_the_rest_is_what_no_client_has() -> None:
    data = official()
    assert data.rest is not None
    held = {tuple(row) for row in data.test.x.tolist()}
    others = [place for place, row in enumerate(data.pooled_x.tolist()) if tuple(row) not in held]
    assert data.rest.tolist() == others
    assert len(others) == 7
    mapped = data.map(lambda x: 2 * x)
    assert mapped.rest is not None
    assert mapped.rest.tolist() == others
    assert own().rest is not None
    assert not len(own().rest)


def test_nothing_is_said_of_what_is_not_certain() -> None:
    data, test = official(), official().test
    assert data.places is not None
    twice = np.where(np.arange(len(data.places)) == 1, data.places[0], data.places)
    for changed in (
        replace(data, places=None),
        replace(data, places=twice),
        replace(data, test=test.map(lambda x: -x)),  # samples of another kind at the clients
        replace(data, test=replace(test, y=1 - test.y)),
        data.some(np.array([0, 2])),
        data.some(np.array([0, 2])).packed(),
        own().some(np.array([1, 0])),
        replace(own(), test=replace(own().test, start=0 * test.start)),
    ):
        assert changed.rest is None


def test_clients_without_samples_leave_nothing_over() -> None:
    x, y = torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)
    for start, count in (([0, 3, 3], [3, 0, 2]), ([3, 0, 0], [2, 3, 0]), ([9, 0, 3], [0, 3, 2])):
        assert Split(x, y, np.array(start), np.array(count)).whole
    for start, count in (([0, 2], [3, 2]), ([0, 3], [3, 1]), ([0, 0], [5, 5])):
        assert not Split(x, y, np.array(start), np.array(count)).whole


@pytest.mark.parametrize("scheme", ["iid", {"name": "dirichlet", "alpha": 0.3}])
def test_partitions_know_where_test_samples_come_from(scheme: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(130, 3, generator=generator), torch.arange(130) % 3
    source = Source("s", x[:90], y[:90], x[90:], y[90:], 3)
    data = apply(source, make_partition(source, scheme, clients=6), normalise=True)
    assert data.rest is not None
    assert len(data.rest) + int(data.test.count.sum()) == 40
    cut = apply(source.merged(), make_partition(source.merged(), scheme, clients=6))
    assert cut.rest is not None
    assert not len(cut.rest)
    assert from_clients({"a": (x.numpy(), y.numpy()), "b": (x.numpy(), y.numpy())}).rest is not None
