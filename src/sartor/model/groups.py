"""Clients with models of their own: groups of clients, each with a task beside the one that all know.

The ``[model]`` of an experiment is what the server has where a method shares a model, and what clients have
that are in no group; ``[[models]]`` say what others have, and who they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sartor.errors import SettingError
from sartor.model.networks import Factory, ModelChoice, build_task
from sartor.model.task import Task
from sartor.nests import Nest
from sartor.settings import setting, unknown


@dataclass(frozen=True, kw_only=True)
class ModelGroup:
    """A network, and the clients that have it: named, a share of them, or every k-th."""

    choice: ModelChoice
    clients: tuple[str | int, ...] = setting((), "who has this network: clients by name or number")
    share: float = setting(
        0.0, "who has it: this share of all clients, the first in no other entry", low=0, high=1
    )
    every: int = setting(0, "who has it: every so many-th client", low=0)
    first: int = setting(0, "the number of the first of `every` so many", low=0)


@dataclass(frozen=True, eq=False)
class Groups:
    """A task for each group of clients, and the group of every client by number."""

    tasks: tuple[Task, ...]
    of: np.ndarray
    entries: tuple[int, ...]
    """What each group is in the settings: 0 for ``[model]``, k for the k-th of ``[[models]]``."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the groups are called: their networks' names, numbered where they are not unique."""
        names = [task.name for task in self.tasks]
        return tuple(
            name if names.count(name) == 1 else f"{name} {names[: place + 1].count(name)}"
            for place, name in enumerate(names)
        )

    def members(self, group: int) -> np.ndarray:
        """The clients of a group by number."""
        return np.flatnonzero(self.of == group)

    def divided(self, numbers: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The groups that are among these clients, with the places of each one's."""
        of = self.of[numbers]
        return [(int(group), np.flatnonzero(of == group)) for group in np.unique(of)]


def tasks_of(task: Task) -> tuple[Task, ...]:
    """The tasks of all groups of clients; the one where there are none."""
    return (task,) if task.groups is None else task.groups.tasks


def grouped(common: Task, tasks: Sequence[Task], of: np.ndarray, entries: Sequence[int]) -> Task:
    """The task that all clients know, with those that groups of them have."""
    result = copy.copy(common)
    own = tuple(map(copy.copy, tasks))
    for task in own:
        task.common, task.groups = common, None
    result.groups = Groups(own, of, tuple(entries))
    return result


def regrouped(task: Task, of: Callable[[np.ndarray], np.ndarray]) -> Task:
    """The same tasks for other clients: whose group is which follows from whose it was."""
    if task.groups is None:
        return task
    result = copy.copy(task)
    result.groups = replace(task.groups, of=of(task.groups.of))
    return result


def assign(models: Sequence[ModelGroup], names: Sequence[str], *, newcomers: bool = False) -> np.ndarray:
    """The group of every client: 0 for those in no entry, k for those of the k-th entry.

    Newcomers need not be those that are named.
    """
    clients = len(names)
    of = np.zeros(clients, dtype=np.int64)
    for number, entry in enumerate(models, 1):
        if not entry.share:
            chosen = _named(entry, number, names, newcomers)
            _take(of, chosen, number, names)
    before = 0.0
    for number, entry in enumerate(models, 1):
        if entry.share:
            # Both ends are rounded, so that shares which add up to 1 are everyone.
            wanted = int((before + entry.share) * clients + 0.5) - int(before * clients + 0.5)
            before += entry.share
            free = np.flatnonzero(of == 0)
            if wanted > len(free) and not newcomers:
                raise SettingError(
                    f"models[{number - 1}].share = {entry.share}: {wanted} clients, but only {len(free)} of "
                    f"{clients} are in no other entry"
                )
            _take(of, free[:wanted], number, names)
    empty = [number for number in range(1, len(models) + 1) if not (of == number).any()]
    if empty and not newcomers:
        raise SettingError(f"models[{empty[0] - 1}]: no client has this network; there are {clients} clients")
    return of


def _named(entry: ModelGroup, number: int, names: Sequence[str], newcomers: bool) -> np.ndarray:
    """The clients that an entry names, or every so many-th."""
    if entry.every:
        return np.arange(entry.first, len(names), entry.every)
    places = {name: place for place, name in enumerate(names)} if entry.clients else {}
    found: list[int] = []
    for client in entry.clients:
        if isinstance(client, str) and client in places:
            found.append(places[client])
        elif isinstance(client, int) and 0 <= client < len(names):
            found.append(client)
        elif newcomers:
            continue
        elif isinstance(client, str):
            raise unknown(f"models[{number - 1}].clients", client, names, what="client")
        else:
            raise SettingError(
                f"models[{number - 1}].clients: {client}, but there are clients 0 to {len(names) - 1}"
            )
    return np.array(sorted(set(found)), dtype=np.int64)


def _take(of: np.ndarray, chosen: np.ndarray, number: int, names: Sequence[str]) -> None:
    taken = chosen[of[chosen] > 0]
    if len(taken):
        other = int(of[taken[0]]) - 1
        raise SettingError(
            f"models[{number - 1}]: client {names[taken[0]]!r} is in models[{other}] as well; "
            "a client has one network"
        )
    of[chosen] = number


def build_groups(
    common: Task,
    models: Sequence[ModelGroup],
    of: np.ndarray,
    x: Nest,
    y: Nest,
    classes: int | None,
    seed: int,
    own: Sequence[Task | Factory | None] = (),
    entries: Sequence[int] = (),
) -> Task:
    """The task of ``[model]`` with those of ``[[models]]`` that clients with such samples have, by
    :func:`assign`; all are trained for the same.

    ``own`` stand in for what some of these name. ``entries`` are the groups of the whole federation, where
    ``of`` has those of some of its clients by their places in it.
    """

    def built(number: int) -> Task:
        if number == 0:
            return common
        task = own[number - 1] if own else None
        if task is None:
            choice = models[number - 1].choice
            task = build_task(choice, x, y, classes, seed, common.objective)
        elif isinstance(task, Factory):
            task = task.task(x, y, classes, seed)
        if type(task.objective) is not type(common.objective):
            raise SettingError(
                f"models[{number - 1}]: a task for {task.objective.name}, that of [model] is for "
                f"{common.objective.name}; all clients need the same objective"
            )
        return task.in_precision(common.precision).suited(x, y, classes)

    if entries:
        return grouped(common, list(map(built, entries)), of, entries)
    entries = np.unique(of).tolist()
    return grouped(common, list(map(built, entries)), np.searchsorted(entries, of), entries)
