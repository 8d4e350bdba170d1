"""Several models, and clients laid out one after the other, are counted as each model and client alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import classification, federation_of, method, play
from sartor.algorithms import make, registered
from sartor.engines import samples as samples_module
from sartor.engines.samples import Samples
from sartor.engines.stacked import trace
from sartor.federation.exchange import Call
from sartor.federation.federation import Federation
from sartor.model.objectives import Classification, cross_entropy
from sartor.model.task import Task
from sartor.runs.evaluation import (
    _answers,
    _filled_up,
    cell_of,
    cells_of_each,
    each_model,
    evaluate,
    measured_in,
    rank,
    shared_model,
)
from sartor.runs.settings import Evaluate

NETWORKS = {
    "dense": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 4)),
    "statistics": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
}


def federation_with(network: str, engine: str = "stacked", **settings: Any) -> Federation:
    """Ragged clients."""
    torch.manual_seed(0)
    task = Task(NETWORKS[network]().double(), classes=4)
    return federation_of(engine, task, classification(shape=(5,), dtype=torch.float64), **settings)


@pytest.mark.parametrize("untraced", [0, 1000])
@pytest.mark.parametrize("network", NETWORKS)
def test_rows_of_models_are_counted_as_each_alone(
    network: str, untraced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "UNTRACED", untraced)
    federation = federation_with(network, evaluation_batch=3)  # several batches, of which one is short
    what, clients = measured_in(federation, Evaluate()), np.arange(federation.clients)
    w = federation.initial()
    rows = torch.stack([w, -w, w.flip(0)])
    for split in ("test", "pooled"):
        asked = _answers(federation, Call(shared_model, {"w": rows}), clients, (split,), what)[split]
        for row, counted in zip(rows, each_model(asked), strict=True):
            one = _answers(federation, Call(shared_model, {"w": row}), clients, (split,), what)[split]
            np.testing.assert_array_equal(counted["confusion"], one["confusion"])
            np.testing.assert_allclose(counted["loss"], one["loss"], rtol=1e-12)


@pytest.mark.parametrize("split", ["test", "pooled"])
def test_models_are_scored_at_once_as_each_alone(split: str) -> None:
    """With one that answers a single class, which its cell says; the first of equal models is the best."""
    federation = federation_with("dense")
    what, clients = measured_in(federation, Evaluate()), np.arange(federation.clients)
    w = federation.initial()
    rows = torch.stack([torch.zeros_like(w), w, -w, w])
    asked = _answers(federation, Call(shared_model, {"w": rows}), clients, (split,), what)[split]
    found, best = cells_of_each(asked, what)
    alone = [cell_of(counted, what) for counted in each_model(asked)]
    for cell, expected in zip(found, alone, strict=True):
        np.testing.assert_array_equal(cell.n, expected.n)
        np.testing.assert_array_equal(cell.loss, expected.loss)
        assert cell.scores.keys() == expected.scores.keys()
        for name, values in cell.scores.items():
            np.testing.assert_array_equal(values, expected.scores[name])
    ranks = [rank(cell) for cell in alone]
    assert best == ranks.index(max(ranks))
    assert found[best].extra == alone[best].extra
    first, place = cells_of_each(
        {name: values[:, :1] if values.ndim > 1 else values for name, values in asked.items()}, what
    )
    assert place == 0
    assert first[0].extra["constant"]["of"] == alone[0].extra["constant"]["of"] > 0


def test_models_on_a_gpu_are_filled_up_to_few_numbers() -> None:
    for many in range(1, 101):
        filled = _filled_up(np.arange(many) * 3, 100)
        assert filled[:many].tolist() == [3 * place for place in range(many)]
        assert set(filled[many:].tolist()) <= {3 * (many - 1)}
        assert len(filled) in (1, 2, 4, 8, 16, 32, 64, 100)
        assert many <= len(filled) < 2 * many or many == 1


@pytest.mark.parametrize("name", ["ditto", "fedavg"])
def test_filled_up_models_count_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As clients' models become unlike round after round."""
    found = {}
    for filled in (False, True):
        if filled:
            monkeypatch.setattr("sartor.runs.evaluation._fills_up", lambda device: True)
        federation = federation_with("dense")
        algorithm = method(name, federation)
        server, scores = algorithm.start(federation), []
        for cohort in ([0], [1, 3], [0, 2]):
            server = algorithm.round(server, federation, np.array(cohort))
            federation.round += 1
            cells = evaluate(algorithm, server, federation, Evaluate(personal_pooled="yes"))
            scores.append({cell: found.summary() for cell, found in cells.items()})
        found[filled] = scores
    assert found[True] == found[False]


