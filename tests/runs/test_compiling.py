"""What ``engine.compile = "auto"`` comes to on CUDA."""

from __future__ import annotations

import pytest

from helpers import classification, model_task
from sartor.algorithms import registered
from sartor.runs import setup
from sartor.runs.experiment import from_mapping
from sartor.runs.setup import resolve


@pytest.mark.parametrize(
    ("model", "rounds", "precision", "expected"),
    [
        ("mlp", 50_000, "model", "yes"),
        ("mlp", 100, "model", "no"),
        ("lenet", 50_000, "model", "no"),  # its convolutions have kernels that go further
        ("lenet", 50_000, "bf16", "yes"),
    ],
)
def test_long_runs_are_compiled_where_that_is_faster(
    model: str, rounds: int, precision: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "choose_engine", lambda *given: "stacked")
    monkeypatch.setattr(setup, "_way", lambda *given: "together")
    data = classification((20, 20), shape=(3, 16, 16))
    task = model_task(model, data).in_precision(precision)
    experiment = from_mapping(
        {"algorithm": "fedavg", "rounds": rounds, "local": {"batch": 8}, "engine": {"device": "cuda"}}
    )
    assert resolve(experiment, registered()["fedavg"](), task, data).engine.compile == expected
