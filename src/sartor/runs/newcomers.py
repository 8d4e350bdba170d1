"""What a run has learned, tried without training: on its own clients, or on newcomers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor import nests
from sartor.data.clients import ClientData, relabel
from sartor.data.moments import Moments
from sartor.data.preprocessing import Preprocessing
from sartor.data.proposal import FAR
from sartor.data.schema import NUMBERS, feature_names
from sartor.data.settings import OWN_DATA
from sartor.data.texts import TextColumn
from sartor.errors import SartorError, SettingError
from sartor.federation.attacks import AttackChoice, NoAttack
from sartor.federation.reduction import Mean
from sartor.federation.settings import AggregateChoice, Cohort
from sartor.model.groups import assign, regrouped
from sartor.model.networks import Factory
from sartor.model.task import Task
from sartor.runs import checkpoint
from sartor.runs.evaluation import CELLS, evaluate
from sartor.runs.experiment import anchored, import_named
from sartor.runs.record import CONFIG, STATES, RunFolder
from sartor.runs.resume import check_data, check_here
from sartor.runs.setup import (
    Setup,
    fitted,
    load_data,
    open_federation,
    refuse_untested,
    set_up,
    settled_for,
    with_public,
)

log = logging.getLogger(__name__)


def evaluate_run(
    path: Path | str,
    *,
    data: ClientData | str | Path | None = None,
    partition: str | Path | None = None,
    task: Task | Factory | None = None,
    own_models: Sequence[Task | Factory | None] = (),
) -> dict[str, Any]:
    """Evaluate a run's last checkpoint without training: its own clients, or newcomers.

    Newcomers are ``data``, of the form that the run's own had (a folder, a table, or prepared in Python), or
    a stored ``partition`` of the run's data set. They get their models as the method gives them to clients
    that never took part. The result has the same cells as a run's summary.
    """
    folder = RunFolder.open(path)
    experiment = folder.experiment
    saved = checkpoint.latest(folder)
    if saved is None:
        cure = f"sartor run {folder.path / CONFIG}" if folder.finished else f"sartor resume {folder.path}"
        raise SartorError(f"{folder.path}: has no checkpoint to evaluate; make one with: {cure}")
    if not isinstance(data, ClientData):
        check_here(folder)
    newcomers, own, like = _clients_to_evaluate(folder, data, partition, task)
    refuse_untested(newcomers)
    _refuse_others(newcomers, folder)
    if data is None and partition is None:
        check_data(saved, newcomers, folder)
    took_part = newcomers.hash == saved.data
    if not took_part:  # who is new attacks nobody, and sends nothing that a rule would be for
        nobody, mean = AttackChoice(settings=NoAttack()), AggregateChoice(settings=Mean())
        experiment = replace(experiment, attack=nobody, aggregate=mean)
    normalise = like is not None
    setup = set_up(
        replace(experiment, cohort=Cohort()), data=own, task=task, own=own_models, normalise=normalise
    )
    settled_for(setup.experiment.model, newcomers)  # refuses tokens and categories that it does not know
    newcomers = fitted(newcomers, setup.task, normalise=normalise, like=like)
    _check_newcomers(newcomers, setup)
    if not took_part:
        _question_columns(newcomers, setup.data)
    newcomers = with_public(newcomers, experiment)
    federation = open_federation(setup.experiment, _models_for(setup, newcomers), newcomers)
    federation.states.keep_in(folder.path / STATES, continues=False)
    algorithm = setup.algorithm
    server = saved.server(algorithm, algorithm.start(federation), federation.engine.device)
    state = saved.federation(federation.engine.device)
    if took_part:
        federation.restore(state, saved.states(federation.engine.homes))
    else:
        federation.buffers = state["buffers"].to(federation.engine.device) if "buffers" in state else None
        server = algorithm.welcome(server, federation)
    federation.round = saved.round
    cells = evaluate(algorithm, server, federation, setup.experiment.evaluate)
    last = {name: cells[name].summary() if name in cells else None for name in CELLS}
    return {
        "algorithm": experiment.algorithm,
        "run": str(folder.path),
        "rounds": saved.round,
        "newcomers": not took_part,
        "clients": newcomers.clients,
        "data": newcomers.name,
        "partition_hash": newcomers.hash,
        "headline": setup.experiment.evaluate.headline,
        "accuracy": {name: None if cell is None else cell["accuracy"] for name, cell in last.items()},
        "last": last,
    }


def _models_for(setup: Setup, newcomers: ClientData) -> Task:
    """The models of newcomers: those of the entries that they would have been in; else ``[model]``."""
    task = setup.task
    if task.groups is None or newcomers.names == setup.data.names:
        return task
    entries = task.groups.entries
    of = assign(setup.experiment.models, newcomers.names, newcomers=True)
    missing = sorted(set(of.tolist()) - set(entries))
    if missing:
        raise SettingError(
            "newcomers: some are in no entry of [[models]], and no client of the run was in none"
        )
    return regrouped(task, lambda _: np.searchsorted(entries, of))


def _clients_to_evaluate(
    folder: RunFolder,
    data: ClientData | str | Path | None,
    partition: str | Path | None,
    task: Task | Factory | None,
) -> tuple[ClientData, ClientData, ClientData | Mapping[str, Moments] | None]:
    """The clients asked for and the run's own, and by what both are normalised, where they are."""
    raw = folder.experiment
    objective = None if task is None else task.objective
    if isinstance(data, ClientData):
        data = relabel(data, raw.data.labels)
        if raw.data.name != OWN_DATA:
            return data, load_data(raw, objective)[0], None
        stored, own = folder.signature, data
        if data.classes is not None and stored["classes"] is not None:  # some may have no sample here
            own = replace(data, classes=stored["classes"])
            data = replace(data, classes=max(data.classes, stored["classes"]))
        if data.preprocessing.moments is not None:
            return data, own, None
        steps = {**stored["preprocessing"], "table": None, "features": None}
        return data, own, Preprocessing.from_mapping(steps).moments
    own, _ = load_data(raw, objective)
    new = own
    if data is not None:
        import_named(anchored({"data": {"path": str(data)}}, Path.cwd()))
        reader = own.preprocessing.table
        tokens = reader if isinstance(reader, TextColumn) else None
        new, _ = load_data(replace(raw, data=replace(raw.data, path=str(data))), objective, tokens)
        new = relabel(new, raw.data.labels, str(data))
    elif partition is not None:
        if raw.data.path is not None:
            raise SettingError("partition: the run is on own data, which have none; give such data instead")
        new, _ = load_data(replace(raw, partition=replace(raw.partition, file=str(partition))), objective)
    return new, own, own if raw.data.normalise else None


