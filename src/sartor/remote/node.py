"""What a node does: it holds the data and the states of its clients and answers requests, one at a time.

A node knows nothing of how requests reach it; :mod:`sartor.remote.messages` has their form. Of a request's
``kind`` there are five. ``hello`` says which experiment this is and which code of users' own it needs, by
hash: the node, which must have imported the same, answers which clients it hosts and how many samples each
has, never the samples. ``open`` says which numbers they have in the run and where it
stands. ``call`` names a client function of the installed package, which some of the clients run; ``end`` is
the end of the run; ``refuse`` says why this node cannot take part. Nothing from the wire is executed or
imported.

A client's number is the same as in a simulation of the whole federation, so its batches are too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from sartor.algorithms import registered
from sartor.data.clients import SPLITS, ClientData, Moments, Split, prepare
from sartor.engines import choose_engine, make_federation
from sartor.errors import SartorError
from sartor.extensions import imported
from sartor.federation import Federation
from sartor.federation.functions import find_function
from sartor.model.networks import build_task
from sartor.model.task import Task
from sartor.remote.journal import Ledger, rows_of, write
from sartor.remote.messages import BadMessage, Parts, decode, encode, version
from sartor.runs import experiment as experiments
from sartor.runs.experiment import Experiment
from sartor.settings import build, shown

log = logging.getLogger(__name__)

Load = Callable[[Experiment], ClientData]
"""Gives a node's clients: their raw samples, split as the experiment says."""
OPENED, DECLARED = "opened.json", "declared.tensors"
OPEN_KEYS = ("run", "clients", "numbers", "classes", "buffers", "number")
Groups = Mapping[str, Mapping[str, Tensor]]


class Closed(SartorError):
    """A request for a run that this node has not been told of, as it was started anew."""


