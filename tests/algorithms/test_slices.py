"""Slices of one model: where they lie, how they are trained, and how they are put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of, method, model_task, play
from sartor.algorithms import make, registered
from sartor.algorithms.own_models.slices import positions, widening
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.model.groups import grouped
from sartor.model.task import Task

COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]
FULL, NARROW = model_task("mlp", hidden=8), model_task("mlp", hidden=3)


def convolutional(channels: int, units: int) -> Task:
    net = nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.GroupNorm(1, channels),
        nn.Flatten(),
        nn.Linear(channels * 36, units),
        nn.Linear(units, 4),
    )
    return Task(net, classes=4, head="4", name=f"conv {channels}")


def models(of: list[int]) -> Task:
    return grouped(FULL, [FULL, NARROW], np.array(of), [0, 1])


def sliced(name: str, of: list[int], **settings: Any) -> Federation:
    return federation_of("loop", models(of), classification(), **settings)


# Where they lie --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [0, 1, 6])
def test_a_slice_has_the_units_of_a_window(turn: int) -> None:
    full, narrow = convolutional(4, 6), convolutional(2, 3)
    w = torch.arange(full.size, dtype=torch.float32)
    whole, part = full.state_dict(w), narrow.state_dict(w[positions(narrow, full, turn)])
    channels, units = (torch.arange(2) + turn) % 4, (torch.arange(3) + turn) % 6
    assert torch.equal(part["0.weight"], whole["0.weight"][channels])
    assert torch.equal(part["0.bias"], whole["0.bias"][channels])
    assert torch.equal(part["1.weight"], whole["1.weight"][channels])
    pixels = whole["3.weight"].view(6, 4, 36)[units][:, channels].flatten(1)
    assert torch.equal(part["3.weight"], pixels)
    assert torch.equal(part["4.weight"], whole["4.weight"][:, units])
    assert torch.equal(part["4.bias"], whole["4.bias"])


def test_a_full_slice_is_the_model() -> None:
    for turn in (0, 3):
        assert positions(FULL, FULL, turn).tolist() == list(range(FULL.size))


def test_what_is_no_slice_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"mlp is no slice of mlp .*'hidden.weight' has shape \[8, 64\], there it is \[3"
    ):
        positions(FULL, NARROW, 0)
    with pytest.raises(SettingError, match=r"its parameter '0.weight' .* there it is None"):
        positions(convolutional(2, 3), FULL, 0)
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    task = Task(norm, classes=4)
    federation = federation_of(
        "loop", grouped(task, [task, task], np.array([0, 1] * 3), [0, 1]), classification(), buffers="local"
    )
    with pytest.raises(SettingError, match=r"heterofl: slices of models with float buffers \(BatchNorm\)"):
        method("heterofl", federation).start(federation)


# How they are trained --------------------------------------------------------------------------------------


def scaled_up(w: Tensor, x: Tensor, rate: float) -> Tensor:
    """The narrow network with its hidden units divided by the rate, written out."""
    shapes = [(3, 64), (3,), (4, 3), (4,)]
    parts = [part.view(shape) for part, shape in zip(torch.split(w, [192, 3, 12, 4]), shapes, strict=True)]
    hidden = (x.flatten(1) @ parts[0].T + parts[1]) / rate
    return F.relu(hidden) @ parts[2].T + parts[3]


def test_a_step_is_one_of_the_scaled_network() -> None:
    data = classification()
    for scaler in (True, False):
        federation = sliced("heterofl", [1] * 6, local={"steps": 1, "batch": 0})
        algorithm = method("heterofl", federation, lr=0.5, scaler=scaler)
        server = algorithm.start(federation)
        before = server.w[server.slices[1]]
        federation.round = 1
        after = algorithm.round(server, federation, np.array([3])).w[server.slices[1]]
        w = before.clone().requires_grad_()
        x, y = data.train.of(3)
        loss = F.cross_entropy(scaled_up(w, x, 3 / 8 if scaler else 1.0), y)
        (gradient,) = torch.autograd.grad(loss, w)
        torch.testing.assert_close(after, before - 0.5 * gradient, rtol=1e-5, atol=1e-6)


def test_units_of_a_full_model_are_left_alone() -> None:
    assert widening(FULL, FULL.initial()) is None
    own = models([0, 1] * 3)
    assert own.groups is not None
    scale = widening(own.groups.tasks[1], NARROW.initial())
    assert scale is not None
    assert scale.tolist() == pytest.approx([8 / 3] * (3 * 64 + 3) + [1.0] * 16)
    full, narrow = convolutional(4, 6), convolutional(2, 3)
    (task,) = (grouped(full, [narrow], np.zeros(6, dtype=int), [1]).groups or own.groups).tasks
    state = task.state_dict(widening(task, task.initial()))  # type: ignore[arg-type]
    assert {key: set(value.flatten().tolist()) for key, value in state.items()} == {
        "0.weight": {2.0}, "0.bias": {2.0}, "1.weight": {1.0}, "1.bias": {1.0},
        "3.weight": {2.0}, "3.bias": {2.0}, "4.weight": {1.0}, "4.bias": {1.0},
    }  # fmt: skip


def test_a_slice_is_evaluated_as_it_was_trained() -> None:
    x = classification().pooled_x
    for scaler, rate in ((True, 3 / 8), (False, 1.0)):
        federation = sliced("heterofl", [0, 1, 1, 0, 1, 0])
        algorithm = method("heterofl", federation, scaler=scaler)
        server = algorithm.start(federation)
        call = algorithm.personalize(server, np.arange(6))
        assert call is not None
        models = federation.ask(call.function, [0, 1], call.shared).by_group
        assert torch.equal(models[0]["w"][0], server.w)
        found = NARROW.outputs(models[1]["w"][0], x)
        torch.testing.assert_close(found, scaled_up(server.w[server.slices[1]], x, rate))
    rolling = method("fedrolex", federation)
    assert rolling.personalize(server, np.arange(6)) is None


# How they are put together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_full_width_for_all_is_fedavg(name: str, server_lr: float) -> None:
    def final(name: str, federation: Federation) -> Tensor:
        hyper = {"lr": 0.05, "server_lr": server_lr}
        federation.hyper = make(registered()[name], **hyper).hyper
        w: Tensor = play(make(registered()[name], **hyper), federation, COHORTS).w
        return w

    task, data = FULL, classification()
    expected = final("fedavg", federation_of("loop", task, data, local={"batch": 8}))
    assert torch.equal(final(name, federation_of("loop", task, data, local={"batch": 8})), expected)
    same = grouped(task, [task, task], np.array([0, 1] * 3), [0, 1])
    parted = final(name, federation_of("loop", same, data, local={"batch": 8}))
    torch.testing.assert_close(parted, expected, rtol=1e-5, atol=1e-6)


def test_a_number_is_the_mean_over_those_who_have_it() -> None:
    """Against the sum over clients, number by number."""
    from sartor.algorithms.own_models.heterofl import HeteroFLHyper, local_training

    federation = sliced("heterofl", [0, 1, 1, 0, 1, 0])
    algorithm = method("heterofl", federation, lr=0.05)
    server = algorithm.start(federation)
    federation.round = 1
    after = algorithm.round(server, federation, np.array([0, 1, 2, 3]))
    total, weight = torch.zeros(FULL.size), torch.zeros(FULL.size)
    for client in range(4):
        one = sliced("heterofl", [0, 1, 1, 0, 1, 0], hyper=HeteroFLHyper(lr=0.05))
        one.round = 1
        index = server.slices[[0, 1, 1, 0][client]]
        delta = one.map(local_training, [client], {"w": server.w[index]})["delta"][0]
        n = classification().train.count[client]
        total[index] += float(n) * delta
        weight[index] += float(n)
    torch.testing.assert_close(after.w - server.w, total / weight, rtol=1e-4, atol=1e-6)


def test_what_nobody_has_stays() -> None:
    for name, moves in (("heterofl", False), ("fedrolex", True)):
        federation = sliced(name, [1] * 6, local={"steps": 2})
        server = play(method(name, federation, lr=0.1), federation, [[0, 1, 2, 3, 4, 5]] * 8)
        hidden = FULL.state_dict((server.w != FULL.initial()).float())["hidden.bias"] > 0
        assert hidden[:3].all()
        assert bool(hidden[3:].any()) == moves
        if moves:
            assert hidden.all()


def test_slices_alone_are_sent_and_counted() -> None:
    federation = sliced("heterofl", [0, 1, 1, 0, 1, 0])
    play(method("heterofl", federation), federation, [[0, 1, 2]])
    sizes = FULL.size + 2 * NARROW.size
    assert (federation.traffic.down, federation.traffic.up) == (4 * sizes, 4 * sizes)
