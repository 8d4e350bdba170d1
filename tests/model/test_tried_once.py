"""Whether a network of ours can be stacked is found once for all its seeds, and of every other anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sartor.model import trials
from sartor.model.networks import MODELS, make_task
from sartor.model.objectives import MultiLabel
from sartor.model.task import Task

X, Y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """The tasks of which a step was tried."""
    found: list[Task] = []
    try_one = trials._stacks_alike

    def seen(task: Task, *given: Any) -> bool:
        found.append(task)
        return try_one(task, *given)

    monkeypatch.setattr(trials, "_stacks_alike", seen)
    return found


def test_a_network_of_ours_is_tried_once_for_all_seeds(tried: list[Task]) -> None:
    tasks = [make_task("mlp", MODELS["mlp"](hidden=23), (5,), 3, seed) for seed in range(3)]
    assert [task.why_not_stackable(X, Y) for task in tasks] == [None, None, None]
    assert tried == tasks[:1]
    other = make_task("mlp", MODELS["mlp"](hidden=24), (5,), 3, 0)
    labels = make_task("mlp", MODELS["mlp"](hidden=23), (5,), 3, 0, MultiLabel())
    assert other.why_not_stackable(X, Y) is None
    assert labels.why_not_stackable(X, torch.eye(4)[:, :3]) is None
    assert tried == [tasks[0], other, labels]


def test_a_module_of_ones_own_is_tried_each_time(tried: list[Task]) -> None:
    tasks = [Task(nn.Linear(5, 3), classes=3) for _ in range(2)]
    assert [task.why_not_stackable(X, Y) for task in tasks] == [None, None]
    assert tried == tasks
