"""A federation whose clients have models of their own: an exchange is made with one group after the other.

What every group's clients reply in one shape, such as prototypes or scores, is joined in cohort order; what
is shaped as a model is each group's, in ``replies.by_group``. A state may have another shape in each group,
and so may what is sent: a :class:`~sartor.federation.exchange.PerGroup` has a value for every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sartor.errors import SettingError
from sartor.federation.engine import Engine
from sartor.federation.exchange import (
    Arguments,
    ClientFunction,
    PerGroup,
    Replies,
    Sent,
    joined_groups,
)
from sartor.federation.federation import Answers, Federation, Folding
from sartor.federation.reduction import Reduction, name_of_rule
from sartor.federation.settings import FederationSettings
from sartor.federation.states import StateStore, grouped_name
from sartor.federation.transforms import Transforms
from sartor.model.groups import Groups
from sartor.model.task import Task


class GroupedFederation(Federation):
    """Clients in groups, each with a model of its own."""

    groups: Groups

    def __init__(
        self,
        task: Task,
        engine: Engine,
        settings: FederationSettings,
        *,
        answers: Answers | None = None,
    ) -> None:
        assert task.groups is not None
        self.groups = task.groups
        _refuse_averages(self.groups, settings)
        super().__init__(task, engine, settings, answers=answers)
        self.buffers = None  # those of a model of its own are a client's own
        self.states = StateStore(
            self.clients, engine.device, settings.states, self.groups.of, homes=engine.homes
        )
        if settings.buffers == "local":
            for group, own in enumerate(self.tasks):
                self.states.declare(grouped_name("buffers", group), own.initial_buffers(self._device))

    def task_of(self, clients: np.ndarray) -> Task:
        """The task of these clients, who are of one group."""
        return self.tasks[int(self.groups.of[clients[0]])]

    def initial_models(self) -> PerGroup:
        """The model that the clients of each group start from."""
        return PerGroup(task.initial(self._device) for task in self.tasks)

    def declare(self, **initial: Tensor | float | PerGroup) -> None:
        """Give every client a state of this name; its initial value may be another in each group."""
        for name, value in initial.items():
            if not isinstance(value, PerGroup):
                super().declare(**{name: value})
                continue
            for group, own in enumerate(value):
                super().declare(**{grouped_name(name, group): own})

    def map(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
        hyper: Any = None,
        fold: Folding = (),
    ) -> Replies:
        """Ask every client of the cohort that is there, group by group, and wait for the answers."""
        sent, rows, numbers = self._arguments(cohort, shared, each)
        self._exchanges += 1
        asked, answering, _ = self._who(numbers, {}, {})

        def exchange(members: np.ndarray, sent: dict[str, Tensor], rows: dict[str, Tensor]) -> Replies:
            call, sent, rows = self._passage.down(function, members, sent, rows, hyper)
            there, told = self._select(members, rows, np.isin(members, asked))
            self._send_down(sent, told, len(there))
            here, rows = self._select(members, rows, np.isin(members, answering))
            if not len(here):
                return self._replies(here, {})
            buffers = self._own_buffers(here)
            outcome = self._run(call, here, self._rounds(here), sent, rows, buffers, hyper=hyper)
            return self._accept(call, outcome, buffers, Sent(here, sent, rows))

        return self._heard(self._by_group(exchange, numbers, sent, rows))

    def ask(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
    ) -> Replies:
        """Ask as ``map`` does, for evaluation."""
        self.verify()
        sent, rows, numbers = self._arguments(cohort, shared, each)

        def exchange(members: np.ndarray, sent: dict[str, Tensor], rows: dict[str, Tensor]) -> Replies:
            rounds, buffers = self._rounds(members), self._own_buffers(members)
            outcome = self._run(function, members, rounds, sent, rows, buffers, keeps=False)
            replies = self._replies(outcome.clients, outcome.sent)
            return replies if self._distant is None else self._finite(replies)

        return self._by_group(exchange, numbers, sent, rows)

    def fetch(
        self,
        function: ClientFunction,
        cohort: Sequence[int] | np.ndarray,
        shared: Arguments | None = None,
        each: Arguments | None = None,
    ) -> Replies | None:
        """Ask as ``ask`` does, for what is the clients' own; None where it stays with them."""
        if self._distant is None:
            return self.ask(function, cohort, shared, each)
        if not self.settings.fetches_personal:
            return None
        replies = self.ask(function, cohort, shared, each)
        sent, rows, numbers = self._arguments(cohort, shared, each)
        for group, places in self.groups.divided(numbers):
            own = {name: _of(value, group) for name, value in sent.items()}
            self._send_down(own, {}, len(places))
        self._send_down({}, rows, 0)
        for part in replies.groups.values():
            self.traffic.up += sum(value.nbytes for value in part.values.values())
        return replies

    def _by_group(
        self,
        exchange: Callable[[np.ndarray, dict[str, Tensor], dict[str, Tensor]], Replies],
        numbers: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
    ) -> Replies:
        """The exchange with the clients of each group; nobody answered where none of them did."""
        parts: dict[int, Replies] = {}
        for group, places in self.groups.divided(numbers):
            own = {name: _of(value, group) for name, value in shared.items()}
            index = self._tensor(places)
            rows = {name: value[index] for name, value in each.items()}
            replies = exchange(numbers[places], own, rows)
            if len(replies):
                parts[group] = replies
        if not parts:
            self._nobody()
        return joined_groups(parts, numbers)

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, PerGroup):
            return PerGroup(super(GroupedFederation, self)._tensor(own) for own in value)
        return super()._tensor(value)

    def _own_buffers(self, numbers: np.ndarray) -> Tensor | None:
        """The float buffers that clients of a group start from, where their model has any."""
        task = self.task_of(numbers)
        return task.initial_buffers(self._device) if task.buffer_size else None


def _of(value: Any, group: int) -> Any:
    return value[group] if isinstance(value, PerGroup) else value


def _refuse_averages(groups: Groups, settings: FederationSettings) -> None:
    """Refuse what would combine numbers of different models, or whose state could belong to several."""
    having = [task.name for task in groups.tasks if task.buffer_size]
    if settings.buffers == "average" and having:
        raise SettingError(
            f"model.buffers = 'average': clients have models of their own ([[models]]), and {having[0]} has "
            "float buffers; take 'local' or 'freeze'"
        )
    rule = settings.aggregate
    if rule is not None and type(rule).init is not Reduction.init:
        raise SettingError(
            f"aggregate.name = {name_of_rule(rule)!r}: keeps a value from round to round, which would be of "
            "different models where clients have models of their own ([[models]]); take another"
        )
    transforms = Transforms(settings.transforms)
    if transforms.down or transforms.server or transforms.stateful:
        raise SettingError(
            "transforms: where clients have models of their own ([[models]]) there are those on the way up "
            "alone that keep no state"
        )
