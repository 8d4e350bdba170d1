"""The server's side of a real federation: clients are at nodes, which are asked by messages.

:class:`RemoteEngine` is an engine like the others: a federation over it serves algorithms, evaluation and
the round loop as any does. It has neither samples nor client states; every exchange sends one message to
each node that hosts clients of the cohort and takes what comes back before the deadline. A node that is
late, gone or answers nonsense leaves the exchange and harms nobody else: the fault is logged, counted in
the round's notes, and the round goes on with those who answered, as long as they are a quorum. Below it,
the server waits for nodes to come back and asks them again; as randomness is keyed by round and client,
they answer what they would have answered before.

:mod:`sartor.remote.requests` has the messages, :mod:`sartor.remote.admission` who takes part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.data.clients import ClientData, Split
from sartor.data.schema import columns_mapping
from sartor.engines.loop import LoopEngine
from sartor.errors import SartorError
from sartor.federation.clock import EventQueue, Job
from sartor.federation.engine import Attach, Distant
from sartor.federation.exchange import NOBODY, ClientFunction, Outcome, Work
from sartor.federation.functions import qualified_name
from sartor.federation.settings import FederationSettings
from sartor.federation.states import StateStore
from sartor.federation.transforms import inner_function, plain_shapes
from sartor.kernels.device import to_device
from sartor.model.groups import tasks_of
from sartor.model.task import Task
from sartor.remote.admission import (
    Admission,
    Introduction,
    Owners,
    common_moments,
    listed_names,
    other_columns,
    sent_moments,
    unknown_label,
)
from sartor.remote.messages import DTYPES, Expected, Groups, Spec, encode, spec_of
from sartor.remote.node import hyper_values
from sartor.remote.requests import PARTING, PAUSE, EarlierRequest, Failed, Grid, Request, Requests
from sartor.runs.experiment import Experiment
from sartor.settings import shown

log = logging.getLogger(__name__)

REMIND = 30.0
"""Seconds between two reminders that the server waits for nodes."""
RETURNING = ("gone", "closed", "forgotten")
"""Faults of nodes that were started anew, or may be: they are asked again when they are back."""
SLOW = ("late", "unfinished")
"""Faults of nodes that have not answered in time."""
MISSES = 3
"""Requests that a node may leave unanswered, one after the other, until it is left out."""


class Back(NamedTuple):
    """Where a client's states must go back to: an exchange, less these before it, and these after it."""

    at: int
    without: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()


class Replied(NamedTuple):
    """What a client replies to some work, by its types and shapes."""

    sent: dict[str, Spec]
    trains: bool
    keeps: bool
    """Whether it keeps something."""


@dataclass
class Silence:
    """A node that leaves requests unanswered."""

    misses: int = 0
    """Requests in a row."""
    times: int = 0
    """How often it was left out."""
    until: float = 0.0
    """While it is left out: when it may report back, at the earliest."""
    process: str = ""
    """Which process of the node it was; another one may report back at once."""


