"""A run goes on from its last checkpoint, or is read back where it is finished."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from sartor.data.clients import ClientData
from sartor.data.settings import OWN_DATA
from sartor.data.sources import Source
from sartor.engines import sharded as distributed
from sartor.errors import SartorError, SettingError
from sartor.model.networks import Factory
from sartor.model.objectives import Loss, Objective
from sartor.model.task import Task
from sartor.runs import checkpoint
from sartor.runs.checkpoint import Checkpoint
from sartor.runs.execute import carry_out
from sartor.runs.experiment import Imports, import_given
from sartor.runs.inputs import Model, gather_again
from sartor.runs.observers import Kept, Observer, check_observers
from sartor.runs.record import STATES, RunFolder, environment
from sartor.runs.result import Result
from sartor.runs.run import Run
from sartor.runs.setup import Opened, Setup, open_federation, set_up_everywhere

log = logging.getLogger(__name__)


def resume(
    path: Path | str,
    *,
    rounds: int | None = None,
    imports: Imports = (),
    data: Mapping[str, Any] | ClientData | Source | Dataset[Any] | None = None,
    model: Model | None = None,
    head: str | None = None,
    objective: Objective | Loss | None = None,
    models: Sequence[Mapping[str, Any]] | None = None,
    task: Task | Factory | None = None,
    own: Sequence[Task | Factory | None] = (),
    progress: bool | Observer = False,
    opened: Opened | None = None,
    observers: Sequence[Observer] = (),
    kept: Kept = Kept.ALL,
) -> Result:
    """Continue a run from its last checkpoint, to the same numbers as if it had never been interrupted.

    Code that the run imports is executed again, if it is the same; ``imports`` say where it lies now, if it
    was moved.

    ``rounds`` extends it to so many rounds. ``data``, ``model``, ``head``, ``objective`` and ``models`` are
    those that :func:`sartor.run` was given as Python objects, if any were; ``task`` and ``own`` (for
    ``[[models]]``) stand for a model that is a Task, or a Factory of one. A finished run that is not extended
    is read back and nothing is changed. ``observers`` are told what happens from now on.

    >>> import sartor
    >>> from tempfile import mkdtemp
    >>> folder = mkdtemp()
    >>> first = sartor.run("fedavg", data="digits", clients=3, rounds=1, out=folder)
    >>> len(resume(folder, rounds=3).rounds)
    3
    """
    check_observers(observers)
    import_given(imports)
    folder = RunFolder.open(path)
    distributed.join(folder.experiment.engine.device, folder.experiment.engine.timeout)
    writes = distributed.rank() == 0
    with folder.alone() if writes else nullcontext():
        experiment = folder.experiment
        if rounds is not None and rounds < experiment.rounds:
            raise SettingError(
                f"rounds: the run {folder.path} has {experiment.rounds} rounds; it can be extended, "
                f"not cut to {rounds}"
            )
        if rounds is not None and rounds > experiment.rounds:
            experiment = replace(experiment, rounds=rounds)
        finished = folder.finished and experiment.rounds == folder.experiment.rounds
        if data is None:
            check_here(folder)
        _compare_environments(folder)
        if task is not None and not isinstance(task, Task | Factory):
            raise SettingError("task: give a Task or a Factory, or a module as model")
        inputs = gather_again(experiment, data, model, head, objective, models)
        setup = set_up_everywhere(experiment, inputs.data, inputs.task or task, inputs.own or own)
        saved = distributed.together(lambda: checkpoint.latest(folder))
        check_data(saved, setup.data, folder)
        if finished:
            return _read_back(setup, folder, saved)
        done = -1 if saved is None else saved.round

        def cut_back() -> None:
            if writes:
                if experiment.rounds > folder.experiment.rounds:
                    folder.extend(experiment.rounds)
                folder.cut(done)
                checkpoint.forget_after(folder, done)

        distributed.together(cut_back)
        return carry_out(setup, folder, progress, saved, opened, observers, kept=kept)


def _read_back(setup: Setup, folder: RunFolder, saved: Checkpoint | None) -> Result:
    """The result of a finished run."""
    if saved is None:
        raise SartorError(f"{folder.path}: finished, but has no checkpoint; its files can be read one by one")
    federation = open_federation(setup.experiment, setup.task, setup.data)
    federation.states.keep_in(folder.path / STATES, continues=False)
    run = Run(setup, federation, folder)
    run.restore(saved, folder)
    run.final = run.models()
    return run.result(folder.summary)


def check_here(folder: RunFolder) -> None:
    """Refuse a run whose clients are at nodes: it can only be continued with them."""
    saved = checkpoint.latest(folder) if folder.experiment.data.name == OWN_DATA else None
    if saved is not None and "distant" in saved.federation(torch.device("cpu"))["plain"]:
        begun = f"let them join `sartor serve --resume {shlex.quote(str(folder.path))}`"
        done = "what was evaluated with them is in its files, which `sartor report` shows"
        raise SartorError(
            f"{folder.path}: its clients are at nodes, with their data and all that they keep; "
            f"{done if folder.finished else begun}"
        )


def check_data(saved: Checkpoint | None, data: ClientData, folder: RunFolder) -> None:
    """Refuse to go on with other data than those of the run."""
    if saved is not None and saved.data != data.hash:
        raise SartorError(
            f"{folder.path}: the data are not those the run was started with (hash {data.hash[:12]}, "
            f"then {saved.data[:12]}); put them back to continue it"
        )


def _compare_environments(folder: RunFolder) -> None:
    """Say so where numbers may differ in their last bits from those of the run so far."""
    then = folder.environment
    now = environment(then.get("device", "cpu"))
    for key in ("sartor", "torch", "numpy", "device_name"):
        if then.get(key) != now[key]:
            log.warning("%s: began with %s %s, continues with %s", folder.path, key, then.get(key), now[key])
