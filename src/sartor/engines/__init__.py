"""Where clients run: ``loop`` one after the other, ``stacked`` many in one batch, others that wrap these.

Imports the federation's contract and what lies below it. No algorithm imports an engine.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sartor.data.clients import ClientData
from sartor.engines.base import LocalEngine, Origins
from sartor.engines.grouped import GroupedEngine
from sartor.engines.loop import LoopEngine
from sartor.engines.sharded import ShardedEngine, world
from sartor.engines.stacked.engine import StackedEngine
from sartor.federation.engine import Engine
from sartor.federation.federation import Answers, Federation
from sartor.federation.grouped import GroupedFederation
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task
from sartor.nests import Nest

__all__ = ["choose_engine", "federation_of", "make_engine", "make_federation"]

ENGINES: dict[str, type[LocalEngine]] = {"loop": LoopEngine, "stacked": StackedEngine}


log = logging.getLogger(__name__)


def choose_engine(name: str, task: Task, device: str, x: Nest, y: Nest, way: str = "together") -> str:
    """The engine that ``auto`` means for a model, before anything runs.

    On CUDA: stacked. On a CPU: stacked for models without convolutions, whose steps are too small to keep a
    core busy; the loop for those with convolutions, which a CPU computes one client at a time faster than
    grouped. A model that the stacked engine cannot run this ``way`` runs on the loop engine, which is said;
    where ``stacked`` was asked for, that is an error.
    """
    if task.groups is not None:  # one for all groups that have clients: the loop where one of them needs it
        of_groups = [task.groups.tasks[group] for group in set(task.groups.of)]
        own = [choose_engine(name, group, device, x, y, "together") for group in of_groups]
        return "loop" if "loop" in own else own[0]
    apart = way == "apart" or (way == "auto" and device == "cuda")
    if name == "stacked":
        task.require_stackable(x, y, apart)
    if name != "auto":
        return name
    if device == "cpu" and task.has_convolutions:
        return "loop"
    reason = task.why_not_stackable(x, y, apart)
    if reason is None:
        return "stacked"
    log.warning("model %s runs on the loop engine, as it cannot be stacked (%s)", task.name, reason)
    return "loop"


def make_engine(
    name: str, task: Task, data: ClientData, settings: FederationSettings, origins: Origins | None = None
) -> Engine:
    """The named engine, over all processes of a run."""
    make = ENGINES[name] if task.groups is None else partial(GroupedEngine, ENGINES[name])
    if world() > 1 and origins is None:
        return ShardedEngine(make, task, data, settings)
    return make(task, data, settings, origins)


def make_federation(
    engine: str, task: Task, data: ClientData, *, answers: Answers | None = None, **settings: Any
) -> Federation:
    """A federation on the named engine; ``settings`` are those of :class:`FederationSettings`."""
    made = FederationSettings(**settings)
    return federation_of(task, make_engine(engine, task, data, made), made, answers=answers)


def federation_of(
    task: Task, engine: Engine, settings: FederationSettings, *, answers: Answers | None = None
) -> Federation:
    """The federation over an engine, of the kind that the clients' models need."""
    kind = Federation if task.groups is None else GroupedFederation
    return kind(task, engine, settings, answers=answers)
