"""The contract between algorithms and engines: map a client function over a cohort.

``replies = federation.map(client_function, cohort, shared=..., each=...)`` sends ``shared`` to everyone and
one row of ``each`` to every client, and returns what they answered, stacked in cohort order. Replies may be
partial: a client can be gone. What a client keeps stays in its state, which the server never sees; a client
whose reply did not arrive has not moved.

Asynchronous methods use ``dispatch``, which puts clients to work, and ``collect``, which waits in virtual
time for those who finish next. Jobs of any age that are in flight together are trained together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.client.settings import Local
from sartor.errors import Diverged, SartorError, SettingError
from sartor.federation.attacks import Attackers, for_simulations
from sartor.federation.clock import Always, Conditions, Constant, EventQueue, Job, World, uniform
from sartor.federation.engine import Distant, Engine
from sartor.federation.exchange import (
    Arguments,
    Call,
    Check,
    ClientFunction,
    Fold,
    Lent,
    NobodyAnswered,
    Outcome,
    PerGroup,
    Replies,
    Reply,
    Sent,
    Step,
    Sums,
    Work,
    as_tensor,
    by_number,
    joined,
    norms_of,
    personal,
    references_of,
    shares,
)
from sartor.federation.functions import name_of
from sartor.federation.passage import Passage
from sartor.federation.protection import Noised, Protection, transforms_of
from sartor.federation.reduction import PLAIN, Reducer
from sartor.federation.settings import FederationSettings
from sartor.federation.states import STATES, StateStore, states_in
from sartor.federation.transforms import inner_function
from sartor.kernels.device import to_device
from sartor.model.groups import tasks_of
from sartor.model.task import Task
from sartor.nests import Nest

log = logging.getLogger(__name__)

Answers = Callable[[int, np.ndarray], np.ndarray]
Folding = Sequence[str] | dict[str, Step]
"""Names of quantities that are to be added up, or the step by each."""
MOST_CHECKS = 256
"""Exchanges on a GPU after which the host looks whether their replies were fit to be used."""
MOST_NAMED = 20
"""Clients of which the log says that not all of their samples count."""
UNIT = 1.0
"""The virtual time of an exchange for which nobody is there, so that someone can come, or with no client."""


@dataclass
class Traffic:
    """Bytes that crossed between the server and the clients."""

    down: int = 0
    up: int = 0


@personal
def own_buffers(client: Any, hyper: Any) -> Reply:
    """A client's float buffers, where each keeps its own."""
    return Reply(buffers=client.buffers)


