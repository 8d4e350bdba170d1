"""Several seeds of one experiment, trained in one stacked batch.

A small federation's rounds cost what their steps cost to start, so that five seeds in one batch take little
longer than one. Every seed is a run of its own: algorithm, server, client states and records are those of a
run alone. What they share is the engine: :func:`in_lockstep` lets every run go on until it asks for work,
does what all of them ask for in as few calls as it can, and hands out the answers. The runs take turns, so
that what comes out depends on nothing but their order.

In the shared engine the clients of all seeds stand one after the other. A client's randomness follows from
its own run's seed and its number there. What a run sends to all its clients becomes a row for each of them,
so its results are those of the run alone up to rounding, as with another chunk size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.data.clients import ClientData, Split, joined_weights
from sartor.engines.base import Origins, union_size
from sartor.engines.samples import Samples
from sartor.engines.stacked.engine import StackedEngine
from sartor.federation.engine import Engine
from sartor.federation.exchange import NOBODY, Outcome, Work
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task

Value = TypeVar("Value")


class SeedEngine(Engine):
    """The engine of one seed: it hands its work to the engine that all of them share."""

    name = "stacked"

    def __init__(self, seat: _Seat, task: Task, data: ClientData, settings: FederationSettings) -> None:
        self.task, self.data, self.settings = task, data, settings
        self.device = torch.device(settings.device)
        self.names = tuple(data.names)
        splits = {"train": data.train, "test": data.test, "validation": data.validation}
        counts = {name: np.array(split.count) for name, split in splits.items() if split is not None}
        self.counts = {**counts, "pooled": np.full(data.clients, nests.length(data.pooled_y), dtype=np.int64)}
        if union_size(data):
            self.counts["union"] = np.full(data.clients, union_size(data), dtype=np.int64)
        self.blank = nests.mapped(lambda leaf: torch.zeros_like(leaf[:1], device=self.device), data.train.x)
        self.first = 0
        """The number of its first client in the shared engine."""
        self._seat = seat

    def seconds(self) -> float:
        """What this run has taken: its even share of the time that several runs took together."""
        return self._seat.watch.read()

    def run(self, work: Work) -> Outcome:
        """Stand still until the shared engine has done it."""
        return self._seat.ask(self, work) if len(work.numbers) else NOBODY


Maker = Callable[[Task, ClientData, FederationSettings], Engine]
"""Makes a run's engine."""


def in_lockstep(runs: Sequence[Callable[[Maker], Value]]) -> list[Value | BaseException]:
    """Go through several runs together; what each of them returned or raised, once all have ended.

    A run is called with what makes its federation. Runs differ in task, data and seed alone. An interruption
    ends all of them where they stand and is raised when they have.
    """
    watch = _Watch()
    seats = [_Seat(run, watch) for run in runs]
    engine: _Shared | None = None
    living = seats
    try:
        while living:
            watch.share(len(living))
            for seat in living:
                seat.go_on()
            living = [seat for seat in living if not seat.ended]
            for group in _alike(living):
                try:
                    if engine is None:
                        engine = _Shared([seat.engine for seat in seats if seat.engine is not None])
                    answers: Sequence[Any] = engine.answers([seat.asked for seat in group if seat.asked])
                except Exception as error:  # what is wrong with the call is wrong for all who asked
                    answers = [error] * len(group)
                for seat, answer in zip(group, answers, strict=True):
                    seat.answer = answer
    finally:
        for seat in seats:
            seat.end()
    return [seat.outcome for seat in seats]


class _Watch:
    """Wall time, divided by the number of runs under way."""

    def __init__(self) -> None:
        self._runs, self._shown, self._read = 1, 0.0, time.perf_counter()

    def read(self) -> float:
        """The time shown."""
        now = time.perf_counter()
        self._shown, self._read = self._shown + (now - self._read) / self._runs, now
        return self._shown

    def share(self, runs: int) -> None:
        """From now on so many runs share the time."""
        self.read()
        self._runs = runs


