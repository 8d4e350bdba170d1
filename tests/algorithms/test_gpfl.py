"""GPFL: the valve and a round against autograd, and that its terms are the ones it names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, federation_of, method, play, task_and_data
from sartor.algorithms.split_models.gpfl import own_head, passed
from sartor.federation import Reply


class Valve(nn.Module):
    """The authors' conditional valve."""

    def __init__(self, size: int, vector: Tensor) -> None:
        super().__init__()

        def condition() -> nn.Module:
            return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size)).double()

        self.gamma, self.beta = condition(), condition()
        nn.utils.vector_to_parameters(vector.clone(), self.parameters())

    def forward(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.relu(z * (self.gamma(context) + 1) + self.beta(context))


def test_the_valve_is_the_authors_network() -> None:
    torch.manual_seed(0)
    vector, z, context = (
        torch.randn(2 * (12 + 6)).double(),
        torch.randn(5, 3).double(),
        torch.randn(3).double(),
    )
    assert torch.allclose(passed(vector, z, context), Valve(3, vector)(z, context))


def test_a_round_by_autograd() -> None:
    task, data = task_and_data((11, 6))
    federation = federation_of("loop", task, data, local={"batch": 5})
    algorithm = method("gpfl", federation, lr=0.1, lam=0.3, mu=0.02)
    start = algorithm.start(federation)
    federation.round = 1
    server = algorithm.round(start, federation, np.arange(2))
    head, body = task.part("head"), task.part("body")
    totals: list[Any] = [0, 0, 0]
    for number, n in enumerate((11, 6)):
        first = int(data.train.start[number])
        share = F.one_hot(data.train.y[first : first + n], 4).double().mean(dim=0)
        general, own = start.embeddings.mean(dim=0), share @ start.embeddings
        model = start.w.clone().requires_grad_()
        embeddings = start.embeddings.clone().requires_grad_()
        valve = Valve(6, start.valve)
        parameters = [model, embeddings, *valve.parameters()]
        for batch in batches_of(federation, number, 1):
            z = task.features(model, batch.x)
            h = head.take(model)
            scores = valve(z, own) @ h[:-4].view(4, 6).T + h[-4:]
            common = valve(z, general)
            loss = F.cross_entropy(scores, batch.y)
            loss = loss + F.cross_entropy(
                F.cosine_similarity(common[:, None], embeddings[None], dim=2), batch.y
            )
            loss = loss + 0.3 * torch.norm(common - start.embeddings[batch.y], 2)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for place, (value, step) in enumerate(zip(parameters, gradients, strict=True)):
                    value -= 0.1 * (step + (0.02 * value if place else 0))
        assert torch.allclose(federation.states["p_i"][number], head.take(model))
        found = (body.take(model), embeddings, nn.utils.parameters_to_vector(valve.parameters()))
        totals = [total + n / 17 * value.detach() for total, value in zip(totals, found, strict=True)]
    assert torch.allclose(body.take(server.w), totals[0])
    assert torch.allclose(server.embeddings, totals[1])
    assert torch.allclose(server.valve, totals[2])
    assert torch.equal(head.take(server.w), head.take(task.initial()))


def test_prediction_and_a_client_without_samples() -> None:
    task, data = task_and_data((9, 0, 14))
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("gpfl", federation)
    server = play(algorithm, federation, [[0, 1, 2], [0, 1]])
    alone = federation_of("loop", task, data, local={"batch": 8})
    other = play(method("gpfl", alone), alone, [[0, 2], [0]])
    assert torch.equal(server.w, other.w)
    assert torch.equal(server.embeddings, other.embeddings)
    x, call = data.test.x[:4], algorithm.personalize(server, np.arange(3))

    def outputs(client: Any, hyper: Any, w: Tensor, embeddings: Tensor, valve: Tensor, p_i: Tensor) -> Reply:
        return Reply(outputs=own_head(client, hyper, w, embeddings, valve, p_i).sent["w"](x))

    found = federation.ask(outputs, [2], call.shared)["outputs"][0]
    share = F.one_hot(data.train.y[9:], 4).double().mean(dim=0)
    h = federation.states["p_i"][2]
    features = Valve(6, server.valve)(task.features(server.w, x), share @ server.embeddings)
    assert torch.allclose(found, features @ h[:-4].view(4, 6).T + h[-4:])