class Federation:
    """Clients that can be asked to run client functions: what algorithms see of them.

    Where they run is the engine's; ``answers`` decides in tests whose answers arrive.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        settings: FederationSettings,
        *,
        answers: Answers | None = None,
    ) -> None:
        self.task, self.engine, self.settings = task, engine, settings
        self._distant = engine if isinstance(engine, Distant) else None
        self.hyper = settings.hyper
        self.names = engine.names
        self._device = engine.device
        self.traffic = Traffic()
        self.queue = EventQueue()
        self.updates = 0
        """Replies that the server has used so far."""
        self._checks: list[Check] = []
        self._checked = b""
        """The last cohort that was found to be one."""
        self.drawn: np.ndarray | None = None
        """The cohort that was drawn for the round under way."""
        privacy = settings.privacy
        self.protection = Protection(privacy, settings, self) if privacy.on else None
        """What hides clients or their samples, and what that has cost."""
        self.round = 0
        self.states = StateStore(self.clients, engine.device, settings.states, homes=engine.homes)
        self.buffers = task.initial_buffers(engine.device) if task.buffer_size else None
        if self.buffers is not None and self.policy == "local":
            self.states.declare("buffers", self.buffers)
        self._answers = answers
        self._passage = Passage(transforms_of(settings, task), self)
        self.attackers = Attackers(settings.attack, self)
        """Who misbehaves, in a simulation."""
        if self.attackers and self._distant is not None:
            raise for_simulations(self.attackers.name)
        self.reducer = Reducer(settings.aggregate, self)
        """What makes means of rows that clients sent."""
        self._streams: dict[str, int] = {}
        """What keyed each client's last job of a client function."""
        self._last: tuple[Call, Tensor | None] | None = None
        """The call of the last dispatch, and the float buffers at that time."""
        self._trained: list[tuple[np.ndarray, Tensor]] = []
        """Whose float buffers have arrived and are still to be averaged, and these."""

    @property
    def local(self) -> Local:
        """How clients train."""
        return self.settings.local

    @property
    def seed(self) -> int:
        """What everything random follows from."""
        return self.settings.seed

    @property
    def policy(self) -> str:
        """What happens to float buffers."""
        return self.settings.buffers

    @property
    def conditions(self) -> Conditions:
        """What can keep a client's answer from the server."""
        return self.settings.conditions

    @property
    def method(self) -> str:
        """The algorithm's name, for messages."""
        return self.settings.method

    @property
    def round(self) -> int:
        """The round under way; setting it begins a round, with nothing noted yet."""
        return self._round

    @round.setter
    def round(self, round: int) -> None:
        if self.protection is not None:
            self.protection.account.begin_round()
        self._round, self._exchanges, self.answered = round, 0, 0
        self.heard: np.ndarray | None = None
        """Whose answers the last exchange that was waited for has used; None where there was none."""
        if self._distant is not None:
            self._distant.round = round
        self.notes: dict[str, Any] = {}
        """What to record of this round: virtual time, who was missing, what arrived."""

    def check(self) -> None:
        """After a round: refuse a transform, a rule or an attack on what the method does not have."""
        self._passage.check()
        self.reducer.check()
        self.attackers.check()

    @property
    def exchange(self) -> int:
        """How often clients have been asked in this round."""
        return self._exchanges

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.queue.now

    @property
    def running(self) -> np.ndarray:
        """The clients with work in flight, by number."""
        return np.array([job.client for job in self.queue], dtype=np.int64)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def sizes(self) -> Tensor:
        """n_i of every client."""
        return self._sizes

    @cached_property
    def _sizes(self) -> Tensor:
        return torch.from_numpy(self._counts.copy()).to(self._device)

    @cached_property
    def _counts(self) -> np.ndarray:
        """n_i of every client, as far as they count (``replies.largest_weight``); 1 where they are hidden."""
        counts: np.ndarray = np.asarray(self.engine.counts["train"])
        if self.protection is not None:
            return np.ones_like(counts)
        if not self.conditions.largest_weight:
            return counts
        median = float(np.median(counts))
        most = max(1.0, self.conditions.largest_weight * median)
        if not median or counts.max(initial=0) <= most:
            return counts
        for number in np.flatnonzero(counts > most)[:MOST_NAMED].tolist():
            told = "client %r: %d training samples, of which %d count (replies.largest_weight)"
            log.warning(told, self.names[number], counts[number], most)
        return np.asarray(np.minimum(counts, int(most)))

    @property
    def splits(self) -> tuple[str, ...]:
        """The parts that the clients' data have: train, test, and validation where there is any."""
        return tuple(name for name in self.engine.counts if name not in ("pooled", "rest", "union", "public"))

    def union(self) -> int:
        """How many training samples all clients have together, for :meth:`together`.

        An error where they are not in one place: at real machines, or fetched client by client.
        """
        if "union" in self.engine.counts:
            return int(self.engine.counts["union"][0])
        where = "on other machines" if self._distant is not None else "fetched client by client (lazy data)"
        raise SartorError(f"{self.method}: needs the data of all clients in one place, but they are {where}")

    @property
    def public(self) -> Tensor:
        """The public samples, which server and clients know; an error where there are none."""
        if self.engine.public is None:
            raise SettingError(f"{self.method}: learns from public samples; say which, by public.name")
        return self.engine.public

    def initial(self) -> Tensor:
        """The model that a run starts from."""
        return self.task.initial(self._device)

    @property
    def bytes_kept(self) -> int:
        """What the server keeps of messages, for transforms, besides a method's own state."""
        return self._passage.bytes_kept

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task of each group of clients; one where all have the same model."""
        return tasks_of(self.task)

    def task_of(self, clients: np.ndarray) -> Task:
        """The task of these clients, who have the same model."""
        return self.task

    def initial_models(self) -> Tensor | PerGroup:
        """The model that clients start from, for each group of them where they have models of their own."""
        return self.initial()

    def initial_buffers(self) -> Tensor:
        """The float buffers that a run starts from; of length 0 for a model without any."""
        return self.task.initial_buffers(self._device)

    def tensor(self, values: Any) -> Tensor:
        """Numbers as a tensor where the server computes, as in ``models[federation.tensor(cohort)]``."""
        return self._tensor(values)

    def table(self, *width: int, fill: float | bool = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """One row for every client, all of one value; a number for each where no width is given."""
        return torch.full((self.clients, *width), fill, dtype=dtype, device=self._device)

    def blank_sample(self) -> Nest:
        """One sample of zeros in the shape of the clients', to find out what a model makes of such."""
        return self.engine.blank

    def stream(self, name: str) -> int:
        """The key of this run's stream with that name; rounds, clients and indices are folded into it."""
        key = random.stream(self.seed, name)
        assert isinstance(key, int)
        return key

    @property
    def mean_buffers(self) -> Tensor | None:
        """The float buffers that go with a shared model: the server's, or the mean of the clients'.

        Where clients are hidden they are those that a run starts from: a mean would tell of the clients'.
        """
        if self.policy != "local" or self.buffers is None or self.protection is not None:
            return self.buffers
        if self._distant is not None:
            replies = self.fetch(own_buffers, np.arange(self.clients))
            return None if replies is None else replies["buffers"].mean(dim=0)
        return self.states["buffers"].mean(dim=0).to(self._device)

    def declare(self, **initial: Tensor | float | PerGroup) -> None:
        """Give every client a state of this name and initial value; client functions take it by name."""
        for name, given in initial.items():
            value = self._tensor(given)
            self.states.declare(name, value)
            if isinstance(self.engine, Distant):  # also while nobody is asked
                self.engine.declare(name, value)

    @contextmanager
    def asking_nobody(self) -> Iterator[None]:
        """Meanwhile clients elsewhere are not asked, and answer what the server makes up for them.

        For the start of a run that goes on: what they answered when it began is in its checkpoint.
        """
        distant, self._distant = self._distant, None
        try:
            yield
        finally:
            self._distant = distant

    def map(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
        hyper: Any = None,
        fold: Folding = (),
    ) -> Replies:
        """Ask every client of the cohort that is there and wait for the answers.

        Of the quantities named in ``fold`` only the mean and the sum will be asked for: in a large cohort
        they are added up as clients answer, so that the server never holds a row for each of them. A mapping
        also has the step that the server will take by each, with ``replies.moved``: ``{"delta": Step("w")}``.
        """
        shared, each, numbers = self._arguments(cohort, shared, each)
        self._exchanges += 1
        function, shared, each = self._passage.down(function, numbers, shared, each, hyper)
        asked, answering, each = self._who(numbers, shared, each)
        hidden = self.protection
        if hidden is not None:
            hidden.check(asked)
        block = self._block if fold else len(answering)
        if not len(answering):
            replies = self._nobody() if hidden is None else hidden.nothing(function, shared, each, hyper)
        elif block and block < len(answering):
            replies = self._folded(function, answering, shared, each, hyper, fold, block)
        else:
            outcome = self._run(
                function,
                answering,
                self._rounds(answering) + self._again,
                shared,
                each,
                self.buffers,
                hyper=hyper,
                fold=self._fold(answering, fold) if fold and block else None,
            )
            self._buffers_down(outcome, len(asked))
            replies = self._accept(function, outcome, self.buffers, Sent(answering, shared, each))
        return self._heard(replies if hidden is None else hidden.released(function, replies, numbers))

    def _heard(self, replies: Replies) -> Replies:
        """Note whose answers an exchange has used; an error where there are none, or none with a sample."""
        self.answered, self.heard = len(replies), replies.clients
        if not replies.counts.any() and not isinstance(replies, Noised):
            self._nobody()
        return replies

    @cached_property
    def _block(self) -> int:
        """How many clients' replies are held at once where they are added up; 0: all.

        It follows from the model's size alone, so that neither engine nor chunk changes the order of sums.
        Clients elsewhere answer all at once; a transform at the server must see all replies, and so must a
        rule in place of means, or attackers.
        """
        if self._distant is not None or self._passage.transforms.server:
            return 0
        if self.reducer.rule is not None or self.attackers.falsify:
            return 0
        return max(1, self.settings.fold_bytes // max(1, self.task.size * self.task.dtype.itemsize))

    def _fold(self, numbers: np.ndarray, fold: Folding) -> Fold | None:
        """What is to be added up of these clients' replies, if that is all that will be done to them."""
        touched = self._passage or self.protection is not None or self.conditions.on_bad_reply != "stop"
        if touched or by_number(numbers.tobytes(), self._device) is not None:
            return None
        weights = shares(self._counts[numbers].tobytes(), self._device, self.task.dtype)
        return Fold(tuple(fold), weights, tuple(fold.items()) if isinstance(fold, dict) else ())

    def _folded(
        self,
        function: ClientFunction,
        numbers: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
        hyper: Any,
        fold: Folding,
        block: int,
    ) -> Replies:
        """Ask block by block in the order of the clients' numbers, and add up what is to be."""
        order = np.argsort(numbers, kind="stable")
        before = self.buffers
        sums = Sums(self._replies(numbers[order], {}).weights, fold)
        buffers: list[Tensor] = []
        for first in range(0, len(order), block):
            places = order[first : first + block]
            index = self._tensor(places)
            rows = {name: value[index] for name, value in each.items()}
            asked = numbers[places]
            keyed = self._rounds(asked) + self._again
            outcome = self._run(function, asked, keyed, shared, rows, before, hyper=hyper)
            self._buffers_down(outcome, len(asked))
            replies = self._accept(function, outcome, None, Sent(asked, shared, rows))
            used = self._tensor(np.flatnonzero(np.isin(asked, replies.clients)))
            if outcome.buffers is not None:
                buffers.append(outcome.buffers[used])
            sums.add(replies, first + used)
        replies = sums.replies()
        if buffers and before is not None and len(replies):
            self._take_buffers(replies, before, torch.cat(buffers))
        return replies

    def shapes(self, work: Work) -> dict[str, Tensor]:
        """What one client replies, as zeros; nothing is kept of it."""
        return self.engine.shapes(work, self.with_states)

    def together(
        self, function: ClientFunction, shared: Arguments | None = None, hyper: Any = None
    ) -> dict[str, Tensor]:
        """What one virtual client replies that has the training data of all, as the split ``union``.

        That is a reference and no federation: nobody is away or late, no transform acts, nothing is sent, and
        it takes a unit of virtual time.
        """
        self.union()  # refuses where there is none
        shared, each, first = self._arguments([0], shared, None)
        self._exchanges += 1
        outcome = self._run(function, first, self._rounds(first), shared, each, self.buffers, hyper=hyper)
        if self._good(function, first, outcome) is not None:
            self._nobody()
        if outcome.buffers is not None:
            self.buffers = outcome.buffers[0]
        self.queue.wait_until(self.now + UNIT)
        self.answered, self.updates = 1, self.updates + 1
        self.notes |= {"time": self.now, "updates": self.updates}
        return {name: value[0] for name, value in outcome.sent.items()}

    def ask(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
    ) -> Replies:
        """Ask as ``map`` does, for evaluation.

        Everyone answers, nothing is kept, no time passes and no traffic is counted.
        """
        self.verify()
        shared, each, numbers = self._arguments(cohort, shared, each)
        outcome = self._run(function, numbers, self._rounds(numbers), shared, each, self.buffers, keeps=False)
        replies = self._replies(outcome.clients, outcome.sent)
        return replies if self._distant is None else self._finite(replies)

    def _finite(self, replies: Replies) -> Replies:
        """Those whose values are numbers: what a client elsewhere evaluated may be anything."""
        good = np.ones(len(replies), dtype=bool)
        for value in replies.values.values():
            if value.is_floating_point():
                good &= torch.isfinite(value[:, None].flatten(1)).all(dim=1).cpu().numpy()
        if good.all():
            return replies
        for number in replies.clients[~good].tolist():
            log.warning("client %r: what it evaluated is not finite; left out", self.names[number])
        self._count("bad", int((~good).sum()))
        places = to_device(np.flatnonzero(good), self._device)
        values = {name: value[places] for name, value in replies.values.items()}
        return replace(replies, clients=replies.clients[good], counts=replies.counts[good], values=values)

    def fetch(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
    ) -> Replies | None:
        """Ask as ``ask`` does, for what is the clients' own; None where it stays with them.

        From clients elsewhere it is asked for only where the settings say so, and counted as traffic.
        """
        if self._distant is None:
            return self.ask(function, cohort, shared, each)
        if not self.settings.fetches_personal:
            return None
        sent, rows, numbers = self._arguments(cohort, shared, each)
        replies = self.ask(function, numbers, sent, rows)
        self._send_down(sent, rows, len(numbers))
        self.traffic.up += sum(value.nbytes for value in replies.values.values())
        return replies

    # Work in flight -------------------------------------------------------------------------------

    def starts(self, function: ClientFunction, clients: np.ndarray, sent: Sent) -> dict[str, Tensor]:
        """Where the models of these clients' replies began, where that was sent; else nothing."""
        known = {*sent.shared, *sent.each}
        if not getattr(inner_function(function), "starts", None) or not known:
            return {}
        if not known.issuperset(references_of(inner_function(function))):
            return {}
        return self._passage.starts(function, clients, sent)

    def dispatch(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
        concurrency: int = 0,
    ) -> np.ndarray:
        """Put the clients of the cohort to work that are there and idle; returns who started.

        Each finishes after its duration; :meth:`collect` takes what arrived. With ``concurrency`` so many are
        at work at most, and who starts is drawn.
        """
        if self._distant is not None:
            self.queue.wait_until(self._distant.now())
        shared, each, numbers = self._arguments(cohort, shared, each)
        self._exchanges += 1
        idle = np.array([number not in self.queue for number in numbers.tolist()], dtype=bool)
        idle &= self.conditions.availability.there(self._world, self.round, self.now, numbers)
        room = max(0, concurrency - len(self.queue)) if concurrency else len(numbers)
        if idle.sum() > room:
            drawn = uniform(self._world, "dispatch", numbers, self.round, self._exchanges)
            idle[np.argsort(np.where(idle, drawn, np.inf), kind="stable")[room:]] = False
        started, each = self._select(numbers, each, idle)
        if self.protection is not None:
            self.protection.check(started)
        name = name_of(function)
        function, shared, each = self._passage.down(function, started, shared, each)
        self._send_down(shared, each, len(started))
        durations = self.conditions.delay.durations(self._world, self.round, started)
        call = self._call(function, shared)
        for place, (client, duration) in enumerate(zip(started.tolist(), durations.tolist(), strict=True)):
            row = {name: value[place] for name, value in each.items()}
            work = f"{client} {name}"
            stream = self._streams.get(work, -1)
            # A client that does the same work again in one round gets batches of its own.
            stream = stream + (1 << 32) if stream & 0xFFFFFFFF == self.round else self.round
            stream = self.round + self._again if self._again else stream
            self._streams[work] = stream
            finish = self.now + duration
            job = Job(client, self.round, stream, self.now, finish, call, self.buffers, row)
            self.queue.start(job)
        if self._distant is not None:
            self._distant.send(self.queue, self.hyper)
            self._take_notes()
        return started

    def _call(self, function: ClientFunction, shared: dict[str, Tensor]) -> Call:
        """The call of the last dispatch where it is the same one: what it sends lies there once."""
        if self._last is not None:
            call, buffers = self._last
            same = call.function is function and call.shared.keys() == shared.keys()
            if same and buffers is self.buffers and all(call.shared[name] is shared[name] for name in shared):
                return call
        self._last = Call(function, shared), self.buffers
        return self._last[0]

    def collect(self, count: int | None = None, within: float | None = None) -> Replies:
        """Wait for the next ``count`` answers, or for those that arrive ``within`` a time; in that order.

        Waiting ends early when nobody is at work any more. Only now do the states of those clients move.
        """
        return joined(self.arrivals(count, within))

    def collect_next(self, most: int) -> Replies:
        """Wait for the next answer; with it come those that arrive at the same instant, at most so many."""
        arrived = self._arrivals(1)
        if most > 1:
            with suppress(NobodyAnswered):
                arrived += self._arrivals(most - 1, within=0.0)
        self._average_arrived()
        return joined(arrived)

    def arrivals(self, count: int | None = None, within: float | None = None) -> list[Replies]:
        """What :meth:`collect` gives, piece by piece: the answers of a piece are of one client function."""
        arrived = self._arrivals(count, within)
        self._average_arrived()
        return arrived

    def _arrivals(self, count: int | None = None, within: float | None = None) -> list[Replies]:
        """These answers; the float buffers that came with them are still to be averaged."""
        begin = self.now
        end = np.inf if within is None else begin + within
        wanted = np.inf if count is None else count
        arrived: list[Replies] = []
        have = 0
        while have < wanted and (jobs := self._due(wanted - have, end)):
            arrived.append(self._arrived(jobs))
            have += len(arrived[-1])
        if have < wanted and within is not None and len(self.queue):
            self.queue.wait_until(end)
        elif not have:
            self.queue.wait_until(begin + (UNIT if within is None else within))
        self.notes["time"] = self.now
        arrived = [replies for replies in arrived if len(replies)]
        if not arrived:
            raise NobodyAnswered
        self.answered += have
        return arrived

    def cancel(self, clients: Sequence[int] | np.ndarray) -> None:
        """Call off the work of these clients: nothing of it is used and they are idle again."""
        for client in np.asarray(clients, dtype=np.int64).tolist():
            self._arrival(self.queue.cancel(client), "cancelled")
            if self._distant is not None:
                self._distant.cancel(client)

    @property
    def running_since(self) -> np.ndarray:
        """The round in which each client of :attr:`running` started."""
        return np.array([job.round for job in self.queue], dtype=np.int64)

    def _due(self, count: float, end: float) -> list[Job]:
        """The next jobs of one client function, at most so many and none after the end.

        Those whose answer gets lost are gone.
        """
        if self._distant is not None:
            arrived, gone = self._distant.due(self.queue, count, end, self.hyper)
            for missed in gone:
                self._arrival(missed, "lost")
            self._take_notes()
            return arrived
        jobs: list[Job] = []
        while (job := self.queue.next()) is not None and len(jobs) < count and job.finish <= end:
            if jobs and job.call.function is not jobs[0].call.function:
                break
            self.queue.arrive()
            if self._lost(np.array([job.client]), job.stream)[0]:
                self._arrival(job, "lost")
            else:
                jobs.append(job)
        return jobs

    def _arrived(self, jobs: list[Job]) -> Replies:
        self._compute(jobs)
        places = np.array([job.client for job in jobs], dtype=np.int64)
        names = jobs[0].result
        outcome = Outcome(
            places,
            {name: torch.stack([job.result.sent[name] for job in jobs]) for name in names.sent},
            {name: torch.stack([job.result.kept[name] for job in jobs]) for name in names.kept},
            None if names.buffers is None else torch.stack([job.result.buffers for job in jobs]),
        )
        if self._distant is not None:  # who computes here is counted when it does
            self._buffers_down(outcome, len(jobs))
        averages = self.policy == "average"
        before = None if averages else jobs[0].buffers
        received = [self._passage.received(job.call, job.each, job.client) for job in jobs]
        replies = self._accept(jobs[0].call.function, outcome, before, self._sent(jobs))
        if averages and outcome.buffers is not None and len(replies):
            used = self._tensor(np.flatnonzero(np.isin(places, replies.clients)))
            self._trained.append((replies.clients, outcome.buffers[used]))
        taken = set(replies.clients.tolist())
        received = [got for job, got in zip(jobs, received, strict=True) if job.client in taken]
        jobs = [job for job in jobs if job.client in taken or self._arrival(job, "bad")]
        for job in jobs:
            self._arrival(job, "arrivals")
        given = {}
        if jobs:
            given = {name: torch.stack([one[name] for one in received]) for name in received[0]}
        ages = np.array([self.round - job.round for job in jobs], dtype=np.int64)
        return replace(replies, ages=ages, given=given)

    def _sent(self, jobs: list[Job]) -> Sent:
        """What the clients of these jobs were sent; each may have started from another version."""
        each: dict[str, Tensor] = {}
        if self._passage or self.attackers.falsify:
            rows = [{**job.call.shared, **job.each} for job in jobs]
            each = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return Sent(np.array([job.client for job in jobs], dtype=np.int64), {}, each)

    def _compute(self, arrived: list[Job]) -> None:
        """Train these jobs, and with them all others in flight that ask for the same: one batch for many."""
        if all(job.result is not None for job in arrived):
            return
        function = arrived[0].call.function
        jobs = [job for job in (*arrived, *self.queue) if job.result is None]
        jobs = sorted((job for job in jobs if job.call.function is function), key=lambda job: job.client)
        call = jobs[0].call
        numbers = np.array([job.client for job in jobs], dtype=np.int64)
        rounds = np.array([job.stream for job in jobs], dtype=np.int64)
        each = {name: torch.stack([job.each[name] for job in jobs]) for name in jobs[0].each}
        shared, buffers = dict(call.shared), jobs[0].buffers
        if any(job.call is not call for job in jobs):
            # Jobs that started from different versions: what was shared becomes a row for each.
            each.update({name: torch.stack([job.call.shared[name] for job in jobs]) for name in call.shared})
            shared = {}
            buffers = None if buffers is None else torch.stack([job.buffers for job in jobs])
        outcome = self._run(function, numbers, rounds, shared, each, buffers, waits=True)
        self._buffers_down(outcome, len(jobs))
        for place, job in enumerate(jobs):
            job.result = outcome.rows(place)

    def _arrival(self, job: Job, what: str) -> bool:
        """Note what became of a job: [client, start, finish, version, age]."""
        entry = [job.client, job.started, job.finish, job.round, self.round - job.round]
        self.notes.setdefault("arrivals" if what == "arrivals" else f"{what}_jobs", []).append(entry)
        return False

    # The halves of an exchange --------------------------------------------------------------------

    @cached_property
    def _ideal(self) -> bool:
        """Whether everyone is always there, takes the same time and answers."""
        conditions = self.conditions
        usual = isinstance(conditions.availability, Always) and isinstance(conditions.delay, Constant)
        return usual and not conditions.dropout and not conditions.deadline and self._answers is None

    @cached_property
    def _world(self) -> World:
        size = self.task.size * self.task.dtype.itemsize
        return World(self.seed, self.names, self.engine.counts["train"], size)

    def _arguments(
        self, cohort: Sequence[int] | np.ndarray, shared: Arguments | None, each: Arguments | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], np.ndarray]:
        """What is sent, as tensors, and to whom; checked."""
        numbers = self._numbers(cohort)
        given: dict[str, Any] = {"shared": shared, "each": each}
        for what, values in given.items():
            if not (values is None or isinstance(values, Mapping)):
                kind = type(values).__name__
                raise SartorError(f"map: {what} is a {kind}; give names, as in {what}={{'w': server.w}}")
        sent = {name: self._tensor(value) for name, value in (shared or {}).items()}
        rows = {name: self._tensor(value) for name, value in (each or {}).items()}
        for name, value in rows.items():
            if value.shape[:1] != (len(numbers),):
                found = list(value.shape)
                raise SartorError(
                    f"map: each[{name!r}] needs one row for each of {len(numbers)} clients, it is {found}"
                )
        return sent, rows, numbers

    def _who(
        self, numbers: np.ndarray, shared: dict[str, Tensor], each: dict[str, Tensor]
    ) -> tuple[np.ndarray, np.ndarray, dict[str, Tensor]]:
        """Who is asked and who answers, with the rows of the latter; virtual time passes meanwhile."""
        conditions, world = self.conditions, self._world
        if self._ideal:  # nothing can happen: not a microsecond of the host's for it
            self._send_down(shared, each, len(numbers))
            self.queue.wait_until(self.now + conditions.delay.duration)  # type: ignore[attr-defined]
            self.notes["time"] = self.now
            return numbers, numbers, each
        there = conditions.availability.there(world, self.round, self.now, numbers)
        self._count("unavailable", int(len(numbers) - there.sum()))
        asked, each = self._select(numbers, each, there)
        self._send_down(shared, each, len(asked))
        durations = conditions.delay.durations(world, self.round, asked)
        deadline = conditions.deadline or np.inf
        arrived = durations <= deadline
        late = len(asked) - int(arrived.sum())
        self._count("late", late)
        arrived &= ~self._lost(asked, self.round, self._exchanges)
        patience = deadline if late else durations[arrived].max(initial=0.0)
        if not len(asked):
            patience = UNIT
        self.queue.wait_until(self.now + float(patience))
        self.notes["time"] = self.now
        # Whoever's answer will not arrive need not be trained: neither side keeps anything of it.
        return asked, *self._select(asked, each, arrived)

    def _select(
        self, numbers: np.ndarray, each: dict[str, Tensor], here: np.ndarray
    ) -> tuple[np.ndarray, dict[str, Tensor]]:
        if here.all():
            return numbers, each
        places = to_device(np.flatnonzero(here), self._device)
        return numbers[here], {name: value[places] for name, value in each.items()}

    def _send_down(self, shared: dict[str, Tensor], each: dict[str, Tensor], clients: int) -> None:
        self.traffic.down += sum([value.nbytes for value in shared.values()]) * clients
        self.traffic.down += sum([value.nbytes for value in each.values()])

    def _buffers_down(self, outcome: Outcome, clients: int) -> None:
        """Float buffers went along with the model, where clients trained it and the server averages them."""
        if outcome.buffers is not None and self.policy == "average":
            self.traffic.down += outcome.buffers[0].nbytes * clients

    def _rounds(self, numbers: np.ndarray) -> np.ndarray:
        rounds = np.empty(len(numbers), dtype=np.int64)
        rounds.fill(self.round)
        return rounds

    @property
    def _again(self) -> int:
        """What is added to a round where samples are hidden, so that no exchange has the draws of another.

        The same noise could be taken off, and a batch that comes again hides less.
        """
        hidden = self.protection is not None and self.protection.samples
        return (self._exchanges - 1) << 32 if hidden else 0

    def _lost(self, numbers: np.ndarray, *turn: int) -> np.ndarray:
        """Whose answer gets lost on the way, though the client did its work."""
        lost = np.zeros(len(numbers), dtype=bool)
        if self.conditions.dropout:
            lost |= uniform(self._world, "dropout", numbers, *turn) < self.conditions.dropout
        if self._answers is not None:
            lost |= ~np.asarray(self._answers(self.round, numbers), dtype=bool)
        self._count("lost", int(lost.sum()))
        return lost

    def _run(
        self,
        function: ClientFunction,
        numbers: np.ndarray,
        rounds: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
        buffers: Tensor | None,
        *,
        hyper: Any = None,
        keeps: bool = True,
        waits: bool = False,
        fold: Fold | None = None,
    ) -> Outcome:
        """Run the function at these clients, with their states and float buffers."""
        hyper = self.hyper if hyper is None else hyper
        work = Work(function, hyper, numbers, rounds, shared, each, buffers, self.round, keeps, waits, fold)
        if self._distant is not None:
            self.states.names_for(work)  # what is missing is said here, before anybody is asked
            outcome = self._distant.run(work)
            self._take_notes()
            return outcome
        outcome = self.engine.run_with(work, self.with_states)
        self.states.check(function, outcome)
        return outcome

    def with_states(self, work: Work) -> Work:
        """Work with what its clients, who are at home here, have kept."""
        return self.states.attached(work, self.policy)

    def _take_notes(self) -> None:
        """Add to the round's notes what a distant engine has noted."""
        assert self._distant is not None
        for name, amount in self._distant.noted.items():
            self._count(name, amount)
        self._distant.noted.clear()

    def _accept(
        self, function: ClientFunction, outcome: Outcome, before: Tensor | None, sent: Sent
    ) -> Replies:
        """Take replies in: bad ones are refused, states of the others move, buffers are averaged."""
        answered = numbers = outcome.clients
        size = outcome.row_bytes
        if self.protection is not None:
            outcome = self.protection.settled(outcome)
        outcome = self._passage.up(function, outcome, sent)
        outcome = self.attackers.forged(function, outcome, sent)
        good = self._good(function, numbers, outcome)
        if good is not None:
            places = to_device(np.flatnonzero(good), self._device)
            numbers, outcome = numbers[good], outcome.rows(places)
            before = before if before is None or before.dim() == 1 else before[places]
        if self._distant is not None:
            self._distant.settle(answered, numbers)
        for name, value in outcome.kept.items():
            self.states.write(name, numbers, value)
        self._passage.delivered(function, numbers, sent, outcome.kept if self.states.whole else {})
        self.traffic.up += size * len(numbers)
        self.updates += len(numbers)
        self.notes["updates"] = self.updates
        replies = self._replies(numbers, self._passage.at_server(outcome.sent), self.reducer, outcome.lent)
        self.reducer.offered |= bool(len(numbers))
        if outcome.buffers is not None and before is not None and len(numbers):
            self._take_buffers(replies, before, outcome.buffers)
        return replies if self.protection is None else self.protection.bounded(function, replies)

    def _good(self, function: ClientFunction, numbers: np.ndarray, outcome: Outcome) -> np.ndarray | None:
        """Which replies are finite and small enough, where not all are; the first bad one may end the run."""
        norms = norms_of(outcome.sent, outcome.kept) if outcome.norms is None else outcome.norms
        if not norms:
            return None
        who, conditions = f"{self.method or name_of(function)}, round {self.round}", self.conditions
        most, ratio = conditions.largest_norm, conditions.largest_ratio
        check = Check(who, numbers, norms, most, ratio)
        if conditions.on_bad_reply == "stop":
            self._checks.append(check)
            if self._device.type == "cpu" or len(self._checks) >= MOST_CHECKS:
                self.verify()
            return None
        found = Check.bad([check])
        if not found:
            return None
        ((_, bad),) = found
        good = np.asarray(~bad.any(axis=0))
        self._count("bad", int((~good).sum()))
        told = check.told(bad, self.names)
        log.warning("%s: %d of %d replies left out", told, (~good).sum(), len(good))
        return good

    def verify(self) -> None:
        """Stop at a bad reply.

        A GPU is ahead of its host, which does not wait for it after every exchange: replies are looked at
        before anything is evaluated or stored.
        """
        checks, self._checks = self._checks, []
        for check, bad in Check.bad(checks):
            told = check.told(bad, self.names)
            raise Diverged(f"{told} (replies.on_bad_reply = 'drop' leaves such replies out)")

    def _nobody(self) -> NoReturn:
        self.answered, self.heard = 0, np.zeros(0, dtype=np.int64)
        raise NobodyAnswered

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.notes[name] = self.notes.get(name, 0) + amount

    # What a checkpoint needs ----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that changes during a run, as tensors and plain values; nothing of it moves later on.

        Of the clients' states those at home here. Between rounds alone: what was noted of a round belongs to
        the record.
        """
        self.verify()
        saved: dict[str, Any] = {f"{STATES}{name}": value for name, value in self.states.save().items()}
        if self.buffers is not None:
            saved["buffers"] = self.buffers.cpu().clone()
        calls: list[tuple[Call, Tensor | None]] = []
        jobs: list[dict[str, Any]] = []
        for job in self.queue:
            place = next((at for at, (call, _) in enumerate(calls) if call is job.call), len(calls))
            if place == len(calls):
                calls.append((job.call, job.buffers))
            plain = {key: getattr(job, key) for key in ("client", "round", "stream", "started", "finish")}
            plain["finish"] = max(job.finish, self.now)  # a real answer may take longer than a simulated one
            jobs.append({**plain, "call": place})
            parts = {"each": job.each}
            if job.result is not None:
                parts |= {"sent": job.result.sent, "kept": job.result.kept}
                parts["buffers"] = {} if job.result.buffers is None else {"": job.result.buffers}
            jobs[-1]["computed"] = job.result is not None
            for part, values in parts.items():
                saved |= {f"job.{job.client}.{part}.{name}": value.cpu() for name, value in values.items()}
        for place, (call, buffers) in enumerate(calls):
            saved |= {f"call.{place}.{name}": value.cpu() for name, value in call.shared.items()}
            if buffers is not None:
                saved[f"call-buffers.{place}"] = buffers.cpu()
        saved |= {f"transforms.{name}": value for name, value in self._passage.save().items()}
        saved |= {f"aggregate.{name}": value for name, value in self.reducer.save().items()}
        saved["plain"] = {
            "traffic": [self.traffic.down, self.traffic.up],
            "updates": self.updates,
            "now": self.now,
            "streams": dict(self._streams),
            "calls": [self._passage.name_of_call(call.function) for call, _ in calls],
            "jobs": jobs,
        }
        if self.protection is not None:
            saved["plain"]["privacy"] = self.protection.save()
        if self._distant is not None:
            saved["plain"]["distant"] = self._distant.snapshot()
        return saved

    def restore(self, saved: Mapping[str, Any], states: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Take everything back to what :meth:`snapshot` saw.

        ``states`` are those of each home that had some, where they are not with the rest.
        """

        def under(prefix: str) -> dict[str, Tensor]:
            return {
                name[len(prefix) :]: value.to(self._device)
                for name, value in saved.items()
                if name.startswith(prefix)
            }

        here = {name: value for name, value in saved.items() if name.startswith(STATES)}
        self.states.load(states_in(here))
        for part in states:
            self.states.add(part)
        if "buffers" in saved:
            self.buffers = saved["buffers"].to(self._device)
        self._passage.load(under("transforms."))
        self.reducer.load(under("aggregate."))
        plain = saved["plain"]
        self.traffic = Traffic(*plain["traffic"])
        self.updates = plain["updates"]
        self._streams = dict(plain["streams"])
        if self.protection is not None:
            self.protection.load(plain["privacy"])
        self.queue = EventQueue()
        self.queue.wait_until(plain["now"])
        calls = [
            (
                Call(self._passage.find_call(entry), under(f"call.{place}.")),
                under(f"call-buffers.{place}").get(""),
            )
            for place, entry in enumerate(plain["calls"])
        ]
        for entry in plain["jobs"]:
            job = Job(**{key: value for key, value in entry.items() if key != "computed"})
            (job.call, job.buffers), own = calls[entry["call"]], f"job.{job.client}."
            job.each = under(own + "each.")
            if entry["computed"]:
                buffers = under(own + "buffers.").get("")
                clients = np.array([job.client], dtype=np.int64)
                job.result = Outcome(clients, under(own + "sent."), under(own + "kept."), buffers)
            self.queue.start(job)
        if self._distant is not None:
            for name in self._distant.declared & set(self.states):  # it may follow from what clients answered
                self._distant.declare(name, self.states.initial(name))
            self._distant.restore(plain["distant"], self.now)

    def _replies(
        self,
        numbers: np.ndarray,
        sent: dict[str, Tensor],
        reducer: Reducer = PLAIN,
        lent: Lent | None = None,
    ) -> Replies:
        counts = self._counts[numbers]
        return Replies(numbers, counts, sent, self._device, self.task.dtype, reducer=reducer, lent=lent)

    def _take_buffers(self, replies: Replies, before: Tensor, buffers: Tensor) -> None:
        if self.policy == "local":
            self.states.write("buffers", replies.clients, buffers)
        elif self.policy == "average" and self.buffers is not None:
            # As changes, so that buffers which nobody changed stay what they were to the bit.
            changes = replace(replies, values={"buffers": buffers - before})
            self.buffers = self.buffers + changes.mean("buffers")
            self.traffic.up += buffers.nbytes

    def _average_arrived(self) -> None:
        """Move the float buffers towards the mean of those that have arrived.

        By the share of their samples among those of everybody who was at work: all the way where nobody still
        is, and never beyond what clients have. Their changes, from where each began, would add up to more.
        """
        trained, self._trained = self._trained, []
        if not trained or self.buffers is None:
            return
        clients = np.concatenate([numbers for numbers, _ in trained])
        buffers = torch.cat([held for _, held in trained])
        away = np.array([job.client for job in self.queue], dtype=np.int64)
        here, rest = (float(self._counts[numbers].sum()) for numbers in (clients, away))
        changes = self._replies(clients, {"buffers": buffers - self.buffers}, self.reducer)
        self.buffers = self.buffers + changes.mean("buffers") * (here / (here + rest))
        self.traffic.up += buffers.nbytes

    def _numbers(self, cohort: Sequence[int] | np.ndarray) -> np.ndarray:
        numbers = np.asarray(cohort, dtype=np.int64)
        if numbers.tobytes() == self._checked:  # everyone, every round, as a rule
            return numbers
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.clients):
            wrong = numbers[(numbers < 0) | (numbers >= self.clients)][0]
            raise SartorError(
                f"map: the cohort has client {wrong}, there are clients 0 to {self.clients - 1}"
            )
        if not (numbers[1:] > numbers[:-1]).all() and len(np.unique(numbers)) < len(numbers):
            raise SartorError("map: a client stands twice in the cohort")
        self._checked = numbers.tobytes()
        return numbers

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device)
        if isinstance(value, PerGroup):
            return self._tensor(*value)
        if isinstance(value, np.ndarray):
            return to_device(value, self._device)
        return as_tensor(value, self.task.dtype, self._device).to(self._device)
