"""The methods, a folder per family and a file for each; importing this package registers all of them.

Imports the federation's contract and client, model below it; never an engine, a device or a file.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

from sartor.algorithms.base import Algorithm, Hyper, Server, make, register, registered
from sartor.algorithms.cards import Card, card, cards

__all__ = ["Algorithm", "Card", "Hyper", "Server", "card", "cards", "make", "register", "registered"]

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
