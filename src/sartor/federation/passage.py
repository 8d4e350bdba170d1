"""How messages of a federation pass the transforms of its experiment, at the server's end.

The way down begins here and the way up ends here; what clients do about it is
:meth:`~sartor.federation.transforms.Transforms.around` a client function.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.errors import SettingError
from sartor.federation.engine import Distant
from sartor.federation.exchange import Call, ClientFunction, Outcome, Sent, Work, references_of, starts_of
from sartor.federation.functions import find_function, name_of, qualified_name
from sartor.federation.transforms import (
    JOINT,
    KNOWN,
    PLACES,
    TURN,
    Key,
    Shapes,
    State,
    Transforms,
    inner_function,
    plain_shapes,
    read_shapes,
    shapes_of,
    zeros_of,
)
from sartor.kernels.device import in_a_row, put_rows

if TYPE_CHECKING:
    from sartor.federation.federation import Federation

FIRST = f"first{JOINT}"
"""Begins the name of what all clients were told whole, to which the first differences are."""


class Passage:
    """The transforms of a federation, with what the server keeps for them."""

    def __init__(self, transforms: Transforms, federation: Federation) -> None:
        self.transforms = transforms
        self._federation = federation
        self._states: dict[str, Tensor] = {}
        self._likes: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        """What one client replies to a function, as zeros; where transforms need it."""
        self._names: dict[tuple[Any, ...], tuple[str, ...]] = {}
        """The states that clients keep for such replies."""
        self._first: dict[Shapes, State] = {}
        """The states with which rows of such shapes go down."""
        self._seen: dict[str, set[str]] = {place: set() for place in PLACES}
        """The quantities that have passed each place."""
        self._told_of: set[str] = set()
        """States for transforms that clients elsewhere were told of."""

    def __bool__(self) -> bool:
        return bool(self.transforms)

    def down(
        self,
        function: ClientFunction,
        numbers: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
        hyper: Any = None,
    ) -> tuple[ClientFunction, dict[str, Tensor], dict[str, Tensor]]:
        """What is asked, with the transforms around it, and what is sent in place of the arguments."""
        transforms, federation = self.transforms, self._federation
        if not transforms.up:  # nothing goes up as a change: nobody needs to know from where
            references = references_of(function)
            shared, each = without(references, shared), without(references, each)
        if not transforms or not len(numbers):
            return function, shared, each
        self._seen["down"] |= {*shared, *each}
        made = function
        if transforms.at_clients:
            states = self._client_states(function, numbers, shared, each, hyper)
            shapes = shapes_of(shared, each)
            shared, each, known = self._differences(function, numbers, shared, each)
            made = transforms.around(function, shapes, states + known)
        if transforms.down:
            key = random.fold(federation.stream(f"down {name_of(function)}"), federation.round)
            key = random.fold(key, federation.exchange)
            first = f"down{JOINT}{name_of(function)}{JOINT}"
            initial = transforms.down.initial(shared)
            own = {name: self._states.get(first + name, value) for name, value in initial.items()}
            shared, after = transforms.down.apply(key, shared, own)
            self._states |= {first + name: value for name, value in after.items()}
            if each:
                drawn = transforms.down.draws
                keys = random.fold(key, federation.tensor(numbers)) if drawn else 0
                each = torch.vmap(self._row_down, (0 if drawn else None, 0, None))(
                    keys, each, self._alone(each)
                )
        if transforms.at_clients:
            shared = {**shared, TURN: _turn(federation.exchange, federation.engine.device)}
        return made, shared, each

    def _differences(
        self,
        function: ClientFunction,
        numbers: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[str, ...]]:
        """What is sent with differences to what each client has, and the names of what clients keep of it."""
        federation, first = self._federation, name_of(function) + JOINT + KNOWN
        one = {**shared, **{name: value[0] for name, value in each.items()}}
        names = self.transforms.differing(one)
        for name in names:
            if KNOWN + first + name not in self._states:  # told whole, once
                everyone = one[name].expand(federation.clients, *one[name].shape)
                self._states[KNOWN + first + name] = everyone.clone()
                self._states[FIRST + first + name] = one[name]
                federation.traffic.down += one[name].nbytes * federation.clients
            self._declare(first + name, self._states[FIRST + first + name])
        held = {name: self._of(value, numbers) for name, value in self._known(function).items()}
        rows = {name: shared[name] if name in shared else each[name] for name in names}
        each = each | {name: value - held[name] for name, value in rows.items()}
        return without(tuple(names), shared), each, tuple(first + name for name in names)

    def _of(self, held: Tensor, clients: np.ndarray) -> Tensor:
        """These clients' rows of a table, to be read."""
        stretch = in_a_row(clients)
        return held[self._federation.tensor(clients)] if stretch is None else held[stretch]

    def _known(self, function: ClientFunction) -> dict[str, Tensor]:
        """What each client has of the arguments of a function, a row each, where differences are sent."""
        first = KNOWN + name_of(function) + JOINT + KNOWN
        return {name[len(first) :]: held for name, held in self._states.items() if name.startswith(first)}

    def _declare(self, name: str, initial: Tensor) -> None:
        """Give every client a state for transforms, unless it has it."""
        if not self._declared(name):
            self._federation.declare(**{name: initial})
            self._told_of.add(name)

    def _declared(self, name: str) -> bool:
        """Whether every client has this state."""
        elsewhere = isinstance(self._federation.engine, Distant)
        return name in (self._told_of if elsewhere else self._federation.states)

    def _row_down(self, key: Key, row: dict[str, Tensor], state: State) -> dict[str, Tensor]:
        return self.transforms.down.apply(key, row, state)[0]

    def _alone(self, each: dict[str, Tensor]) -> State:
        """The states with which a row goes down: always the same, as nothing is kept of them."""
        shapes = shapes_of({}, each)
        if shapes not in self._first:
            one = {name: value[0] for name, value in each.items()}
            self._first[shapes] = self.transforms.down.initial(one, alone=True)
        return self._first[shapes]

    def _client_states(
        self,
        function: ClientFunction,
        numbers: np.ndarray,
        shared: dict[str, Tensor],
        each: dict[str, Tensor],
        hyper: Any,
    ) -> tuple[str, ...]:
        """The names of what clients keep for the transforms of a function's replies; declared if need be."""
        transforms, federation = self.transforms, self._federation
        if not (transforms.stateful or transforms.in_parts):
            return ()
        key = (function, shapes_of(shared, each))
        if key not in self._likes:
            given = without(references_of(function), shared)
            first = {name: value[:1] for name, value in without(references_of(function), each).items()}
            chosen = federation.hyper if hyper is None else hyper
            rounds = np.full(1, federation.round, dtype=np.int64)
            work = Work(function, chosen, numbers[:1], rounds, given, first, federation.buffers, keeps=False)
            self._likes[key] = federation.shapes(work)
        names = self._names.get(key)
        if names is None or not all(map(self._declared, names)):  # what is there is not made anew
            states = transforms.states_for(function, self._likes[key])
            for name, initial in states.items():
                self._declare(name, initial)
            self._names[key] = names = tuple(states)
        return names

    def received(self, call: Call, each: dict[str, Tensor], client: int) -> dict[str, Tensor]:
        """What a client got: of what the server shared with all, and of what was its own.

        It has to be asked before the reply counts, which the next difference is to.
        """
        known = self._known(inner_function(call.function))
        return self._got(call, each, {name: held[client] for name, held in known.items()})

    def _got(self, call: Call, each: dict[str, Tensor], known: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a client that had this known got."""
        values = self._put_together(call, each)
        return values | {name: held + values[name] for name, held in known.items()}

    def _put_together(self, call: Call, each: dict[str, Tensor]) -> dict[str, Tensor]:
        """What was sent, of its parts."""
        sent = without((TURN,), {**call.shared, **each})
        shapes = getattr(call.function, "shapes", None)
        if shapes is None:
            return sent
        like = zeros_of(shapes, self._federation.engine.device)
        return self.transforms.down.receive(sent, like)

    def up(self, function: ClientFunction, outcome: Outcome, sent: Sent) -> Outcome:
        """Replies as the method means them: put together of their parts, changes added to what was sent."""
        if not self.transforms:
            return outcome
        for place in ("up", "server"):
            self._seen[place] |= {name.split(JOINT)[0] for name in outcome.sent}
        if not self.transforms.up or not outcome.sent or not len(outcome.clients):
            return outcome
        values = outcome.sent
        if self.transforms.in_parts:
            like = self._likes[inner_function(function), function.shapes]  # type: ignore[attr-defined]
            values = torch.vmap(lambda row: self.transforms.up.receive(row, like))(values)
        added = self._added(function, outcome.clients, values, sent)
        return outcome if added is outcome.sent else outcome.resent(added)

    def _added(
        self, function: ClientFunction, clients: np.ndarray, values: dict[str, Tensor], sent: Sent
    ) -> dict[str, Tensor]:
        """The models of which changes were sent."""
        if not getattr(inner_function(function), "starts", None):
            return values
        starts = self.starts(function, clients, sent)
        one = {name: value[0] for name, value in values.items()}
        found = self.transforms.up.relative(starts, one)
        return values | {name: starts[name] + values[name] for name in found}

    def starts(self, function: ClientFunction, clients: np.ndarray, sent: Sent) -> dict[str, Tensor]:
        """Where the models that these clients reply began, as they were sent, a row each."""
        inner, task = inner_function(function), self._federation.task_of(clients)
        received = self._rows(function, clients, sent)
        return torch.vmap(lambda row: starts_of(inner, task, row))(received)

    def _rows(self, function: ClientFunction, clients: np.ndarray, sent: Sent) -> dict[str, Tensor]:
        """What these clients got, a row each."""
        federation, call = self._federation, Call(function, sent.shared)
        places = federation.tensor(np.flatnonzero(np.isin(sent.numbers, clients)))
        rows = {name: value[places] for name, value in sent.each.items()}
        known = {
            name: self._of(held, clients) for name, held in self._known(inner_function(function)).items()
        }
        if not rows:
            same = self._got(call, {}, {})
            return {name: value.expand(len(clients), *value.shape) for name, value in same.items()}
        found: dict[str, Tensor] = torch.vmap(lambda row, known: self._got(call, row, known))(rows, known)
        return found

    def delivered(
        self, function: ClientFunction, clients: np.ndarray, sent: Sent, kept: Mapping[str, Tensor]
    ) -> None:
        """These clients have what they were sent: the next differences are to it.

        ``kept`` is what they keep, where all are here to say so.
        """
        if not self._states:
            return
        inner = inner_function(function)
        known = self._known(inner) if len(clients) else {}
        first = name_of(inner) + JOINT + KNOWN
        if any(first + name not in kept for name in known):
            kept = {first + name: value for name, value in self._rows(function, clients, sent).items()}
        for name, held in known.items():
            put_rows(clients, held, kept[first + name])  # a table of all clients: not copied for a few

    def at_server(self, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replies after the transforms at the server."""
        federation = self._federation
        for place, transform in enumerate(self.transforms.server.transforms):
            key = random.fold(federation.stream(f"server {place}"), federation.round)
            for name, value in sent.items():
                if transform.concerns(name, value) and len(value):
                    first = f"server{JOINT}{place}{JOINT}{name}{JOINT}"
                    initial = transform.init(value[0])
                    state = {part: self._states.get(first + part, held) for part, held in initial.items()}
                    keyed = random.fold(random.fold(key, federation.exchange), federation.stream(name))
                    changed, after = transform.apply_all(keyed, value, state)
                    sent = {**sent, name: changed}
                    self._states |= {first + part: held for part, held in after.items()}
        return sent

    def check(self) -> None:
        """After a round: refuse a transform for a quantity that the method does not have."""
        for transform in self.transforms.all:
            seen = self._seen[transform.place]
            unknown = [name for name in transform.of if name not in seen]
            if seen and unknown:
                raise SettingError(
                    f"transforms: {type(transform).__name__.lower()} is for {unknown[0]!r}, but what passes "
                    f"there ({transform.place}) is {', '.join(sorted(seen))}"
                )

    @property
    def bytes_kept(self) -> int:
        """What the server keeps for transforms."""
        return sum(int(value.nbytes) for value in self._states.values())

    # What a checkpoint needs ----------------------------------------------------------------------

    def save(self) -> dict[str, Tensor]:
        """What the server keeps; nothing of it moves later on."""
        return {name: value.cpu().clone() for name, value in self._states.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self._states = {name: value.clone() for name, value in saved.items()}

    def name_of_call(self, function: ClientFunction) -> dict[str, Any]:
        """What :meth:`find_call` finds a client function by, with the transforms around it."""
        shapes = getattr(function, "shapes", None)
        return {
            "function": qualified_name(inner_function(function)),
            "shapes": None if shapes is None else plain_shapes(shapes),
            "states": list(getattr(function, "states", ())),
        }

    def find_call(self, entry: Mapping[str, Any]) -> ClientFunction:
        """The client function of a call that was saved."""
        function = find_function(entry["function"])
        if entry["shapes"] is None:
            return function
        return self.transforms.around(function, read_shapes(entry["shapes"]), tuple(entry["states"]))


@lru_cache(maxsize=256)
def _turn(exchange: int, device: torch.device) -> Tensor:
    """The number of an exchange, there; they are the same in every round."""
    return torch.full((), exchange, device=device)


def without(names: tuple[str, ...], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is given, but for these."""
    return {name: value for name, value in given.items() if name not in names} if names else given
