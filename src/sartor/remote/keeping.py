"""The models that a node keeps for its own use: with them it exports and predicts, and no server is needed.

When the server has clients evaluate a model, the node notes what the model is made of; when the run ends, it
makes the models of its clients by that and keeps them in ``models.safetensors`` of its run's folder, with
all that it takes to use them. Nothing of it is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from sartor.data.clients import ClientData
from sartor.errors import SartorError
from sartor.federation.exchange import Outcome, is_personal
from sartor.files import OWNER_ALONE, write
from sartor.model.task import Task
from sartor.remote.messages import Groups
from sartor.runs import experiment as experiments
from sartor.runs.evaluation import (
    CELLS,
    cell_of,
    each_model,
    evaluation_of,
    model_of,
    rank,
    shared_model,
)
from sartor.runs.experiment import Experiment
from sartor.runs.metrics import measured
from sartor.runs.record import hash_of, separate
from sartor.runs.result import Result, personal_rows, rows_of_clients
from sartor.runs.run import models_told, spread_out
from sartor.runs.setup import settled_for
from sartor.runs.signature import Signature

OPENED = "opened.json"
"""What a node was told of its run, in the folder of its runs."""
MODELS = "models.safetensors"
TOLD = ("function", "numbers", "rounds", "round", "algorithm", "hyper")
"""What a request to evaluate a model says of it."""


class Evaluated:
    """The last evaluation of each kind of model, as the server has asked for it."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def note(self, header: Mapping[str, Any], groups: Groups, function: Any, group: int, sent: Any) -> None:
        """Note a request, if it is one to evaluate a model on test data, and what was counted."""
        kind = kind_of(function)
        if kind is None or self._folder is None:
            return
        tensors = {f"{part} {name}": value for part, held in groups.items() for name, value in held.items()}
        counted = {name.removeprefix("test."): value for name, value in sent.items() if name[:5] == "test."}
        tensors |= {f"counted {name}": value for name, value in counted.items()}
        told = json.dumps({key: header[key] for key in TOLD})
        content = save(separate(tensors), {"told": told})
        write(self._folder / f"evaluated-{kind}-{group}.safetensors", content, OWNER_ALONE)

    def read(self) -> list[tuple[str, int, dict[str, Any], Groups]]:
        """What was noted: the kind of model, the group of clients, the request and its tensors."""
        found: list[tuple[str, int, dict[str, Any], Groups]] = []
        for path in [] if self._folder is None else sorted(self._folder.glob("evaluated-*.safetensors")):
            _, kind, group = path.name.removesuffix(".safetensors").split("-")
            with safe_open(path, framework="pt") as file:
                told = json.loads(file.metadata()["told"])
            groups: dict[str, dict[str, Tensor]] = {}
            for name, value in load(path.read_bytes()).items():
                part, _, own = name.partition(" ")
                groups.setdefault(part, {})[own] = value
            found.append((kind, int(group), told, groups))
        return found


def kind_of(function: Any) -> str | None:
    """Whether a function evaluates ``personal`` or ``shared`` models on test data; else None."""
    made_by: tuple[str, ...] = getattr(function, "made_by", ())
    if made_by[:1] != (evaluation_of.__name__,) or "test" not in made_by[1].split("+"):
        return None
    inner = function.__wrapped__
    return "shared" if inner is shared_model else "personal" if is_personal(inner) else None


Making = Callable[[Any, Mapping[str, Any], Groups], Outcome]
"""Has clients run a function, with what a request says."""


