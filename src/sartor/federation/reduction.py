"""How a server puts together what clients sent: a weighted mean, or a rule that stands in its place.

A method asks for means and sums of groups of rows (``replies.mean``, ``replies.sum``, ``reducer.sums``) and
never says how they are made; ``[aggregate]`` of an experiment does. A :class:`Reduction` gets the rows of a
group with weights that add up to 1, and gives the value that stands for all of them. A sum is what stands for
the group times the sum of its weights, so the weighted mean gives the sum itself. A row of weight 0 is not in
the group.

A rule that ``selects`` says of every row whether it is used, and the weighted mean of those that are stands
for all. Methods that go by clients' rows one by one can have such a rule alone (``reducer.trusted``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.errors import SartorError, SettingError
from sartor.extensions import Registry
from sartor.kernels.device import to_device
from sartor.settings import setting

if TYPE_CHECKING:
    from sartor.federation.federation import Federation

State = dict[str, Tensor]
JOINT = "__"


@dataclass(frozen=True)
class Reduction:
    """What stands for a group of rows; others extend it. This one is the weighted mean.

    >>> @dataclass(frozen=True)
    ... class Largest(Reduction):
    ...     '''The largest number of every column.'''
    ...     def reduce(self, key, rows, weights, state):
    ...         return rows.amax(dim=0), state
    >>> Largest().reduce(0, torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([0.5, 0.5]), {})[0]
    tensor([2., 5.])
    """

    of: tuple[str, ...] = setting((), "the quantities it is for; left out: all that are not whole numbers")
    weights: str = setting(
        "method", "whether replies weigh as the method says, or all alike", choices=("method", "equal")
    )

    selects: ClassVar[bool] = False
    """Whether it says of every row if it is used."""

    def check(self, clients: int) -> None:
        """Refuse settings that make no sense with so many clients in a round."""

    def init(self, like: Tensor) -> State:
        """What the server keeps for a quantity from round to round, before the first."""
        return {}

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> tuple[Tensor, State]:
        """What stands for the rows ``[n, d]``, and what is kept next.

        The weights are positive and add up to 1.
        """
        return weights @ rows, state

    def keep(self, key: int | Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Which rows are used, a boolean each; for rules that select."""
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)

    def concerns(self, name: str, rows: Tensor) -> bool:
        """Whether it is for this quantity."""
        return rows.is_floating_point() and (not self.of or name in self.of)


@dataclass(frozen=True)
class Mean(Reduction):
    """The mean: weighted as the method has it, or of all replies alike."""


@dataclass(frozen=True)
class Selection(Reduction):
    """A rule that says which rows are used, all where it says none: their weighted mean stands for all."""

    selects: ClassVar[bool] = True

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> tuple[Tensor, State]:
        """The weighted mean of the rows that are used."""
        kept = weights * self.keep(key, rows, weights)
        kept = torch.where(kept.any(), kept, weights)
        return (kept / kept.sum()) @ rows, state


MEAN = "mean"
AGGREGATES: Registry[type[Reduction]] = Registry("sartor.aggregates", "aggregate", {MEAN: Mean})
R = TypeVar("R", bound=type[Reduction])


def register_aggregate(name: str) -> Callable[[R], R]:
    """Make a rule known by name, for ``[aggregate]`` of an experiment; a decorator.

    >>> @register_aggregate("first")
    ... @dataclass(frozen=True)
    ... class First(Reduction):
    ...     '''The first row.'''
    ...     def reduce(self, key, rows, weights, state):
    ...         return rows[0], state
    >>> "first" in AGGREGATES
    True
    >>> AGGREGATES.remove("first")
    """

    def added(cls: R) -> R:
        if not (isinstance(cls, type) and issubclass(cls, Reduction)):
            raise SartorError(f"aggregate {name!r}: expected a class that extends sartor.Reduction")
        AGGREGATES.add(name, cls)
        return cls

    return added


