"""A run under way: where it stands, what it has measured, and what it is to store and give back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.errors import Diverged, SartorError, SettingError
from sartor.federation import Federation
from sartor.model.batch import Batch
from sartor.model.task import Task, unkeyed_words
from sartor.runs.cadence import Cadence
from sartor.runs.checkpoint import Checkpoint
from sartor.runs.evaluation import (
    CELLS,
    Cell,
    evaluate,
    evaluated_clients,
    measured_in,
    model_of,
    personal_models,
)
from sartor.runs.metrics import more_is_better
from sartor.runs.record import RunFolder, hash_of
from sartor.runs.result import Result, personal_rows, rows_of_clients
from sartor.runs.setup import Setup
from sartor.runs.signature import Signature

SMALL_OBSERVATION = 256
"""What a method lets be recorded is kept every round up to so many numbers, else at evaluations."""

MOST_OBSERVATION = 10**6
"""Nothing larger is recorded."""

MOST_MODEL_NUMBERS = 10**8
"""``evaluate.personal_models = auto`` stores and returns them up to this many numbers in all."""


class Run:
    """A run under way, as its observers see it.

    They read it and may call :meth:`stop`; everything else changes it for the round loop.
    """

    def __init__(self, setup: Setup, federation: Federation, folder: RunFolder | None) -> None:
        self.experiment = setup.experiment
        """All settings, with what was ``auto`` decided."""
        self.algorithm, self.data, self.task = setup.algorithm, setup.data, setup.task
        self.federation = federation
        self.folder = None if folder is None else folder.path
        """The run folder, or None where nothing is stored."""
        self.server: Any = None
        """The server's state after the last round."""
        self.rows: list[dict[str, Any]] = []
        """One row per round, those before an interruption too."""
        self.evaluations: dict[int, dict[str, Any]] = {}
        """By round the cells of the evaluation matrix."""
        self.clients: dict[str, list[Any]] = {}
        """One row per client and evaluation, as columns."""
        self.evaluated_clients: dict[str, list[Any]] = {}
        """Those of the last evaluation alone."""
        self.final: dict[str, Tensor] = {}
        """The final models by name, once all rounds are over."""
        self.saved = -1
        """The round of the last checkpoint."""
        self.stopped: str | None = None
        """Why the run ends before its last round, once somebody has stopped it."""
        self.left: BaseException | None = None
        """What interrupts the run as soon as its round is stored."""
        self.watched = False
        """Whether a user's observers are told, who may ask for the model."""
        self._buffers: Tensor | None = None
        self.cadence = Cadence(self.experiment.evaluate.every, self.experiment.rounds)
        """Which rounds are evaluated."""
        self._begin = 0.0

    @property
    def round(self) -> int:
        """The number of the last round that was begun; 0 before the first."""
        return self.federation.round

    @property
    def headline(self) -> str:
        """The metric that models are judged by."""
        return measured_in(self.federation, self.experiment.evaluate).headline

    @property
    def _sign(self) -> float:
        return 1.0 if more_is_better(self.headline, self.task.objective) else -1.0

    @property
    def seconds(self) -> float:
        """What the run has taken so far, with the time before an interruption."""
        return self.federation.engine.seconds() - self._begin

    def stop(self, reason: str) -> None:
        """End the run after this round, as a finished one; the summary says why. The first reason counts."""
        if not isinstance(reason, str) or not reason.strip():
            raise SartorError(f"run.stop: give the reason as a text, got {reason!r}")
        self.stopped = self.stopped or reason.strip()

    def leave(self, error: BaseException) -> None:
        """Interrupt the run as soon as this round is stored, so that it can be resumed.

        The first error counts, and more than a Ctrl-C.
        """
        if self.left is None or isinstance(self.left, KeyboardInterrupt):
            self.left = error

    def check(self) -> None:
        """Raise what interrupts the run. A Ctrl-C in the last round does not: the run ends anyway."""
        if self.left is None:
            return
        ends = self.round >= self.experiment.rounds or self.stopped is not None
        if not (ends and isinstance(self.left, KeyboardInterrupt)):
            raise self.left

    def state_dict(self, model: int = 0) -> dict[str, Tensor]:
        """The shared model as it is now, to load into a module; ``model`` says which of several."""
        w, apart = self.algorithm.shared(self.server), self.federation.engine.homes.ranks > 1
        buffers = self._buffers if apart else self.federation.mean_buffers
        if w is None:
            raise SartorError(f"{self.algorithm.name}: the method has no shared model to give")
        if w.dim() == 2:
            w = w[model]
        return self.task.state_dict(w.cpu().clone(), None if buffers is None else buffers.cpu().clone())

    def look(self) -> None:
        """Have at hand what observers may ask for: when one process tells them, others do not answer."""
        if self.watched and self.federation.engine.homes.ranks > 1:
            self._buffers = self.federation.mean_buffers

    def begin(self) -> None:
        """Make the server's first state."""
        try:
            self.server = self.algorithm.start(self.federation)
        except SartorError as error:
            if type(error) is not SartorError:
                raise
            raise SettingError(str(error)) from error  # of a model or data that are not for the method
        if self.server is None:
            raise SartorError(f"{self.algorithm.name}: start() returned nothing, and not the server's state")
        personal_models(self.algorithm, self.server, np.arange(1))  # to find a fault of it before the rounds
        self._begin = self.federation.engine.seconds()

    def restore(self, saved: Checkpoint, folder: RunFolder) -> None:
        """Put everything where it was when the checkpoint was made."""
        federation = self.federation
        with federation.asking_nobody():
            first = self.algorithm.start(federation)
        self.server = saved.server(self.algorithm, first, federation.engine.device)
        federation.restore(saved.federation(federation.engine.device), saved.states(federation.engine.homes))
        federation.round = saved.round
        self.rows, self.clients = folder.rounds, folder.clients
        self.evaluations = {row["round"]: row["evaluation"] for row in self.rows if "evaluation" in row}
        for row in self.rows:
            self.cadence.note(row)
        self.saved = saved.round
        self._begin = federation.engine.seconds() - saved.seconds

    def wait(self) -> None:
        """Until the device has done what it was told to."""
        self.federation.engine.wait()

    def observe(self, evaluated: bool) -> dict[str, Any]:
        """What the method lets be recorded, under ``observed``; nothing where there is nothing."""
        most = MOST_OBSERVATION if evaluated else SMALL_OBSERVATION
        seen = {
            name: value
            for name, value in self.algorithm.observe(self.server).items()
            if (value.numel() if isinstance(value, Tensor) else np.size(value)) <= most
        }
        return {"observed": seen} if seen else {}

    def evaluate(self) -> dict[str, Any]:
        """All cells of the matrix after this round, and a row for every client."""
        cells = evaluate(self.algorithm, self.server, self.federation, self.experiment.evaluate)
        self._refuse_nonfinite(cells)
        self._keep_clients(cells)
        summary = {name: cell.summary() for name, cell in cells.items()}
        self.evaluations[self.round] = summary
        return summary

    def _refuse_nonfinite(self, cells: Mapping[str, Cell]) -> None:
        clients = evaluated_clients(self.federation, self.experiment.evaluate)
        method = f"{self.algorithm.name}, round {self.round}"
        # What is wrong at a client is said of the client rather than of all data together.
        for name, cell in sorted(cells.items(), key=lambda item: item[0] == "shared_pooled"):
            bad = np.flatnonzero(~np.isfinite(cell.loss))
            if len(bad):
                who = "the pooled data" if name == "shared_pooled" else self.data.names[clients[bad[0]]]
                sample = "" if name == "shared_pooled" else self._bad_sample(name, int(clients[bad[0]]))
                raise Diverged(
                    f"{method}: the loss of {name} at {who!r} is not finite{sample}; "
                    "a smaller learning rate (hyper.lr) is the usual cure"
                )

    def _bad_sample(self, cell: str, client: int) -> str:
        """The first sample whose loss is not finite, where some of a client's are with the shared model."""
        w = self.algorithm.shared(self.server)
        split = self.data.validation if cell.endswith("validation") else self.data.test
        if w is None or w.dim() != 1 or split is None or not self.federation.engine.pools:
            return ""
        buffers = self.federation.mean_buffers
        x, y = nests.mapped(lambda leaf: leaf.cpu(), split.of(client))
        with torch.no_grad():
            losses = self.task.losses(w.cpu(), Batch(x, y), None if buffers is None else buffers.cpu())
        bad = ~losses.isfinite()
        return f", first in sample {int(bad.nonzero()[0])}" if bad.any() and not bad.all() else ""

    def _keep_clients(self, cells: Mapping[str, Cell]) -> None:
        """One row per client: its results on its own test data and with its model on the pooled data."""
        clients = evaluated_clients(self.federation, self.experiment.evaluate)
        columns: dict[str, Any] = {
            "round": [self.round] * len(clients),
            "client": [self.data.names[number] for number in clients],
            "n_train": self.data.train.count[clients].tolist(),
            "n_test": self.data.test.count[clients].tolist(),
        }
        groups = self.task.groups
        if groups is not None:
            columns["model"] = [groups.names[group] for group in groups.of[clients].tolist()]
        if self.federation.attackers:
            columns["attacker"] = np.isin(clients, self.federation.attackers.numbers).tolist()
        for name, cell in cells.items():
            if len(cell.n) == len(clients) and name != "shared_pooled":
                # A client without samples, or with one class, has no result rather than a result of zero.
                measured = {"loss": cell.loss, **cell.scores}
                for score, values in measured.items():
                    told = values.tolist()
                    for place in np.flatnonzero(~(np.isfinite(values) & (cell.n > 0))).tolist():
                        told[place] = None
                    columns[f"{name}_{score}"] = told
        for column, values in columns.items():
            self.clients.setdefault(column, []).extend(values)
        self.evaluated_clients = columns

    def models(self) -> dict[str, Tensor]:
        """The final models by name: the server's state, personal models, float buffers."""
        algorithm, federation, server = self.algorithm, self.federation, self.server
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
            groups = federation.task.groups
            for group, part in replies.by_group.items():
                members = everyone if groups is None else groups.members(group)
                models = {name: value.cpu() for name, value in part.values.items()}
                if len(part) < len(members):  # whoever is gone has not told its model
                    places = np.searchsorted(members, part.clients)
                    models = {name: spread_out(value, places, len(members)) for name, value in models.items()}
                end = "" if groups is None else f"@{group}"
                named = {"w": "personal", "buffers": "personal_buffers"}
                named = {name: named.get(name, f"personal.{name}") + end for name in models}
                tensors.update({named[name]: value for name, value in models.items()})
        buffers = federation.mean_buffers
        if buffers is not None:
            tensors["buffers"] = buffers
        w = algorithm.shared(server)
        if w is not None and self._shared_name(tensors) is None:
            tensors["shared"] = w
        return tensors

    def _shared_name(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What the shared model is called among the stored tensors; None where it is none of them."""
        w = self.algorithm.shared(self.server)
        if w is None:
            return None
        alike = (name for name, own in tensors.items() if own.dtype == w.dtype and own.shape == w.shape)
        return next((name for name in alike if torch.equal(tensors[name].to(w.device), w)), None)

    def result(self, summary: dict[str, Any]) -> Result:
        """What a run gives back."""
        w, buffers = self.algorithm.shared(self.server), self.final.get("buffers")
        task = self.federation.task
        call = self.algorithm.personalize(self.server, np.arange(1))
        return Result(
            summary=summary,
            rounds=self.rows,
            clients=self.clients,
            task=task,
            w=None if w is None else w.cpu(),
            personal=personal_rows(self.final, task, self.data.names),
            buffers=None if buffers is None else buffers.cpu(),
            personal_buffers=rows_of_clients(self.final, "personal_buffers", task),
            folder=self.folder,
            personal_stored=call is None or any(name.startswith("personal") for name in self.final),
            names=self.data.names,
            experiment=self.experiment,
            signature=Signature.of(self.data),
        )

    def summary(self) -> dict[str, Any]:
        """What is told of a run that has come to its end."""
        experiment, federation, seconds = self.experiment, self.federation, self.seconds
        last = self.evaluations[max(self.evaluations)]
        early = self.stopped is not None and self.round < experiment.rounds
        return {
            "algorithm": experiment.algorithm,
            "seed": experiment.seed,
            "rounds": self.round,
            "stopped": {"round": self.round, "reason": self.stopped} if early else None,
            "clients": federation.clients,
            "data": self.data.name,
            **models_told(federation.task),
            "engine": federation.engine.name,
            "device": experiment.engine.device,
            "partition_hash": self.data.hash,
            "buffers": experiment.model.buffers if any(t.buffer_size for t in federation.tasks) else None,
            "objective": experiment.objective.name,
            "headline": self.headline,
            "more_is_better": self._sign > 0,
            "accuracy": {name: last.get(name, {}).get("accuracy") for name in CELLS},
            "last": {name: last.get(name) for name in CELLS},
            "best_by_validation": {name: self._best(name, validated=True) for name in CELLS},
            "best_on_test": {name: self._best(name, validated=False) for name in CELLS},
            "privacy": None if federation.protection is None else federation.protection.account.told(),
            **({"attack": self._attack()} if federation.attackers else {}),
            "notes": self._notes(last),
            "model_sha256": hash_of(self.final),
            "shared_model": self._shared_name(self.final),
            "bytes_down": federation.traffic.down,
            "bytes_up": federation.traffic.up,
            "seconds": seconds,
        }

    def _attack(self) -> dict[str, Any]:
        """Who attacked, and how."""
        attackers = self.federation.attackers
        return {
            "name": attackers.name,
            "share": len(attackers.numbers) / self.federation.clients,
            "attackers": [self.data.names[number] for number in attackers.numbers.tolist()],
        }

    def _attack_words(self, last: Mapping[str, Mapping[str, Any]]) -> str:
        """Who attacked, and how the others fare."""
        attackers, score = self.federation.attackers, self.headline
        cells = [name for name in ("personal_local", "shared_local") if "benign" in last.get(name, {})]
        told = [
            f"{name} of the honest ones: {score.replace('_', ' ')} {last[name]['benign'][score]:.4g}"
            for name in cells
            if last[name]["benign"].get(score) is not None
        ]
        told += [
            f"the trigger succeeds at {last[name]['attack_success']:.1%} ({name})"
            for name in cells
            if last[name].get("attack_success") is not None
        ]
        who = f"{len(attackers.numbers)} of {self.federation.clients} clients attack ({attackers.name})"
        return "; ".join([who, *told])

    def _notes(self, last: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """What a reader of the numbers has to know: how models start, and whether they answer alike."""
        notes = [
            f"model {task.name}: a ready module, whose start is the same under every seed; give what builds "
            "it (model=Net) to have one drawn by each"
            for task in self.federation.tasks
            if not task.seeded
        ]
        notes += [unkeyed_words(task) for task in self.federation.tasks if task.unkeyed]
        if self.federation.attackers:
            notes.append(self._attack_words(last))
        for name in CELLS:
            found = last.get(name, {}).get("constant")
            if found is None or (name != "shared_pooled" and 2 * found["constant"] <= found["of"]):
                continue
            said = ""
            if "answer" in found:
                number, labels = found["answer"], self.data.labels
                known = labels is not None and number < len(labels)
                said = f", {labels[number]!r}" if known and labels is not None else f", {number}"
            who = "the model always answers"
            if name != "shared_pooled":
                who = (
                    f"at {found['constant']} of {found['of']} clients with several classes the model answers"
                )
            notes.append(f"{name}: {who} the same class{said}")
        return notes

    def _best(self, name: str, validated: bool) -> dict[str, Any] | None:
        """Headline and round of a cell where it, or its model on validation data, was best first."""
        score = self.headline
        judge = name.split("_")[0] + "_validation" if validated else name
        judged = {
            round: self._sign * cells[judge][score]
            for round, cells in self.evaluations.items()
            if name in cells and cells.get(judge, {}).get(score) is not None
        }
        if not judged:
            return None
        best = max(judged, key=lambda round: (judged[round], -round))
        return {score: self.evaluations[best][name][score], "round": best}


def models_told(task: Task) -> dict[str, Any]:
    """The model in a summary; where clients have models of their own, these with how many have each."""
    if task.groups is None:
        return {"model": task.name, "parameters": task.size}
    models = [
        {"model": name, "parameters": own.size, "clients": len(task.groups.members(group))}
        for group, (name, own) in enumerate(zip(task.groups.names, task.groups.tasks, strict=True))
    ]
    largest = max(own.size for own in task.groups.tasks)
    return {"model": ", ".join(task.groups.names), "parameters": largest, "models": models}


def spread_out(rows: Tensor, places: np.ndarray, count: int) -> Tensor:
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
    elif type(state) is tuple:
        for place, value in enumerate(state):
            yield from tensors_of(value, f"{name}.{place}")
    elif is_dataclass(state):
        for field in fields(state):
            yield from tensors_of(getattr(state, field.name), f"{name}.{field.name}")
