"""The methods, one file for each or for a few close ones; importing this package registers all of them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sartor.algorithms.base import Algorithm, Hyper, Server, make, register, registry

__all__ = ["Algorithm", "Hyper", "Server", "algorithms", "make", "register"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def algorithms() -> dict[str, type[Algorithm]]:
    """All methods by name, those a user has registered included."""
    return registry()
