"""What all frameworks are given: clients, network, initial weights, and a clock for their rounds.

Nothing here needs more than NumPy, since every framework runs in an environment of its own. Fashion-MNIST is
read from the folder ``$SARTOR_DATA/fashion-mnist``, as it is distributed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

TRAIN, TEST = 30_000, 5_000
"""Images that clients share, and those that a model is tried on: the first ones of each file."""


@dataclass(frozen=True)
class Workload:
    """FedAvg on equal clients whose samples are dealt at random."""

    name: str
    model: str
    clients: int
    samples: int
    drawn: int
    batch: int = 20
    epochs: int = 1
    lr: float = 0.05

    @property
    def steps(self) -> int:
        """Steps of one client in a round; no batch is cut short."""
        assert self.samples % self.batch == 0
        return self.epochs * self.samples // self.batch

    @property
    def words(self) -> str:
        """What it is, for a table's caption."""
        who = "all take part" if self.drawn == self.clients else f"{self.drawn} drawn a round"
        return (
            f"{MODELS[self.model].words}, {self.clients} clients × {self.samples}, {who}, "
            f"batch {self.batch}, {self.epochs} epoch"
        )


@dataclass(frozen=True)
class Model:
    """A network by the shapes of its weights and biases, as PyTorch lays them out."""

    words: str
    shapes: tuple[tuple[int, ...], ...]


MODELS = {
    "mlp": Model("MLP 784-200-10", ((200, 784), (200,), (10, 200), (10,))),
    "cnn": Model(
        "McMahan's CNN",
        ((32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 3136), (512,), (10, 512), (10,)),
    ),
}
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", "mlp", clients=100, samples=300, drawn=100),
        Workload("cnn", "cnn", clients=100, samples=300, drawn=10),
    )
}


def initial(workload: Workload) -> list[np.ndarray]:
    """The first weights, drawn as PyTorch draws them: uniform within 1/√(inputs of a unit)."""
    rng, inputs, drawn = np.random.default_rng(0), 1, []
    for shape in MODELS[workload.model].shapes:
        inputs = int(np.prod(shape[1:])) if len(shape) > 1 else inputs  # a bias has its layer's
        drawn.append(rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(np.sqrt(inputs)))
    return drawn


def read(path: Path) -> np.ndarray:
    """The numbers of a file as MNIST and its kin are distributed."""
    content = gzip.decompress(path.read_bytes())
    sizes = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(sizes)


@dataclass(frozen=True)
class Samples:
    """Images by client, [clients, samples, 1, 28, 28], with labels, and those that a model is tried on."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def samples(workload: Workload) -> Samples:
    """The workload's data: pixels between 0 and 1, dealt to clients at random."""
    folder = Path(os.environ["SARTOR_DATA"]) / "fashion-mnist"
    x, y = read(folder / "train-images-idx3-ubyte.gz"), read(folder / "train-labels-idx1-ubyte.gz")
    deal = np.random.default_rng(0).permutation(TRAIN)[: workload.clients * workload.samples]
    deal = deal.reshape(workload.clients, workload.samples)
    x_test, y_test = read(folder / "t10k-images-idx3-ubyte.gz"), read(folder / "t10k-labels-idx1-ubyte.gz")
    return Samples(*_ready(x[deal], y[deal]), *_ready(x_test[:TEST], y_test[:TEST]))


def _ready(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[..., None, :, :].astype(np.float32) / np.float32(255), y.astype(np.int64)


def cpu_seconds() -> float:
    """Processor time of this process and of all that it has started, as far as the system tells."""
    return time.process_time() + sum(_ticks(process) for process in _descendants()) / os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, list[str]]:
    """Of every process, what ``/proc`` says after its name: state, parent, ..."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
    return found


def _descendants() -> list[list[str]]:
    every = _stats()
    family, waiting = [], [os.getpid()]
    while waiting:
        parent = str(waiting.pop())
        children = [pid for pid, words in every.items() if words[1] == parent]
        family += [every[pid] for pid in children]
        waiting += children
    return family


def _ticks(words: list[str]) -> int:
    """Time in user and in system mode, its own and that of its children that have ended."""
    return sum(map(int, words[11:15]))


@dataclass
class Clock:
    """Seconds and processor seconds between one end of a round and the next."""

    wait: Callable[[], object] = lambda: None
    """What waits until a device has done all that it was asked."""
    marks: list[tuple[float, float]] = field(default_factory=list)

    def tick(self) -> None:
        """A round has ended, or the first begins."""
        self.wait()
        self.marks.append((time.perf_counter(), cpu_seconds()))

    @property
    def rounds(self) -> np.ndarray:
        """[rounds, 2]: seconds and processor seconds."""
        return np.diff(np.asarray(self.marks), axis=0)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every framework's script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def versions(*names: str) -> dict[str, str]:
    """The versions of these packages, where they are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def report(
    who: str, clock: Clock, asked: argparse.Namespace, accuracy: float, packages: dict[str, str]
) -> None:
    """Print what was measured as one line of JSON, the last of all."""
    rounds = clock.rounds
    assert len(rounds) == asked.warm_up + asked.rounds, "every round must be timed"
    timed: dict[str, Any] = {
        "framework": who,
        "workload": asked.workload,
        "device": asked.device,
        "milliseconds": (1e3 * rounds[asked.warm_up :, 0]).tolist(),
        "cpu_seconds": rounds[asked.warm_up :, 1].tolist(),
        "first_round_seconds": float(rounds[0, 0]),
        "rounds": len(rounds),
        "accuracy": accuracy,
        "versions": packages,
    }
    sys.stdout.flush()
    print("\n" + json.dumps(timed), flush=True)
