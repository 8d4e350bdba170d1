"""Client functions by name: for messages, checkpoints and the wire. Only what is installed can be named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sartor.errors import SartorError


def name_of(function: Callable[..., Any]) -> str:
    """A client function's name for messages."""
    return str(getattr(function, "__name__", function))


def qualified_name(function: Callable[..., Any]) -> str:
    """A client function's module and name, which :func:`find_function` turns back into it."""
    name = f"{function.__module__}:{function.__qualname__}"
    if find_function(name) is not function:
        raise SartorError(f"{name}: a client function must be found under its name in its module")
    return name


def find_function(name: str) -> Callable[..., Any]:
    """The client function of that name in a module of a registered algorithm or of the package.

    Nothing is imported: a module that is not loaded is not known.
    """
    from sartor.algorithms.base import registry

    module, _, attribute = name.partition(":")
    modules = {algorithm.__module__ for algorithm in registry().values()}
    known = module in modules or module.startswith("sartor.")
    function = getattr(sys.modules.get(module), attribute, None) if known else None
    if not callable(function):
        raise SartorError(f"{name}: no such client function here; is another version installed?")
    found: Callable[..., Any] = function
    return found
