"""Every method of every entry can start in every column: its data are divided, its model and method set up.

Data sets are stood in for by as many samples of their shape and with their labels, all alike, of which a
client then keeps a few. What a method refuses it refuses by then: before the run, or when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.data.clients import SPLITS, ClientData, Split
from sartor.data.sources import SOURCES, Origin, Source
from sartor.errors import SartorError
from sartor.model.task import Task
from sartor.runs import setup
from sartor.runs.experiment import Experiment
from sartor.runs.inputs import gather
from sartor.runs.setup import divided, open_federation, set_up
from sartor.studies.comparison import CompareSettings, Plan, split_table
from sartor.studies.entries import entries
from sartor.studies.planning import planned

RUNNABLE = [(each.name, scale) for each in entries() for scale in each.scales if each.cell != "computed"]
SHAPES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "pathmnist": (3, 28, 28)}
"""Of those whose images are not like MNIST's."""
KEPT = 3
"""So many samples of a split a client keeps."""
SOME = 4
"""So many clients a method starts with: some keep a model of each at the server."""
_clients: dict[str, ClientData] = {}
_tasks: dict[str, Task] = {}
_started: set[str] = set()
"""What was made for an experiment serves all that differ in nothing that it depends on."""


@pytest.fixture(autouse=True)
def _networks_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build = setup.build_task

    def known(choice: Any, x: torch.Tensor, y: torch.Tensor, *more: Any) -> Task:
        key = repr((choice, x.shape[1:], more))
        if key not in _tasks:
            _tasks[key] = build(choice, x, y, *more)
        return _tasks[key]

    monkeypatch.setattr(setup, "build_task", known)


def stand_in(name: str) -> Source:
    """As many samples with as many labels of each class as a data set has; all are one pixel of zero."""
    origin = SOURCES[name]
    assert isinstance(origin, Origin)
    parts: list[torch.Tensor] = []
    for total, counts in ((origin.train, origin.train_counts), (origin.test, origin.test_counts)):
        each = torch.arange(total) % origin.classes
        y = each if counts is None else torch.repeat_interleave(torch.tensor(counts))
        parts += [torch.zeros(total, 1), y]
    return Source(name, *parts, origin.classes)


def clients_of(experiment: Experiment) -> ClientData:
    """The clients of an experiment, with the shape of its samples, and a few of them each."""
    key = repr((experiment.data, experiment.partition, experiment.features, experiment.seed))
    if key not in _clients:
        data, _ = divided(stand_in(experiment.data.name), experiment)
        features = experiment.features.settings
        sample = torch.zeros(1, *SHAPES.get(experiment.data.name, (1, 28, 28)))
        sample = sample if features is None else features(sample)
        splits = {name: few(getattr(data, name)) for name in SPLITS if getattr(data, name) is not None}
        few_pooled = slice(0, KEPT)
        data = replace(data, pooled_x=data.pooled_x[few_pooled], pooled_y=data.pooled_y[few_pooled], **splits)
        _clients[key] = data.packed().map(lambda x: sample.expand(len(x), *sample.shape[1:]))
    return _clients[key]


def few(split: Split) -> Split:
    """The first samples of every client."""
    return replace(split, count=np.minimum(split.count, KEPT))


def experiments(name: str, **asked: Any) -> Iterator[tuple[str, Experiment]]:
    """Those of an entry, in words and as they would be run."""
    work = planned(name, **asked)
    for group in work.trained:
        plan = Plan(gather({"experiment": group.settings}))
        _, tables = split_table(plan.compare, CompareSettings, "compare", {}, group.tables)
        methods = plan.methods(list(group.tables), tables, "compare")
        plan.check(methods)
        for method in methods:
            yield f"{method.label}, {group.words}", plan.inputs(method, 0).experiment


def start(experiment: Experiment) -> None:
    """What happens before the first round, where some of the clients are there."""
    made = set_up(experiment, data=clients_of(experiment))
    some = made.data.some(np.arange(min(SOME, made.data.clients))).packed()
    made.algorithm.start(open_federation(made.experiment, made.task, some))


def refused(name: str, **asked: Any) -> list[str]:
    """What of an entry could not start, and why."""
    found = []
    for words, experiment in experiments(name, **asked):
        key = repr(experiment)
        try:
            if key not in _started:
                start(experiment)
            _started.add(key)
        except SartorError as error:
            found.append(f"{words}: {error}")
    return found


@pytest.mark.parametrize(("name", "scale"), RUNNABLE)
def test_an_entry_can_start(name: str, scale: str) -> None:
    assert refused(name, scale=scale) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": {"weight_decay": 1e-4}}, "per-fedavg, 40 %.*: local.weight_decay = 0.0001: per-fedavg is"),
        ({"local": {"optimizer": "adam"}}, "ma-fsvrg, 40 %.*: local.optimizer = 'adam': ma-fsvrg is"),
        ({"partition": {"shards_per_client": 1000}}, "fedprox, 40 %.*: "),
        ({"model": {"name": "cnn"}}, "fedprox, 40 %.*: "),
    ],
)
def test_what_would_be_refused_is_found(settings: dict[str, Any], message: str) -> None:
    found = refused("tailored/fig5", scale="paper", columns=["40 %"], settings=settings)
    assert any(re.search(message, words) for words in found), found


def test_methods_and_columns_can_be_asked_for_by_name() -> None:
    """The command line takes some of them as a,b."""
    for entry in entries():
        for at in entry.scales.values():
            names = [*at.methods, *(column.label for column in at.columns)]
            assert not [name for name in names if "," in name], entry.name
