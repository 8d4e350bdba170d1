"""What a run works with: its data, its model, its method, and the federation of its clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from sartor import nests, random
from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm
from sartor.data.clients import SPLITS, ClientData, LazySplit, prepare, relabel
from sartor.data.download import user_cache
from sartor.data.expect import check_expected, check_range
from sartor.data.moments import Moments
from sartor.data.named import decides_clients, read_data
from sartor.data.partitions import Partition, apply, make_partition
from sartor.data.preprocessing import Preprocessing
from sartor.data.public import read_public
from sartor.data.samples import is_class
from sartor.data.settings import OWN_DATA, Data
from sartor.data.sources import Source
from sartor.data.tables import blank
from sartor.data.texts import TextColumn
from sartor.engines import choose_engine, federation_of, make_engine
from sartor.engines import sharded as distributed
from sartor.engines.ways import choose_way
from sartor.errors import DataError, SettingError
from sartor.federation import Federation
from sartor.federation.attacks import Attack
from sartor.federation.clock import Conditions
from sartor.federation.reduction import Mean, needs_selection
from sartor.federation.settings import FederationSettings
from sartor.kernels.ahead import begin
from sartor.memory import free_memory
from sartor.model.groups import assign, build_groups
from sartor.model.networks import Factory, ModelChoice, build_task, check_told, settled
from sartor.model.objectives import Objective, chosen_objective
from sartor.model.task import Task
from sartor.runs.experiment import Experiment, code_of, fingerprint, from_mapping
from sartor.runs.metrics import Measured, measured
from sartor.runs.outputs import values_of
from sartor.runs.protection import refuse_buffers, refuse_unprotected, settled_privacy
from sartor.runs.settings import AUTO

log = logging.getLogger(__name__)

COUNT_BYTES = 8
"""Of a number that clients have counted."""
Opened = Callable[[Experiment, Task, ClientData], Federation]
"""What opens the federation of a resolved experiment."""
Loading = Callable[[Experiment, Objective | None], tuple[ClientData, Partition | None]]
"""What loads the data an experiment names, as :func:`load_data` does."""


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
    experiment: Experiment,
    data: ClientData | None,
    task: Task | Factory | None,
    own: Sequence[Task | Factory | None] = (),
    load: Loading | None = None,
) -> Setup:
    """Set up at every process of the run; all of them must have the same before them."""
    distributed.join(experiment.engine.device, experiment.engine.timeout)
    setup = distributed.together(lambda: set_up(experiment, data=data, task=task, own=own, load=load))
    distributed.agree("experiment", fingerprint(setup.experiment))
    distributed.agree("imports", " ".join(code.sha256 for code in code_of(setup.experiment)))
    distributed.agree("data", setup.data.hash)
    return setup


def set_up(
    experiment: Experiment,
    *,
    data: ClientData | None = None,
    task: Task | Factory | None = None,
    own: Sequence[Task | Factory | None] = (),
    normalise: bool | None = None,
    load: Loading | None = None,
) -> Setup:
    """Load or take the data, make the models, and see whether they fit together.

    ``own`` are given in Python for what some of ``[[models]]`` name. Data that are given in place of others
    are taken as they are, unless ``normalise`` says otherwise. ``load`` stands in for :func:`load_data`.
    """
    if normalise is None:
        plain = data is None or (data.preprocessing.moments is None and experiment.data.name == OWN_DATA)
        normalise = experiment.data.normalise and plain
    check_device(experiment)
    begin(torch.device(experiment.engine.device))  # while data are read
    partition = None
    if data is None:
        objective = None if task is None else task.objective
        data, partition = distributed.first_alone(lambda: (load or load_data)(experiment, objective))
        if partition is None:
            experiment = undivided(experiment, data.clients)
    refuse_untested(data)
    if experiment.data.labels is not None:
        data = relabel(data, experiment.data.labels)
    check_expected(experiment.expect, data)
    if experiment.cohort.count > data.clients:
        raise SettingError(
            f"cohort.count: must be at most the {data.clients} clients, got {experiment.cohort.count}"
        )
    algorithm = checked_method(experiment)
    if task is None:
        objective = chosen_objective(experiment.objective)
        x, y = data.train.x, data.train.y
        experiment = replace(experiment, model=settled_for(experiment.model, data))
        task = build_task(experiment.model, x, y, data.classes, experiment.seed, objective)
    elif isinstance(task, Factory):
        task = task.task(data.train.x, data.train.y, data.classes, experiment.seed)
    task = task.in_precision(experiment.local.precision)
    data = fitted(data, task, normalise=normalise)
    check_targets(data, task)
    task = task.suited(data.train.x, data.train.y, data.classes)
    if experiment.models:
        of, x, y = assign(experiment.models, data.names), data.train.x, data.train.y
        task = build_groups(task, experiment.models, of, x, y, data.classes, experiment.seed, own)
    held = data.test.count.sum() == nests.length(data.test.y)  # else samples are elsewhere
    if experiment.evaluate.by is not None and held:
        values_of(data, experiment.evaluate.by, data.test)  # what cannot be is said before the run
    data = with_public(data, experiment)
    experiment.aggregate.settings.check(experiment.cohort.size(data.clients))
    experiment, data = attacked(experiment, data)
    experiment = resolve(experiment, algorithm, task, data)
    return Setup(experiment, algorithm, task, data, partition)


def refuse_untested(data: ClientData) -> None:
    """Refuse clients of whom none has a test sample; a node of a federation may have such."""
    if not data.test.count.sum():
        raise DataError(f"{data.name}: no client has a test sample; give each client at least two samples")


def check_device(experiment: Experiment) -> None:
    """Refuse a device that is not there."""
    if experiment.engine.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("engine.device = 'cuda': PyTorch sees no CUDA device here; take cpu")


def checked_method(experiment: Experiment) -> Algorithm[Any, Any]:
    """The method, unless the experiment asks for what it cannot do, whatever the data are."""
    refuse_groups(experiment)
    algorithm = registered()[experiment.algorithm](experiment.hyper)
    algorithm.check(experiment.local)
    refuse_unprotected(experiment, algorithm)
    refuse_rule(experiment)
    return algorithm


def undivided(experiment: Experiment, clients: int) -> Experiment:
    """The experiment without what says how to divide samples, which are those of clients already.

    It may stand in a file that is for other data too.
    """
    said = said_of_division(experiment, clients)
    if not said:
        return experiment
    log.warning("%s: left out, as the samples are divided among %d clients already", ", ".join(said), clients)
    usual = from_mapping({"algorithm": experiment.algorithm}).partition
    return replace(experiment, partition=usual, data=replace(experiment.data, clients=clients))


def said_of_division(experiment: Experiment, clients: int) -> list[str]:
    """What says how to divide the samples of so many clients; defaults may be stated."""
    said = [
        f"partition.{field.name}"
        for part in (experiment.partition, experiment.partition.settings)
        for field in fields(part)
        if field.name != "settings" and getattr(part, field.name) != field.default
    ]
    if experiment.data.clients not in (Data.clients, clients) and not decides_clients(experiment.data):
        said.append(f"data.clients = {experiment.data.clients}")
    return said


def settled_for(choice: ModelChoice, data: ClientData) -> ModelChoice:
    """The network with what all samples say of its settings that were left open."""
    if isinstance(data.train, LazySplit):
        check_told(choice, "samples are fetched when they are needed")
    samples = [getattr(data, name).x for name in SPLITS if getattr(data, name) is not None]
    if data.columns is not None:  # a schema knows more categories than may occur
        samples.append(blank(data.columns))
    return settled(choice, samples, data.train.y)


def with_public(data: ClientData, experiment: Experiment) -> ClientData:
    """The data with the public samples that the experiment names, which must be like the clients'."""
    x = public_samples(experiment)
    if x is None:
        return data
    if not isinstance(data.train.x, torch.Tensor):
        told = f"those of clients are {nests.words(data.train.x)}"
        raise SettingError(f"public: its samples are one array each, {told}; leave [public] out")
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


