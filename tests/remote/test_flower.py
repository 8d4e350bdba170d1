"""A federation of real processes gives what a simulation gives, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from flower_processes import FLOWER, Child, Nursery, free_port, program
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor
from typer.testing import CliRunner

import sartor
from helpers import PATIENCE, wait_until
from owned import ALGORITHM, MODEL, TRANSFORM
from sartor.algorithms import registered
from sartor.algorithms.comfed.comfed import MECHANISMS, NAMES
from sartor.algorithms.server.optimizers import OPTIMIZERS
from sartor.commands.main import app
from sartor.data.clients import ClientData
from sartor.engines import make_engine
from sartor.federation import Federation as Simulated
from sartor.model.task import Task
from sartor.remote.journal import Journal
from sartor.remote.keeping import read_kept
from sartor.remote.keys import make_keys
from sartor.remote.requests import PARTING
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment, load
from sartor.runs.setup import federation_settings, open_federation

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SIZES = (30, 70, 50, 90, 40, 60)
CLIENT_FUNCTION = "sartor.algorithms.references.fedavg:local_training"
BLOCKS = ((0, 3), (1, 4), (2, 5))
FAULTS = [
    "malformed",
    "oversized",
    "unfinished",
    "misshapen",
    "bad",
    "forged",
    "late",
    "gone",
    "failed",
    "closed",
]


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

    def __init__(
        self,
        nursery: Nursery,
        name: str,
        *settings: str,
        nodes: int = 3,
        options: tuple[Any, ...] = (),
        handles: int = 0,
        script: str = "sartor",
        common: tuple[str, ...] = SETTINGS,
    ) -> None:
        self.nursery, self.port = nursery, free_port()
        self.place = nursery.folder / f"{name}-{self.port}"
        self.place.mkdir()
        self.run = self.place / "run"
        self.options, self.handles = options, handles
        words = (f"algorithm={name}", *common, *settings, "--out", self.run)
        self.server = self.serve(*words, script=script)
        self.nodes = [self.join(node) for node in range(nodes)]

    def serve(self, *words: Any, script: str = "sartor") -> Child:
        words = ("serve", *words, "--listen", f"127.0.0.1:{self.port}", *self.options)
        if self.handles:
            return self.nursery.start("limited", self.handles, *words, script="flower_crowd")
        return self.nursery.start(*words, script=script)

    def join(self, node: int, *words: Any) -> Child:
        data = ("--data", self.nursery.folder / f"node{node}", "--state", self.place / f"state{node}")
        return self.nursery.start("join", f"127.0.0.1:{self.port}", *data, *words)

    def done(self) -> dict[str, Tensor]:
        """The models of the run, which has come to its end at the server and at all nodes."""
        assert self.server.wait() == 0, self.server.output
        for node in self.nodes:
            assert node.wait() == 0, node.output
            assert "Traceback" not in node.output
        assert "Traceback" not in self.server.output
        return load_file(self.run / "models.safetensors")

    def reach(self, round: int, seconds: float = PATIENCE) -> None:
        """Wait until a round is recorded."""
        path, end = self.run / "rounds.jsonl", time.monotonic() + seconds
        while not path.exists() or path.read_bytes().count(b"\n") < round:
            assert self.server.code() is None, self.server.output
            assert time.monotonic() < end, f"round {round} was not reached:\n{self.server.output}"
            time.sleep(0.005)

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


def without_personal(models: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a run's models is the server's: personal models stay at the nodes."""
    return {name: value for name, value in models.items() if not name.startswith("personal")}


def gives_what_a_simulation_gives(nursery: Nursery, folder: Path, name: str) -> None:
    federation = Federation(nursery, name, "rounds=2")
    expected, summary = simulated(folder, name, "rounds=2")
    assert_equal(federation.done(), without_personal(expected))
    found = json.loads((federation.run / "summary.json").read_text())
    for cell in ("shared_pooled", "shared_local", "personal_local"):
        assert found["accuracy"][cell] == pytest.approx(summary["accuracy"][cell]), cell
    assert (found["bytes_down"], found["bytes_up"]) == (summary["bytes_down"], summary["bytes_up"])
    assert found["engine"] == "flower"


def test_processes_give_what_a_simulation_gives(nursery: Nursery, folder: Path) -> None:
    """A method with several exchanges in a round; every method is in ``test_flower_grid.py``."""
    gives_what_a_simulation_gives(nursery, folder, "ma-fsvrg")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "diversifed"])
def test_processes_give_what_a_simulation_gives_of_other_methods(
    nursery: Nursery, folder: Path, name: str
) -> None:
    gives_what_a_simulation_gives(nursery, folder, name)


class Recorded:
    """Durations by which the jobs of a simulation arrive as those of a real run did: in the same order, and
    in the same rounds where these end by the clock.
    """

    def __init__(self, rounds: list[dict[str, Any]], deadline: float | None) -> None:
        self.deadline, self.federation = deadline, None
        self.ends: dict[tuple[int, int], list[float]] = {}
        """When the jobs of a client of a round arrive, one after the other: by place, or by round."""
        place, last = 0, -1.0
        for row in rounds:
            arrivals = row.get("arrivals", [])
            for rank, (client, _, finish, version, age) in enumerate(arrivals, 1):
                place += finish > last  # what arrived together arrives together
                last = finish
                end = place if deadline is None else deadline * (age + rank / (len(arrivals) + 1))
                assert row["round"] - version == age
                self.ends.setdefault((client, version), []).append(end)

    def durations(self, world: Any, round: int, numbers: np.ndarray) -> np.ndarray:
        assert self.federation is not None
        now = self.federation.now if self.deadline is None else 0.0
        never = 1e9  # still at work when the run ended
        left = [self.ends.get((number, round), []) for number in numbers.tolist()]
        return np.array([ends.pop(0) - now if ends else never for ends in left])


@pytest.mark.parametrize(
    ("name", "more", "deadline"),
    [
        pytest.param("fedasync", ("hyper.arrivals=2", "rounds=12"), None, marks=pytest.mark.nightly),
        ("fedbuff", ("hyper.buffer=9", "hyper.concurrency=4", "rounds=4"), None),
        pytest.param("plga", ("rounds=16",), 1.0, marks=pytest.mark.nightly),
        ("plga", ("rounds=16", "hyper.estimate=on-arrival"), 1.0),
    ],
)
def test_an_asynchronous_run_is_what_its_record_says(
    nursery: Nursery, folder: Path, name: str, more: tuple[str, ...], deadline: float | None
) -> None:
    """A simulation in which everybody arrives when the record of the real run says gives the same model.

    So every answer was used once, with the weight of its age, against the model that it had started from.
    """
    settings = (*more, "evaluate.every=0", "hyper.lr=0.1", "local.epochs=6")
    federation = Federation(nursery, name, *settings, options=("--unit", 0.12))
    found = federation.done()
    rounds = federation.rounds()
    arrived = [entry for row in rounds for entry in row.get("arrivals", [])]
    assert (
        len(arrived) == max(row.get("updates", 0) for row in rounds) == sum(row["answered"] for row in rounds)
    )
    assert [entry[2] for entry in arrived] == sorted(entry[2] for entry in arrived)  # as time goes by
    assert max(age for *_, age in arrived) > 0  # nobody waited for the slowest
    assert len({client for client, *_ in arrived}) >= 3

    recorded = Recorded(rounds, deadline)

    def replayed(experiment: Experiment, task: Task, data: ClientData) -> Any:
        settings = federation_settings(experiment)
        settings = replace(settings, conditions=replace(settings.conditions, delay=recorded))
        engine = make_engine(experiment.engine.name, task, data, settings)
        recorded.federation = Simulated(task, engine, settings)
        return recorded.federation

    given = [*SETTINGS, *settings, f"data.path={folder / 'all'}"]
    out = federation.place / "replayed"
    execute(load(None, given, algorithm=name), out=out, opened=replayed)
    assert not any(recorded.ends.values())  # every arrival took place
    expected = without_personal(load_file(out / "models.safetensors"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key].double(), value.double(), rtol=0, atol=1e-6), key


