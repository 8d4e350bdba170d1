"""Clients with models of their own: an engine for each group of them, over its clients' samples alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sartor import nests
from sartor.data.clients import ClientData
from sartor.engines.base import LocalEngine, Origins
from sartor.federation.engine import Engine
from sartor.federation.exchange import NOBODY, Outcome, Work
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task

Maker = Callable[[Task, ClientData, FederationSettings, Origins | None], LocalEngine]


class GroupedEngine(Engine):
    """An engine for each group; the clients of one call are of one group."""

    def __init__(
        self,
        make: Maker,
        task: Task,
        data: ClientData,
        settings: FederationSettings,
        origins: Origins | None = None,
    ) -> None:
        assert task.groups is not None
        self.groups = task.groups
        self.device = torch.device(settings.device)
        self.names = tuple(data.names)
        splits = {"train": data.train, "test": data.test, "validation": data.validation}
        self.counts = {name: np.array(split.count) for name, split in splits.items() if split is not None}
        self.counts["pooled"] = np.full(data.clients, nests.length(data.pooled_y), dtype=np.int64)
        self.blank = nests.mapped(lambda leaf: torch.zeros_like(leaf[:1], device=self.device), data.train.x)
        self._place = np.zeros(data.clients, dtype=np.int64)
        self._engines: dict[int, LocalEngine] = {}
        for group, members in self.groups.divided(np.arange(data.clients)):
            self._place[members] = np.arange(len(members))
            own, here = origins, data
            if len(members) < data.clients:
                own, here = _origins(members, origins, settings.seed), data.some(members)
            self._engines[group] = make(self.groups.tasks[group], here, settings, own)
        first = next(iter(self._engines.values()))
        self.name, self.public = first.name, first.public

    def run(self, work: Work) -> Outcome:
        """Run the function at these clients by their group's engine."""
        if not len(work.numbers):
            return NOBODY
        group = int(self.groups.of[work.numbers[0]])
        outcome = self._engines[group].run(work._replace(numbers=self._place[work.numbers]))
        return outcome._replace(clients=work.numbers)


def _origins(members: np.ndarray, origins: Origins | None, seed: int) -> Origins:
    """Who the clients of a group are."""
    if origins is None:
        return Origins(members, np.full(len(members), seed))
    return Origins(origins.numbers[members], origins.seeds[members])
