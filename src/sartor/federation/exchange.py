"""What server and clients exchange: calls, replies, and whether replies are fit to be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.errors import SartorError
from sartor.federation.functions import name_of
from sartor.federation.reduction import PLAIN, Reducer
from sartor.kernels.device import to_device
from sartor.kernels.lengths import lengths

Arguments = Mapping[str, Any]
ClientFunction = Callable[..., "Reply"]
STATE = "state "
"""How the names of states begin among norms."""
NO_AGES = np.zeros(0, dtype=np.int64)
"""The ages of replies that were waited for."""


class ClientError(SartorError):
    """A client function failed; the message names function, round and, on the loop engine, the client."""


class NobodyAnswered(Exception):
    """No reply arrived in an exchange: the round ends and leaves everything as it was."""


class PerGroup(tuple[Any, ...]):
    """A value for each group of clients, where they have models of their own: by the group's number."""


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
        """The same reply, with the client's new state; a second call adds to the first."""
        self.kept = {**self.kept, **kept}
        return self


class Step(NamedTuple):
    """A step that the server will take by a mean, from an argument that it sends to all."""

    argument: str
    rate: float = 1.0


class Moved(NamedTuple):
    """What a step of the server gives, and of which tensor as it then was."""

    start: Tensor
    version: int
    rate: float
    value: Tensor

    def is_of(self, start: Tensor, rate: float) -> bool:
        """Whether it is this step, from a tensor that is as it was."""
        return self.start is start and self.version == start._version and self.rate == rate


class Lent:
    """Rows of replies that lie where an engine will write again, as do their means; steps taken by those.

    They are there to be added up. Whoever still has them when the engine is asked again is left a copy.
    """

    def __init__(
        self, rows: dict[str, Tensor], means: dict[str, Tensor], moved: dict[str, Moved] | None = None
    ) -> None:
        self.rows, self.means, self.moved = rows, means, moved or {}

    def keep(self) -> None:
        """Copy what was lent, before it is written over."""
        self.rows = {name: value.clone() for name, value in self.rows.items()}
        self.means = {name: value.clone() for name, value in self.means.items()}


class Fold(NamedTuple):
    """Quantities of which only the mean and the sum will be asked for, and the weights of the mean."""

    names: tuple[str, ...]
    weights: Tensor
    steps: tuple[tuple[str, Step], ...] = ()
    """By which of them the server will take a step, as far as it says."""