# Personal models -------------------------------------------------------------------------------------------


def holding(folder: Path, rows: Tensor, pattern: str = "**/*") -> set[Path]:
    """The files of a folder in which one of these rows stands, byte by byte."""
    wanted = [row.numpy().tobytes() for row in rows]
    files = [path for path in folder.glob(pattern) if path.is_file()]
    assert files
    return {path for path in files if any(row in path.read_bytes() for row in wanted)}


def test_personal_models_stay_at_their_nodes(nursery: Nursery, folder: Path) -> None:
    """With certificates and keys; whatever is evaluated with them is what a simulation evaluates."""
    keys, others, names = folder / "keys", folder / "others", ("north", "south", "west")
    make_keys(keys, ["127.0.0.1", "localhost"], list(names))
    make_keys(others, ["127.0.0.1"], ["node-1"])
    files = (keys / "server.crt", keys / "server.key", keys / "ca.crt")
    options = ("--tls", *files, "--nodes", keys / "nodes.pub", "--store", folder / "personal.db")
    settings = ("rounds=2", "data.validation=0.2")
    federation = Federation(nursery, "separate", *settings, nodes=0, options=options)
    federation.server.wait_for("waiting for 6 clients")
    key, ca = ("--key", keys / "north.key"), ("--ca", keys / "ca.crt")
    words: dict[str, tuple[Any, ...]] = {
        "with a key that it made itself": ca,
        "with a key of others": ("--key", others / "node-1.key", *ca),
        "who trusts another server": (*key, "--ca", others / "ca.crt"),
        "who speaks in the open": key,
    }
    strangers = {
        who: federation.join(0, *said, "--patience", 1, "--state", folder / f"stranger {place}")
        for place, (who, said) in enumerate(words.items())
    }
    unknown = "the server does not know this node's key, which must be among its --nodes"
    for who, stranger in strangers.items():
        assert stranger.wait() == 2, who
        assert (unknown if "key" in who else "no server for 1 s") in stranger.output, who
        assert len(stranger.output.splitlines()) == 1, stranger.output
        assert "joined" not in stranger.output, who
    assert "has joined" not in federation.server.output
    federation.nodes = [
        federation.join(node, "--key", keys / f"{name}.key", *ca) for node, name in enumerate(names)
    ]
    assert federation.done() == {}
    expected, summary = simulated(folder, "separate", *settings)
    assert holding(federation.run, expected["personal"]) == set()
    assert holding(folder, expected["personal"], "personal.db*") == set()
    for node, block in enumerate(BLOCKS):  # where they do lie
        state = federation.place / f"state{node}"
        assert all(holding(state, expected["personal"][[client]]) for client in block)
    found = json.loads((federation.run / "summary.json").read_text())
    assert (found["bytes_down"], found["bytes_up"]) == (0, 0)
    assert found["last"]["personal_local"]["accuracy"] == summary["last"]["personal_local"]["accuracy"]
    assert found["best_by_validation"]["personal_local"] == summary["best_by_validation"]["personal_local"]
    # The folder of a run whose clients are elsewhere.
    run = str(federation.run)
    assert CliRunner().invoke(app, ["resume", run]).exit_code == 0
    for words in (("resume", run, "--rounds", "5"), ("evaluate", run)):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2, refused.output
        assert len(refused.stderr.splitlines()) == 1, refused.output
        assert "its clients are at nodes" in refused.stderr


def test_personal_models_that_both_sides_allow_are_counted(nursery: Nursery, folder: Path) -> None:
    """A node that keeps its own takes no part; and the run stops early as a simulation does."""
    stops = ("rounds=40", "hyper.lr=2.0", "stop.patience=1", "stop.metric=shared_pooled.loss")
    settings = (*stops, "evaluate.personal_models=yes")
    federation = Federation(nursery, "fedupdate", *settings, nodes=0)
    asked = "outside this node's policy: the server asks for personal models"
    reason = f"{asked} .*which stay at this node; `sartor join --allow-personal"
    keeping = federation.join(0)
    assert keeping.wait() == 2, keeping.output
    said = [line for line in keeping.output.splitlines() if "joined" not in line]
    assert len(said) == 1, keeping.output
    assert re.search(f"this node cannot take part: {reason}", said[0]), said
    federation.server.wait_for("the server asks for personal models")
    assert re.search(f"node .*: refused: {reason}", federation.server.output), federation.server.output
    federation.nodes = [federation.join(node, "--allow-personal-models") for node in range(3)]
    expected, summary = simulated(folder, "fedupdate", *settings)
    assert_equal(federation.done(), expected)
    found = json.loads((federation.run / "summary.json").read_text())
    assert expected["personal"].shape[0] == 6
    assert found["bytes_up"] - summary["bytes_up"] == expected["personal"].nbytes
    assert found["bytes_down"] - summary["bytes_down"] == 6 * expected["server.w"].nbytes  # to make them of
    assert 1 < summary["rounds"] < 40
    assert found["stopped"]["round"] == summary["stopped"]["round"]
    assert len(federation.rounds()) == summary["rounds"]


def test_a_server_that_asks_without_having_said_so_is_refused(nursery: Nursery, folder: Path) -> None:
    """The nodes train and evaluate, and send no model."""
    federation = Federation(nursery, "separate", "rounds=2", script="flower_curious")
    assert federation.server.wait() == 2, federation.server.output
    last = federation.server.output.splitlines()[-1]
    assert "0 of 3 nodes answered" in last
    assert "own_model: it sends personal models" in last
    assert "Traceback" not in federation.server.output
    expected = simulated(folder, "separate", "rounds=2")[0]["personal"]
    assert holding(federation.run, expected) == set()
    for node in federation.nodes:
        node.wait_for("request refused: outside this node's policy: model_of/sartor.algorithms.references")
        assert node.wait() == 2  # the server has told them that it ends


POLICY = """
methods = ["fedavg"]
least_batch = 16
least_steps = 2

[[require]]
name = "clip"
most = { norm = 1.0 }
"""


