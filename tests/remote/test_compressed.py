"""Clipped, noised, sparse and quantised: the same on both engines and at nodes, and a real wire's bytes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from flower_processes import Nursery, free_port
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from test_engines import network, plain, vectors

from helpers import federation_of, play
from sartor.algorithms import make, registered
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.remote.messages import Parts
from sartor.runs.execute import execute
from sartor.runs.experiment import from_mapping, load
from sartor.runs.run import tensors_of

COHORTS = [[0, 2, 3, 5], [1, 2, 4], [0, 1, 2, 3, 4, 5]]
TABLES = [
    {"name": "difference"},
    {"name": "int8", "place": "down", "block": 16},
    {"name": "clip", "norm": 0.5},
    {"name": "noise", "deviation": 1e-3},
    {"name": "top-k", "share": 0.3},
    {"name": "int4", "block": 16},
]
TRANSFORMS = from_mapping({"transforms": TABLES}).transforms
ONE_EACH = [[number] for number in range(6)]


def tried(federation: Federation, name: str) -> dict[str, torch.Tensor]:
    """The server's tensors after three rounds."""
    algorithm = make(registered()[name], lr=0.05)
    federation.hyper = algorithm.hyper
    return dict(tensors_of(play(algorithm, federation, COHORTS)))


@pytest.mark.parametrize("name", ["ditto", "fedrep", "scaffold", "spfl", "ma-fsvrg"])
def test_all_together_is_the_same_everywhere(name: str, tmp_path: Path) -> None:
    """Loop and stacked, and nodes to whose messages' bytes the count is held."""
    data, task = vectors(), network() if name == "fedrep" else plain()
    settings: dict[str, Any] = {"transforms": TRANSFORMS, "buffers": registered()[name].buffers}
    local = {"batch": 8}
    loop = federation_of("loop", task, data, local=local, workers=1, **settings)
    expected = tried(loop, name)
    stacked = federation_of("stacked", task, data, local=local, chunk=4, **settings)
    for key, value in tried(stacked, name).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)
    assert stacked.traffic == loop.traffic
    up = [0]

    def weighed(node: int, parts: Parts) -> Parts:
        up[0] += len(parts.get("sent", b"")) + len(parts.get("buffers", b""))
        return parts

    grid = HereGrid(nodes_of(data, task, ONE_EACH, tmp_path), weighed)
    experiment = experiment_of(name, local=local, transforms=TABLES)
    deployed = federation_on(grid, experiment, task, **settings)
    found = tried(deployed, name)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert deployed.traffic == loop.traffic
    assert up[0] == deployed.traffic.up  # every byte of every reply, and no other
    groups = ("shared", "each", "buffers")
    down = sum(len(parts.get(group, b"")) for _, parts in grid.sent for group in groups)
    told = sum(len(parts.get("declared", b"")) for _, parts in grid.sent)
    assert down <= deployed.traffic.down <= down + told  # what differences begin with is told as states are
    whole = federation_of("loop", task, data, local=local, buffers=settings["buffers"])
    tried(whole, name)
    assert loop.traffic.up < 0.35 * whole.traffic.up


@pytest.mark.parametrize(
    "names", [("top-k", "clip", "noise"), ("clip", "top-k", "int8", "noise"), ("int8", "clip", "noise")]
)
def test_noise_comes_before_what_compresses(names: tuple[str, ...]) -> None:
    """Places of numbers and codes are whole numbers: noise would leave them as they are."""
    with pytest.raises(SettingError, match="stands before noise, and sends parts that noise does not reach"):
        from_mapping({"transforms": [{"name": name} for name in names]})


class Wire:
    """Hands on what comes to a port of this machine, and counts the bytes each way."""

    def __init__(self, to: int) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port, self.to, self.up, self.down = self.listening.getsockname()[1], to, 0, 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            threading.Thread(target=self._copy, args=(near, far, "up"), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, "down"), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while content := source.recv(1 << 16):
                sink.sendall(content)
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(content))
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self.listening.close()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    nursery.close()


@pytest.mark.slow
def test_processes_send_the_bytes_that_are_counted(nursery: Nursery, tmp_path: Path) -> None:
    """SPFL with all of it in real processes: the simulation's models, and the socket's bytes."""
    pytest.importorskip("flwr")
    digits = load_digits()
    x, y = digits.images[:, None] / 16, digits.target
    for client in range(3):
        rows = slice(60 * client, 60 * client + 60)
        for place in (f"node{client}", "all"):
            (tmp_path / place).mkdir(exist_ok=True)
            np.savez(tmp_path / place / f"c{client}.npz", x=x[rows], y=y[rows])
    tables = "[" + ", ".join("{" + _inline(table) + "}" for table in TABLES[2:]) + "]"
    common = ("data.clients=3", "engine.name=loop", "model.name=mlp", "model.hidden=4000", "rounds=2")
    settings = (*common, "evaluate.every=0", "local.steps=1", f"transforms={tables}")
    port, run = free_port(), tmp_path / "run"
    server = nursery.start(
        "serve", "algorithm=spfl", *settings, "--listen", f"127.0.0.1:{port}", "--out", run
    )
    server.wait_for("waiting for")
    wire = Wire(port)
    nodes = [
        nursery.start("join", f"127.0.0.1:{wire.port}", "--data", tmp_path / f"node{node}")
        for node in range(3)
    ]
    assert server.wait() == 0, server.output
    assert all(node.wait() == 0 for node in nodes), nodes[0].output
    wire.close()
    experiment = load(None, [*settings, f"data.path={tmp_path / 'all'}"], algorithm="spfl")
    simulated = execute(experiment, out=tmp_path / "simulated")
    expected = load_file(tmp_path / "simulated" / "models.safetensors")
    found = load_file(run / "models.safetensors")
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    summary = json.loads((run / "summary.json").read_text())
    for way in ("bytes_up", "bytes_down"):
        assert summary[way] == simulated.summary[way]
    size = found["server.models"].nbytes * 2
    assert summary["bytes_up"] < 0.1 * size
    heads = 500_000  # of requests, those that ask for work among them
    assert summary["bytes_up"] <= wire.up <= 1.1 * summary["bytes_up"] + heads < 0.2 * size
    assert summary["bytes_down"] <= wire.down


def _inline(table: dict[str, Any]) -> str:
    """A table in TOML on one line."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in table.items())
