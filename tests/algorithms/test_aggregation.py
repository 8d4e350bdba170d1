"""FedDyn, FedDisco and elastic aggregation: what the server makes of the clients' changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import RAGGED, batches_of, federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.variance_reduction.elastic import local_training as elastic_training
from sartor.algorithms.variance_reduction.feddisco import FedDiscoHyper, disco_weights, discrepancy
from sartor.errors import SartorError
from sartor.federation.exchange import Replies
from sartor.model.task import Task

EVERYONE = list(range(6))
COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + float(b.abs().max())))


def weights_of(cohort: Sequence[int]) -> Tensor:
    n = torch.tensor([float(RAGGED[client]) for client in cohort], dtype=torch.float64)
    return n / n.sum()


# FedDyn ----------------------------------------------------------------------------------------------------


def test_feddyn_is_the_papers() -> None:
    """y −= η (g − λ_i + α (y − w)), λ_i −= α (y − w), h −= α Σ p_i Δ_i, w = mean y − h / α."""
    task, data = task_and_data()
    alpha, lr = 0.3, 0.1
    federation = federation_of("loop", task, data, local={"batch": 8})
    server = play(method("feddyn", federation, lr=lr, alpha=alpha), federation, COHORTS)
    reference = federation_of("loop", task, data, local={"batch": 8})
    w = task.initial()
    state, duals = torch.zeros_like(w), torch.zeros(6, task.size, dtype=torch.float64)
    for round, cohort in enumerate(COHORTS, 1):
        ends = []
        for number in cohort:
            y = w
            for batch in batches_of(reference, number, round):
                y = y - lr * (task.grad(y, batch) - duals[number] + alpha * (y - w))
            ends.append(y)
        deltas = torch.stack(ends) - w
        duals[cohort] -= alpha * deltas
        state = state - alpha * (weights_of(EVERYONE)[cohort] @ deltas)
        w = weights_of(cohort) @ torch.stack(ends) - state / alpha
    assert close(server.w, w)
    assert close(federation.states["dual"], duals)
    assert close(server.state, weights_of(EVERYONE) @ duals), "the mean of all duals, drawn or not"


@pytest.mark.parametrize("cohorts", [[[0, 1, 2, 3, 4]] * 40, [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]] * 12])
def test_feddyn_with_a_constant_rate_leads_to_the_optimum(cohorts: list[list[int]]) -> None:
    """The duals end at the clients' gradients there, whose mean is zero."""
    generator = torch.Generator().manual_seed(3)
    centres = 2 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    curvatures = 0.5 + 1.5 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    sizes = (1, 3, 2, 4, 2)
    share = torch.tensor(sizes, dtype=torch.float64)[:, None] / sum(sizes)
    optimum = (share * curvatures * centres).sum(0) / (share * curvatures).sum(0)
    task, data = quadratics(centres, curvatures, sizes)
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 4}, workers=1)
    server = play(method("feddyn", federation, lr=0.4, alpha=2.0), federation, cohorts)
    assert close(server.w, optimum, 1e-6)
    assert close(federation.states["dual"], curvatures * (optimum - centres), 1e-6)


def test_feddyns_first_step_of_everyone_is_twice_fedavgs() -> None:
    """With no dual and y = w the first step is plain, and −h/α adds the mean once more."""
    task, data = task_and_data()
    found = []
    for name in ("feddyn", "fedavg"):
        federation = federation_of("loop", task, data, local={"batch": 0, "steps": 1})
        found.append(play(method(name, federation), federation, [EVERYONE]).w - task.initial())
    assert close(found[0], 2 * found[1], 1e-12)


def test_a_round_without_samples_leaves_feddyn_alone() -> None:
    task, data = task_and_data((0, 9, 12))
    found = []
    for cohorts in ([[1, 2]], [[1, 2], [0], [0]]):
        federation = federation_of("loop", task, data, local={"batch": 8})
        found.append(play(method("feddyn", federation), federation, cohorts))
    assert torch.equal(found[0].w, found[1].w)
    assert torch.equal(found[0].state, found[1].state)


# FedDisco --------------------------------------------------------------------------------------------------


def test_the_discrepancy_of_equal_classes_is_zero_and_of_one_class_the_largest() -> None:
    equal, one = torch.full((4,), 5.0).double(), torch.tensor([0.0, 7.0, 0.0, 0.0]).double()
    assert float(discrepancy(equal, "kl")) == 0
    assert float(discrepancy(equal, "l2")) == 0
    assert float(discrepancy(one, "kl")) == pytest.approx(math.log(4))
    assert float(discrepancy(one, "l2")) == pytest.approx(math.sqrt(3 / 4))


def replies(counts: list[int], d: list[float]) -> Replies:
    values = {"discrepancy": torch.tensor(d, dtype=torch.float64)}
    clients = np.arange(len(counts))
    return Replies(clients, np.array(counts), values, torch.device("cpu"), torch.float64)