def test_a_server_that_asks_outside_the_policy_of_its_nodes_gets_nothing(
    nursery: Nursery, folder: Path
) -> None:
    """It says that replies are clipped and asks for them as they are; an honest one then ends the run."""
    settings = ("rounds=1", 'transforms=[{name="clip",norm=0.5}]')
    (folder / "policy.toml").write_text(POLICY)
    policy = ("--policy", folder / "policy.toml")
    federation = Federation(nursery, "fedavg", *settings, nodes=0, script="flower_greedy")
    federation.nodes = [federation.join(node, *policy) for node in range(3)]
    assert federation.server.wait() == 2, federation.server.output
    refusal = "local_training is asked for without the transforms it requires (require)"
    assert refusal in federation.server.output.splitlines()[-1]
    for node in federation.nodes:
        node.wait_for(f"request refused: outside this node's policy: {CLIENT_FUNCTION}")
        assert node.wait() == 2
    shown = nursery.start("audit", federation.place / "state0")
    assert shown.wait() == 0, shown.output
    events = [line.split()[2] for line in shown.output.splitlines()[:-1]]
    assert events[:3] == ["started", "joined", "introduced"]
    assert "opened" in events
    assert "answered" not in events
    assert refusal in shown.output
    federation.server = federation.serve("--resume", federation.run)
    federation.nodes = [federation.join(node, *policy) for node in range(3)]
    assert_equal(federation.done(), simulated(folder, "fedavg", *settings)[0])
    shown = nursery.start("audit", federation.place / "state0")
    assert shown.wait() == 0, shown.output
    assert f"Trained 2 clients by {CLIENT_FUNCTION} in round 1; sent for each of them delta" in shown.output


# Kills -----------------------------------------------------------------------------------------------------


KILLED = ("rounds=6", "evaluate.every=0", "checkpoint.every=1", "local.epochs=3")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Tensor]:
    return simulated(folder, "scaffold", *KILLED)[0]


def test_killed_nodes_come_back_as_who_they_were(nursery: Nursery, undisturbed: dict[str, Tensor]) -> None:
    federation = Federation(nursery, "scaffold", *KILLED, options=("--quorum", 3))
    for round, killed in ((2, (0,)), (4, (1, 2))):
        federation.nodes[killed[0]].wait_for(f"round {round}")
        for node in killed:
            federation.nodes[node].kill()
        before = [federation.nodes[node].output.split("as node ")[1].split()[0] for node in killed]
        if round == 2:  # with its key, and without what its clients have kept
            key = federation.place / "state0" / "key.pem"
            lost = federation.join(0, "--state", federation.place / "elsewhere", "--key", key)
            assert lost.wait() == 2, lost.output
            assert "start it with the folder that it had (--state)" in lost.output
        for node, number in zip(killed, before, strict=True):
            federation.nodes[node] = federation.join(node)
            federation.nodes[node].wait_for(f"as node {number}\n")
    assert_equal(federation.done(), undisturbed)
    rounds = federation.rounds()
    assert [row["answered"] for row in rounds] == [6] * 6
    assert sum(row.get("gone", 0) for row in rounds) >= 1


def test_a_round_goes_on_without_a_node_that_stays_away(nursery: Nursery) -> None:
    """Deadline and quorum: what the others answer is used, and nothing of the node that is gone."""
    options = ("--quorum", 2, "--deadline", 2, "--linger", 0)
    federation = Federation(nursery, "scaffold", "rounds=5", "evaluate.every=0", options=options)
    federation.nodes[2].wait_for("round 2")
    federation.nodes[2].kill()
    assert federation.server.wait() == 0, federation.server.output
    answered = [row["answered"] for row in federation.rounds()]
    assert answered[0] == 6
    assert answered[-1] == 4
    assert set(answered) == {4, 6}
    last = federation.rounds()[-1]["evaluation"]["shared_pooled"]
    assert 0 < last["accuracy"] <= 1
    assert "late" in federation.server.output or "gone" in federation.server.output


def test_a_server_that_was_stopped_goes_on_where_it_was(
    nursery: Nursery, undisturbed: dict[str, Tensor]
) -> None:
    """Interrupted and killed, it goes on with the same nodes; after everything was killed, with new ones,
    and without one whose data are others.
    """
    federation = Federation(nursery, "scaffold", *KILLED, options=("--quorum", 3))
    federation.nodes[0].wait_for("round 2")
    os.kill(federation.server.pid, signal.SIGINT)
    assert federation.server.wait() == 130, federation.server.output
    federation.server = federation.serve("--resume", federation.run)
    federation.nodes[0].wait_for("round 3")
    federation.server.kill()
    federation.server = federation.serve("--resume", federation.run)
    federation.nodes[1].wait_for("round 5")
    for child in (federation.nodes[0], federation.server, *federation.nodes[1:]):
        child.kill()
    federation.server = federation.serve("--resume", federation.run)
    changed = federation.place / "changed"
    changed.mkdir()
    for file in (nursery.folder / "node1").iterdir():
        with np.load(file) as held:
            np.savez(changed / file.name, x=held["x"], y=np.roll(held["y"], 1))
    other = federation.join(1, "--data", changed)
    federation.nodes = [federation.join(0), federation.join(2)]
    assert other.wait() == 2, other.output
    assert "'c1', 'c4': other data than at the start; put them back" in other.output
    federation.nodes.append(federation.join(1))
    assert_equal(federation.done(), undisturbed)


@pytest.mark.parametrize(
    ("name", "killed"),
    [
        pytest.param("scaffold", (2, 3), marks=pytest.mark.nightly),
        ("scaffold", (2,)),
        ("fedavg-semisync", (2,)),  # by the clock: the result does not depend on who is faster
    ],
)
def test_what_is_under_way_outlives_a_server_with_a_store(
    nursery: Nursery, folder: Path, name: str, killed: tuple[int, ...]
) -> None:
    """The server is killed while nodes are at work in these rounds, and comes back when they are done:
    they wait with their answers, which the next process uses as the last one would have.
    """
    rounds = max(killed)
    settings = ["evaluate.every=0", "checkpoint.every=1", "local.epochs=250", f"rounds={rounds}"]
    settings += NEEDS.get(name, ())
    store = nursery.folder / f"store-{name}-{rounds}.db"
    federation = Federation(nursery, name, *settings, options=("--store", store, "--quorum", 3))
    for round in killed:
        end = time.monotonic() + PATIENCE
        while not any(f"round {round}" in node.output for node in federation.nodes):  # the others are at work
            assert time.monotonic() < end
            time.sleep(0.005)
        federation.server.kill()
        time.sleep(2)
        federation.server = federation.serve("--resume", federation.run)
        federation.server.wait_for("begins")
    numbers = [node.output.split("as node ")[1].split()[0] for node in federation.nodes]
    assert_equal(federation.done(), simulated(folder, name, *settings)[0])
    assert [row["answered"] for row in federation.rounds()] == [6] * rounds
    assert sum(row.get("taken_up", 0) for row in federation.rounds()) >= 1
    for node, number in zip(federation.nodes, numbers, strict=True):  # who they were all the time
        assert set(re.findall(r"as node (\d+)", node.output)) == {number}


def test_a_store_serves_one_server_at_a_time(tmp_path: Path) -> None:
    from sartor.remote.flower import SuperLink

    (tmp_path / "text.db").write_text("no database at all, whatever its name says\n" * 100)
    reasons = {
        "busy.db": r"another server is using it",
        "text.db": r"cannot be used: .*not a database.*",
        "no/x.db": r"cannot be used: No such file.*",
    }
    with SuperLink("127.0.0.1", 0, database=tmp_path / "busy.db"):
        for name, reason in reasons.items():
            words = ["serve", "--listen", f"127.0.0.1:{free_port()}", "--store", str(tmp_path / name)]
            refused = CliRunner().invoke(app, words)
            assert refused.exit_code == 2
            said = refused.stderr.strip()
            assert re.fullmatch(f"sartor: --store {re.escape(str(tmp_path / name))}: {reason}", said), said


