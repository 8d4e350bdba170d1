"""Runs of many experiments under one folder, where a run that was made earlier is not made again.

A run's folder is named ``<algorithm>-s<seed>-<fingerprint>`` after its experiment, with a number behind it
where that is taken. A finished run is used again, and one that was interrupted goes on, if its experiment,
its data, the code that it imports and the version of Sartor are the same. Runs of a model given in Python are
always made anew: nothing tells whether its code is the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sartor.algorithms.source import method_code
from sartor.data.clients import ClientData
from sartor.data.partitions import Partition
from sartor.data.schema import settles
from sartor.engines.lockstep import fit_together
from sartor.errors import DataError, Diverged, SartorError, SettingError
from sartor.kernels.device import free_bytes
from sartor.model.objectives import Objective
from sartor.runs.cadence import fixed
from sartor.runs.checkpoint import forget_after, latest
from sartor.runs.execute import execute, execute_setup
from sartor.runs.experiment import Experiment, code_of, fingerprint
from sartor.runs.inputs import Inputs
from sartor.runs.observers import Kept, Observer, check_observers
from sartor.runs.record import CONFIG, RunFolder, environment
from sartor.runs.resume import resume
from sartor.runs.setup import load_data, load_raw, set_up
from sartor.runs.together import execute_together, may_share, seeds_at_once
from sartor.studies.progress import Tally
from sartor.studies.workers import AGAIN

log = logging.getLogger(__name__)

LOST: Any = getattr(torch, "AcceleratorError", ())
"""After such an error a process can do nothing more on its GPU."""

REMEMBERED_MEMORY = 0.1
"""Data that runs share are kept while they take at most this share of the free memory."""


@dataclass(frozen=True)
class KeptRun:
    """A finished run, made now or earlier."""

    folder: Path
    experiment: Experiment
    reused: bool
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: dict[str, list[Any]]
    """The client rows of the last evaluation, as columns."""

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of the rounds that were evaluated."""
        return [row for row in self.rounds if "evaluation" in row]

    def cell(self, split: str) -> str:
        """The name of the main cell on a split: the personal model's where there is one, else the shared."""
        cells = self.evaluations[-1]["evaluation"]
        for kind in ("personal", "shared"):
            if f"{kind}_{split}" in cells:
                return f"{kind}_{split}"
        raise SartorError(f"{self.folder}: the run has evaluated no model on {split} data")

    @property
    def outcome(self) -> str:
        """In a word how it came about."""
        return "reused" if self.reused else "done"

    @property
    def score(self) -> str:
        """What models are judged by: the headline."""
        return str(self.summary["headline"])

    @property
    def sign(self) -> float:
        """1 where more of the score is better, else -1."""
        return 1.0 if self.summary["more_is_better"] else -1.0


@dataclass(frozen=True)
class Failure:
    """A run that came to no end, such as one whose loss grew beyond all bounds."""

    label: str
    algorithm: str
    seed: int
    message: str

    @property
    def outcome(self) -> str:
        """In words what came of it."""
        return f"failed: {self.message}"


