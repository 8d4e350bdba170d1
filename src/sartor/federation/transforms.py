"""What happens to a message on its way: small transforms around ``map`` that no algorithm knows of.

A transform is a pair of functions as in Optax: ``init`` gives its state for a quantity, ``apply`` turns a
value and the state into what is sent and the next state. It works at one of three places: on the way
``down``, where the server applies it to what it sends; on the way ``up``, where each client does to its
reply; or at the ``server``, on all replies before they are reduced. Transforms compose in the order an
experiment lists them.

``apply`` is pure and written for one message, without branching on data, so that engines can stack it; what
is random comes from a key of its own for every round, exchange, client and quantity. What is sent may be
several ``parts`` (values and places, say), which ``receive`` puts together again at the other end: those are
what the wire carries, and what is counted.

A model that a client replies passes the way up as its change from what the client was sent
(:func:`~sartor.federation.exchange.changes`), which the server adds again before anything else sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sartor import random
from sartor.errors import SartorError, SettingError
from sartor.extensions import Registry
from sartor.federation.exchange import (
    ClientFunction,
    Reply,
    argument_names,
    as_tensor,
    references_of,
    starts_of,
)
from sartor.federation.functions import name_of
from sartor.settings import setting

PLACES = ("down", "up", "server")
JOINT = "__"
"""Stands between a quantity and one of the parts that it is sent as."""
GRADIENTS = "privacy__gradients"
"""Of how many batches a reply has noised gradients, and how many of one, where samples are hidden."""
TURN = "transform__turn"
"""The argument that tells clients which exchange of the round it is."""
KNOWN = f"known{JOINT}"
"""Begins the name of what a client keeps of an argument: what it got the last time."""

State = dict[str, Tensor]
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
Key = int | Tensor
Step = tuple[int, "Transform", str, tuple[int, ...], torch.dtype]
"""The place of a transform in its chain, the transform, and the quantity: its name, shape and type."""


@dataclass(frozen=True)
class Transform:
    """What happens to a message; others extend it.

    >>> @dataclass(frozen=True)
    ... class Round(Transform):
    ...     '''Whole multiples of a step.'''
    ...     step: float = setting(0.5, "the step", above=0)
    ...     def apply(self, key, value, state):
    ...         return torch.round(value / self.step) * self.step, state
    >>> Round().apply(0, torch.tensor([0.3, 0.8]), {})[0]
    tensor([0.5000, 1.0000])
    """

    place: str = setting("up", "where it is applied", choices=PLACES)
    of: tuple[str, ...] = setting((), "the quantities it is for; left out: all that are not whole numbers")

    parts: ClassVar[tuple[str, ...]] = ()
    """What a value is sent as; left out: as one tensor of its own shape."""
    joint: ClassVar[bool] = False
    """Whether it is for all quantities of a message at once, by ``apply_joint``; it keeps no state then."""
    clips: ClassVar[bool] = False
    """Whether no value is longer than a bound after it."""
    noises: ClassVar[bool] = False
    """Whether it adds noise, to hide what a bounded value is."""
    sealed: ClassVar[tuple[str, ...]] = ()
    """Those parts that transforms after it leave alone, as a scale of the others."""
    draws: ClassVar[bool] = True
    """Whether anything of it is random; one that says no is given no key of its own, but 0."""
    differs: ClassVar[bool] = False
    """Whether what passes the way down is the difference to what the client got the last time."""

    @property
    def shortens(self) -> bool:
        """Whether a value is never longer after it, so that a bound before it still holds."""
        return self.clips

    @property
    def adds_up(self) -> bool:
        """Whether it takes values for changes, and adds what it leaves out of one to the next."""
        return False

    @property
    def stateful(self) -> bool:
        """Whether anything is kept for it."""
        return type(self).init is not Transform.init

    def bound(self, task: Any) -> Transform:
        """The transform where models are this task's: one that goes by how they are laid out takes it up."""
        return self

    def init(self, like: Tensor) -> State:
        """The state for a quantity like this one: a client's own on the way up, else the server's."""
        return {}

    def alone(self, like: Tensor) -> State:
        """The state for a value by itself, of which nothing is kept afterwards."""
        return self.init(like)

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[Any, State]:
        """What is sent in place of the value, a dict where it has ``parts``, and the next state."""
        return value, state

    def apply_joint(self, key: Key, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is sent in place of all values of a message, by name."""
        return values

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The value that was sent as parts; ``like`` has its shape and type."""
        raise SartorError(
            f"transform {type(self).__name__} sends parts; define receive(), which puts them together"
        )

    def apply_all(self, key: Key, values: Tensor, state: State) -> tuple[Tensor, State]:
        """At the server: what becomes of all replies, a row each; by default of each by itself."""
        applied: Tensor = torch.vmap(lambda value: self.apply(key, value, {})[0])(values)
        return applied, state

    def concerns(self, name: str, value: Tensor) -> bool:
        """Whether it is for this quantity."""
        name = name.split(JOINT)[0]
        return value.is_floating_point() and (not self.of or name in self.of)


TRANSFORMS: Registry[type] = Registry("sartor.transforms", "transform")
T = TypeVar("T", bound=type[Transform])


def register_transform(name: str) -> Callable[[T], T]:
    """Make a transform known by name, for ``[[transforms]]`` of an experiment; a decorator.

    >>> @register_transform("negate")
    ... @dataclass(frozen=True)
    ... class Negate(Transform):
    ...     '''The opposite.'''
    ...     def apply(self, key, value, state):
    ...         return -value, state
    >>> "negate" in TRANSFORMS
    True
    >>> TRANSFORMS.remove("negate")
    """

    def added(cls: T) -> T:
        if not (isinstance(cls, type) and issubclass(cls, Transform)):
            raise SartorError(f"transform {name!r}: expected a class that extends sartor.Transform")
        if cls.parts and cls.receive is Transform.receive:
            raise SartorError(
                f"transform {name!r}: it sends parts; define receive(), which puts them together"
            )
        TRANSFORMS.add(name, cls)
        return cls

    return added


@dataclass(frozen=True)
class Chain:
    """The transforms of one place, in their order."""

    transforms: tuple[Transform, ...]

    def __bool__(self) -> bool:
        return bool(self.transforms)

    @property
    def draws(self) -> bool:
        """Whether any of them needs a key."""
        return any(transform.draws for transform in self.transforms)

    def initial(self, like: Mapping[str, Tensor], alone: bool = False) -> State:
        """The states for quantities like these, by transform and quantity; ``alone``: nothing is kept."""
        states: State = {}
        device = next((value.device for value in like.values()), None)
        for place, transform, name, shape, dtype in self._steps(like):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            held = transform.alone(zeros) if alone else transform.init(zeros)
            states |= {_state(place, name, part): value for part, value in held.items()}
        return states

    def apply(self, key: Key, values: Mapping[str, Tensor], states: State) -> tuple[dict[str, Tensor], State]:
        """What is sent of these quantities, and the next states."""
        sent, after = dict(values), dict(states)
        sealed: set[str] = set()
        for place, transform in enumerate(self.transforms):
            if transform.joint:
                sent = transform.apply_joint(random.fold(key, _purpose(place, "")), sent)
                continue
            for name in list(sent):
                if name in sealed or not transform.concerns(name, sent[name]):
                    continue
                prefix = _state(place, name, "")
                own = {part[len(prefix) :]: held for part, held in states.items() if part.startswith(prefix)}
                keyed = random.fold(key, _purpose(place, name)) if transform.draws else 0
                made, following = transform.apply(keyed, sent.pop(name), own)
                parts = made if transform.parts else {"": made}
                sent |= {f"{name}{JOINT}{part}" if part else name: held for part, held in parts.items()}
                sealed |= {f"{name}{JOINT}{part}" for part in transform.sealed}
                after |= {prefix + part: held for part, held in following.items()}
        return sent, after

    def check_noise(self) -> None:
        """Refuse noise on values that nothing bounds: it would hide nothing, however much there is."""
        for place, noise in enumerate(self.transforms):
            if not noise.noises:
                continue
            covering = [each.clips and _covers(each.of, noise.of) for each in self.transforms]
            before = [at for at in range(place) if covering[at]]
            if not before:
                where = "put clip before it" if any(covering) else "list clip before it, for as much"
                raise SettingError(f"transforms: noise hides only what is bounded when it is added; {where}")
            for at, each in enumerate(self.transforms[:place]):
                kind = type(each).__name__.lower()
                if each.parts:
                    raise SettingError(
                        f"transforms: {kind} stands before noise, and sends parts that noise does not reach; "
                        "put it after noise"
                    )
                if at > before[-1] and not each.shortens:
                    raise SettingError(
                        f"transforms: {kind} stands between clip and noise, and may make a value longer; "
                        "put it before clip, or after noise"
                    )

    def relative(self, starts: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> list[str]:
        """The models among these quantities that pass the transforms as their changes."""
        return [
            name
            for name in starts
            if name in values and any(each.concerns(name, values[name]) for each in self.transforms)
        ]

    def receive(self, sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The quantities of which this was sent; ``like`` are some of the same shapes and types."""
        if not any(transform.parts for transform in self.transforms):
            return dict(sent)
        values = dict(sent)
        for _, transform, name, shape, dtype in reversed(self._steps(like)):
            if transform.parts:
                parts = {part: values.pop(f"{name}{JOINT}{part}") for part in transform.parts}
                zeros = torch.zeros(shape, dtype=dtype, device=parts[transform.parts[0]].device)
                values[name] = transform.receive(parts, zeros)
        return values

    def _steps(self, like: Mapping[str, Tensor]) -> tuple[Step, ...]:
        """Which transform is applied to what, in order."""
        return _steps(
            self.transforms, tuple((name, tuple(value.shape), value.dtype) for name, value in like.items())
        )


@lru_cache(maxsize=1024)
def _steps(transforms: tuple[Transform, ...], shapes: Shapes) -> tuple[Step, ...]:
    """Which transform is applied to what, of which shape and type; found by applying them to zeros."""
    steps: list[Step] = []
    held, sealed = zeros_of(shapes), set[str]()
    for place, transform in enumerate(transforms):
        for name in list(held):
            if name in sealed or not transform.concerns(name, held[name]):
                continue
            value = held[name]
            steps.append((place, transform, name, tuple(value.shape), value.dtype))
            if transform.parts:
                made, _ = transform.apply(0, held.pop(name), transform.init(value))
                held |= {f"{name}{JOINT}{part}": made[part] for part in transform.parts}
                sealed |= {f"{name}{JOINT}{part}" for part in transform.sealed}
    return tuple(steps)


def _covers(these: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether some quantities are among others; none named are all of them."""
    return not these or (bool(others) and {*others} <= {*these})


def _state(place: int, name: str, part: str) -> str:
    return f"transform{JOINT}{place}{JOINT}{name}{JOINT}{part}"


@lru_cache(maxsize=1024)
def _purpose(place: int, name: str) -> int:
    key = random.stream(0, f"transform {place} of {name}")
    assert isinstance(key, int)
    return key


class Transforms:
    """The transforms of an experiment, by place; for models of a task, where that is given."""

    def __init__(self, transforms: tuple[Transform, ...], task: Any = None, watched: bool = False) -> None:
        self.all = transforms
        self.watched = watched
        """Whether clients' training samples may be seen through noised gradients alone."""
        for transform in transforms:
            if transform.place == "server" and transform.parts:
                kind = type(transform).__name__
                raise SettingError(f"transforms: {kind} changes what is sent; it has no place at the server")
        _check_down([made for made in transforms if made.place == "down"])
        self.down, self.up, self.server = (
            Chain(tuple(made.bound(task) if task else made for made in transforms if made.place == place))
            for place in PLACES
        )
        for chain in (self.down, self.up, self.server):
            chain.check_noise()
        self._any = bool(transforms) or watched

    def __bool__(self) -> bool:
        return self._any

    @property
    def at_clients(self) -> bool:
        """Whether clients have to do anything about them."""
        return (
            bool(self.up) or self.watched or any(made.parts or made.differs for made in self.down.transforms)
        )

    def differing(self, values: Mapping[str, Tensor]) -> list[str]:
        """The arguments of which a client is sent the difference to what it has."""
        first = next((made for made in self.down.transforms if made.differs), None)
        return (
            [] if first is None else [name for name, value in values.items() if first.concerns(name, value)]
        )

    def around(
        self, function: ClientFunction, shapes: Shapes, states: tuple[str, ...] = ()
    ) -> ClientFunction:
        """The client function that takes what was sent down, runs ``function``, and sends what goes up.

        ``shapes`` are those of the arguments that the server means to send to one client, before the way
        down; ``states`` the names of what clients keep for transforms.
        """
        return _around(self.down, self.up, function, shapes, states, self.watched)

    def states_for(self, function: ClientFunction, like: Mapping[str, Tensor]) -> State:
        """What clients begin to keep for the transforms of this function's replies."""
        first = name_of(function) + JOINT
        return {first + name: value for name, value in self.up.initial(like).items()}

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything for them."""
        return any(transform.stateful for transform in self.up.transforms)

    @property
    def in_parts(self) -> bool:
        """Whether replies are sent in parts."""
        return any(transform.parts for transform in self.up.transforms)


def _check_down(transforms: list[Transform]) -> None:
    """Refuse differences that come late, and models on the way down that are taken for changes."""
    if any(made.differs for made in transforms[1:]):
        raise SettingError(
            "transforms: difference comes first on the way down; what follows acts on differences"
        )
    for made in transforms:
        if made.adds_up and not (transforms[0].differs and _covers(transforms[0].of, made.of)):
            raise SettingError(
                f"transforms: {type(made).__name__.lower()} on the way down would add what it leaves out "
                "of a model to the next model; put difference before it, for as much, or set feedback = false"
            )


def shapes_of(shared: Mapping[str, Tensor], each: Mapping[str, Tensor]) -> Shapes:
    """What one client is sent, by name: shape and type."""
    one = {**shared, **{name: value[0] for name, value in each.items()}}
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(one.items()))


def zeros_of(shapes: Shapes, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Quantities of these shapes."""
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape, dtype in shapes}


def plain_shapes(shapes: Shapes) -> list[list[Any]]:
    """Shapes in plain values, for messages and checkpoints."""
    return [[name, list(shape), str(dtype).removeprefix("torch.")] for name, shape, dtype in shapes]


def read_shapes(plain: Any) -> Shapes:
    """What :func:`plain_shapes` gave; anything else is a ValueError."""
    shapes = []
    for name, shape, dtype in plain:
        kind = getattr(torch, str(dtype), None)
        sizes = tuple(int(size) for size in shape)
        if not isinstance(kind, torch.dtype) or not str(name).isidentifier() or min(sizes, default=0) < 0:
            raise ValueError(f"no shape of a quantity: {name!r}")
        shapes.append((str(name), sizes, kind))
    return tuple(shapes)


@lru_cache(maxsize=256)
def _around(
    down: Chain,
    up: Chain,
    function: ClientFunction,
    shapes: Shapes,
    states: tuple[str, ...],
    watched: bool,
) -> ClientFunction:
    given = {name for name, _, _ in shapes}
    kept = [name for name in argument_names(function) if name not in given]
    references = [name for name in references_of(function) if name in given]
    first = name_of(function) + JOINT

    def transformed(client: Any, hyper: Any, **arguments: Tensor) -> Reply:
        turn = arguments.pop(TURN)
        own = {name[len(first) :]: arguments.pop(name) for name in states}
        state = {name: arguments.pop(name) for name in kept}
        known = {name: own.pop(KNOWN + name) for name in given if KNOWN + name in own}
        received = down.receive(arguments, zeros_of(shapes, turn.device))
        received |= {name: value + received[name] for name, value in known.items()}
        starts = starts_of(function, client.task, received) if up else {}
        asked = {name: value for name, value in received.items() if name not in references}
        client.watched = watched
        reply = function(client, hyper, **asked, **state)
        key = random.fold(client.stream(f"up {name_of(function)}"), turn) if up.draws else 0
        dtype = client.task.dtype
        values = {name: as_tensor(value, dtype, turn.device) for name, value in reply.sent.items()}
        for name in up.relative(starts, values):
            values[name] = values[name] - starts[name]
        passed, after = up.apply(key, values, own)
        after |= {KNOWN + name: received[name] for name in known}
        kept_for_up = {first + name: value for name, value in after.items()}
        counted = {GRADIENTS: client.gradients} if watched else {}
        return Reply(**passed, **counted).keep(**reply.kept, **kept_for_up)

    transformed.__name__ = name_of(function)
    transformed.inner, transformed.shapes, transformed.states = function, shapes, states  # type: ignore[attr-defined]
    zeros = zeros_of(shapes)
    sent = down.apply(0, zeros, down.initial(zeros))[0]
    names = ("client", "hyper", *sent, *kept, *states, TURN)
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    transformed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return transformed


def inner_function(function: ClientFunction) -> ClientFunction:
    """A client function without the transforms around it."""
    found: ClientFunction = getattr(function, "inner", function)
    return found
