"""What an algorithm is: hyper-parameters, client functions, and ``start / round / personalize``.

An algorithm lives in one file and registers itself with :func:`register`. It asks clients through
``federation.map`` and does the server's mathematics on what comes back; it has no loop over clients, no
device, no files. Its server state is one frozen value: ``round`` returns a new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, is_dataclass
from inspect import isabstract
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_origin

import numpy as np
from torch import Tensor

from sartor.client.local import Batches, refuse
from sartor.client.settings import Local
from sartor.errors import SartorError
from sartor.extensions import Registry
from sartor.federation.exchange import Call
from sartor.federation.federation import Federation
from sartor.federation.functions import admit
from sartor.settings import build, setting

SEES_SAMPLES = "its clients go through samples as they are, besides the gradients of training"
MORE_THAN_SAMPLES = "its loss is not a sample's own alone"
TRAINS_FOR_EVALUATION = "it trains models for evaluation, outside its rounds"
ASKS_EVERYONE = "it asks all clients, whom no draw hides"


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameter every method has; others extend it."""

    lr: float = setting(0.1, "local learning rate", symbol="η", low=0)

    def or_lr(self, rate: float | None) -> float:
        """Another learning rate of the method, which follows ``lr`` where it is not set."""
        return self.lr if rate is None else rate


@dataclass(frozen=True)
class Server:
    """The server's state of a method with one global model."""

    w: Tensor


H = TypeVar("H", bound=Hyper)
S = TypeVar("S")


