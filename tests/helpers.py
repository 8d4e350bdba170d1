"""Small federations for tests, and processes that end with them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sartor
from sartor.algorithms import make, registered
from sartor.algorithms.base import Algorithm, Hyper
from sartor.algorithms.comfed.comfed import MECHANISMS, NAMES
from sartor.algorithms.server.optimizers import OPTIMIZERS
from sartor.client.local import Client
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.engines import make_federation
from sartor.federation import Federation, Reply
from sartor.federation.exchange import NobodyAnswered
from sartor.model.batch import Batch
from sartor.model.networks import MODELS, make_task, seeded
from sartor.model.task import Task
from sartor.runs.evaluation import Cell

RAGGED = (5, 17, 33, 9, 7, 16)
SOURCE = str(Path(sartor.__file__).resolve().parent.parent)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}
SHAPE_CHECKS = ("test_schema", "test_faketensor")
ALL_CHECKS = (*SHAPE_CHECKS, "test_autograd_registration", "test_aot_dispatch_dynamic")
"""What ``torch.library.opcheck`` tries of an operation; those of its shapes take a tenth of the time."""
PATIENCE = 300.0  # seconds after which something does not happen any more, also on a busy machine

MIXED = ("scaf-yogi", "nova-adam")
PAIRS = [
    *(f"{client}-sgd" for client in MECHANISMS),
    *(f"sgd-{server}" for server in OPTIMIZERS if server != "sgd"),
    *MIXED,
]
"""ComFed by what differs: its mechanisms and its optimizers do not know each other, so each is here with the
plain other half, and two pairs have none.
"""
_ALIKE = {f"{client}-{server}" for client in MECHANISMS for server in OPTIMIZERS} - set(PAIRS)
_ALIKE |= {pair for pair, _ in NAMES.values()}
METHODS = [name for name, kind in sorted(registered().items()) if name not in _ALIKE and not kind.public]
METHODS = [name for name in METHODS if not registered()[name].adapters]
"""Every method by what differs: of ComFed's pairs those above, by their usual names where they have one.

