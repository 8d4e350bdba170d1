"""What a run works with: its data, its model, its method, and the federation of its clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm
from sartor.client.local import Batches
from sartor.data.clients import ClientData, prepare, relabel
from sartor.data.expect import check_expected, check_range
from sartor.data.named import read_data
from sartor.data.partitions import Partition, apply, make_partition
from sartor.data.public import read_public
from sartor.data.settings import OWN_DATA
from sartor.engines import choose_engine, federation_of, make_engine
from sartor.engines import sharded as distributed
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.federation.settings import FederationSettings
from sartor.model.groups import assign, build_groups
from sartor.model.networks import build_task
from sartor.model.task import Task
from sartor.runs.experiment import Experiment, code_of, fingerprint

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
    algorithm: Algorithm[Any, Any]
    task: Task
    data: ClientData
    partition: Partition | None
    """Where the data was partitioned for this run."""


def set_up_everywhere(
    experiment: Experiment, data: ClientData | None, task: Task | None, own: Sequence[Task | None] = ()
) -> Setup:
    """Set up at every process of the run; all of them must have the same before them."""
    distributed.join(experiment.engine.device, experiment.engine.timeout)
    setup = distributed.together(lambda: set_up(experiment, data=data, task=task, own=own))
    distributed.agree("experiment", fingerprint(setup.experiment))
    distributed.agree("imports", " ".join(code.sha256 for code in code_of(setup.experiment)))
    distributed.agree("data", setup.data.hash)
    return setup


def set_up(
    experiment: Experiment,
    *,
    data: ClientData | None = None,
    task: Task | None = None,
    own: Sequence[Task | None] = (),
) -> Setup:
    """Load or take the data, make the models, and see whether they fit together.

    ``own`` are given in Python for what some of ``[[models]]`` name.
    """
    if experiment.engine.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("engine.device = 'cuda': PyTorch sees no CUDA device here; take cpu")
    partition = None
    if data is None:
        data, partition = distributed.first_alone(lambda: load_data(experiment))
    if experiment.data.labels is not None:
        data = relabel(data, experiment.data.labels)
    data = with_public(data, experiment)
    check_expected(experiment.expect, data)
    if experiment.cohort.count > data.clients:
        raise SettingError(
            f"cohort.count: must be at most the {data.clients} clients, got {experiment.cohort.count}"
        )
    refuse_groups(experiment)
    shape = tuple(data.train.x.shape[1:])
    if task is None:
        task = build_task(experiment.model, shape, data.classes, experiment.seed)
    check_outputs(task, data)
    if experiment.models:
        of = assign(experiment.models, data.names)
        task = build_groups(task, experiment.models, of, shape, data.classes, experiment.seed, own)
        for each in task.groups.tasks if task.groups else ():
            check_outputs(each, data)
    algorithm = registered()[experiment.algorithm](experiment.hyper)
    experiment = resolve(experiment, algorithm, task, data)
    return Setup(experiment, algorithm, task, data, partition)


def with_public(data: ClientData, experiment: Experiment) -> ClientData:
    """The data with the public samples that the experiment names, which must be like the clients'."""
    x = public_samples(experiment)
    if x is None:
        return data
    if x.shape[1:] != data.train.x.shape[1:]:
        shapes = f"shape {list(x.shape[1:])}, those of clients {list(data.train.x.shape[1:])}"
        raise SettingError(f"public: its samples have {shapes}")
    return replace(data, public_x=x.to(data.train.x.dtype))


def public_samples(experiment: Experiment) -> torch.Tensor | None:
    """The public samples that an experiment names."""
    return read_public(
        experiment.public,
        experiment.seed,
        folder=experiment.data.folder,
        features=experiment.features.settings,
    )


def refuse_groups(experiment: Experiment) -> None:
    """Refuse clients with models of their own under a method that combines whole models."""
    if experiment.models and not registered()[experiment.algorithm].own_models:
        able = ", ".join(name for name, method in registered().items() if method.own_models)
        raise SettingError(
            f"models: {experiment.algorithm} combines whole models, so all clients need the same one; leave "
            f"[[models]] out, or take a method for clients with models of their own: {able}"
        )


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
    if settings.path is None and settings.name == OWN_DATA:
        raise SettingError(
            "data.name = 'own': the data was given in Python, or lies at nodes; pass it again as data=..., "
            "or let nodes join `sartor serve --resume`"
        )
    source = read_data(settings, experiment.seed)
    features = experiment.features.settings
    if isinstance(source, ClientData):
        data = prepare(source, features=features)
        check_range(experiment.expect, data)
        return prepare(data, normalise=settings.normalise), None
    if experiment.partition.file is not None:
        partition = Partition.load(experiment.partition.file)
    else:
        scheme = experiment.partition.settings
        partition = make_partition(source, scheme, settings.clients, experiment.seed, settings.validation)
    for note in partition.notes:
        log.warning("%s: %s", settings.name, note)
    data = apply(source, partition, features=features)
    check_range(experiment.expect, data)
    return prepare(data, normalise=settings.normalise), partition


def resolve(
    experiment: Experiment, algorithm: Algorithm[Any, Any], task: Task, data: ClientData
) -> Experiment:
    """The experiment with everything that was ``auto`` decided, so that a rerun decides the same."""
    engine = experiment.engine
    name = choose_engine(engine.name, task, engine.device, data.train.x, data.train.y)
    compiled = engine.compile
    if compiled == "auto":
        most = int(data.train.count.max())
        local = experiment.local
        steps = experiment.rounds * Batches("train", local.batch, local.most_epochs, local.steps).count(most)
        long = engine.device == "cuda" and name == "stacked" and steps >= COMPILE_STEPS
        compiled = "yes" if long else "no"
    buffers = experiment.model.buffers if experiment.model.buffers != "auto" else algorithm.buffers
    return replace(
        experiment,
        data=replace(experiment.data, labels=data.labels),
        engine=replace(engine, name=name, compile=compiled),
        model=replace(experiment.model, buffers=buffers),
    )


def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
    """The federation of a resolved experiment."""
    settings = federation_settings(experiment)
    return federation_of(task, make_engine(experiment.engine.name, task, data, settings), settings)


def federation_settings(experiment: Experiment) -> FederationSettings:
    """What a federation and its engine go by, of a resolved experiment; this is the one place that says."""
    engine, replies = experiment.engine, experiment.replies
    return FederationSettings(
        local=experiment.local,
        hyper=experiment.hyper,
        seed=experiment.seed,
        device=engine.device,
        buffers=experiment.model.buffers,
        evaluation_batch=experiment.evaluate.batch,
        conditions=Conditions(
            availability=experiment.availability.settings,
            delay=experiment.delay.settings,
            dropout=replies.dropout,
            deadline=replies.deadline,
            on_bad_reply=replies.on_bad_reply,
            largest_norm=replies.largest_norm,
            largest_ratio=replies.largest_ratio or 0.0,
            largest_weight=replies.largest_weight or 0.0,
        ),
        method=experiment.algorithm,
        states=engine.states,
        fetches_personal=experiment.evaluate.personal_models == "yes",
        precision=engine.precision,
        workers=engine.workers,
        chunk=engine.chunk,
        lanes=engine.lanes,
        compile=engine.compile == "yes",
        transforms=experiment.transforms,
    )
