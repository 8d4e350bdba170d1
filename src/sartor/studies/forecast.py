"""What a table or figure of a paper will take, before it is run: how many runs, rounds and how much time.

A round's time is taken from runs of the same kind that are there already, finished or not, or else measured
on a few rounds of the experiment (:mod:`sartor.runs.cost`), once for all columns that differ in nothing that
takes time. Data are read once for all methods in a row that have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from sartor.data.clients import ClientData
from sartor.errors import Diverged
from sartor.runs import cost
from sartor.runs.experiment import Experiment, to_mapping
from sartor.runs.record import RunFolder
from sartor.runs.setup import load_data
from sartor.studies.library import Runs, has_ended
from sartor.studies.planning import Asked, Group, Work, planned_all
from sartor.studies.reproduction import row_seconds
from sartor.studies.workers import processors, threads_of


@dataclass(frozen=True)
class Part:
    """A method in the columns that the same runs serve."""

    method: str
    columns: str
    runs: int
    there: int
    """Of them finished already."""
    rounds: int
    """Of each run."""
    seconds_per_round: float
    """With a round's share of evaluations."""
    seconds: float
    """For what is not there yet."""


@dataclass(frozen=True)
class Forecast:
    """What an entry will take."""

    name: str
    scale: str
    device: str
    runs: int
    there: int
    rounds: int
    """Of all runs together."""
    jobs: int
    """What the time is divided by: on a CPU as many as have a processor, 1 on a GPU, which they share."""
    seconds: float
    """For what is not there yet."""
    parts: tuple[Part, ...]

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def forecast(name: str, *, jobs: int = 1, **asked: Unpack[Asked]) -> Forecast:
    """What :func:`~sartor.studies.reproduction.reproduce` would take for the same words.

    Seeds that are trained in one batch take less.

    >>> expected = forecast("comfed/table4", methods=["fedavg"], seeds=3, settings={"rounds": 10})
    >>> expected.runs, expected.there, expected.rounds, expected.seconds > 0
    (3, 0, 30, True)
    """
    (expected,) = forecast_all([name], jobs=jobs, **asked)
    return expected


def forecast_all(names: Sequence[str], *, jobs: int = 1, **asked: Unpack[Asked]) -> list[Forecast]:
    """The same of several entries, each as by itself."""
    measured = _Measured()
    works = planned_all(names, **asked)
    with threads_of(jobs):  # as each of them has
        return [_forecast(work, asked.get("device"), jobs, measured) for work in works]


def _forecast(work: Work, device: str | None, jobs: int, measured: _Measured) -> Forecast:
    parts: list[Part] = []
    with work.named():
        for group in work.trained:
            parts += _parts(group, work, device, measured)
    there = sum(part.there for part in parts)
    where = device or work.settings.get("engine", {}).get("device", "cpu")
    at_once = min(jobs, processors(), max(1, work.runs - there)) if where == "cpu" else 1
    return Forecast(
        name=work.entry.name,
        scale=work.scale,
        device=where,
        runs=work.runs,
        there=there,
        rounds=work.rounds,
        jobs=at_once,
        seconds=sum(part.seconds for part in parts) / at_once,
        parts=tuple(parts),
    )


class _Measured:
    """Seconds of rounds, measured once for each kind of experiment."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._data: tuple[str, ClientData] | None = None
        """What was read last, and for which settings."""

    def seconds(self, experiment: Experiment) -> float:
        """Of a round, with its share of evaluations."""
        kind = _kind(experiment)
        if kind not in self._known:
            data, normalise = self._read(experiment), experiment.data.normalise
            try:
                whole = cost.estimate(experiment, data=data, normalise=normalise)
            except Diverged:  # with a rate that will not be chosen, or one that is tried; it takes as long
                replies = replace(experiment.replies, on_bad_reply="drop")
                tried = replace(experiment, replies=replies)
                whole = cost.estimate(tried, data=data, normalise=normalise)
            self._known[kind] = whole["seconds"] / max(1, experiment.rounds)
        return self._known[kind]

    def _read(self, experiment: Experiment) -> ClientData:
        """The data of an experiment: reading them may take far longer than a few rounds."""
        settings = to_mapping(experiment)
        parts = ("seed", "data", "columns", "partition", "features", "expect", "objective")
        key = repr([settings.get(part) for part in parts])
        if self._data is None or self._data[0] != key:
            self._data = None  # two data sets need not fit into memory
            self._data = (key, load_data(experiment)[0])
        return self._data[1]


def _parts(group: Group, work: Work, device: str | None, measured: _Measured) -> Iterable[Part]:
    """The parts of a comparison."""
    plan, methods, _ = group.planned(device)
    runs = Runs(work.out / group.name)
    for method in methods:
        inputs = [plan.inputs(method, seed) for seed in plan.seeds(work.seeds, "compare")]
        stored = [runs.stored(each) for each in inputs]
        made = [[] if run is None else run.rounds for run in stored]
        played = [row_seconds(row) for rows in made for row in rows]
        each = sum(played) / len(played) if played else measured.seconds(inputs[0].experiment)
        left = sum(_rest(run, rows, group.rounds) for run, rows in zip(stored, made, strict=True))
        left += work.tried_rounds(group) if left else 0
        there = sum(run is not None and has_ended(run) for run in stored)
        yield Part(
            method.label, group.words, len(inputs) + work.trials, there, group.rounds, each, each * left
        )


def _rest(run: RunFolder | None, rows: Sequence[Any], rounds: int) -> int:
    """How many rounds of a run are still to be played."""
    return 0 if run is not None and has_ended(run) else max(0, rounds - len(rows))


def _kind(experiment: Experiment) -> str:
    """What the time of a round depends on; rates and the law of the classes are no part of it."""
    settings = to_mapping(experiment)
    parts = ("algorithm", "model", "models", "local", "cohort", "evaluate", "engine", "features")
    return repr([settings["data"], settings["rounds"], [settings.get(part) for part in parts]])
