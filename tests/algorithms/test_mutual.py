"""Models of clients' own and a small shared one that teach each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers import classification, federation_of, method, model_task, play
from sartor.algorithms.own_models.mutual import divergence
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.model.groups import grouped
from sartor.model.task import Task

COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]
SMALL, LARGE = model_task("mlp", hidden=3), model_task("mlp", hidden=8)
OF = np.array([0, 1, 1, 0, 1, 0])


def models() -> Task:
    """The shared model is small; half of the clients have a large one."""
    return grouped(SMALL, [SMALL, LARGE], OF, [0, 1])


def federation(task: Task, **local: Any) -> Federation:
    return federation_of("loop", task, classification(), local={"batch": 8, **local})


def owned(made: Federation, client: int) -> Tensor:
    return made.states.rows("w_i", np.array([client]))[0]


def test_the_divergence_is_that_of_kullback_and_leibler() -> None:
    p, q = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    expected = F.kl_div(F.log_softmax(q, 1), F.softmax(p, 1), reduction="none").sum(dim=1)
    torch.testing.assert_close(divergence(p, q), expected)
    assert float(divergence(p, p).abs().max()) < 1e-6
    teacher = p.clone().requires_grad_()
    divergence(teacher, q).sum().backward()
    assert teacher.grad is None


@pytest.mark.parametrize("task", [SMALL, models()])
def test_labels_alone_are_separate_models_and_fedavg(task: Task) -> None:
    """α = 1: no model of a client's own hears of the meme; β = 1: the meme is FedAvg's."""
    made, alone, average = federation(task), federation(task), federation(SMALL)
    server = play(method("fml", made, alpha=1.0, beta=1.0, lr=0.05), made, COHORTS)
    play(method("separate", alone, lr=0.05), alone, COHORTS)
    expected = play(method("fedavg", average, lr=0.05), average, COHORTS)
    for client in range(6):
        assert torch.equal(owned(made, client), owned(alone, client))
    if task is SMALL:
        assert torch.equal(server.w, expected.w)
    else:  # the cohort's mean is made of rows in another order
        torch.testing.assert_close(server.w, expected.w, rtol=0, atol=1e-6)


def pupil_gradient(name: str, own: Tensor, small: Tensor, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """The gradients of both models' losses on all samples of client 2, each by itself."""
    x, y = classification().train.of(2)
    own, small = own.clone().requires_grad_(), small.clone().requires_grad_()
    large, meme = LARGE.outputs(own, x), SMALL.outputs(small, x)
    labels = F.cross_entropy(large, y), F.cross_entropy(meme, y)
    from_meme = F.kl_div(F.log_softmax(large, 1), F.softmax(meme, 1).detach(), reduction="batchmean")
    from_own = F.kl_div(F.log_softmax(meme, 1), F.softmax(large, 1).detach(), reduction="batchmean")
    if name == "fml":
        losses = alpha * labels[0] + (1 - alpha) * from_meme, beta * labels[1] + (1 - beta) * from_own
    else:
        trust = 1 / (labels[0] + labels[1]).detach()
        z, s = LARGE.features(own, x), SMALL.features(small, x)
        mapped = torch.eye(8, 3)
        losses = (
            labels[0] + trust * (from_meme + F.mse_loss(z, (s @ mapped.T).detach())),
            labels[1] + trust * (from_own + F.mse_loss(z.detach(), s @ mapped.T)),
        )
    (of_own,) = torch.autograd.grad(losses[0], own, retain_graph=True)
    (of_small,) = torch.autograd.grad(losses[1], small)
    return of_own, of_small


@pytest.mark.parametrize(("name", "hyper"), [("fml", {"alpha": 0.3, "beta": 0.8}), ("fedkd", {})])
def test_a_step_follows_each_models_own_loss(name: str, hyper: dict[str, float]) -> None:
    made = federation(models(), batch=0, steps=1)
    algorithm = method(name, made, lr=0.5, **hyper)
    server = algorithm.start(made)
    before = owned(made, 2)
    made.round = 1
    after = algorithm.round(server, made, np.array([2]))
    of_own, of_small = pupil_gradient(name, before, server.w, hyper.get("alpha", 0), hyper.get("beta", 0))
    torch.testing.assert_close(owned(made, 2), before - 0.5 * of_own, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after.w, server.w - 0.5 * of_small, rtol=1e-4, atol=1e-6)


def test_the_map_of_features_learns_to_give_the_mentors() -> None:
    made = federation(models(), batch=0, steps=1)
    algorithm = method("fedkd", made, lr=0.5)
    server = algorithm.start(made)
    x, y = classification().train.of(2)
    own, matrix = owned(made, 2), torch.eye(8, 3).requires_grad_()
    z, s = LARGE.features(own, x), SMALL.features(server.w, x)
    losses = F.cross_entropy(LARGE.outputs(own, x), y) + F.cross_entropy(SMALL.outputs(server.w, x), y)
    (gradient,) = torch.autograd.grad(F.mse_loss(z, s @ matrix.T) / losses, matrix)
    made.round = 1
    algorithm.round(server, made, np.array([2]))
    found = made.states.rows("map_i", np.array([2]))[0]
    torch.testing.assert_close(found, torch.eye(8, 3) - 0.5 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fml", "fedkd"])
def test_the_small_model_alone_travels(name: str) -> None:
    made = federation(models())
    play(method(name, made), made, [[0, 1, 2]])
    assert (made.traffic.down, made.traffic.up) == (3 * 4 * SMALL.size, 3 * 4 * SMALL.size)


def test_features_need_a_head() -> None:
    made = federation(model_task("softmax"))
    with pytest.raises(SartorError, match="no part 'head' is declared"):
        method("fedkd", made).start(made)