# Every method, through kills -------------------------------------------------------------------------------


BY_THE_CLOCK = tuple(name for name, method in registered().items() if getattr(method.Hyper, "deadline", 0))
"""Methods whose rounds end at a time: everybody is there by then, so nothing depends on who is faster."""
BY_ARRIVAL = ("fedasync", "fedbuff")
"""Methods whose result depends on it all the same."""
NEEDS = {
    "fedfomo": ("data.validation=0.2",),
    **dict.fromkeys(("fedmd", "feddf"), ("public.name=digits", "public.count=40")),
    **dict.fromkeys(BY_THE_CLOCK, ("hyper.deadline=600",)),
}
NORMALISED = (*(text for text in SETTINGS if "model." not in text), "model.name=resnet8", "model.norm=batch")
"""A network with float buffers."""
PAIRS = {f"{client}-{server}" for client in MECHANISMS for server in OPTIMIZERS} | set(NAMES)
EVERY = sorted(
    ({name for name, method in registered().items() if method.deployable} - PAIRS)
    | {f"{client}-sgd" for client in MECHANISMS}
    | {f"scaf-{server}" for server in OPTIMIZERS}
    | {"comfed-m"}
)
"""All that can be deployed; of the pairs each mechanism once, each optimizer with one that keeps states."""


def through_kills(
    nursery: Nursery, folder: Path, name: str, *more: str, common: tuple[str, ...] = SETTINGS
) -> Federation:
    """A node is killed and comes back, then everything: nodes have what they kept, and all ends as if not."""
    settings = ("rounds=4", "evaluate.every=0", "checkpoint.every=1", *NEEDS.get(name, ()), *more)
    federation = Federation(nursery, name, *settings, options=("--quorum", 3), common=common)
    federation.reach(1)
    federation.nodes[0].kill()
    federation.nodes[0] = federation.join(0)
    federation.reach(2)
    for child in (federation.nodes[2], federation.server, *federation.nodes[:2]):
        child.kill()
    federation.server = federation.serve("--resume", federation.run)
    federation.nodes = [federation.join(node) for node in range(3)]
    found = federation.done()
    rounds = federation.rounds()
    assert [row["round"] for row in rounds] == [1, 2, 3, 4]
    assert all(bool(torch.isfinite(value.double()).all()) for value in found.values())
    if name in BY_ARRIVAL:
        arrived = [entry for row in rounds for entry in row.get("arrivals", [])]
        assert len(arrived) == sum(row["answered"] for row in rounds) > 0
        assert [entry[2] for entry in arrived] == sorted(entry[2] for entry in arrived)
        return federation
    simulations: list[Any] = []

    def opened(experiment: Experiment, task: Task, data: ClientData) -> Any:
        simulations.append(open_federation(experiment, task, data))
        return simulations[-1]

    given = [*common, *settings, f"data.path={folder / 'all'}"]
    out = federation.place / "simulated"
    result = execute(load(None, given, algorithm=name), out=out, opened=opened)
    expected_models = without_personal(load_file(out / "models.safetensors"))
    if registered()[name].buffers == "local":
        expected_models.pop("buffers", None)  # their mean is of what stays at the nodes
    assert_equal(found, expected_models)
    summary = json.loads((federation.run / "summary.json").read_text())
    for cell in ("shared_pooled", "shared_local", "personal_local"):
        if cell == "shared_pooled" and registered()[name].buffers == "local":
            continue  # nodes do not send what its mean would be made of
        assert summary["accuracy"].get(cell) == pytest.approx(result.summary["accuracy"].get(cell)), cell
    expected = simulations[0].states.save()
    kept: dict[str, dict[int, Tensor]] = {}
    for node in range(3):
        [stored] = [path for path in (federation.place / f"state{node}" / "runs").iterdir() if path.is_dir()]
        for key, (numbers, rows) in Journal(stored).states().items():
            kept.setdefault(key, {}).update(zip(numbers.tolist(), rows, strict=True))
    for key in {*kept, *simulations[0].states}:
        numbers, rows = expected[f"{key}.numbers"].tolist(), expected[f"{key}.rows"]
        own = kept.get(key, {})
        assert set(own) == set(numbers), key
        for number, row in zip(numbers, rows, strict=True):
            assert torch.equal(own[number], row), key
    for node in range(3):  # each has the models of its clients for itself
        mine = read_kept(federation.place / f"state{node}")
        for client in mine.names if isinstance(result.personal, Tensor) else ():
            theirs, simulated = mine.state_dict(client), result.state_dict(client)
            assert all(torch.allclose(theirs[key], simulated[key], atol=1e-6) for key in simulated), client
    return federation


