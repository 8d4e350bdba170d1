"""Virtual time: who is there, how long a client takes, and work in flight.

A client's training costs nothing in virtual time but its *duration*, which a delay model gives as a function
of (seed, round, client). A synchronous exchange takes as long as its slowest answer. Under an asynchronous
method jobs wait in an :class:`EventQueue` until their time has come: the next arrival is the one with the
earliest finish, ties go to the smaller client number, and time never runs backwards.
"""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sartor import random
from sartor.errors import DataError, SartorError
from sartor.settings import setting


@dataclass(frozen=True)
class World:
    """What a delay or availability model may depend on, besides its own settings."""

    seed: int
    names: Sequence[str]
    counts: np.ndarray
    """Training samples of every client."""
    bytes: int
    """Size of a model."""


class Availability(Protocol):
    """Which of some clients are there to be asked."""

    def there(self, world: World, round: int, now: float, numbers: np.ndarray) -> np.ndarray:
        """A truth value for each client."""


class Delay(Protocol):
    """How long each of some clients takes for what it is asked."""

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """A virtual time above 0 for each client."""


def _keys(world: World, purpose: str, numbers: np.ndarray, *values: int) -> torch.Tensor:
    key = random.stream(world.seed, purpose, *values)
    keys = random.fold(key, torch.from_numpy(np.ascontiguousarray(numbers)))
    assert isinstance(keys, torch.Tensor)
    return keys


def uniform(world: World, purpose: str, numbers: np.ndarray, *values: int) -> np.ndarray:
    """One uniform number for each client, keyed by seed, purpose, values and client."""
    return np.asarray(random.uniform(_keys(world, purpose, numbers, *values), 1).expand(len(numbers)))


def _normal(world: World, purpose: str, numbers: np.ndarray, *values: int) -> np.ndarray:
    return np.asarray(random.normal(_keys(world, purpose, numbers, *values), 1).expand(len(numbers)))


# Who is there ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Always:
    """Every client is always there."""

    def there(self, world: World, round: int, now: float, numbers: np.ndarray) -> np.ndarray:
        """All of them."""
        return np.ones(len(numbers), dtype=bool)


@dataclass(frozen=True)
class Sometimes:
    """Every client is there with the same probability, each round anew."""

    probability: float = setting(0.8, "probability that a client is there", low=0, high=1)

    def there(self, world: World, round: int, now: float, numbers: np.ndarray) -> np.ndarray:
        """Those whose draw of this round is below the probability."""
        return uniform(world, "availability", numbers, round) < self.probability


@dataclass(frozen=True)
class Shifts:
    """Clients come and go in shifts, each with a phase of its own: days and nights around the world."""

    period: int = setting(10, "rounds of a whole shift", low=1)
    present: int = setting(5, "rounds of a shift in which a client is there", low=1)

    def there(self, world: World, round: int, now: float, numbers: np.ndarray) -> np.ndarray:
        """Those whose phase lies in the present part of the shift."""
        phase = (uniform(world, "shift", numbers) * self.period).astype(np.int64)
        return (round + phase) % self.period < self.present


@dataclass(frozen=True)
class Presence:
    """A table says from when until when each client is there; a client it does not name is always there."""

    file: str = setting("", "CSV file with the columns client, start, end in virtual time")

    def there(self, world: World, round: int, now: float, numbers: np.ndarray) -> np.ndarray:
        """Those with an interval around the present time."""
        table = _read(self.file, ("start", "end"), "availability.file")
        spans = [table.get(world.names[number]) for number in numbers]
        return np.array(
            [span is None or any(start <= now < end for start, end in span) for span in spans], dtype=bool
        )


AVAILABILITY: dict[str, type] = {
    "always": Always,
    "random": Sometimes,
    "periodic": Shifts,
    "trace": Presence,
}

# How long they take ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """Every client takes the same time."""

    duration: float = setting(1.0, "virtual time of a client's work", above=0)

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """The one duration."""
        return np.full(len(numbers), self.duration)


@dataclass(frozen=True)
class Stragglers:
    """Some clients miss rounds: one with missing period p takes p + 1 rounds, the others one.

    The stragglers are drawn once; their periods run through 1, 2, …, ``longest`` and begin again.
    """

    stragglers: int = setting(5, "number of clients that miss rounds", low=0)
    longest: int = setting(5, "longest missing period", low=1)

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """1, or 1 + p for a straggler."""
        late = self.periods(world)
        return np.array([1.0 + late.get(int(number), 0) for number in numbers])

    def periods(self, world: World) -> dict[int, int]:
        """The missing period of every straggler."""
        clients = len(world.names)
        chosen = random.choose(random.stream(world.seed, "stragglers"), clients, self.stragglers)
        return {client: 1 + place % self.longest for place, client in enumerate(chosen)}


@dataclass(frozen=True)
class LogNormal:
    """Clients differ, and so do the jobs of one client, by log-normal factors."""

    median: float = setting(1.0, "median duration", above=0)
    between: float = setting(0.5, "standard deviation of the logarithm between clients", low=0)
    within: float = setting(0.1, "standard deviation of the logarithm from job to job", low=0)

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """The median times the client's factor times the job's."""
        client = _normal(world, "client delay", numbers)
        job = _normal(world, "job delay", numbers, round)
        return self.median * np.exp(self.between * client + self.within * job)


