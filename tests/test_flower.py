"""A federation of real processes gives what a simulation gives, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor

import sartor
from flower_processes import Child, Nursery, free_port
from sartor.data.clients import ClientData
from sartor.experiment import Experiment, load
from sartor.runner import execute, open_federation
from sartor.task import Task

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
        "whom the server does not know": federation.join(0, *ca, "--patience", 1),
        "with a key of others": federation.join(
            0, "--key", folder / "others" / "node-1.key", *ca, "--patience", 1
        ),
        "who trusts another server": federation.join(
            0, *key, "--ca", folder / "others" / "ca.crt", "--patience", 1
        ),
        "who speaks in the open": federation.join(0, *key, "--patience", 1),
    }
    for who, stranger in strangers.items():
        assert stranger.wait(30) == 2, who
        assert "no server for 1 s" in stranger.output, who
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
    from sartor.federation.flwr_adapter import SuperLink

    with SuperLink("127.0.0.1", 0) as link:
        yield link


def joined(link: Any) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    from sartor.federation.flwr_adapter import FleetLink

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


def test_a_message_travels_and_comes_back(link: Any) -> None:
    from sartor.federation.wire import decode, encode

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


def test_a_node_cannot_answer_for_another(link: Any) -> None:
    """Even if it knows the number of the message: it does not know the secret in it."""
    from dataclasses import replace

    from sartor.federation.flower import Failed, Post
    from sartor.federation.wire import encode

    honest, liar = joined(link), joined(link)
    post = Post(link, 10)
    letter = post.send(honest.known, {"kind": "hello"})
    liar_letter = post.send(liar.known, {"kind": "hello"})
    own = liar.receive()
    stolen = own.message
    stolen.metadata.__dict__["_message_id"] = letter.message
    stolen.metadata.__dict__["_dst_node_id"] = honest.known
    liar.reply(replace(own, message=stolen), encode({"nonce": liar_letter.nonce, "names": ["x"]}))
    with pytest.raises(Failed, match="secret") as refused:
        post.wait(letter)
    assert refused.value.kind == "forged"
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