SMALLER = (
    *('{name="difference"}', '{name="top-k", place="down", share=0.5}'),
    *('{name="clip", norm=0.2}', '{name="top-k", share=0.1}', '{name="int8"}'),
)
"""What both sides keep of what was left out, and of what was sent."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ditto", (f"transforms=[{', '.join(SMALLER)}]",)),
        ("fedasync", ()),
    ],
    ids=["ditto", "fedasync"],
)
def test_methods_that_differ_come_through_kills(
    nursery: Nursery, folder: Path, name: str, more: tuple[str, ...]
) -> None:
    """Two states with transforms, no rounds that wait."""
    through_kills(nursery, folder, name, *more)


LINEAR = (*(text for text in SETTINGS if "model." not in text), "model.name=softmax")
"""A model with raw features, of which some methods ask when a run begins."""


@pytest.mark.parametrize(
    ("name", "asked", "common"),
    [
        pytest.param("fedgen", "fedgen:counts", SETTINGS, marks=pytest.mark.nightly),
        ("fsvrg", "fsvrg:feature_counts", LINEAR),
        pytest.param("ma-fsvrg-async", "fsvrg:feature_counts", LINEAR, marks=pytest.mark.nightly),
    ],
    ids=["fedgen", "fsvrg", "ma-fsvrg-async"],
)
def test_what_a_run_begins_with_is_asked_once(
    nursery: Nursery, folder: Path, name: str, asked: str, common: tuple[str, ...]
) -> None:
    """The server that goes on has it in its checkpoint, and nodes know of one run alone."""
    federation = through_kills(nursery, folder, name, common=common)
    for node in range(3):
        shown = nursery.start("audit", federation.place / f"state{node}")
        assert shown.wait() == 0, shown.output
        assert shown.output.count(f"{asked} in round 0") == 1, shown.output


def test_buffers_come_through_kills(nursery: Nursery, folder: Path) -> None:
    through_kills(nursery, folder, "fedbn", common=NORMALISED)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fml", "heterofl", "fedmd"])
def test_groups_come_through_kills(nursery: Nursery, folder: Path, name: str) -> None:
    through_kills(nursery, folder, name, common=(*SETTINGS, 'models=[{name="mlp", hidden=8, every=2}]'))


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
def test_every_method_comes_through_kills(nursery: Nursery, folder: Path, name: str) -> None:
    through_kills(nursery, folder, name, *(("model.adapters=2",) if registered()[name].adapters else ()))


# Hostile nodes ---------------------------------------------------------------------------------------------


def test_a_hostile_node_harms_itself_alone(nursery: Nursery, folder: Path) -> None:
    """It joins as others do, is honest for a round, and then tries another thing every round."""
    from flower_hostile import ROUNDS

    kinds = [
        "",
        "malformed",
        "malformed",
        "oversized",
        "unfinished",
        "misshapen",
        "bad",
        "forged",
        "malformed",
        "malformed",
        "oversized",
    ]
    settings = (f"rounds={len(ROUNDS)}", "evaluate.every=0")
    federation = Federation(nursery, "scaffold", *settings, nodes=2, options=("--deadline", 4))
    address = f"127.0.0.1:{federation.port}"
    hostile = nursery.start(address, folder / "node2", federation.place / "x", script="flower_hostile")
    found = federation.done()
    assert hostile.wait() == 0, hostile.output
    rounds = federation.rounds()
    assert [row["answered"] for row in rounds] == [6] + [4] * (len(ROUNDS) - 1)
    for row, kind in zip(rounds, kinds, strict=True):
        counted = {name for name in FAULTS if name in row}
        assert counted >= ({kind} if kind else set()), row
        assert counted <= {kind, "bad"}, row  # of the last round's evaluation "bad" is noted too
    for kind in set(kinds) - {"", "bad"}:
        assert f"{kind}: " in federation.server.output
    assert "is not finite" in federation.server.output
    for reason in ("a piece of its reply is named twice", "a reply of more than 64 pieces"):
        assert reason in federation.server.output
        assert f"403 {reason}" in hostile.output
    # What it had answered in the first round was used; nothing else of it was.
    gone = BLOCKS[2]

    def without(experiment: Experiment, task: Task, data: ClientData) -> Any:
        engine = open_federation(experiment, task, data)
        engine._answers = lambda round, numbers: (round == 1) | ~np.isin(numbers, gone)
        return engine

    given = [*SETTINGS, *settings, f"data.path={folder / 'all'}"]
    result = execute(load(None, given, algorithm="scaffold"), store=False, opened=without)
    assert torch.equal(found["server.w"], result.w)
    # Its evaluation, which was not finite, was left out.
    clients = pq.read_table(federation.run / "clients.parquet").to_pydict()
    measured = dict(zip(clients["client"], clients["shared_local_loss"], strict=True))
    assert {name for name, loss in measured.items() if loss is None} == {f"c{client}" for client in gone}


def test_a_forger_harms_nobody(nursery: Nursery, folder: Path) -> None:
    """It knows the identifiers of all of another's messages, as soon as that one has them."""
    settings = ("rounds=3", "evaluate.every=0")
    federation = Federation(nursery, "scaffold", *settings, nodes=1)
    roles = {
        role: nursery.start(
            role,
            f"127.0.0.1:{federation.port}",
            folder / f"node{node}",
            federation.place / role,
            federation.place / "leak",
            script="flower_forger",
        )
        for node, role in enumerate(("victim", "forger"), 1)
    }
    assert_equal(federation.done(), simulated(folder, "scaffold", *settings)[0])
    for child in roles.values():
        assert child.wait() == 0, child.output
    rounds = federation.rounds()
    assert [row["answered"] for row in rounds] == [6] * 3
    found: dict[tuple[str, str], list[str]] = {}
    for line in roles["forger"].output.splitlines()[1:]:
        moment, attack, status = line.split("|")
        found.setdefault((moment, attack), []).append(status)
    for moment in ("fetched", "answered"):
        assert set(found[moment, "a reply in its name"]) == {"403"}
        assert set(found[moment, "a reply in my name"]) == {"200 0"}  # nothing of it is taken
        assert set(found[moment, "a reply as if I were it"]) == {"401"}
        assert set(found[moment, "an order in the server's name"]) == {"403"}
        assert set(found[moment, "an order in my name"]) == {"200 0"}
        assert set(found[moment, "read it"]) == {"404"}
        assert set(found[moment, "fetch it"]) == {"401"}
    assert set(found["fetched", "confirm it"]) == {"403"}
    assert set(found["answered", "confirm it"]) <= {"403", "404"}  # the server may have done with it
    assert min(map(len, found.values())) >= 5  # a greeting, where the run stands, three rounds
    forger, victim = (roles[role].output.split("as node ")[1].split()[0] for role in ("forger", "victim"))
    told = f"node {forger} ('c2', 'c5'): forged: a reply in the name of node {victim}"
    assert told in federation.server.output
    assert f"node {victim} (" not in federation.server.output  # nothing is said against that one
    assert min(row["forged"] for row in rounds) >= 1


@pytest.mark.parametrize(
    ("kinds", "secure"),
    [
        pytest.param(("idle", "headers", "body"), False, marks=pytest.mark.nightly),
        (("idle", "handshake"), True),
    ],
    ids=["open", "secure"],
)
def test_a_crowd_of_strangers_keeps_nobody_out(
    nursery: Nursery, folder: Path, kinds: tuple[str, ...], secure: bool
) -> None:
    """It holds more connections open than the server has handles, before the first node joins and after."""
    settings = ("rounds=3", "evaluate.every=0")
    options: tuple[Any, ...] = ()
    joining: list[tuple[Any, ...]] = [()] * 3
    if secure:
        keys = folder / "crowded"
        made = nursery.start("keys", keys, "--host", "127.0.0.1", "--nodes", "3")
        assert made.wait() == 0, made.output
        options = ("--tls", *(keys / name for name in ("server.crt", "server.key", "ca.crt")))
        options += ("--nodes", keys / "nodes.pub")
        joining = [("--key", keys / f"node-{node}.key", "--ca", keys / "ca.crt") for node in (1, 2, 3)]
    federation = Federation(nursery, "fedavg", *settings, nodes=0, options=options, handles=512)
    federation.server.wait_for("waiting for")
    crowd = nursery.start("127.0.0.1", federation.port, 1000, *kinds, script="flower_crowd")
    crowd.wait_for("opened 1000")
    federation.nodes = [federation.join(node, *words) for node, words in enumerate(joining)]
    assert_equal(federation.done(), simulated(folder, "fedavg", *settings)[0])
    assert crowd.wait() == 0, crowd.output  # it went on until the server had ended
    assert [row["answered"] for row in federation.rounds()] == [6] * 3
    assert "too many connections" in federation.server.output


# Refused nodes ---------------------------------------------------------------------------------------------


