"""What a run works with: its data, its model, its method, and the federation of its clients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm
from sartor.client.local import Batches
from sartor.data.clients import ClientData, prepare
from sartor.data.loaders import from_folder, from_table
from sartor.data.partitions import Partition, apply, make_partition
from sartor.data.settings import OWN_DATA
from sartor.data.sources import load_source
from sartor.engines import choose_engine, make_federation
from sartor.engines import sharded as distributed
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.model.networks import make_task
from sartor.model.task import Task
from sartor.runs.experiment import Experiment, fingerprint

log = logging.getLogger(__name__)


COMPILE_STEPS = 100_000
"""On CUDA ``engine.compile = auto`` compiles runs whose clients take at least so many steps in all.

Measured on an H200 for four models: compiling takes 10 to 20 seconds and then saves 0.06 to 0.4 ms a step.
"""

Opened = Callable[[Experiment, Task, ClientData], Federation]
"""What opens the federation of a resolved experiment."""


@dataclass(frozen=True)
class Setup:
    """What a run works with."""

    experiment: Experiment
    """With everything that was ``auto`` decided."""
    algorithm: Algorithm
    task: Task
    data: ClientData
    partition: Partition | None
    """Where the data was partitioned for this run."""


def set_up_everywhere(experiment: Experiment, data: ClientData | None, task: Task | None) -> Setup:
    """Set up at every process of the run; all of them must have the same before them."""
    distributed.join(experiment.engine.device, experiment.engine.timeout)
    setup = distributed.together(lambda: set_up(experiment, data=data, task=task))
    distributed.agree("experiment", fingerprint(setup.experiment))
    distributed.agree("data", setup.data.hash)
    return setup


def set_up(experiment: Experiment, *, data: ClientData | None = None, task: Task | None = None) -> Setup:
    """Load or take the data, make the model, and see whether they fit together."""
    if experiment.engine.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("engine.device = 'cuda': PyTorch sees no CUDA device here; take cpu")
    partition = None
    if data is None:
        data, partition = distributed.first_alone(lambda: load_data(experiment))
    if experiment.cohort.count > data.clients:
        raise SettingError(
            f"cohort.count: must be at most the {data.clients} clients, got {experiment.cohort.count}"
        )
    if task is None:
        shape = tuple(data.train.x.shape[1:])
        task = make_task(
            experiment.model.name, experiment.model.settings, shape, data.classes, experiment.seed
        )
    check_outputs(task, data)
    algorithm = registered()[experiment.algorithm](experiment.hyper)
    experiment = resolve(experiment, algorithm, task, data)
    return Setup(experiment, algorithm, task, data, partition)


def check_outputs(task: Task, data: ClientData) -> None:
    """Refuse a model that cannot take these samples, or that has fewer outputs than the data has classes."""
    x = data.train.x[:1].cpu()
    try:
        outputs = task.outputs(task.initial(), x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingError(
            f"model {task.name}: cannot take samples of shape {list(x.shape[1:])}: {reason}"
        ) from error
    if task.classes is not None and outputs.shape[1:] < (task.classes,):
        found = f"outputs of shape {list(outputs.shape[1:])}"
        raise SettingError(
            f"model {task.name}: {found} for {task.classes} classes; it needs one output per class"
        )


def load_data(experiment: Experiment) -> tuple[ClientData, Partition | None]:
    """The data an experiment names, with the partition that was made or read for it."""
    settings = experiment.data
    if settings.path is not None:
        return _own_data(experiment), None
    if settings.name == OWN_DATA:
        raise SettingError("data.name = 'own': the data was given in Python; pass it again as data=...")
    source = load_source(settings.name, settings.folder)
    if experiment.partition.file is not None:
        partition = Partition.load(experiment.partition.file)
    else:
        scheme = experiment.partition.settings
        partition = make_partition(source, scheme, settings.clients, experiment.seed, settings.validation)
    for note in partition.notes:
        log.warning("%s: %s", settings.name, note)
    return apply(
        source, partition, normalise=settings.normalise, features=experiment.features.settings
    ), partition


def _own_data(experiment: Experiment) -> ClientData:
    settings = experiment.data
    path = Path(str(settings.path))
    options: dict[str, Any] = {"validation_fraction": settings.validation, "seed": experiment.seed}
    if path.is_dir():
        data = from_folder(path, **options)
    elif settings.client_column is None or settings.label_column is None:
        raise SettingError("data.path: a table needs data.client_column and data.label_column too")
    else:
        data = from_table(path, settings.client_column, settings.label_column, **options)
    return prepare(data, normalise=settings.normalise, features=experiment.features.settings)


def resolve(experiment: Experiment, algorithm: Algorithm, task: Task, data: ClientData) -> Experiment:
    """The experiment with everything that was ``auto`` decided, so that a rerun decides the same."""
    engine = experiment.engine
    name = choose_engine(engine.name, task, engine.device, data.train.x, data.train.y)
    compiled = engine.compile
    if compiled == "auto":
        most = int(data.train.count.max())
        local = experiment.local
        steps = experiment.rounds * Batches("train", local.batch, local.epochs, local.steps).count(most)
        long = engine.device == "cuda" and name == "stacked" and steps >= COMPILE_STEPS
        compiled = "yes" if long else "no"
    buffers = experiment.model.buffers if experiment.model.buffers != "auto" else algorithm.buffers
    return replace(
        experiment,
        engine=replace(engine, name=name, compile=compiled),
        model=replace(experiment.model, buffers=buffers),
    )


def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
    """The federation of a resolved experiment."""
    return make_federation(experiment.engine.name, task, data, **_federation_settings(experiment))


def _federation_settings(experiment: Experiment) -> dict[str, Any]:
    engine = experiment.engine
    own: dict[str, dict[str, Any]] = {
        "loop": {"workers": engine.workers},
        "stacked": {"chunk": engine.chunk, "lanes": engine.lanes, "compile": engine.compile == "yes"},
    }
    return {
        "local": experiment.local,
        "hyper": experiment.hyper,
        "seed": experiment.seed,
        "device": engine.device,
        "buffers": experiment.model.buffers,
        "evaluation_batch": experiment.evaluate.batch,
        "states": engine.states,
        "precision": engine.precision,
        "method": experiment.algorithm,
        "conditions": Conditions(
            availability=experiment.availability.settings,
            delay=experiment.delay.settings,
            dropout=experiment.replies.dropout,
            deadline=experiment.replies.deadline,
            on_bad_reply=experiment.replies.on_bad_reply,
            largest_norm=experiment.replies.largest_norm,
        ),
        **own[engine.name],
    }
