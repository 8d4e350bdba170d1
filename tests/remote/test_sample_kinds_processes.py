"""Samples of every kind through Flower, in processes of their own: dicts, tuples and whole numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flower_processes import Nursery, free_port
from safetensors.torch import load_file

from owned import forgetful
from sartor.runs.execute import execute
from sartor.runs.experiment import load

__all__ = ["forgetful"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forgetful")]
PAIR = """
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Embedding(4, 2)

    def forward(self, a, b):
        return self.first(a) + self.second(b)
"""
KINDS = {
    "dict": ["model.name=table", "model.categories=[4]", "model.hidden=[5]"],
    "tuple": ["model.path=PLACE/pair.py:Pair"],
    "integers": ["model.name=lstm", "model.vocabulary=9", "model.width=3", "model.hidden=4"],
}


def arrays(kind: str, seed: int) -> dict[str, Any]:
    """What a client's file holds."""
    random = np.random.default_rng(seed)
    numbers, kinds = random.normal(size=(12, 3)).astype(np.float32), random.integers(0, 4, 12)
    y = {"y": kinds % 2}
    if kind == "dict":
        return {"x.numbers": numbers, "x.categories": kinds[:, None], **y}
    if kind == "tuple":
        return {"x.0": numbers, "x.1": kinds, **y}
    return {"x": random.integers(0, 9, (12, 5)), **y}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("kinds"))
    yield nursery
    nursery.close()


@pytest.mark.parametrize("kind", KINDS)
def test_processes_give_what_a_simulation_gives(kind: str, nursery: Nursery) -> None:
    place = nursery.folder / kind
    (place / "all").mkdir(parents=True)
    (place / "pair.py").write_text(PAIR)
    for client in range(2):
        np.savez(place / "all" / f"c{client}.npz", **arrays(kind, client))
    settings = [
        "algorithm=fedper" if kind != "tuple" else "algorithm=fedavg",
        "rounds=2",
        "engine.name=loop",
        "data.clients=2",
    ]
    settings += [word.replace("PLACE", str(place)) for word in KINDS[kind]]
    address = f"127.0.0.1:{free_port()}"
    server = nursery.start("serve", *settings, "--listen", address, "--out", place / "run")
    code = ("--import", place / "pair.py") if kind == "tuple" else ()
    node = nursery.start("join", address, "--data", place / "all", "--state", place / "state", *code)
    execute(load(None, [*settings, f"data.path={place / 'all'}"]), out=place / "simulated")
    assert server.wait() == 0, server.output
    assert node.wait() == 0, node.output
    expected = load_file(place / "simulated" / "models.safetensors")
    found = load_file(place / "run" / "models.safetensors")
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])
