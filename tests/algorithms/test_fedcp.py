"""FedCP: the policy, the discrepancy and a step against autograd, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, classification, federation_of, method, play, task_and_data
from sartor import random
from sartor.algorithms.split_models.fedcp import BANDWIDTHS, both_heads, discrepancy, gumbel, shares
from sartor.errors import SartorError
from sartor.federation import Reply
from sartor.model.task import Task


class Policy(nn.Module):
    """The authors' network."""

    def __init__(self, size: int, vector: Tensor) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, 2 * size).double(), nn.LayerNorm(2 * size).double()
        nn.utils.vector_to_parameters(vector.clone(), self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))).view(len(x), 2, -1)


def test_the_policy_is_the_authors_network() -> None:
    torch.manual_seed(0)
    policy, z, context = torch.randn(2 * 9 + 18).double(), torch.randn(5, 3).double(), torch.rand(3).double()
    noise = torch.randn(5, 6).double()
    expected = (Policy(3, policy)(z * context) + noise.view(5, 2, 3)).softmax(dim=1)
    r, s = shares(policy, z, context, noise)
    assert torch.allclose(r, expected[:, 0])
    assert torch.allclose(r + s, torch.ones(5, 3).double())


def test_the_discrepancy_is_that_of_kernels_and_counts_real_samples_alone() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3).double(), 2 * torch.randn(4, 3).double()

    def kernel(a: Tensor, b: Tensor) -> float:
        return sum(float(torch.exp(-0.5 * ((a - b) ** 2).sum() / width)) for width in BANDWIDTHS)

    expected = np.mean([[kernel(a, b) for b in x] for a in x]) + np.mean(
        [[kernel(a, b) for b in y] for a in y]
    )
    expected -= 2 * np.mean([[kernel(a, b) for b in y] for a in x])
    assert float(discrepancy(x, y, None)) == pytest.approx(expected)
    assert float(discrepancy(x, x, None)) == pytest.approx(0.0, abs=1e-15)
    padded = torch.cat([x, x[:2]]), torch.cat([y, y[:2] + 7])
    weight = torch.tensor([1.0, 1, 1, 1, 0, 0]).double()
    assert float(discrepancy(*padded, weight)) == pytest.approx(expected)


def test_the_noise_is_gumbels() -> None:
    noise = gumbel(random.stream(0, "test"), torch.zeros(4000, 5).double())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(noise.var()) == pytest.approx(torch.pi**2 / 6, abs=0.06)


def test_a_step_by_autograd() -> None:
    task, data = task_and_data((11,))
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 2})
    algorithm = method("fedcp", federation, lr=0.3, lam=0.7)
    start = algorithm.start(federation)
    policy_module = Policy(6, start.policy)
    federation.round = 1
    server = algorithm.round(start, federation, np.array([0]))
    x, y, w0 = data.train.x, data.train.y, start.w
    head, body = task.part("head"), task.part("body")
    general, own = head.take(w0), head.take(w0).requires_grad_()
    live = body.take(w0).requires_grad_()
    context = F.normalize(general[:-4].view(4, 6).sum(dim=0), dim=0)
    (order, *_) = batches_of(federation, 0, 1)
    parameters = [live, own, *policy_module.parameters()]
    for turn in range(2):
        batch = batches_of(federation, 0, 1)[turn]
        z = task.features(body.put(w0, live), batch.x)
        reference = task.features(w0, batch.x)
        noise = gumbel(random.fold(client_stream(federation), turn), reference).view(11, 2, 6)
        both = (policy_module(z * context) + noise).softmax(dim=1)
        scores = both[:, 0] * z @ own[:-4].view(4, 6).T + own[-4:]
        scores = scores + both[:, 1] * z @ general[:-4].view(4, 6).T + general[-4:]
        loss = F.cross_entropy(scores, batch.y) + 0.7 * discrepancy(z, reference, None)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for value, step in zip(parameters, gradients, strict=True):
                value -= 0.3 * step
    assert len(order.y) == len(y) == len(x)
    assert torch.allclose(body.take(server.w), live)
    assert torch.allclose(head.take(server.w), (own + general) / 2)
    assert torch.allclose(federation.states["p_i"][0], own)
    assert torch.allclose(server.policy, nn.utils.parameters_to_vector(policy_module.parameters()))


def client_stream(federation: Any) -> Any:
    return random.stream(federation.seed, "policy", torch.tensor(1), torch.tensor(0))


def test_prediction_is_by_both_heads_and_a_client_without_samples_moves_nothing() -> None:
    task, data = task_and_data((9, 0, 14))
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedcp", federation)
    server = play(algorithm, federation, [[0, 1, 2], [0, 1]])
    alone = federation_of("loop", task, data, local={"batch": 8})
    other = play(method("fedcp", alone), alone, [[0, 2], [0]])
    assert torch.equal(server.w, other.w)
    x = data.test.x[:4]
    call = algorithm.personalize(server, np.arange(3))

    def outputs(client: Any, hyper: Any, w: Tensor, policy: Tensor, p_i: Tensor) -> Reply:
        return Reply(outputs=both_heads(client, hyper, w, policy, p_i).sent["w"](x))

    found = federation.ask(outputs, [0], call.shared)["outputs"][0]
    head, own = task.part("head").take(server.w), federation.states["p_i"][0]
    z = task.features(server.w, x)
    r, s = shares(server.policy, z, F.normalize(own[:-4].view(4, 6).sum(dim=0), dim=0), 0.0)
    expected = (r * z) @ own[:-4].view(4, 6).T + own[-4:] + (s * z) @ head[:-4].view(4, 6).T + head[-4:]
    assert torch.allclose(found, expected)


def test_a_head_that_is_not_one_linear_layer_is_refused() -> None:
    data = classification(shape=(5,), classes=4, dtype=torch.float64)
    module = nn.Sequential(
        nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    ).double()
    federation = federation_of("loop", Task(module, classes=4, head="1"), data)
    with pytest.raises(SartorError, match="is not one linear layer"):
        method("fedcp", federation).start(federation)
