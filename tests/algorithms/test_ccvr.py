"""CCVR: Gaussians over clients are those of the pooled features, and what calibration does and leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sartor
from helpers import classification, federation_of, method, play, quadratics, task_and_data
from sartor import random
from sartor.algorithms.variance_reduction.ccvr import class_moments, gaussians, virtual_features
from sartor.errors import SartorError
from sartor.model.task import Task

COHORTS = [[0, 1, 3], [2, 3, 4, 5]]


def made(engine: str = "loop", **hyper: Any) -> tuple[Any, Any, Any]:
    task, data = task_and_data()
    federation = federation_of(engine, task, data, local={"batch": 8}, evaluation_batch=8)
    algorithm = method("ccvr", federation, **hyper)
    return federation, algorithm, play(algorithm, federation, COHORTS)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_gaussians_are_those_of_the_pooled_features(engine: str) -> None:
    federation, _, server = made(engine)
    data = task_and_data()[1]
    sent = {"w": server.w, "blank": server.blank}
    counts, mean, covariance = gaussians(federation.ask(class_moments, np.arange(6), sent))
    z = federation.task.features(server.w, data.train.x)
    for label in range(4):
        own = z[data.train.y == label]
        assert int(counts[label]) == len(own)
        assert torch.allclose(mean[label], own.mean(dim=0))
        assert torch.allclose(covariance[label], own.T.cov(), atol=1e-10)


def test_drawn_features_have_the_mean_and_the_covariance() -> None:
    torch.manual_seed(0)
    root = torch.randn(2, 3, 3).double()
    mean, covariance = torch.randn(2, 3).double(), root @ root.transpose(1, 2)
    z = virtual_features(mean, covariance, 40_000, random.stream(0, "test"))
    assert torch.allclose(z.mean(dim=1), mean, atol=0.05)
    for label in range(2):
        assert torch.allclose(z[label].T.cov(), covariance[label], rtol=0.05, atol=0.1)
    flat = virtual_features(mean, torch.zeros_like(covariance), 5, random.stream(0, "test"))
    assert torch.allclose(flat, mean[:, None].expand(-1, 5, -1))


def test_the_head_descends_the_loss_of_what_was_drawn() -> None:
    """One step by autograd; the body stays to the bit, and training goes on from the plain model."""
    federation, algorithm, server = made(samples=30, calibration_steps=1, calibration_lr=0.7)
    after = algorithm.ready(server, federation)
    task, head = federation.task, federation.task.part("head")
    assert torch.equal(task.part("body").take(after.calibrated), task.part("body").take(server.w))
    assert torch.equal(after.w, server.w)
    sent = {"w": server.w, "blank": server.blank}
    _, mean, covariance = gaussians(federation.ask(class_moments, np.arange(6), sent))
    key = random.fold(federation.stream("virtual"), federation.round)
    z = virtual_features(mean, covariance, 30, key).flatten(0, 1)
    live = head.take(server.w).requires_grad_()
    weight, bias = live[:-4].view(4, -1), live[-4:]
    if list(task.places)[-1].endswith("weight"):
        bias, weight = live[:4], live[4:].view(4, -1)
    loss = F.cross_entropy(z @ weight.T + bias, torch.arange(4).repeat_interleave(30))
    (gradient,) = torch.autograd.grad(loss, live)
    assert torch.allclose(head.take(after.calibrated), live.detach() - 0.7 * gradient)


def test_without_steps_it_is_fedavg_to_the_bit_and_evaluation_never_touches_training() -> None:
    federation, algorithm, server = made(calibration_steps=0)
    other = federation_of("loop", *task_and_data(), local={"batch": 8})
    w = play(method("fedavg", other), other, COHORTS).w
    assert torch.equal(algorithm.ready(server, federation).calibrated, w)
    runs = [
        sartor.run("ccvr", clients=4, rounds=3, engine="loop", store=False, evaluate={"every": every})
        for every in (0, 1)
    ]
    assert torch.equal(*(run.w for run in runs))
    plain = sartor.run("fedavg", clients=4, rounds=3, engine="loop", store=False)
    body = plain.task.part("body")
    assert torch.equal(body.take(runs[0].w), body.take(plain.w))
    assert not torch.equal(runs[0].w, plain.w)
    assert runs[0].rounds[-1]["bytes_up"] > plain.rounds[-1]["bytes_up"]
    assert runs[0].rounds[0]["bytes_up"] == plain.rounds[0]["bytes_up"]


def test_a_class_that_nobody_has_and_one_with_a_single_sample() -> None:
    task, data = task_and_data((6, 1))  # client 0 has class 0 alone
    y = data.train.y.clone()
    y[-1] = 2
    data = replace(data, train=replace(data.train, y=y))
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("ccvr", federation, samples=10, calibration_lr=1.0)
    server = algorithm.ready(play(algorithm, federation, [[0, 1]]), federation)
    assert bool(torch.isfinite(server.calibrated).all())
    assert task.predict(server.calibrated, data.train.x).tolist() == y.tolist()


def test_batchnorm_models_and_those_without_classes() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    data = classification(shape=(5,), classes=4, dtype=torch.float64)
    federation = federation_of("loop", Task(module, classes=4, head="3"), data, local={"batch": 8})
    algorithm = method("ccvr", federation, samples=10)
    server = play(algorithm, federation, COHORTS)
    assert not torch.equal(algorithm.ready(server, federation).calibrated, server.w)
    federation = federation_of("loop", *quadratics(torch.zeros(1, 1), torch.ones(1, 1)))
    with pytest.raises(SartorError, match="needs data with classes"):
        method("ccvr", federation).start(federation)
