"""Personal models: their learning rates follow ``lr`` unless they are set, and which pFedMe evaluates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import federation_of, method, personal_models, play, quadratics, task_and_data

CENTRES = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CURVATURES = torch.tensor([[0.5, 1.0], [1.5, 0.7], [1.0, 2.0]], dtype=torch.float64)


def models(name: str, cohorts: list[list[int]], **hyper: Any) -> Tensor:
    """The personal models after these cohorts."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method(name, federation, **hyper)
    return personal_models(algorithm, play(algorithm, federation, cohorts), federation)


@pytest.mark.parametrize(
    ("name", "key", "own"),
    [
        ("ditto", "personal_lr", {}),
        ("fedupdate", "finetune_lr", {}),
        ("spfl", "finetune_lr", {"finetune_steps": 3}),
        ("pfedme", "personal_lr", {}),
    ],
)
def test_a_personal_rate_follows_lr_unless_it_is_set(name: str, key: str, own: dict[str, Any]) -> None:
    cohorts = [[0, 1, 2, 3, 4, 5]]
    followed = models(name, cohorts, lr=0.03, **own)
    assert torch.equal(followed, models(name, cohorts, lr=0.03, **{key: 0.03}, **own))
    assert not torch.equal(followed, models(name, cohorts, lr=0.03, **{key: 0.05}, **own))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_pfedme_evaluates_theta_after_the_local_rounds(engine: str) -> None:
    """θ by hand over R = 3 batches of K = 2 steps; a client that never trained takes K steps from w."""
    lam, eta, rate = 4.0, 0.05, 0.1
    task, data = quadratics(CENTRES, CURVATURES, (3, 3, 3))
    federation = federation_of(engine, task, data, local={"batch": 1})
    algorithm = method("pfedme", federation, lam=lam, lr=eta, personal_lr=rate, inner_steps=2)
    server = play(algorithm, federation, [[0, 1]])
    w = theta = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(3):
        for _ in range(2):
            theta = theta - rate * (CURVATURES[:2] * (theta - CENTRES[:2]) + lam * (theta - w))
        w = w - eta * lam * (w - theta)
    newcomer = server.w
    for _ in range(2):
        newcomer = newcomer - rate * (CURVATURES[2] * (newcomer - CENTRES[2]) + lam * (newcomer - server.w))
    found = personal_models(algorithm, server, federation)
    assert torch.allclose(found[:2], theta, atol=1e-12)
    assert torch.allclose(found[2], newcomer, atol=1e-12)
    assert torch.allclose(server.w, w.mean(dim=0), atol=1e-12)
