"""The server's side of a real federation: clients are at nodes, which are asked by messages.

:class:`FlowerFederation` is a federation like the engines: algorithms, evaluation and the loop use it as they
use those. It has neither samples nor client states; every exchange sends one message to each node that
hosts clients of the cohort and takes what comes back before the deadline. A node that is late, gone or
answers nonsense leaves the exchange and harms nobody else: the fault is logged, counted in the round's notes,
and the round goes on with those who answered, as long as they are a quorum. Below it, the server waits for
nodes to come back and asks them again; as randomness is keyed by round and client, they answer what they
would have answered before.

:mod:`sartor.remote.requests` has the messages, :mod:`sartor.remote.admission` who takes part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sartor.client.local import Client
from sartor.data.clients import ClientData, Moments, Split
from sartor.engines.loop import LoopFederation
from sartor.errors import SartorError
from sartor.federation.clock import Conditions, Job
from sartor.federation.exchange import Arguments, ClientFunction, Outcome, Replies, Reply, Work
from sartor.federation.federation import Federation
from sartor.federation.functions import name_of, qualified_name
from sartor.kernels.device import to_device
from sartor.model.task import Task
from sartor.remote.admission import Introduction, Reception
from sartor.remote.messages import Spec, encode, spec_of
from sartor.remote.node import hyper_values
from sartor.remote.requests import PAUSE, Expected, Failed, Grid, Groups, Left, Letter, Post
from sartor.runs.experiment import Experiment

log = logging.getLogger(__name__)

REMIND = 30.0
"""Seconds between two reminders that the server waits for nodes."""
RETURNING = ("gone", "closed")
"""Faults of nodes that were started anew, or may be: they are asked again when they are back."""


class Back(NamedTuple):
    """Where a client's states must go back to: an exchange, less these before it, and these after it."""

    at: int
    without: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()


def own_buffers(client: Client, hyper: Any) -> Reply:
    """A client's float buffers, where each keeps its own."""
    return Reply(buffers=client.buffers)