@dataclass(frozen=True)
class Durations:
    """A table gives each client's durations, one after the other by round and then from the start again."""

    file: str = setting("", "CSV file with the columns client, duration")

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """The entry of this round."""
        table = _read(self.file, ("duration",), "delay.file")
        result = np.empty(len(numbers))
        for place, number in enumerate(numbers):
            rows = table.get(world.names[number])
            if rows is None:
                raise DataError(f"delay.file = {self.file!r}: no duration of client {world.names[number]!r}")
            result[place] = rows[round % len(rows)][0]
        if not ((result > 0) & (result < np.inf)).all():
            raise DataError(f"delay.file = {self.file!r}: every duration must be above 0 and finite")
        return result


@dataclass(frozen=True)
class Modelled:
    """Time from work and size: samples over the client's speed, and a model each way over its bandwidth."""

    speed: float = setting(1000.0, "training samples per unit of time", above=0)
    bandwidth: float = setting(1e6, "bytes per unit of time, each way", above=0)
    between: float = setting(0.5, "standard deviation of the logarithm of speed and bandwidth", low=0)

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """n_i / speed_i + 2 · bytes / bandwidth_i."""
        speed = self.speed * np.exp(self.between * _normal(world, "client speed", numbers))
        width = self.bandwidth * np.exp(self.between * _normal(world, "client bandwidth", numbers))
        return np.asarray(world.counts[numbers] / speed + 2 * world.bytes / width)


DELAYS: dict[str, type] = {
    "constant": Constant,
    "periodic": Stragglers,
    "lognormal": LogNormal,
    "trace": Durations,
    "modelled": Modelled,
}


@lru_cache(maxsize=8)
def _read(file: str, columns: tuple[str, ...], key: str) -> dict[str, list[tuple[float, ...]]]:
    """Client -> its rows of numbers, in the order of the file."""
    if not file:
        raise DataError(f"{key}: name the CSV file of the trace (columns client, {', '.join(columns)})")
    table: dict[str, list[tuple[float, ...]]] = {}
    line = 1
    try:
        with Path(file).open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines, restval="")
            missing = [name for name in ("client", *columns) if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{key} = {file!r}: has no column {missing[0]!r}")
            for row in reader:
                line = reader.line_num
                numbers = tuple(float(row[name]) for name in columns)
                table.setdefault(row["client"], []).append(numbers)
    except OSError as error:
        raise DataError(f"{key} = {file!r}: cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{key} = {file!r}, line {line}: {error}") from None
    return table


# Under what conditions a federation works -----------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """Everything that can keep a client's answer from the server."""

    availability: Availability = field(default_factory=Always)
    delay: Delay = field(default_factory=Constant)
    dropout: float = 0.0
    deadline: float = 0.0
    on_bad_reply: str = "stop"
    largest_norm: float = 0.0
    largest_ratio: float = 0.0
    largest_weight: float = 0.0


# Work in flight -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """One client's work in flight."""

    client: int
    round: int
    """The server's round when it started: the version of what it was sent."""
    stream: int
    """The number that keys its randomness in place of the round."""
    started: float
    finish: float
    call: Any
    """What the client was asked to do, shared by all jobs of one dispatch."""
    buffers: Any = None
    """The server's float buffers at that time."""
    each: dict[str, Any] = field(default_factory=dict)
    result: Any = None


class EventQueue:
    """Jobs by finish time. A client has one job at most; each job leaves once, as arrived or cancelled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._jobs: dict[int, Job] = {}
        self._heap: list[tuple[float, int, int, Job]] = []
        self._started = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """The jobs in flight, by client number."""
        return iter([self._jobs[client] for client in sorted(self._jobs)])

    def __contains__(self, client: object) -> bool:
        return client in self._jobs

    def start(self, job: Job) -> None:
        """Put a job in flight."""
        if job.client in self._jobs:
            raise SartorError(f"client {job.client} is already at work")
        if not self.now <= job.finish < math.inf:
            raise SartorError(f"client {job.client}: work from {self.now} on cannot end at {job.finish}")
        self._jobs[job.client] = job
        # The number keeps a client's cancelled job and its next one apart where they end at the same time.
        self._started += 1
        heapq.heappush(self._heap, (job.finish, job.client, self._started, job))

    def next(self) -> Job | None:
        """The job that arrives next; None, where none is in flight."""
        while self._heap and self._jobs.get(self._heap[0][1]) is not self._heap[0][-1]:
            heapq.heappop(self._heap)  # cancelled
        return self._heap[0][-1] if self._heap else None

    def arrive(self) -> Job:
        """The next job, taken out; the clock moves to its finish."""
        job = self.next()
        if job is None:
            raise SartorError("no work is in flight")
        heapq.heappop(self._heap)
        del self._jobs[job.client]
        self.now = max(self.now, job.finish)
        return job

    def cancel(self, client: int) -> Job:
        """Take a client's job out before it arrives."""
        if client not in self._jobs:
            raise SartorError(f"client {client} is not at work")
        return self._jobs.pop(client)

    def wait_until(self, time: float) -> None:
        """Let time pass."""
        self.now = max(self.now, time)
