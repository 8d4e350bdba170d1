"""What a node does: it holds the data and the states of its clients and answers requests, one at a time.

A node knows nothing of how requests reach it; :mod:`sartor.remote.messages` has their form. Of a request's
``kind`` there are six. ``hello`` says which experiment this is and which code of users' own it needs, by
hash: the node, which must have imported the same, answers which clients it hosts and how many samples each
has, never the samples. ``open`` says which numbers they have in the run and where it
stands. ``call`` names a client function of the installed package, which some of the clients run; ``end`` is
the end of the run; ``fail`` says why the server ends before it; ``refuse`` says why this node cannot take
part. Nothing from the wire is executed or imported.

A client's number is the same as in a simulation of the whole federation, so its batches are too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sartor import nests
from sartor.algorithms import registered
from sartor.data.clients import SPLITS, ClientData, prepare, relabel
from sartor.data.expect import check_expected, check_range
from sartor.data.moments import Moments, moments_of
from sartor.data.public import hash_of
from sartor.data.schema import read_columns, settles
from sartor.data.tables import encoded, told_of
from sartor.engines import make_engine
from sartor.engines.base import Origins
from sartor.errors import SartorError
from sartor.extensions import imported, installed
from sartor.federation.attacks import Attack, falsified, keys_of, single_handed
from sartor.federation.exchange import ClientFunction, Outcome, Work, is_personal
from sartor.federation.federation import own_buffers
from sartor.federation.functions import find_function
from sartor.federation.protection import transforms_of
from sartor.federation.states import StateStore, grouped_name
from sartor.federation.transforms import read_shapes
from sartor.files import OWNER_ALONE, private_folder, write
from sartor.memory import Idle
from sartor.model.groups import build_groups, tasks_of
from sartor.model.networks import build_task
from sartor.model.objectives import chosen_objective
from sartor.model.task import Task
from sartor.privacy.settings import Privacy
from sartor.remote.admission import form_of, moments_like, received_moments, sent_moments
from sartor.remote.audit import Audit, answered, introduced
from sartor.remote.form import check_form
from sartor.remote.journal import Journal, rows_of
from sartor.remote.keeping import OPENED, Evaluated, keep_models
from sartor.remote.messages import BadMessage, Groups, Parts, decode, encode, readable, spec_of, version
from sartor.remote.policy import Policy, Refused
from sartor.runs import experiment as experiments
from sartor.runs.evaluation import evaluation_of, shared_model
from sartor.runs.experiment import Experiment
from sartor.runs.record import separate
from sartor.runs.seals import BLANK, KEY, is_whole, sealed
from sartor.runs.setup import (
    check_targets,
    federation_settings,
    fitted,
    public_samples,
    resolve,
    settled_for,
    with_public,
)
from sartor.settings import build, shown

log = logging.getLogger(__name__)

Load = Callable[[Experiment], ClientData]
"""Gives a node's clients: their raw samples, split as the experiment says."""
DECLARED = "declared.tensors"
METHOD = "method.txt"
OPEN_KEYS = ("run", "clients", "numbers", "classes", "labels", "number", "groups", "entries", "columns")
COMMON = (shared_model, own_buffers)
"""Client functions of any method's evaluation."""


class Closed(SartorError):
    """A request for a run that this node has not been told of, as it was started anew."""


class Forgotten(SartorError):
    """This node has not what its clients have kept of the run, as it was started with another folder."""


class Unfit(SartorError):
    """What this node has is not what the run needs, and will not be at a second try."""