class FlowerFederation(Federation):
    """Clients at nodes of a grid. ``met`` are the nodes' introductions, ``data`` what they add up to."""

    engine = "flower"
    pools = False

    def __init__(
        self,
        grid: Grid,
        met: Mapping[int, Introduction],
        experiment: Experiment,
        task: Task,
        data: ClientData,
        *,
        deadline: float = 600.0,
        quorum: int = 1,
        unit: float = 1.0,
        **settings: Any,
    ) -> None:
        conditions: Conditions = settings.pop("conditions", None) or Conditions()
        # A bad reply is its sender's harm alone; who is there and for how long is not simulated.
        conditions = Conditions(on_bad_reply="drop", largest_norm=conditions.largest_norm)
        settings.setdefault("method", experiment.algorithm)
        super().__init__(task, data, conditions=conditions, **settings)
        self.post, self.quorum, self.unit = Post(grid, deadline), quorum, unit
        self._experiment, self._data = experiment, data
        self._number = {name: number for number, name in enumerate(data.names)}
        self._hosts: dict[int, int] = {}
        """The node of each client."""
        self._known = dict(met)
        for node, introduction in met.items():
            self._hosts |= {self._number[name]: node for name in introduction.names}
        moments = [introduction.moments for introduction in met.values()]
        self._moments: Moments | None = None
        for part in sorted((part for part in moments if part is not None), key=lambda part: part.number):
            self._moments = part if self._moments is None else self._moments + part
        self._reception = Reception(self.post, experiment)
        self._warned: set[tuple[int, int]] = set()
        """Rounds and nodes whose forgeries the log has told of."""
        self._opened: set[int] = set()
        self._declared: dict[str, Tensor] = {}
        self._delivered: dict[int, set[str]] = {}
        self._run_id = secrets.token_hex(8)
        self._exchange = 0
        self._back = {number: Back(0) for number in range(data.clients)}
        """Clients whose node has not been told, since the server began, where the run stands."""
        self._left: dict[tuple[int, str], Left] = {}
        """Requests of an earlier process of this server, by node and what they ask."""
        self._floors = (0, 0)
        self._undecided: dict[int, tuple[int, list[int]]] = {}
        """Exchanges of which clients keep something: node and clients, until it is known what was used."""
        self._latest: dict[int, int] = {}
        self._settled: dict[int, tuple[int, list[int]]] = {}
        """Exchanges that are decided: a client of the node, and who was used; until the node knows."""
        self._keeping = True
        self._letters: dict[int, Letter] = {}
        self._specs: dict[Any, tuple[dict[str, Spec], bool]] = {}
        self._model = _one_client(task, data, self)
        self._begun = time.monotonic()

    # What algorithms use --------------------------------------------------------------------------

    def declare(self, **initial: Tensor) -> None:
        """Give every client a state of this name and initial value; nodes are told with the next message."""
        super().declare(**initial)
        self._model.declare(**initial)
        self._declared |= {name: value.detach().cpu() for name, value in initial.items()}
        for delivered in self._delivered.values():
            delivered.difference_update(initial)
        self._specs.clear()

    def ask(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
    ) -> Replies:
        """Ask as ``map`` does, for evaluation: nothing is kept. Whoever is gone is left out."""
        self._keeping = False
        try:
            replies = super().ask(function, cohort, shared, each)
        finally:
            self._keeping = True
        good = np.ones(len(replies), dtype=bool)
        for value in replies.values.values():
            if value.is_floating_point():
                good &= torch.isfinite(value[:, None].flatten(1)).all(dim=1).cpu().numpy()
        if good.all():
            return replies
        for number in replies.clients[~good].tolist():
            log.warning("client %r: what it evaluated is not finite; left out", self.names[number])
        self._count("bad", int((~good).sum()))
        places = to_device(np.flatnonzero(good), self.device)
        values = {name: value[places] for name, value in replies.values.items()}
        return replace(replies, clients=replies.clients[good], counts=replies.counts[good], values=values)

    @property
    def mean_buffers(self) -> Tensor | None:
        """The float buffers that go with a shared model: the server's, or the mean of the clients'."""
        if self.policy != "local" or self.buffers is None:
            return self.buffers
        return self.ask(own_buffers, np.arange(self.clients))["buffers"].mean(dim=0)

    def dispatch(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
        concurrency: int = 0,
    ) -> np.ndarray:
        """Put idle clients of the cohort to work; their nodes get a message each."""
        self.queue.wait_until(self._clock())
        started = super().dispatch(function, cohort, shared, each, concurrency)
        self._send_jobs()
        return started

    def cancel(self, clients: Sequence[int] | np.ndarray) -> None:
        """Call off the work of these clients: what their nodes answer is not used."""
        super().cancel(clients)
        for client in np.asarray(clients, dtype=np.int64).tolist():
            letter = self._letters.pop(client, None)
            if letter is not None:
                self._drop(letter)

    def farewell(self, patience: float = 10.0) -> None:
        """Tell all nodes that the run is over."""
        letters = []
        for node in self._present():
            if node in self._opened:
                with _tolerant(node):
                    letters.append(self._letter(node, {"kind": "end"}, expected={}))
        end = time.monotonic() + patience
        while letters and time.monotonic() < end:
            for letter in list(letters):
                try:
                    if self.post.look(letter) is not None:
                        letters.remove(letter)
                except Failed:
                    letters.remove(letter)
            time.sleep(PAUSE)

    # Nodes ----------------------------------------------------------------------------------------

    def _present(self) -> set[int]:
        """The nodes that are there and host clients of this run; newcomers are greeted."""
        there = self.post.grid.nodes()
        for node, error in self.post.caught():
            if (self.round, node) in self._warned:  # a node may try it as often as it likes
                self._count(error.kind, 1)
            else:
                self._note(node, error)
                self._warned = {(self.round, node), *(seen for seen in self._warned if seen[0] == self.round)}
        for node, met in self._reception.met(there - set(self._known)).items():
            if isinstance(met, Failed):
                self._note(node, met)
                continue
            try:
                self._admit(node, met, there)
            except Failed as error:
                self._note(node, error)
                self._reception.refuse(node, str(error))
        return there & set(self._known)

    def _admit(self, node: int, met: Introduction, there: set[int]) -> None:
        """Let a node that is new here take over its clients, if theirs is gone."""
        unknown = [name for name in met.names if name not in self._number]
        if unknown:
            raise Failed("stranger", f"client {unknown[0]!r} is not in this run, which has begun without it")
        mine = {
            self._number[name]: place for name, place in zip(met.names, range(len(met.names)), strict=True)
        }
        taken = [number for number in mine if self._hosts.get(number) in there]
        if taken:
            raise Failed("stranger", f"client {self.names[taken[0]]!r} is at another node already")
        like = next(iter(self._known.values()))
        if met.samples != like.samples:
            raise Failed("stranger", f"its samples are {met.samples}, those of the others {like.samples}")
        for part, samples in self.samples.items():
            if part in met.counts:
                wrong = [
                    number
                    for number, place in mine.items()
                    if samples.counts[number] != met.counts[part][place]
                ]
                if wrong:
                    raise Failed(
                        "stranger", f"client {self.names[wrong[0]]!r} has other data than at the start"
                    )
        old = {self._hosts[number] for number in mine if number in self._hosts}
        self._hosts |= dict.fromkeys(mine, node)
        self._known[node] = met
        for gone in old - set(self._hosts.values()):
            self._known.pop(gone, None)
        log.info("node %d has taken over %d clients", node, len(mine))

    def _open(self, node: int) -> None:
        """Tell a node where the run stands; one that was started anew is greeted first."""
        met = self._known[node]
        again = self._reception.greet(node)
        if (again.names, again.hash) != (met.names, met.hash):
            error = Failed("stranger", "it has other clients or data than at the start")
            self._reception.refuse(node, str(error))
            raise error
        self._known[node] = again
        numbers = [self._number[name] for name in met.names]
        back = [self._back[number] for number in numbers if number in self._back]
        header = {
            "kind": "open",
            "clients": self.clients,
            "numbers": numbers,
            "classes": self._data.classes,
            "buffers": self.policy,
            "at": min((one.at for one in back), default=self._exchange),
            "without": sorted({exchange for one in back for exchange in one.without}),
            "keep": sorted({exchange for one in back for exchange in one.keep}),
        }
        groups: dict[str, dict[str, Tensor]] = {}
        if self._moments is not None:
            groups["moments"] = {"mean": self._moments.mean, "squares": self._moments.squares}
            header["number"] = self._moments.number
        letter = self._letter(node, header, groups, expected={})
        self.post.wait(letter)
        self._received(letter)
        self._opened.add(node)
        self._delivered[node] = set()
        for number in numbers:
            self._back.pop(number, None)

    def _letter(
        self,
        node: int,
        header: dict[str, Any],
        groups: Groups | None = None,
        *,
        expected: Expected,
        note: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Letter:
        """A request that says, besides, what was decided of earlier exchanges with this node."""
        settled = {
            exchange: used
            for exchange, (client, used) in self._settled.items()
            if self._hosts[client] == node
        }
        header |= {"run": self._run_id, "settled": list(settled.items()), "floor": self._floors[0]}
        letter = self.post.send(node, header, groups, expected, note)
        letter.settled = tuple(settled)
        for name, value in more.items():
            setattr(letter, name, value)
        return letter

    def _received(self, letter: Letter) -> None:
        """A node has answered, so it has read what it was told."""
        for exchange in letter.settled:
            self._settled.pop(exchange, None)
        if letter.declared:
            self._delivered[letter.node].update(letter.declared)

    def _note(self, node: int, error: Failed) -> None:
        """A fault of a node: a line in the log and a number in the round's notes."""
        who = ", ".join(self._known[node].names[:3]) if node in self._known else "unknown clients"
        log.warning("round %d, node %d (%s): %s: %s", self.round, node, who, error.kind, error)
        self._count(error.kind, 1)

    # An exchange ----------------------------------------------------------------------------------

    def _train(
        self,
        function: ClientFunction,
        hyper: Any,
        numbers: np.ndarray,
        rounds: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
        buffers: Tensor | None,
    ) -> tuple[np.ndarray, Outcome]:
        """Ask the nodes of these clients, and take what they answer."""
        hyper = self.hyper if hyper is None else hyper
        sent, trains = self._expected(function, hyper, shared, each, buffers)
        if not len(numbers):
            return numbers, Outcome({}, {}, None)

        def request(node: int, places: np.ndarray) -> Letter:
            rows = to_device(places, self.device)
            own = {name: value[rows] for name, value in each.items()}
            given = buffers if buffers is None or buffers.dim() == 1 else buffers[rows]
            return self._request(
                node, function, hyper, numbers[places], rounds[places], shared, own, given, places
            )

        answers = self._gather(numbers, request)
        places = np.concatenate([letter.places for letter, _ in answers])
        order = to_device(np.argsort(places, kind="stable"), self.device)

        def joined(group: str, name: str) -> Tensor:
            return torch.cat([groups[group][name] for _, groups in answers]).to(self.device)[order]

        outcome = Outcome({name: joined("sent", name) for name in sent}, {}, None)
        if trains and self.policy == "average":
            outcome = replace(outcome, buffers=joined("buffers", "buffers"))
        return numbers[np.sort(places)], outcome

    def _gather(self, numbers: np.ndarray, request: Callable[[int, np.ndarray], Letter]) -> list[Any]:
        """The answers of the nodes of these clients: of all that answer in time, and of a quorum at least."""
        clients: dict[int, list[int]] = {}
        for place, number in enumerate(numbers.tolist()):
            clients.setdefault(self._hosts[number], []).append(place)
        asked = {node: np.array(places) for node, places in clients.items()}
        enough = min(self.quorum, len(asked))
        absent, closed, waiting = set(asked), set[int](), dict[int, Letter]()
        told_again: set[int] = set()
        answers: list[tuple[Letter, dict[str, dict[str, Tensor]]]] = []
        failed: Failed | None = None
        first, reminded = True, time.monotonic()
        while first or waiting or closed or len(answers) < enough:
            there = self._present()
            # Whoever is back is asked again only where the others are too few to go on.
            again = absent if first or len(answers) < enough else closed
            for node in sorted(again & there):
                absent.discard(node)
                closed.discard(node)
                try:
                    waiting[node] = request(node, asked[node])
                except Failed as error:
                    failed = error
                    self._faulty(node, error, absent)
            if first:
                self._count("gone", len(absent - there))
                first = False
            for node, letter in list(waiting.items()):
                try:
                    answer = self.post.look(letter)
                except Failed as error:
                    failed = error
                    del waiting[node]
                    self._drop(letter)
                    self._faulty(node, error, absent)
                    if error.kind == "closed" and node not in told_again:
                        closed.add(node)  # it is there, and has only to be told of the run again
                        told_again.add(node)
                    continue
                if answer is not None:
                    del waiting[node]
                    self._received(letter)
                    answers.append((letter, answer[1]))
            if not waiting and not absent and len(answers) < enough:
                raise SartorError(f"{len(answers)} of {len(asked)} nodes answered, {enough} must: {failed}")
            if absent and time.monotonic() - reminded > REMIND:
                reminded = time.monotonic()
                log.warning("round %d: waiting for %d of %d nodes", self.round, len(absent), len(asked))
            if waiting or len(answers) < enough:
                time.sleep(PAUSE)
        return answers

    def _faulty(self, node: int, error: Failed, absent: set[int]) -> None:
        """Note a fault; the node may be asked again if it was only gone or late."""
        self._note(node, error)
        if error.kind in RETURNING:
            self._opened.discard(node)
        if error.kind in (*RETURNING, "late"):
            absent.add(node)

    def _request(
        self,
        node: int,
        function: ClientFunction,
        hyper: Any,
        numbers: np.ndarray,
        rounds: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
        buffers: Tensor | None,
        places: np.ndarray,
    ) -> Letter:
        """Ask some clients of one node to run a client function."""
        digest = ""
        if self.post.grid.lasting and self._keeping:
            asked = [qualified_name(function), hyper_values(hyper), numbers.tolist(), rounds.tolist()]
            given = {} if buffers is None else {"buffers": buffers}
            digest = _digest([self._run_id, *asked], shared, each, given)
        left = self._left.pop((node, digest), None)
        if node not in self._opened and left is None:
            self._open(node)
        sent, trains = self._expected(function, hyper, shared, each, buffers)
        self._exchange += 1
        exchange = self._exchange if left is None else left.exchange
        delivered = self._delivered.get(node, set())
        declared = {name: value for name, value in self._declared.items() if name not in delivered}
        groups: dict[str, dict[str, Tensor]] = {"shared": shared, "each": each, "declared": declared}
        if buffers is not None and self.policy == "average":
            groups["buffers"] = {"buffers": buffers}
        expected = {"sent": {name: (dtype, (len(numbers), *shape)) for name, (dtype, shape) in sent.items()}}
        if trains and self.policy == "average":
            assert self.buffers is not None
            dtype, shape = spec_of(self.buffers)
            expected["buffers"] = {"buffers": (dtype, (len(numbers), *shape))}
        header = {
            "kind": "call",
            "exchange": exchange,
            "function": qualified_name(function),
            "algorithm": self.method,
            "hyper": hyper_values(hyper),
            "round": self.round,
            "numbers": numbers.tolist(),
            "rounds": rounds.tolist(),
            "keeps": self._keeping,
        }
        if left is None:
            process, client = self._known[node].process, int(numbers[0])
            note = {"process": process, "digest": digest, "exchange": exchange, "client": client}
            letter = self._letter(
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
            letter = self.post.take_up(left, header, groups, expected)
            letter.exchange, letter.places = exchange, places
            self._count("taken_up", 1)
        if self._keeping:
            self._undecided[exchange] = (node, numbers.tolist())
            self._latest |= dict.fromkeys(numbers.tolist(), exchange)
        return letter

    def _drop(self, letter: Letter) -> None:
        """Nothing of an exchange counts: its node will be told to forget what was staged."""
        self.post.grid.forget(letter.message)
        self._decide(letter.exchange, [])

    def _decide(self, exchange: int, used: list[int]) -> None:
        if exchange in self._undecided:
            _, numbers = self._undecided.pop(exchange)
            self._settled[exchange] = (numbers[0], used)

    def _accept(
        self, function: ClientFunction, numbers: np.ndarray, outcome: Outcome, before: Tensor | None
    ) -> Replies:
        """Take replies in, and remember to tell the nodes which."""
        replies = super()._accept(function, numbers, outcome, before)
        used: dict[int, list[int]] = {self._latest[number]: [] for number in numbers.tolist()}
        for number in replies.clients.tolist():
            used[self._latest[number]].append(number)
        for exchange, clients in used.items():
            self._decide(exchange, clients)
        return replies

    def _expected(
        self,
        function: ClientFunction,
        hyper: Any,
        shared: Mapping[str, Tensor],
        each: Mapping[str, Tensor],
        buffers: Tensor | None,
    ) -> tuple[dict[str, Spec], bool]:
        """What one client replies, and whether it trains: found by running the function here once.

        It runs on samples of zeros. So a reply of any other size or type is refused before it is decoded.
        """
        given = tuple((name, spec_of(value)) for name, value in sorted(shared.items()))
        own = tuple((name, spec_of(value[0])) for name, value in sorted(each.items()) if len(value))
        key = (function, hyper, given, own)
        if key not in self._specs:
            rows = {name: value[:1] for name, value in each.items()}
            start = buffers if buffers is None or buffers.dim() == 1 else buffers[:1]
            one = np.zeros(1, dtype=np.int64)
            self._model.round = self.round
            _, outcome = self._model._train(function, hyper, one, one + self.round, dict(shared), rows, start)
            sent = {name: spec_of(value[0]) for name, value in outcome.sent.items()}
            self._specs[key] = (sent, outcome.buffers is not None)
        return self._specs[key]

    # Work in flight -------------------------------------------------------------------------------

    def _clock(self) -> float:
        return (time.monotonic() - self._begun) / self.unit

    def _send_jobs(self) -> None:
        """Send the work of all clients that have not been sent theirs, where their node is there."""
        there = self._present()
        for job in self.queue:
            node = self._hosts[job.client]
            if job.client not in self._letters and job.result is None and node in there:
                with _tolerant(node, self._note):
                    self._letters[job.client] = self._request(
                        node,
                        job.order.function,
                        self.hyper,
                        np.array([job.client]),
                        np.array([job.stream]),
                        job.order.shared,
                        {name: value[None] for name, value in job.each.items()},
                        job.order.buffers,
                        np.zeros(1, dtype=np.int64),
                    )

    def _due(self, count: float, end: float) -> list[Job]:
        """The jobs that arrive next in real time, at least one unless time is over or nobody is at work."""
        jobs: list[Job] = []
        reminded = time.monotonic()
        while len(self.queue) and not jobs:
            self._send_jobs()
            for job in list(self.queue):
                letter = self._letters.get(job.client)
                if letter is None or len(jobs) >= count:
                    continue
                if jobs and job.order.function is not jobs[0].order.function:
                    continue
                try:
                    answer = self.post.look(letter)
                except Failed as error:
                    del self._letters[job.client]
                    self._drop(letter)
                    self._note(letter.node, error)
                    if error.kind in RETURNING:
                        self._opened.discard(letter.node)
                    else:
                        self._arrival(self.queue.cancel(job.client), "lost")
                    continue
                if answer is None:
                    continue
                del self._letters[job.client]
                self._received(letter)
                self.queue.cancel(job.client)
                job.finish = max(self._clock(), self.now)
                groups = answer[1]
                sent = {name: value[0].to(self.device) for name, value in groups["sent"].items()}
                trained = groups.get("buffers", {}).get("buffers")
                job.result = Outcome(sent, {}, None if trained is None else trained[0].to(self.device))
                jobs.append(job)
            self.queue.wait_until(min(self._clock(), max(end, self.now)))
            if self._clock() > end:
                break
            if not jobs:
                if time.monotonic() - reminded > REMIND:
                    reminded = time.monotonic()
                    log.warning("round %d: waiting for %d clients at work", self.round, len(self.queue))
                time.sleep(PAUSE)
        return jobs

    # What a checkpoint needs ----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that changes during a run, and how far the nodes' states have come."""
        saved = super().snapshot()
        self._leave()
        flying = sorted(letter.exchange for letter in self._letters.values())
        saved["plain"]["flower"] = {
            "run": self._run_id,
            "exchange": self._exchange,
            "without": flying,
            "settled": [[exchange, client, used] for exchange, (client, used) in self._settled.items()],
            "back": [
                [list(back), [client for client, own in self._back.items() if own == back]]
                for back in dict.fromkeys(self._back.values())
            ],
        }
        # Nodes may go back to this checkpoint or the one before.
        self._floors = (self._floors[1], min([self._exchange, *(exchange - 1 for exchange in flying)]))
        return saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take everything back; nodes are taken back when they are asked next."""
        super().restore(saved)
        plain = saved["plain"]["flower"]
        self._run_id, self._exchange = plain["run"], plain["exchange"]
        self._back = dict.fromkeys(range(self.clients), Back(self._exchange, tuple(plain["without"])))
        for (at, without, keep), clients in plain["back"]:  # of whom the last process had not told either
            self._back |= dict.fromkeys(clients, Back(at, tuple(without), tuple(keep)))
        self._settled = {exchange: (client, used) for exchange, client, used in plain["settled"]}
        floor = min([self._exchange, *(exchange - 1 for exchange in plain["without"])])
        self._floors = (0, floor)
        self._opened, self._delivered = set(), {}
        self._undecided, self._latest, self._letters = {}, {}, {}
        self._begun = time.monotonic() - self.now * self.unit
        for left in self.post.left():
            met = self._known.get(left.node)
            if met is not None and (left.answered or left.process == met.process):
                self._left[left.node, left.digest] = left
                for number in (self._number[name] for name in met.names):
                    back = self._back[number]
                    self._back[number] = back._replace(keep=(*back.keep, left.exchange))
                self._exchange = max(self._exchange, left.exchange)  # numbers are not given twice
            else:
                self.post.grid.forget(left.message)

    def _leave(self) -> None:
        """Forget the requests of before that nobody has asked for again."""
        for left in self._left.values():
            self.post.grid.forget(left.message)
            self._settled[left.exchange] = (left.client, [])
        self._left = {}

    def _run(self, work: Work) -> Outcome:
        raise SartorError(f"{name_of(work.function)}: clients are at nodes; the server runs none of them")


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


def _one_client(task: Task, data: ClientData, federation: Federation) -> LoopFederation:
    """A client of two samples of zeros, on which the server finds out what a client function replies."""
    x, y = data.train.x[:1].expand(2, *data.train.x.shape[1:]), data.train.y[:1].expand(2)
    split = Split(x.contiguous(), y.contiguous(), np.zeros(1, dtype=np.int64), np.full(1, 2, dtype=np.int64))
    tried = replace(
        data,
        names=("model",),
        train=split,
        test=split,
        validation=None if data.validation is None else split,
        pooled_x=split.x,
        pooled_y=split.y,
    )
    return LoopFederation(
        task,
        tried,
        local=federation.local,
        hyper=federation.hyper,
        seed=federation.seed,
        device=str(federation.device),
        buffers=federation.policy,
        evaluation_batch=federation.evaluation_batch,
        workers=1,
    )
