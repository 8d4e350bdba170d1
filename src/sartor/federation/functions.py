"""Client functions by name: for messages, checkpoints and the wire. Only what is installed can be named."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from sartor.errors import SartorError

Maker = TypeVar("Maker", bound=Callable[..., Any])

FIRST = ("client", "hyper")
"""The first two arguments of a client function."""
SEPARATOR = "/"
"""Stands between what a function is made by and the function it is made of."""


def name_of(function: Callable[..., Any]) -> str:
    """A client function's name for messages."""
    return str(getattr(function, "__name__", function))


def qualified_name(function: Callable[..., Any]) -> str:
    """A client function's module and name, which :func:`find_function` turns back into it.

    A function made of another one, for evaluation, is named after that: ``model_of/MODULE:NAME``.
    """
    made_by: tuple[str, ...] = getattr(function, "made_by", ())
    inner = getattr(function, "__wrapped__", function) if made_by else function
    name = SEPARATOR.join((*made_by, f"{inner.__module__}:{inner.__qualname__}"))
    if find_function(name) is not function:
        raise SartorError(f"{name}: a client function must be found under its name in its module")
    return name


def find_function(name: str) -> Callable[..., Any]:
    """The client function of that name in a module of a registered algorithm or of the package.

    Nothing is imported: a module that is not loaded is not known. Nothing but a client function is found, so
    whoever sends a name can have nothing else called.
    """
    *made_by, plain = name.split(SEPARATOR)
    module, _, attribute = plain.partition(":")
    known = module in _MODULES or module.startswith("sartor.")
    function = getattr(sys.modules.get(module), attribute, None) if known else None
    maker = _MAKERS.get(made_by[0]) if made_by else None
    wanted = 0 if maker is None else len(inspect.signature(maker).parameters)
    if (
        not inspect.isfunction(function)
        or tuple(inspect.signature(function).parameters)[:2] != FIRST
        or wanted != len(made_by)
    ):
        raise SartorError(f"{name}: no such client function here; is another version installed?")
    return function if maker is None else maker(function, *made_by[1:])


_MODULES: set[str] = set()
_MAKERS: dict[str, Callable[..., Any]] = {}


def admit(module: str) -> None:
    """Let the client functions of a module outside the package be found by name."""
    _MODULES.add(module)


def maker(function: Maker) -> Maker:
    """A decorator: this makes client functions of others, and is found by its name in theirs."""
    _MAKERS[function.__name__] = function
    return function