class Hosted:
    """The clients of this node in a run: where they are trained, and what they keep.

    They stand here in the node's own order, and have the numbers of the whole federation outside. ``dealt``
    is what the server has said of who has which model.
    """

    def __init__(
        self,
        experiment: Experiment,
        task: Task,
        data: ClientData,
        numbers: np.ndarray,
        device: str,
        dealt: Mapping[str, Any],
    ) -> None:
        engine = replace(experiment.engine, device=device)
        if experiment.privacy.mode == "central":  # which is the server's affair alone
            experiment = replace(experiment, privacy=Privacy())
        algorithm = registered()[experiment.algorithm](experiment.hyper)
        resolved = resolve(replace(experiment, engine=engine), algorithm, task, data)
        settings = federation_settings(resolved)
        origins = Origins(numbers, np.full(len(numbers), settings.seed))
        self.engine = make_engine(resolved.engine.name, task, data, settings, origins)
        self.policy, self.numbers = settings.buffers, numbers
        self.task, self.data, self.dealt = task, data, dealt
        self.transforms = transforms_of(settings, task)
        self.groups = task.groups
        of = None if task.groups is None else task.groups.of
        self.states = StateStore(len(numbers), self.engine.device, settings.states, of)
        self._buffers = [own.initial_buffers(self.engine.device) for own in tasks_of(task)]
        for group, buffers in enumerate(self._buffers if self.policy == "local" else ()):
            if buffers.numel():
                name = "buffers" if task.groups is None else grouped_name("buffers", group)
                self.states.declare(name, buffers)
        self._place = {number: place for place, number in enumerate(numbers.tolist())}

    def places(self, numbers: Any) -> np.ndarray:
        """Where clients stand here; a malformed message names others."""
        try:
            return np.array([self._place[number] for number in numbers], dtype=np.int64)
        except (KeyError, TypeError):
            raise BadMessage("malformed", "it asks clients that are not at this node") from None

    def group(self, places: np.ndarray) -> int:
        """The group of clients that are asked together; 0 where there are none."""
        if self.groups is None:
            return 0
        if len(np.unique(self.groups.of[places])) > 1:
            raise BadMessage("malformed", "it asks clients of different models together")
        return int(self.groups.of[places[0]])

    def buffers(self, group: int) -> Tensor | None:
        """The float buffers that clients of a group start from, where their model has any."""
        return self._buffers[group] if self._buffers[group].numel() else None

    def declare(self, name: str, initial: Tensor) -> None:
        """A state that every client here begins with."""
        self.states.declare(name, initial.to(self.engine.device))

    def put(self, name: str, numbers: Tensor, rows: Tensor) -> None:
        """Let clients have these states, if there is such a one."""
        if name in self.states:
            self.states.write(name, self.places(numbers.tolist()), rows.to(self.engine.device))

    def run(self, work: Work) -> Outcome:
        """Run a client function at clients by their places."""
        outcome = self.engine.run(self.states.attached(work, self.policy))
        self.states.check(work.function, outcome)
        return outcome


