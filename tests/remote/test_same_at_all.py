"""What nobody sends must be the same at all: frozen weights; and what is one node's is nobody else's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import HereGrid
from torch import nn

import sartor
from helpers import module_of
from owned import forgetful
from sartor.data.clients import from_clients
from sartor.errors import SartorError
from sartor.files import alone
from sartor.model.adapters import with_adapters
from sartor.model.networks import seeded
from sartor.model.task import Task
from sartor.remote.join import join
from sartor.remote.node import Node
from sartor.remote.serve import Service, serve_on
from sartor.runs.experiment import load

__all__ = ["forgetful"]
pytestmark = pytest.mark.usefixtures("forgetful")

CODE = """
import torch
from torch import nn
import sartor

def build():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        module[0].weight.fill_({value})
    return sartor.with_adapters(module, 2)
"""
X, Y = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2


def adapted(value: float, seed: int = 0) -> Task:
    scope: dict[str, Any] = {}
    exec(CODE.format(value=value), scope)
    return Task(seeded(scope["build"], seed))


def test_the_hash_is_of_what_is_not_trained() -> None:
    base = module_of("mlp", (3,), 2, hidden=4)
    one, other = (Task(seeded(lambda: with_adapters(base, 2), seed)) for seed in (0, 1))
    assert one.constants_hash == other.constants_hash  # the adapters themselves are trained, and sent
    assert not torch.equal(one.initial(), other.initial())
    assert Task(nn.Linear(3, 2)).constants_hash is None
    assert one.constants_hash != one.in_precision("float32").constants_hash
    assert adapted(0.5).constants_hash != adapted(0.25).constants_hash


@pytest.mark.parametrize("value", [0.5, 0.25])
def test_other_frozen_weights_are_refused_with_that_reason(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE.format(value=0.5))
    words = ["model.path=net.py:build", "data.clients=2", "data.normalise=false", "engine.name=loop"]

    def data(name: str) -> Any:
        return lambda experiment: from_clients({name: (X, Y)})

    same = Node(data("Oslo"), task=None)
    other = Node(data("Bergen"), task=adapted(value))
    grid = HereGrid({1: same, 2: other})
    experiment = load(None, words, algorithm="fedit", rounds=1)
    if value == 0.5:
        result = serve_on(grid, experiment, Service(deadline=20, quorum=2), out=tmp_path / "run")
        assert isinstance(result, sartor.Result)
        return
    with caplog.at_level(logging.WARNING), pytest.raises(SartorError, match="what is not trained of it"):
        serve_on(grid, experiment, Service(deadline=20, quorum=2), out=tmp_path / "run")
    assert "is another at this node than at the server" in other.refusal
    assert not same.refusal


def test_two_nodes_do_not_share_a_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with (
        alone(state, "taken"),
        pytest.raises(SartorError, match=r"state: another node is using it; .* \(--state\)"),
    ):
        join("127.0.0.1:1", lambda experiment: None, state, patience=0)  # type: ignore[arg-type,return-value]
    assert list(state.iterdir()) == []  # nothing of the other's was touched
    with pytest.raises(SartorError, match="no server"):  # free again: no more than no server
        join("127.0.0.1:1", lambda experiment: None, state, patience=0)  # type: ignore[arg-type,return-value]
