"""The contract between algorithms and engines: map a client function over a cohort.

``replies = federation.map(client_function, cohort, shared=..., each=...)`` sends ``shared`` to everyone and
one row of ``each`` to every client, and returns what they answered, stacked in cohort order. Replies may be
partial: a client can be gone. What a client keeps stays in its state, which the server never sees; a client
whose reply did not arrive has not moved. ``dispatch`` and ``collect`` are the two halves of ``map``.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.data.clients import ClientData, Split
from sartor.errors import SartorError
from sartor.experiment import Local
from sartor.federation.state import StateStore
from sartor.task import Task

Arguments = Mapping[str, Any]
ClientFunction = Callable[..., "Reply"]
Answers = Callable[[int, np.ndarray], np.ndarray]
POLICIES = ("average", "local", "freeze")


class ClientError(SartorError):
    """A client function failed; the message names function, round and, on the loop engine, the client."""


class NobodyAnswered(Exception):
    """No reply arrived in an exchange: the round ends and leaves everything as it was."""


class Reply:
    """What a client sends back; :meth:`keep` adds what stays with it.

    >>> reply = Reply(delta=torch.ones(3)).keep(c=torch.zeros(3))
    >>> list(reply.sent), list(reply.kept)
    (['delta'], ['c'])
    """

    def __init__(self, **sent: Any) -> None:
        self.sent = sent
        self.kept: dict[str, Any] = {}

    def keep(self, **kept: Any) -> Reply:
        """The same reply, with the client's new state."""
        self.kept = kept
        return self


@dataclass(frozen=True)
class Replies:
    """The replies of those who answered, stacked in cohort order."""

    clients: np.ndarray
    """Numbers of the clients that answered."""
    counts: np.ndarray
    """Their numbers of training samples."""
    values: dict[str, Tensor]
    device: torch.device
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def n(self) -> Tensor:
        """n_i of those who answered."""
        return to_device(self.counts, self.device).to(self.dtype)

    @property
    def weights(self) -> Tensor:
        """p'_i = n_i / Σ n_j over those who answered."""
        return _weights(self.counts.tobytes(), self.device, self.dtype)

    def sum(self, name: str, weights: Tensor | None = None) -> Tensor:
        """Σ weight_i · value_i in the order of the clients' numbers, whatever the cohort's.

        Zero if nobody answered.
        """
        values = self.values[name]
        if weights is None:
            weights = torch.ones(len(self), device=self.device, dtype=self.dtype)
        if (self.clients[1:] < self.clients[:-1]).any():
            order = to_device(np.argsort(self.clients, kind="stable"), self.device)
            values, weights = values[order], weights[order]
        return (weights.to(values.dtype) @ values[:, None].flatten(1)).view(values.shape[1:])

    def mean(self, name: str, weights: Tensor | None = None) -> Tensor:
        """The mean over those who answered, by default with the weights p'_i; zero if nobody answered."""
        return self.sum(name, self.weights if weights is None else weights / weights.sum())


@dataclass(frozen=True)
class Call:
    """A client function with what it is sent: the argument of ``map`` as a value."""

    function: ClientFunction
    shared: Arguments = field(default_factory=dict)
    each: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """What an engine is asked to do: a client function, the clients that run it, and with what."""

    function: ClientFunction
    hyper: Any
    numbers: np.ndarray
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    """Arguments that differ between clients, sent or from their states, one row each."""
    buffers: Tensor | None
    """Float buffers: the server's, or one row per client where clients keep them."""


@dataclass(frozen=True)
class Pending:
    """Work that clients were asked to do. In simulation it is done at once and waits to be collected."""

    clients: np.ndarray
    sent: dict[str, Tensor]
    kept: dict[str, Tensor]
    buffers: Tensor | None


@dataclass
class Traffic:
    """Bytes that crossed between the server and the clients."""

    down: int = 0
    up: int = 0


