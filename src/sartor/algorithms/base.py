"""What an algorithm is: hyper-parameters, client functions, and ``start / round / personalize``.

An algorithm lives in one file and registers itself with :func:`register`. It asks clients through
``federation.map`` and does the server's mathematics on what comes back; it has no loop over clients, no
device, no files. Its server state is one frozen value: ``round`` returns a new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from inspect import isabstract
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from sartor.errors import SartorError
from sartor.extensions import Registry
from sartor.federation.exchange import Call
from sartor.federation.federation import Federation
from sartor.federation.functions import admit
from sartor.settings import build, setting


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameter every method has; others extend it."""

    lr: float = setting(0.1, "local learning rate", symbol="η", low=0)


@dataclass(frozen=True)
class Server:
    """The server's state of a method with one global model."""

    w: Tensor


class Algorithm(ABC):
    """A federated method. ``Hyper`` is the dataclass of its hyper-parameters, ``self.hyper`` their values."""

    name: ClassVar[str]
    family: ClassVar[str]
    paper: ClassVar[str]
    server_keeps: ClassVar[str]
    client_keeps: ClassVar[str]
    traffic: ClassVar[str]
    """Down / up per participating client and round, in models."""
    buffers: ClassVar[str] = "average"
    """What happens to float buffers unless the experiment says otherwise."""
    quadratic: ClassVar[bool] = False
    """Whether the server's work grows with the square of the number of clients."""
    Hyper: ClassVar[type] = Hyper

    def __init__(self, hyper: Any = None) -> None:
        self.hyper = type(self).Hyper() if hyper is None else hyper

    def start(self, federation: Federation) -> Any:
        """The server's first state; declares the clients' states."""
        return Server(federation.initial())

    @abstractmethod
    def round(self, server: Any, federation: Federation, cohort: np.ndarray) -> Any:
        """One round: ask the cohort, return the server's next state."""

    def shared(self, server: Any) -> Tensor | None:
        """The global model to evaluate, one row per model where there are several, or None."""
        model: Tensor = server.w
        return model

    def personalize(self, server: Any, cohort: np.ndarray) -> Call | None:
        """How a client gets its personal model.

        A client function, marked :func:`~sartor.federation.exchange.personal`, whose reply has ``w``; None
        where there is none. ``w`` is a vector, or a function
        from inputs to outputs where the method predicts in another way; the tensors beside it are then what
        is stored. A client that never trained gets its model by the same call.
        """
        return None

    def welcome(self, server: Any, federation: Federation) -> Any:
        """The server's state for a federation of newcomers, for evaluation without training.

        Methods whose server keeps something for every client give each of these clients what a newcomer gets.
        """
        return server

    def observe(self, server: Any) -> dict[str, Any]:
        """What to record of the server after a round, for plots: numbers, or tensors and arrays.

        Arrays of more than 256 numbers are recorded in the rounds that are evaluated.
        """
        return {}


_REGISTRY: Registry[type[Algorithm]] = Registry("sartor.algorithms", "algorithm")
A = TypeVar("A", bound=type[Algorithm])


def register(cls: A) -> A:
    """Make an algorithm known by its name; usable as a decorator."""
    described = ("name", "family", "paper", "server_keeps", "client_keeps", "traffic")
    missing = [field for field in described if not isinstance(getattr(cls, field, None), str)]
    if missing or not cls.__doc__:
        raise SartorError(f"algorithm {cls.__name__}: describe it by {', '.join(missing) or 'a docstring'}")
    if isabstract(cls):
        raise SartorError(f"algorithm {cls.name!r}: define round()")
    _REGISTRY.add(cls.name, cls)
    admit(cls.__module__)
    return cls


def registered() -> Registry[type[Algorithm]]:
    """All methods by name, those of users and of installed packages included."""
    return _REGISTRY


def make(cls: type[Algorithm], **hyper: Any) -> Algorithm:
    """An algorithm with some hyper-parameters set, checked."""
    return cls(build(cls.Hyper, hyper, "hyper"))