class Node:
    """The clients of one machine. ``task`` stands in for the model that the experiment names."""

    def __init__(
        self, load: Load, folder: Path | None = None, *, task: Task | None = None, device: str = "cpu"
    ) -> None:
        self._load, self._folder, self._device = load, folder, device
        self._given_task = task
        self._told = ""
        self._code: dict[str, str] = {}
        self._data: ClientData | None = None
        self._moments: Moments | None = None
        self._experiment: Experiment | None = None
        self._run = ""
        self._federation: Federation | None = None
        self._ledger = Ledger(None)
        self._hosted = np.zeros(0, dtype=bool)
        self._hypers: dict[str, Any] = {}
        self._process = secrets.token_hex(8)
        self.done = False
        """Whether the run has come to its end."""
        self.refusal = ""
        """Why this node cannot take part."""
        self.round = 0
        """The round of the last call."""

    def handle(self, parts: Mapping[str, bytes]) -> Parts:
        """The reply to a request; what goes wrong is told in it and never raised."""
        nonce, kind = None, ""
        try:
            header, groups = decode(parts)
            nonce, kind = header.get("nonce"), str(header.get("kind"))
            told = header.get("version")
            if told != version():
                raise SartorError(
                    f"the server has sartor {told}, this node {version()}; install the same version"
                )
            answers = {
                "hello": self._hello,
                "open": self._open,
                "call": self._call,
                "end": self._end,
                "refuse": self._refuse,
            }
            answer = answers.get(kind)
            if answer is None:
                raise BadMessage("malformed", f"no such request: {kind!r}")
            reply, sent = answer(header, groups)
            return encode({**reply, "nonce": nonce}, sent)
        except Closed as error:
            return encode({"nonce": nonce, "error": str(error), "closed": True})
        except SartorError as error:
            if kind == "hello":  # it will not go better the next time
                self.refusal = str(error)
            else:
                log.warning("request refused: %s", error)
            return encode({"nonce": nonce, "error": str(error)})
        except Exception as error:  # a request may hold anything; the node is there for the next one
            log.exception("request failed")
            return encode({"nonce": nonce, "error": f"{type(error).__name__}: {error}"})

    def renew(self) -> None:
        """From now on this is another process to the server: one that knows nothing of earlier requests."""
        self._process = secrets.token_hex(8)

    # Requests -------------------------------------------------------------------------------------

    def _hello(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Which clients are here, with how many samples; how these lie, for normalising all alike."""
        code = _same_code(header.get("code", {}))
        told = json.dumps(header["experiment"], sort_keys=True)
        if self._data is None or told != self._told:
            experiment = experiments.from_mapping(header["experiment"])
            data = prepare(self._load(experiment), features=experiment.features.settings)
            self._moments = Moments.of(data.train.x) if experiment.data.normalise else None
            self._told, self._experiment, self._data = told, experiment, data
            self._code = code
            self._run = ""
            self._remember({}, {})
        data = self._data
        held = {name: getattr(data, name) for name in SPLITS}
        reply = {
            "names": list(data.names),
            "counts": {name: part.count.tolist() for name, part in held.items() if part is not None},
            "shape": list(data.train.x.shape[1:]),
            "dtype": str(data.train.x.dtype).removeprefix("torch."),
            "classes": data.classes,
            "hash": data.hash,
            "process": self._process,
            "code": code,
        }
        if self._moments is None:
            return reply, {}
        moments = {"mean": self._moments.mean, "squares": self._moments.squares}
        return {**reply, "number": self._moments.number}, {"moments": moments}

    def _open(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Take up a run where it stands."""
        data, experiment = self._data, self._experiment
        if data is None or experiment is None:
            raise Closed("the node has not been greeted yet")
        run = str(header["run"])
        if not run.isalnum():
            raise BadMessage("malformed", f"no name of a run: {run!r}")
        numbers = np.array(header["numbers"], dtype=np.int64)
        clients = int(header["clients"])
        if numbers.shape != (data.clients,) or numbers.min() < 0 or numbers.max() >= clients:
            raise BadMessage("malformed", "it does not number this node's clients")
        if "moments" in groups:
            moments = groups["moments"]
            like = Moments(int(header["number"]), moments["mean"], moments["squares"])
            data = prepare(data, normalise=True, like=like)
        wide = _widened(data, numbers, clients, header["classes"])
        task = self._given_task
        if task is None:
            shape = tuple(data.train.x.shape[1:])
            task = build_task(experiment.model, shape, wide.classes, experiment.seed)
        engine = choose_engine(experiment.engine.name, task, self._device, wide.train.x, wide.train.y)
        self._federation = make_federation(
            engine,
            task,
            wide,
            local=experiment.local,
            seed=experiment.seed,
            device=self._device,
            buffers=str(header["buffers"]),
            evaluation_batch=experiment.evaluate.batch,
            method=experiment.algorithm,
        )
        self._hosted = np.zeros(clients, dtype=bool)
        self._hosted[numbers] = True
        if run != self._run or self._folder is not None:
            self._ledger = Ledger(None if self._folder is None else self._folder / run)
        self._run = run
        self._ledger.go_back(int(header["at"]), header["without"], header["keep"])
        self._settle(header)
        self._fill(self._federation.states)
        self._remember(header, groups)
        return {}, {}

    def _call(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Run a client function."""
        federation = self._federation
        if federation is None or header["run"] != self._run:
            raise Closed("the node was started anew")
        self._settle(header)
        for name, initial in groups.get("declared", {}).items():
            federation.declare(**{name: initial})
            self._fill([name])
        if "declared" in groups:
            self._remember_declared(groups["declared"])
        numbers = np.array(header["numbers"], dtype=np.int64)
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= len(self._hosted):
            raise BadMessage("malformed", "there are no such clients")
        if not self._hosted[numbers].all():
            raise BadMessage("malformed", "it asks clients that are not at this node")
        function = find_function(str(header["function"]))
        hyper = self._hyper(header["algorithm"], header["hyper"])
        federation.round = self.round = int(header["round"])
        rounds = np.broadcast_to(np.array(header["rounds"], dtype=np.int64), len(numbers)).copy()
        here = {
            group: {name: value.to(federation.device) for name, value in groups.get(group, {}).items()}
            for group in ("shared", "each", "buffers")
        }
        buffers = here["buffers"].get("buffers", federation.buffers)
        _, outcome = federation._train(
            function, hyper, numbers, rounds, here["shared"], here["each"], buffers
        )
        kept = dict(outcome.kept)
        groups = {"sent": outcome.sent}
        if outcome.buffers is not None and federation.policy == "local":
            kept["buffers"] = outcome.buffers
        elif outcome.buffers is not None and federation.policy == "average":
            groups["buffers"] = {"buffers": outcome.buffers}
        if header["keeps"] and kept:
            self._ledger.stage(int(header["exchange"]), rows_of(torch.from_numpy(numbers), kept))
        return {"exchange": header["exchange"]}, groups

    def _end(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Everything is said."""
        if header["run"] == self._run:
            self._settle(header)
        self.done = True
        return {}, {}

    def _refuse(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """The server does without this node."""
        self.refusal = "".join(filter(str.isprintable, str(header["reason"])[:500]))
        return {}, {}

    # What outlives the process --------------------------------------------------------------------

    def recall(self) -> None:
        """Take up the run where the last process of this node left it, without being told of it again."""
        if self._folder is None or not (self._folder / OPENED).exists():
            return
        stored = json.loads((self._folder / OPENED).read_text())
        self._hello({"experiment": stored["experiment"], "code": stored["code"]}, {})
        if not stored["open"]:
            return
        header = {**stored["open"], "at": sys.maxsize, "without": [], "keep": [], "settled": [], "floor": 0}
        groups = {}
        if stored["moments"]:
            values = {
                name: torch.tensor(held, dtype=torch.float64) for name, held in stored["moments"].items()
            }
            groups["moments"] = values
        self._open(header, groups)
        declared = self._folder / self._run / DECLARED
        if declared.exists():
            for name, initial in load(declared.read_bytes()).items():
                assert self._federation is not None
                self._federation.declare(**{name: initial})
                self._fill([name])

    def _remember(self, header: Mapping[str, Any], groups: Groups) -> None:
        """What the server has told: the experiment, and, once it has, where the clients are in the run."""
        if self._folder is not None:
            told = {key: header[key] for key in OPEN_KEYS if key in header}
            moments = {name: value.tolist() for name, value in groups.get("moments", {}).items()}
            experiment = json.loads(self._told)
            stored = {"experiment": experiment, "code": self._code, "open": told, "moments": moments}
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder / OPENED, json.dumps(stored).encode())

    def _remember_declared(self, declared: Mapping[str, Tensor]) -> None:
        if self._folder is not None:
            path = self._folder / self._run / DECLARED
            known = load(path.read_bytes()) if path.exists() else {}
            write(path, save({**known, **{name: value.contiguous() for name, value in declared.items()}}))

    # What clients keep ----------------------------------------------------------------------------

    def _settle(self, header: Mapping[str, Any]) -> None:
        """Let count, or forget, what was staged, as the server has decided."""
        for exchange, used in header["settled"]:
            for name, (numbers, rows) in self._ledger.settle(int(exchange), used).items():
                if self._federation is not None and name in self._federation.states:
                    self._federation.states.write(name, numbers.numpy(), rows.to(self._federation.device))
        self._ledger.merge(int(header["floor"]))

    def _fill(self, names: Any) -> None:
        """Give clients the states that they have kept before."""
        assert self._federation is not None
        kept = self._ledger.states()
        for name in list(names):
            if name in kept:
                numbers, rows = kept[name]
                self._federation.states.write(name, numbers.numpy(), rows.to(self._federation.device))

    def states(self, name: str) -> dict[int, Tensor]:
        """A state of all clients of this node, by number."""
        assert self._federation is not None
        numbers = np.flatnonzero(self._hosted)
        return dict(zip(numbers.tolist(), self._federation.states.rows(name, numbers), strict=True))

    def _hyper(self, algorithm: str, values: Mapping[str, Any]) -> Any:
        """Hyper-parameters; the same ones every time, as what is compiled for them is kept."""
        key = json.dumps([algorithm, values], sort_keys=True)
        if key not in self._hypers:
            if algorithm not in registered():
                raise SartorError(f"algorithm {algorithm!r}: not installed at this node")
            self._hypers[key] = build(registered()[algorithm].Hyper, values, "hyper")
        return self._hypers[key]


def _same_code(wanted: Any) -> dict[str, str]:
    """What the server has imported, if this node has imported the same: hashes by name.

    They are compared; what to import is for whoever starts the node to say.
    """
    if not isinstance(wanted, Mapping):
        raise BadMessage("malformed", "its code is no table")
    for name, sha256 in wanted.items():
        own = imported(str(name))
        what = f"{shown(name)[1:-1]} (SHA-256 {shown(sha256)[1:13]})"
        if own is None:
            raise SartorError(f"the server has imported {what}, this node has not; join with --import")
        if own.sha256 != sha256:
            raise SartorError(
                f"the server has imported {what}, this node another one (SHA-256 {own.sha256[:12]}); "
                "import the same file at both"
            )
    return dict(wanted)


def hyper_values(hyper: Any) -> dict[str, Any]:
    """Hyper-parameters for the wire."""
    values = {field.name: getattr(hyper, field.name) for field in dataclasses.fields(hyper)}
    return {name: value for name, value in values.items() if value is not None}


def _widened(data: ClientData, numbers: np.ndarray, clients: int, classes: int | None) -> ClientData:
    """The same samples as those of the clients with these numbers among all; the others have none here."""

    def wide(split: Split) -> Split:
        start, count = np.zeros((2, clients), dtype=np.int64)
        start[numbers], count[numbers] = split.start, split.count
        return dataclasses.replace(split, start=start, count=count)

    names = np.full(clients, "elsewhere", dtype=object)
    names[numbers] = data.names
    return dataclasses.replace(
        data,
        names=tuple(names),
        classes=classes,
        train=wide(data.train),
        test=wide(data.test),
        validation=None if data.validation is None else wide(data.validation),
    )