class RemoteEngine(Distant):
    """Clients at nodes of a grid. ``met`` are the nodes' introductions, ``data`` what they add up to."""

    name = "flower"
    pools = False

    def __init__(
        self,
        grid: Grid,
        met: Mapping[int, Introduction],
        experiment: Experiment,
        task: Task,
        data: ClientData,
        settings: FederationSettings,
        *,
        deadline: float = 600.0,
        quorum: int = 1,
        unit: float = 1.0,
        owners: Owners | None = None,
    ) -> None:
        self.device = torch.device(settings.device)
        self.names = tuple(data.names)
        splits = {"train": data.train, "test": data.test, "validation": data.validation}
        self.counts = {name: np.array(split.count) for name, split in splits.items() if split is not None}
        data = data.map(task.typed, task.typed)
        self.blank = nests.mapped(lambda leaf: torch.zeros_like(leaf[:1], device=self.device), data.train.x)
        if data.public_x is not None:
            self.public = data.public_x.to(self.device)
        self.noted, self.round = Counter(), 0
        self.policy = settings.buffers
        self.requests, self.quorum, self.unit = Requests(grid, deadline), quorum, unit
        self._experiment, self._data = experiment, data
        self._number = {name: number for number, name in enumerate(data.names)}
        self._hosts: dict[int, int] = {}
        """The node of each client."""
        self._known = dict(met)
        for node, introduction in met.items():
            self._hosts |= {self._number[name]: node for name in introduction.names}
        self._moments = common_moments(met)
        self._admission = Admission(self.requests, experiment, owners)
        self._silent: dict[int, Silence] = {}
        """Nodes that have left requests unanswered."""
        self._needed = False
        """Whether too few have answered: whoever reports back is taken at once."""
        self._warned: set[tuple[int, int]] = set()
        """Rounds and nodes whose forgeries the log has told of."""
        self._opened: set[int] = set()
        self._declared: dict[str, Tensor] = {}
        self._delivered: dict[int, set[str]] = {}
        self._run_id = secrets.token_hex(8)
        self._exchange = 0
        self._back = {number: Back(0) for number in range(data.clients)}
        """Clients whose node has not been told, since the server began, where the run stands."""
        self._earlier: dict[tuple[int, str], EarlierRequest] = {}
        """Requests of an earlier process of this server, by node and what they ask."""
        self._floors = (0, 0)
        self._undecided: dict[int, tuple[list[int], bool]] = {}
        """Exchanges whose replies may be used: clients, and whether they keep something of it."""
        self._kept: dict[int, int] = {}
        """The last exchange of which a client has kept something that counts."""
        self._latest: dict[int, int] = {}
        self._settled: dict[int, tuple[int, list[int]]] = {}
        """Exchanges that are decided: a client of the node, and who was used; until the node knows."""
        self._in_flight: dict[int, Request] = {}
        """What clients at work were asked, by client."""
        self._specs: dict[Any, Replied] = {}
        self._groups = task.groups
        self._models = [_Model(own, data, settings, group) for group, own in enumerate(tasks_of(task))]
        """What a client of each group replies, tried here."""
        self._frozen = [own.constants_hash for own in tasks_of(task)]
        self._begun = time.monotonic()

    # What the federation tells --------------------------------------------------------------------

    @property
    def declared(self) -> set[str]:
        """The names of the states that were declared."""
        return set(self._declared)

    def declare(self, name: str, initial: Tensor) -> None:
        """Give every client a state of this name and initial value; nodes are told with the next message."""
        for model in self._models:
            model.states.declare(name, initial.to(self.device))
        self._declared[name] = initial.detach().cpu()
        for delivered in self._delivered.values():
            delivered.discard(name)
        self._specs.clear()

    def settle(self, numbers: np.ndarray, used: np.ndarray) -> None:
        """Remember to tell the nodes which of their clients' last replies were used."""
        decided: dict[int, list[int]] = {self._latest[number]: [] for number in numbers.tolist()}
        for number in used.tolist():
            decided[self._latest[number]].append(number)
        for exchange, clients in decided.items():
            self._decide(exchange, clients)

    def cancel(self, client: int) -> None:
        """Call off the work of a client: what its node answers is not used."""
        request = self._in_flight.pop(client, None)
        if request is not None:
            self._drop(request)

    def farewell(self, linger: float = PARTING) -> None:
        """Tell all nodes that the run is over; those that are not there, if they come back for so long."""
        end, told = time.monotonic() + linger, set[int]()
        first = True
        while first or (set(self._known) - told and time.monotonic() < end):
            requests = []
            for node in self.requests.grid.nodes() - told:  # also who was not asked, or has just come
                told.add(node)
                with _tolerant(node):
                    requests.append(self._send(node, {"kind": "end"}, expected={}))
            self.requests.deliver(requests, PARTING if first else max(end - time.monotonic(), PAUSE))
            first = False
            if set(self._known) - told:
                self.requests.grid.rest(PAUSE)

    # Nodes ----------------------------------------------------------------------------------------

    def _present(self) -> set[int]:
        """The nodes that are there and host clients of this run; newcomers are greeted.

        Those that were left out are greeted too, and are there again when they have answered.
        """
        there = self.requests.grid.nodes()
        left_out = {node for node, silence in self._silent.items() if silence.until}
        for node, error in self.requests.caught():
            if (self.round, node) in self._warned:  # a node may try it as often as it likes
                self.noted[error.kind] += 1
            else:
                self._note(node, error)
                self._warned = {(self.round, node), *(seen for seen in self._warned if seen[0] == self.round)}
        for node, met in self._admission.met(there - (set(self._known) - left_out)).items():
            if isinstance(met, Failed):
                if node not in left_out:
                    self._note(node, met)
                continue
            if node in left_out:
                self._reported(node, met)
                continue
            try:
                self._admit(node, met, there)
            except Failed as error:
                self._note(node, error)
                self._admission.refuse(node, str(error))
        left_out = {node for node, silence in self._silent.items() if silence.until}
        return there & set(self._known) - left_out

    def _missed(self, node: int) -> None:
        """A node has left a request unanswered: after some it is not asked any more until it reports back.

        The first time it may miss a few; who falls silent again and again is asked ever more seldom.
        """
        silence = self._silent.setdefault(node, Silence())
        silence.misses += 1
        if silence.misses >= (1 if silence.times else MISSES):
            silence.times, silence.misses = silence.times + 1, 0
            silence.until = time.monotonic() + self.requests.deadline * 2 ** (silence.times - 1)
            silence.process = self._known[node].process
            self._opened.discard(node)
            told = "round %d, node %d (%s): left out until it reports back, as it does not answer"
            log.warning(told, self.round, node, listed_names(self._known[node].names, 3))

    def _reported(self, node: int, met: Introduction) -> None:
        """A node that was left out has answered a greeting."""
        silence = self._silent[node]
        if met.process != silence.process or time.monotonic() > silence.until or self._needed:
            silence.until = 0.0
            log.warning("round %d, node %d: is back", self.round, node)

    def _admit(self, node: int, met: Introduction, there: set[int]) -> None:
        """Let a node that is new here take over its clients, if theirs is gone."""
        unknown = [name for name in met.names if name not in self._number]
        if unknown:
            raise Failed(
                "stranger", f"client {shown(unknown[0])} is not in this run, which has begun without it"
            )
        reason = unknown_label(met, self._data.labels)
        if reason is not None:
            raise Failed("stranger", reason)
        mine = {
            self._number[name]: place for name, place in zip(met.names, range(len(met.names)), strict=True)
        }
        taken = [number for number in mine if self._hosts.get(number) in there]
        if taken:
            raise Failed("stranger", f"client {shown(self.names[taken[0]])} is at another node already")
        like = next(iter(self._known.values()))
        if met.features != like.features:
            raise Failed("stranger", other_columns(met, like))
        if met.samples != like.samples:
            raise Failed("stranger", f"its samples are {met.samples}, those of the others {like.samples}")
        for part, counts in self.counts.items():
            if part in met.counts:
                wrong = [
                    number for number, place in mine.items() if counts[number] != met.counts[part][place]
                ]
                if wrong:
                    raise Failed(
                        "stranger", f"client {shown(self.names[wrong[0]])} has other data than at the start"
                    )
        old = {self._hosts[number] for number in mine if number in self._hosts}
        self._hosts |= dict.fromkeys(mine, node)
        self._known[node] = met
        self._admission.admitted(node, met)
        for gone in old - set(self._hosts.values()):
            self._known.pop(gone, None)
        log.info("node %d has taken over %d clients", node, len(mine))

    def _open(self, node: int) -> None:
        """Tell a node where the run stands; one that was started anew is greeted first."""
        met = self._known[node]
        again = self._admission.greet(node)
        if (again.names, again.hash) != (met.names, met.hash):
            reason = unknown_label(again, self._data.labels)
            error = Failed("stranger", reason or "it has other clients or data than at the start")
            self._admission.refuse(node, str(error))
            raise error
        self._known[node] = again
        numbers = [self._number[name] for name in met.names]
        back = [self._back[number] for number in numbers if number in self._back]
        header = {
            "kind": "open",
            "clients": len(self.names),
            "numbers": numbers,
            "classes": self._data.classes,
            "labels": self._data.labels,
            **self._groups_told(numbers),
            **({} if self._data.columns is None else {"columns": columns_mapping(self._data.columns)}),
            "frozen": self._frozen,
            "at": min((one.at for one in back), default=self._exchange),
            "without": sorted({exchange for one in back for exchange in one.without}),
            "keep": sorted({exchange for one in back for exchange in one.keep}),
            "kept": sorted({self._kept[number] for number in numbers if number in self._kept}),
        }
        groups: dict[str, dict[str, Tensor]] = {}
        if self._moments is not None:
            header["number"], groups["moments"] = sent_moments(self._moments)
        request = self._send(node, header, groups, expected={})
        self.requests.wait(request)
        self._received(request)
        self._opened.add(node)
        self._delivered[node] = set()
        for number in numbers:
            self._back.pop(number, None)

    def _groups_told(self, numbers: list[int]) -> dict[str, Any]:
        """The group of each of these clients, and what groups there are, if any."""
        if self._groups is None:
            return {}
        return {"groups": self._groups.of[numbers].tolist(), "entries": list(self._groups.entries)}

    def _send(
        self,
        node: int,
        header: dict[str, Any],
        groups: Groups | None = None,
        *,
        expected: Expected,
        note: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Request:
        """A request that says, besides, what was decided of earlier exchanges with this node."""
        settled = {
            exchange: used
            for exchange, (client, used) in self._settled.items()
            if self._hosts[client] == node
        }
        header |= {"run": self._run_id, "settled": list(settled.items()), "floor": self._floors[0]}
        request = self.requests.send(node, header, groups, expected, note)
        request.settled = tuple(settled)
        for name, value in more.items():
            setattr(request, name, value)
        return request

    def _received(self, request: Request) -> None:
        """A node has answered, so it has read what it was told."""
        if request.node in self._silent:
            self._silent[request.node].misses = 0
        for exchange in request.settled:
            self._settled.pop(exchange, None)
        if request.declared:
            self._delivered[request.node].update(request.declared)

    def _note(self, node: int, error: Failed) -> None:
        """A fault of a node: a line in the log and a number in the round's notes."""
        who = listed_names(self._known[node].names, 3) if node in self._known else "unknown clients"
        log.warning("round %d, node %d (%s): %s: %s", self.round, node, who, error.kind, error)
        self.noted[error.kind] += 1
        if error.kind in SLOW and node in self._known:
            self._missed(node)
        elif node in self._silent:  # it is not silent, whatever it says
            self._silent[node].misses = 0

    # An exchange ----------------------------------------------------------------------------------

    def run(self, work: Work) -> Outcome:
        """Ask the nodes of these clients, and take what they answer."""
        sent, trains, _ = self._expected(work)
        if not len(work.numbers):
            return NOBODY

        def ask(node: int, places: np.ndarray) -> Request:
            return self._ask(node, work.rows(places, to_device(places, self.device)), places)

        answers = self._gather(work.numbers, ask)
        places = np.concatenate([request.places for request, _ in answers])
        order = to_device(np.argsort(places, kind="stable"), self.device)

        def joined(group: str, name: str) -> Tensor:
            return torch.cat([groups[group][name] for _, groups in answers]).to(self.device)[order]

        replies = {name: joined("sent", name) for name in sent}
        buffers = joined("buffers", "buffers") if trains and self.policy == "average" else None
        return Outcome(work.numbers[np.sort(places)], replies, {}, buffers)

    def run_with(self, work: Work, attach: Attach) -> Outcome:
        """What a client of samples of zeros replies, for each of these clients; nobody is asked."""
        if not len(work.numbers):
            return NOBODY
        same = torch.zeros(len(work.numbers), dtype=torch.int64, device=self.device)
        outcome = self._tried(work).rows(same)
        # Of such samples a method need not make sense; what is not finite would be refused.
        sent = {name: value.nan_to_num(0.0, 0.0, 0.0) for name, value in outcome.sent.items()}
        return Outcome(work.numbers, sent, {}, outcome.buffers if self.policy == "average" else None)

    def _gather(self, numbers: np.ndarray, ask: Callable[[int, np.ndarray], Request]) -> list[Any]:
        """The answers of the nodes of these clients: of all that answer in time, and of a quorum at least."""
        clients: dict[int, list[int]] = {}
        for place, number in enumerate(numbers.tolist()):
            clients.setdefault(self._hosts[number], []).append(place)
        asked = {node: np.array(places) for node, places in clients.items()}
        enough = min(self.quorum, len(asked))
        absent, closed, waiting = set(asked), set[int](), dict[int, Request]()
        told_again: set[int] = set()
        answers: list[tuple[Request, dict[str, dict[str, Tensor]]]] = []
        failed: Failed | None = None
        first, reminded = True, time.monotonic()
        while first or waiting or closed or len(answers) < enough:
            self._needed = not waiting and not first
            there = self._present()
            # Whoever is back is asked again only where the others are too few to go on.
            again = absent if first or len(answers) < enough else closed
            for node in sorted(again & there):
                absent.discard(node)
                closed.discard(node)
                try:
                    waiting[node] = ask(node, asked[node])
                except Failed as error:
                    failed = error
                    self._faulty(node, error, absent)
            if first:
                self._count("gone", len(absent - there))
                first = False
            for node, request in list(waiting.items()):
                try:
                    answer = self.requests.look(request)
                except Failed as error:
                    failed = error
                    del waiting[node]
                    self._drop(request)
                    self._faulty(node, error, absent)
                    if error.kind == "closed" and node not in told_again:
                        closed.add(node)  # it is there, and has only to be told of the run again
                        told_again.add(node)
                    continue
                if answer is not None:
                    del waiting[node]
                    self._received(request)
                    answers.append((request, answer[1]))
            if not waiting and not absent and len(answers) < enough:
                raise SartorError(f"{len(answers)} of {len(asked)} nodes answered, {enough} must: {failed}")
            if absent and time.monotonic() - reminded > REMIND:
                reminded = time.monotonic()
                log.warning("round %d: waiting for %d of %d nodes", self.round, len(absent), len(asked))
            if waiting or len(answers) < enough:
                self.requests.grid.rest(PAUSE)
        self._needed = False
        return answers

    def _faulty(self, node: int, error: Failed, absent: set[int]) -> None:
        """Note a fault; the node may be asked again if it was only gone or slow."""
        self._note(node, error)
        if error.kind in RETURNING:
            self._opened.discard(node)
        if error.kind in (*RETURNING, *SLOW):
            absent.add(node)

    def _ask(self, node: int, work: Work, places: np.ndarray) -> Request:
        """Ask some clients of one node to run a client function."""
        digest = ""
        function = work.function
        name, hyper = qualified_name(inner_function(function)), hyper_values(work.hyper)
        numbers = work.numbers.tolist()
        if self.requests.grid.lasting and work.keeps:
            given = {} if work.buffers is None else {"buffers": work.buffers}
            asked = [self._run_id, name, hyper, numbers, work.rounds.tolist()]
            digest = _digest(asked, work.shared, work.own, given)
        earlier = self._earlier.pop((node, digest), None)
        if node not in self._opened and earlier is None:
            self._open(node)
        sent, trains, keeps = self._expected(work)
        self._exchange += 1
        exchange = self._exchange if earlier is None else earlier.exchange
        delivered = self._delivered.get(node, set())
        declared = {name: value for name, value in self._declared.items() if name not in delivered}
        groups: dict[str, dict[str, Tensor]] = {"shared": work.shared, "each": work.own, "declared": declared}
        if work.buffers is not None and self.policy == "average":
            groups["buffers"] = {"buffers": work.buffers}
        expected = {"sent": {name: (dtype, (len(numbers), *shape)) for name, (dtype, shape) in sent.items()}}
        if trains and self.policy == "average":
            assert work.buffers is not None
            dtype, shape = spec_of(work.buffers if work.buffers.dim() == 1 else work.buffers[0])
            expected["buffers"] = {"buffers": (dtype, (len(numbers), *shape))}
        header = {
            "kind": "call",
            "exchange": exchange,
            "function": name,
            "algorithm": self._experiment.algorithm,
            "hyper": hyper,
            "round": self.round,
            "numbers": numbers,
            "rounds": work.rounds.tolist(),
            "keeps": work.keeps,
            "transformed": _transformed(function),
        }
        if earlier is None:
            process, client = self._known[node].process, numbers[0]
            note = {"process": process, "digest": digest, "exchange": exchange, "client": client}
            request = self._send(
                node,
                header,
                groups,
                expected=expected,
                note=note if digest else None,
                exchange=exchange,
                places=places,
                declared=tuple(declared),
            )
        else:
            header |= {"run": self._run_id, "settled": [], "floor": self._floors[0]}
            request = self.requests.take_up(earlier, header, groups, expected)
            request.exchange, request.places = exchange, places
            self._count("taken_up", 1)
        if work.keeps:
            self._undecided[exchange] = (numbers, keeps)
            self._latest |= dict.fromkeys(numbers, exchange)
        return request

    def _drop(self, request: Request) -> None:
        """Nothing of an exchange counts: its node will be told to forget what was staged."""
        self.requests.grid.forget(request.message)
        self._decide(request.exchange, [])

    def _decide(self, exchange: int, used: list[int]) -> None:
        if exchange in self._undecided:
            numbers, keeps = self._undecided.pop(exchange)
            self._settled[exchange] = (numbers[0], used)
            if keeps:
                self._kept |= dict.fromkeys(used, exchange)

    def _expected(self, work: Work) -> Replied:
        """What one client replies: found by running the function here once.

        It runs on samples of zeros. So a reply of any other size or type is refused before it is decoded.
        """
        given = tuple((name, spec_of(value)) for name, value in sorted(work.shared.items()))
        own = tuple((name, spec_of(value[0])) for name, value in sorted(work.own.items()) if len(value))
        group = self._group(work)
        key = (work.function, work.hyper, given, own, group)
        if key not in self._specs:
            outcome = self._tried(work)
            sent = {name: spec_of(value[0]) for name, value in outcome.sent.items()}
            trains = outcome.buffers is not None
            keeps = bool(outcome.kept) or (trains and self.policy == "local")
            self._specs[key] = Replied(sent, trains, keeps)
        return self._specs[key]

    def _group(self, work: Work) -> int:
        """The group of the clients of some work; 0 where there are none."""
        return 0 if self._groups is None or not len(work.numbers) else int(self._groups.of[work.numbers[0]])

    def _tried(self, work: Work) -> Outcome:
        """What a client of samples of zeros does, found by running the function here."""
        one = np.zeros(1, dtype=np.int64)
        first = {name: value[:1] for name, value in work.own.items()}
        buffers = work.buffers
        start = buffers if buffers is None or buffers.dim() == 1 else buffers[:1]
        tried = work._replace(numbers=one, rounds=one + self.round, own=first, buffers=start)
        return self._models[self._group(work)].run(tried)

    # Work in flight -------------------------------------------------------------------------------

    def shapes(self, work: Work, attach: Attach) -> dict[str, Tensor]:
        """What one client replies, as zeros."""
        sent = self._expected(work).sent
        return {
            name: torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)
            for name, (dtype, shape) in sent.items()
        }

    def now(self) -> float:
        """The time since the run began, in its units."""
        return (time.monotonic() - self._begun) / self.unit

    def send(self, queue: EventQueue, hyper: Any) -> None:
        """Send the work of all clients that have not been sent theirs, where their node is there."""
        there = self._present()
        for job in queue:
            node = self._hosts[job.client]
            if job.client not in self._in_flight and job.result is None and node in there:
                with _tolerant(node, self._note):
                    work = Work(
                        job.call.function,
                        hyper,
                        np.array([job.client]),
                        np.array([job.stream]),
                        dict(job.call.shared),
                        {name: value[None] for name, value in job.each.items()},
                        job.buffers,
                        self.round,
                    )
                    self._in_flight[job.client] = self._ask(node, work, np.zeros(1, dtype=np.int64))

    def due(self, queue: EventQueue, count: float, end: float, hyper: Any) -> tuple[list[Job], list[Job]]:
        """The jobs that arrive next in real time, and those that will not; what is found at once arrives at
        one instant.
        """
        jobs: list[Job] = []
        lost: list[Job] = []
        reminded = time.monotonic()
        while len(queue) and not jobs:
            self.send(queue, hyper)
            now = max(min(self.now(), end), queue.now)
            for job in list(queue):
                request = self._in_flight.get(job.client)
                if request is None or len(jobs) >= count:
                    continue
                if jobs and job.call.function is not jobs[0].call.function:
                    continue
                try:
                    answer = self.requests.look(request)
                except Failed as error:
                    del self._in_flight[job.client]
                    self._drop(request)
                    self._note(request.node, error)
                    if error.kind in RETURNING:
                        self._opened.discard(request.node)
                    else:
                        lost.append(queue.cancel(job.client))
                    continue
                if answer is None:
                    continue
                del self._in_flight[job.client]
                self._received(request)
                queue.cancel(job.client)
                job.finish = now
                groups = answer[1]
                sent = {name: value[0].to(self.device) for name, value in groups.get("sent", {}).items()}
                trained = groups.get("buffers", {}).get("buffers")
                buffers = None if trained is None else trained[0].to(self.device)
                job.result = Outcome(np.array([job.client]), sent, {}, buffers)
                jobs.append(job)
            queue.wait_until(now)
            if self.now() > end:
                break
            if not jobs:
                if time.monotonic() - reminded > REMIND:
                    reminded = time.monotonic()
                    log.warning("round %d: waiting for %d clients at work", self.round, len(queue))
                self.requests.grid.rest(min(PAUSE, max(0.0, end - self.now()) * self.unit))
        return jobs, lost

    # What a checkpoint needs ----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """How far the nodes' states have come."""
        self._forget_earlier()
        flying = sorted(request.exchange for request in self._in_flight.values())
        saved = {
            "run": self._run_id,
            "exchange": self._exchange,
            "without": flying,
            "settled": [[exchange, client, used] for exchange, (client, used) in self._settled.items()],
            "kept": list(self._kept.items()),
            "back": [
                [list(back), [client for client, own in self._back.items() if own == back]]
                for back in dict.fromkeys(self._back.values())
            ],
        }
        # Nodes may go back to this checkpoint or the one before.
        self._floors = (self._floors[1], min([self._exchange, *(exchange - 1 for exchange in flying)]))
        return saved

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Take everything back; nodes are taken back when they are asked next."""
        self._run_id, self._exchange = saved["run"], saved["exchange"]
        self._back = dict.fromkeys(range(len(self.names)), Back(self._exchange, tuple(saved["without"])))
        for (at, without, keep), clients in saved["back"]:  # of whom the last process had not told either
            self._back |= dict.fromkeys(clients, Back(at, tuple(without), tuple(keep)))
        self._settled = {exchange: (client, used) for exchange, client, used in saved["settled"]}
        self._kept = dict(saved["kept"])
        floor = min([self._exchange, *(exchange - 1 for exchange in saved["without"])])
        self._floors = (0, floor)
        self._opened, self._delivered = set(), {}
        self._undecided, self._latest, self._in_flight = {}, {}, {}
        self._begun = time.monotonic() - now * self.unit
        for earlier in self.requests.earlier():
            met = self._known.get(earlier.node)
            if met is not None and (earlier.answered or earlier.process == met.process):
                self._earlier[earlier.node, earlier.digest] = earlier
                for number in (self._number[name] for name in met.names):
                    back = self._back[number]
                    self._back[number] = back._replace(keep=(*back.keep, earlier.exchange))
                self._exchange = max(self._exchange, earlier.exchange)  # numbers are not given twice
            else:
                self.requests.grid.forget(earlier.message)

    def _forget_earlier(self) -> None:
        """Forget the requests of before that nobody has asked for again."""
        for earlier in self._earlier.values():
            self.requests.grid.forget(earlier.message)
            self._settled[earlier.exchange] = (earlier.client, [])
        self._earlier = {}

    def _count(self, kind: str, amount: int) -> None:
        if amount:
            self.noted[kind] += amount


def _transformed(function: ClientFunction) -> dict[str, Any] | None:
    """What a node must know to put the experiment's transforms around a function as the server did."""
    if inner_function(function) is function:
        return None
    shapes, states = function.shapes, function.states  # type: ignore[attr-defined]
    return {"shapes": plain_shapes(shapes), "states": list(states)}


