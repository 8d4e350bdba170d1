"""FedGen: generator and steps against PyTorch's modules, its limit case, and what a generator learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, federation_of, method, play, task_and_data
from sartor import random
from sartor.algorithms.variance_reduction.fedgen import FedGenHyper, drawn, generated

COHORTS = [[0, 1, 3], [2, 3, 4, 5], [0, 5]]
SMALL: dict[str, Any] = {"virtual": 6, "noise": 3, "width": 5}


class Generator(nn.Module):
    """The authors' generator for these sizes: noise 3, four classes, five hidden units, six features."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU()).double()
        self.last = nn.Linear(5, 6).double()
        nn.utils.vector_to_parameters(vector.clone(), self.parameters())

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        return self.last(self.first(torch.cat([noise, F.one_hot(labels, 4).double()], dim=1)))


def test_without_weight_it_is_fedavg_to_the_bit() -> None:
    ends = []
    for name, hyper in (("fedavg", {}), ("fedgen", {"alpha": 0.0, "generator_steps": 1, **SMALL})):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        ends.append(play(method(name, federation, **hyper), federation, COHORTS).w)
    assert torch.equal(*ends)


def test_labels_follow_the_shares_of_the_classes() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    algorithm = method("fedgen", federation)
    server = algorithm.start(federation)
    shares = F.one_hot(data.train.y, 4).double().mean(dim=0)
    assert torch.allclose(server.shares, shares)
    labels, noise = drawn(random.stream(0, "test"), FedGenHyper(virtual=20_000, noise=2), server.shares)
    assert torch.allclose(F.one_hot(labels, 4).double().mean(dim=0), shares, atol=0.02)
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.01)
    lacking = torch.tensor([0.5, 0.0, 0.5, 0.0]).double()  # classes that nobody has
    assert set(drawn(random.stream(0, "test"), FedGenHyper(virtual=500), lacking)[0].tolist()) == {0, 2}


def test_a_round_is_that_of_modules_and_of_adam() -> None:
    task, data = task_and_data((11,))
    federation = federation_of("loop", task, data, local={"batch": 5})
    algorithm = method("fedgen", federation, lr=0.2, alpha=0.6, generator_steps=3, **SMALL)
    start = algorithm.start(federation)
    generator = Generator(start.generator)
    head, hyper = task.part("head"), algorithm.hyper
    federation.round = 1
    server = algorithm.round(start, federation, np.array([0]))
    w = start.w.clone().requires_grad_()
    stream = random.stream(federation.seed, "generated", torch.tensor(1), torch.tensor(0))
    for turn, batch in enumerate(batches_of(federation, 0, 1)):
        labels, noise = drawn(random.fold(stream, torch.tensor(turn)), hyper, start.shares)
        z = generator(labels, noise).detach()
        assert torch.allclose(z, generated(start.generator, hyper, labels, noise, 4))
        h = head.take(w)
        virtual = F.cross_entropy(z @ h[:-4].view(4, 6).T + h[-4:], labels)
        loss = F.cross_entropy(task.outputs(w, batch.x), batch.y) + 0.6 * virtual
        (g,) = torch.autograd.grad(loss, w)
        w = (w - 0.2 * g).detach().requires_grad_()
    assert torch.allclose(server.w, w)
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.005)
    h = head.take(w).detach()
    key = random.fold(federation.stream("generator"), 1)
    for turn in range(3):
        labels, noise = drawn(random.fold(key, turn), hyper, start.shares)
        scores = generator(labels, noise) @ h[:-4].view(4, 6).T + h[-4:]
        optimizer.zero_grad()
        F.cross_entropy(scores, labels).backward()
        optimizer.step()
    assert torch.allclose(server.generator, nn.utils.parameters_to_vector(generator.parameters()))


def test_the_generator_learns_what_the_head_takes_for_each_class() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedgen", federation, lr=0.2, generator_steps=100, generator_lr=0.02, **SMALL)
    server = play(algorithm, federation, [list(range(6))] * 3)
    labels, noise = drawn(random.stream(0, "test"), FedGenHyper(virtual=200, noise=3, width=5), server.shares)
    h = task.part("head").take(server.w)
    z = generated(server.generator, algorithm.hyper, labels, noise, 4)
    right = (z @ h[:-4].view(4, 6).T + h[-4:]).argmax(dim=1) == labels
    assert float(right.double().mean()) > 0.9
