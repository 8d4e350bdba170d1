"""FedAS: its limit case, the alignment and the Fisher weights against autograd, newcomers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, classification, federation_of, method, play, quadratics, task_and_data
from sartor.errors import SartorError
from sartor.model.task import Task

COHORTS = [[0, 1, 3], [2, 3, 4, 5], [0, 5]]


def test_without_alignment_and_fisher_it_is_fedper_to_the_bit() -> None:
    ends = []
    for name, hyper in (("fedper", {}), ("fedas", {"alignment_epochs": 0, "fisher": False})):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8, "momentum": 0.5})
        ends.append(play(method(name, federation, **hyper), federation, COHORTS).w)
    assert torch.equal(*ends)


def gradient(task: Task, w: Tensor, loss: Any) -> Tensor:
    live = w.clone().requires_grad_()
    return torch.autograd.grad(loss(live), live)[0]


def test_two_rounds_by_autograd() -> None:
    task, data = task_and_data((9, 14))
    federation = federation_of("loop", task, data, local={"batch": 6, "epochs": 1})
    algorithm = method("fedas", federation, lr=0.2, alignment_lr=0.5)
    server = algorithm.start(federation)
    body = task.part("body")
    w = [task.initial(), task.initial()]
    common = body.take(task.initial())
    for round in (1, 2):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(2))
        changes, weights = [], []
        for number, own in enumerate((slice(0, 9), slice(9, 23))):
            x, y = data.train.x[own], data.train.y[own]
            model = body.put(w[number], common)
            if round > 1:  # there is a last model to align with
                z = task.features(w[number], x)
                means = {int(label): z[y == label].mean(dim=0) for label in y.unique()}
                for batch in batches_of(federation, number, round, stream="align", epochs=1):

                    def apart(live: Tensor, batch: Any = batch, means: Any = means) -> Tensor:
                        z = task.features(live, batch.x)
                        labels = batch.y.unique()
                        return sum(
                            F.mse_loss(z[batch.y == k], means[int(k)].expand_as(z[batch.y == k]))
                            for k in labels
                        )

                    model = model - 0.5 * gradient(task, model, apart)
            for batch in batches_of(federation, number, round):
                model = model - 0.2 * task.grad(model, batch)
            changes.append(body.take(model) - common)
            seen = batches_of(federation, number, round, stream="fisher", epochs=1)
            weights.append(sum((task.grad(model, batch) ** 2).sum() for batch in seen))
            w[number] = model
        total = sum(weights)
        common = common + sum(
            weight / total * change for weight, change in zip(weights, changes, strict=True)
        )
        assert torch.allclose(server.w, common, rtol=1e-10, atol=1e-12), round
        assert torch.allclose(federation.states["own"], torch.stack(w), rtol=1e-10, atol=1e-12)


def personal(federation: Any, algorithm: Any, server: Any) -> Tensor:
    call = algorithm.personalize(server, np.arange(federation.clients))
    return federation.ask(call.function, np.arange(federation.clients), call.shared, call.each)["w"]


def test_the_clients_own_model_is_evaluated_and_a_newcomer_has_the_body() -> None:
    task, data = task_and_data((9, 0, 14))
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedas", federation)
    server = play(algorithm, federation, [[0, 1]])
    models = personal(federation, algorithm, server)
    assert torch.equal(models[0], federation.states["own"][0])
    new = task.part("body").put(task.initial(), server.w)
    assert torch.equal(models[1], new)  # without samples it has not trained
    assert torch.equal(models[2], new)
    assert torch.equal(federation.states["own"][1], task.initial())


def test_alignment_leaves_statistics_alone() -> None:
    """Without steps of its own a client's alignment moves the body and no running statistics."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    task = Task(module, classes=4, head="3")
    data = classification((12, 9), shape=(5,), classes=4, dtype=torch.float64)
    federation = federation_of("loop", task, data, local={"batch": 4}, buffers="freeze")
    algorithm = method("fedas", federation, lr=0.0, alignment_lr=0.3)
    server = play(algorithm, federation, [[0, 1], [0, 1]])
    assert not torch.equal(server.w, task.part("body").take(task.initial()))
    assert federation.buffers is not None
    assert torch.equal(federation.buffers, task.initial_buffers())
    federation = federation_of("loop", *quadratics(torch.zeros(1, 1), torch.ones(1, 1)))
    with pytest.raises(SartorError, match="needs data with classes"):
        method("fedas", federation).start(federation)
