"""LG-FedAvg and FedBABU: a shared head under the clients' own bodies; a shared body under nobody's head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import RAGGED, federation_of, method, play, task_and_data
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.model.task import Task
from sartor.runs.evaluation import model_of

COHORTS = [[0, 1, 3], [2, 3, 4], [0, 3]]
LOCAL = {"batch": 8, "momentum": 0.5, "weight_decay": 0.1}


def normalised() -> Task:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    return Task(module, classes=4, head="3")


def personal(name: str, federation: Federation, server: Any, **hyper: Any) -> dict[str, Tensor]:
    """Every client's model, with its float buffers."""
    everyone = np.arange(federation.clients)
    call = method(name, federation, **hyper).personalize(server, everyone)
    assert call is not None
    return federation.ask(model_of(call.function), everyone, call.shared, call.each).values


def test_what_is_outside_of_some_modules_is_what_they_leave() -> None:
    task = normalised()
    (inside, statistics), (outside, others) = task.select(["1"]), task.outside(["1"])
    assert inside.size + outside.size == task.size
    assert statistics.size == task.buffer_size
    assert others.size == 0
    assert task.outside([])[1].size == task.buffer_size
    w = torch.arange(task.size)
    assert sorted([*inside.take(w).tolist(), *outside.take(w).tolist()]) == w.tolist()


# LG-FedAvg -------------------------------------------------------------------------------------------------


def test_lg_fedavg_averages_heads_and_leaves_bodies() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local=LOCAL)
    server = play(method("lg-fedavg", federation), federation, [[1, 3]])
    ends = []
    for number in (1, 3):
        alone = federation_of("loop", task, data, local=LOCAL)
        ends.append(play(method("fedavg", alone), alone, [[number]]).w)
    head, body = task.parts["head"], task.parts["body"]
    weights = torch.tensor([RAGGED[1], RAGGED[3]]).double() / (RAGGED[1] + RAGGED[3])
    assert torch.allclose(server.w, weights @ torch.stack([head.take(end) for end in ends]), rtol=1e-12)
    models = personal("lg-fedavg", federation, server)["w"]
    for number, end in zip((1, 3), ends, strict=True):
        assert torch.allclose(body.take(models[number]), body.take(end), rtol=1e-12)
        assert torch.equal(head.take(models[number]), server.w)
    assert torch.equal(body.take(models[0]), body.take(task.initial())), "a newcomer's body"
    assert federation.traffic.down == federation.traffic.up == 2 * 8 * head.size


def test_statistics_of_a_body_stay_with_it() -> None:
    _, data = task_and_data()
    task = normalised()
    seen = []
    for cohorts in ([[3]], [[3], [0, 1]]):
        federation = federation_of("loop", task, data, local={"batch": 8})
        server = play(method("lg-fedavg", federation), federation, cohorts)
        seen.append(personal("lg-fedavg", federation, server)["buffers"][3])
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], task.initial_buffers())


def test_refitting_moves_the_body_alone() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    server = play(method("lg-fedavg", federation), federation, COHORTS)
    before = personal("lg-fedavg", federation, server)["w"]
    after = personal("lg-fedavg", federation, server, refit_epochs=1)["w"]
    head, body = task.parts["head"], task.parts["body"]
    assert torch.equal(head.take(before), head.take(after))
    assert bool((body.take(before) != body.take(after)).any(dim=1).all())


# FedBABU ---------------------------------------------------------------------------------------------------


def test_nobody_moves_the_head() -> None:
    """Not by momentum or weight decay either; only bodies are sent."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local=LOCAL)
    server = play(method("fedbabu", federation), federation, COHORTS)
    head, body = task.parts["head"], task.parts["body"]
    assert torch.equal(head.take(server.w), head.take(task.initial()))
    assert not torch.equal(body.take(server.w), body.take(task.initial()))
    answers = sum(map(len, COHORTS))
    assert federation.traffic.down == federation.traffic.up == 8 * body.size * answers


def test_the_body_descends_its_part_of_the_gradient() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 1})
    found = play(method("fedbabu", federation, lr=0.2), federation, [[2, 3]]).w
    plain = federation_of("loop", task, data, local={"batch": 0, "steps": 1})
    whole = play(method("fedavg", plain, lr=0.2), plain, [[2, 3]]).w
    body = task.parts["body"]
    assert torch.allclose(body.take(found), body.take(whole), rtol=1e-12)


@pytest.mark.parametrize("part", ["model", "body", "head"])
def test_fine_tuning_moves_what_it_is_told(part: str) -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    server = play(method("fedbabu", federation), federation, COHORTS)
    models = personal("fedbabu", federation, server, finetune=part, finetune_epochs=1)["w"]
    for name in ("body", "head"):
        own = task.parts[name]
        moved = bool((own.take(models) != own.take(server.w)).any())
        assert moved == (part in (name, "model"))


def test_the_rate_of_fine_tuning_follows_that_of_training() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    server = play(method("fedbabu", federation), federation, COHORTS)
    given = [{"lr": 0.3}, {"lr": 0.1, "finetune_lr": 0.3}, {"lr": 0.3, "finetune_lr": 0.1}]
    first, second, third = (personal("fedbabu", federation, server, **hyper)["w"] for hyper in given)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("name", ["lg-fedavg", "fedbabu"])
def test_a_model_without_a_head_is_refused(name: str) -> None:
    _, data = task_and_data()
    federation = federation_of("loop", Task(nn.Linear(5, 4).double(), classes=4), data)
    with pytest.raises(SartorError, match="no part 'head' is declared"):
        method(name, federation).start(federation)
