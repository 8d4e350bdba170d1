"""The only round loop: cohort → round → evaluate → record → checkpoint."""

from __future__ import annotations

import logging
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sartor import random
from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm
from sartor.client.local import Batches
from sartor.data.clients import ClientData, LazySplit, prepare, relabel
from sartor.data.loaders import from_folder, from_table
from sartor.data.partitions import Partition, apply, make_partition
from sartor.data.settings import OWN_DATA
from sartor.data.sources import load_source
from sartor.engines import choose_engine, make_engine
from sartor.engines import sharded as distributed
from sartor.engines.lockstep import Maker, in_lockstep
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.federation.exchange import NobodyAnswered
from sartor.federation.settings import Cohort, FederationSettings
from sartor.files import NotWritten
from sartor.kernels.device import free_bytes
from sartor.model.networks import make_task
from sartor.model.task import Task
from sartor.runs import checkpoint
from sartor.runs.checkpoint import Checkpoint
from sartor.runs.evaluation import CELLS, Cell, evaluate, evaluated_clients, model_of, personal_models
from sartor.runs.experiment import Experiment, fingerprint
from sartor.runs.record import RunFolder, environment, hash_of
from sartor.runs.tracking import check as check_trackers
from sartor.runs.tracking import tracked

log = logging.getLogger(__name__)

SMALL_OBSERVATION = 256
"""What a method lets be recorded is kept every round up to so many numbers, else at evaluations."""

MOST_OBSERVATION = 10**6
"""Nothing larger is recorded."""

MOST_MODEL_NUMBERS = 10**8
"""``evaluate.personal_models = auto`` stores and returns them up to this many numbers in all."""

COMPILE_STEPS = 100_000
"""On CUDA ``engine.compile = auto`` compiles runs whose clients take at least so many steps in all.

Measured on an H200 for four models: compiling takes 10 to 20 seconds and then saves 0.06 to 0.4 ms a step.
"""


TOGETHER_NUMBERS = 4_000_000
"""Seeds run together on a CPU while the models and batches of all their clients have so many numbers at most.

Measured for FedAvg and Ditto (``bench/seeds.py``): 1.3 to 3 times faster up to 2.7 million, between 1.3 and
0.9 at 13 million, slower beyond.
"""

TOGETHER_MEMORY = 0.25
"""Seeds are run together where all their samples take at most this share of the free memory."""

SHARE_FOR_SAVING = 0.05
"""``checkpoint.every = 0`` saves as often as takes at most this share of the time."""

Opened = Callable[[Experiment, Task, ClientData], Federation]
"""What opens the federation of a resolved experiment."""

STATES = "states"
"""The folder of client states that are too large for memory, in the run folder."""


@dataclass(frozen=True)
class Result:
    """What a run gives back; the same lies in its run folder."""

    summary: dict[str, Any]
    """Settings, accuracies of the evaluation matrix, bytes, seconds, hash of the models."""
    rounds: list[dict[str, Any]]
    """One row per round."""
    clients: dict[str, list[Any]]
    """One row per client and evaluation, as columns.

    ``pandas.DataFrame(result.clients)`` takes it as it is.
    """
    task: Task
    w: Tensor | None
    """The shared model, where the method has one; one row per model where it has several."""
    personal: Tensor | None
    """The personal models, one row per client, where the method has them and they are stored."""
    buffers: Tensor | None
    """The float buffers that go with the shared model, for a model that has any."""
    personal_buffers: Tensor | None
    """The float buffers that go with the personal models, one row per client."""
    folder: Path | None
    personal_stored: bool = True
    """Whether what makes up the personal models is here, where the method has them."""

    def state_dict(self, client: int | None = None, model: int | None = None) -> dict[str, Tensor]:
        """The shared model, or a client's personal one, to load into a module of your own.

        ``model`` says which where there are several shared ones; left out, the best on the pooled test data.
        """
        w, buffers, kind = self.w, self.buffers, "shared"
        if w is not None and w.dim() == 2:
            w = w[self.summary["last"]["shared_pooled"]["best_model"] if model is None else model]
        if client is not None:
            kind = "personal"
            w = None if self.personal is None else self.personal[client]
            buffers = None if self.personal_buffers is None else self.personal_buffers[client]
        name = self.summary["algorithm"]
        if client is not None and not self.personal_stored:
            raise SartorError(f"{name}: the personal models {_why_not_here(self.summary)}")
        if w is None:
            raise SartorError(f"{name}: the run has no {kind} model to give")
        if buffers is None and self.task.buffer_size:
            raise SartorError(f"{name}: the float buffers of the model {_why_not_here(self.summary)}")
        return self.task.state_dict(w, buffers)