def attacked(experiment: Experiment, data: ClientData) -> tuple[Experiment, ClientData]:
    """The experiment with its attackers named, and the data with what they train on, where it is changed."""
    choice = experiment.attack
    choice.check()
    attackers = choice.who(data.names, experiment.seed, strict=True)
    if choice.file is not None:  # the file may be another by the next time
        choice = replace(choice, file=None, clients=tuple(data.names[number] for number in attackers))
    attack: Attack = choice.settings
    if attack.on_data and len(attackers):
        train = data.train
        if isinstance(train, LazySplit):
            raise SettingError(
                f"attack.name = {choice.name!r}: changes training samples, which are fetched when they are "
                "needed here; take an attack on replies"
            )
        if not is_class(train.y):
            raise SettingError(f"attack.name = {choice.name!r}: changes labels, and the data have no classes")
        attack = attack.settled(train.x)
        choice = replace(choice, settings=attack)
        data = poisoned(data, attack, attackers, experiment.seed)
    return replace(experiment, attack=choice), data


def poisoned(data: ClientData, attack: Attack, attackers: np.ndarray, seed: int) -> ClientData:
    """The data with what attackers train on in place of their samples."""
    train, stream = data.train, random.stream(seed, "poison")
    x, y = nests.mapped(torch.clone, train.x), nests.mapped(torch.clone, train.y)
    for number in attackers.tolist():
        own = slice(int(train.start[number]), int(train.start[number] + train.count[number]))
        key = random.fold(stream, number)
        changed = attack.poison(key, nests.rows(x, own), nests.rows(y, own), data.classes)
        for whole, part in zip(nests.leaves((x, y)), nests.leaves(changed), strict=True):
            whole[own] = part
    return replace(data, train=replace(train, x=x, y=y))


