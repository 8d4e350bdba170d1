"""FedEM: responsibilities and steps against autograd, limit cases, and that mixtures are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of, method, play, quadratics, task_and_data
from sartor.federation import Federation, Reply
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.runs.evaluation import evaluate
from sartor.runs.settings import Evaluate

COHORTS = [[0, 1, 3], [2, 3, 4, 5], [0, 5]]


def outputs_of(federation: Federation, algorithm: Any, server: Any, number: int, x: Tensor) -> Tensor:
    """What a client predicts."""
    call = algorithm.personalize(server, np.array([number]))

    def predicted(client: Any, hyper: Any, models: Tensor, pi: Tensor, trained: Tensor) -> Reply:
        return Reply(outputs=call.function(client, hyper, models, pi, trained).sent["w"](x))

    return federation.ask(predicted, [number], call.shared)["outputs"][0]


def test_one_component_is_fedavg_to_the_bit() -> None:
    ends = []
    for name in ("fedavg", "fedem"):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8, "momentum": 0.5})
        hyper = {} if name == "fedavg" else {"components": 1}
        server = play(method(name, federation, **hyper), federation, COHORTS)
        ends.append(server.w if name == "fedavg" else server.models[0])
    assert torch.equal(*ends)


def test_a_round_by_autograd() -> None:
    """One full batch and two clients: the loss is weighted by the responsibilities of the received models."""
    task, data = task_and_data((9, 14))
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 2})
    algorithm = method("fedem", federation, lr=0.3, components=3)
    start = algorithm.start(federation)
    federation.round = 1
    server = algorithm.round(start, federation, np.arange(2))
    x, y = data.train.x, data.train.y
    expected = torch.zeros_like(start.models)
    for number, own in enumerate((slice(0, 9), slice(9, 23))):
        with torch.no_grad():
            losses = torch.stack(
                [F.cross_entropy(task.outputs(w, x[own]), y[own], reduction="none") for w in start.models]
            )
            likelihood = (1 / 3) * torch.exp(-losses)
            q = likelihood / likelihood.sum(dim=0)
        assert torch.allclose(federation.states["pi"][number], q.mean(dim=1))
        for place, w in enumerate(start.models):
            for _ in range(2):
                live = w.clone().requires_grad_()
                loss = F.cross_entropy(task.outputs(live, x[own]), y[own], reduction="none")
                (g,) = torch.autograd.grad((q[place] * loss).mean(), live)
                w = w - 0.3 * g
            expected[place] += len(y[own]) / 23 * w
    assert torch.allclose(server.models, expected, rtol=1e-12, atol=1e-12)


def test_later_rounds_start_from_the_clients_last_shares() -> None:
    task, data = task_and_data((16,))
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedem", federation, lr=0.0, components=2)
    start = algorithm.start(federation)
    pi = torch.full((2,), 0.5).double()
    losses = torch.stack(
        [F.cross_entropy(task.outputs(w, data.train.x), data.train.y, reduction="none") for w in start.models]
    )
    server = start
    for round in range(1, 4):
        federation.round = round
        server = algorithm.round(server, federation, np.array([0]))
        pi = torch.softmax(pi.log()[:, None] - losses, dim=0).mean(dim=1)
        assert torch.allclose(federation.states["pi"][0], pi)


def test_populations_are_recovered() -> None:
    """Labels of one half of the clients are turned round: each finds its own component."""
    generator = torch.Generator().manual_seed(0)
    data = classification((40,) * 6, shape=(4,), classes=2, dtype=torch.float64)
    x = torch.randn(240, 4, generator=generator).double()
    y = (x[:, 0] > 0).long()
    y[120:] = 1 - y[120:]
    data.train.x.copy_(x)
    data.train.y.copy_(y)
    torch.manual_seed(0)
    task = Task(nn.Linear(4, 2).double(), classes=2)
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 10})
    algorithm = method("fedem", federation, lr=1.0, components=2)
    play(algorithm, federation, [list(range(6))] * 15)
    chosen = federation.states["pi"].argmax(dim=1)
    assert len(set(chosen[:3].tolist())) == len(set(chosen[3:].tolist())) == 1
    assert chosen[0] != chosen[3]
    assert bool((federation.states["pi"].amax(dim=1) > 0.9).all())
    assert torch.allclose(federation.states["pi"].sum(dim=1), torch.ones(6).double())


def test_the_prediction_is_the_mixture_of_probabilities_and_a_newcomer_finds_its_shares() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedem", federation, lr=0.2)
    server = play(algorithm, federation, [[0, 1, 2]])
    x = data.train.x[:7]
    probabilities = torch.stack([task.outputs(w, x).softmax(dim=1) for w in server.models])
    found = outputs_of(federation, algorithm, server, 1, x)
    expected = torch.tensordot(federation.states["pi"][1], probabilities, 1)
    assert torch.allclose(found.exp(), expected)
    own = slice(int(data.train.start[4]), int(data.train.start[4] + data.train.count[4]))
    losses = torch.stack([task.losses(w, Batch(data.train.x[own], data.train.y[own])) for w in server.models])
    pi = torch.softmax(-losses, dim=0).mean(dim=1)  # client 4 never trained
    assert torch.allclose(
        outputs_of(federation, algorithm, server, 4, x).exp(), torch.tensordot(pi, probabilities, 1)
    )
    assert torch.equal(federation.states["trained"], torch.tensor([1.0, 1, 1, 0, 0, 0]).double())


def test_without_classes_outputs_are_mixed() -> None:
    task, data = quadratics(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), (4, 4))
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 1})
    algorithm = method("fedem", federation, lr=0.5, components=1)
    server = play(algorithm, federation, [[0, 1]])
    assert torch.allclose(server.models, torch.tensor([[1.0]]).double())
    cells = evaluate(algorithm, server, federation, Evaluate())
    assert cells["personal_local"].loss.tolist() == pytest.approx([0.0, 2.0])
    assert "shared_local" not in cells


def test_statistics_belong_to_a_component_and_a_client_without_samples_changes_nothing() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    task = Task(module, classes=4)
    data = classification((12, 0, 9), shape=(5,), classes=4, dtype=torch.float64)
    federation = federation_of("loop", task, data, local={"batch": 4})
    algorithm = method("fedem", federation, lr=0.1, components=2)
    server = play(algorithm, federation, [[0, 1, 2]])
    assert not torch.allclose(*server.statistics)
    assert federation.buffers is not None
    assert torch.equal(federation.buffers, task.initial_buffers())  # nobody's
    assert federation.states["pi"][1].tolist() == [0.5, 0.5]
    assert federation.states["trained"].tolist() == [1, 0, 1]
    other = federation_of("loop", task, data, local={"batch": 4})
    alone = play(method("fedem", other, lr=0.1, components=2), other, [[0, 2]])
    assert torch.equal(alone.models, server.models)
