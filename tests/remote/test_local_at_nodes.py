"""Nodes train as a simulation does: optimiser, schedule, precision, augmentation, and what a module draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flower_grid import HereGrid

import sartor
from owned import forgetful
from sartor.client.augment import AUGMENTATIONS
from sartor.data.clients import from_clients
from sartor.extensions import find_function
from sartor.remote.node import Node
from sartor.remote.serve import Service, serve_on
from sartor.runs.experiment import load, to_mapping

__all__ = ["forgetful"]
pytestmark = pytest.mark.usefixtures("forgetful")

CODE = """
import torch
from torch import nn
from torch.nn import functional as F
import sartor

def pictures():
    def client(place, n):
        x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
        return x, (x.sum((1, 2, 3)) > 0).long()
    return {name: client(place, n) for place, (name, n) in enumerate({"Bergen": 17, "Oslo": 9}.items())}

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.output = nn.Linear(16, 6), nn.Linear(6, classes)

    def forward(self, x):
        return self.output(F.dropout(self.first(x.flatten(1)).relu(), 0.3, self.training))

@sartor.register_augmentation("hiss")
def hiss(x):
    return x + 0.1 * torch.randn_like(x)
"""


def test_nodes_train_as_a_simulation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    words = [
        *("rounds=2", "model.path=mine.py:Net", "engine.name=loop", "hyper.lr=0.02", "data.normalise=false"),
        *("local.batch=8", "local.optimizer=adamw", "local.weight_decay=0.1", "local.schedule=cosine"),
        *("local.warmup=1", "local.clip=0.5", "local.micro=3", "local.precision=float64"),
        "local.augment=['flip', 'hiss', {name='mix-up', alpha=1.0}]",
    ]
    try:
        simulated = load(None, [*words, "data.path=mine.py:pictures"])
        expected = sartor.run(experiment=to_mapping(simulated), store=False)
        given = find_function("mine.py:pictures", "data.path")()
        nodes = {
            place: Node(lambda experiment, name=name: from_clients({name: given[name]}, seed=experiment.seed))
            for place, name in enumerate(given, 1)
        }
        found = serve_on(HereGrid(nodes), load(None, words), Service(min_nodes=2), out=tmp_path / "run")
    finally:
        AUGMENTATIONS.remove("hiss")
    assert found.w is not None
    assert found.w.dtype == torch.float64
    torch.testing.assert_close(found.w, expected.w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep"])
def test_a_node_of_a_single_sample_takes_part(tmp_path: Path, method: str) -> None:
    """It trains, and has nothing to be tested on."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    given = {"north": (x[:20], torch.arange(20) % 3), "one": (x[20:21], torch.tensor([1]))}
    given["south"] = (x[21:], torch.arange(19) % 3)
    settings = {"model": {"name": "mlp"}, "rounds": 2, "data": {"normalise": True}}
    expected = sartor.run(method, data=given, experiment=settings, store=False)
    nodes = {
        place: Node(lambda experiment, name=name: from_clients({name: given[name]}, seed=experiment.seed))
        for place, name in enumerate(given, 1)
    }
    words = [f"algorithm={method}", "model.name=mlp", "rounds=2"]
    found = serve_on(HereGrid(nodes), load(None, words), Service(min_nodes=3), out=tmp_path / "run")
    for cell in ("shared_local", "personal_local"):
        assert found.summary["accuracy"][cell] == expected.summary["accuracy"][cell]
    assert found.clients["n_test"] == expected.clients["n_test"]
    assert 0 in found.clients["n_test"]
    if method == "fedavg":
        torch.testing.assert_close(found.w, expected.w, rtol=1e-5, atol=1e-6)
