"""Seconds of one exchange over three nodes, each a process of its own, beside stock Flower's in the same run.

A node sends back what it is sent: nothing, 1 MB or 20 MB, other numbers to every node. Ours runs the whole
path of a round: the federation's ``map``, messages over HTTP on this machine, a node's client function.
Stock Flower runs an echo through its SuperLink and SuperNodes. ``--no-stock`` leaves that out, it takes
minutes. Behind the times stand the bytes that travelled, over those that the federation counts.

    python bench/flower.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = {"0": 0, "1 MB": 1_000_000, "20 MB": 20_000_000}
NODES = 3


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def processes(commands: list[list[str]], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Processes that end with the block."""
    started = []
    for place, command in enumerate(commands):
        with (folder / f"{place}-{Path(command[0]).name}.log").open("w") as log:
            started.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )
    try:
        yield
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def ours(folder: Path, repetitions: int, durable: bool) -> dict[str, Any]:
    """Median seconds of our exchange, and bytes on the wire over those that are counted."""
    from sartor.algorithms import registered
    from sartor.federation import Federation
    from sartor.model.networks import make_task
    from sartor.remote.admission import Admission, assemble
    from sartor.remote.requests import Requests
    from sartor.remote.serve import Service, await_nodes, listen
    from sartor.remote.server import RemoteEngine
    from sartor.runs.evaluation import shared_model
    from sartor.runs.experiment import from_mapping
    from sartor.runs.setup import federation_settings, resolve

    generator = np.random.default_rng(0)
    store = folder / "messages.db" if durable else None
    service = Service(port=0, min_nodes=NODES, deadline=120, store=store)
    experiment = from_mapping({"data": {"normalise": False}})
    with listen(service) as link:
        commands = []
        for place in range(NODES):
            file = folder / f"client{place}.npz"
            np.savez(file, x=generator.normal(size=(20, 4)), y=np.arange(20) % 2)
            state = folder / f"state-{durable}-{place}"
            commands.append(
                f"{sys.executable} -m sartor join 127.0.0.1:{link.port} --data {file} --state {state}".split()
            )
        with processes(commands, folder, {**os.environ, "OMP_NUM_THREADS": "1"}):
            met = await_nodes(Admission(Requests(link, 120), experiment), link, experiment, service)
            data = assemble(met)
            task = make_task("mlp", experiment.model.settings, (4,), 2, 0)
            settings = federation_settings(resolve(experiment, registered()["fedavg"](), task, data))
            engine = RemoteEngine(link, met, experiment, task, data, settings)
            federation = Federation(task, engine, settings)
            federation.map(shared_model, range(NODES), {"w": torch.zeros(1)})  # nodes are told of the run
            found: dict[str, Any] = {}
            before, wire = replace(federation.traffic), counted(link)
            for name, size in SIZES.items():
                w = torch.randn(NODES, size // 4)
                seconds = []
                for _ in range(repetitions):
                    begin = time.perf_counter()
                    federation.map(shared_model, range(NODES), each={"w": w})
                    seconds.append(time.perf_counter() - begin)
                found[name] = round(statistics.median(seconds), 3)
            traffic = federation.traffic
            shares = {"down": traffic.down - before.down, "up": traffic.up - before.up}
            found["traffic"] = {way: round(wire[way] / told, 4) for way, told in shares.items()}
            engine.farewell()
            return found


def counted(link: Any) -> dict[str, int]:
    """The bytes of all calls of nodes from now on, and of the answers to them."""
    port, wire = link._server.config.app, {"down": 0, "up": 0}
    answer = port._answer

    def count(path: str, headers: Any, body: bytes, heard: Any) -> bytes:
        answered: bytes = answer(path, headers, body, heard)
        wire["up"] += len(body)
        wire["down"] += len(answered)
        return answered

    port._answer = count
    return wire


SERVER = """
import json, time
from flwr.app import ArrayRecord, Array, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < NODES:
        time.sleep(0.2)
    found = {}
    for name, size in SIZES.items():
        data = bytes(bytearray(i % 251 for i in range(1000))) * (size // 1000)
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            array = Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)
            content = RecordDict({"w": ArrayRecord({"w": array})})
            messages = [Message(content, node, "query.call") for node in nodes]
            replies = list(grid.send_and_receive(messages))
            seconds.append(time.perf_counter() - begin)
            assert len(replies) == NODES and not any(reply.has_error() for reply in replies)
        found[name] = round(min(seconds), 3)
    open(OUT, "w").write(json.dumps(found))
"""
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("call")
def call(message, context):
    return Message(message.content, reply_to=message)
"""


def stock(folder: Path) -> dict[str, Any]:
    """Seconds of stock Flower's exchange, the better of two."""
    from sartor.remote.flower_app import PROJECT

    app, home, out = folder / "app", folder / "flower", folder / "stock.json"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(
        PROJECT.replace('dependencies = ["sartor[flower]"]', "dependencies = []")
    )
    (app / "server_app.py").write_text(f"NODES = {NODES}\nSIZES = {SIZES}\nOUT = {str(out)!r}\n" + SERVER)
    (app / "client_app.py").write_text(CLIENT)
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }
    link = [str(scripts / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    nodes = [
        f"{scripts}/flower-supernode --insecure --superlink 127.0.0.1:{port} --host 127.0.0.1 "
        f"--port {free_port()}".split()
        for _ in range(NODES)
    ]
    with processes([link], folder, environment):
        time.sleep(5)
        with processes(nodes, folder, environment):
            time.sleep(5)
            with processes([[str(scripts / "flwr"), "run", str(app), "here"]], folder, environment):
                end = time.monotonic() + 300
                while not out.exists() and time.monotonic() < end:
                    time.sleep(0.5)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        for label, durable in (("sartor, messages in memory", False), ("sartor serve --store", True)):
            folder = Path(name) / str(durable)
            folder.mkdir()
            rows[label] = ours(folder, options.repetitions, durable)
        if not options.no_stock:
            folder = Path(name) / "stock"
            folder.mkdir()
            rows["Flower, one process a message"] = stock(folder)
    for label, row in rows.items():
        times = "  ".join(f"{size}: {row[size]:6.3f} s" for size in SIZES)
        print(f"{label:30} {times}  {row.get('traffic', '')}")


if __name__ == "__main__":
    main()