def refuse_rule(experiment: Experiment) -> None:
    """Refuse a rule in place of means that the method has no place for."""
    rule, method = experiment.aggregate.settings, experiment.algorithm
    if rule == Mean():
        return
    reduces = registered()[method].reduces
    if reduces == "nothing":
        raise SettingError(
            f"aggregate.name = {experiment.aggregate.name!r}: {method} takes no mean of replies and has no "
            "place for it; leave [aggregate] out, or take another method"
        )
    if reduces == "rows" and not rule.selects:
        raise SettingError(needs_selection(rule, method))


def fitted(
    data: ClientData,
    task: Task,
    *,
    normalise: bool = False,
    like: ClientData | Mapping[str, Moments] | None = None,
) -> ClientData:
    """The samples as a model takes them: floats in its type, normalised if wanted, and whole numbers.

    Whole numbers stay what they are where the model takes them so, as an embedding does; one that takes
    floats alone gets them as numbers like others. ``like`` is as for :func:`~sartor.data.clients.prepare`.
    """
    numbers, dtype = tuple(sorted(task.numbers(data.train.x))), str(task.dtype).removeprefix("torch.")
    if numbers:
        floats = Preprocessing(numbers=numbers, dtype=dtype)
        data = data.preprocessed(floats.as_floats, numbers=numbers, dtype=dtype)
    data = prepare(data, normalise=normalise, like=like)
    leaves = nests.leaves((data.train.x, data.train.y))
    if all(leaf.dtype == task.dtype for leaf in leaves if leaf.is_floating_point()):
        return data
    # A number beyond the model's type becomes inf, which would only be seen as a loss that is not finite.
    _check_finite(data, task.dtype)
    noted = replace(data.preprocessing, dtype=dtype)
    return replace(data.map(task.typed, task.typed), preprocessing=noted)


def _check_finite(data: ClientData, dtype: torch.dtype) -> None:
    """Refuse numbers that a model's type cannot hold."""
    most = torch.finfo(dtype).max
    for name in SPLITS:
        split = getattr(data, name)
        for path, leaf in () if split is None else nests.paths((split.x, split.y), "").items():
            if leaf.is_floating_point() and leaf.numel() and float(leaf.abs().max()) > most:
                row = int((leaf.abs() > most).reshape(len(leaf), -1).any(1).nonzero()[0])
                client, sample = split.owner(row)
                raise DataError(
                    f"client {data.names[client]}, {name}: {_leaf_name(path)} has a value that is not finite "
                    f"in {str(dtype).removeprefix('torch.')}, first in sample {sample}"
                )


