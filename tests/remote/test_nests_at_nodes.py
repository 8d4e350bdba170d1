"""Nodes with samples of any form and any objective give what a simulation gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import HereGrid

import sartor
from owned import forgetful
from sartor.data.clients import ClientData, from_clients
from sartor.extensions import find_function
from sartor.model.objectives import chosen_objective
from sartor.remote.node import Node
from sartor.remote.serve import Service, serve_on
from sartor.runs.experiment import load, to_mapping

__all__ = ["forgetful"]
pytestmark = pytest.mark.usefixtures("forgetful")

CODE = """
import torch
from torch import nn

SIZES = {"Bergen": 17, "Drammen": 30, "Oslo": 9}

def numbers(place, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(place))

def tokens():
    def client(place, n):
        x = (3 * numbers(place, n, 5).abs()).long().clamp(max=11)
        mask, age = numbers(place + 9, n, 5) > -1, 40 + numbers(place + 5, n)
        return {"input_ids": x, "mask": mask, "age": age}, x[:, 0] % 3
    return {name: client(place, n) for place, (name, n) in enumerate(SIZES.items())}

def pairs():
    def client(place, n):
        a, b = 5 + numbers(place, n, 3), (4 * numbers(place + 9, n, 2)).long()
        return (a, b), a[:, :2] - b
    return {name: client(place, n) for place, (name, n) in enumerate(SIZES.items())}

def labels():
    def client(place, n):
        x = numbers(place, n, 4)
        return x, (x[:, :3] > 0).long()
    return {name: client(place, n) for place, (name, n) in enumerate(SIZES.items())}

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(12, 5), nn.Linear(6, 3)

    def forward(self, input_ids, mask, age):
        there = mask.to(age.dtype)[..., None]
        mean = (self.embedding(input_ids) * there).sum(1) / there.sum(1).clamp(min=1)
        return self.output(torch.cat([mean, age[:, None]], 1))

class Pair(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.second = nn.Linear(shape[0][0], classes), nn.Linear(shape[1][0], classes)

    def forward(self, a, b):
        return self.first(a) + self.second(b)

def squares(outputs, y):
    return (outputs - y).square().mean()
"""


@pytest.mark.parametrize(
    ("data", "words", "headline"),
    [
        ("tokens", ["model.path=mine.py:Bag", "evaluate.metrics=['accuracy','roc_auc']"], "accuracy"),
        ("pairs", ["model.path=mine.py:Pair", "objective.name=regression"], "rmse"),
        ("pairs", ["model.path=mine.py:Pair", "objective.path=mine.py:squares"], "loss"),
        ("labels", ["model.name=softmax", "objective.name=multi-label", "data.normalise=false"], "macro_f1"),
    ],
)
def test_nodes_give_what_a_simulation_gives(
    data: str, words: list[str], headline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    words = [*words, "rounds=2", "local.batch=8", "engine.name=loop", "hyper.lr=0.02"]
    simulated = load(None, [*words, f"data.path=mine.py:{data}"])
    expected = sartor.run(experiment=to_mapping(simulated), store=False)
    given = find_function(f"mine.py:{data}", "data.path")()

    def loads(name: str) -> Callable[[Any], ClientData]:
        return lambda experiment: from_clients(
            {name: given[name]}, seed=experiment.seed, targets=chosen_objective(experiment.objective).targets
        )

    nodes = {place: Node(loads(name), tmp_path / name) for place, name in enumerate(given, 1)}
    found = serve_on(HereGrid(nodes), load(None, words), Service(min_nodes=3), out=tmp_path / "run")
    assert found.w is not None
    assert expected.w is not None
    torch.testing.assert_close(found.w, expected.w)
    assert found.summary["headline"] == expected.summary["headline"] == headline
    for cell in ("shared_pooled", "shared_local"):
        last, wanted = found.summary["last"][cell], expected.summary["last"][cell]
        assert {key for key, value in last.items() if value is not None} == {
            key for key, value in wanted.items() if value is not None
        }
        for metric in (headline, "loss", *(("roc_auc",) if data == "tokens" else ())):
            assert last[metric] == pytest.approx(wanted[metric], rel=1e-4), metric