class Node:
    """The clients of one machine. ``task`` stands in for the model that the experiment names.

    ``policy`` says what it agrees to, ``audit`` keeps what it was asked for and what has left it. With
    ``attack`` it misbehaves, for tests of a federation.
    """

    def __init__(
        self,
        load: Load,
        folder: Path | None = None,
        *,
        task: Task | None = None,
        device: str = "cpu",
        policy: Policy | None = None,
        audit: Audit | None = None,
        attack: Attack | None = None,
    ) -> None:
        self._attack = single_handed(attack)
        self._load, self._folder, self._device = load, folder, device
        self._policy, self._audit = policy or Policy(), audit or Audit(None)
        self._given_task = task
        self._told = ""
        self._code: dict[str, str] = {}
        self._data: ClientData | None = None
        self._moments: dict[str, Moments] | None = None
        self._experiment: Experiment | None = None
        self._run = ""
        self._hosted: Hosted | None = None
        self._journal = Journal(None)
        self._evaluated = Evaluated(None)
        self._hypers: dict[str, Any] = {}
        self._idle = Idle()
        self._process = secrets.token_hex(8)
        self.done = False
        """Whether the run has come to its end."""
        self.refusal = ""
        """Why this node cannot take part."""
        self.failure = ""
        """Why the server has ended before the run did."""
        self.answered = 0
        """How many calls were answered."""
        self.fault = ""
        """Why the last request that was not answered could not be, where that is this node's own fault."""
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
                    f"the server has sartor {readable(told, 50)}, this node {version()}; "
                    "install the same version"
                )
            answers = {
                "hello": self._hello,
                "open": self._open,
                "call": self._call,
                "end": self._end,
                "fail": self._fail,
                "refuse": self._refuse,
            }
            reply, sent = answers[check_form(header)](header, groups)
            message = encode({**reply, "nonce": nonce}, sent)
            self._note(kind, header, reply, sent)  # what cannot be logged is not sent
            self.answered += kind == "call"
            return message
        except Closed as error:
            return encode({"nonce": nonce, "error": str(error), "closed": True})
        except Forgotten as error:  # started with the right folder, it may go on
            self._note_refusal(kind, str(error))
            self.refusal = str(error)
            return encode({"nonce": nonce, "error": str(error), "forgotten": True})
        except SartorError as error:
            self._note_refusal(kind, str(error))
            if kind == "hello" or isinstance(error, Unfit):  # it will not go better the next time
                self.refusal = str(error)
            else:
                log.warning("request refused: %s", error)
                if not isinstance(error, (BadMessage, Refused)):
                    self.fault = str(error)
            return encode({"nonce": nonce, "error": str(error)})
        except Exception as error:  # a request may hold anything; the node is there for the next one
            log.exception("request failed")
            self._note_refusal(kind, f"{type(error).__name__}: {error}")
            self.fault = f"{type(error).__name__}: {error}"
            return encode({"nonce": nonce, "error": f"{type(error).__name__}: {error}"})
        finally:
            self._idle.give_back()

    def renew(self) -> None:
        """From now on this is another process to the server: one that knows nothing of earlier requests."""
        self._process = secrets.token_hex(8)

    # Requests -------------------------------------------------------------------------------------

    def _hello(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Which clients are here, with how many samples; how these lie, for normalising all alike.

        Nothing of it is told to a server whose experiment the node does not agree to.
        """
        code = _same_code(header.get("code", {}))  # before anything: the experiment may name what is in it
        experiment = experiments.from_mapping(header["experiment"])
        self._policy.check_experiment(experiment)
        _same_public(experiment, header.get("public"))
        told = json.dumps(header["experiment"], sort_keys=True)
        if self._data is None or told != self._told:
            data = self._load(experiment)
            if data.table is None:
                data = prepare(data, features=experiment.features.settings)
                check_range(experiment.expect, data)
            if experiment.data.labels is not None:
                data = relabel(data, experiment.data.labels)
            if data.table is None:  # a table's shape is known when all nodes have told of theirs
                check_expected(experiment.expect, data)
            self._policy.check_data(experiment, data)
            self._moments = moments_of(data.train.x) if experiment.data.normalise else None
            self._told, self._experiment, self._data = told, experiment, data
            self._code = code
            self._run = ""
            self._remember({}, {})
        data = self._data
        held = {name: getattr(data, name) for name in SPLITS}
        reply = {
            "names": list(data.names),
            "counts": {name: part.count.tolist() for name, part in held.items() if part is not None},
            "x": form_of(data.train.x, "x"),
            "y": form_of(data.train.y, "y"),
            "classes": data.classes,
            "labels": data.labels,
            "features": data.features,
            **({"table": told_of(data)} if experiment.columns else {}),
            "hash": data.hash,
            "process": self._process,
            "code": code,
        }
        if self._moments is None:
            return reply, {}
        numbers, tensors = sent_moments(self._moments)
        return {**reply, "number": numbers}, {"moments": tensors}

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
        # The run numbers classes otherwise than a node that lacks some of them.
        data = relabel(data, header["labels"])
        data = replace(data, classes=header["classes"])
        if experiment.columns:
            data = _prepared(experiment, header, data)
        task = self._given_task
        if task is None:
            objective = chosen_objective(experiment.objective)
            x, y = data.train.x, data.train.y
            choice = settled_for(experiment.model, data) if experiment.columns else experiment.model
            task = build_task(choice, x, y, data.classes, experiment.seed, objective)
        task = task.in_precision(experiment.local.precision)
        like = _common_moments(header, groups, data)
        data = fitted(data, task, normalise=like is not None, like=like)
        check_targets(data, task)
        x, y = data.train.x, data.train.y
        task = task.suited(x, y, data.classes)
        if experiment.models:
            of, entries = _groups_of(header, data.clients, len(experiment.models))
            task = build_groups(
                task, experiment.models, of, x, y, data.classes, experiment.seed, entries=entries
            )
        _same_constants(task, header.get("frozen"))
        data = with_public(data, experiment)
        dealt = {key: header[key] for key in ("groups", "entries")} if experiment.models else {}
        hosted = self._hosted = Hosted(experiment, task, data, numbers, self._device, dealt)
        if run != self._run or self._folder is not None:
            self._check_method(run, experiment.algorithm)
            self._journal = Journal(None if self._folder is None else self._folder / run)
        self._run = run
        counted = [exchange for exchange, used in header["settled"] if used]
        self._evaluated = Evaluated(None if self._folder is None else self._folder / run)
        self._journal.go_back(int(header["at"]), header["without"], header["keep"], counted)
        self._settle(header)
        if not all(map(self._journal.has, header["kept"])):
            raise Forgotten(
                f"what its clients have kept of the run {run} is not in its state folder; start it with the "
                "folder that it had (--state), or begin the run again"
            )
        self._fill(hosted.states)
        self._remember(header, groups)
        return {}, {}

    def _call(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Run a client function."""
        hosted = self._hosted
        if hosted is None or header["run"] != self._run:
            raise Closed("the node was started anew")
        self._settle(header)
        for name, initial in groups.get("declared", {}).items():
            hosted.declare(name, initial)
            self._fill([name])
        if "declared" in groups:
            self._remember_declared(groups["declared"])
        numbers = np.array(header["numbers"], dtype=np.int64)
        if not len(numbers):
            raise BadMessage("malformed", "there are no such clients")
        if type(header["rounds"]) is list and len(header["rounds"]) != len(numbers):
            raise BadMessage("malformed", "its rounds are not one for each client")
        places = hosted.places(numbers.tolist())
        self.round = int(header["round"])
        function = self._function(header)
        outcome = self._run_at(self._around(function, header), header, groups)
        self._evaluated.note(header, groups, function, hosted.group(places), outcome.sent)
        kept = dict(outcome.kept)
        groups = {"sent": self._sent(function, header, groups, outcome.sent)}
        averaged = outcome.buffers is not None and hosted.policy == "average"
        self._policy.check_reply(str(header["function"]), [*outcome.sent, *(["buffers"] if averaged else [])])
        if averaged and self._policy.require:
            raise Refused(
                "float buffers are asked for, which pass no transforms (require); set model.buffers"
            )
        if outcome.buffers is not None and hosted.policy == "local":
            kept["buffers"] = outcome.buffers
        elif averaged and outcome.buffers is not None:
            groups["buffers"] = {"buffers": outcome.buffers}
        kept = {hosted.states.table_of(name, places): value for name, value in kept.items()}
        if header["keeps"] and kept:
            self._journal.stage(int(header["exchange"]), rows_of(torch.from_numpy(numbers), kept))
        return {"exchange": header["exchange"]}, groups

    def _sent(
        self, function: ClientFunction, header: Mapping[str, Any], groups: Groups, sent: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What is sent of what a function has replied: all as it is, unless this node misbehaves."""
        if self._attack is None or not self._attack.on_replies or not header["keeps"]:
            return sent
        assert self._experiment is not None
        assert self._hosted is not None
        device = self._hosted.engine.device
        given = {} if header.get("transformed") else {**groups.get("shared", {}), **groups.get("each", {})}
        began = getattr(function, "starts", {})
        starts = {name: given[start].to(device) for name, start in began.items() if start in given}
        numbers = torch.tensor(header["numbers"], dtype=torch.int64, device=device)
        everyone = torch.arange(len(numbers), device=device)

        def keys(name: str) -> Tensor:
            turn = int(header["round"]), int(header["exchange"])
            return keys_of(self._experiment.seed, name, *turn, numbers)  # type: ignore[union-attr]

        return falsified(self._attack, sent, starts, everyone, everyone[:0], keys)

    def _run_at(self, function: ClientFunction, header: Mapping[str, Any], groups: Groups) -> Outcome:
        """Have the clients that a request names run a function."""
        hosted = self._hosted
        assert hosted is not None
        numbers = np.array(header["numbers"], dtype=np.int64)
        places = hosted.places(numbers.tolist())
        here = {
            part: {name: value.to(hosted.engine.device) for name, value in groups.get(part, {}).items()}
            for part in ("shared", "each", "buffers")
        }
        work = Work(
            function=function,
            hyper=self._hyper(header["algorithm"], header["hyper"]),
            numbers=places,
            rounds=np.broadcast_to(np.array(header["rounds"], dtype=np.int64), len(numbers)).copy(),
            shared=here["shared"],
            own=here["each"],
            buffers=here["buffers"].get("buffers", hosted.buffers(hosted.group(places))),
            round=int(header["round"]),
        )
        return hosted.run(work)

    def _keep_models(self) -> None:
        """Keep the models of the clients here, for their own use; the run ends also where that fails."""
        if self._folder is None or self._hosted is None:
            return
        assert self._experiment is not None
        try:
            keep_models(
                self._folder / self._run,
                self._evaluated,
                find_function,
                self._run_at,
                self._experiment,
                self._told,
                self._hosted.task,
                self._hosted.data,
                self._hosted.numbers,
                self._hosted.dealt,
            )
        except (SartorError, OSError, SafetensorError) as error:
            log.warning("the models of this node's clients are not kept: %s", error)

    def _end(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """Everything is said."""
        if header["run"] != self._run:  # started anew since, and not asked again
            with contextlib.suppress(SartorError):
                self.recall()
        if header["run"] == self._run:
            self._settle(header)
            self._keep_models()
        self.done = True
        return {}, {}

    def _refuse(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """The server does without this node."""
        self.refusal = _reason(header)
        return {}, {}

    def _fail(self, header: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
        """The server has failed; what was staged is decided when the run is continued."""
        self.failure = _reason(header)
        return {}, {}

    # What is told of it ---------------------------------------------------------------------------

    def _note(self, kind: str, header: Mapping[str, Any], reply: Mapping[str, Any], sent: Groups) -> None:
        """Log a request that is about to be answered."""
        if kind == "hello":
            self._audit.add("introduced", introduced(reply), method=header["experiment"].get("algorithm"))
        elif kind == "open":
            self._audit.add("opened", f"Took part in the run {self._run}.", run=self._run)
        elif kind == "call":
            assert self._data is not None
            assert self._hosted is not None
            names = [self._data.names[place] for place in self._hosted.places(header["numbers"])]
            words, details = answered(header, names, sent)
            self._audit.add("answered", words, run=self._run, **details)
        else:
            reason = {"end": "the run is over", "fail": self.failure, "refuse": self.refusal}[kind]
            self._audit.add("ended", f"The server has ended it: {reason}. Nothing was sent.")

    def _note_refusal(self, kind: str, reason: str) -> None:
        """Log a request that is refused; the refusal goes out even if that fails."""
        with contextlib.suppress(SartorError):
            self._audit.add(
                "refused", f"Refused a request ({readable(kind, 20)}): {reason}. Nothing was sent."
            )

    # What outlives the process --------------------------------------------------------------------

    def recall(self) -> None:
        """Take up the run where the last process of this node left it, without being told of it again."""
        if self._folder is None or not (self._folder / OPENED).exists():
            return
        content = (self._folder / OPENED).read_bytes()
        if not is_whole(content):
            log.warning("%s: damaged; the server tells it again", self._folder / OPENED)
            return
        stored = json.loads(content)
        try:
            self._hello({"experiment": stored["experiment"], "code": stored["code"]}, {})
        except Refused:  # the policy is another one now; a server that greets it is told
            return
        if not stored["open"]:
            return
        nothing: dict[str, Any] = {"without": [], "keep": [], "kept": [], "settled": []}
        header = {**stored["open"], **nothing, "at": sys.maxsize, "floor": 0}
        groups = {}
        if stored["moments"]:
            values = {
                name: torch.tensor(held, dtype=torch.float64) for name, held in stored["moments"].items()
            }
            groups["moments"] = values
        self._open(header, groups)
        for name, initial in self._declared().items():
            assert self._hosted is not None
            self._hosted.declare(name, initial)
            self._fill([name])

    def _remember(self, header: Mapping[str, Any], groups: Groups) -> None:
        """What the server has told: the experiment, and, once it has, where the clients are in the run."""
        if self._folder is not None:
            told = {key: header[key] for key in OPEN_KEYS if key in header}
            moments = {name: value.tolist() for name, value in groups.get("moments", {}).items()}
            experiment = json.loads(self._told)
            stored = {
                "experiment": experiment,
                "code": self._code,
                "open": told,
                "moments": moments,
                KEY: BLANK,
            }
            private_folder(self._folder)
            write(self._folder / OPENED, sealed(json.dumps(stored).encode()), OWNER_ALONE)

    def _check_method(self, run: str, method: str) -> None:
        """What clients keep in a run is for its method alone: another one might send it."""
        if self._folder is not None:
            path = self._folder / run / METHOD
            began = path.read_text() if path.exists() else method
            if began != method:
                raise SartorError(f"run {run}: its states are those of {began}, which {method} may not see")
            private_folder(path.parent)
            write(path, method.encode(), OWNER_ALONE)

    def _remember_declared(self, declared: Mapping[str, Tensor]) -> None:
        if self._folder is not None:
            path = self._folder / self._run / DECLARED
            write(path, save(separate({**self._declared(), **declared})), OWNER_ALONE)

    def _declared(self) -> dict[str, Tensor]:
        """What clients of this run begin with, as far as it was told."""
        path = None if self._folder is None else self._folder / self._run / DECLARED
        if path is None or not path.exists():
            return {}
        try:
            return dict(load(path.read_bytes()))
        except (OSError, SafetensorError) as error:
            raise SartorError(f"{path}: damaged: {error}; begin the run again") from None

    # What clients keep ----------------------------------------------------------------------------

    def _settle(self, header: Mapping[str, Any]) -> None:
        """Let count, or forget, what was staged, as the server has decided."""
        for exchange, used in header["settled"]:
            for name, (numbers, rows) in self._journal.settle(int(exchange), used).items():
                if self._hosted is not None:
                    self._hosted.put(name, numbers, rows)
        self._journal.merge(int(header["floor"]))

    def _fill(self, names: Any) -> None:
        """Give clients the states that they have kept before."""
        assert self._hosted is not None
        kept = self._journal.states()
        for name in list(names):
            if name in kept:
                self._hosted.put(name, *kept[name])

    def states(self, name: str) -> dict[int, Tensor]:
        """A state of all clients of this node, by number."""
        assert self._hosted is not None
        numbers = self._hosted.numbers
        rows = self._hosted.states.rows(name, np.arange(len(numbers)))
        return dict(zip(numbers.tolist(), rows, strict=True))

    def _function(self, header: Mapping[str, Any]) -> ClientFunction:
        """A client function of the run's method that the node agrees to run."""
        assert self._experiment is not None
        name = str(header["function"])
        function = find_function(name)
        evaluates = getattr(function, "made_by", ("",))[0] == evaluation_of.__name__
        transformed = header.get("transformed") is not None
        self._policy.check_call(name, is_personal(function), evaluates, transformed, self._audit.answered)
        if not (header["keeps"] or evaluates or is_personal(function)):
            raise BadMessage("malformed", f"{name}: is asked for past the transforms of the experiment")
        if not belongs_to(registered()[self._experiment.algorithm], function):
            raise SartorError(f"{name}: no client function of {self._experiment.algorithm}, which runs here")
        return function

    def _around(self, function: ClientFunction, header: Mapping[str, Any]) -> ClientFunction:
        """The function with the experiment's transforms around it: what is kept or sent passes them."""
        assert self._hosted is not None
        told, transforms = header.get("transformed"), self._hosted.transforms
        if (told is not None) != (bool(header["keeps"]) and transforms.at_clients):
            raise BadMessage("malformed", "it asks past the transforms of the experiment, or for others")
        if told is None:
            return function
        states = tuple(str(name) for name in told["states"])
        return transforms.around(function, read_shapes(told["shapes"]), states)

    def _hyper(self, algorithm: str, values: Mapping[str, Any]) -> Any:
        """Hyper-parameters; the same ones every time, as what is compiled for them is kept."""
        key = json.dumps([algorithm, values], sort_keys=True)
        if key not in self._hypers:
            if algorithm not in registered():
                raise SartorError(f"algorithm {algorithm!r}: not installed at this node")
            self._hypers[key] = build(registered()[algorithm].Hyper, values, "hyper")
        return self._hypers[key]


def belongs_to(algorithm: type, function: ClientFunction) -> bool:
    """Whether a client function is one of a method's, or of any method's evaluation.

    A method's own are those that it, its bases, or the modules of them have by name. States belong to a
    method: a function of another one would do with them, and send of them, what theirs does not.
    """
    made_by: tuple[str, ...] = getattr(function, "made_by", ())
    plain = getattr(function, "__wrapped__", function) if made_by else function
    classes = algorithm.__mro__
    places = [*classes, *(sys.modules[cls.__module__] for cls in classes)]
    return plain in COMMON or any(held is plain for place in places for held in vars(place).values())


def _same_public(experiment: Experiment, wanted: Any) -> None:
    """Refuse to take part without the public samples of the experiment, which nobody sends."""
    if not experiment.public.wanted:
        return
    what = f"the public samples of the run ({experiment.public.name or experiment.public.path})"
    try:
        found = public_samples(experiment)
    except SartorError as error:
        raise SartorError(f"{what} cannot be loaded at this node: {error}") from None
    if found is None or hash_of(found) != wanted:
        raise SartorError(f"{what} are others at this node than at the server; load the same at both")


def _same_constants(task: Task, wanted: Any) -> None:
    """Refuse a model whose frozen weights, which nobody sends, are not the server's."""
    for own, told in zip(tasks_of(task), wanted or (), strict=False):
        if own.constants_hash != told:
            raise Unfit(
                f"model {own.name}: what is not trained of it is another at this node than at the server "
                f"(SHA-256 {(own.constants_hash or 'none')[:12]}, there {(told or 'none')[:12]}); load the "
                "same weights at both"
            )


def _same_code(wanted: Any) -> dict[str, str]:
    """What the server has imported, if this node has imported the same: hashes by name.

    They are compared; what to import is for whoever starts the node to say.
    """
    if not isinstance(wanted, Mapping):
        raise BadMessage("malformed", "its code is no table")
    for name, sha256 in wanted.items():
        own = imported(str(name)) or installed(str(name))
        what = f"{shown(name)[1:-1]} (SHA-256 {shown(sha256)[1:13]})"
        if own is None:
            raise SartorError(f"the server has imported {what}, this node has not; join with --import")
        if own.sha256 != sha256:
            raise SartorError(
                f"the server has imported {what}, this node another one (SHA-256 {own.sha256[:12]}); "
                "import the same file at both"
            )
    return dict(wanted)


def _prepared(experiment: Experiment, header: Mapping[str, Any], data: ClientData) -> ClientData:
    """A table's rows as all nodes prepare theirs, by columns that are those of the experiment."""
    columns = read_columns(header.get("columns"))
    if not settles(experiment.columns, columns):
        raise BadMessage("malformed", "its columns are not those of the experiment, or something is open")
    data = encoded(data, columns)
    check_expected(experiment.expect, data)
    return data


def _common_moments(header: Mapping[str, Any], groups: Groups, data: ClientData) -> dict[str, Moments] | None:
    """How the samples of all nodes lie, where they are normalised."""
    if "moments" not in groups:
        return None
    numbers, told = header.get("number", {}), groups["moments"]
    shapes = {path: tuple(leaf.shape[1:]) for path, leaf in nests.paths(data.train.x, "x").items()}
    found = {name: spec_of(value) for name, value in told.items()}
    if numbers.keys() != shapes.keys() or found != moments_like(shapes):
        raise BadMessage("malformed", "its moments are not those of samples like the ones here")
    return received_moments(numbers, told)


def _groups_of(header: Mapping[str, Any], clients: int, models: int) -> tuple[np.ndarray, list[int]]:
    """The group of each of this node's clients, and what the groups are in the experiment."""
    of, entries = header.get("groups"), header.get("entries")
    if of is None or entries is None or len(of) != clients:
        raise BadMessage("malformed", "it does not say which model each client has")
    if not all(0 <= entry <= models for entry in entries):
        raise BadMessage("malformed", "it names models that the experiment does not have")
    if not all(0 <= group < len(entries) for group in of):
        raise BadMessage("malformed", "it names groups that there are not")
    return np.array(of, dtype=np.int64), entries


def hyper_values(hyper: Any) -> dict[str, Any]:
    """Hyper-parameters for the wire."""
    values = {field.name: getattr(hyper, field.name) for field in dataclasses.fields(hyper)}
    return {name: value for name, value in values.items() if value is not None}


def _reason(header: Mapping[str, Any]) -> str:
    """What the server gives as its reason: one line of bounded length, fit for a terminal."""
    words = " ".join(str(header["reason"])[:500].split())
    return "".join(filter(str.isprintable, words)) or "no reason given"
