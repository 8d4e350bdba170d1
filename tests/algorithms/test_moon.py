"""MOON: its contrastive term, its gradient, and which models it compares with."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import (
    RAGGED,
    batches_of,
    classification,
    federation_of,
    flat,
    method,
    model_task,
    module_of,
    play,
    task_and_data,
)
from sartor.algorithms.variance_reduction.moon import contrast
from sartor.errors import SartorError
from sartor.model.batch import Batch
from sartor.model.task import Task

ENGINES = ["loop", "stacked"]
COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]


def features(rows: int = 7, columns: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(3)]
    return draw[0], draw[1], draw[2]


# The term --------------------------------------------------------------------------------------------------


def test_the_term_is_the_cross_entropy_of_two_similarities() -> None:
    z, z_global, z_previous = features()
    similarity = torch.stack([F.cosine_similarity(z, z_global), F.cosine_similarity(z, z_previous)], dim=1)
    expected = F.cross_entropy(similarity / 0.3, torch.zeros(7, dtype=torch.long), reduction="none")
    assert torch.allclose(contrast(z, z_global, z_previous, 0.3), expected, rtol=1e-13)


def test_equal_models_give_log_two_and_no_gradient() -> None:
    z, other, _ = features()
    z.requires_grad_()
    term = contrast(z, other, other, 0.5)
    assert torch.allclose(term, torch.full((7,), math.log(2), dtype=torch.float64), rtol=1e-14)
    (gradient,) = torch.autograd.grad(term.sum(), z)
    assert float(gradient.abs().max()) < 1e-16


def test_changing_places_changes_the_term_by_the_gap() -> None:
    """term(w, y_prev) − term(y_prev, w) = −(cos_glob − cos_prev) / τ."""
    z, z_global, z_previous = features()
    gap = (F.cosine_similarity(z, z_global) - F.cosine_similarity(z, z_previous)) / 0.2
    found = contrast(z, z_global, z_previous, 0.2) - contrast(z, z_previous, z_global, 0.2)
    assert torch.allclose(found, -gap, rtol=1e-12)


def test_the_term_stays_finite_where_exponentials_would_not_and_at_dead_features() -> None:
    z = torch.tensor([[1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    z_global, z_previous = torch.tensor([[-1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    term = contrast(z, z_global, z_previous, 1e-3)
    (gradient,) = torch.autograd.grad(term.sum(), z)
    assert float(term[0].detach()) == pytest.approx(2000)
    assert torch.isfinite(term).all()
    assert torch.isfinite(gradient).all()


# The method ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [{"batch": 8}, {"batch": 8, "momentum": 0.9, "weight_decay": 0.01}])
def test_without_the_term_it_is_fedavg_to_the_bit(engine: str, local: dict[str, Any]) -> None:
    task, data = task_and_data()
    found = []
    for name, hyper in (("moon", {"mu": 0.0}), ("fedavg", {})):
        federation = federation_of(engine, task, data, local=local)
        found.append(play(method(name, federation, lr=0.2, **hyper), federation, COHORTS).w)
    assert torch.equal(found[0], found[1])


def test_a_client_that_has_not_trained_yet_has_no_term() -> None:
    """The first round is FedAvg's; so is a later one whose clients are all new, and no other."""
    task, data = task_and_data()
    ends = {}
    for name, hyper in (("moon", {"mu": 50.0}), ("fedavg", {})):
        for cohorts in ([[0, 1, 2]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 0]]):
            federation = federation_of("loop", task, data, local={"batch": 8})
            ends[name, str(cohorts)] = play(method(name, federation, lr=0.2, **hyper), federation, cohorts).w
    same = [torch.equal(ends["moon", key], w) for (name, key), w in ends.items() if name == "fedavg"]
    assert same == [True, True, False]


def reference_step(
    live: nn.Sequential,
    still: nn.Sequential,
    before: nn.Sequential | None,
    batch: Batch,
    mu: float,
    tau: float,
) -> Tensor:
    """The loss by PyTorch's own modules, whose last layer is the head."""
    z = live[:-1](batch.x)
    loss = F.cross_entropy(live[-1](z), batch.y)
    if before is None:
        return loss
    with torch.no_grad():
        z_global, z_previous = still.eval()[:-1](batch.x), before.eval()[:-1](batch.x)
    similarity = torch.stack([F.cosine_similarity(z, z_global), F.cosine_similarity(z, z_previous)], dim=1)
    return loss + mu * F.cross_entropy(similarity / tau, torch.zeros(len(z), dtype=torch.long))