@pytest.mark.parametrize("name", ["ifca", "ma-fsvrg"])
def test_engines_agree_on_the_model_that_a_client_prefers(name: str) -> None:
    """MA-FSVRG has one model in its first rounds, of which there is nothing to choose, and then several."""
    algorithm = make(registered()[name])
    federations = [federation_with("dense", engine, hyper=algorithm.hyper) for engine in ("loop", "stacked")]
    for rounds in (1, 6):
        cells = [
            evaluate(algorithm, play(algorithm, each, [[0, 2, 3]] * rounds), each, Evaluate())
            for each in federations
        ]
        for cell, other in zip(*(found.values() for found in cells), strict=True):
            np.testing.assert_allclose(cell.loss, other.loss, rtol=1e-9)
            np.testing.assert_array_equal(cell.scores["accuracy"], other.scores["accuracy"])


def test_clients_asked_again_are_laid_out_and_count_the_same() -> None:
    federation = federation_with("dense")
    what, clients = measured_in(federation, Evaluate()), np.arange(federation.clients)
    call = Call(shared_model, {"w": federation.initial()})
    found = [_answers(federation, call, clients, ("test",), what)["test"] for _ in range(3)]
    laid_out = federation.engine.samples["test"]._laid_out  # type: ignore[attr-defined]
    assert len(laid_out) == 1
    for later in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_allclose(later[name], values, rtol=1e-13)


def split_of(counts: list[int]) -> Samples:
    """Clients with so many samples, numbered through."""
    data, number = classification(shape=(5,)), sum(counts)
    x, y = torch.arange(number).float()[:, None].expand(-1, 5).contiguous(), torch.arange(number)
    starts = np.cumsum([0, *counts[:-1]])
    return Samples(type(data.train)(x, y, starts, np.array(counts)), torch.device("cpu"))


def test_rows_behind_the_last_sample_are_the_first_again() -> None:
    samples, clients = split_of([2, 0, 3]), np.array([2, 0, 1])
    assert samples.laid_out(clients, 3) is None
    found = samples.laid_out(clients, 3)
    assert found is not None
    assert found[1].tolist() == [2, 3, 4, 0, 1, 0, 0, 0, 0]
    assert found[0][:, 0].tolist() == found[1].tolist()
    again = samples.laid_out(clients, 3)
    assert again is not None
    assert again[0] is found[0]


def test_equal_clients_in_a_row_are_not_copied() -> None:
    samples = split_of([2, 2, 2])
    found = samples.laid_out(np.array([1, 2]), 2)
    assert found is not None
    assert found[1].tolist() == [2, 3, 4, 5]
    assert found[0].data_ptr() == samples.x[2:].data_ptr()


def test_large_copies_and_cohorts_that_change_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = split_of([2, 1, 3])
    for cohort in ([0, 1], [1, 2], [0, 2]):
        assert samples.laid_out(np.array(cohort), 3) is None
    monkeypatch.setattr(samples_module, "MOST_LAID_OUT", 6 * 5 * 4 - 1)
    assert samples.laid_out(np.array([0, 1]), 3) is None
    monkeypatch.setattr(samples_module, "MOST_LAID_OUT", 6 * 5 * 4)
    assert samples.laid_out(np.array([0, 1]), 3) is not None
    monkeypatch.setattr(samples_module, "MOST_ASKED", 1)
    assert samples.laid_out(np.array([1, 0]), 3) is None
    assert samples._asked == {hash((3, np.array([1, 0]).tobytes()))}


def test_cross_entropy_is_the_same_with_and_without_a_gradient() -> None:
    outputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    outputs[0, 0] = 800.0
    tracked = cross_entropy(outputs.clone().requires_grad_(), targets)
    torch.testing.assert_close(cross_entropy(outputs, targets), tracked.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(tracked, F.cross_entropy(outputs, targets, reduction="none"))


def test_the_first_of_equal_outputs_is_the_prediction() -> None:
    outputs = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, torch.nan, 1.0]])
    counted = Classification().tallies(3)["confusion"].count(outputs, torch.tensor([0, 1, 2]), None)
    expected = torch.zeros(3, 3)
    for truth, guess in enumerate(outputs.argmax(-1).tolist()):
        expected[truth, guess] = 1
    assert torch.equal(counted, expected)
