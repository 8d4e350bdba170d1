"""What a federation asks of an engine: run work, and nothing else.

An engine gets a :class:`~sartor.federation.exchange.Work` and gives an
:class:`~sartor.federation.exchange.Outcome`, which names its clients. Who is asked, what time passes, which
replies are fit to be used, what clients keep and what crossed the wire is the federation's. Engines
whose clients are elsewhere are :class:`Distant`: there clients keep their states themselves.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.federation.clock import EventQueue, Job
from sartor.federation.exchange import Outcome, Work
from sartor.federation.homes import Homes
from sartor.nests import Nest

Attach = Callable[[Work], Work]
"""Adds to work what its clients have kept."""


class Engine(ABC):
    """Runs client functions at clients. Engines wrap each other; none knows the algorithm."""

    name: str
    device: torch.device
    names: Sequence[str]
    """The clients, by number."""
    counts: Mapping[str, np.ndarray]
    """How many samples every client has in each split; ``pooled`` are the same for all."""
    blank: Nest
    """One sample of zeros."""
    public: Tensor | None = None
    """Samples without labels that server and clients know, where there are any."""
    pools = True
    """Whether the pooled test data are at hand, where any client can be asked about them."""

    @cached_property
    def adds_up(self) -> bool:
        """Whether counts of clients' own test data and of the split ``rest`` make those of the pooled."""
        return False

    @cached_property
    def homes(self) -> Homes:
        """Where the clients are at home."""
        return Homes(len(self.names))

    @abstractmethod
    def run(self, work: Work) -> Outcome:
        """Run a client function: replies, new states and buffers (if it trained), by row."""

    def run_with(self, work: Work, attach: Attach) -> Outcome:
        """Run work without its clients' states, which are added where they are at home.

        Of what clients keep, the rows of those at home here are there; others are zeros, but for work that
        waits.
        """
        return self.run(attach(work))

    def shapes(self, work: Work, attach: Attach) -> dict[str, Tensor]:
        """What one client replies, as zeros; found by running the function once, of which nothing is kept."""
        first = np.zeros(1, dtype=np.int64)
        one = work.rows(first, torch.zeros(1, dtype=torch.int64, device=self.device))
        outcome = self.run_with(one, attach)
        return {name: torch.zeros_like(value[0]) for name, value in outcome.sent.items()}

    def seconds(self) -> float:
        """A clock for what this run takes."""
        return time.perf_counter()

    def wait(self) -> None:
        """Return when the device has done everything it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Distant(Engine):
    """An engine whose clients are elsewhere.

    Its outcomes have no states, as clients keep them; whoever is gone or answers nonsense is not in them.
    """

    round: int
    """The server's round, for messages."""
    noted: Counter[str]
    """What went wrong since it was looked at last, for the round's notes."""

    @property
    @abstractmethod
    def declared(self) -> set[str]:
        """The names of the states that were declared."""

    @abstractmethod
    def run_with(self, work: Work, attach: Attach) -> Outcome:
        """What clients could answer and keep, made up here: nobody is asked."""

    @abstractmethod
    def declare(self, name: str, initial: Tensor) -> None:
        """Give every client a state of this name and initial value."""

    @abstractmethod
    def settle(self, numbers: np.ndarray, used: np.ndarray) -> None:
        """Of the last replies of these clients, those of ``used`` count: what the others kept does not."""

    @abstractmethod
    def now(self) -> float:
        """The time, in the units of the virtual clock."""

    @abstractmethod
    def send(self, queue: EventQueue, hyper: Any) -> None:
        """Send the work in flight that has not been sent."""

    @abstractmethod
    def due(self, queue: EventQueue, count: float, end: float, hyper: Any) -> tuple[list[Job], list[Job]]:
        """The jobs that arrive next, taken out of the queue, and those that will not.

        At least one arrives unless the time is over or nobody is at work.
        """

    @abstractmethod
    def cancel(self, client: int) -> None:
        """What this client is at work for is not wanted any more."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Take everything back to what :meth:`snapshot` saw."""
