"""A federation of real processes gives what a simulation gives, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from flower_processes import Child, Nursery, free_port
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor

import sartor
from sartor.data.clients import ClientData
from sartor.model.task import Task
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment, load
from sartor.runs.setup import open_federation

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SIZES = (30, 70, 50, 90, 40, 60)
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
        self, nursery: Nursery, name: str, *settings: str, nodes: int = 3, options: tuple[Any, ...] = ()
    ) -> None:
        self.nursery, self.port = nursery, free_port()
        self.place = nursery.folder / f"{name}-{self.port}"
        self.place.mkdir()
        self.run = self.place / "run"
        self.options = options
        self.server = self.serve(f"algorithm={name}", *SETTINGS, *settings, "--out", self.run)
        self.nodes = [self.join(node) for node in range(nodes)]

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


def test_a_federation_stops_early_as_a_simulation_does(nursery: Nursery, folder: Path) -> None:
    settings = ("rounds=40", "hyper.lr=2.0", "stop.patience=1", "stop.metric=shared_pooled.loss")
    expected, summary = simulated(folder, "fedavg", *settings)
    assert 1 < summary["rounds"] < 40
    federation = Federation(nursery, "fedavg", *settings)
    assert_equal(federation.done(), expected)
    found = json.loads((federation.run / "summary.json").read_text())
    assert found["stopped"]["round"] == summary["stopped"]["round"]
    assert len(federation.rounds()) == summary["rounds"]


def test_an_asynchronous_method_takes_what_arrives(nursery: Nursery, folder: Path) -> None:
    settings = ("rounds=12", "hyper.arrivals=2", "evaluate.every=0", "hyper.lr=0.3", "local.epochs=10")
    federation = Federation(nursery, "fedasync", *settings)
    federation.done()
    rounds = federation.rounds()
    arrived = [entry for row in rounds for entry in row["arrivals"]]
    assert len(arrived) == 24 == rounds[-1]["updates"]
    assert len({client for client, *_ in arrived}) == 6
    assert [entry[2] for entry in arrived] == sorted(entry[2] for entry in arrived)  # as time goes by
    assert max(age for *_, age in arrived) > 0  # nobody waited for the slowest
    assert rounds[-1]["evaluation"]["shared_pooled"]["accuracy"] > 0.5  # ten classes


class Recorded:
    """Durations by which the jobs of a simulation arrive as those of a real run did: in the same order, and
    in the same rounds where these end by the clock.
    """

    def __init__(self, rounds: list[dict[str, Any]], deadline: float | None) -> None:
        self.deadline, self.federation = deadline, None
        self.ends: dict[tuple[int, int], list[float]] = {}
        """When the jobs of a client of a round arrive, one after the other: by place, or by round."""
        place = 0
        for row in rounds:
            arrivals = row.get("arrivals", [])
            for rank, (client, _, _, version, age) in enumerate(arrivals, 1):
                place += 1
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
        ("fedbuff", ("hyper.buffer=4", "rounds=8"), None),
        ("fedbuff", ("hyper.buffer=9", "hyper.concurrency=4", "rounds=4"), None),
        ("plga", ("rounds=25",), 1.0),
        ("plga", ("rounds=25", "hyper.estimate=on-arrival"), 1.0),
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
        engine = recorded.federation = open_federation(experiment, task, data)
        engine.conditions = replace(engine.conditions, delay=recorded)
        return engine

    given = [*SETTINGS, *settings, f"data.path={folder / 'all'}"]
    out = federation.place / "replayed"
    execute(load(None, given, algorithm=name), out=out, opened=replayed)
    assert not any(recorded.ends.values())  # every arrival took place
    expected = load_file(out / "models.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key].double(), value.double(), rtol=0, atol=1e-6), key


# Kills -----------------------------------------------------------------------------------------------------


KILLED = ("rounds=8", "evaluate.every=4", "checkpoint.every=1", "local.epochs=3")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Tensor]:
    return simulated(folder, "scaffold", *KILLED)[0]


@pytest.mark.parametrize("killed", [(0,), (1, 2)])
def test_killed_nodes_come_back_as_who_they_were(
    nursery: Nursery, undisturbed: dict[str, Tensor], killed: tuple[int, ...]
) -> None:
    federation = Federation(nursery, "scaffold", *KILLED, options=("--quorum", 3))
    for round in (2, 5):
        federation.nodes[killed[0]].wait_for(f"round {round}")
        for node in killed:
            federation.nodes[node].kill()
        before = [federation.nodes[node].output.split("as node ")[1].split()[0] for node in killed]
        for node, number in zip(killed, before, strict=True):
            federation.nodes[node] = federation.join(node)
            federation.nodes[node].wait_for(f"as node {number}\n")
    assert_equal(federation.done(), undisturbed)
    rounds = federation.rounds()
    assert [row["answered"] for row in rounds] == [6] * 8
    assert sum(row.get("gone", 0) for row in rounds) >= 1


def test_a_round_goes_on_without_a_node_that_stays_away(nursery: Nursery) -> None:
    """Deadline and quorum: what the others answer is used, and nothing of the node that is gone."""
    options = ("--quorum", 2, "--deadline", 2)
    federation = Federation(nursery, "scaffold", "rounds=5", "evaluate.every=0", options=options)
    federation.nodes[2].wait_for("round 2")
    federation.nodes[2].kill()
    assert federation.server.wait(90) == 0, federation.server.output
    answered = [row["answered"] for row in federation.rounds()]
    assert answered[0] == 6
    assert answered[-1] == 4
    assert set(answered) == {4, 6}
    last = federation.rounds()[-1]["evaluation"]["shared_pooled"]
    assert 0 < last["accuracy"] <= 1
    assert "late" in federation.server.output or "gone" in federation.server.output


def test_a_killed_server_goes_on_where_it_was(nursery: Nursery, undisturbed: dict[str, Tensor]) -> None:
    federation = Federation(nursery, "scaffold", *KILLED)
    federation.nodes[0].wait_for("round 4")
    federation.server.kill()
    federation.server = federation.serve("--resume", federation.run)
    assert_equal(federation.done(), undisturbed)  # with the same three processes


@pytest.mark.parametrize("name", ["scaffold", "fedbuff"])
def test_what_is_under_way_outlives_a_server_with_a_store(nursery: Nursery, folder: Path, name: str) -> None:
    """Twice the server is killed while nodes are at work, and comes back when they are done: they wait with
    their answers, which the next process uses as the last one would have.
    """
    settings = ["rounds=5", "evaluate.every=0", "checkpoint.every=1", "local.epochs=30"]
    if name == "fedbuff":  # everybody's answer in every step: the result does not depend on who is faster
        settings.append("hyper.buffer=6")
    store = nursery.folder / f"store-{name}.db"
    federation = Federation(nursery, name, *settings, options=("--store", store))
    for round in (2, 4):
        federation.nodes[1].wait_for(f"round {round}")
        federation.server.kill()
        time.sleep(2)
        federation.server = federation.serve("--resume", federation.run)
        federation.server.wait_for("begins")
    numbers = [node.output.split("as node ")[1].split()[0] for node in federation.nodes]
    assert_equal(federation.done(), simulated(folder, name, *settings)[0])
    assert [row["answered"] for row in federation.rounds()] == [6] * 5
    assert sum(row.get("taken_up", 0) for row in federation.rounds()) >= 1
    for node, number in zip(federation.nodes, numbers, strict=True):  # who they were all the time
        assert set(re.findall(r"as node (\d+)", node.output)) == {number}


def test_a_store_serves_one_server_at_a_time(nursery: Nursery, folder: Path) -> None:
    store = folder / "busy.db"
    federation = Federation(nursery, "fedavg", nodes=0, options=("--store", store))
    federation.server.wait_for("waiting for")
    other = nursery.start("serve", "--listen", f"127.0.0.1:{free_port()}", "--store", store)
    assert other.wait(30) == 2
    assert other.output.strip() == f"sartor: --store {store}: another server is using it"
    (folder / "text.db").write_text("no database at all, whatever its name says\n" * 100)
    for path, reason in ((folder / "text.db", "not a database"), (folder / "no" / "x.db", "No such file")):
        wrong = nursery.start("serve", "--listen", f"127.0.0.1:{free_port()}", "--store", path)
        assert wrong.wait(30) == 2
        assert f"--store {path}: cannot be used: " in wrong.output
        assert reason in wrong.output
        assert len(wrong.output.splitlines()) == 1
    federation.server.kill()


def test_after_everything_was_killed_the_run_goes_on(
    nursery: Nursery, undisturbed: dict[str, Tensor]
) -> None:
    federation = Federation(nursery, "scaffold", *KILLED)
    for round in (3, 6):
        federation.nodes[1].wait_for(f"round {round}")
        for child in (federation.nodes[0], federation.server, *federation.nodes[1:]):
            child.kill()
        federation.server = federation.serve("--resume", federation.run)
        federation.nodes = [federation.join(node) for node in range(3)]
    assert_equal(federation.done(), undisturbed)


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
    ]
    settings = (f"rounds={len(ROUNDS)}", "evaluate.every=0")
    federation = Federation(nursery, "scaffold", *settings, nodes=2, options=("--deadline", 4))
    address = f"127.0.0.1:{federation.port}"
    hostile = nursery.start(address, folder / "node2", federation.place / "x", script="flower_hostile")
    found = federation.done()
    assert hostile.wait(20) == 0, hostile.output
    rounds = federation.rounds()
    assert [row["answered"] for row in rounds] == [6] + [4] * (len(ROUNDS) - 1)
    for row, kind in zip(rounds, kinds, strict=True):
        counted = {name for name in FAULTS if name in row}
        assert counted >= ({kind} if kind else set()), row
        assert counted <= {kind, "bad"}, row  # of the last round's evaluation "bad" is noted too
    for kind in set(kinds) - {"", "bad"}:
        assert f"{kind}: " in federation.server.output
    assert "is not finite" in federation.server.output
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
        assert child.wait(20) == 0, child.output
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
    told = f"node {forger} (c2, c5): forged: a reply in the name of node {victim}"
    assert told in federation.server.output
    assert f"node {victim} (" not in federation.server.output  # nothing is said against that one
    assert min(row["forged"] for row in rounds) >= 1


# Refused nodes ---------------------------------------------------------------------------------------------


def test_a_node_that_cannot_take_part_is_told_why(nursery: Nursery, folder: Path) -> None:
    """Before the run and while it is under way; those who can take part notice nothing."""
    settings = ("rounds=4", "evaluate.every=0", "local.epochs=30")
    federation = Federation(nursery, "fedavg", *settings, nodes=2)
    federation.server.wait_for("with c1, c4")
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
        r"its samples are float32 \[64\] in test, train, those of the others float32 \[1, 8, 8\]": join(
            place / "flat.npz", "flat"
        ),
        r"broken\.npz: .*\by\b": join(place / "broken.npz", "broken"),
    }

    def told(node: Child, reason: str) -> None:
        assert node.wait(30) == 2, node.output
        said = [line for line in node.output.splitlines() if "joined" not in line]
        assert len(said) == 1, node.output  # one message, and no traceback
        assert re.search(f"cannot take part: .*{reason}", said[0]), node.output

    for reason, node in refused.items():
        told(node, reason)
    assert "begins" not in federation.server.output
    federation.nodes.append(federation.join(2))
    federation.nodes[2].wait_for("round 1")
    told(join(place / "late.npz", "late"), "client 'late' is not in this run, which has begun without it")
    told(join(place / "one", "again"), "client 'c0' is at another node already")
    assert_equal(federation.done(), simulated(folder, "fedavg", *settings)[0])


# Certificates and keys -------------------------------------------------------------------------------------


def test_nodes_with_a_key_join_a_server_with_a_certificate(nursery: Nursery, folder: Path) -> None:
    keys = folder / "keys"
    names = "north,south,west"
    made = nursery.start("keys", keys, "--host", "127.0.0.1", "--host", "localhost", "--nodes", names)
    assert made.wait(20) == 0, made.output
    other = nursery.start("keys", folder / "others", "--host", "127.0.0.1", "--nodes", "1")
    assert other.wait(20) == 0, other.output
    files = (keys / "server.crt", keys / "server.key", keys / "ca.crt")
    tls = ("--tls", *files, "--nodes", keys / "nodes.pub")
    federation = Federation(nursery, "fedavg", "rounds=2", nodes=0, options=tls)
    federation.server.wait_for("waiting for 6 clients")
    key, ca = ("--key", keys / "north.key"), ("--ca", keys / "ca.crt")
    strangers = {
        "with a key that it made itself": federation.join(0, *ca, "--patience", 1),
        "with a key of others": federation.join(
            0, "--key", folder / "others" / "node-1.key", *ca, "--patience", 1
        ),
        "who trusts another server": federation.join(
            0, *key, "--ca", folder / "others" / "ca.crt", "--patience", 1
        ),
        "who speaks in the open": federation.join(0, *key, "--patience", 1),
    }
    unknown = "the server does not know this node's key, which must be among its --nodes"
    for who, stranger in strangers.items():
        assert stranger.wait(30) == 2, who
        assert (unknown if "key" in who else "no server for 1 s") in stranger.output, who
        assert len(stranger.output.splitlines()) == 1, stranger.output
        assert "joined" not in stranger.output, who
    assert "has joined" not in federation.server.output
    federation.nodes = [
        federation.join(node, "--key", keys / f"{name}.key", *ca)
        for node, name in enumerate(names.split(","))
    ]
    assert_equal(federation.done(), simulated(folder, "fedavg", "rounds=2")[0])


# What the server's port shows ------------------------------------------------------------------------------


@pytest.fixture
def link() -> Iterator[Any]:
    from sartor.remote.flower import SuperLink

    with SuperLink("127.0.0.1", 0) as link:
        yield link


def joined(link: Any) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    from sartor.remote.flower import FleetLink

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


def test_a_store_remembers_nodes_but_lets_in_those_with_a_key(tmp_path: Path) -> None:
    """The keys are those that this server was given, whoever has joined an earlier one."""
    from cryptography.hazmat.primitives.asymmetric import ec

    from sartor.remote.deploy import _public
    from sartor.remote.flower import FleetLink, Refused, SuperLink

    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
    public = [_public(key) for key in keys]
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
    message = link.send(node.known, encode({"n": 1}, {"shared": {"w": big, "b": big[:0]}}), 30)
    assert link.poll(message, big.nbytes) is None
    request = node.receive()
    header, groups = decode(request.parts)
    assert header["n"] == 1
    assert torch.equal(groups["shared"]["w"], big)
    node.reply(request, encode({"n": 2}, {"sent": {"w": -big}}))
    _, groups = decode(link.poll(message, big.nbytes))
    assert torch.equal(groups["sent"]["w"], -big)
    link.forget(message)
    assert len(link._state.object_store) == 0  # nothing is left behind
    node.close()
    assert link.nodes() == set()


@pytest.mark.parametrize("late", [False, True])
def test_a_node_cannot_answer_for_another(link: Any, late: bool) -> None:
    """Even if it knows the number of the message, and the secret in it; before it has answered, or after."""
    from sartor.remote.messages import encode
    from sartor.remote.requests import Post

    honest, liar = joined(link), joined(link)
    post = Post(link, 10)
    letter = post.send(honest.known, {"kind": "hello"})
    post.send(liar.known, {"kind": "hello"})
    request, own = honest.receive(), liar.receive()
    nonce = letter.header["nonce"]
    if late:
        honest.reply(request, encode({"nonce": nonce, "names": ["mine"]}))
    stolen = own.message
    stolen.metadata.__dict__["_message_id"] = letter.message
    stolen.metadata.__dict__["_dst_node_id"] = honest.known
    liar.reply(replace(own, message=stolen), encode({"nonce": nonce, "names": ["forged"]}))
    if not late:
        assert post.look(letter) is None
        honest.reply(request, encode({"nonce": nonce, "names": ["mine"]}))
    header, _ = post.wait(letter)
    assert header["names"] == ["mine"]
    [(who, error)] = post.caught()
    assert who == liar.known
    assert (error.kind, str(honest.known) in str(error)) == ("forged", True)
    assert post.caught() == []
    for node in (honest, liar):
        node.close()


# A Flower installation that is there already ---------------------------------------------------------------


def test_the_application_runs_on_a_stock_flower(nursery: Nursery, folder: Path) -> None:
    """Flower's own programs, a process for every message."""
    place = folder / "stock"
    place.mkdir()
    port, scripts = free_port(), Path(sys.executable).parent
    (place / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    settings = ("rounds=1", "evaluate.every=0", "data.clients=4")
    app = nursery.start("flower-app", place / "app", "algorithm=fedavg", *SETTINGS[1:], *settings)
    assert app.wait(20) == 0, app.output
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
    for node in (0, 1):
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
            time.sleep(4)  # one after the other, as a person would
        ended = started[-1].wait(200)
        assert ended == 0, [log.read_text()[-2000:] for log in place.glob("*.log")]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    (place / "all").mkdir()
    for client in (*BLOCKS[0], *BLOCKS[1]):
        shutil.copy(folder / "all" / f"c{client}.npz", place / "all")
    expected, _ = simulated(place, "fedavg", *settings[:2])
    assert_equal(load_file(place / "run" / "models.safetensors"), expected)
