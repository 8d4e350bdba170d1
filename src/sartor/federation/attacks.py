"""Clients that misbehave: who they are, and what becomes of their replies on the way to the server.

In a simulation an attack stands at the server's end of the way up, before replies are judged or put together:
an attacker sends what it likes and obeys no transform on its way. It may know what honest clients send in
the same exchange. What an attacker's own samples say is changed before the run (``poison``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.errors import SartorError, SettingError
from sartor.extensions import Registry
from sartor.federation.exchange import ClientFunction, Outcome, Sent
from sartor.kernels.device import to_device
from sartor.nests import Nest
from sartor.settings import nearest, setting

if TYPE_CHECKING:
    from sartor.federation.federation import Federation

Key = int | Tensor


@dataclass(frozen=True)
class Attack:
    """What attackers do; others extend it. By itself they do nothing."""

    of: tuple[str, ...] = setting(
        (), "the quantities it falsifies; left out: all but single or whole numbers"
    )

    on_replies: ClassVar[bool] = True
    """Whether it falsifies replies."""
    on_data: ClassVar[bool] = False
    """Whether it changes what attackers train on."""
    colludes: ClassVar[bool] = False
    """Whether attackers must know what honest clients send, so that no node can do it alone."""

    @property
    def trigger(self) -> int | None:
        """The label that a trigger is to give, where there is one: how often it does is measured."""
        return None

    def forge(self, key: Key, value: Tensor) -> Tensor:
        """What one attacker sends in place of its honest value."""
        return value

    def collude(self, keys: Tensor, values: Tensor, honest: Tensor) -> Tensor:
        """What all attackers send, a row each, where they know what the honest ones send."""
        return torch.stack([self.forge(key, value) for key, value in zip(keys, values, strict=True)])

    def poison(self, key: Key, x: Nest, y: Nest, classes: int | None) -> tuple[Nest, Nest]:
        """One attacker's training samples, as it has them in place of its own."""
        return x, y

    def settled(self, x: Nest) -> Attack:
        """The same with what all training inputs say of its settings that were left open."""
        return self

    def triggered(self, x: Tensor) -> Tensor:
        """Inputs with the trigger, where there is one."""
        return x

    def concerns(self, name: str, rows: Tensor) -> bool:
        """Whether it falsifies this quantity."""
        return name in self.of if self.of else rows.is_floating_point() and rows.dim() > 1


@dataclass(frozen=True)
class NoAttack(Attack):
    """Nobody attacks."""


NONE = "none"
ATTACKS: Registry[type[Attack]] = Registry("sartor.attacks", "attack", {NONE: NoAttack})
A = TypeVar("A", bound=type[Attack])


def register_attack(name: str) -> Callable[[A], A]:
    """Make an attack known by name, for ``[attack]`` of an experiment; a decorator.

    >>> @register_attack("silence")
    ... @dataclass(frozen=True)
    ... class Silence(Attack):
    ...     '''Zeros.'''
    ...     def forge(self, key, value):
    ...         return torch.zeros_like(value)
    >>> "silence" in ATTACKS
    True
    >>> ATTACKS.remove("silence")
    """

    def added(cls: A) -> A:
        if not (isinstance(cls, type) and issubclass(cls, Attack)):
            raise SartorError(f"attack {name!r}: expected a class that extends sartor.Attack")
        ATTACKS.add(name, cls)
        return cls

    return added


@dataclass(frozen=True, kw_only=True)
class AttackChoice:
    """Which clients misbehave and how, by name with its settings."""

    name: str = setting(NONE, "what attackers do")
    share: float = setting(0.0, "share of the clients that attack, drawn by the seed", low=0, high=1)
    clients: tuple[str, ...] = setting((), "names of the clients that attack, in place of a share")
    file: str | None = setting(None, "a file with a name of an attacker in every line, in place of a share")
    settings: Any

    def check(self) -> None:
        """Refuse attackers without an attack, and an attack by nobody or by whom is said in several ways."""
        ways = [key for key in ("share", "clients", "file") if getattr(self, key)]
        if self.name == NONE and ways:
            raise SettingError(f"attack.{ways[0]}: says who attacks, but not how; give attack.name")
        if self.name != NONE and len(ways) != 1:
            found = f"{' and '.join(ways)}, which are several ways" if ways else "nobody"
            raise SettingError(f"attack: say who attacks by share, clients or file; it says {found}")
        if self.settings.of and not self.settings.on_replies:
            raise SettingError(f"attack.of: {self.name} falsifies no replies; leave it out")

    def who(self, names: Sequence[str], seed: int, *, strict: bool = False) -> np.ndarray:
        """The numbers of the attackers, in order.

        ``strict`` refuses a name that no client has, and a share that is nobody.
        """
        if self.name == NONE:
            return np.zeros(0, dtype=np.int64)
        if self.share:
            drawn = random.uniform(random.stream(seed, "attackers"), len(names)).numpy()
            count = int(self.share * len(names) + 0.5)
            if strict and not count:
                raise SettingError(
                    f"attack.share = {self.share:g}: that is none of {len(names)} clients; take a larger "
                    "share, or leave [attack] out"
                )
            return np.sort(np.argsort(drawn, kind="stable")[:count])
        wanted = self.clients or read_names(str(self.file))
        numbers = {name: number for number, name in enumerate(names)}
        unknown = [name for name in wanted if name not in numbers]
        if unknown and strict:
            where = "attack.clients" if self.clients else f"attack.file = {self.file!r}"
            guess = nearest(unknown[0], numbers)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise SettingError(f"{where}: there is no client {unknown[0]!r}{hint}")
        return np.unique(np.array([numbers[name] for name in wanted if name in numbers], dtype=np.int64))