class _Seat:
    """One run, in a thread that goes on when it is told to and stands still while it waits for an answer."""

    def __init__(self, run: Callable[[Maker], Any], watch: _Watch) -> None:
        self.watch = watch
        self.engine: SeedEngine | None = None
        self.asked: tuple[SeedEngine, Work] | None = None
        self.answer: Outcome | BaseException | None = None
        self.outcome: Any = None
        self.ended = False
        self._run = run
        self._told, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        # A daemon: whoever interrupts the ending of the runs too is not kept waiting.
        self._thread = threading.Thread(target=self._live, name="sartor-seed", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the run go on, with its answer, until it asks again or ends."""
        self._told.release()
        self._stands.acquire()

    def end(self) -> None:
        """Interrupt the run if it has not ended, however often it has to be told."""
        while not self.ended:
            self.answer = KeyboardInterrupt()
            self.go_on()
        self._thread.join()

    def ask(self, engine: SeedEngine, work: Work) -> Outcome:
        """In the run's thread: stand still until there is an answer."""
        self.asked = engine, work
        self._stands.release()
        self._told.acquire()
        answer, self.answer, self.asked = self.answer, None, None
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None
        return answer

    def _live(self) -> None:
        self._told.acquire()
        try:
            if isinstance(self.answer, BaseException):
                raise self.answer
            self.outcome = self._run(self._open)
        except BaseException as error:  # whatever it is, whoever takes the outcome decides
            self.outcome = error
        self.ended = True
        self._stands.release()

    def _open(self, task: Task, data: ClientData, settings: FederationSettings) -> SeedEngine:
        self.engine = SeedEngine(self, task, data, settings)
        return self.engine


def _alike(seats: Sequence[_Seat]) -> list[list[_Seat]]:
    """Those who ask for the same function of arguments of the same shapes, with each other."""
    groups: dict[Hashable, list[_Seat]] = {}
    for seat in seats:
        assert seat.asked is not None
        work = seat.asked[1]
        shared = tuple((name, value.shape, value.dtype) for name, value in work.shared.items())
        own = tuple((name, value.shape[1:], value.dtype) for name, value in work.own.items())
        groups.setdefault((work.function, repr(work.hyper), shared, own), []).append(seat)
    return list(groups.values())


class _Shared:
    """The engine that several runs share."""

    def __init__(self, engines: Sequence[SeedEngine]) -> None:
        first = engines[0]
        counts = [len(engine.names) for engine in engines]
        for engine, end in zip(engines, np.cumsum(counts).tolist(), strict=True):
            engine.first = end - len(engine.names)
        data = [engine.data for engine in engines]
        seeds = np.array([engine.settings.seed for engine in engines], dtype=np.int64)
        numbers = np.concatenate([np.arange(count) for count in counts])
        origins = Origins(numbers, np.repeat(seeds, counts))
        self._engine = StackedEngine(first.task, _one_after_the_other(data), first.settings, origins)
        self._engine.samples["pooled"] = _pooled(data, first.device)
        if all(map(union_size, data)):
            self._engine.samples["union"] = _unions(data, self._engine.samples["train"], first.device)

    def answers(self, asked: Sequence[tuple[SeedEngine, Work]]) -> list[Outcome]:
        """Do what several runs ask for in one call."""
        counts = [len(work.numbers) for _, work in asked]
        numbers = np.concatenate([engine.first + work.numbers for engine, work in asked])
        rounds = np.concatenate([work.rounds for _, work in asked])
        works = [work for _, work in asked]
        joined = works[0]._replace(numbers=numbers, rounds=rounds, fold=None)
        if len(works) > 1:
            rows = [_rows(work) for work in works]
            joined = joined._replace(
                shared={},
                own={name: torch.cat([own[name] for own, _ in rows]) for name in rows[0][0]},
                buffers=None if works[0].buffers is None else torch.cat([buffers for _, buffers in rows]),
            )
        whole = self._engine.run(joined)
        ends = np.cumsum(counts).tolist()
        return [
            whole.rows(slice(end - len(work.numbers), end))._replace(clients=work.numbers)
            for end, work in zip(ends, works, strict=True)
        ]


def _rows(work: Work) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments and buffers with one row for each client, also those that all clients of the run share."""
    clients = len(work.numbers)
    shared = {name: value.expand(clients, *value.shape) for name, value in work.shared.items()}
    buffers = torch.zeros(0) if work.buffers is None else work.buffers.expand(clients, -1)
    return {**shared, **work.own}, buffers


def _one_after_the_other(every: Sequence[ClientData]) -> ClientData:
    """The clients of several federations as those of one; the pooled test data are the first one's."""

    def joined(splits: Sequence[Split]) -> Split:
        begin = np.cumsum([0, *(nests.length(split.y) for split in splits)])
        return Split(
            nests.joined([split.x for split in splits]),
            nests.joined([split.y for split in splits]),
            np.concatenate([split.start + first for split, first in zip(splits, begin, strict=False)]),
            np.concatenate([split.count for split in splits]),
            joined_weights([(split.weight, nests.length(split.y)) for split in splits]),
        )

    validation = [data.validation for data in every if data.validation is not None]
    return replace(
        every[0],
        names=tuple(name for data in every for name in data.names),
        train=joined([data.train for data in every]),
        test=joined([data.test for data in every]),
        validation=joined(validation) if validation else None,
    )


def _pooled(every: Sequence[ClientData], device: torch.device) -> Samples:
    """The pooled test data of each client's own run; those that several runs have lie there once."""
    kept: list[ClientData] = []
    starts = []
    for data in every:
        place = next((at for at, other in enumerate(kept) if _same_pool(data, other)), len(kept))
        starts.append(sum(nests.length(other.pooled_y) for other in kept[:place]))
        if place == len(kept):
            kept.append(data)
    clients = [data.clients for data in every]
    pooled = Split(
        nests.joined([data.pooled_x for data in kept]),
        nests.joined([data.pooled_y for data in kept]),
        np.repeat(starts, clients),
        np.repeat([nests.length(data.pooled_y) for data in every], clients),
    )
    return Samples(pooled, device)


def _unions(every: Sequence[ClientData], train: Samples, device: torch.device) -> Samples:
    """The training data of all clients of each client's own run, where they lie one run after the other."""
    clients, sizes = [data.clients for data in every], [union_size(data) for data in every]
    start = np.repeat(np.cumsum([0, *sizes[:-1]]), clients)
    return Samples(Split(train.x, train.y, start, np.repeat(sizes, clients), train.weight), device)


def _same_pool(one: ClientData, other: ClientData) -> bool:
    return nests.same(one.pooled_y, other.pooled_y) and nests.same(one.pooled_x, other.pooled_x)


def fit_together(every: Sequence[tuple[Task, ClientData]]) -> bool:
    """Whether the clients of several runs can stand in one engine: samples and models have one shape."""
    kinds = {
        (
            nests.form(data.train.x),
            nests.form(data.train.y),
            data.classes,
            task.width,
            data.validation is None,
            task.size,
            task.buffer_size,
            task.dtype,
        )
        for task, data in every
    }
    return len(kinds) == 1 and all(task.same_constants(every[0][0]) for task, _ in every)
