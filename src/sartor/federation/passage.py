"""How messages of a federation pass the transforms of its experiment, at the server's end.

The way down begins here and the way up ends here; what clients do about it is
:meth:`~sartor.federation.transforms.Transforms.around` a client function.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    PLACES,
    TURN,
    Transform,
    Transforms,
    inner_function,
    plain_shapes,
    read_shapes,
    shapes_of,
    zeros_of,
)

if TYPE_CHECKING:
    from sartor.federation.federation import Federation


class Passage:
    """The transforms of a federation, with what the server keeps for them."""

    def __init__(self, transforms: tuple[Transform, ...], federation: Federation) -> None:
        self.transforms = Transforms(transforms)
        self._federation = federation
        self._states: dict[str, Tensor] = {}
        self._likes: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        """What one client replies to a function, as zeros; where transforms need it."""
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
            shared, each = without(references_of(function), shared), without(references_of(function), each)
        if not transforms or not len(numbers):
            return function, shared, each
        self._seen["down"] |= {*shared, *each}
        made = function
        if transforms.at_clients:
            states = self._client_states(function, numbers, shared, each, hyper)
            made = transforms.around(function, shapes_of(shared, each), states)
        if transforms.down:
            key = random.fold(federation.stream(f"down {name_of(function)}"), federation.round)
            key = random.fold(key, federation.exchange)
            first = f"down{JOINT}{name_of(function)}{JOINT}"
            initial = transforms.down.initial(shared)
            own = {name: self._states.get(first + name, value) for name, value in initial.items()}
            shared, after = transforms.down.apply(key, shared, own)
            self._states |= {first + name: value for name, value in after.items()}
            if each:
                keys = torch.as_tensor(random.fold(key, federation.tensor(numbers)))
                each = torch.vmap(self._row_down)(keys, each)
        if transforms.at_clients:
            shared = {**shared, TURN: federation.tensor(federation.exchange)}
        return made, shared, each

    def _row_down(self, key: Tensor, row: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.transforms.down.apply(key, row, self.transforms.down.initial(row))[0]

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
        elsewhere = isinstance(federation.engine, Distant)
        if key not in self._likes:
            given = without(references_of(function), shared)
            first = {name: value[:1] for name, value in without(references_of(function), each).items()}
            chosen = federation.hyper if hyper is None else hyper
            rounds = np.full(1, federation.round, dtype=np.int64)
            work = Work(function, chosen, numbers[:1], rounds, given, first, federation.buffers, keeps=False)
            self._likes[key] = federation.engine.shapes(work, federation.with_states)
        states = transforms.states_for(function, self._likes[key])
        for name, initial in states.items():
            if name not in (self._told_of if elsewhere else federation.states):
                federation.declare(**{name: initial})
                self._told_of.add(name)
        return tuple(states)

    def received(self, call: Call, each: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a client got: of what the server shared with all, and of what was its own."""
        sent = without((TURN,), {**call.shared, **each})
        shapes = getattr(call.function, "shapes", None)
        if shapes is None:
            return sent
        like = zeros_of(shapes, self._federation.engine.device)
        return self.transforms.down.receive(sent, like)

    def up(self, function: ClientFunction, outcome: Outcome, sent: Sent) -> Outcome:
        """Replies as the method means them: put together of their parts, changes added to what was sent."""
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
        inner, task = inner_function(function), self._federation.task_of(clients)

        def began(row: dict[str, Tensor]) -> dict[str, Tensor]:
            return starts_of(inner, task, self.received(Call(function, sent.shared), row))

        if not getattr(inner, "starts", None):
            return values
        places = self._federation.tensor(np.flatnonzero(np.isin(sent.numbers, clients)))
        rows = {name: value[places] for name, value in sent.each.items()}
        starts = torch.vmap(began)(rows) if rows else began({})
        one = {name: value[0] for name, value in values.items()}
        found = self.transforms.up.relative(starts, one)
        return values | {name: starts[name] + values[name] for name in found}

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

    # What a checkpoint needs ----------------------------------------------------------------------

    def save(self) -> dict[str, Tensor]:
        """What the server keeps."""
        return {name: value.cpu() for name, value in self._states.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self._states = dict(saved)

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


def without(names: tuple[str, ...], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is given, but for these."""
    return {name: value for name, value in given.items() if name not in names} if names else given
