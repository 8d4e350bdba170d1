"""APFL and FedPHP: a model beside the global one, mixed with it or taught by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.mixing.discrepancy import mean_discrepancy
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.model.batch import Batch
from sartor.model.task import Task

COHORTS = [[0, 1, 3], [2, 3, 4], [0, 3]]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + float(b.abs().max())))


def personal(name: str, federation: Federation, cohorts: list[list[int]], **hyper: Any) -> tuple[Any, Tensor]:
    """The server, and every client's model."""
    algorithm = method(name, federation, lr=0.1, **hyper)
    server = play(algorithm, federation, cohorts)
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    assert call is not None
    return server, federation.ask(call.function, everyone, call.shared, call.each)["w"]


@pytest.mark.parametrize("name", ["apfl", "fedphp"])
def test_a_client_that_never_trained_has_the_global_model(name: str) -> None:
    task, data = task_and_data((5, 17, 33, 64, 7, 16, 0))
    server, models = personal(name, federation_of("loop", task, data), [*COHORTS, [1, 6]])
    assert torch.equal(models[5], server.w)
    assert torch.equal(models[6], server.w), "one without samples was drawn and has not trained"
    assert not torch.equal(models[3], server.w)


@pytest.mark.parametrize("name", ["apfl", "fedphp"])
def test_statistics_of_the_two_models_are_apart(name: str) -> None:
    """Those of the global model are FedAvg's; those of the client's own stay while others train."""
    _, data = task_and_data()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    task = Task(module, classes=4, head="3")
    hyper = {"lam": 0.0} if name == "fedphp" else {}
    state = "p_i" if name == "fedphp" else "v_i"
    after = []
    for cohorts in ([[0, 3]], [[0, 3], [1, 2]]):
        federation, plain = (federation_of("loop", task, data, local={"batch": 8}) for _ in range(2))
        server, _ = personal(name, federation, cohorts, **hyper)
        assert torch.equal(server.w, play(method("fedavg", plain, lr=0.1), plain, cohorts).w)
        assert federation.buffers is not None
        assert plain.buffers is not None
        assert torch.equal(federation.buffers, plain.buffers)
        after.append(federation.states[state][3])
    assert torch.equal(*after)
    assert not torch.equal(after[0][task.size :], task.initial_buffers())


# APFL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_is_the_papers(adaptive: bool) -> None:
    """y −= η ∇f(y), v −= η α ∇f(v̄), α −= η ⟨∇f(v̄), v − y⟩ once a round; v̄ = α v + (1 − α) y."""
    b = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 1.0, 2.0]], dtype=torch.float64)
    h = torch.tensor([[0.5, 1.5, 1.0], [1.0, 0.7, 0.4]], dtype=torch.float64)
    task, data = quadratics(b, h, (2, 1))
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 3})
    server, models = personal("apfl", federation, [[0, 1]] * 4, alpha=0.3, adaptive=adaptive)
    w, v, alpha = torch.zeros(3), torch.zeros(2, 3), torch.full((2, 1), 0.3, dtype=torch.float64)
    for _ in range(4):
        y = w.expand(2, 3)
        for step in range(3):
            mixed = alpha * v + (1 - alpha) * y
            g = h * (mixed - b)
            inner = (g * (v - y)).sum(1, keepdim=True)
            y, v = y - 0.1 * h * (y - b), v - 0.1 * alpha * g
            if adaptive and step == 0:
                alpha = (alpha - 0.1 * inner).clamp(0, 1)
        w = (2 * y[0] + y[1]) / 3
    assert close(server.w, w, 1e-12)
    assert close(federation.states["v_i"], v, 1e-12)
    assert close(federation.states["alpha_i"], alpha[:, 0], 1e-12)
    assert close(models, alpha * v + (1 - alpha) * w, 1e-12)
    assert bool(((alpha - 0.3).abs() > 1e-3).all()) == adaptive


def test_apfls_share_stays_between_zero_and_one() -> None:
    """Here the personal model is far better, by a gradient that would take α beyond 1."""
    b = torch.tensor([[10.0], [-10.0]], dtype=torch.float64)
    task, data = quadratics(b, torch.ones(2, 1, dtype=torch.float64))
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 5})
    personal("apfl", federation, [[0, 1]] * 5)
    assert federation.states["alpha_i"].tolist() == [1.0, 1.0]


