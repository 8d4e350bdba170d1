"""Samples of every kind through Flower, in processes of their own: dicts, tuples, whole numbers, tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_processes import Child, Nursery, free_port
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


EXPERIMENT = """
algorithm = "ditto"
rounds = 6

[data]
clients = 2

[columns]
age = {missing = "mean", indicator = true}
sex = {kind = "category", missing = "most frequent"}
ill = "label"
counts = "weight"

[model]
name = "mlp"
hidden = 4

[local]
batch = 4

[engine]
name = "loop"

[checkpoint]
every = 1
"""
SITES = ("bergen", "oslo")


def tables(folder: Path) -> None:
    """Two sites, one of which lacks a category and a label; with gaps and weights."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for place, site in enumerate(SITES):
        rows = ["sex,age,counts,ill"]
        for row in range(20):
            age, sex = random.normal(60, 10), "" if row == 5 else "fmx"[random.integers(2 + place)]
            shown = "" if row % 6 == 0 else repr(age)
            rows.append(f"{sex},{shown},{1 + row % 3},{('no', 'yes')[place * int(age > 58)]}")
        (folder / f"{site}.csv").write_text("\n".join(rows) + "\n")


def test_a_table_by_a_schema_comes_through_kills(nursery: Nursery, tmp_path: Path) -> None:
    """With keys, TLS, gaps and weights; a node is killed, and then the server."""
    tables(tmp_path / "tables")
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    keys, address = tmp_path / "keys", f"127.0.0.1:{free_port()}"
    assert nursery.start("keys", keys, "--host", "127.0.0.1", "--nodes", ",".join(SITES)).wait() == 0
    safe = ("--tls", keys / "server.crt", keys / "server.key", keys / "ca.crt", "--nodes", keys / "nodes.pub")
    options = ("--listen", address, *safe, "--quorum", 2)

    def join(site: str) -> Child:
        own = ("--key", keys / f"{site}.key", "--ca", keys / "ca.crt", "--state", tmp_path / "state" / site)
        return nursery.start("join", address, "--data", tmp_path / "tables" / f"{site}.csv", *own)

    server = nursery.start("serve", tmp_path / "experiment.toml", *options, "--out", tmp_path / "run")
    nodes = {site: join(site) for site in SITES}
    words = [f"data.path={tmp_path / 'tables'}"]
    execute(load(tmp_path / "experiment.toml", words), out=tmp_path / "simulated")
    nodes["oslo"].wait_for("round 2")
    nodes["oslo"].kill()
    nodes["oslo"] = join("oslo")
    nodes["oslo"].wait_for("round 4")
    server.kill()
    server = nursery.start("serve", "--resume", tmp_path / "run", *options)
    assert server.wait() == 0, server.output
    for node in nodes.values():
        assert node.wait() == 0, node.output
    expected, found = (load_file(tmp_path / run / "models.safetensors") for run in ("simulated", "run"))
    assert found.keys() <= expected.keys()  # personal models stay at the nodes
    torch.testing.assert_close(found["server.w"], expected["server.w"], rtol=1e-5, atol=1e-6)
    columns = [load(tmp_path / run / "config.toml").columns for run in ("simulated", "run")]
    assert columns[0] == columns[1]
    assert columns[0][1].values == ("f", "m", "x")