def test_a_node_that_cannot_take_part_is_told_why(nursery: Nursery, folder: Path) -> None:
    """Before the run and while it is under way, also if it introduces itself wrongly; those who can take
    part notice nothing.
    """
    settings = ("rounds=3", "evaluate.every=0")
    federation = Federation(nursery, "fedavg", *settings, nodes=2, options=("--quorum", 3))
    for clients in ("'c0', 'c3'", "'c1', 'c4'"):
        federation.server.wait_for(f"with {clients}")
    place = federation.place
    (place / "one").mkdir()
    shutil.copy(folder / "node0" / "c0.npz", place / "one")
    np.savez(place / "flat.npz", x=np.zeros((9, 64)), y=np.arange(9) % 3)
    np.savez(place / "broken.npz", x=np.zeros((9, 64)))
    np.savez(place / "late.npz", x=np.zeros((9, 1, 8, 8)), y=np.arange(9) % 3)

    def join(data: Path, name: str, script: str = "sartor", *before: Any) -> Child:
        address = f"127.0.0.1:{federation.port}"
        words = ("join", address, "--data", data, "--state", place / "states" / name)
        return nursery.start(*before, *words, script=script)

    old = ("0.0.1", place / "old")
    refused = {
        r"the server has sartor \S+, this node 0.0.1; install the same": join(
            folder / "node2", "old", "flower_version", *old
        ),
        "client 'c0' is at another node already; give each client a name": join(place / "one", "twice"),
        r"its samples are float32 \[64\] with .*, those of the others float32 \[1, 8, 8\] with": join(
            place / "flat.npz", "flat"
        ),
        r"broken\.npz: .*\by\b": join(place / "broken.npz", "broken"),
    }

    def told(node: Child, reason: str) -> None:
        assert node.wait() == 2, node.output
        said = [line for line in node.output.splitlines() if "joined" not in line]
        assert len(said) == 1, node.output  # one message, and no traceback
        assert re.search(f"cannot take part: .*{reason}", said[0]), node.output

    def pretend(**entries: Any) -> Child:
        address, state = f"127.0.0.1:{federation.port}", place / f"x-{time.monotonic_ns()}"
        words = (address, folder / "node2", state, json.dumps(entries))
        return nursery.start(*words, script="flower_hostile")

    def caught(node: Child, reason: str) -> None:
        assert node.wait() == 0, node.output
        assert f"refused: its introduction: {reason}" in node.output
        assert re.search(f"(malformed|refused): its introduction: {reason}", federation.server.output)

    wrong = pretend(x={"x": ["float32", [2**22, 2**22]]})
    for reason, node in refused.items():
        told(node, reason)
    caught(wrong, "x: expected the leaves of a sample")
    assert "begins" not in federation.server.output
    federation.nodes.append(federation.join(2))
    federation.nodes[2].wait_for("round 1")
    federation.nodes[2].kill()  # all must answer, so the run waits for it
    late, again, wrong = join(place / "late.npz", "late"), join(place / "one", "again"), pretend(counts=6)
    told(late, "client 'late' is not in this run, which has begun without it")
    told(again, "client 'c0' is another node's: its name goes with another key")
    caught(wrong, "counts: expected whole numbers")
    assert "got 6" in federation.server.output
    federation.nodes[2] = federation.join(2)
    assert_equal(federation.done(), simulated(folder, "fedavg", *settings)[0])
    assert sum(row.get("malformed", 0) for row in federation.rounds()) == 1


# A server that fails ---------------------------------------------------------------------------------------


def replace_by_a_file(folder: Path) -> None:
    """Whoever writes in this folder cannot any more."""
    folder.rename(folder.with_name(f"{folder.name}-before"))
    folder.touch()


def told_of_failure(federation: Federation, nodes: list[Child]) -> str:
    """The reason for which a server has ended, which it and these nodes have told, and nothing after it."""
    assert federation.server.wait() == 2, federation.server.output
    end = time.monotonic() + 120  # they wait for a server that is gone for ten minutes
    reason = federation.server.output.splitlines()[-1].removeprefix("sartor: ")
    for node in nodes:
        assert node.wait(end - time.monotonic()) == 2, node.output
        last = node.output.splitlines()[-1]
        assert last == f"sartor: 127.0.0.1:{federation.port}: the server ended: {reason}", node.output
        assert "Traceback" not in node.output
    return reason


def test_nodes_of_a_server_that_fails_end_with_its_reason(
    nursery: Nursery, undisturbed: dict[str, Tensor]
) -> None:
    """A node cannot store what its clients keep, and all must answer; when it can, the run is continued."""
    federation = Federation(nursery, "scaffold", *KILLED, options=("--quorum", 3))
    federation.nodes[2].wait_for("round 3")
    [states] = [path for path in (federation.place / "state2" / "runs").iterdir() if path.is_dir()]
    replace_by_a_file(states)
    reason = told_of_failure(federation, federation.nodes)
    assert re.fullmatch(r"2 of 3 nodes answered, 3 must: .* cannot be (read|written): .*", reason)
    states.unlink()
    states.with_name(f"{states.name}-before").rename(states)
    federation.server = federation.serve("--resume", federation.run)
    federation.nodes = [federation.join(node) for node in range(3)]
    assert_equal(federation.done(), undisturbed)


def test_a_node_that_could_answer_nothing_ends_as_a_failure(nursery: Nursery) -> None:
    """The run goes on without it, and comes to its end."""
    federation = Federation(nursery, "scaffold", *KILLED)
    federation.nodes[2].wait_for("round 2")
    federation.nodes[2].kill()
    [states] = [path for path in (federation.place / "state2" / "runs").iterdir() if path.is_dir()]
    replace_by_a_file(states)
    failing = federation.nodes[2] = federation.join(2)
    assert federation.server.wait() == 0, federation.server.output
    assert failing.wait() == 2, failing.output
    last = failing.output.splitlines()[-1]
    assert "the run has ended, without an answer of this node: " in last
    assert str(states) in last
    assert federation.nodes[0].wait() == 0


def test_a_dead_node_does_not_keep_the_others_from_hearing_of_a_failure(nursery: Nursery) -> None:
    """The server cannot write its results; it still believes in a node that was killed."""
    settings = ("rounds=400", "evaluate.every=0", "checkpoint.every=1")
    federation = Federation(nursery, "fedavg", *settings, options=("--deadline", 3))
    federation.nodes[2].wait_for("round 2")
    federation.nodes[2].kill()
    replace_by_a_file(federation.run)
    begun = time.monotonic()
    reason = told_of_failure(federation, federation.nodes[:2])
    assert f"{federation.run}" in reason
    assert re.search(r": (Not a directory|No such file or directory)", reason), reason
    assert time.monotonic() - begun < 3 + PARTING + 120


# What the server's port shows ------------------------------------------------------------------------------


@pytest.fixture
def link() -> Iterator[Any]:
    from sartor.remote.flower import SuperLink

    with SuperLink("127.0.0.1", 0) as link:
        yield link


def joined(link: Any) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    from sartor.remote.flower_link import FleetLink

    node = FleetLink(f"127.0.0.1:{link.port}", ec.generate_private_key(ec.SECP384R1()), insecure=True)
    node.connect()
    return node


def test_the_port_offers_what_nodes_need_and_nothing_else(link: Any) -> None:
    import httpx

    address = f"http://127.0.0.1:{link.port}"
    for path in (
        "/",
        "/docs",
        "/health",
        "/v1/control/start-run",
        "/v1/runtime/push-messages",
        "/v1/fleet/get-fab",
    ):
        for method in ("GET", "POST"):
            assert httpx.request(method, address + path, content=b"").status_code == 404, path
    pull = f"{address}/v1/fleet/pull-messages"
    assert httpx.post(pull, content=b"", headers={"content-type": "application/x-protobuf"}).status_code in (
        400,
        401,
        415,
    )
    assert httpx.post(pull, content=b"0" * (17 << 20)).status_code == 413

    def unbounded() -> Iterator[bytes]:
        yield b"0"

    assert httpx.post(pull, content=unbounded()).status_code == 413