class Samples:
    """One split on the device, with every client's place in it on host and device."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.x, self.y = split.x.to(device), split.y.to(device)
        self.counts = np.asarray(split.count, dtype=np.int64)
        self.start = torch.from_numpy(np.asarray(split.start, dtype=np.int64)).to(device)
        self.count = torch.from_numpy(self.counts).to(device)


class Federation(ABC):
    """Clients that can be asked to run client functions. The engines differ in :meth:`_run` alone."""

    engine: str

    def __init__(
        self,
        task: Task,
        data: ClientData,
        *,
        local: Local | None = None,
        hyper: Any = None,
        seed: int = 0,
        device: str = "cpu",
        buffers: str = "average",
        evaluation_batch: int = 500,
        answers: Answers | None = None,
    ) -> None:
        if buffers not in POLICIES:
            raise SartorError(f"buffers = {buffers!r}: must be one of {', '.join(POLICIES)}")
        self.task = task
        self.local = local or Local()
        self.hyper = hyper
        self.seed = seed
        self.device = torch.device(device)
        self.names = data.names
        self.policy = buffers
        self.evaluation_batch = evaluation_batch
        self.samples = {"train": Samples(data.train, self.device), "test": Samples(data.test, self.device)}
        if data.validation is not None:
            self.samples["validation"] = Samples(data.validation, self.device)
        everyone = np.zeros(data.clients, dtype=np.int64)
        pooled = Split(data.pooled_x, data.pooled_y, everyone, everyone + len(data.pooled_y))
        self.samples["pooled"] = Samples(pooled, self.device)
        self.round = 0
        self.answered = 0
        self.traffic = Traffic()
        self.states = StateStore(data.clients, self.device)
        self.buffers = task.initial_buffers(self.device) if task.buffer_size else None
        if self.buffers is not None and buffers == "local":
            self.states.declare("buffers", self.buffers)
        self._answers = answers

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def sizes(self) -> Tensor:
        """n_i of every client."""
        return self.samples["train"].count

    def stream(self, name: str) -> int:
        """The key of this run's stream with that name; rounds, clients and indices are folded into it."""
        key = random.stream(self.seed, name)
        assert isinstance(key, int)
        return key

    @property
    def mean_buffers(self) -> Tensor | None:
        """The float buffers that go with a shared model: the server's, or the mean of the clients'."""
        if "buffers" not in self.states:
            return self.buffers
        return self.states["buffers"].mean(dim=0).to(self.device)

    def declare(self, **initial: Tensor) -> None:
        """Give every client a state of this name and initial value; client functions take it by name."""
        for name, value in initial.items():
            self.states.declare(name, value.to(self.device))

    def map(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
        hyper: Any = None,
    ) -> Replies:
        """Ask every client of the cohort and wait for the answers."""
        return self.collect(self.dispatch(function, cohort, shared, each, hyper))

    def ask(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
    ) -> Replies:
        """Ask as ``map`` does, for evaluation.

        Everyone answers, nothing is kept and no traffic is counted.
        """
        traffic = replace(self.traffic)
        pending = self.dispatch(function, cohort, shared, each)
        self.traffic = traffic
        return self._replies(pending.clients, pending.sent)

    def dispatch(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
        hyper: Any = None,
    ) -> Pending:
        """Ask every client of the cohort; :meth:`collect` takes the answers."""
        numbers = self._numbers(cohort)
        shared = {name: self._tensor(value) for name, value in (shared or {}).items()}
        each = {name: self._tensor(value) for name, value in (each or {}).items()}
        for name, value in each.items():
            if value.shape[:1] != (len(numbers),):
                found = list(value.shape)
                raise SartorError(
                    f"map: each[{name!r}] needs one row for each of {len(numbers)} clients, it is {found}"
                )
        states = self._state_names(function, {*shared, *each})
        state = {name: self.states.rows(name, numbers) for name in states}
        buffers = self.buffers
        if buffers is not None and self.policy == "local":
            buffers = self.states.rows("buffers", numbers)
        self.traffic.down += sum(value.nbytes for value in shared.values()) * len(numbers)
        self.traffic.down += sum(value.nbytes for value in each.values())
        hyper = self.hyper if hyper is None else hyper
        with torch.no_grad():
            sent, kept, after = self._run(Work(function, hyper, numbers, shared, {**each, **state}, buffers))
        for name in kept:
            if name not in self.states:
                known = ", ".join(self.states) or "none"
                raise SartorError(
                    f"{name_of(function)} keeps {name!r}, which is no declared state (declared: {known})"
                )
        if after is not None and self.policy == "average":
            self.traffic.down += after.nbytes
        return Pending(numbers, sent, kept, after)

    def collect(self, pending: Pending) -> Replies:
        """The replies that arrived. Only now do the states of those clients move."""
        numbers, sent, kept, buffers = pending.clients, pending.sent, pending.kept, pending.buffers
        if self._answers is not None:
            here = np.asarray(self._answers(self.round, numbers), dtype=bool)
            if not here.all():
                places = to_device(np.flatnonzero(here), self.device)
                numbers = numbers[here]
                sent = {name: value[places] for name, value in sent.items()}
                kept = {name: value[places] for name, value in kept.items()}
                buffers = None if buffers is None else buffers[places]
        for name, value in kept.items():
            self.states.write(name, numbers, value)
        self.traffic.up += sum(value.nbytes for value in sent.values())
        self.answered = len(numbers)
        replies = self._replies(numbers, sent)
        if buffers is not None and len(numbers):
            self._take_buffers(replies, buffers)
        return replies

    def _replies(self, numbers: np.ndarray, sent: dict[str, Tensor]) -> Replies:
        return Replies(numbers, self.samples["train"].counts[numbers], sent, self.device, self.task.dtype)

    def _take_buffers(self, replies: Replies, buffers: Tensor) -> None:
        if self.policy == "local":
            self.states.write("buffers", replies.clients, buffers)
        elif self.policy == "average" and self.buffers is not None:
            # As changes, so that buffers which nobody changed stay what they were to the bit.
            changes = replace(replies, values={"buffers": buffers - self.buffers})
            self.buffers = self.buffers + changes.mean("buffers")
            self.traffic.up += buffers.nbytes

    @abstractmethod
    def _run(self, work: Work) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        """Run the function for these clients: replies, new states and buffers (if it trained) by row."""

    def _numbers(self, cohort: Sequence[int] | np.ndarray) -> np.ndarray:
        numbers = np.asarray(cohort, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.clients):
            wrong = numbers[(numbers < 0) | (numbers >= self.clients)][0]
            raise SartorError(
                f"map: the cohort has client {wrong}, there are clients 0 to {self.clients - 1}"
            )
        if not (numbers[1:] > numbers[:-1]).all() and len(np.unique(numbers)) < len(numbers):
            raise SartorError("map: a client stands twice in the cohort")
        return numbers

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device)
        return torch.as_tensor(
            value, dtype=self.task.dtype if isinstance(value, float) else None, device=self.device
        )

    def _state_names(self, function: ClientFunction, given: set[str]) -> list[str]:
        wanted = [name for name in argument_names(function) if name not in given]
        for name in wanted:
            if name not in self.states:
                raise SartorError(
                    f"{name_of(function)} takes {name!r}, which is neither sent (shared, each) "
                    "nor a declared state"
                )
        return wanted

    def _reply(self, function: ClientFunction, result: Any) -> Reply:
        if not isinstance(result, Reply):
            raise SartorError(
                f"{name_of(function)} returned {type(result).__name__}; a client function returns a Reply"
            )
        for part in (result.sent, result.kept):
            for name, value in part.items():
                part[name] = value if isinstance(value, Tensor) else self._tensor(value)
        return result


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device; without waiting for the device to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@lru_cache(maxsize=256)
def _weights(counts: bytes, device: torch.device, dtype: torch.dtype) -> Tensor:
    """n_i / Σ n_j, divided in double precision.

    Equal clients have the same weights every round: they are remembered.
    """
    n = np.frombuffer(counts, dtype=np.int64)
    return to_device(n / max(n.sum(), 1), device).to(dtype)


def name_of(function: Callable[..., Any]) -> str:
    """A client function's name for messages."""
    return str(getattr(function, "__name__", function))


@lru_cache(maxsize=1024)
def argument_names(function: ClientFunction) -> tuple[str, ...]:
    """The arguments a client function takes after ``client`` and ``hyper``.

    Those with defaults are left alone.
    """
    named = list(inspect.signature(function).parameters.values())[2:]
    return tuple(entry.name for entry in named if entry.default is entry.empty)