def test_apfl_with_no_share_is_the_global_model() -> None:
    task, data = task_and_data()
    server, models = personal("apfl", federation_of("loop", task, data), COHORTS, alpha=0.0, adaptive=False)
    assert bool((models == server.w).all())


# FedPHP ----------------------------------------------------------------------------------------------------


def test_fedphp_keeps_the_more_the_oftener_a_client_has_trained() -> None:
    """p ← μ p + (1 − μ) y with μ = momentum · min(turns / horizon, 1): the first local model as it is."""
    task, data = task_and_data((33,))
    p = None
    for turns in range(5):
        federation = federation_of("loop", task, data, local={"batch": 8})
        server, models = personal("fedphp", federation, [[0]] * (turns + 1), lam=0.0, momentum=0.8, horizon=3)
        mu = 0.8 * min(turns / 3, 1)
        p = server.w if p is None else mu * p + (1 - mu) * server.w  # one client: y is the new w
        assert close(models[0], p, 1e-12)
    assert not close(models[0], server.w, 1e-3)


@pytest.mark.parametrize("transfer", ["kd", "mmd"])
def test_fedphp_is_taught_by_its_private_model(transfer: str) -> None:
    """(1 − λ) f + λ R from the second training on; in the first there is nobody to teach."""
    task, data = task_and_data()
    lam, lr = 0.4, 0.1
    found = []
    for cohorts in ([[3]], [[3], [3]]):
        federation = federation_of("loop", task, data, local={"batch": 8, "steps": 1})
        found.append(personal("fedphp", federation, cohorts, lam=lam, transfer=transfer)[0].w)
    reference = federation_of("loop", task, data, local={"batch": 8, "steps": 1})
    first, second = (batches_of(reference, 3, round)[0] for round in (1, 2))
    w = task.initial() - lr * task.grad(task.initial(), first)
    assert close(found[0], w)
    private = w.clone()  # p_i after the first training, which is also the new w

    def loss(v: Tensor) -> Tensor:
        scores = task.outputs(v, second.x)
        if transfer == "kd":
            taught = torch.softmax(task.outputs(private, second.x) / 4, dim=1)
            term = -(taught * F.log_softmax(scores, dim=1)).sum(1).mean()
        else:
            z = task.forward(v, second).features
            assert z is not None
            term = mean_discrepancy(z, task.features(private, second.x), second)
        return (1 - lam) * F.cross_entropy(scores, second.y) + lam * term

    live = w.requires_grad_()
    expected = w - lr * torch.autograd.grad(loss(live), live)[0]
    assert close(found[1], expected.detach())


def test_fedphp_needs_classes_or_a_head() -> None:
    task, data = quadratics(torch.zeros(2, 3), torch.ones(2, 3))
    federation = federation_of("loop", task, data)
    with pytest.raises(SartorError, match=r"fedphp: hyper\.transfer = 'kd' needs data with classes"):
        method("fedphp", federation).start(federation)
    with pytest.raises(SartorError, match="no part 'head' is declared"):
        method("fedphp", federation, transfer="mmd").start(federation)


def test_the_discrepancy_is_that_of_two_sets() -> None:
    """The double sum written out; zero for equal sets, and padding counts for nothing."""
    generator = torch.Generator().manual_seed(0)
    z, o = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    y = torch.zeros(5, dtype=torch.int64)
    points = torch.cat([z, o])
    squares = torch.cdist(points, points) ** 2
    width = squares.sum() / (10 * 9)
    kernel = sum(torch.exp(-squares / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))
    expected = (kernel[:5, :5] + kernel[5:, 5:] - kernel[:5, 5:] - kernel[5:, :5]).mean()
    found = mean_discrepancy(z, o, Batch(z, y))
    assert close(found, expected, 1e-12)
    assert float(found) > 0.01
    assert float(mean_discrepancy(z, z, Batch(z, y)).abs()) < 1e-12
    weight = torch.tensor([1.0, 1, 1, 1, 1, 0, 0])
    more = [torch.cat([part, 100 * torch.ones(2, 3).double()]) for part in (z, o)]
    assert close(mean_discrepancy(*more, Batch(z, y, weight)), expected, 1e-12)