Those that learn from public samples, or are about adapters, are tried where there are such.
"""


def classification(
    sizes: tuple[int, ...] = RAGGED,
    shape: tuple[int, ...] = (1, 8, 8),
    classes: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> ClientData:
    """Clients of these sizes whose classes are shifted clouds, a different mixture at each client."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, *shape, generator=generator)

    def split(counts: list[int]) -> Split:
        labels = [
            torch.randint(0, 1 + (number % classes), (count,), generator=generator)
            for number, count in enumerate(counts)
        ]
        y = torch.cat(labels)
        x = centres[y] + torch.randn(len(y), *shape, generator=generator)
        start = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        return Split(x.to(dtype), y, start, np.asarray(counts, dtype=np.int64))

    train, test = split(list(sizes)), split([max(1, size // 3) for size in sizes])
    names = tuple(f"client {number}" for number in range(len(sizes)))
    return ClientData(names, train, test, None, test.x, test.y, classes, "test", "clouds")


def model_task(name: str = "mlp", data: ClientData | None = None, seed: int = 0, **settings: Any) -> Task:
    """A named model for the data."""
    data = data or classification()
    return make_task(name, MODELS[name](**settings), tuple(data.train.x.shape[1:]), data.classes, seed)


class Point(nn.Module):
    """A model that is a point: its output for any sample is its parameter."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(x.shape[0], -1)


def plain_cnn(shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10, seed: int = 0) -> nn.Module:
    """A user's own network: two convolutions, two dense layers, nothing else."""
    channels, height, width = shape

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU(), nn.Linear(64, classes)),
        )

    return seeded(build, seed)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(
    norm: Callable[[int], nn.Module], width: int = 64, channels: int = 3, classes: int = 10, seed: int = 0
) -> nn.Module:
    """ResNet-18 for small images: eight residual blocks of width, 2, 4 and 8 times width channels."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
        ]
        inputs = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                layers.append(_Residual(inputs, width << stage, stride, norm))
                inputs = width << stage
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))

    return seeded(build, seed)


def quadratics(
    centres: Tensor, curvatures: Tensor, sizes: tuple[int, ...] | None = None
) -> tuple[Task, ClientData]:
    """f_i(w) = ½ Σ_j h_ij (w_j − b_ij)².

    Every sample of client i has y = (b_i, h_i), so all batches have one gradient.
    """
    clients, dimension = centres.shape
    sizes = sizes or (1,) * clients
    rows = torch.cat([centres, curvatures], dim=1).double()
    y = torch.cat([rows[number].expand(size, -1) for number, size in enumerate(sizes)])
    x = torch.zeros(len(y), 1, dtype=torch.float64)
    count = np.asarray(sizes, dtype=np.int64)
    split = Split(x, y, np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int64), count)
    names = tuple(f"quadratic {number}" for number in range(clients))
    data = ClientData(names, split, split, None, x, y, None, "test", "quadratics")

    return _point(dimension), data


@cache
def _point(dimension: int) -> Task:
    """One task for all tests: what is tried of it is tried once."""

    def loss(w: Tensor, y: Tensor) -> Tensor:
        b, h = y[:, :dimension], y[:, dimension:]
        return 0.5 * (h * (w - b) ** 2).sum(dim=1)

    return Task(Point(dimension), loss=loss, name="point")


def federation_of(
    engine: str,
    task: Task,
    data: ClientData,
    *,
    hyper: Any = None,
    local: dict[str, Any] | None = None,
    **settings: Any,
) -> Federation:
    """A federation with these local settings; the learning rate is 0.1 unless ``hyper`` says otherwise."""
    return make_federation(
        engine, task, data, local=Local(**(local or {})), hyper=hyper or Hyper(lr=0.1), **settings
    )


def play(algorithm: Algorithm, federation: Federation, cohorts: Sequence[Sequence[int]]) -> Any:
    """The server after one round for each cohort; rounds count from 1."""
    server = algorithm.start(federation)
    for round, cohort in enumerate(cohorts, 1):
        federation.round = round
        with suppress(NobodyAnswered):  # as the round loop does
            server = algorithm.round(server, federation, np.asarray(cohort, dtype=np.int64))
            federation.check()
    return server


def module_of(name: str, shape: tuple[int, ...], classes: int, seed: int = 0, **settings: Any) -> nn.Module:
    """A named network as an ordinary module in double precision, so that two ways to one result agree
    tightly.
    """
    return seeded(lambda: MODELS[name](**settings).build(shape, classes), seed).double()


def flat(module: nn.Module) -> Tensor:
    """A module's parameters as one vector, in the order PyTorch names them."""
    return torch.cat([value.detach().reshape(-1) for value in module.parameters()])


def method(name: str, federation: Federation, **hyper: Any) -> Algorithm:
    """A method on a federation, which is told its hyper-parameters as a run does it."""
    algorithm = make(registered()[name], **hyper)
    federation.hyper = algorithm.hyper
    return algorithm


def task_and_data(sizes: tuple[int, ...] = RAGGED) -> tuple[Task, ClientData]:
    """Ragged clients with four classes and a small network, in double precision."""
    return _small(), classification(sizes, shape=(5,), classes=4, dtype=torch.float64)


@cache
def _small() -> Task:
    return Task(module_of("mlp", (5,), 4, hidden=6), classes=4, head="output")


def batches_of(
    federation: Federation, number: int, round: int, stream: str = "batch", **amount: int
) -> list[Batch]:
    """The batches that a client trains on in a round."""
    seen: list[Batch] = []

    def record(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Batch) -> Tensor:
            seen.append(batch)
            return torch.zeros_like(w_k)

        return Reply(w=client.descend(w, direction, lr=0.0, stream=stream, **amount))

    before, federation.round = federation.round, round
    federation.ask(record, [number], {"w": federation.task.initial()})
    federation.round = before
    return seen


@contextmanager
def process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process whose output is read, in a group of its own: all of the group ends with the block.

    It is asked to end first: torchrun's ranks are in other groups, and end when it is asked.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    with subprocess.Popen(command, **{**pipes, **options}, start_new_session=True) as started:
        try:
            yield started
        finally:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if started.poll() is None:
                    os.killpg(started.pid, signal.SIGTERM)
                    started.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def completed(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that came to its end."""
    with process(command, **options) as started:
        output, messages = started.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(list(command), started.returncode, output, messages)


def wait_until(happened: Callable[[], bool], started: subprocess.Popen[str]) -> None:
    """Wait for something that a process does; it is wrong if it ends before."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert started.poll() is None, started.communicate()[1]
        assert time.monotonic() < end, "the process did not come to that"
        time.sleep(0.01)


def personal_models(algorithm: Any, server: Any, federation: Federation) -> Tensor:
    """Everyone's personal model."""
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    return federation.ask(call.function, everyone, call.shared, call.each)["w"]


def assert_same_cells(found: dict[str, Cell], expected: dict[str, Cell], rtol: float) -> None:
    """Both evaluations have the same scores of the same samples, and losses up to rounding."""
    assert found.keys() == expected.keys()
    for cell, other in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_array_equal(cell.n, other.n)
        np.testing.assert_allclose(cell.loss, other.loss, rtol=rtol)
        for score, values in cell.scores.items():
            np.testing.assert_array_equal(values, other.scores[score])
