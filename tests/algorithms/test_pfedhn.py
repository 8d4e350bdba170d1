"""pFedHN: its step against PyTorch's own modules and optimiser, its limit case, newcomers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.mixing.pfedhn import models_of

COHORTS = [[0, 1, 3], [2, 3, 4, 5], [0, 5]]


def modules(network: dict[str, Tensor], hidden: int) -> nn.Module:
    """The authors' hypernetwork with these numbers."""
    names = [f".{place}" for place in range(hidden + 1)] + [""]
    layers: list[nn.Module] = []
    for place, name in enumerate(names):
        weight, bias = network[f"weight{name}"], network[f"bias{name}"]
        linear = nn.Linear(weight.shape[1], weight.shape[0]).double()
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        layers += [linear, nn.ReLU()] if place < hidden else [linear]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("start", "clip"), [("drawn", 50.0), ("drawn", 0.05), ("model", 0.0)])
def test_three_rounds_are_pytorchs(start: str, clip: float) -> None:
    """½‖w − b_i‖² with one step: θ̃ − θ = η (b_i − θ). The rest is done by modules and torch.optim."""
    centres = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    task, data = quadratics(centres, torch.ones(4, 3), (1, 2, 3, 4))
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    hyper: dict[str, Any] = {"server_lr": 0.1, "clip": clip, "start": start, "width": 5, "hidden": 2}
    algorithm = method("pfedhn", federation, lr=0.5, embedding=2, **hyper)
    server = algorithm.start(federation)
    net = modules(server.network, 2)
    embeddings = nn.Parameter(server.network["embeddings"].clone())
    parameters = [embeddings, *net.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
    for round, cohort in enumerate(([0, 2], [1, 2, 3], [0, 3]), 1):
        theta = net(embeddings[cohort])
        assert torch.allclose(theta, models_of(server.network, server.network["embeddings"][cohort]))
        optimizer.zero_grad()
        delta = 0.5 * (centres[cohort] - theta.detach())
        theta.backward(-delta / len(cohort))
        if clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        federation.round = round
        server = algorithm.round(server, federation, np.array(cohort))
        assert torch.allclose(server.network["embeddings"], embeddings)
        assert torch.allclose(server.network["weight"], list(net.parameters())[-2])
        assert torch.allclose(server.network["bias"], list(net.parameters())[-1])


def test_everyone_starts_from_the_initial_model_and_they_part() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("pfedhn", federation, server_lr=0.5)
    server = algorithm.start(federation)
    first = algorithm.personalize(server, np.arange(6))
    assert first is not None
    assert torch.equal(first.each["w"], task.initial().expand(6, -1))
    after = algorithm.personalize(play(algorithm, federation, COHORTS), np.arange(6))
    assert after is not None
    assert len(torch.unique(after.each["w"], dim=0)) == 6


def test_a_last_layer_of_biases_alone_is_fedavg() -> None:
    """Where all hidden units are off the model is the bias: plain means of equal clients, as FedAvg."""
    task, data = task_and_data((16,) * 6)
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method(
        "pfedhn", federation, server_lr=1.0, momentum=0.0, decay=0.0, clip=0.0, hidden=0, width=1
    )
    server = algorithm.start(federation)
    for name in ("weight.0", "bias.0"):
        server.network[name].zero_()
    for round, cohort in enumerate(COHORTS, 1):
        federation.round = round
        server = algorithm.round(server, federation, np.array(cohort))
    other = federation_of("loop", task, data, local={"batch": 8})
    assert torch.allclose(server.network["bias"], play(method("fedavg", other), other, COHORTS).w)


def test_newcomers_and_clients_without_samples() -> None:
    task, data = task_and_data((9, 0, 14))
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("pfedhn", federation, server_lr=0.5)
    server = play(algorithm, federation, [[0, 1, 2]])
    alone = federation_of("loop", task, data, local={"batch": 8})
    other = play(method("pfedhn", alone, server_lr=0.5), alone, [[0, 2]])
    for name, value in server.network.items():
        assert torch.allclose(value, other.network[name]), name
    few = federation_of("loop", *task_and_data((5, 5)))
    call = algorithm.personalize(algorithm.welcome(server, few), np.arange(2))
    assert call is not None
    mean = server.network["embeddings"].mean(dim=0, keepdim=True)
    assert torch.equal(call.each["w"], models_of(server.network, mean.expand(2, -1)))