def _why_not_here(summary: Mapping[str, Any]) -> str:
    """Why a run did not store what is its clients' own."""
    if summary["engine"] == "flower":
        return (
            "stay at the nodes; evaluate.personal_models = 'yes' asks for them, and nodes that "
            "`sartor join --allow-personal-models` send them"
        )
    return "were not stored; evaluate.personal_models = 'yes' stores them"


def execute(
    experiment: Experiment,
    *,
    data: ClientData | None = None,
    task: Task | None = None,
    out: Path | str | None = None,
    store: bool = True,
    progress: bool = False,
    opened: Opened | None = None,
) -> Result:
    """Run an experiment. ``data`` and ``task`` stand in for what it names.

    ``store=False`` writes no run folder. ``opened`` gives the federation where it is not an engine's.
    """
    check_trackers(experiment.tracking.loggers)
    setup = _set_up_everywhere(experiment, data, task)
    return execute_setup(setup, out=out, store=store, progress=progress, opened=opened)


def execute_setup(
    setup: Setup,
    *,
    out: Path | str | None = None,
    store: bool = True,
    progress: bool = False,
    opened: Opened | None = None,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """:func:`execute` of what is set up already; ``stop`` says whether to stop after the round."""
    folder = RunFolder.create(out, setup.experiment) if store and distributed.rank() == 0 else None
    if folder is None:
        return _carry_out(setup, folder, progress, opened=opened, stop=stop)
    with folder.alone():
        if setup.partition is not None:
            folder.write_partition(setup.partition)
        return _carry_out(setup, folder, progress, opened=opened, stop=stop)


def may_share(experiment: Experiment) -> bool:
    """Whether seeds of an experiment can be run in one batch at all, as far as is known before its data.

    Runs of the loop engine take nothing from each other, asynchronous methods are at another event in every
    seed, and trackers show one run at a time.
    """
    asynchronous = registered()[experiment.algorithm].family == "asynchronous"
    return experiment.engine.name != "loop" and not asynchronous and not experiment.tracking.loggers


def seeds_at_once(setup: Setup, wanted: str) -> int:
    """How many seeds of an experiment to run in one batch at most, as the first of them has it.

    ``wanted`` is ``no``, ``yes`` (as many as can share an engine) or ``auto``, which runs as many as were
    measured to be faster together: on a CPU up to ``TOGETHER_NUMBERS`` numbers.
    """
    experiment, data = setup.experiment, setup.data
    engine = experiment.engine
    if wanted == "no" or engine.name != "stacked" or not may_share(experiment):
        return 1
    if isinstance(data.train, LazySplit):  # there may be more than anyone can hold
        return 1
    splits = [split for split in (data.train, data.test, data.validation) if split is not None]
    held = sum(split.x.nbytes + split.y.nbytes for split in splits)
    room = int(TOGETHER_MEMORY * free_bytes(torch.device(engine.device))) // max(1, held)
    if wanted == "auto" and engine.device != "cpu":
        return 1
    if wanted == "auto":
        clients = cohort_size(data.clients, experiment.cohort)
        if experiment.evaluate.every:
            clients = max(clients, experiment.evaluate.clients or data.clients)
        width = Batches("train", experiment.local.batch).width(int(data.train.count.max()))
        client = setup.task.size + width * data.train.x[0].numel()
        room = min(room, TOGETHER_NUMBERS // (clients * client))
    return max(1, room)


def execute_together(
    setups: Sequence[Setup], outs: Sequence[Path], *, progress: bool = False
) -> list[Result | SartorError]:
    """Run several seeds of one experiment in one batch: what each gives, or how it failed.

    Each has its own run folder; its seconds are an even share of the time that all of them took.
    """

    def one(setup: Setup, out: Path, stop: Callable[[], bool], maker: Maker) -> Result:
        def opened(experiment: Experiment, task: Task, data: ClientData) -> Federation:
            settings = federation_settings(experiment)
            return Federation(task, maker(task, data, settings), settings)

        shown = progress and setup is setups[0]  # one bar for all: they are in the same round
        return execute_setup(setup, out=out, progress=shown, opened=opened, stop=stop)

    outcomes: list[Result | SartorError] = []
    try:
        with _interruptions(True) as stop:
            runs = [partial(one, setup, out, stop) for setup, out in zip(setups, outs, strict=True)]
            for outcome in in_lockstep(runs):
                if isinstance(outcome, BaseException) and not isinstance(outcome, SartorError):
                    raise outcome
                outcomes.append(outcome)
    except KeyboardInterrupt:
        again = f"the same command goes on with the {len(setups)} runs under way"
        raise KeyboardInterrupt(f"stopped; {again}") from None
    return outcomes


def resume(
    path: Path | str,
    *,
    rounds: int | None = None,
    data: ClientData | None = None,
    task: Task | None = None,
    progress: bool = False,
    opened: Opened | None = None,
) -> Result:
    """Continue a run from its last checkpoint, to the same numbers as if it had never been interrupted.

    ``rounds`` extends it to so many rounds. ``data`` and ``task`` are those that were given in Python, if
    any were. A finished run that is not extended is read back and nothing is changed.
    """
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
            _check_here(folder)
        _compare_environments(folder)
        setup = _set_up_everywhere(experiment, data, task)
        saved = distributed.together(lambda: checkpoint.latest(folder))
        _check_data(saved, setup.data, folder)
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
        return _carry_out(setup, folder, progress, saved, opened)


def evaluate_run(
    path: Path | str,
    *,
    data: ClientData | str | Path | None = None,
    partition: str | Path | None = None,
    task: Task | None = None,
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
        raise SartorError(f"{folder.path}: has no checkpoint to evaluate; `sartor resume` it first")
    if not isinstance(data, ClientData):
        _check_here(folder)
    newcomers, own = _clients_to_evaluate(experiment, data, partition)
    if data is None and partition is None:
        _check_data(saved, newcomers, folder)
    took_part = newcomers.hash == saved.data
    setup = set_up(replace(experiment, cohort=Cohort()), data=own, task=task)
    _check_newcomers(newcomers, setup)
    federation = open_federation(setup.experiment, setup.task, newcomers)
    federation.states.keep_in(folder.path / STATES, continues=False)
    algorithm = setup.algorithm
    server = saved.server(algorithm, algorithm.start(federation), federation.engine.device)
    state = saved.federation(federation.engine.device)
    if took_part:
        federation.restore(state)
    else:
        federation.buffers = state["buffers"].to(federation.engine.device) if "buffers" in state else None
        server = algorithm.welcome(server, federation)
    federation.round = saved.round
    cells = evaluate(algorithm, server, federation, experiment.evaluate)
    last = {name: cells[name].summary() if name in cells else None for name in CELLS}
    return {
        "algorithm": experiment.algorithm,
        "run": str(folder.path),
        "rounds": saved.round,
        "newcomers": not took_part,
        "clients": newcomers.clients,
        "data": newcomers.name,
        "partition_hash": newcomers.hash,
        "accuracy": {name: None if cell is None else cell["accuracy"] for name, cell in last.items()},
        "last": last,
    }


def _clients_to_evaluate(
    experiment: Experiment, data: ClientData | str | Path | None, partition: str | Path | None
) -> tuple[ClientData, ClientData]:
    """The clients asked for and the run's own; both normalised by the run's own training samples."""
    if isinstance(data, ClientData):
        data = relabel(data, experiment.data.labels)
        return data, data if experiment.data.name == OWN_DATA else load_data(experiment)[0]
    raw = replace(experiment, data=replace(experiment.data, normalise=False))
    own, _ = load_data(raw)
    new = own
    if data is not None:
        new = _own_data(replace(raw, data=replace(raw.data, path=str(data))))
        new = relabel(new, raw.data.labels, str(data))
    elif partition is not None:
        if raw.data.path is not None:
            raise SettingError("partition: the run is on own data, which have none; give such data instead")
        new, _ = load_data(replace(raw, partition=replace(raw.partition, file=str(partition))))
    normalise = experiment.data.normalise
    return prepare(new, normalise=normalise, like=own), prepare(own, normalise=normalise)


def _check_newcomers(newcomers: ClientData, setup: Setup) -> None:
    shape, expected = tuple(newcomers.train.x.shape[1:]), tuple(setup.data.train.x.shape[1:])
    if shape != expected:
        raise SettingError(f"newcomers: samples of shape {list(shape)}, the run's have {list(expected)}")
    classes = setup.task.classes
    if classes is not None and newcomers.classes is not None and newcomers.classes > classes:
        raise SettingError(f"newcomers: {newcomers.classes} classes, the run's model knows {classes}")


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


def _set_up_everywhere(experiment: Experiment, data: ClientData | None, task: Task | None) -> Setup:
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
    if experiment.data.labels is not None:
        data = relabel(data, experiment.data.labels)
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


def _carry_out(
    setup: Setup,
    folder: RunFolder | None,
    progress: bool,
    saved: Checkpoint | None = None,
    opened: Opened | None = None,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """The rounds that are left, with whatever happens on the way."""
    federation = (opened or open_federation)(setup.experiment, setup.task, setup.data)
    writes = distributed.rank() == 0
    if folder is not None:
        federation.states.keep_in(folder.path / STATES, continues=writes)
    with ExitStack() as stack:
        if folder is not None and writes:
            stack.enter_context(folder)
        run = _Run(setup, federation, folder if writes else None)
        show = stack.enter_context(
            _progress(setup.experiment, progress and writes, 0 if saved is None else saved.round)
        )
        trackers = stack.enter_context(
            tracked(setup.experiment, None if folder is None else folder.path) if writes else nullcontext()
        )

        def tell(row: Mapping[str, Any]) -> None:
            show(row)
            if trackers is not None:
                trackers.round(row)

        # Several processes do not see a Ctrl-C in the same round, so there they stop at once.
        if stop is None:
            stop = stack.enter_context(_interruptions(folder is not None and distributed.world() == 1))
        begun = None
        if saved is not None and folder is not None:
            begun = run.restore(saved, folder), saved.seconds
        try:
            result = run.through(tell, stop, begun)
            if trackers is not None:
                trackers.finish(result.summary)
            return result
        except KeyboardInterrupt:
            if folder is None:
                raise
            raise KeyboardInterrupt(f"stopped; {_how_to_resume(folder, run.saved)}") from None
        except NotWritten as error:
            if folder is None:
                raise
            raise SartorError(f"{error}; then {_how_to_resume(folder, run.saved)}") from None


def _read_back(setup: Setup, folder: RunFolder, saved: Checkpoint | None) -> Result:
    """The result of a finished run."""
    if saved is None:
        raise SartorError(f"{folder.path}: finished, but has no checkpoint; its files can be read one by one")
    federation = open_federation(setup.experiment, setup.task, setup.data)
    federation.states.keep_in(folder.path / STATES, continues=False)
    run = _Run(setup, federation, folder)
    server = run.restore(saved, folder)
    return run.result(server, run.models(server), folder.summary)


def _how_to_resume(folder: RunFolder, round: int) -> str:
    begin = f"goes on after round {round}" if round >= 0 else "begins it again"
    return f"`sartor resume {shlex.quote(str(folder.path))}` {begin}"


def _check_here(folder: RunFolder) -> None:
    """Refuse a run whose clients are at nodes: it can only be continued with them."""
    saved = checkpoint.latest(folder) if folder.experiment.data.name == OWN_DATA else None
    if saved is not None and "flower" in saved.federation(torch.device("cpu"))["plain"]:
        begun = f"let them join `sartor serve --resume {shlex.quote(str(folder.path))}`"
        done = "what was evaluated with them is in its files, which `sartor report` shows"
        raise SartorError(
            f"{folder.path}: its clients are at nodes, with their data and all that they keep; "
            f"{done if folder.finished else begun}"
        )


def _check_data(saved: Checkpoint | None, data: ClientData, folder: RunFolder) -> None:
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
        raise SettingError(
            "data.name = 'own': the data was given in Python, or lies at nodes; pass it again as data=..., "
            "or let nodes join `sartor serve --resume`"
        )
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
    options: dict[str, Any] = {
        "validation_fraction": settings.validation,
        "seed": experiment.seed,
        "labels": settings.labels,
    }
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
        data=replace(experiment.data, labels=data.labels),
        engine=replace(engine, name=name, compile=compiled),
        model=replace(experiment.model, buffers=buffers),
    )


def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
    """The federation of a resolved experiment."""
    settings = federation_settings(experiment)
    return Federation(task, make_engine(experiment.engine.name, task, data, settings), settings)


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
        ),
        method=experiment.algorithm,
        states=engine.states,
        fetches_personal=experiment.evaluate.personal_models == "yes",
        precision=engine.precision,
        workers=engine.workers,
        chunk=engine.chunk,
        lanes=engine.lanes,
        compile=engine.compile == "yes",
    )


def draw_cohort(seed: int, round: int, clients: int, settings: Cohort) -> np.ndarray:
    """The clients of a round, sorted: a function of seed and round alone, so every method sees the same."""
    count = cohort_size(clients, settings)
    return np.asarray(random.choose(random.stream(seed, "cohort", round), clients, count), dtype=np.int64)


def cohort_size(clients: int, settings: Cohort) -> int:
    """How many of the clients are drawn in a round."""
    return settings.count or max(1, int(settings.fraction * clients + 0.5))


class _Run:
    """A run under way: what it collects while it goes."""

    def __init__(self, setup: Setup, federation: Federation, folder: RunFolder | None) -> None:
        self.experiment, self.algorithm, self.data = setup.experiment, setup.algorithm, setup.data
        self.federation, self.folder = federation, folder
        self.rows: list[dict[str, Any]] = []
        self.client_rows: dict[str, list[Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.saved = -1
        """The round of the last checkpoint."""
        self._saved_at, self._saving = -math.inf, 0.0

    def through(
        self,
        show: Callable[[Mapping[str, Any]], None],
        stop: Callable[[], bool],
        begun: tuple[Any, float] | None,
    ) -> Result:
        """All rounds that are left, one after the other; ``begun`` has the server and the seconds so far."""
        experiment, algorithm, federation = self.experiment, self.algorithm, self.federation
        server, seconds = begun or (algorithm.start(federation), 0.0)
        begin = federation.engine.seconds() - seconds
        personal_models(algorithm, server, np.arange(1))  # to find a fault of it before the rounds
        for round in range(federation.round + 1, experiment.rounds + 1):
            started, before = federation.engine.seconds(), replace(federation.traffic)
            federation.round, federation.answered = round, 0
            cohort = draw_cohort(experiment.seed, round, federation.clients, experiment.cohort)
            try:
                server = algorithm.round(server, federation, cohort)
            except NobodyAnswered:
                federation.answered = 0
            self._wait()
            row: dict[str, Any] = {
                "round": round,
                "cohort": len(cohort),
                "answered": federation.answered,
                "seconds": federation.engine.seconds() - started,
                "bytes_down": federation.traffic.down - before.down,
                "bytes_up": federation.traffic.up - before.up,
                **federation.notes,
            }
            every = experiment.evaluate.every
            evaluated = round == experiment.rounds or (every > 0 and round % every == 0)
            row.update(self._observe(server, evaluated))
            if evaluated:
                row["evaluation"] = self._evaluate(server, round)
            self._keep_round(row)
            show(row)
            stopping = stop()
            if self._due(round) or stopping:
                self._save(server, round, begin)
            if stopping and round < experiment.rounds:
                raise KeyboardInterrupt
        if experiment.rounds == 0 and not self.rows:
            self._keep_round({"round": 0, "evaluation": self._evaluate(server, 0)})
            self._save(server, 0, begin)
        self._wait()
        tensors = self.models(server)
        summary = self._summary(tensors, federation.engine.seconds() - begin)
        if self.folder is not None:
            self.folder.write_models(tensors)
            self.folder.close()
            self.folder.write_summary(summary)
        return self.result(server, tensors, summary)

    def restore(self, saved: Checkpoint, folder: RunFolder) -> Any:
        """Put everything where it was when the checkpoint was made; the server's state comes back."""
        federation = self.federation
        server = saved.server(self.algorithm, self.algorithm.start(federation), federation.engine.device)
        federation.restore(saved.federation(federation.engine.device))
        federation.round = saved.round
        self.rows, self.client_rows = folder.rounds, folder.clients
        self.evaluations = {row["round"]: row["evaluation"] for row in self.rows if "evaluation" in row}
        self.saved = saved.round
        return server

    def _due(self, round: int) -> bool:
        """Whether to save after this round: by the setting, or when the last saving has paid off."""
        every = self.experiment.checkpoint.every
        if self.folder is None:
            return False
        if round == self.experiment.rounds:
            return True
        if every:
            return round % every == 0
        return self.federation.engine.seconds() - self._saved_at >= self._saving / SHARE_FOR_SAVING

    def _save(self, server: Any, round: int, begin: float) -> None:
        """Store everything a continuation needs."""
        if self.folder is None:
            return
        started = time.perf_counter()
        checkpoint.save(
            self.folder,
            round=round,
            seconds=self.federation.engine.seconds() - begin,
            data=self.data.hash,
            server=server,
            federation=self.federation.snapshot(),
        )
        self.saved = round
        self._saved_at = self.federation.engine.seconds()
        self._saving = time.perf_counter() - started

    def _wait(self) -> None:
        self.federation.engine.wait()

    def _observe(self, server: Any, evaluated: bool) -> dict[str, Any]:
        """What the method lets be recorded, under ``observed``; nothing where there is nothing."""
        most = MOST_OBSERVATION if evaluated else SMALL_OBSERVATION
        seen = {
            name: value
            for name, value in self.algorithm.observe(server).items()
            if (value.numel() if isinstance(value, Tensor) else np.size(value)) <= most
        }
        return {"observed": seen} if seen else {}

    def _evaluate(self, server: Any, round: int) -> dict[str, Any]:
        cells = evaluate(self.algorithm, server, self.federation, self.experiment.evaluate)
        self._refuse_nonfinite(cells, round)
        self._keep_clients(cells, round)
        summary = {name: cell.summary() for name, cell in cells.items()}
        self.evaluations[round] = summary
        return summary

    def _refuse_nonfinite(self, cells: Mapping[str, Cell], round: int) -> None:
        clients = evaluated_clients(self.federation, self.experiment.evaluate)
        for name, cell in cells.items():
            bad = np.flatnonzero(~np.isfinite(cell.loss))
            if len(bad):
                who = "the pooled data" if name == "shared_pooled" else self.data.names[clients[bad[0]]]
                raise SartorError(
                    f"{self.algorithm.name}, round {round}: the loss of {name} at {who!r} is not finite; "
                    "a smaller learning rate (hyper.lr) is the usual cure"
                )

    def _keep_clients(self, cells: Mapping[str, Cell], round: int) -> None:
        """One row per client: its results on its own test data and with its model on the pooled data."""
        clients = evaluated_clients(self.federation, self.experiment.evaluate)
        columns: dict[str, Any] = {
            "round": [round] * len(clients),
            "client": [self.data.names[number] for number in clients],
            "n_train": self.data.train.count[clients].tolist(),
            "n_test": self.data.test.count[clients].tolist(),
        }
        for name, cell in cells.items():
            if len(cell.n) == len(clients) and name != "shared_pooled":
                # A client without samples has no result, rather than a result of zero.
                measured = {"loss": cell.loss, **cell.scores}
                for score, values in measured.items():
                    columns[f"{name}_{score}"] = [
                        float(value) if n > 0 else None for value, n in zip(values, cell.n, strict=True)
                    ]
        for column, values in columns.items():
            self.client_rows.setdefault(column, []).extend(values)
        if self.folder is not None:
            self.folder.add_clients(columns)

    def _keep_round(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.folder is not None:
            self.folder.add_round(row)

    def models(self, server: Any) -> dict[str, Tensor]:
        """The final models by name: the server's state, personal models, float buffers."""
        algorithm, federation = self.algorithm, self.federation
        everyone = np.arange(federation.clients)
        tensors = dict(tensors_of(server))
        wanted = self.experiment.evaluate.personal_models
        if wanted == "auto":
            wanted = "yes" if federation.clients * federation.task.size <= MOST_MODEL_NUMBERS else "no"
        call = personal_models(algorithm, server, everyone) if wanted == "yes" else None
        replies = None
        if call is not None:
            replies = federation.fetch(model_of(call.function), everyone, call.shared, call.each)
        if replies is not None:
            models = {name: value.cpu() for name, value in replies.values.items()}
            if len(replies) < len(everyone):  # whoever is gone has not told its model
                models = {
                    name: _spread_out(value, replies.clients, len(everyone)) for name, value in models.items()
                }
            named = {"w": "personal", "buffers": "personal_buffers"}
            tensors.update({named.get(name, f"personal.{name}"): value for name, value in models.items()})
        buffers = federation.mean_buffers
        if buffers is not None:
            tensors["buffers"] = buffers
        return tensors

    def result(self, server: Any, tensors: Mapping[str, Tensor], summary: dict[str, Any]) -> Result:
        """What a run gives back."""
        w, buffers = self.algorithm.shared(server), tensors.get("buffers")
        call = self.algorithm.personalize(server, np.arange(1))
        return Result(
            summary=summary,
            rounds=self.rows,
            clients=self.client_rows,
            task=self.federation.task,
            w=None if w is None else w.cpu(),
            personal=tensors.get("personal"),
            buffers=None if buffers is None else buffers.cpu(),
            personal_buffers=tensors.get("personal_buffers"),
            folder=None if self.folder is None else self.folder.path,
            personal_stored=call is None or any(name.startswith("personal") for name in tensors),
        )

    def _summary(self, tensors: Mapping[str, Tensor], seconds: float) -> dict[str, Any]:
        experiment, federation = self.experiment, self.federation
        last = self.evaluations[max(self.evaluations)]
        return {
            "algorithm": experiment.algorithm,
            "seed": experiment.seed,
            "rounds": experiment.rounds,
            "clients": federation.clients,
            "data": self.data.name,
            "model": federation.task.name,
            "parameters": federation.task.size,
            "engine": federation.engine.name,
            "device": experiment.engine.device,
            "partition_hash": self.data.hash,
            "buffers": experiment.model.buffers if federation.task.buffer_size else None,
            "accuracy": {name: last.get(name, {}).get("accuracy") for name in CELLS},
            "last": {name: last.get(name) for name in CELLS},
            "best_by_validation": {name: self._best(name, validated=True) for name in CELLS},
            "best_on_test": {name: self._best(name, validated=False) for name in CELLS},
            "model_sha256": hash_of(tensors),
            "bytes_down": federation.traffic.down,
            "bytes_up": federation.traffic.up,
            "seconds": seconds,
        }

    def _best(self, name: str, validated: bool) -> dict[str, Any] | None:
        """Accuracy and round of a cell where it, or its model on validation data, was highest first."""
        judge = name.split("_")[0] + "_validation" if validated else name
        judged = {
            round: cells[judge]["accuracy"]
            for round, cells in self.evaluations.items()
            if name in cells and cells.get(judge, {}).get("accuracy") is not None
        }
        if not judged:
            return None
        best = max(judged, key=lambda round: (judged[round], -round))
        return {"accuracy": self.evaluations[best][name]["accuracy"], "round": best}


def _spread_out(rows: Tensor, places: np.ndarray, count: int) -> Tensor:
    """Rows at these places, nan (of whole numbers: 0) at the others."""
    missing = math.nan if rows.is_floating_point() else 0
    spread_out = rows.new_full((count, *rows.shape[1:]), missing)
    spread_out[torch.from_numpy(places)] = rows
    return spread_out


def tensors_of(state: Any, name: str = "server") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a server's state by name, those in dicts and dataclasses inside it too."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif is_dataclass(state):
        for field in fields(state):
            yield from tensors_of(getattr(state, field.name), f"{name}.{field.name}")


@contextmanager
def _interruptions(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once, the round is finished first; twice, everything stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        log.warning("stopping after this round; press Ctrl-C again to stop at once")

    # A handler that somebody else has set stays, and only the main thread may set one.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (wanted and usual and threading.current_thread() is threading.main_thread()):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _progress(experiment: Experiment, wanted: bool, done: int) -> Iterator[Any]:
    """A bar on standard error with the round, the accuracy, clients per second and the time left."""
    if not wanted:
        yield lambda row: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task(experiment.algorithm, total=experiment.rounds, completed=done, note="")
        note = {"accuracy": ""}

        def show(row: Mapping[str, Any]) -> None:
            for name in ("personal_local", "shared_local"):
                accuracy = row.get("evaluation", {}).get(name, {}).get("accuracy")
                if accuracy is not None:
                    note["accuracy"] = f"{name} {accuracy:.3f}, "
                    break
            speed = row["cohort"] / max(row["seconds"], 1e-9)
            bar.update(line, advance=1, note=f"{note['accuracy']}{speed:,.0f} clients/s")

        yield show