def read_names(path: str) -> tuple[str, ...]:
    """The names in a file, one a line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"attack.file = {path!r}: cannot be read: {reason}") from None
    names = tuple(line.strip() for line in lines if line.strip())
    if not names:
        raise SettingError(f"attack.file = {path!r}: has no names; write one a line")
    return names


class Attackers:
    """The clients of a federation that attack, and what they do to their replies."""

    def __init__(self, choice: AttackChoice | None, federation: Federation) -> None:
        none = choice is None or choice.name == NONE
        self.attack: Attack = NoAttack() if choice is None else choice.settings
        self.name = NONE if choice is None else choice.name
        self._federation = federation
        numbers = np.zeros(0, dtype=np.int64)
        if choice is not None and not none:
            numbers = choice.who(federation.names, federation.seed)
        self.numbers = numbers
        """Who attacks."""
        self.falsify = bool(len(numbers)) and self.attack.on_replies
        """Whether replies are changed by them."""
        self._seen: set[str] = set()
        """The quantities that clients have sent."""

    def __bool__(self) -> bool:
        return bool(len(self.numbers))

    def forged(self, function: ClientFunction, outcome: Outcome, sent: Sent) -> Outcome:
        """Replies with those of the attackers in place of what they would have been."""
        if not self.falsify:
            return outcome
        self._seen |= {*outcome.sent}
        bad = np.isin(outcome.clients, self.numbers)
        if not bad.any():
            return outcome
        federation = self._federation
        device = federation.engine.device
        theirs, honest = (to_device(np.flatnonzero(who), device) for who in (bad, ~bad))
        starts = federation.starts(function, outcome.clients, sent)
        numbers = federation.tensor(outcome.clients[bad])

        def keys(name: str) -> Tensor:
            return keys_of(federation.seed, name, federation.round, federation.exchange, numbers)

        values = falsified(self.attack, outcome.sent, starts, theirs, honest, keys)
        return outcome.resent(values)

    def check(self) -> None:
        """After a round: refuse an attack on a quantity that no client sends."""
        unknown = [name for name in self.attack.of if name not in self._seen]
        if self._seen and unknown:
            sent = ", ".join(sorted(self._seen))
            raise SettingError(f"attack.of: nobody sends {unknown[0]!r}; what clients send is {sent}")


def keys_of(seed: int, name: str, round: int, exchange: int, numbers: Tensor) -> Tensor:
    """What a quantity's falsification is drawn by, at each of these clients."""
    key = random.fold(random.stream(seed, f"attack {name}"), round)
    return torch.as_tensor(random.fold(random.fold(key, exchange), numbers))


def falsified(
    attack: Attack,
    sent: Mapping[str, Tensor],
    starts: Mapping[str, Tensor],
    theirs: Tensor,
    honest: Tensor,
    keys: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Replies of which those in the places ``theirs`` are an attack's; models from where they began."""
    values = dict(sent)
    for name, rows in sent.items():
        if attack.concerns(name, rows):
            start = starts.get(name, torch.zeros((), dtype=rows.dtype, device=rows.device))
            changes = (rows - start)[:, None].flatten(1)
            made = attack.collude(keys(name), changes[theirs], changes[honest]).to(rows.dtype)
            start = start.expand_as(rows)[theirs]
            values[name] = rows.index_copy(0, theirs, start + made.view_as(start))
    return values


def for_simulations(name: str) -> SettingError:
    """What is said of ``[attack]`` at real machines."""
    return SettingError(
        f"attack.name = {name!r}: is for simulations; at real machines a node misbehaves that was told to "
        "(`sartor join --attack`), so leave [attack] out"
    )


def single_handed(attack: Attack | None) -> Attack | None:
    """An attack that a node can make by itself; one that needs to know others' replies is refused."""
    if attack is not None and attack.colludes:
        name = next((name for name, kind in ATTACKS.items() if kind is type(attack)), type(attack).__name__)
        raise SettingError(
            f"--attack name={name}: needs to know what honest clients send, which no node does; it is for "
            "simulations ([attack])"
        )
    return attack