@dataclass  # a host takes some microseconds more to make a frozen one
class Replies:
    """The replies of those who answered, stacked in cohort order."""

    clients: np.ndarray
    """Numbers of the clients that answered."""
    counts: np.ndarray
    """Their numbers of training samples."""
    values: dict[str, Tensor]
    device: torch.device
    dtype: torch.dtype
    ages: np.ndarray = field(default_factory=lambda: NO_AGES)
    """For collected jobs: how many rounds ago each started."""
    given: dict[str, Tensor] = field(default_factory=dict)
    """For collected jobs: what the server had sent, as ``shared`` or as ``each``, one row per client."""
    folded: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Quantities that were added up as clients answered: the mean by p'_i, and the sum."""
    groups: dict[int, Replies] = field(default_factory=dict)
    """The replies of each group, where clients have models of their own."""
    reducer: Reducer = PLAIN
    """What makes a mean of them."""
    lent: Lent | None = None
    """Quantities whose rows an engine has lent, with their means by p'_i."""

    @property
    def by_group(self) -> dict[int, Replies]:
        """The replies of each group that answered, by its number; all in group 0 where there are none."""
        return self.groups or {0: self}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.values and any(name in part.values for part in self.groups.values()):
            raise SartorError(
                f"replies: {name!r} has another shape in each group of clients; take it from by_group"
            )
        if name in self.folded:
            raise SartorError(
                f"replies: {name!r} was added up as clients answered (fold); there are its mean() and sum() "
                "by their usual weights, and no rows"
            )
        if self.lent is not None and name in self.lent.rows:
            return self.lent.rows[name].clone()
        if name not in self.values:
            raise SartorError(
                f"replies: clients sent no {name!r}; they sent {', '.join(self.values) or 'nothing'}"
            )
        return self.values[name]

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def index(self) -> Tensor:
        """The numbers of those who answered, to take or to put rows of a table by."""
        return to_device(self.clients, self.device)

    @property
    def age(self) -> Tensor:
        """The ages of those who answered, as a tensor."""
        return to_device(self.ages, self.device)

    def into(self, table: Tensor, values: Tensor) -> Tensor:
        """The table with these values, one row for each who answered, in the rows of those clients."""
        return table.index_copy(0, self.index, values)

    @property
    def n(self) -> Tensor:
        """n_i of those who answered."""
        return to_device(self.counts, self.device).to(self.dtype)

    @property
    def weights(self) -> Tensor:
        """p'_i = n_i / Σ n_j over those who answered."""
        return shares(self.counts.tobytes(), self.device, self.dtype)

    def sum(self, name: str, weights: Tensor | None = None) -> Tensor:
        """Σ weight_i · value_i in the order of the clients' numbers, whatever the cohort's.

        Zero if nobody answered. Where the experiment has a rule in place of means (``[aggregate]``), it is
        what stands for the values of positive weight, times the sum of the weights.
        """
        if weights is None and name in self.folded:
            return self.folded[name][1]
        if weights is None:
            ones = torch.ones(len(self), device=self.device, dtype=self.dtype)
            return self._sum(name, ones, np.ones(len(self)))
        return self._sum(name, weights)

    def _sum(self, name: str, weights: Tensor, known: np.ndarray | None = None) -> Tensor:
        """Σ weight_i · value_i; ``known`` is what the host knows of the weights."""
        lent = {} if self.lent is None else self.lent.rows
        values = lent[name] if name in lent else self[name]
        order = by_number(self.clients.tobytes(), self.device)
        if order is not None:
            values, weights = values[order], weights[order]
            known = None if known is None else known[np.argsort(self.clients, kind="stable")]
        return self.reducer.sum(name, values, weights, known)

    def mean(self, name: str, weights: Tensor | None = None) -> Tensor:
        """The mean over those who answered, by default with the weights p'_i; zero if nobody has a weight."""
        if weights is None and name in self.folded:
            return self.folded[name][0]
        if weights is None and self.lent is not None and name in self.lent.means:
            return self.lent.means[name].clone()
        if weights is None:
            return self._sum(name, self.weights, self.counts)
        total = weights.sum()
        return self._sum(name, weights / torch.where(total != 0, total, 1))

    def moved(self, name: str, start: Tensor, rate: float = 1.0) -> Tensor:
        """A step by the mean: start + rate · mean.

        Where ``map`` was told of it (``fold``), an engine may have taken it already.
        """
        taken = None if self.lent is None else self.lent.moved.get(name)
        if taken is not None and taken.is_of(start, rate):
            return taken.value
        return stepped(start, rate, self.mean(name))

    def trusted(self, name: str) -> Tensor:
        """Which replies the experiment's rule would use, a boolean each: all, unless it selects.

        For methods that go by each reply and take no mean.
        """
        return self.reducer.trusted(name, self[name])


def stepped(start: Tensor, rate: float, mean: Tensor) -> Tensor:
    """Start + rate · mean, in two roundings, to the bit alike wherever it is computed."""
    return start + (mean if rate == 1.0 else rate * mean)


class Sums:
    """Replies that come in blocks, of which some quantities are added up and not kept."""

    def __init__(self, weights: Tensor, names: Iterable[str]) -> None:
        self._weights, self._names = weights, tuple(names)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._parts: list[Replies] = []
        self._share = 0.0

    def add(self, replies: Replies, places: Tensor) -> None:
        """Add the replies of the clients at these places among all."""
        weights = self._weights[places]
        self._share += float(weights.double().sum())
        for name in self._names:
            mean, plain = replies.sum(name, weights), replies.sum(name)
            if name in self._sums:
                mean, plain = self._sums[name][0] + mean, self._sums[name][1] + plain
            self._sums[name] = mean, plain
        rest = {name: value for name, value in replies.values.items() if name not in self._names}
        self._parts.append(replace(replies, values=rest))

    def replies(self) -> Replies:
        """All of them; means are over those who are there."""
        all_there = sum(len(part) for part in self._parts) == len(self._weights)
        share = 1.0 if all_there or not self._share else self._share
        folded = {name: (mean / share, plain) for name, (mean, plain) in self._sums.items()}
        return replace(joined(self._parts), folded=folded)


def personal(function: ClientFunction) -> ClientFunction:
    """Mark a client function whose reply is a client's own: its model, or what belongs to it.

    Nodes of a real federation evaluate such a model and do not send it, unless they were told that they may.

    >>> @personal
    ... def own_model(client, hyper, v):
    ...     return Reply(w=v)
    >>> is_personal(own_model)
    True
    """
    function.personal = True  # type: ignore[attr-defined]
    return function


