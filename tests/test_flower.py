"""A federation of real processes on this machine gives what a simulation gives, whoever is killed on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor

from flower_processes import Child, Nursery, free_port
from sartor.experiment import load
from sartor.runner import execute

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SIZES = (30, 70, 50, 90, 40, 60)
BLOCKS = ((0, 3), (1, 4), (2, 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clients of the digits: a folder for each of three nodes, and one with all of them."""
    path = tmp_path_factory.mktemp("federation")
    digits = load_digits()
    x, y = digits.images[:, None] / 16, digits.target
    ends = np.cumsum(SIZES)
    for node, block in enumerate(BLOCKS):
        for client in block:
            rows = slice(ends[client] - SIZES[client], ends[client])
            for place in (f"node{node}", "all"):
                (path / place).mkdir(exist_ok=True)
                np.savez(path / place / f"c{client}.npz", x=x[rows], y=y[rows])
    return path


@pytest.fixture(scope="module")
def nursery(folder: Path) -> Iterator[Nursery]:
    nursery = Nursery(folder)
    yield nursery
    nursery.close()


SETTINGS = ("data.clients=6", "engine.name=loop", "local.batch=16", "model.name=mlp", "model.hidden=16")


class Federation:
    """A server and three nodes of one run."""

    def __init__(self, nursery: Nursery, name: str, *settings: str, options: tuple[Any, ...] = ()) -> None:
        self.nursery, self.port = nursery, free_port()
        self.place = nursery.folder / f"{name}-{self.port}"
        self.place.mkdir()
        self.run = self.place / "run"
        self.options = options
        self.server = self.serve(f"algorithm={name}", *SETTINGS, *settings, "--out", self.run)
        self.nodes = [self.join(node) for node in range(3)]

    def serve(self, *words: Any) -> Child:
        return self.nursery.start("serve", *words, "--listen", f"127.0.0.1:{self.port}", *self.options)

    def join(self, node: int, *words: Any) -> Child:
        data = ("--data", self.nursery.folder / f"node{node}", "--state", self.place / f"state{node}")
        return self.nursery.start("join", f"127.0.0.1:{self.port}", *data, *words)

    def done(self, seconds: float = 90) -> dict[str, Tensor]:
        """The models of the run, which has come to its end at the server and at all nodes."""
        assert self.server.wait(seconds) == 0, self.server.output
        for node in self.nodes:
            assert node.wait(20) == 0, node.output
            assert "Traceback" not in node.output
        assert "Traceback" not in self.server.output
        return load_file(self.run / "models.safetensors")

    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "rounds.jsonl").read_text().splitlines()]


def simulated(folder: Path, name: str, *settings: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The models of a simulation with the same clients, and its summary."""
    out = folder / f"simulated-{name}-{time.monotonic_ns()}"
    given = [*SETTINGS, *settings, f"data.path={folder / 'all'}"]
    result = execute(load(None, given, algorithm=name), out=out)
    return load_file(out / "models.safetensors"), result.summary


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ma-fsvrg", "diversifed"])
def test_processes_give_what_a_simulation_gives(nursery: Nursery, folder: Path, name: str) -> None:
    federation = Federation(nursery, name, "rounds=3")
    expected, summary = simulated(folder, name, "rounds=3")
    assert_equal(federation.done(), expected)
    found = json.loads((federation.run / "summary.json").read_text())
    for cell in ("shared_pooled", "shared_local", "personal_local"):
        assert found["accuracy"][cell] == pytest.approx(summary["accuracy"][cell]), cell
    assert (found["bytes_down"], found["bytes_up"]) == (summary["bytes_down"], summary["bytes_up"])
    assert found["engine"] == "flower"
