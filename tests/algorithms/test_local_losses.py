"""FedSAM, FedLC and FedNTD: what clients descend instead of their loss; the server averages as FedAvg's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.variance_reduction.fedlc import LEAST
from sartor.algorithms.variance_reduction.fedntd import not_true_distance
from sartor.model.task import Task

FULL = {"batch": 0, "steps": 1}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + float(b.abs().max())))


def moved(name: str, number: int, local: dict[str, Any], **hyper: Any) -> Tensor:
    """What one round at one client changes."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local=local)
    return play(method(name, federation, lr=0.1, **hyper), federation, [[number]]).w - task.initial()


def gradient(objective: Any, w: Tensor) -> Tensor:
    live = w.detach().requires_grad_()
    return torch.autograd.grad(objective(live), live)[0]


# FedSAM ----------------------------------------------------------------------------------------------------


def test_fedsam_follows_the_gradient_uphill() -> None:
    """On f(w) = ½ Σ h (w − b)²: y −= η h ∘ (y + ρ g/‖g‖ − b) with g = h ∘ (y − b), one norm for the model."""
    b = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    h = torch.tensor([[0.5, 1.5, 1.0]], dtype=torch.float64)
    task, data = quadratics(b, h)
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 3})
    found = play(method("fedsam", federation, lr=0.2, rho=0.4), federation, [[0]]).w
    y = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        g = h[0] * (y - b[0])
        y = y - 0.2 * h[0] * (y + 0.4 * g / g.norm() - b[0])
    assert close(found, y, 1e-12)


def test_fedsam_at_an_optimum_stays() -> None:
    """Where the gradient is zero there is no uphill, and nothing is divided by zero."""
    task, data = quadratics(torch.zeros(1, 3), torch.ones(1, 3))
    federation = federation_of("loop", task, data, local=FULL)
    assert torch.equal(play(method("fedsam", federation), federation, [[0]]).w, task.initial())


def test_fedsam_takes_statistics_of_the_model_and_not_uphill() -> None:
    _, data = task_and_data()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    found = []
    for name, hyper in (("fedsam", {"rho": 5.0}), ("fedavg", {})):
        federation = federation_of("loop", Task(module, classes=4, head="3"), data, local={"batch": 8})
        play(method(name, federation, lr=0.0, **hyper), federation, [[1, 3]])
        found.append(federation.buffers)
    assert torch.equal(*found)


# FedLC -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_printed", [False, True])
def test_fedlc_descends_the_calibrated_loss(as_printed: bool) -> None:
    """−log(e^{s_y} / Σ_c e^{s_c}) with s_c = f_c − τ n_c^(−1/4); printed without y in the sum."""
    task, data = task_and_data()
    x, y = data.train.of(2)  # has three of the four classes
    counts = torch.bincount(y, minlength=4).double()
    assert float(counts.min()) == 0
    margin = 0.7 * counts.clamp(min=LEAST) ** -0.25

    def loss(w: Tensor) -> Tensor:
        s = task.outputs(w, x) - margin
        own = s[torch.arange(len(y)), y]
        if as_printed:
            others = torch.stack([torch.cat([row[:at], row[at + 1 :]]) for row, at in zip(s, y, strict=True)])
            return (torch.log(torch.exp(others).sum(1)) - own).mean()
        return (torch.log(torch.exp(s).sum(1)) - own).mean()

    expected = -0.1 * gradient(loss, task.initial())
    assert close(moved("fedlc", 2, FULL, tau=0.7, as_printed=as_printed), expected)


def test_fedlc_leaves_scores_of_classes_that_a_client_lacks() -> None:
    """FedAvg pushes them down; with τ = 1 they are 100 below the others, and stay."""
    task, _ = task_and_data()
    bias = task.places["output.bias"]
    lacking = 3
    assert abs(float(moved("fedavg", 2, {"batch": 8})[bias][lacking])) > 1e-2
    assert abs(float(moved("fedlc", 2, {"batch": 8})[bias][lacking])) < 1e-12


# FedNTD ----------------------------------------------------------------------------------------------------


def without(scores: Tensor, y: Tensor) -> Tensor:
    """The scores with the true class cut out of every row."""
    return torch.stack([torch.cat([row[:at], row[at + 1 :]]) for row, at in zip(scores, y, strict=True)])


def test_the_distance_is_between_the_classes_that_are_not_true() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 1, 0])
    found = not_true_distance(student, teacher, y, 2.0)
    a, b = (F.log_softmax(without(scores, y) / 2, dim=1) for scores in (student, teacher))
    assert close(found, 4 * (b.exp() * (b - a)).sum(1), 1e-12)
    assert float(found.min()) > 0
    other = teacher.clone()
    other[torch.arange(6), y] += 3.0  # what is said of the true class does not matter
    assert close(not_true_distance(student, other, y, 2.0), found, 1e-12)
    assert float(not_true_distance(student, student + 1.5, y, 2.0).abs().max()) < 1e-12


def test_fedntd_descends_loss_and_distance() -> None:
    """The second step, after which the models differ."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    w, lr, beta, tau = task.initial(), 0.1, 3.0, 1.7
    first, second = batches_of(federation, 3, 1, steps=2)
    y = w - lr * task.grad(w, first)

    def loss(v: Tensor) -> Tensor:
        scores, teacher = task.outputs(v, second.x), task.outputs(w, second.x)
        a, b = (F.log_softmax(without(s, second.y) / tau, dim=1) for s in (scores, teacher))
        distance = (b.exp() * (b - a)).sum(1).mean()
        return F.cross_entropy(scores, second.y) + beta * tau**2 * distance

    expected = y - lr * gradient(loss, y) - w
    assert close(moved("fedntd", 3, {"steps": 2}, beta=beta, temperature=tau), expected)
    assert not close(moved("fedavg", 3, {"steps": 2}), expected, 1e-5)