def network(normed: bool) -> nn.Sequential:
    torch.manual_seed(3)
    middle: list[nn.Module] = [nn.BatchNorm1d(6)] if normed else []
    return nn.Sequential(nn.Linear(5, 6), *middle, nn.Tanh(), nn.Linear(6, 4)).double()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("normed", [False, True])
def test_it_is_the_papers_loss_by_ordinary_modules(engine: str, normed: bool) -> None:
    """Each client compares with its model of the last time it took part, with the statistics of then."""
    mu, tau, lr, sizes = 2.0, 0.5, 0.1, (9, 16, 12)
    data = classification(sizes, shape=(5,), classes=4, dtype=torch.float64)
    task = Task(network(normed), classes=4, head=str(len(network(normed)) - 1))
    cohorts = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]
    federation = federation_of(engine, task, data, local={"batch": 6})
    server = play(method("moon", federation, lr=lr, mu=mu, temperature=tau), federation, cohorts)
    reference = federation_of("loop", task, data, local={"batch": 6})
    shared, last = network(normed), dict.fromkeys(range(3))
    for round, cohort in enumerate(cohorts, 1):
        trained = []
        for number in cohort:
            live = copy.deepcopy(shared).train()
            optimiser = torch.optim.SGD(live.parameters(), lr=lr)
            for batch in batches_of(reference, number, round):
                optimiser.zero_grad()
                reference_step(live, shared, last[number], batch, mu, tau).backward()
                optimiser.step()
            trained.append(live)
            last[number] = copy.deepcopy(live)
        n = torch.tensor([float(sizes[number]) for number in cohort]).double()
        states = [model.state_dict() for model in trained]
        mean = {
            key: sum(w * state[key] for w, state in zip(n / n.sum(), states, strict=True))
            for key, value in states[0].items()
            if value.is_floating_point()
        }
        shared.load_state_dict(mean, strict=False)
    assert torch.allclose(server.w, flat(shared), rtol=1e-9, atol=1e-11)
    assert normed == (federation.buffers is not None)
    if federation.buffers is not None:
        own = torch.cat([value for key, value in shared.named_buffers() if "running" in key])
        assert torch.allclose(federation.buffers, own, rtol=1e-9, atol=1e-11)


def test_the_last_local_model_stays_with_the_client() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("moon", federation, lr=0.1)
    server = play(algorithm, federation, [[0, 1]])
    first = federation.states["previous"].clone()
    assert federation.states["seen"].tolist() == [1, 1, 0, 0, 0, 0]
    assert torch.equal(first[2:], task.initial().expand(4, -1))
    weights = torch.tensor([5.0, 17.0], dtype=torch.float64) / 22
    assert torch.allclose(weights @ first[:2], server.w, rtol=1e-12)
    federation.round = 2
    algorithm.round(server, federation, np.array([1, 5]))
    assert torch.equal(federation.states["previous"][0], first[0])
    assert federation.states["seen"].tolist() == [1, 1, 0, 0, 0, 1]
    assert federation.traffic.up == 4 * 8 * task.size


def test_the_term_moves_the_body_and_leaves_the_head_to_the_loss() -> None:
    """The gradient of the term with respect to the head is zero; to the body it is not."""
    task, data = task_and_data()
    x, y = data.train.x[:6], data.train.y[:6]
    w, before = task.initial(), task.initial() + 0.3
    z_global, z_previous = task.features(w * 0.9, x), task.features(before, x)
    batch = Batch(x, y)
    term = task.grad_and_buffers(w, batch, penalty=lambda z: contrast(z, z_global, z_previous, 0.5))[0]
    difference = term - task.grad(w, batch)
    assert float(task.part("head").take(difference).abs().max()) == 0
    assert float(task.part("body").take(difference).abs().max()) > 1e-4


def test_a_model_without_a_declared_head_is_refused() -> None:
    data = classification(RAGGED, shape=(5,), classes=4)
    federation = federation_of("loop", model_task("softmax", data), data)
    with pytest.raises(SartorError, match=r"model softmax: no part 'head' is declared .* for example head="):
        play(method("moon", federation), federation, [[0]])


def test_a_head_that_is_never_called_is_named() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.body(x)
            return result

    task = Task(Idle(), classes=4, head="head")
    with pytest.raises(SartorError, match="its forward pass never calls the head 'head'"):
        task.features(task.initial(), torch.zeros(2, 5))


def test_features_are_the_input_of_the_head_whatever_follows_it() -> None:
    module = nn.Sequential(module_of("mlp", (5,), 4, hidden=6), nn.LogSoftmax(dim=1))
    task = Task(module, classes=4, head="0.output")
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.relu(module[0].hidden(x)).detach()
    assert torch.allclose(task.features(task.initial(), x), expected, rtol=1e-13)