def keep_models(
    folder: Path,
    evaluated: Evaluated,
    find: Callable[[str], Any],
    make: Making,
    experiment: Experiment,
    told: str,
    task: Task,
    data: ClientData,
    numbers: np.ndarray,
    groups: Mapping[str, Any],
) -> None:
    """Make the models of a node's clients as they were last evaluated, and keep them.

    ``find`` gives a function by name and ``make`` runs it at clients; ``told`` is the experiment as the
    server has told it, ``groups`` who has which of its models.
    """
    place = {number: position for position, number in enumerate(numbers.tolist())}
    tensors: dict[str, Tensor] = {}
    counted: dict[str, dict[str, np.ndarray]] = {}
    rounds = 0
    for kind, group, request, sent in evaluated.read():
        outcome = make(model_of(find(request["function"]).__wrapped__), request, sent)
        rounds = max(rounds, int(request["round"]))
        end = "" if task.groups is None else f"@{group}"
        members = np.arange(len(numbers)) if task.groups is None else task.groups.members(group)
        mine = np.searchsorted(members, [place[number] for number in request["numbers"]])
        made = {name: rows.cpu() for name, rows in outcome.sent.items()}
        if kind == "personal":
            known = {"w": "personal", "buffers": "personal_buffers"}
            for name, rows in made.items():
                tensors[known.get(name, f"personal.{name}") + end] = spread_out(rows, mine, len(members))
        elif all(
            torch.equal(rows, rows[:1].expand_as(rows)) for rows in made.values()
        ):  # one for all of them
            tensors |= {"shared" if name == "w" else name: rows[0].clone() for name, rows in made.items()}
        held = counted.setdefault(kind, {})
        for name, rows in sent.get("counted", {}).items():
            full = held.setdefault(name, np.zeros((len(numbers), *rows.shape[1:])))
            full[[place[number] for number in request["numbers"]]] = rows.double().numpy()
    if not tensors:
        return
    summary, clients = _measured(experiment, task, data, counted, rounds)
    summary |= {"model_sha256": hash_of(tensors), "shared_model": "shared" if "shared" in tensors else None}
    mapping = json.loads(told)
    if experiment.columns:  # what the schema says of the network is needed to build it again
        settled = replace(experiment, model=settled_for(experiment.model, data))
        mapping["model"] = experiments.to_mapping(settled)["model"]
    content = {
        "experiment": mapping,
        "signature": Signature.of(data).to_mapping(),
        "summary": summary,
        "clients": clients,
        "groups": dict(groups),
    }
    write(folder / MODELS, save(separate(tensors), {"content": json.dumps(content)}), OWNER_ALONE)


def _measured(
    experiment: Experiment, task: Task, data: ClientData, counted: Mapping[str, Any], rounds: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What this node has measured: a summary as a run has it, and a row for each of its clients."""
    what = measured(task.objective, task.width, experiment.evaluate.metrics, experiment.evaluate.headline)
    cells = {}
    for kind, answers in counted.items():  # of several shared models the one that is best here
        tried = [cell_of(each, what) for each in each_model(dict(answers))]
        cells[f"{kind}_local"] = max(tried, key=rank)
    last = {name: cells[name].summary() if name in cells else None for name in CELLS}
    rows: dict[str, list[Any]] = {
        "round": [rounds] * data.clients,
        "client": list(data.names),
        "n_train": data.train.count.tolist(),
        "n_test": data.test.count.tolist(),
    }
    for name, cell in cells.items():
        for score, values in {"loss": cell.loss, **cell.scores}.items():
            there = (cell.n > 0) & np.isfinite(values)
            pairs = zip(values.tolist(), there.tolist(), strict=True)
            rows[f"{name}_{score}"] = [value if here else None for value, here in pairs]
    summary = {
        "algorithm": experiment.algorithm,
        "rounds": rounds,
        "clients": data.clients,
        "data": data.name,
        **models_told(task),
        "engine": "flower",
        "partition_hash": data.hash,
        "objective": experiment.objective.name,
        "headline": what.headline,
        "last": last,
        "notes": ["measured at this node alone, on its own clients"],
    }
    return json.loads(json.dumps(summary, default=_plain)), rows


def _plain(value: Any) -> Any:
    return value.tolist()


def read_kept(state: Path) -> Result:
    """The models that a node keeps in its state folder, as the result of a run with its own clients."""
    runs = state / "runs" if (state / "runs").is_dir() else state  # where Flower's own node keeps them
    opened = runs / OPENED
    if not opened.is_file():
        raise SartorError(f"{state}: no node's state folder, or its node was in no run")
    try:
        run = json.loads(opened.read_bytes())["open"].get("run")
    except (ValueError, KeyError, AttributeError):
        raise SartorError(f"{opened}: damaged") from None
    path = runs / str(run) / MODELS
    if run is None or not path.is_file():
        raise SartorError(
            f"{state}: keeps no models; they are there once the run has ended and its clients were evaluated"
        )
    try:
        with safe_open(path, framework="pt") as file:
            stored = json.loads(file.metadata()["content"])
        tensors = dict(load(path.read_bytes()))
        summary, groups = stored["summary"], stored["groups"]
        whole = hash_of(tensors) == summary["model_sha256"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SartorError(f"{path}: damaged or not readable: {error}") from None
    if not whole:
        raise SartorError(f"{path}: damaged, its checksum does not fit")
    experiment = experiments.from_mapping(stored["experiment"])
    signature = Signature.from_mapping(stored["signature"], str(path))
    of = np.array(groups["groups"], dtype=np.int64) if groups else None
    task = signature.task(experiment, of, groups.get("entries", ()))
    return Result(
        summary=summary,
        rounds=[],
        clients=stored["clients"],
        task=task,
        w=tensors.get("shared"),
        personal=personal_rows(tensors, task, signature.names),
        buffers=tensors.get("buffers"),
        personal_buffers=rows_of_clients(tensors, "personal_buffers", task),
        folder=state,
        names=signature.names,
        experiment=experiment,
        signature=signature,
    )
