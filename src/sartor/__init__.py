"""Sartor: federated learning when clients differ. Every client gets a model cut to its own data.

>>> import sartor
>>> result = sartor.run("fedavg", data="digits", clients=5, rounds=2, store=False)
>>> sorted(result.summary["accuracy"])
['personal_local', 'personal_pooled', 'shared_local', 'shared_pooled']
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sartor.algorithms import Algorithm, register
    from sartor.api import run
    from sartor.client.augment import Augmentation, register_augmentation
    from sartor.client.local import Client
    from sartor.data.named import register_data
    from sartor.federation import Call, Reply, Step, changes, personal
    from sartor.federation.attacks import Attack, register_attack
    from sartor.federation.reduction import Reduction, Selection, register_aggregate
    from sartor.federation.transforms import Transform, register_transform
    from sartor.model.adapters import with_adapters
    from sartor.model.networks import Factory, register_model
    from sartor.model.objectives import Objective, register_objective
    from sartor.model.task import Task
    from sartor.report import write_report
    from sartor.runs.experiment import Experiment
    from sartor.runs.observers import Observer
    from sartor.runs.result import Result
    from sartor.runs.resume import resume
    from sartor.settings import setting
    from sartor.studies.comparison import compare
    from sartor.studies.reproduction import reproduce, reproduce_all
    from sartor.studies.tuning import search

# Threads that wait for each other spin, by default for milliseconds, which makes two runs on one machine
# ten times slower than one. A bounded spin costs nothing alone. It has to be said before torch is imported;
# a user's own value stays.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.2.0"

_HOMES = {
    "run": "sartor.api",
    "resume": "sartor.runs.resume",
    "compare": "sartor.studies.comparison",
    "search": "sartor.studies.tuning",
    "write_report": "sartor.report",
    "reproduce": "sartor.studies.reproduction",
    "reproduce_all": "sartor.studies.reproduction",
    "Experiment": "sartor.runs.experiment",
    "Task": "sartor.model.task",
    "Algorithm": "sartor.algorithms",
    "register": "sartor.algorithms",
    "register_data": "sartor.data.named",
    "Factory": "sartor.model.networks",
    "register_model": "sartor.model.networks",
    "Objective": "sartor.model.objectives",
    "register_objective": "sartor.model.objectives",
    "with_adapters": "sartor.model.adapters",
    "Client": "sartor.client.local",
    "Augmentation": "sartor.client.augment",
    "register_augmentation": "sartor.client.augment",
    "Call": "sartor.federation",
    "Reply": "sartor.federation",
    "Step": "sartor.federation",
    "changes": "sartor.federation",
    "personal": "sartor.federation",
    "Attack": "sartor.federation.attacks",
    "register_attack": "sartor.federation.attacks",
    "Reduction": "sartor.federation.reduction",
    "Selection": "sartor.federation.reduction",
    "register_aggregate": "sartor.federation.reduction",
    "Transform": "sartor.federation.transforms",
    "register_transform": "sartor.federation.transforms",
    "Observer": "sartor.runs.observers",
    "Result": "sartor.runs.result",
    "setting": "sartor.settings",
}

__all__ = [
    "Algorithm",
    "Attack",
    "Augmentation",
    "Call",
    "Client",
    "Experiment",
    "Factory",
    "Objective",
    "Observer",
    "Reduction",
    "Reply",
    "Result",
    "Selection",
    "Step",
    "Task",
    "Transform",
    "changes",
    "compare",
    "personal",
    "register",
    "register_aggregate",
    "register_attack",
    "register_augmentation",
    "register_data",
    "register_model",
    "register_objective",
    "register_transform",
    "reproduce",
    "reproduce_all",
    "resume",
    "run",
    "search",
    "setting",
    "with_adapters",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing the package must not import torch."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'sartor' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
