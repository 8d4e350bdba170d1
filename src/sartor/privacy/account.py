"""The account of a run: what was told so far, what that has cost, and whether more may be told.

Under ``central`` a round's cohort is one draw, asked so many times; whoever asks all clients asks without
a draw. Under ``local`` the server sees every reply by itself, so that no draw helps: a client has spent what
its own replies cost. Under ``samples`` a client has spent what its gradients cost, of batches that are each
drawn anew; a batch of which several are taken is one draw, asked so many times. Of clients that have spent
differently, the worst off counts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sartor.errors import SartorError
from sartor.privacy.accounting import Step, Steps, epsilon, noise_for
from sartor.privacy.settings import Privacy

FINE = 1.05
"""Under ``samples`` clients with about as many samples are accounted as the worst of them."""


class BudgetSpent(SartorError):
    """What was to be told would pass the budget, and is not told."""


class Account(ABC):
    """What a run has spent; each mode has its own."""

    neighbours = "add-remove"

    def __init__(self, privacy: Privacy, planned: int) -> None:
        self.privacy, self.planned = privacy, planned
        """``planned`` exchanges a round, as the method declares them."""

    @abstractmethod
    def exposed(self) -> Iterable[Steps]:
        """What was told of the one who is worst off, or of several of whom it is not known who is."""

    @property
    def spent(self) -> float:
        """ε so far."""
        return self._of(self.exposed())

    def _of(self, exposed: Iterable[Steps]) -> float:
        noise, delta = self.privacy.multiplier, self.privacy.delta
        return max((epsilon(noise, delta, steps, self.neighbours) for steps in exposed), default=0.0)

    def _check(self, exposed: Callable[[], Iterable[Steps]]) -> None:
        """Refuse what would pass the budget; where none is given, nothing does."""
        budget = self.privacy.epsilon
        if budget is not None and self._of(exposed()) > budget:
            raise BudgetSpent(f"privacy.epsilon = {budget:g}: more would pass it, {self.spent:.4g} are spent")

    def may_go_on(self) -> bool:
        """Whether another round like the others stays within the budget."""
        try:
            self._check(self.after_a_round)
        except BudgetSpent:
            return False
        return True

    @abstractmethod
    def after_a_round(self) -> Iterable[Steps]:
        """What will have been told after one more round."""

    def begin_round(self) -> None:  # noqa: B027 (for most nothing begins)
        """Another draw."""

    def row(self) -> dict[str, Any]:
        """What the record says of it after a round; ε is None where there is no bound."""
        spent = self.spent
        return {"epsilon": spent if math.isfinite(spent) else None, "delta": self.privacy.delta}

    def told(self) -> dict[str, Any]:
        """What the summary says of it."""
        privacy = self.privacy
        return {
            "mode": privacy.mode,
            **self.row(),
            "budget": privacy.epsilon,
            "noise": privacy.multiplier,
            "clip": privacy.clip,
            "neighbours": self.neighbours,
        }

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Everything that changes, as plain values."""

    @abstractmethod
    def load(self, saved: Mapping[str, Any]) -> None:
        """Take it back."""


class CentralAccount(Account):
    """Sums that the server noises: of the round's cohort, or of everyone."""

    def __init__(self, privacy: Privacy, planned: int, sampling: str, rate: float) -> None:
        super().__init__(privacy, planned)
        self.neighbours = "add-remove" if sampling == "poisson" else "replace"
        self.sampling, self.rate = sampling, rate
        self.rounds: Counter[int] = Counter()
        """How many rounds asked their cohort so many times."""
        self.everyone = 0
        self.now = 0
        """How often the cohort of the round under way was asked."""

    def charge(self, drawn: bool) -> None:
        """Something of the round's cohort is to be told, or of clients that were not drawn."""
        now, everyone = (self.now + 1, self.everyone) if drawn else (self.now, self.everyone + 1)
        self._check(lambda: [self._steps(self.rounds + Counter([now]), everyone)])
        self.now, self.everyone = now, everyone

    def begin_round(self) -> None:
        """The cohort of the last round is closed."""
        self.rounds, self.now = self.rounds + Counter([self.now] if self.now else []), 0

    def exposed(self) -> Iterable[Steps]:
        """All cohorts so far, each a draw, and what everyone was asked."""
        return [self._steps(self.rounds + Counter([self.now]), self.everyone)]

    def after_a_round(self) -> Iterable[Steps]:
        """One more cohort, asked as often as any before."""
        often = max([self.planned, self.now, *self.rounds])
        return [self._steps(self.rounds + Counter([self.now, often]), self.everyone)]

    def _steps(self, rounds: Counter[int], everyone: int) -> Steps:
        drawn = {Step(self.sampling, self.rate, times): count for times, count in rounds.items() if times}
        return {**drawn, Step(): everyone}

    def save(self) -> dict[str, Any]:
        """Rounds by how often they asked."""
        return {"rounds": sorted(self.rounds.items()), "everyone": self.everyone, "now": self.now}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take it back."""
        self.rounds = Counter({int(times): int(count) for times, count in saved["rounds"]})
        self.everyone, self.now = int(saved["everyone"]), int(saved["now"])


class LocalAccount(Account):
    """Replies that clients noise: each has spent what its own cost."""

    neighbours = "replace"

    def __init__(self, privacy: Privacy, planned: int, clients: int) -> None:
        super().__init__(privacy, planned)
        self.replies = np.zeros(clients, dtype=np.int64)

    def check(self, numbers: np.ndarray) -> None:
        """Before these clients are asked; a method that sends nothing is let go on."""
        if self.planned:
            most = int(self.replies[numbers].max(initial=-1)) + 1
            self._check(lambda: [{Step(): most}])

    def charge(self, numbers: np.ndarray) -> None:
        """These clients were asked for something, whether it arrived or not."""
        self.replies[numbers] += 1
        self._check(self.exposed)

    def exposed(self) -> Iterable[Steps]:
        """The client with the most replies."""
        return [{Step(): int(self.replies.max(initial=0))}]

    def after_a_round(self) -> Iterable[Steps]:
        """As many more as the method declares."""
        return [{Step(): int(self.replies.max(initial=0)) + self.planned}]

    def save(self) -> dict[str, Any]:
        """Replies by client."""
        return {"replies": self.replies.tolist()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take it back."""
        self.replies = np.array(saved["replies"], dtype=np.int64)