def test_weights_are_lowered_by_discrepancies() -> None:
    """p'_i − a d_i + b with Σ d_i = 1 for divergences; nothing below zero; nothing for no samples."""
    given = replies([10, 30, 0, 60], [0.2, 0.6, 0.9, 1.2])
    expected = torch.tensor([0.1 - 0.5 * 0.1 + 0.1, 0.3 - 0.5 * 0.3 + 0.1, 0, 0.6 - 0.5 * 0.6 + 0.1]).double()
    assert close(disco_weights(given, FedDiscoHyper()), expected / expected.sum(), 1e-7)
    by_distance = torch.relu(torch.tensor([0.1 - 0.08, 0.3 - 0.24, 0, 0.6 - 0.48]).double())
    found = disco_weights(given, FedDiscoHyper(a=0.4, b=0.0, measure="l2"))
    assert close(found, by_distance / by_distance.sum(), 1e-7)
    none_left = disco_weights(given, FedDiscoHyper(a=5.0, b=0.0, measure="l2"))
    assert close(none_left, given.weights, 1e-12), "where none is left, samples weigh"
    assert disco_weights(replies([0, 0], [0.1, 0.2]), FedDiscoHyper()).tolist() == [0, 0]


def test_feddisco_moves_by_these_weights() -> None:
    task, data = task_and_data()
    rows, shares = [], []
    federation = federation_of("loop", task, data, local={"batch": 8})
    found = play(method("feddisco", federation), federation, [EVERYONE]).w
    for number in EVERYONE:
        alone = federation_of("loop", task, data, local={"batch": 8})
        rows.append(play(method("fedavg", alone), alone, [[number]]).w - task.initial())
        p = torch.bincount(data.train.of(number)[1], minlength=4).double() / RAGGED[number]
        shares.append(float(sum(x * math.log(4 * x) for x in p.tolist() if x)))
    d = torch.tensor(shares, dtype=torch.float64)
    weights = torch.relu(weights_of(EVERYONE) - 0.5 * d / d.sum() + 0.1)
    assert close(found - task.initial(), (weights / weights.sum()) @ torch.stack(rows))


@pytest.mark.parametrize("name", ["feddisco", "fedlc", "fedntd"])
def test_methods_of_classes_refuse_data_without(name: str) -> None:
    task, data = quadratics(torch.zeros(2, 3), torch.ones(2, 3))
    federation = federation_of("loop", task, data)
    with pytest.raises(SartorError, match=f"{name}: needs data with classes"):
        method(name, federation).start(federation)


# Elastic aggregation ---------------------------------------------------------------------------------------


def linear_task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Linear(5, 4).double(), classes=4)


def test_elastic_steps_are_the_shorter_the_more_the_outputs_depend() -> None:
    """1 + τ − Ω/max Ω_i, Ω_i a running mean of |∂ mean ‖F‖² / ∂w| over batches, here written out."""
    _, data = task_and_data()
    task, cohort, tau, mu = linear_task(), [1, 3, 4], 0.3, 0.6
    federation = federation_of("loop", task, data, local={"batch": 8})
    found = play(method("elastic", federation, tau=tau, mu=mu), federation, [cohort]).w
    plain = federation_of("loop", task, data, local={"batch": 8})
    step = play(method("fedavg", plain), plain, [cohort]).w - task.initial()
    w, omegas = task.initial(), []
    for number in cohort:
        omega, total = torch.zeros_like(w), 0.0
        batches = batches_of(federation, number, 1, "sensitivity", epochs=1)
        for batch in batches:
            weight, bias = w[:20].view(4, 5), w[20:]
            outputs = batch.x @ weight.T + bias
            by_weight = 2 * outputs.T @ batch.x / len(batch.y)
            gradient = torch.cat([by_weight.flatten(), 2 * outputs.mean(0)])
            omega, total = mu * omega + (1 - mu) * gradient.abs(), mu * total + (1 - mu)
        omegas.append(omega / total)
    rows = torch.stack(omegas)
    zeta = 1 + tau - (weights_of(cohort) @ rows) / rows.amax(0)
    assert float(zeta.min()) >= tau - 1e-12
    assert float(zeta.max() - zeta.min()) > 0.05
    assert close(found - w, zeta * step)


def test_an_entry_that_no_output_depends_on_is_not_divided_by_zero() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(5, 4).double(), nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + 0 * self.idle.weight.sum()

    _, data = task_and_data()
    task = Task(Half(), classes=4)
    federation = federation_of("loop", task, data, local={"batch": 8})
    w = play(method("elastic", federation), federation, [EVERYONE]).w
    assert bool(torch.isfinite(w).all())
    idle = task.places["idle.bias"]
    assert torch.equal(w[idle], task.initial()[idle])


def test_sensitivity_needs_no_labels() -> None:
    _, data = task_and_data()
    task = linear_task()
    omegas = []
    for y in (data.train.y, (data.train.y + 1) % 4):
        federation = federation_of("loop", task, replace(data, train=replace(data.train, y=y)))
        algorithm = method("elastic", federation)
        federation.round = 1
        omegas.append(federation.map(elastic_training, [3], {"w": algorithm.start(federation).w})["omega"])
    assert torch.equal(*omegas)