def certified(folder: Path) -> dict[str, Any]:
    """Settings of a server with a certificate that lets in nodes with a key."""
    from sartor.remote.keys import make_keys, read_public_keys

    make_keys(folder, ["127.0.0.1"], ["one"])
    tls = (folder / "server.crt", folder / "server.key")
    return {"tls": tls, "keys": read_public_keys(folder / "nodes.pub")}


def refused(connection: socket.socket) -> bytes:
    """What the server says before it closes a connection."""
    found = b""
    try:
        while part := connection.recv(4096):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize("secure", [False, True])
def test_who_does_not_finish_what_it_begins_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """Its connection is closed, and the server does not wait for it when it ends."""
    from flower_crowd import HALVES

    from sartor.remote import connections
    from sartor.remote.flower import SuperLink

    monkeypatch.setattr(connections, "PATIENCE", 1.0)
    kinds = ("idle", "handshake") if secure else ("idle", "headers", "body")
    with SuperLink("127.0.0.1", 0, **(certified(tmp_path) if secure else {})) as link:

        def begun(kind: str) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", link.port), 30)
            connection.sendall(HALVES[kind][0])
            return connection

        for connection in map(begun, kinds):
            assert refused(connection) == b""
            connection.close()
        monkeypatch.setattr(connections, "PATIENCE", 60.0)
        held = list(map(begun, kinds))
        ending = time.monotonic()
    assert time.monotonic() - ending < 50
    assert not link._thread.is_alive()
    for connection in held:
        assert refused(connection) == b""
        connection.close()


def test_a_stranger_without_a_key_is_refused_before_it_has_sent_anything(tmp_path: Path) -> None:
    """Only its headers are read: nobody can fill the server's memory with what is thrown away later."""
    from base64 import b64encode

    from cryptography.hazmat.primitives.asymmetric import ec

    from sartor.remote.flower import SuperLink
    from sartor.remote.keys import public_key

    mine, allowed = (public_key(ec.generate_private_key(ec.SECP384R1())) for _ in range(2))
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    begin = "POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"

    def signed(key: bytes, stamp: str = now) -> str:
        public = f"flwr-public-key: {b64encode(key).decode()}"
        return f"{public}\r\nflwr-timestamp: {stamp}\r\nflwr-signature: eA==\r\n"

    cases = {
        "": 401,
        signed(mine): 403,
        signed(allowed): 401,
        signed(allowed, "yesterday"): 401,
        "flwr-public-key: ?\r\nflwr-timestamp: 1\r\nflwr-signature: ?\r\n": 401,
        "transfer-encoding: chunked\r\n": 413,
    }
    with SuperLink("127.0.0.1", 0, keys=[allowed]) as link:
        for headers, status in cases.items():
            with socket.create_connection(("127.0.0.1", link.port), 30) as connection:
                connection.sendall(f"{begin}{headers}content-length: 10000000\r\n\r\n".encode())
                answer = connection.recv(4096).decode()
                assert answer.startswith(f"HTTP/1.1 {status} "), (headers, answer)
                assert ("sartor-refused: key" in answer) == (status == 403)


def test_a_store_remembers_nodes_but_lets_in_those_with_a_key(tmp_path: Path) -> None:
    """The keys are those that this server was given, whoever has joined an earlier one."""
    from cryptography.hazmat.primitives.asymmetric import ec

    from sartor.remote.flower import SuperLink
    from sartor.remote.flower_link import FleetLink, Refused
    from sartor.remote.keys import public_key

    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
    public = [public_key(key) for key in keys]
    numbers: list[dict[int, int]] = []
    for allowed in ([0, 1], [1, 2]):
        settings: dict[str, Any] = {
            "keys": [public[place] for place in allowed],
            "database": tmp_path / "s.db",
        }
        with SuperLink("127.0.0.1", 0, **settings) as link:
            numbers.append({})
            for place in range(3):
                node = FleetLink(f"127.0.0.1:{link.port}", keys[place], insecure=True)
                if place not in allowed:
                    with pytest.raises(Refused, match="does not know this node's key"):
                        node.connect()
                    continue
                node.connect()
                numbers[-1][place] = node.known
                node.close()
    assert [set(found) for found in numbers] == [{0, 1}, {1, 2}]
    assert numbers[0][1] == numbers[1][1]
    assert (tmp_path / "s.db").stat().st_mode & 0o077 == 0


def test_a_message_travels_and_comes_back(link: Any) -> None:
    from sartor.remote.messages import decode, encode

    node = joined(link)
    big = torch.arange(3_000_000, dtype=torch.float32)  # more than one piece
    message = link.send(node.known, encode({"n": 1}, {"shared": {"w": big, "b": big[:0]}}), 30, big.nbytes)
    assert link.poll(message) is None
    request = node.receive()
    header, groups = decode(request.parts)
    assert header["n"] == 1
    assert torch.equal(groups["shared"]["w"], big)
    node.reply(request, encode({"n": 2}, {"sent": {"w": -big}}))
    _, groups = decode(link.poll(message))
    assert torch.equal(groups["sent"]["w"], -big)
    link.forget(message)
    assert len(link._state.object_store) == 0  # nothing is left behind
    node.close()
    assert link.nodes() == set()


@pytest.mark.parametrize("late", [False, True])
def test_a_node_cannot_answer_for_another(link: Any, late: bool) -> None:
    """Even if it knows the number of the message, and the secret in it; before it has answered, or after."""
    from sartor.remote.messages import encode
    from sartor.remote.requests import Requests

    honest, liar = joined(link), joined(link)
    requests = Requests(link, 10)
    asked = requests.send(honest.known, {"kind": "hello"})
    requests.send(liar.known, {"kind": "hello"})
    request, own = honest.receive(), liar.receive()
    nonce = asked.header["nonce"]
    if late:
        honest.reply(request, encode({"nonce": nonce, "names": ["mine"]}))
    stolen = own.message
    stolen.metadata.__dict__["_message_id"] = asked.message
    stolen.metadata.__dict__["_dst_node_id"] = honest.known
    liar.reply(replace(own, message=stolen), encode({"nonce": nonce, "names": ["forged"]}))
    if not late:
        assert requests.look(asked) is None
        honest.reply(request, encode({"nonce": nonce, "names": ["mine"]}))
    header, _ = requests.wait(asked)
    assert header["names"] == ["mine"]
    [(who, error)] = requests.caught()
    assert who == liar.known
    assert (error.kind, str(honest.known) in str(error)) == ("forged", True)
    assert requests.caught() == []
    for node in (honest, liar):
        node.close()


def leaves(number: int, name: str = "leaf") -> list[Any]:
    from flower_hostile import piece

    return [piece(f"{name}{place}") for place in range(number)]


