"""The only round loop: cohort → round → evaluate → record."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sartor import random
from sartor.algorithms import algorithms
from sartor.algorithms.base import Algorithm
from sartor.data.clients import ClientData, prepare
from sartor.data.own import from_folder, from_table
from sartor.data.partitions import Partition, apply, make_partition
from sartor.data.sources import load_source
from sartor.errors import SartorError, SettingError
from sartor.evaluation import CELLS, Cell, evaluate, model_of
from sartor.experiment import OWN_DATA, Cohort, Experiment
from sartor.federation import Federation, choose_engine, make_federation
from sartor.local import Batches
from sartor.models import make_task
from sartor.record import RunFolder
from sartor.task import Task

log = logging.getLogger(__name__)

SMALL_OBSERVATION = 256
"""What a method lets be recorded is kept every round up to so many numbers, else at evaluations."""

MOST_OBSERVATION = 10**6
"""Nothing larger is recorded."""

MOST_MODEL_NUMBERS = 10**8
"""Personal models are stored and returned up to this many numbers in all."""

COMPILE_STEPS = 100_000
"""On CUDA ``engine.compile = auto`` compiles runs whose clients take at least so many steps in all.

Measured on an H200 for four models: compiling takes 10 to 20 seconds and then saves 0.06 to 0.4 ms a step.
"""


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
    """The personal models, one row per client, where the method has them."""
    buffers: Tensor | None
    """The float buffers that go with the shared model, for a model that has any."""
    personal_buffers: Tensor | None
    """The float buffers that go with the personal models, one row per client."""
    folder: Path | None

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
        if w is None:
            raise SartorError(f"{self.summary['algorithm']}: the run has no {kind} model to give")
        return self.task.state_dict(w, buffers)


def execute(
    experiment: Experiment,
    *,
    data: ClientData | None = None,
    task: Task | None = None,
    out: Path | str | None = None,
    store: bool = True,
    progress: bool = False,
) -> Result:
    """Run an experiment. ``data`` and ``task`` stand in for what it names.

    ``store=False`` writes no run folder.
    """
    if experiment.engine.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("engine.device = 'cuda': PyTorch sees no CUDA device here; take cpu")
    partition = None
    if data is None:
        data, partition = load_data(experiment)
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
    algorithm = algorithms()[experiment.algorithm](experiment.hyper)
    experiment = resolve(experiment, algorithm, task, data)
    federation = open_federation(experiment, task, data)
    folder = RunFolder.create(out, experiment) if store else None
    try:
        if folder is not None and partition is not None:
            folder.write_partition(partition)
        run = _Run(experiment, algorithm, federation, data, folder)
        with _progress(experiment, progress) as show:
            result = run.through(show)
    finally:
        if folder is not None:
            folder.close()
    return result


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
    engine = experiment.engine
    own: dict[str, dict[str, Any]] = {
        "loop": {"workers": engine.workers},
        "stacked": {"chunk": engine.chunk, "lanes": engine.lanes, "compile": engine.compile == "yes"},
    }
    return make_federation(
        engine.name,
        task,
        data,
        local=experiment.local,
        hyper=experiment.hyper,
        seed=experiment.seed,
        device=engine.device,
        buffers=experiment.model.buffers,
        evaluation_batch=experiment.evaluate.batch,
        **own[engine.name],
    )


def draw_cohort(seed: int, round: int, clients: int, settings: Cohort) -> np.ndarray:
    """The clients of a round, sorted: a function of seed and round alone, so every method sees the same."""
    count = settings.count or max(1, int(settings.fraction * clients + 0.5))
    return np.asarray(random.choose(random.stream(seed, "cohort", round), clients, count), dtype=np.int64)


class _Run:
    """A run under way: what it collects while it goes."""

    def __init__(
        self,
        experiment: Experiment,
        algorithm: Algorithm,
        federation: Federation,
        data: ClientData,
        folder: RunFolder | None,
    ) -> None:
        self.experiment, self.algorithm, self.federation = experiment, algorithm, federation
        self.data, self.folder = data, folder
        self.rows: list[dict[str, Any]] = []
        self.client_rows: dict[str, list[Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}

    def through(self, show: Any) -> Result:
        """All rounds, one after the other."""
        experiment, algorithm, federation = self.experiment, self.algorithm, self.federation
        begin = time.perf_counter()
        server = algorithm.start(federation)
        for round in range(1, experiment.rounds + 1):
            started, before = time.perf_counter(), replace(federation.traffic)
            federation.round = round
            cohort = draw_cohort(experiment.seed, round, federation.clients, experiment.cohort)
            server = algorithm.round(server, federation, cohort)
            self._wait()
            row: dict[str, Any] = {
                "round": round,
                "cohort": len(cohort),
                "answered": federation.answered,
                "seconds": time.perf_counter() - started,
                "bytes_down": federation.traffic.down - before.down,
                "bytes_up": federation.traffic.up - before.up,
            }
            every = experiment.evaluate.every
            evaluated = round == experiment.rounds or (every > 0 and round % every == 0)
            row.update(self._observe(server, evaluated))
            if evaluated:
                row["evaluation"] = self._evaluate(server, round)
            self._keep_round(row)
            show(row)
        if experiment.rounds == 0:
            self._keep_round({"round": 0, "evaluation": self._evaluate(server, 0)})
        self._wait()
        return self._finish(server, time.perf_counter() - begin)

    def _wait(self) -> None:
        if self.federation.device.type == "cuda":
            torch.cuda.synchronize()

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
        for name, cell in cells.items():
            bad = np.flatnonzero(~np.isfinite(cell.loss))
            if len(bad):
                who = "the pooled data" if name == "shared_pooled" else self.data.names[bad[0]]
                raise SartorError(
                    f"{self.algorithm.name}, round {round}: the loss of {name} at {who!r} is not finite; "
                    "a smaller learning rate (hyper.lr) is the usual cure"
                )

    def _keep_clients(self, cells: Mapping[str, Cell], round: int) -> None:
        """One row per client: its results on its own test data and with its model on the pooled data."""
        clients = self.data.clients
        columns: dict[str, Any] = {
            "round": [round] * clients,
            "client": list(self.data.names),
            "n_train": self.data.train.count.tolist(),
            "n_test": self.data.test.count.tolist(),
        }
        for name, cell in cells.items():
            if len(cell.n) == clients and name != "shared_pooled":
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

    def _finish(self, server: Any, seconds: float) -> Result:
        algorithm, federation = self.algorithm, self.federation
        everyone = np.arange(federation.clients)
        personal, personal_buffers = None, None
        tensors = dict(tensors_of(server))
        call = algorithm.personalize(server, everyone)
        if call is not None and federation.clients * federation.task.size <= MOST_MODEL_NUMBERS:
            models = federation.ask(model_of(call.function), everyone, call.shared, call.each).values
            models = {name: value.cpu() for name, value in models.items()}
            personal, personal_buffers = models.pop("w", None), models.pop("buffers", None)
            tensors.update({f"personal.{name}": value for name, value in models.items()})
        if personal is not None:
            tensors["personal"] = personal
        if federation.mean_buffers is not None:
            tensors["buffers"] = federation.mean_buffers
        summary = self._summary(tensors, seconds)
        if self.folder is not None:
            self.folder.write_models(tensors)
            self.folder.close()
            self.folder.write_summary(summary)
        w = algorithm.shared(server)
        return Result(
            summary=summary,
            rounds=self.rows,
            clients=self.client_rows,
            task=federation.task,
            w=None if w is None else w.cpu(),
            personal=personal,
            buffers=None if federation.mean_buffers is None else federation.mean_buffers.cpu(),
            personal_buffers=personal_buffers,
            folder=None if self.folder is None else self.folder.path,
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
            "engine": experiment.engine.name,
            "device": experiment.engine.device,
            "partition_hash": self.data.hash,
            "buffers": experiment.model.buffers if federation.task.buffer_size else None,
            "accuracy": {name: last.get(name, {}).get("accuracy") for name in CELLS},
            "last": {name: last.get(name) for name in CELLS},
            "best_by_validation": {name: self._best(name, validated=True) for name in CELLS},
            "best_on_test": {name: self._best(name, validated=False) for name in CELLS},
            "model_sha256": _sha256(tensors),
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


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and values.

    Two runs with the same hash ended with the same models to the bit.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _progress(experiment: Experiment, wanted: bool) -> Iterator[Any]:
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
        line = bar.add_task(experiment.algorithm, total=experiment.rounds, note="")
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