def _digest(asked: list[Any], *tensors: Mapping[str, Tensor]) -> str:
    """Of everything that a request asks."""
    found = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    for part in encode({}, {str(place): held for place, held in enumerate(tensors)}).values():
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()


@contextmanager
def _tolerant(node: int, note: Callable[[int, Failed], None] | None = None) -> Any:
    """A node's fault is noted and leaves the others alone."""
    try:
        yield
    except Failed as error:
        if note is not None:
            note(node, error)


class _Model:
    """A client of a group, on which the server finds out what a client function replies."""

    def __init__(self, task: Task, data: ClientData, settings: FederationSettings, group: int) -> None:
        self._engine, self._policy = _one_client(task, data, replace(settings, workers=1)), settings.buffers
        device = self._engine.device
        self.states = StateStore(1, device, groups=np.array([group]))
        if task.buffer_size and self._policy == "local":
            self.states.declare("buffers", task.initial_buffers(device))

    def run(self, work: Work) -> Outcome:
        """What it replies and keeps, checked."""
        outcome = self._engine.run(self.states.attached(work, self._policy))
        self.states.check(work.function, outcome)
        return outcome


def _one_client(task: Task, data: ClientData, settings: FederationSettings) -> LoopEngine:
    """A client of two samples of zeros, on which the server finds out what a client function replies."""
    x, y = nests.rows((data.train.x, data.train.y), torch.zeros(2, dtype=torch.int64))
    split = Split(x, y, np.zeros(1, dtype=np.int64), np.full(1, 2, dtype=np.int64))
    tried = replace(
        data,
        names=("model",),
        train=split,
        test=split,
        validation=None if data.validation is None else split,
        pooled_x=split.x,
        pooled_y=split.y,
    )
    return LoopEngine(task, tried, settings)