def _refuse_others(newcomers: ClientData, folder: RunFolder) -> None:
    """Refuse samples of another form than the run's, and texts that are numbered otherwise."""
    signature, train = folder.signature, newcomers.train
    for what, name, nest in (("samples", "x", train.x), ("targets", "y", train.y)):
        found = {path: list(leaf.shape[1:]) for path, leaf in nests.paths(nest, name).items()}
        wanted = {path: shape for path, (_, shape) in signature[name].items()}
        if found != wanted:
            raise SettingError(f"newcomers: {what} of {_shapes(found)}, the run's have {_shapes(wanted)}")
    reader = newcomers.preprocessing.table
    if not isinstance(reader, TextColumn):
        return
    stored = signature["preprocessing"]["table"] or {}
    if stored.get("known") is not None and list(reader.known or ()) != stored["known"]:
        raise SettingError(
            "newcomers: their texts are numbered by another vocabulary than the run's; read them with "
            "from_table(..., tokens=data.preprocessing.table), data being the run's"
        )


def _shapes(form: Mapping[str, list[int]]) -> str:
    """The shapes of a sample's leaves for a message."""
    if len(form) == 1:
        return f"shape {next(iter(form.values()))}"
    return ", ".join(f"{path} {shape}" for path, shape in form.items())


def _check_newcomers(newcomers: ClientData, setup: Setup) -> None:
    found, expected = newcomers.train.x, setup.data.train.x
    if nests.form(found) != nests.form(expected):
        raise SettingError(
            f"newcomers: samples of {nests.words(found)}, the run's have {nests.words(expected)}"
        )
    classes = setup.task.classes
    if classes is not None and newcomers.classes is not None and newcomers.classes > classes:
        raise SettingError(f"newcomers: {newcomers.classes} classes, the run's model knows {classes}")


def _question_columns(newcomers: ClientData, own: ClientData) -> None:
    """Say so where a column of newcomers' tables lies far from the run's: it may be another one."""
    columns = own.columns or ()
    names = tuple(feature_names(columns)) or own.features
    theirs, ours = (x.get("numbers") if isinstance(x, dict) else x for x in (newcomers.train.x, own.train.x))
    if names is None or theirs is None or ours is None or ours.dim() != 2 or ours.shape[1] != len(names):
        return
    deviation = ours.std(dim=0)
    apart = (theirs.mean(dim=0) - ours.mean(dim=0)).abs() / torch.where(deviation > 0, deviation, 1.0)
    numbers = {column.name for column in columns if column.kind in NUMBERS} or set(names)
    far = [name for name, way in zip(names, apart.tolist(), strict=True) if way > FAR and name in numbers]
    if far:
        log.warning(
            "%s: %s: the mean lies more than %d deviations from that of the run's clients; is it the column "
            "that it is called?",
            *(newcomers.name, ", ".join(far), FAR),
        )