class Remembered:
    """Loads data for one run after the other, and keeps them for others that have the same.

    For as long as a study goes on: files are not looked at again. Those of some seeds are kept, the last
    ones, as far as they take little of the free memory.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, tuple[ClientData, Partition | None]]] = []

    def __call__(
        self, experiment: Experiment, objective: Objective | None
    ) -> tuple[ClientData, Partition | None]:
        """As :func:`~sartor.runs.setup.load_data`."""
        key = (
            experiment.seed,
            experiment.data,
            experiment.columns,
            experiment.partition,
            experiment.features,
            experiment.objective if objective is None else objective,
            experiment.expect,
        )
        loaded = next((found for known, found in self._held if known == key), None)
        if loaded is None:
            loaded = load_data(experiment, objective)
            self._held.append((key, loaded))
            room = REMEMBERED_MEMORY * free_bytes(torch.device("cpu"))
            while self._held and sum(data.nbytes for _, (data, _) in self._held) > room:
                del self._held[0]
        return loaded


class Runs:
    """The runs under one folder. All experiments asked for differ in seed, algorithm and hyper-parameters."""

    def __init__(
        self,
        out: Path,
        tally: Tally | None = None,
        together: str = "auto",
        observers: Sequence[Observer] = (),
        kept: Kept = Kept.ALL,
        load: Remembered | None = None,
    ) -> None:
        check_observers(observers)
        if observers and together == "yes":
            raise SettingError(
                "together = 'yes': observers are told of one run after the other; leave one of them out"
            )
        if "MASTER_ADDR" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
            raise SartorError("many runs are made by one process; start them without torchrun")
        if out.exists() and not out.is_dir():
            raise SartorError(f"{out}: is a file; give a folder")
        if (out / CONFIG).exists():
            raise SartorError(f"{out}: holds a run ({CONFIG}); give another folder to hold many runs")
        self.out = out
        self.tally = Tally(0, 0, shown=False) if tally is None else tally
        """Who counts the runs and tells how they go."""
        self.observers = observers
        """Who is told of every run that is made."""
        self.together = "no" if observers else together
        self.kept = kept
        """What runs keep when they are finished."""
        self._load = load or Remembered()
        self._hashes: dict[int, str] = {}
        self._changed: set[tuple[str, str | None]] = set()
        self._made: dict[str, tuple[Path, SartorError | None]] = {}
        """What was made together with an earlier run, or elsewhere, and not yet asked for, by its key."""

    def get(self, inputs: Inputs, later: Iterable[Inputs] = ()) -> KeptRun:
        """The run of an experiment: an earlier one, or made now.

        ``later`` are the same experiment's other seeds that will be asked for next: those that are missing
        may be made together with this one.
        """
        inputs, later = _settled(inputs), map(_settled, later)
        experiment = inputs.experiment
        made = self._made.pop(key_of(inputs), None)
        if made is None:
            run = self.stored(inputs)
            failure = None if run is None else failure_of(run)
            if failure is not None:
                self.tally.found(experiment.rounds)
                raise Diverged(failure)
            if run is not None:
                self._tell_source(run, experiment.algorithm)
            if run is not None and run.finished:
                self._tell_stop(run, experiment)
                self.tally.found(experiment.rounds)
                return _read(run, experiment, reused=True)
            with self.tally.making(experiment.rounds):
                if run is None:
                    made = self._make(inputs, self._folder(inputs), later)
                else:
                    told: Any = {"progress": self._shown, "observers": self.observers, "kept": self.kept}
                    resume(run.path, data=inputs.data, **told)
                    made = run.path, None
        folder, error = made
        if error is not None:
            raise error
        run = RunFolder.open(folder)
        self._tidy(run)
        return _read(run, experiment, reused=False)

    def _tidy(self, run: RunFolder) -> None:
        """Leave of a run what is wanted of it when it has come to its end."""
        if self.kept is not Kept.ALL:
            forget_after(run, -1)

    def aside(self) -> Runs:
        """The same runs, for who looks at what was made before it is asked for; nobody is told."""
        runs = Runs(self.out, kept=self.kept)
        runs._made = dict(self._made)
        return runs

    def note(self, key: str, folder: Path, error: SartorError | None) -> None:
        """Another process has made a run, or has failed to."""
        self._made[key] = (folder, error)

    def stored(self, inputs: Inputs) -> RunFolder | None:
        """The run of an experiment that was made or begun earlier, if there is one."""
        folder = self._folder(_settled(inputs))
        return None if RunFolder.is_free(folder) else RunFolder.open(folder)

    def finished(self, experiments: Iterable[Inputs]) -> bool:
        """Whether the runs of all these experiments are there, to their end, be it a failure."""
        return all(run is not None and has_ended(run) for run in map(self.stored, experiments))

    @property
    def _shown(self) -> Observer | bool:
        return self.tally if self.tally.shown else False

    def attempt(self, inputs: Inputs, label: str, later: Iterable[Inputs] = ()) -> KeptRun | Failure:
        """:meth:`get`, or how the run failed: a fault of one method is no reason not to try the others.

        What the settings or the data are at fault for is raised, and so is that memory ran out, or that the
        device is lost, on which all others would fail as well.
        """
        try:
            return self.get(inputs, later)
        except Diverged as error:
            run = self.stored(inputs)
            if run is not None:
                self._tidy(run)
            message = str(error)
        except (SettingError, DataError, MemoryError, torch.OutOfMemoryError):
            raise
        except SartorError as error:
            message = str(error)
        except Exception as error:
            log.exception("%s, seed %d, failed", label, inputs.experiment.seed)
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, LOST):
                who = f"{label}, seed {inputs.experiment.seed}"
                raise SartorError(
                    f"{who}: the device cannot be used any more ({message}); {AGAIN}"
                ) from error
        return Failure(label, inputs.experiment.algorithm, inputs.experiment.seed, message)

    def _make(self, inputs: Inputs, folder: Path, later: Iterable[Inputs]) -> tuple[Path, SartorError | None]:
        """Make a run, and other seeds with it where that is faster."""
        if self.together == "no" or not may_share(inputs.experiment):
            given: Any = {"data": inputs.data, "task": inputs.task, "own": inputs.own}
            told: Any = {"progress": self._shown, "observers": self.observers, "kept": self.kept}
            execute(inputs.experiment, **given, out=folder, **told, load=self._load)
            return folder, None
        setups = [set_up(inputs.experiment, data=inputs.data, task=inputs.task, load=self._load)]
        missing = ((other, place) for other in later if RunFolder.is_free(place := self._folder(other)))
        wanted = [(inputs, folder), *islice(missing, seeds_at_once(setups[0], self.together) - 1)]
        setups += [
            set_up(each.experiment, data=each.data, task=each.task, load=self._load) for each, _ in wanted[1:]
        ]
        if len(setups) == 1 or not fit_together([(setup.task, setup.data) for setup in setups]):
            execute_setup(setups[0], out=folder, progress=self._shown, kept=self.kept)
            return folder, None
        self.tally.together(len(setups))
        places = [place for _, place in wanted]
        outcomes = execute_together(setups, places, progress=self._shown, kept=self.kept)
        for (each, place), outcome in zip(wanted, outcomes, strict=True):
            error = outcome if isinstance(outcome, SartorError) else None
            self._made[key_of(each)] = (place, error)
        return self._made.pop(key_of(inputs))

    def _folder(self, inputs: Inputs) -> Path:
        """The folder that holds the run of an experiment, finished or not, or the one to make it in."""
        for folder in self._candidates(inputs):
            if RunFolder.is_free(folder) or (
                inputs.task is None and not inputs.own and self._is_same(folder, inputs)
            ):
                return folder
        raise AssertionError("folder names do not end")

    def _candidates(self, inputs: Inputs) -> Iterator[Path]:
        """The folders a run of the experiment may lie in, in the order they are taken."""
        name = name_of(inputs)
        yield self.out / name
        number = 2
        while True:
            yield self.out / f"{name}-{number}"
            number += 1

    def _is_same(self, folder: Path, inputs: Inputs) -> bool:
        """Whether a folder holds the run of this experiment, data and version, finished or not."""
        try:
            run = RunFolder.open(folder)
            if self._other_code(run, inputs.experiment):
                return False
            stored = run.experiment
            if run.environment["sartor"] != environment()["sartor"]:
                return False
            if fingerprint(_decided(inputs.experiment, stored)) != fingerprint(stored):
                return False
            if run.finished:
                return bool(run.summary["partition_hash"] == self._hash(inputs))
            if run.diverged is not None:
                return bool(run.diverged["data"] == self._hash(inputs))
            saved = latest(run)
        except (SartorError, KeyError):  # damaged, or of settings that are no more
            return False
        return saved is None or saved.data == self._hash(inputs)

    def _other_code(self, run: RunFolder, experiment: Experiment) -> bool:
        """Whether a run was made with other code than is imported now; each such change is told once."""
        then = {code.name: code.sha256 for code in run.imports}
        now = {code.name: code.sha256 for code in code_of(experiment)}
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) != now.get(name) and (name, then.get(name)) not in self._changed:
                self._changed.add((name, then.get(name)))
                what = "has changed since" if name in then and name in now else "was not imported in both"
                log.warning("%s: runs with it are made anew, as it %s, as in %s", name, what, run.path)
        return then != now

    def _tell_source(self, run: RunFolder, method: str) -> None:
        """Say once of a method of ours that it has changed since a run that is used again."""
        then = run.environment.get("method")
        if then not in (None, method_code(method)) and (method, None) not in self._changed:
            self._changed.add((method, None))
            log.warning(
                "%s: has changed since %s, which is used again; remove that to run anew", method, run.path
            )

    def _tell_stop(self, run: RunFolder, experiment: Experiment) -> None:
        """Say of a run that is used again that an observer ended it early, where nobody observes now."""
        stopped = run.summary["stopped"]
        by_settings = experiment.stop.wanted or experiment.privacy.mode is not None
        if stopped and not by_settings and not self.observers:
            when = f"round {stopped['round']} of {experiment.rounds}"
            words = "%s: an observer stopped it in %s (%s); it is used as it is, remove it to run anew"
            log.warning(words, run.path, when, stopped["reason"])

    def _hash(self, inputs: Inputs) -> str:
        """The hash of the data, read once for each seed: files may have changed since a run."""
        if inputs.data is not None:
            return inputs.data.hash
        seed = inputs.experiment.seed
        if seed not in self._hashes:
            self._hashes[seed] = load_raw(inputs.experiment)[0].hash
        return self._hashes[seed]


def failure_of(run: RunFolder) -> str | None:
    """How a run failed that is not worth another try: not one whose method has changed since."""
    found = run.diverged
    same = found is not None and run.environment.get("method") == method_code(run.experiment.algorithm)
    return str(found["message"]) if found is not None and same else None


def has_ended(run: RunFolder) -> bool:
    """Whether nothing is left to be done of a run: it is finished, or has failed for good."""
    return run.finished or failure_of(run) is not None


def name_of(inputs: Inputs) -> str:
    """What the folder of a run is called."""
    return f"{inputs.experiment.algorithm}-s{inputs.experiment.seed}-{key_of(inputs)[:12]}"


def key_of(inputs: Inputs) -> str:
    """What tells a run of a study from all others under its folder."""
    return fingerprint(_settled(inputs).experiment)


def _settled(inputs: Inputs) -> Inputs:
    """The inputs with the rounds that are evaluated said: all runs of a study have the same ones."""
    experiment = inputs.experiment
    every = fixed(experiment.evaluate.every, experiment.rounds, stops=experiment.stop.wanted)
    return replace(inputs, experiment=replace(experiment, evaluate=replace(experiment.evaluate, every=every)))


def _decided(asked: Experiment, stored: Experiment) -> Experiment:
    """The experiment with what it leaves to ``auto`` decided as a stored run of it decided."""
    engine, model = asked.engine, asked.model
    decided = {
        name: getattr(stored.engine, name)
        for name in ("name", "way", "otherwise")
        if getattr(engine, name) == "auto"
    }
    engine = replace(engine, **decided)
    if model.buffers == "auto":
        model = replace(model, buffers=stored.model.buffers)
    data = asked.data if asked.data.labels is not None else replace(asked.data, labels=stored.data.labels)
    if data.feature_columns is None:
        data = replace(data, feature_columns=stored.data.feature_columns)
    columns = stored.columns if settles(asked.columns, stored.columns) else asked.columns
    evaluate = asked.evaluate
    if evaluate.headline is None:
        evaluate = replace(evaluate, headline=stored.evaluate.headline)
    return replace(asked, data=data, engine=engine, model=model, evaluate=evaluate, columns=columns)


def _read(run: RunFolder, experiment: Experiment, reused: bool) -> KeptRun:
    """What a finished run has stored."""
    columns = run.clients
    last = max(columns["round"])
    rows = [row for row, round in enumerate(columns["round"]) if round == last]
    clients = {name: [values[row] for row in rows] for name, values in columns.items()}
    return KeptRun(run.path, experiment, reused, run.summary, run.rounds, clients)
