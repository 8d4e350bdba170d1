"""A long run among strangers: ``make soak``, or ``python tests/remote/soak.py --rounds 60`` for a short one.

A server and eight honest nodes run for many rounds. Meanwhile nodes and the server are killed and started
again, links are cut, and one node of every hostile kind does its worst: some take part and answer nonsense,
too much or nothing, others bring clients that are not theirs, lie about themselves, hold connections open, or
ask without pause. At the end the model must be that of an undisturbed simulation, to the bit, and no server's
memory and handles may have grown. What was measured is printed, a line every few rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flower_processes import Child, Nursery, free_port
from safetensors.torch import load_file
from sklearn.datasets import load_digits

HONEST = tuple(f"h{place}" for place in range(8))
WRONG = ("malformed", "lying", "oversized", "misshapen", "garbage", "growing", "numerous")
TAKING_PART = {
    "wrong": ",".join(WRONG * 200),
    "slow": "unfinished",
    "silent": "silent",
    "swollen": "swollen",
}
"""Hostile nodes whose clients belong to the run, and what they do round by round."""
OUTSIDE = ("thief", "liar", "flood")
SETTINGS = (
    "algorithm=scaffold",
    "engine.name=loop",
    "local.batch=16",
    "model.name=mlp",
    "model.hidden=32",
    "evaluate.every=0",
    "checkpoint.every=5",
    "expect.shape=[1, 8, 8]",
    "expect.classes=10",
    "expect.samples=1000",
    "expect.low=0",
    "expect.high=1",
)
MOST_GROWTH = 48 << 20
"""Bytes by which a server may be larger in its last third than in its second."""
MOST_HANDLES = 16
TROUBLE = 0.4
"""How often something happens to a node or its link in a round."""


class Link:
    """A wire between a node and the server that can be cut: it passes on bytes, or closes connections."""

    def __init__(self, port: int) -> None:
        self._target, self._whole = port, threading.Event()
        self._whole.set()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        self._whole.clear()
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        threading.Timer(seconds, self._whole.set).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listening.accept()
            try:
                if not self._whole.is_set():
                    raise OSError("cut")
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for source, target in ((near, far), (far, near)):
                self._open.add(source)
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()


class Soak:
    """A federation among strangers."""

    def __init__(self, nursery: Nursery, rounds: int, seed: int, deadline: float) -> None:
        self.nursery, self.rounds, self.place = nursery, rounds, nursery.folder
        self.random, self.port, self.run = random.Random(seed), free_port(), nursery.folder / "run"
        self.samples: list[tuple[int, int, int, int]] = []
        """Which process of the server, the round, its bytes and its handles."""
        self.done: dict[str, int] = {}
        write_data(self.place)
        words = ("keys", self.place / "keys", "--host", "127.0.0.1")
        named = (*HONEST, *TAKING_PART, *OUTSIDE)
        assert nursery.start(*words, "--nodes", ",".join(named)).wait() == 0
        clients = len(HONEST) + len(TAKING_PART)
        self.settings = (*SETTINGS, f"rounds={rounds}", f"data.clients={clients}")
        self.options = ("--listen", f"127.0.0.1:{self.port}", "--nodes", self.place / "keys" / "nodes.pub")
        self.options += ("--deadline", deadline, "--quorum", len(HONEST))
        self.server = nursery.start("serve", *self.settings, "--out", self.run, *self.options)
        self.server.wait_for("waiting for")
        self.links = {name: Link(self.port) for name in HONEST}
        self.nodes = {name: self.join(name) for name in HONEST}
        self.hostile = {name: self.start_hostile(name, rounds) for name, rounds in TAKING_PART.items()}
        self.outside: dict[str, Child] = {}

    def key(self, name: str) -> Path:
        return self.place / "keys" / f"{name}.key"

    def join(self, name: str) -> Child:
        data = ("--data", self.place / f"{name}.npz", "--state", self.place / "states" / name)
        return self.nursery.start(
            "join", f"127.0.0.1:{self.links[name].port}", *data, "--key", self.key(name)
        )

    def start_hostile(self, name: str, rounds: str, *pretended: str) -> Child:
        words = (f"127.0.0.1:{self.port}", self.place / f"{name}.npz", self.place / "states" / name)
        more = ("--rounds", rounds, "--key", self.key(name))
        return self.nursery.start(*words, *pretended, *more, script="flower_hostile")

    def keep_strangers(self) -> None:
        """Whoever was turned away, or has ended with a server, tries again."""
        address = f"127.0.0.1:{self.port}"
        starts: dict[str, Callable[[], Child]] = {
            "crowd": lambda: self.nursery.start(
                "127.0.0.1", self.port, 200, "idle", "headers", "body", script="flower_crowd"
            ),
            "thief": lambda: self.nursery.start(
                *("join", address, "--data", self.place / "h0.npz", "--key", self.key("thief")),
                *("--state", self.place / "states" / "thief", "--patience", 5),
            ),
            "liar": lambda: self.start_hostile("liar", "honest", json.dumps({"mean": 1e17})),
            "flood": lambda: self.nursery.start(
                address, self.place / "states" / "flood", self.key("flood"), script="flower_flood"
            ),
        }
        for name, start in starts.items():
            if name not in self.outside or self.outside[name].code() is not None:
                self.outside[name] = start()
                self.count(name)
        for name, rounds in TAKING_PART.items():
            if self.hostile[name].code() is not None:
                self.hostile[name] = self.start_hostile(name, rounds)

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def at(self) -> int:
        """The last round that is recorded."""
        path = self.run / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def disturb(self) -> None:
        """Something of what happens to machines and wires."""
        name = self.random.choice(HONEST)
        if self.random.random() < 0.5:
            self.count("cut")
            self.links[name].cut(self.random.uniform(0.5, 4))
            return
        self.count("kill")
        self.nodes[name].kill()
        self.nodes[name] = self.join(name)

    def restart(self) -> None:
        self.count("restart")
        self.server.kill()
        self.server = self.nursery.start("serve", "--resume", self.run, *self.options)

    def measure(self) -> None:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            pages = int(Path(f"/proc/{self.server.pid}/statm").read_text().split()[1])
            handles = len(os.listdir(f"/proc/{self.server.pid}/fd"))
            held = pages * os.sysconf("SC_PAGE_SIZE")
            self.samples.append((self.server.pid, self.at(), held, handles))

    def go(self) -> None:
        """Until the last round."""
        restarts = [self.rounds // 3, 2 * self.rounds // 3]
        shown, every, troubled = 0, max(1, self.rounds // 20), 0
        while self.server.code() is None:
            self.measure()
            self.keep_strangers()
            round = self.at()
            if restarts and round >= restarts[0]:
                restarts.pop(0)
                self.restart()
            elif round > troubled:
                troubled = round
                if self.random.random() < TROUBLE:
                    self.disturb()
            if round >= shown + every and self.samples:
                shown = round
                _, _, held, handles = self.samples[-1]
                print(f"round {round}: {held >> 20} MB, {handles} handles, {self.done}", flush=True)
            time.sleep(0.5)

    def check(self) -> None:
        """The model, the honest nodes, memory and handles."""
        assert self.server.code() == 0, self.server.output[-3000:]
        for name, node in self.nodes.items():
            assert node.wait(60) == 0, f"{name}: {node.output[-2000:]}"
        found = load_file(self.run / "models.safetensors")["server.w"]
        expected = undisturbed(self.place, self.settings)
        assert bool((found == expected).all()), "the model is not that of an undisturbed run"
        print(f"the model is that of an undisturbed run; {self.done}")
        for pid in dict.fromkeys(pid for pid, *_ in self.samples):
            own = [row for row in self.samples if row[0] == pid]
            thirds = np.array_split(np.array(own), 3)
            held, handles = ([int(part[:, column].max()) for part in thirds] for column in (2, 3))
            megabytes = [size >> 20 for size in held]
            print(f"server {pid}: rounds {own[0][1]} to {own[-1][1]}, {megabytes} MB, {handles} handles")
            if own[-1][1] - own[0][1] >= 50:
                assert held[2] <= held[1] + MOST_GROWTH, "the server's memory grows"
                assert handles[2] <= handles[1] + MOST_HANDLES, "the server's handles grow"


def write_data(place: Path) -> None:
    """A client of the digits for everybody; for the simulation those together that belong to the run."""
    digits = load_digits()
    x, y = digits.images[:, None] / 16, digits.target
    names = (*HONEST, *TAKING_PART, *OUTSIDE)
    (place / "all").mkdir()
    for number, name in enumerate(names):
        rows = slice(number * 60, number * 60 + 30 + 4 * number)
        for folder in (place, *([place / "all"] if name not in OUTSIDE else [])):
            np.savez(folder / f"{name}.npz", x=x[rows], y=y[rows])


def undisturbed(place: Path, settings: tuple[str, ...]) -> Any:
    """The model of a simulation in which those who answer nonsense answer nothing."""
    from sartor.runs.execute import execute
    from sartor.runs.experiment import load
    from sartor.runs.setup import open_federation

    names = sorted((*HONEST, *TAKING_PART))
    silent = [names.index(name) for name in TAKING_PART]

    def opened(experiment: Any, task: Any, data: Any) -> Any:
        federation = open_federation(experiment, task, data)
        federation._answers = lambda round, numbers: ~np.isin(numbers, silent)
        return federation

    given = [f"data.path={place / 'all'}", *(text for text in settings if not text.startswith("data."))]
    return execute(load(None, given), store=False, opened=opened).w


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--rounds", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--deadline", type=float, default=10.0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery(Path(folder))
        try:
            soak = Soak(nursery, given.rounds, given.seed, given.deadline)
            try:
                soak.go()
                soak.check()
            except BaseException:
                print(soak.server.output[-4000:], file=sys.stderr)
                raise
        finally:
            nursery.close()


if __name__ == "__main__":
    main()
