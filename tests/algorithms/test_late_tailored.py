"""MA-FSVRG by the clock: with nobody late it is the synchronous one, and what is late by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import classification, federation_of, method, play, quadratics, task_and_data
from sartor.federation import Federation
from sartor.federation.clock import Conditions, World
from sartor.model.task import Task
from sartor.runs.run import tensors_of

SAMPLED = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5], [4, 2, 1, 0]]


class Takes:
    """Each client takes its time, the same in every round."""

    def __init__(self, *times: float) -> None:
        self.times = np.array(times)

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """Of these clients."""
        return np.asarray(self.times[numbers])


def with_statistics() -> tuple[Task, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    return Task(module, classes=4, head="3"), classification(shape=(5,), classes=4, dtype=torch.float64)


def linear() -> tuple[Task, Any]:
    torch.manual_seed(0)
    data = classification(shape=(5,), classes=4, dtype=torch.float64)
    return Task(nn.Linear(5, 4).double(), classes=4), data


def ends(name: str, made: tuple[Task, Any]) -> tuple[dict[str, Tensor], Federation]:
    federation = federation_of("loop", *made, local={"batch": 8, "weight_decay": 0.01})
    algorithm = method(name, federation, lr=1.0, groups=3, threshold=1, beta1=0.5)
    return dict(tensors_of(play(algorithm, federation, SAMPLED))), federation


@pytest.mark.parametrize("made", [with_statistics, linear])
def test_with_nobody_late_it_is_ma_fsvrg_to_the_bit(made: Any) -> None:
    expected, synchronous = ends("ma-fsvrg", made())
    found, federation = ends("ma-fsvrg-async", made())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert (federation.traffic, federation.now) == (synchronous.traffic, synchronous.now)
    if synchronous.buffers is not None:
        assert federation.buffers is not None
        assert torch.equal(federation.buffers, synchronous.buffers)


def test_late_gradients_and_models_by_hand() -> None:
    """½‖w − b_i‖², one model, one step: client 2 takes two exchanges for each of its answers.

    Its losses come in round 1 and are used in round 2, its model comes in round 2 and is used in round 3, its
    gradient comes in round 4 and is used there, each a round old.
    """
    b = np.array([[1.0, -2.0], [3.0, 0.5], [-4.0, 8.0]])
    n, late = np.array([1.0, 2.0, 5.0]), np.array([1.0, 1.0, 2.0**-0.7])
    task, data = quadratics(torch.tensor(b), torch.ones(3, 2), (1, 2, 5))
    conditions = Conditions(delay=Takes(1.0, 1.0, 2.0))
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1}, conditions=conditions)
    lr, rate, beta1, beta2, epsilon = 0.3, 0.05, 0.4, 0.9, 1e-8
    hyper = {"beta1": beta1, "beta2": beta2, "exponent": 0.7, "groups": 1, "threshold": 0, "scaled": False}
    algorithm = method("ma-fsvrg-async", federation, lr=lr, server_lr=rate, epsilon=epsilon, **hyper)
    server = algorithm.start(federation)

    def mean(gradients: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.asarray(weights @ gradients / weights.sum())

    w, m, v = np.zeros(2), np.zeros(2), np.zeros(2)
    surveyed, trained, accelerated = w, np.zeros(2), w
    for round in range(1, 5):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(3))
        fast = np.array([True, True, False])
        gradients, weights = w - b, n * fast
        if round == 2:
            gradients, weights = np.where(fast[:, None], w, surveyed) - b, n * late
        g = mean(gradients, weights)
        rows = w - lr / n[:2, None] * g
        if round == 1:
            surveyed = w
        if round == 2:
            trained = -lr / n[2] * g
        if round == 3:
            rows = np.concatenate([rows, [w + late[2] * trained]])
        w = rows.mean(axis=0)
        gradients, weights = w - b, n * fast
        if round == 3:
            accelerated = w
        if round == 4:
            gradients, weights = np.where(fast[:, None], w, accelerated) - b, n * late
        g = mean(gradients, weights)
        m, v = beta1 * m + g, beta2 * v + g * g
        w = w - rate * (1 - beta1) * ((1 - beta2**round) / (1 - beta2)) ** 0.5 * m / np.sqrt(v + epsilon)
        assert torch.allclose(server.w[0], torch.tensor(w), rtol=1e-12, atol=1e-12), round
        assert server.clients.tolist() == ([0, 1, 2] if round == 3 else [0, 1])
    assert not server.waiting


def test_without_gradients_the_models_move_and_the_moments_stay() -> None:
    """Both clients' gradients are late in round 1: what is trained counts, unaccelerated."""
    task, data = quadratics(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), (1, 1))

    class LateAtThird(Takes):
        asked = 0

        def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
            self.asked += 1
            return np.full(len(numbers), 1.5 if self.asked == 3 else 1.0)

    conditions = Conditions(delay=LateAtThird())
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1}, conditions=conditions)
    algorithm = method("ma-fsvrg-async", federation, lr=0.5, groups=2, threshold=0, scaled=False)
    server = play(algorithm, federation, [[0, 1]])
    assert torch.allclose(server.w, torch.full((2, 1), 1.0).double())  # 0 − 0.5 (0 − 2)
    assert server.updates == 0
    assert torch.equal(server.m, torch.zeros(2, 1).double())
    federation.round = 2
    again = algorithm.round(server, federation, np.arange(2))
    assert again.updates == 1  # by those gradients alone, as nobody was idle to train
    assert torch.allclose(again.w, server.w - 0.02 * torch.sign(server.w - 2))


def test_when_the_models_part_work_for_the_one_is_called_off_and_nothing_is_used_twice() -> None:
    task, data = task_and_data()
    conditions = Conditions(delay=Takes(1.0, 1.0, 1.0, 1.0, 4.5, 2.5))
    federation = federation_of("loop", task, data, local={"batch": 8}, conditions=conditions)
    algorithm = method("ma-fsvrg-async", federation, lr=1.0, groups=3, threshold=2)
    server = algorithm.start(federation)
    called_off = 0
    for round in range(1, 6):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(6))
        called_off += len(federation.notes.get("cancelled_jobs", []))
        arrived = [entry[0] for entry in federation.notes["arrivals"]]
        assert max(arrived.count(client) for client in arrived) <= 3
        assert len(server.w) == (1 if round <= 2 else 3)
    assert called_off
    assert bool(torch.isfinite(server.w).all())