class SampleAccount(Account):
    """Gradients that clients noise, of batches drawn anew among a client's samples."""

    neighbours = "replace"

    def __init__(
        self, privacy: Privacy, counts: np.ndarray, batch: int, a_round: np.ndarray, times: int = 1
    ) -> None:
        super().__init__(privacy, int(a_round.max(initial=0)))
        self.rates = batch_rates(counts, batch)
        self.a_round = a_round
        """Batches of each client in a round, as the method declares them."""
        self.batches = np.zeros(len(counts), dtype=np.int64)
        self.before = self.batches
        """Those before the round under way."""
        self.times = times
        """How many gradients of a batch were taken at most, as the method declares it or more."""

    def begin_round(self) -> None:
        """What was taken so far is not of this round."""
        self.before = self.batches.copy()

    def check(self, numbers: np.ndarray) -> None:
        """Before these clients train."""
        if self.planned and self.privacy.epsilon is not None:
            after, due = self.batches.copy(), (self.before + self.a_round)[numbers]
            more = after[numbers] + self.a_round[numbers]  # of a client that has done its round already
            after[numbers] = np.where(after[numbers] < due, due, more)
            self._check(lambda: exposures(self.rates, after, self.times))

    def charge(self, numbers: np.ndarray, taken: np.ndarray) -> None:
        """These clients have taken gradients of so many batches, and so many of one: a row for each."""
        self.batches[numbers] += taken[:, 0]
        self.times = max(self.times, int(taken[:, 1].max(initial=0)))
        self._check(self.exposed)

    def exposed(self) -> Iterable[Steps]:
        """Every kind of client."""
        return exposures(self.rates, self.batches, self.times)

    def after_a_round(self) -> Iterable[Steps]:
        """One more round of everyone."""
        return exposures(self.rates, self.batches + self.a_round, self.times)

    def save(self) -> dict[str, Any]:
        """Batches by client."""
        return {"batches": self.batches.tolist(), "times": self.times}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take it back."""
        self.batches, self.times = np.array(saved["batches"], dtype=np.int64), int(saved["times"])


def batch_rates(counts: np.ndarray, batch: int) -> np.ndarray:
    """How likely a sample is in a batch of its client; 0 where there are no samples.

    >>> batch_rates(np.array([0, 10, 40]), 20)
    array([0. , 1. , 0.5])
    """
    sizes = np.minimum(counts, batch) if batch else counts
    return np.asarray(sizes / np.maximum(counts, 1))


def batches_of(gradients: Any, times: int) -> np.ndarray:
    """How many batches so many gradients are of, where so many are taken of each.

    >>> batches_of([0, 8, 9], 2)
    array([0, 4, 5])
    """
    return -(-np.asarray(gradients, dtype=np.int64) // times)


def exposures(rates: np.ndarray, batches: np.ndarray, times: int = 1) -> list[Steps]:
    """What differs among clients, the likely worst first: rates rounded up a little, the most of a rate.

    ``times`` is how many gradients are taken of each batch.
    """
    fine = np.log(FINE)
    steps = np.floor(np.log(np.maximum(rates, 1e-300)) / fine + 1e-9)
    coarse = np.minimum(1.0, np.exp((steps + 1) * fine))
    coarse = np.where(rates >= 1, 1.0, coarse)
    found = {
        float(rate): int(batches[coarse == rate].max())
        for rate in np.unique(coarse[(rates > 0) & (batches > 0)])
    }
    worst = sorted(found, key=lambda rate: -rate * math.sqrt(found[rate]))
    return [{Step("fixed", rate, times): found[rate]} for rate in worst]


def calibrated(target: float, delta: float, exposed: list[Steps], neighbours: str) -> float:
    """The least noise with which nobody passes a target; found for the likely worst, tried on all."""
    known, noise = exposed[:1], 0.0
    while known:
        noise = max(noise_for(target, delta, steps, neighbours) for steps in known)
        above = [steps for steps in exposed if epsilon(noise, delta, steps, neighbours) > target]
        if not above:
            break
        known = [above[0]]
    return noise