def is_personal(function: ClientFunction) -> bool:
    """Whether a client function replies what is a client's own."""
    return bool(getattr(function, "personal", False))


F = TypeVar("F", bound=ClientFunction)


def changes(**starts: str | Callable[..., Tensor]) -> Callable[[F], F]:
    """Say which quantities of a client function's reply are models, and where each began; a decorator.

    What passes transforms on the way up is the change from there: a clipped or compressed model would be
    another model. The server adds the change to where it began, so a method sees models. A start is the name
    of an argument that the client is sent, or a function of the task and of such arguments by their names. An
    argument that the client function does not take is sent for transforms alone, where there are any.

    >>> @changes(w="w")
    ... def trained(client, hyper, w):
    ...     return Reply(w=client.descend(w, lr=hyper.lr))
    >>> starts_of(trained, None, {"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """

    def declared(function: F) -> F:
        function.starts = starts  # type: ignore[attr-defined]
        return function

    return declared


def starts_of(function: ClientFunction, task: Any, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where the models of a function's reply began, of what one client has received."""
    starts: Mapping[str, str | Callable[..., Tensor]] = getattr(function, "starts", {})
    for name, start in starts.items():
        for needed in (start,) if isinstance(start, str) else _needs(start):
            if needed not in received:
                raise SartorError(
                    f"{name_of(function)}: changes() says that {name!r} begins at {needed!r}, which is not "
                    f"sent (sent: {', '.join(received) or 'nothing'})"
                )
    return {
        name: received[start]
        if isinstance(start, str)
        else start(task, **{needed: received[needed] for needed in _needs(start)})
        for name, start in starts.items()
    }


@lru_cache(maxsize=1024)
def references_of(function: ClientFunction) -> tuple[str, ...]:
    """What is sent for transforms alone, as where a model began: the function itself does not take it."""
    taken = inspect.signature(function).parameters
    starts = getattr(function, "starts", {}).values()
    return tuple(start for start in starts if isinstance(start, str) and start not in taken)


@lru_cache(maxsize=1024)
def _needs(start: Callable[..., Tensor]) -> tuple[str, ...]:
    """The arguments of a start that is a function, after the task."""
    return tuple(inspect.signature(start).parameters)[1:]


@dataclass(frozen=True)
class Call:
    """A client function with what it is sent: the arguments of ``map`` as a value.

    An algorithm's ``personalize`` gives one, for whoever is evaluated: ``shared`` goes to every client, of
    ``each`` a client is sent its own row.

    >>> def refined(client, hyper, w):
    ...     return Reply(w=client.descend(w, lr=hyper.lr, epochs=1))
    >>> call = Call(refined, shared={"w": torch.zeros(3)})
    >>> call.function.__name__, list(call.shared), call.each
    ('refined', ['w'], {})
    """

    function: ClientFunction
    shared: Arguments = field(default_factory=dict)
    each: Arguments = field(default_factory=dict)
    row: ClientFunction | None = None
    """Where a personal model is one of several shared ones: which row it is, replied as ``row``.

    It is sent the same. What was counted with the shared models is then known of the personal ones; of
    clients on other machines, who count by themselves, it is not asked.
    """


class Sent(NamedTuple):
    """What clients were sent: the same to all, and to each a row of its own."""

    numbers: np.ndarray
    shared: Mapping[str, Tensor]
    each: Mapping[str, Tensor]


class Work(NamedTuple):
    """What an engine is asked to do: a client function, the clients that run it, and with what."""

    function: ClientFunction
    hyper: Any
    numbers: np.ndarray
    rounds: np.ndarray
    """What keys each client's randomness: a round, as a rule."""
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    """Arguments that differ between clients, sent or from their states, one row each."""
    buffers: Tensor | None
    """Float buffers: the server's, or one row per client where clients keep them."""
    round: int = 0
    """The server's round, for messages."""
    keeps: bool = True
    """Whether clients keep what they say they do: not where they are only asked."""
    waits: bool = False
    """Whether what they keep is held back until their answers arrive; all processes of a run then hold it."""
    fold: Fold | None = None
    """What an engine may lend instead of giving it, where it has all replies in one place."""

    def rows(self, places: np.ndarray, index: Tensor) -> Work:
        """The part of some clients, by their places in it, as an array and as a tensor."""
        buffers = self.buffers
        return self._replace(
            numbers=self.numbers[places],
            rounds=self.rounds[places],
            own={name: value[index] for name, value in self.own.items()},
            buffers=buffers if buffers is None or buffers.dim() == 1 else buffers[index],
            fold=None,
        )


class Outcome(NamedTuple):
    """What clients did: replies, new states, and float buffers if they trained, one row each."""

    clients: np.ndarray
    """Who answered, in the order that was asked for."""
    sent: dict[str, Tensor]
    kept: dict[str, Tensor]
    buffers: Tensor | None
    norms: Mapping[str, Tensor] | None = None
    """What :func:`norms_of` gives for them, where an engine found it out on the way.

    Where replies are lent they are to be looked up whenever they are needed, and not to be held.
    """
    lent: Lent | None = None
    """Replies that are not in ``sent``, as only their means and sums are asked for."""

    @property
    def row_bytes(self) -> int:
        """The size of one client's reply."""
        rows = [*self.sent.values(), *({} if self.lent is None else self.lent.rows).values()]
        return sum([value.nbytes // (value.shape[0] or 1) for value in rows])

    def resent(self, sent: dict[str, Tensor]) -> Outcome:
        """The same with other replies; what is known of the norms of states stays known."""
        norms = self.norms
        if norms is not None:
            norms = {name: norm for name, norm in norms.items() if name.startswith(STATE)}
            norms |= norms_of(sent, {})
        return self._replace(sent=sent, norms=norms)

    def rows(self, places: Any) -> Outcome:
        """Some of the rows, or one."""
        return Outcome(
            self.clients[places.cpu().numpy() if isinstance(places, Tensor) else places],
            {name: value[places] for name, value in self.sent.items()},
            {name: value[places] for name, value in self.kept.items()},
            None if self.buffers is None else self.buffers[places],
        )


NOBODY = Outcome(np.zeros(0, dtype=np.int64), {}, {}, None)
"""The outcome of work for no clients."""


def checked_reply(function: ClientFunction, result: Any, dtype: torch.dtype, device: torch.device) -> Reply:
    """What a client function returned, if it is a reply, with all its values as tensors."""
    if not isinstance(result, Reply):
        raise SartorError(
            f"{name_of(function)} returned {type(result).__name__}; a client function returns a Reply"
        )
    for part in (result.sent, result.kept):
        for name, value in part.items():
            part[name] = as_tensor(value, dtype, device, f"{name_of(function)}: {name!r} of its reply")
    return result


@contextmanager
def untouched(function: ClientFunction, arguments: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a client function that has changed one of its arguments in place, also where it is suspended."""
    before = {name: _version(value) for name, value in arguments.items()}
    try:
        yield
    finally:
        changed = next((name for name in before if _version(arguments[name]) != before[name]), None)
        if changed is not None:
            raise ClientError(changed_words(function, f"its argument {changed!r}"))


def changed_words(function: ClientFunction, what: str) -> str:
    """What is to be said of a client function that changes what it was given."""
    return (
        f"{name_of(function)}: it changes {what} in place, which others may see; write w = w + step instead "
        "of w += step or w.add_(step)"
    )


def _version(value: Tensor) -> int:
    """How often a tensor was changed in place; under vmap, of what lies below."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value._version


def as_tensor(value: Any, dtype: torch.dtype, device: torch.device, what: str = "map") -> Tensor:
    """A value as a tensor on the device; single floats have the dtype, everything else its own."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=dtype if isinstance(value, float) else None, device=device)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"a {type(value).__name__} makes no tensor ({error})"
        raise SartorError(f"{what}: {reason}; tensors, arrays and numbers can be sent and kept") from error


def norms_of(sent: dict[str, Tensor], kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each reply and new state, by what an error would call it; a row each of ``[clients]``."""
    named = {f"{name!r}": value for name, value in sent.items()}
    named.update({f"{STATE}{name!r}": value for name, value in kept.items()})
    return {
        name: lengths(value[:, None].flatten(1)) for name, value in named.items() if value.is_floating_point()
    }


class Check:
    """Whether replies are fit to be used: norms are found on the device, and looked at when the host asks."""

    def __init__(
        self,
        who: str,
        numbers: np.ndarray,
        norms: Mapping[str, Tensor],
        largest: float,
        ratio: float = 0.0,
    ) -> None:
        self.who, self.numbers, self.norms = who, numbers, norms
        self.largest, self.ratio = largest, ratio

    @staticmethod
    def bad(checks: Sequence[Check]) -> list[tuple[Check, np.ndarray]]:
        """The checks some of whose norms are not finite or too large, and which: a row per quantity.

        The norms of all of them are fetched from the device at once.
        """
        if not checks:
            return []
        found = torch.cat([norm for check in checks for norm in check.norms.values()]).cpu().numpy()
        if np.isfinite(found).all() and not any(check.largest or check.ratio for check in checks):
            return []  # as a rule, and hundreds are not gone through one by one
        shapes = [(len(check.norms), len(check.numbers)) for check in checks]
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        parts = [part.reshape(shape) for part, shape in zip(np.split(found, ends[:-1]), shapes, strict=True)]
        judged = [(check, ~(part <= check.bounds(part))) for check, part in zip(checks, parts, strict=True)]
        return [(check, bad) for check, bad in judged if bad.any()]

    def bounds(self, norms: np.ndarray) -> np.ndarray:
        """The largest norm that each quantity may have: ``[quantities, 1]``.

        Of fewer than three replies nobody can say which is too large beside the others.
        """
        most = np.full((len(norms), 1), self.largest or np.finfo(norms.dtype).max, dtype=np.float64)
        for place, row in enumerate(norms if self.ratio and len(self.numbers) >= 3 else ()):
            median = np.median(np.where(np.isfinite(row), row, np.inf))
            if 0 < median < np.inf:
                most[place] = min(most[place, 0], self.ratio * float(median))
        return most

    def told(self, bad: np.ndarray, names: Sequence[str]) -> str:
        """The first bad reply in words."""
        place = int(np.flatnonzero(bad.any(axis=0))[0])
        quantity = int(np.flatnonzero(bad[:, place])[0])
        name, norms = list(self.norms.items())[quantity]
        norm = float(norms[place])
        reason = f"has norm {norm:.3g}, above replies.largest_norm = {self.largest:g}"
        if not self.largest or norm <= self.largest:
            reason = f"has norm {norm:.3g}, above replies.largest_ratio = {self.ratio:g} times the median"
        if not np.isfinite(norm):
            reason = "is not finite; a smaller learning rate (hyper.lr) is the usual cure"
        client = names[self.numbers[place]]
        return f"{self.who}, client {client!r}: {name} of its reply {reason}"


@lru_cache(maxsize=256)
def by_number(clients: bytes, device: torch.device) -> Tensor | None:
    """The order by number of clients that are not in it; a cohort often is the same, and is remembered."""
    numbers = np.frombuffer(clients, dtype=np.int64)
    if (numbers[1:] >= numbers[:-1]).all():
        return None
    return to_device(np.argsort(numbers, kind="stable"), device)


@lru_cache(maxsize=256)
def shares(counts: bytes, device: torch.device, dtype: torch.dtype) -> Tensor:
    """n_i / Σ n_j, divided in double precision.

    Equal clients have the same weights every round: they are remembered.
    """
    n = np.frombuffer(counts, dtype=np.int64)
    return to_device(n / max(n.sum(), 1), device).to(dtype)


def joined(parts: list[Replies]) -> Replies:
    """Replies below each other, in order."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(part.values.keys() != first.values.keys() for part in parts):
        raise SartorError("collect: answers of different client functions arrived together; take arrivals()")
    return replace(
        first,
        clients=np.concatenate([part.clients for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        values={name: torch.cat([part.values[name] for part in parts]) for name in first.values},
        ages=np.concatenate([part.ages for part in parts]),
        given={name: torch.cat([part.given[name] for part in parts]) for name in first.given},
    )


def joined_groups(parts: dict[int, Replies], numbers: np.ndarray) -> Replies:
    """The replies of several groups as one, in the order of these clients.

    Of what they sent, that of one shape in all groups; the rest is in each group's alone.
    """
    everyone = list(parts.values())
    first = everyone[0]
    alike = [
        name
        for name, value in first.values.items()
        if all(part.values[name].shape[1:] == value.shape[1:] for part in everyone)
    ]
    clients = np.concatenate([part.clients for part in everyone])
    place = {number: at for at, number in enumerate(numbers.tolist())}
    order = np.argsort([place[number] for number in clients.tolist()], kind="stable")
    index = to_device(order, first.device)
    return replace(
        first,
        clients=clients[order],
        counts=np.concatenate([part.counts for part in everyone])[order],
        values={name: torch.cat([part.values[name] for part in everyone])[index] for name in alike},
        groups=parts,
    )


@lru_cache(maxsize=1024)
def argument_names(function: ClientFunction) -> tuple[str, ...]:
    """The arguments a client function takes after ``client`` and ``hyper``.

    Those with defaults are left alone.
    """
    named = list(inspect.signature(function).parameters.values())[2:]
    return tuple(entry.name for entry in named if entry.default is entry.empty)