class Algorithm(ABC, Generic[H, S]):
    """A federated method: ``class FedProx(Algorithm[ProxHyper, Server])``.

    The first argument is the dataclass of its hyper-parameters, whose values are ``self.hyper``; the second
    is that of the server's state. A method that others extend leaves a type variable in the place of what
    they replace; its own is then the variable's bound.

    >>> def train(client, hyper, w):
    ...     return Reply(delta=client.descend(w, lr=hyper.lr) - w)
    >>> class Halved(Algorithm[Hyper, Server]):
    ...     '''FedAvg whose server takes half of the step.'''
    ...
    ...     name, family, paper = "halved", "global", "an example"
    ...     server_keeps, client_keeps, traffic = "w", "nothing", "1 / 1"
    ...
    ...     def round(self, server, federation, cohort):
    ...         replies = federation.map(train, cohort, shared={"w": server.w})
    ...         return Server(server.w + replies.mean("delta") / 2)
    >>> Halved(Hyper(lr=0.1)).hyper.lr  # with `@register` before it, sartor.run("halved") finds it
    0.1
    """

    name: ClassVar[str]
    family: ClassVar[str]
    paper: ClassVar[str]
    server_keeps: ClassVar[str]
    client_keeps: ClassVar[str]
    traffic: ClassVar[str]
    """Down / up per participating client and round, in models."""
    buffers: ClassVar[str] = "average"
    """What happens to float buffers unless the experiment says otherwise."""
    deployable: ClassVar[bool] = True
    """Whether it can run on real machines, where the data stay with the clients."""
    own_models: ClassVar[bool] = False
    """Whether clients may have models of different architectures (``[[models]]``)."""
    public: ClassVar[bool] = False
    """Whether it learns from public samples, which the experiment has to name (``[public]``)."""
    adapters: ClassVar[bool] = False
    """Whether it is about low-rank adapters, which the model must have."""
    quadratic: ClassVar[bool] = False
    """Whether the server's work grows with the square of the number of clients."""
    year: ClassVar[int | None] = None
    """When it was published, where ``paper`` does not say."""
    needs_validation: ClassVar[bool] = False
    """Whether clients must have validation data."""
    refuses: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Keys of ``[local]`` with which it would not be what it is, each with the reason; see ``refuse``."""
    sums_only: ClassVar[bool] = False
    """Whether the server needs nothing of the replies but sums weighted by what it knows of the clients."""
    unprotected: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Modes of ``[privacy]`` under which it has no guarantee, each with the reason; ``central`` needs
    ``sums_only`` besides."""
    reduces: ClassVar[str] = "means"
    """What ``[aggregate]`` finds in it: ``means``; ``rows``, where the server goes by each reply, so that a
    rule can only say which are used; or ``nothing``.
    """
    gradients_a_step: ClassVar[int] = 1
    """How many gradients a local step takes of its batch; see :meth:`gradients`."""
    Hyper: ClassVar[type] = Hyper
    """The dataclass of the hyper-parameters, as the class's first argument has it."""
    _arguments: ClassVar[tuple[Any, ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        """Take ``Hyper`` from the class's arguments."""
        super().__init_subclass__(**options)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Algorithm):
                parameters: tuple[Any, ...] = origin.__parameters__  # type: ignore[attr-defined]  # of Generic
                given = dict(zip(parameters, get_args(base), strict=True))
                cls._arguments = tuple(given.get(argument, argument) for argument in origin._arguments)
                if "Hyper" not in cls.__dict__:
                    cls.Hyper = _dataclass_of(cls._arguments[0], cls.__name__)

    def __init__(self, hyper: H | None = None) -> None:
        self.hyper: H = type(self).Hyper() if hyper is None else hyper

    def check(self, local: Local) -> None:
        """Refuse local settings with which it would not be what it is."""
        for key, why in self.refuses:
            refuse(local, self.name, why, key)

    def exchanges(self) -> int:
        """How often a round asks its cohort for something that is sent; the cost of privacy goes by it."""
        return 1

    def gradients(self, local: Local, n: Any) -> Any:
        """How many gradients a client with n samples takes in a round, at most; for privacy of samples.

        Where several are of the same batch, ``gradients_a_step`` says so: they hide less.
        """
        steps = Batches("train", local.batch, local.most_epochs, local.steps).count(n)
        return self.gradients_a_step * steps

    def start(self, federation: Federation) -> S:
        """The server's first state; declares the clients' states, and may ask clients as a round does.

        Nodes of a run that goes on are not asked again: what they answered is in its checkpoint, and of this
        state only the form counts.
        """
        # register() refuses methods that have another state and no start of their own
        return cast(S, Server(federation.initial()))

    @abstractmethod
    def round(self, server: S, federation: Federation, cohort: np.ndarray) -> S:
        """One round: ask the cohort, return the server's next state."""

    def shared(self, server: S) -> Tensor | None:
        """The global model to evaluate, one row per model where there are several, or None."""
        known: Any = server  # methods whose state has no w say here what is shared
        if not hasattr(known, "w"):
            raise SartorError(
                f"{self.name}: its server's state has no w; define shared(server), which gives the model to "
                "evaluate, or None"
            )
        model: Tensor = known.w
        return model

    def personalize(self, server: S, cohort: np.ndarray) -> Call | None:
        """How a client gets its personal model.

        A client function, marked :func:`~sartor.federation.exchange.personal`, whose reply has ``w``; None
        where there is none. ``w`` is a vector, or a function
        from inputs to outputs where the method predicts in another way; the tensors beside it are then what
        is stored. A client that never trained gets its model by the same call.
        """
        return None

    def ready(self, server: S, federation: Federation) -> S:
        """The server's state after a round that is evaluated; it may ask clients as a round does.

        For what a method does to its model at the end. The next round goes on from what is returned, so
        training must not depend on it: else it would on how often a run is evaluated.
        """
        return server

    def welcome(self, server: S, federation: Federation) -> S:
        """The server's state for a federation of newcomers, for evaluation without training.

        Methods whose server keeps something for every client give each of these clients what a newcomer gets.
        """
        return server

    def observe(self, server: S) -> dict[str, Any]:
        """What to record of the server after a round, for plots: numbers, or tensors and arrays.

        Arrays of more than 256 numbers are recorded in the rounds that are evaluated.
        """
        return {}


Algorithm._arguments = Algorithm.__parameters__  # type: ignore[attr-defined]  # of Generic


def _dataclass_of(hyper: Any, method: str) -> type:
    """The dataclass that an algorithm's first argument stands for."""
    found = hyper.__bound__ if isinstance(hyper, TypeVar) else Hyper if hyper is Any else hyper
    if not (isinstance(found, type) and is_dataclass(found)):
        raise SartorError(
            f"algorithm {method}: Algorithm[{found!r}, ...] names no dataclass of hyper-parameters; "
            "define it above the algorithm and name it without quotes"
        )
    return found


_REGISTRY: Registry[type[Algorithm[Any, Any]]] = Registry("sartor.algorithms", "algorithm")
A = TypeVar("A", bound=type[Algorithm[Any, Any]])


def register(cls: A) -> A:
    """Make an algorithm known by its name; usable as a decorator.

    >>> from sartor.algorithms import registered
    >>> registered()["fedavg"].paper
    'McMahan et al. 2017'
    """
    described = ("name", "family", "paper", "server_keeps", "client_keeps", "traffic")
    missing = [field for field in described if not isinstance(getattr(cls, field, None), str)]
    if missing or not cls.__doc__:
        raise SartorError(f"algorithm {cls.__name__}: describe it by {', '.join(missing) or 'a docstring'}")
    if isabstract(cls):
        raise SartorError(f"algorithm {cls.name!r}: define round()")
    server = cls._arguments[1]
    if cls.start is Algorithm.start and server not in (Server, S, Any):
        raise SartorError(
            f"algorithm {cls.name!r}: define start(), which makes its server's first state "
            f"({getattr(server, '__name__', server)})"
        )
    _REGISTRY.add(cls.name, cls)
    admit(cls.__module__)
    return cls


def registered() -> Registry[type[Algorithm[Any, Any]]]:
    """All methods by name, those of users and of installed packages included."""
    return _REGISTRY


def make(cls: type[Algorithm[H, S]], **hyper: Any) -> Algorithm[H, S]:
    """An algorithm with some hyper-parameters set, checked."""
    return cls(build(cls.Hyper, hyper, "hyper"))