def _leaf_name(path: str) -> str:
    """The path of a leaf of (inputs, targets)."""
    return {"[0]": "x", "[1]": "y"}[path[:3]] + path[3:]


def check_targets(data: ClientData, task: Task) -> None:
    """Refuse a class that the task does not know, with the client and the sample that has it."""
    if task.classes is None or data.classes is None or data.classes <= task.classes:
        return
    for name in SPLITS:
        split = getattr(data, name)
        if split is None or not is_class(split.y) or not len(split.y) or int(split.y.max()) < task.classes:
            continue
        client, sample = split.owner(int((split.y >= task.classes).nonzero()[0]))
        raise DataError(
            f"client {data.names[client]}, {name}: label {int(split.y.max())} in sample {sample}, but model "
            f"{task.name} knows {task.classes} classes; give it as many, or correct the label"
        )


def load_data(
    experiment: Experiment, objective: Objective | None = None, tokens: TextColumn | None = None
) -> tuple[ClientData, Partition | None]:
    """The data an experiment names, not normalised, with the partition that was made or read for it.

    ``objective`` stands in place of the experiment's; ``tokens`` is as for
    :func:`~sartor.data.named.read_data`.
    """
    data, partition = load_raw(experiment, objective, tokens)
    data = prepare(data, features=experiment.features.settings)
    check_range(experiment.expect, data)
    return data, partition


def load_raw(
    experiment: Experiment, objective: Objective | None = None, tokens: TextColumn | None = None
) -> tuple[ClientData, Partition | None]:
    """The same without features, which take long to compute: who the clients are does not depend on them."""
    settings = experiment.data
    targets = (objective or chosen_objective(experiment.objective)).targets
    if settings.path is None and settings.name == OWN_DATA:
        raise SettingError(
            "data.name = 'own': the data was given in Python, or lies at nodes; pass it again as data=..., "
            "or let nodes join `sartor serve --resume`"
        )
    source = read_data(settings, experiment.seed, targets, experiment.columns, tokens)
    return (source, None) if isinstance(source, ClientData) else divided(source, experiment)


def divided(source: Source, experiment: Experiment) -> tuple[ClientData, Partition]:
    """A source as the experiment divides it among clients."""
    share, scheme, file = (getattr(experiment.partition, key) for key in ("test_share", "settings", "file"))
    if share is not None and (hasattr(scheme, "test_fraction") or getattr(scheme, "test", None)):
        raise SettingError(
            f"partition.test_share: partition {experiment.partition.name} has a test size of its own; "
            "leave one of them out"
        )
    stored = None if file is None else Partition.load(file)
    whole = getattr(scheme, "whole", False) if stored is None else stored.train_total == sum(source.sizes)
    if share is not None or whole:
        source = source.merged()
    partition = stored or make_partition(
        source,
        scheme,
        experiment.data.clients,
        experiment.seed,
        experiment.data.validation,
        0.2 if share is None else share,
        leaf=experiment.partition.leaf,
    )
    for note in partition.notes:
        log.warning("%s: %s", source.name, note)
    return apply(source, partition), partition


