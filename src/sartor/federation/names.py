"""Client functions by name: for messages, checkpoints and the wire. Only what is installed can be named."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from sartor.errors import SartorError

FIRST = ("client", "hyper")
"""The first two arguments of a client function."""
SEPARATOR = "/"
"""Stands between what a function is made by and the function it is made of."""


def name_of(function: Callable[..., Any]) -> str:
    """A client function's name for messages."""
    return str(getattr(function, "__name__", function))


def qualified_name(function: Callable[..., Any]) -> str:
    """A client function's module and name, which :func:`find_function` turns back into it.

    A function made of another one, for evaluation, is named after that: ``evaluation_of/test/MODULE:NAME``.
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
    from sartor.algorithms.base import registry
    from sartor.evaluation import evaluation_of, model_of

    *made_by, plain = name.split(SEPARATOR)
    module, _, attribute = plain.partition(":")
    modules = {algorithm.__module__ for algorithm in registry().values()}
    known = module in modules or module.startswith("sartor.")
    function = getattr(sys.modules.get(module), attribute, None) if known else None
    if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters)[:2] != FIRST:
        raise SartorError(f"{name}: no such client function here; is another version installed?")
    found: Callable[..., Any] = function
    if made_by[:1] == ["evaluation_of"] and len(made_by) == 2:
        return evaluation_of(found, made_by[1])
    if made_by == ["model_of"]:
        return model_of(found)
    if made_by:
        raise SartorError(f"{name}: no such client function here; is another version installed?")
    return found