class Reducer:
    """The rule of a federation, with what the server keeps for it; without one everything is a weighted sum.

    >>> Reducer().sum("delta", torch.tensor([[1.0], [5.0]]), torch.tensor([0.25, 0.5]))
    tensor([2.7500])
    """

    def __init__(self, rule: Reduction | None = None, federation: Federation | None = None) -> None:
        self.rule = None if rule in (None, Reduction(), Mean()) else rule
        self.offered = False
        """Whether the method was given any replies."""
        self._seen: set[str] = set()
        """The quantities that the method has asked for."""
        self._federation = federation
        self._states: State = {}
        self._turns: dict[str, int] = {}
        """How often each quantity was asked for in the round under way."""
        self._round = -1

    def sum(self, name: str, rows: Tensor, weights: Tensor, known: np.ndarray | None = None) -> Tensor:
        """Σ weight_i · row_i, or what the rule has in its place.

        ``known`` are the weights, or multiples of them, where the host knows them: it has to ask a device
        for others, and to wait for it.
        """
        weights = weights.to(rows.dtype)
        if not self._concerns(name, rows):
            if rows.dim() == 2:
                return weights @ rows
            return (weights @ rows[:, None].flatten(1)).view(rows.shape[1:])
        assert self.rule is not None
        slot, key = self._turn(name)
        first = f"{slot}{JOINT}"
        initial = self.rule.init(rows[:1, None].flatten(1)[0])
        state = {part: self._states.get(first + part, held) for part, held in initial.items()}
        held = weights.cpu().numpy() if known is None else known
        value, after = self._of_group(key, rows[:, None].flatten(1), weights, held, state)
        self._states |= {first + part: held for part, held in after.items()}
        return value.view(rows.shape[1:])

    def sums(self, name: str, rows: Tensor, matrix: Tensor) -> Tensor:
        """Σ_j matrix_ij · row_j for rows ``[n, d]`` and every group i, or what the rule has in its place.

        A rule that selects does so once, among all rows; a group none of whose rows it would use keeps them.
        Nothing is kept from round to round, as the groups are others in each.
        """
        if not self._concerns(name, rows):
            return matrix @ rows
        assert self.rule is not None
        matrix = matrix.to(rows.dtype)
        if self.rule.weights == "equal":
            there = (matrix != 0).to(rows.dtype)
            matrix = there * (matrix.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1))
        if self.rule.selects:
            used = matrix * self.trusted(name, rows)
            total, left = matrix.sum(dim=1, keepdim=True), used.sum(dim=1, keepdim=True)
            return torch.where(left > 0, used * (total / torch.where(left > 0, left, 1)), matrix) @ rows
        _, key = self._turn(name)
        state = self.rule.init(rows[0]) if len(rows) else {}
        groups = [
            self._of_group(random.fold(key, place), rows, weights, held, state)[0]
            for place, (weights, held) in enumerate(zip(matrix, matrix.cpu().numpy(), strict=True))
        ]
        return torch.stack(groups) if groups else matrix @ rows

    def trusted(self, name: str, rows: Tensor) -> Tensor:
        """Which rows a rule that selects would use, a boolean each; all of them where there is no rule."""
        everyone = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        if not self._concerns(name, rows) or not len(rows):
            return everyone
        assert self.rule is not None
        if not self.rule.selects:
            raise SettingError(needs_selection(self.rule, "the method"))
        _, key = self._turn(name)
        return self.rule.keep(key, rows[:, None].flatten(1), everyone.to(rows.dtype) / len(rows))

    def _of_group(
        self, key: int | Tensor, rows: Tensor, weights: Tensor, held: np.ndarray, state: State
    ) -> tuple[Tensor, State]:
        """What stands for the rows that have a weight, times its sum; zero where none has.

        ``held`` are the weights on the host, where they are asked about.
        """
        assert self.rule is not None
        if not held.any():
            return torch.zeros_like(weights @ rows), state
        if not held.all():
            members = to_device(np.flatnonzero(held), rows.device)
            rows, weights = rows[members], weights[members]
        if (held < 0).any():
            raise SartorError(
                f"aggregate: the method takes differences of replies (a negative weight), for which "
                f"{type(self.rule).__name__} has no meaning; leave [aggregate] out"
            )
        total, equal = weights.sum(), torch.full_like(weights, 1 / len(weights))
        share = equal if self.rule.weights == "equal" else weights / total
        value, after = self.rule.reduce(key, rows, share, state)
        return total * value, after

    def _concerns(self, name: str, rows: Tensor) -> bool:
        if self.rule is None:
            return False
        self._seen.add(name)
        return bool(rows.numel()) and self.rule.concerns(name, rows)  # a part may be empty, as fedbn's

    def check(self) -> None:
        """After a round: refuse a rule that nothing was asked of, though there were replies."""
        if self.rule is None or not self.offered:
            return
        unknown = [name for name in self.rule.of if name not in self._seen]
        if unknown or not self._seen:
            name, found = name_of_rule(self.rule), ", ".join(sorted(self._seen)) or "none"
            what = f"is for {unknown[0]!r}" if unknown else "has no effect"
            raise SettingError(f"aggregate: {name} {what}; the means that the method takes: {found}")

    def _turn(self, name: str) -> tuple[str, int | Tensor]:
        """What the rule's state and its randomness go by: the quantity, and how often it was asked for."""
        federation = self._federation
        if federation is None:
            return name, 0
        if federation.round != self._round:
            self._round, self._turns = federation.round, {}
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        key = random.fold(federation.stream(f"aggregate {name} {turn}"), federation.round)
        return f"{name}{JOINT}{turn}", random.fold(key, federation.exchange)

    # What a checkpoint needs ----------------------------------------------------------------------

    def save(self) -> State:
        """What the server keeps."""
        return {name: value.cpu() for name, value in self._states.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self._states = dict(saved)


PLAIN = Reducer()
"""Weighted sums and nothing else."""


def name_of_rule(rule: Reduction) -> str:
    """What a rule is called in an experiment."""
    return next((name for name, kind in AGGREGATES.items() if kind is type(rule)), type(rule).__name__)


def needs_selection(rule: Reduction, method: str) -> str:
    """What is said of a rule that gives a mean, to a method that goes by clients' rows one by one."""
    able = ", ".join(name for name, kind in AGGREGATES.items() if kind.selects)
    return (
        f"aggregate.name = {name_of_rule(rule)!r}: stands in place of a mean, and {method} goes by each "
        f"client's reply; take a rule that says which replies are used: {able or 'none is registered'}"
    )