def resolve(
    experiment: Experiment, algorithm: Algorithm[Any, Any], task: Task, data: ClientData
) -> Experiment:
    """The experiment with everything that was ``auto`` decided, so that a rerun decides the same."""
    engine = experiment.engine
    if engine.way == "auto" and distributed.world() > 1:  # all its processes do the same
        engine = replace(engine, way="together")
    x, y = data.train.x, data.train.y
    name = choose_engine(engine.name, task, engine.device, x, y, engine.way)
    otherwise = engine.otherwise
    if otherwise == "auto":
        otherwise = "loop" if engine.name == "auto" else "error"
    what = measured(
        task.objective, task.width, experiment.evaluate.metrics, experiment.evaluate.headline, _largest(data)
    )
    refuse_matrices(what, task.width, experiment.evaluate.clients or data.clients, data)
    features = experiment.data.feature_columns if experiment.data.path is None else data.features
    buffers = experiment.model.buffers if experiment.model.buffers != "auto" else algorithm.buffers
    local = experiment.local
    if local.rounds is not None:  # a run that is resumed for more rounds keeps the schedule it began with
        local = replace(local, schedule_length=local.schedule_length or experiment.rounds)
    decided = replace(
        experiment,
        data=replace(experiment.data, labels=data.labels, feature_columns=features),
        columns=data.columns or (),
        engine=replace(engine, name=name, otherwise=otherwise),
        local=local,
        evaluate=replace(experiment.evaluate, headline=what.headline, every=_every(experiment)),
        model=replace(experiment.model, buffers=buffers),
        privacy=settled_privacy(experiment, algorithm, data.train.count),
    )
    refuse_buffers(decided, task)
    return replace(decided, engine=replace(decided.engine, way=_way(decided, task, data)))


def _way(experiment: Experiment, task: Task, data: ClientData) -> str:
    """How the stacked engine has steps of this run's cohorts computed."""
    engine = experiment.engine
    if engine.way != "auto":
        return engine.way
    if engine.name != "stacked":
        return "together"
    cohort = experiment.cohort.size(data.clients)
    return choose_way(task, data, federation_settings(experiment), cohort, user_cache())


def _every(experiment: Experiment) -> int | str:
    """How often a run is evaluated; every round where it may end by that: no clock decides on a model."""
    auto = experiment.evaluate.every == AUTO
    return 1 if auto and experiment.stop.wanted else experiment.evaluate.every


def _largest(data: ClientData) -> float | None:
    """The share of the largest class among the training samples; None where it is not known."""
    y = data.pooled_y if isinstance(data.train, LazySplit) else data.train.y
    # Where clients are elsewhere one sample stands for all of them.
    if not is_class(y) or len(y) < 2 or int(y.min()) < 0:
        return None
    return float(torch.bincount(y).max() / len(y))


def refuse_matrices(what: Measured, width: int | None, clients: int, data: ClientData) -> None:
    """Refuse confusion matrices of so many classes that memory does not hold one of each client."""
    if width is None or "confusion" not in what.tallies:
        return
    needed, free = clients * width**2 * COUNT_BYTES, free_memory()
    if needed <= free:
        return
    y = data.pooled_y if isinstance(data.train, LazySplit) else data.train.y
    occur = len(y[y >= 0].unique())
    cure = "take others as evaluate.metrics, such as log_loss"
    if data.classes is not None and occur < data.classes / 2:
        cure = f"only {occur} labels occur: number them from 0, or give them as texts (data.labels)"
    raise DataError(
        f"{data.name}: labels go up to {width - 1}, and {what.headline} is of a matrix of all labels for "
        f"each of {clients} clients, {needed / 1e9:,.0f} GB, and {free / 1e9:,.1f} GB are free; {cure}"
    )


def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
    """The federation of a resolved experiment."""
    settings = federation_settings(experiment)
    return federation_of(task, make_engine(experiment.engine.name, task, data, settings), settings)


def federation_settings(experiment: Experiment) -> FederationSettings:
    """What a federation and its engine go by, of a resolved experiment; this is the one place that says."""
    engine, replies = experiment.engine, experiment.replies
    algorithm = registered()[experiment.algorithm](experiment.hyper)
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
        way=engine.way,
        otherwise=engine.otherwise,
        transforms=experiment.transforms,
        privacy=experiment.privacy,
        cohort=experiment.cohort,
        exchanges=algorithm.exchanges(),
        gradients=algorithm.gradients,
        gradients_a_step=algorithm.gradients_a_step,
        aggregate=experiment.aggregate.settings,
        attack=experiment.attack,
        union=not algorithm.deployable,
    )
