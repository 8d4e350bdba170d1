"""Sartor: federated learning when clients differ. Every client gets a model cut to its own data.

>>> import sartor
>>> result = sartor.run("fedavg", data="digits", clients=5, rounds=2, store=False)
>>> sorted(result.summary["accuracy"])
['personal_local', 'personal_pooled', 'shared_local', 'shared_pooled']
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sartor.algorithms import Algorithm, algorithms, register
    from sartor.api import run
    from sartor.comparison import compare
    from sartor.experiment import Experiment
    from sartor.federation import Call, Reply
    from sartor.local import Client
    from sartor.report import report
    from sartor.reproduction import reproduce
    from sartor.runner import Result, resume
    from sartor.settings import setting
    from sartor.task import Task
    from sartor.tuning import search

# Threads that wait for each other spin, by default for milliseconds, which makes two runs on one machine
# ten times slower than one. A bounded spin costs nothing alone. It has to be said before torch is imported;
# a user's own value stays.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"

_HOMES = {
    "run": "sartor.api",
    "resume": "sartor.runner",
    "compare": "sartor.comparison",
    "search": "sartor.tuning",
    "report": "sartor.report",
    "reproduce": "sartor.reproduction",
    "Experiment": "sartor.experiment",
    "Task": "sartor.task",
    "Algorithm": "sartor.algorithms",
    "algorithms": "sartor.algorithms",
    "register": "sartor.algorithms",
    "Client": "sartor.local",
    "Call": "sartor.federation",
    "Reply": "sartor.federation",
    "Result": "sartor.runner",
    "setting": "sartor.settings",
}

__all__ = [
    "Algorithm",
    "Call",
    "Client",
    "Experiment",
    "Reply",
    "Result",
    "Task",
    "algorithms",
    "compare",
    "register",
    "report",
    "reproduce",
    "resume",
    "run",
    "search",
    "setting",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing the package must not import torch."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'sartor' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """This package: where a function and a module share a name (`algorithms`, `report`) it has the function.

    Importing such a module would otherwise put it in the function's place.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
