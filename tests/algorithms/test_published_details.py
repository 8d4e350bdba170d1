"""Small points in which a method follows its authors, one test each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import classification, federation_of, method, module_of, play, task_and_data
from sartor.algorithms import registered
from sartor.model.task import Task

COHORTS = [[0, 1, 3], [2, 3, 4]]


def ended(name: str, task: Task, data: Any, cohorts: Any = COHORTS, **hyper: Any) -> tuple[Any, Any, Any]:
    policy = registered()[name].buffers
    federation = federation_of("loop", task, data, local={"batch": 8}, buffers=policy)
    algorithm = method(name, federation, **hyper)
    return algorithm, play(algorithm, federation, cohorts), federation


def test_fedpacs_head_has_a_rate_of_its_own() -> None:
    """A rate of 0 leaves the head where it was; not set it is ten times the body's."""
    task, data = task_and_data()
    head, body = task.part("head"), task.part("body")
    own = {"lr": 0.02, "combine": False}

    def trained(**hyper: float) -> Tensor:
        return ended("fedpac", task, data, [[0, 1, 2]], **own, **hyper)[1].w

    still = trained(head_lr=0.0)
    assert torch.equal(head.take(still), head.take(task.initial()))
    assert not torch.equal(body.take(still), body.take(task.initial()))
    assert torch.equal(trained(), trained(head_lr=0.2))
    hyper = registered()["fedpac"].Hyper()
    assert (hyper.lr, hyper.head_lr) == (0.01, None)


def test_fedala_stops_at_the_papers_deviation() -> None:
    assert registered()["fedala"].Hyper().steady == 0.01


def test_fedcacs_statistics_stay_with_the_client() -> None:
    """With everything critical and nobody to share it with, a client is alone, its statistics included."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    task = Task(module, classes=4, head="3")
    data = classification(shape=(5,), dtype=torch.float64)
    everyone = [[0, 1, 2, 3, 4, 5]] * 2
    *_, alone = ended("separate", task, data, everyone, lr=0.1)
    *_, found = ended("fedcac", task, data, everyone, lr=0.1, tau=1.0, beta=0.5)
    assert torch.equal(found.states["buffers"], alone.states["buffers"])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-8), (torch.float32, 1e-3)])
def test_per_fedavgs_difference_suits_the_numbers(dtype: torch.dtype, error: float) -> None:
    """The Hessian-free step is that of the exact Hessian as far as the type of the numbers allows."""
    module = module_of("mlp", (5,), 4, hidden=6).to(dtype)
    task, data = Task(module, classes=4), classification(shape=(5,), dtype=dtype)
    exact, free = (
        ended("per-fedavg", task, data, [[0, 1, 2]], lr=0.1, alpha=0.3, variant=variant)[1].w
        for variant in ("exact", "hf")
    )
    moved = float((exact - task.initial()).norm())
    assert float((exact - free).norm()) < error * moved