def pieces_of(kind: str) -> list[Any]:
    """Announcements that would grow where they are followed, or are too large as they are."""
    from flower_hostile import growing, numerous, piece

    if kind == "deep and growing":
        return growing(60)
    if kind == "deep":
        level = leaves(1)
        for place in range(50):
            level = [piece(place, *level)]
        return level
    if kind == "numerous":
        return numerous(9000)
    if kind == "twice beside itself":
        return [piece("a", *leaves(20), *leaves(20))]
    if kind == "here with pieces and there without":
        return [piece("a", piece("b", *leaves(40))), piece("c", piece("b"))]
    assert kind == "without a name"
    return [type(piece("a"))(object_id="a")]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("deep and growing", "malformed"),
        ("deep", "malformed"),
        ("numerous", "oversized"),
        ("twice beside itself", "malformed"),
        ("here with pieces and there without", "malformed"),
        ("without a name", "malformed"),
    ],
)
def test_a_reply_is_refused_before_it_grows(link: Any, kind: str, fault: str) -> None:
    import httpx
    from flower_hostile import announce

    from sartor.remote.messages import decode, encode
    from sartor.remote.requests import Failed

    node, other = joined(link), joined(link)
    messages = {each: link.send(each.known, encode({"n": 1}), 30, 10**5) for each in (node, other)}
    request, begun = node.receive(), time.monotonic()
    with pytest.raises(httpx.HTTPStatusError) as refusal:
        announce(node, request, encode({"n": 2}), pieces_of(kind))
    assert refusal.value.response.status_code == 403
    with pytest.raises(Failed) as found:
        link.poll(messages[node])
    assert time.monotonic() - begun < 25  # it is not waited for
    assert found.value.kind == fault
    assert refusal.value.response.json()["detail"] == str(found.value)
    link.forget(messages[node])
    other.reply(other.receive(), encode({"n": 3}))
    assert decode(link.poll(messages[other]))[0]["n"] == 3
    link.forget(messages[other])
    assert len(link._state.object_store) == 0  # nothing is left behind
    for each in (node, other):
        each.close()


def test_a_reply_does_not_grow_by_what_another_has_announced(link: Any) -> None:
    """Each is small, but names pieces that the other says to consist of more."""
    import httpx
    from flower_hostile import announce, piece

    from sartor.remote.messages import encode

    nodes = [joined(link) for _ in range(2)]
    for node in nodes:
        link.send(node.known, encode({"n": 1}), 30, 0)
    requests = [node.receive() for node in nodes]
    announce(nodes[0], requests[0], encode({"n": 2}), [piece("a", *leaves(40)), piece("b")])
    announce(nodes[1], requests[1], encode({"n": 3}), [piece("c", piece("a", *leaves(40))), piece("b")])
    for children in ([piece("c", piece("a"))], [piece("b", *leaves(2))]):
        link.send(nodes[0].known, encode({"n": 4, "of": len(children[0].children)}), 30, 0)
        request = nodes[0].receive()
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            announce(nodes[0], request, encode({"n": 5}), children)
    for node in nodes:
        node.close()


# A Flower installation that is there already ---------------------------------------------------------------


def listening(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_application_runs_on_a_stock_flower(nursery: Nursery, folder: Path, nodes: int) -> None:
    """Flower's own programs, a process for every message; at night as they are installed."""
    place = folder / f"stock-{nodes}"
    place.mkdir()
    port, scripts = free_port(), Path(sys.executable).parent if nodes > 1 else place
    for name in FLOWER if scripts == place else ():
        program(place, name)
    (place / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    settings = ("rounds=1", "evaluate.every=0", f"data.clients={2 * nodes}")
    written = nursery.start("flower-app", place / "app", "algorithm=fedavg", *SETTINGS[1:], *settings)
    assert written.wait() == 0, written.output
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(sartor.__file__).parent.parent),
        "FLWR_HOME": str(place),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }
    here = ("--insecure", "--host", "127.0.0.1", "--port")
    commands = [("flower-superlink", *here, port)]
    for node in range(nodes):
        where = f'data="{folder}/node{node}" state="{place}/state{node}"'
        link = ("--superlink", f"127.0.0.1:{port}", "--node-config", where)
        commands.append(("flower-supernode", *here, free_port(), *link))
    commands.append(("flwr", "run", place / "app", "here", "--stream", "-c", f'out="{place}/run"'))
    started = []
    try:
        for number, (command, *words) in enumerate(commands):
            with (place / f"{number}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [str(scripts / command), *map(str, words)],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            if command != "flwr":  # one after the other, as a person would
                wait_until(partial(listening, words[4]), started[-1])
        ended = started[-1].wait(PATIENCE)
        assert ended == 0, [log.read_text()[-2000:] for log in place.glob("*.log")]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):  # and whatever it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    (place / "all").mkdir()
    for client in np.concatenate(BLOCKS[:nodes]):
        shutil.copy(folder / "all" / f"c{client}.npz", place / "all")
    expected, _ = simulated(place, "fedavg", *settings[:2])
    assert_equal(load_file(place / "run" / "models.safetensors"), expected)


def test_code_of_ones_own_is_compared_and_kept_to(nursery: Nursery, folder: Path) -> None:
    """Server and nodes have each a copy of their own; who has none, or another one, is told so.

    The run goes on with what it has recorded, also of the nodes' errors that a transform feeds back.
    """
    place, mine = folder / "own-code", ALGORITHM + MODEL + TRANSFORM
    for who in ("server", "node0", "node1", "node2", "other"):
        (place / who).mkdir(parents=True)
        (place / who / "mine.py").write_text(mine + ("# another\n" if who == "other" else ""))
    code = place / "server" / "mine.py"
    listen = ("--listen", f"127.0.0.1:{free_port()}", "--quorum", 3)
    settings = ("rounds=6", *SETTINGS[:3], "hyper.factor=0.5", "evaluate.every=0", "local.epochs=5")
    own = ('transforms=[{name="own-signs", of=["delta"]}]', f"model.path={code}:build")
    run = ("own-avg", "--import", code, *settings, *own)
    server = nursery.start("serve", *run, *listen, "--out", place / "run")
    server.wait_for("waiting for 6 clients")

    def join(node: int, state: str, *words: Any) -> Child:
        data = ("--data", folder / f"node{node}", "--state", place / state)
        return nursery.start("join", listen[1], *data, *words)

    def joined(node: int) -> Child:
        return join(node, f"state{node}", "--import", place / f"node{node}" / "mine.py")

    wrong = [join(0, "without"), join(0, "another", "--import", place / "other" / "mine.py")]
    for child, reason in zip(wrong, ("this node has not; join with --import", "another one"), strict=True):
        assert child.wait() == 2, child.output
        assert "this node cannot take part: the server has imported mine.py (SHA-256 " in child.output
        assert reason in child.output
        assert "Traceback" not in child.output
    nodes = [joined(node) for node in range(3)]
    nodes[0].wait_for("round 3")
    for child in (server, nodes[0]):
        child.kill()
    assert not (place / "run" / "summary.json").exists()
    code.write_text(mine + "open('executed', 'w')\n")
    refused = nursery.start("serve", "--resume", place / "run", *listen)
    assert refused.wait() == 2, refused.output
    assert "was made with another mine.py (SHA-256 " in refused.output
    assert not (folder / "executed").exists()
    code.write_text(mine)
    again, nodes[0] = nursery.start("serve", "--resume", place / "run", *listen), joined(0)
    assert again.wait() == 0, again.output
    for child in nodes:
        assert child.wait() == 0, child.output
    simulated = nursery.start("run", *run, f"data.path={folder / 'all'}", "--out", place / "simulated")
    assert simulated.wait() == 0, simulated.output
    found, expected = (load_file(place / name / "models.safetensors") for name in ("run", "simulated"))
    assert_equal(found, expected)
    recorded = json.loads((place / "run" / "environment.json").read_text())["imports"]
    assert [entry["source"] for entry in recorded] == [str(code)]
