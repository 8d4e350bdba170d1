"""Runs of a study that several processes make at once, the longest first.

How long one takes is reckoned from what was made before: by its method's other runs, or by all. Runs that
follow from others, as those with the best of several rates, are begun when these are there.

A job is a method's seeds that are missing. A process makes the first of them, with as many others as it would
train in one batch (:mod:`sartor.runs.together`), and what it leaves is a job again. So every run is made as
one process would make it, one after the other. Runs that are there already are found, and no run is made
twice; one that was interrupted goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sartor.errors import SartorError
from sartor.kernels.device import share_device
from sartor.runs.inputs import gather
from sartor.runs.observers import Kept
from sartor.runs.run import Run
from sartor.studies.comparison import Method, Plan
from sartor.studies.library import Failure, Remembered, Runs, has_ended, key_of
from sartor.studies.progress import Tally
from sartor.studies.workers import at_once, hint_of_sharing, say, working_at_once

log = logging.getLogger(__name__)

OFTEN = 1.0
"""Seconds between two words of a process about its rounds."""

_LOAD = Remembered()
"""In a process that is started for a study, what its runs have their data from."""


@dataclass(frozen=True, eq=False)
class Job:
    """Seeds of a method that are not made yet, all with the same number of rounds."""

    out: Path
    """The folder of their runs."""
    label: str
    titles: tuple[str, ...]
    """What each run is called."""
    place: str
    """Of which comparison it is, in a few words."""
    settings: tuple[Mapping[str, Any], ...]
    """Of each run."""
    rounds: int
    together: str
    kept: Kept
    """What they keep when they are finished."""
    behind: int = 0
    """Rounds of a run that waits for them."""

    def __str__(self) -> str:
        return f"{self.titles[0]}, {self.place}" if self.place else self.titles[0]

    @property
    def size(self) -> int:
        """How many rounds it has in all."""
        return self.rounds * len(self.titles)

    def after(self, count: int) -> Job:
        """The job without its first runs."""
        return replace(self, titles=self.titles[count:], settings=self.settings[count:])


@dataclass(frozen=True)
class Begun:
    """A process has begun with some runs."""

    runs: int
    round: int
    """Where they stand."""


@dataclass(frozen=True)
class Made:
    """What came of a run."""

    key: str
    folder: Path
    outcome: str
    failed: str | None


class After(NamedTuple):
    """What is to be done when runs are there."""

    then: Callable[[], None]
    """Wants others, which follow from these."""
    rounds: int
    """Of each of them."""


@dataclass
class Awaited:
    """Runs of a folder, by their keys, and what is to be done then."""

    out: Path
    keys: set[str]
    then: Callable[[], None]


class Telling(Tally):
    """The tally of a process that is started for a study: it tells who started it."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.taken = 1
        """How many runs are made at once."""
        self._said = 0

    def together(self, runs: int) -> None:
        """So many runs are made in one batch now."""
        super().together(runs)
        self.taken = runs

    def start(self, run: Run) -> None:
        """Say how many runs are begun."""
        self._first, self._said, self._told = run.round, 0, time.monotonic()
        say(Begun(self.taken, run.round))

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Say how many rounds they have been through, where that is long ago."""
        if time.monotonic() - self._told > OFTEN:
            self._say_played(run)

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Nothing is shown here."""

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Say how many rounds there were."""
        self._say_played(run)

    def _say_played(self, run: Run) -> None:
        played = self.taken * (run.round - self._first)
        say(played - self._said)
        self._said, self._told = played, time.monotonic()


def make(job: Job) -> tuple[list[Made], float]:
    """Make the first run of a job, and those that go with it; and how many seconds that took."""
    tally, begin = Telling(), time.monotonic()
    runs = Runs(job.out, tally, job.together, kept=job.kept, load=_LOAD)
    inputs = [gather({"experiment": settings}).inputs() for settings in job.settings]
    if inputs[0].experiment.engine.device == "cuda" and torch.cuda.is_available():
        share_device(working_at_once())
    found = [runs.attempt(inputs[0], job.label, inputs[1:])]
    found += [runs.attempt(each, job.label) for each in inputs[1 : tally.taken]]
    made = [
        Made(key_of(each), job.out, run.outcome, run.message)
        if isinstance(run, Failure)
        else Made(key_of(each), run.folder, run.outcome, None)
        for each, run in zip(inputs, found, strict=False)
    ]
    return made, time.monotonic() - begin


class Study:
    """Many comparisons or searches whose runs are made at once, before each of them is gone through.

    Each has its own :class:`~sartor.studies.library.Runs`, which know afterwards what was made.
    """

    def __init__(self, jobs: int, tally: Tally) -> None:
        self.jobs, self.tally = jobs, tally
        self._runs: dict[Path, Runs] = {}
        self._waiting: list[Job] = []
        self._wanted: set[tuple[Path, str]] = set()
        self._awaited: list[Awaited] = []
        self._took: dict[tuple[str, str], tuple[float, int]] = {}
        """Seconds and rounds of a method's jobs in a place."""
        self._devices: set[str] = set()

    def want(
        self,
        runs: Runs,
        plan: Plan,
        methods: Iterable[tuple[str, Method]],
        seeds: Sequence[int],
        place: str,
        after: After | None = None,
    ) -> None:
        """Methods, each with what it is called, will be asked for with these seeds, and others after them."""
        self._runs[runs.out] = runs
        behind = 0 if after is None else after.rounds
        awaited: set[str] = set()
        for title, method in methods:
            free: list[tuple[str, Mapping[str, Any]]] = []
            for seed in seeds:
                inputs, named = plan.inputs(method, seed), f"{title}, seed {seed}"
                experiment = inputs.experiment
                stored = runs.stored(inputs)
                made, key = stored is not None and has_ended(stored), key_of(inputs)
                if not made:
                    awaited.add(key)
                if made or (runs.out, key) in self._wanted:
                    self.tally.found(experiment.rounds)
                    self.tally.place = place
                    self.tally.tell(named, "reused")
                    continue
                self._wanted.add((runs.out, key))
                self._devices.add(experiment.engine.device)
                one = (named, plan.mapping(method, seed))
                if stored is None:
                    free.append(one)
                else:
                    self._add(runs, method.label, [one], place, experiment.rounds, behind)
            if free:
                self._add(runs, method.label, free, place, experiment.rounds, behind)
        if after is not None:
            self._awaited.append(Awaited(runs.out, awaited, after.then))
            self._go_on()

    def _go_on(self) -> None:
        """Do what was put off until runs are there that are there now."""
        due = [each for each in self._awaited if not each.keys]
        self._awaited = [each for each in self._awaited if each.keys]
        for each in due:
            each.then()

    def _add(
        self,
        runs: Runs,
        label: str,
        some: Sequence[tuple[str, Mapping[str, Any]]],
        place: str,
        rounds: int,
        behind: int,
    ) -> None:
        titles, settings = zip(*some, strict=True)
        self._put(Job(runs.out, label, titles, place, settings, rounds, runs.together, runs.kept, behind))

    def _put(self, job: Job) -> None:
        """Add a job where it is its turn."""
        if job.titles:
            self._waiting.append(job)
            self._order()

    def _order(self) -> None:
        """Those first after which it takes longest until all is there, as far as is known."""
        known = [*self._took.values()] or [(1.0, 1)]
        every = sum(took for took, _ in known), sum(played for _, played in known)

        def expected(job: Job) -> float:
            took, played = self._took.get((job.place, job.label), every)
            return took / played * (job.size + job.behind)

        self._waiting.sort(key=lambda job: -expected(job))

    def _learn(self, job: Job, made: Sequence[Made], seconds: float) -> None:
        """So long a job took, of which that was made; one that failed says nothing of others."""
        if any(run.failed is not None for run in made):
            return
        took, rounds = self._took.get((job.place, job.label), (0.0, 0))
        self._took[job.place, job.label] = took + seconds, rounds + len(made) * job.rounds
        self._order()

    def make(self) -> None:
        """Make all that is wanted, and what is wanted then."""
        jobs = self.jobs if self._awaited else min(self.jobs, sum(len(job.titles) for job in self._waiting))
        if jobs > 1 and self._devices != {"cpu"}:
            hint = hint_of_sharing(jobs)
            if hint is not None:
                log.warning(hint)
        counted: dict[Job, int] = {}
        """Rounds that the tally knows of, of jobs that are begun."""

        def heard(job: Job, words: Any) -> None:
            if isinstance(words, Begun):
                if job in counted:  # those of a batch that failed as a whole are made one by one
                    return
                counted[job] = words.runs * words.round
                self.tally.found(counted[job])
                self._put(job.after(words.runs))
            else:
                counted[job] += words
                self.tally.played(words)

        with self.tally.making(0), closing(at_once(make, self._waiting, jobs, heard)) as all_made:
            for job, (made, seconds) in all_made:
                if job not in counted:  # it was over before it began
                    self._put(job.after(len(made)))
                self.tally.found(len(made) * job.rounds - counted.pop(job, 0))
                self.tally.place = job.place
                for title, run in zip(job.titles, made, strict=False):
                    error = None if run.failed is None else SartorError(run.failed)
                    self._runs[job.out].note(run.key, run.folder, error)
                    self.tally.tell(title, run.outcome)
                    for awaited in self._awaited:
                        if awaited.out == job.out:
                            awaited.keys.discard(run.key)
                self._learn(job, made, seconds)
                self._go_on()
