"""One federation, and everything that nodes with a valid key can try: it ends as if they had not come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_processes import Child, Nursery
from test_flower import BLOCKS, SETTINGS, Federation, folder

from sartor.data.clients import ClientData
from sartor.model.task import Task
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment, load
from sartor.runs.setup import open_federation

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

__all__ = ["folder"]

NODES = ("north", "south", "west")
STRANGERS = ("thief", "flat", "huge", "far", "crowded")
EXPECT = (
    "expect.shape=[1, 8, 8]",
    "expect.classes=10",
    "expect.samples=1000",
    "expect.low=0",
    "expect.high=1",
)


@pytest.fixture(scope="module")
def nursery(folder: Path) -> Iterator[Nursery]:
    nursery = Nursery(folder)
    yield nursery
    nursery.close()


def memory(pid: int) -> int:
    """The largest that a process has been, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_nodes_that_do_not_deserve_trust_harm_themselves_alone(nursery: Nursery, folder: Path) -> None:
    """Lies before the run, a thief of names, a swollen answer, silence; and a clock that is wrong."""
    keys = folder / "strangers"
    brings = {
        name: ",".join(f"c{client}" for client in block) for name, block in zip(NODES, BLOCKS, strict=True)
    }
    words = [word for name, own in brings.items() for word in ("--clients", f"{name}={own}")]
    made = nursery.start(
        "keys", keys, "--host", "127.0.0.1", "--nodes", ",".join((*NODES, *STRANGERS)), *words
    )
    assert made.wait() == 0, made.output
    settings = ("rounds=5", "evaluate.every=0", *EXPECT)
    options = ("--nodes", keys / "nodes.pub", "--deadline", 6, "--quorum", 2)
    federation = Federation(nursery, "scaffold", *settings, nodes=0, options=options)
    address = f"127.0.0.1:{federation.port}"

    def key(name: str) -> tuple[str, Path]:
        return "--key", keys / f"{name}.key"

    def hostile(name: str, data: Path, *more: Any) -> Child:
        words = (address, data, federation.place / name, *more, *key(name))
        return nursery.start(*words, script="flower_hostile")

    # Lies of those who come first: they are told that nobody believes them.
    federation.server.wait_for("waiting for")
    own = {
        name: np.savez(federation.place / f"{name}.npz", x=np.zeros((9, 1, 8, 8)), y=np.arange(9))
        for name in STRANGERS
    }
    lies = {
        "flat": {"x": {"x": ["float32", [5, 5]]}},
        "huge": {"counts": {"train": [10**12], "test": [1]}, "number": {"x": 64 * 10**12}},
        "far": {"mean": 1e17},
        "crowded": {"classes": 2**20},
    }
    assert set(own) >= set(lies)
    liars = {
        name: hostile(name, federation.place / f"{name}.npz", json.dumps(lie)) for name, lie in lies.items()
    }
    for name, reason in {
        "flat": "shape|moments|number",
        "huge": "counts|samples",
        "far": "do not lie between 0 and 1",
        "crowded": "1048576 classes, expected at most 10",
    }.items():
        assert liars[name].wait() == 0, liars[name].output
        assert re.search(f"refused: .*({reason})", liars[name].output), liars[name].output
    assert "begins" not in federation.server.output
    federation.nodes = [
        federation.join(0, *key("north")),
        nursery.start(
            -400,
            *("join", address, "--data", folder / "node1", "--state", federation.place / "state1"),
            *key("south"),
            script="flower_clock",
        ),
    ]
    west = hostile("west", folder / "node2", "--rounds", "honest,swollen,silent")
    west.wait_for("2 swollen")
    before = memory(federation.server.pid)
    # North is away, and somebody else with a valid key brings its clients. Two must answer: it is waited for.
    federation.nodes[0].kill()
    thief = federation.join(0, *key("thief"))
    assert thief.wait() == 2, thief.output
    assert "client 'c0' may not come with this node's key, which may bring 'thief'" in thief.output
    west.wait_for("]")
    assert "200" not in west.output.split("swollen")[1], west.output
    assert memory(federation.server.pid) - before < 100 << 20  # 300 MB were sent
    federation.nodes[0] = federation.join(0, *key("north"))
    found = federation.done()
    assert re.search(r"this machine's clock is \d+ s behind the server's", federation.nodes[1].output)
    assert "oversized" in federation.server.output
    assert "left out until it reports back" in federation.server.output
    assert [row["answered"] for row in federation.rounds()] == [6] + [4] * 4

    def without(experiment: Experiment, task: Task, data: ClientData) -> Any:
        engine = open_federation(experiment, task, data)
        engine._answers = lambda round, numbers: (round == 1) | ~np.isin(numbers, BLOCKS[2])
        return engine

    given = [*SETTINGS, *settings, f"data.path={folder / 'all'}"]
    result = execute(load(None, given, algorithm="scaffold"), store=False, opened=without)
    assert torch.equal(found["server.w"], result.w)
