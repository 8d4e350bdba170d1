"""What is left to ``auto`` of an engine is decided before a run, and shown."""

from __future__ import annotations

import pytest

from helpers import classification, model_task
from sartor.commands.run import _where
from sartor.engines.settings import Engine
from sartor.runs.experiment import from_mapping
from sartor.runs.setup import set_up


def decided(**engine: str) -> Engine:
    data = classification((4, 6), shape=(5,), classes=4)
    settings = {"data": {"name": "own", "normalise": False}, "model": {"name": "custom"}, "engine": engine}
    experiment = from_mapping({"algorithm": "fedavg", **settings})
    return set_up(experiment, data=data, task=model_task("mlp", data)).experiment.engine


@pytest.mark.parametrize(
    ("asked", "otherwise"),
    [({}, "loop"), ({"name": "stacked"}, "error"), ({"name": "stacked", "otherwise": "loop"}, "loop")],
)
def test_only_an_engine_that_nobody_asked_for_gives_way(asked: dict[str, str], otherwise: str) -> None:
    engine = decided(**asked)
    assert (engine.name, engine.otherwise, engine.way) == ("stacked", otherwise, "together")


def test_a_way_that_was_asked_for_is_taken() -> None:
    assert decided(way="apart").way == "apart"


def test_a_dry_run_says_how_steps_are_computed() -> None:
    cost = {"engine": "stacked", "device": "cuda", "way": "apart"}
    assert _where(cost) == "stacked engine on cuda, steps apart"
    assert _where({**cost, "device": "cpu"}) == "stacked engine on cpu"
