"""Methods whose server learns from the clients' class means: a head, prototypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of, method, model_task, play
from sartor.algorithms.own_models.fedgh import inputs_of, scores
from sartor.algorithms.own_models.fedtgp import generated, initial_network, separation
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.model.groups import grouped
from sartor.model.task import Task

COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]
FLAT = model_task("mlp", hidden=5)


def deep() -> Task:
    torch.manual_seed(3)
    layers = nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4)
    return Task(nn.Sequential(nn.Flatten(), *layers), classes=4, head="5", name="deep")


DEEP = deep()


def federation(**settings: Any) -> Federation:
    task = grouped(FLAT, [FLAT, DEEP], np.array([0, 1, 1, 0, 1, 0]), [0, 1])
    return federation_of("loop", task, classification(), local={"batch": 8}, **settings)


def means_of(task: Task, w: Tensor, client: int) -> tuple[Tensor, Tensor]:
    """The class means of a client's features, and the classes that it has."""
    x, y = classification().train.of(client)
    z = task.features(w, x)
    held = sorted(set(y.tolist()))
    return torch.stack([z[y == label].mean(dim=0) for label in held]), torch.tensor(held)


def after_a_round(name: str, **hyper: Any) -> tuple[Any, Any, Tensor, Tensor]:
    """The server before and after a round of clients 1, 3 and 4, and their class means after training."""
    made = federation()
    algorithm = method(name, made, lr=0.1, **hyper)
    server = algorithm.start(made)
    made.round = 1
    after = algorithm.round(server, made, np.array([1, 3, 4]))
    rows = [made.states.rows("w_i", np.array([client]))[0] for client in (1, 3, 4)]
    found = [
        means_of(task, w, client) for task, w, client in zip((DEEP, FLAT, DEEP), rows, (1, 3, 4), strict=True)
    ]
    return server, after, torch.cat([means for means, _ in found]), torch.cat([labels for _, labels in found])


# FedGH -----------------------------------------------------------------------------------------------------


def test_a_head_alone_is_the_last_layer() -> None:
    head, features = torch.randn(24), torch.randn(6, 5)
    expected = features @ head[:20].view(4, 5).T + head[20:]
    x = torch.zeros(1, 1, 8, 8)
    for task in (FLAT, DEEP):
        torch.testing.assert_close(scores(task, head, x, features), expected)
        assert inputs_of(task) == 5


def test_the_server_descends_on_the_class_means() -> None:
    server, after, means, labels = after_a_round("fedgh", server_lr=0.3, server_steps=2)
    head = server.head.clone()
    for _ in range(2):
        head = head.detach().requires_grad_()
        loss = F.cross_entropy(means @ head[:20].view(4, 5).T + head[20:], labels)
        (gradient,) = torch.autograd.grad(loss, head)
        head = head - 0.3 * gradient
    torch.testing.assert_close(after.head, head.detach(), rtol=1e-4, atol=1e-6)


def test_clients_train_with_the_shared_head() -> None:
    """A server that stands still gives every client its first head again in each round."""
    made, alone = federation(), federation()
    algorithm = method("fedgh", made, lr=0.1, server_lr=0.0)
    server = play(algorithm, made, [[1]])
    play(method("separate", alone, lr=0.1), alone, [[1]])
    start = DEEP.part("head").put(DEEP.initial(), server.head)
    assert torch.equal(server.head, FLAT.part("head").take(FLAT.initial()))
    assert not torch.equal(made.states.rows("w_i", np.array([1])), alone.states.rows("w_i", np.array([1])))
    call = algorithm.personalize(server, np.arange(6))
    replies = made.ask(call.function, [2, 1], call.shared)
    assert torch.equal(replies["w"][0], start)  # never trained
    assert torch.equal(DEEP.part("head").take(replies["w"][1]), server.head)


def test_with_one_group_the_first_round_is_separate() -> None:
    made = federation_of("loop", FLAT, classification(), local={"batch": 8})
    alone = federation_of("loop", FLAT, classification(), local={"batch": 8})
    play(method("fedgh", made, lr=0.1), made, [[0, 1, 2, 3, 4, 5]])
    play(method("separate", alone, lr=0.1), alone, [[0, 1, 2, 3, 4, 5]])
    assert torch.equal(made.states["w_i"], alone.states["w_i"])


def test_heads_that_differ_are_refused() -> None:
    other = model_task("mlp", hidden=6)
    task = grouped(FLAT, [FLAT, other], np.array([0, 1] * 3), [0, 1])
    made = federation_of("loop", task, classification())
    for name in ("fedgh", "fedtgp"):
        with pytest.raises(SettingError, match="features of one size at all clients"):
            method(name, made).start(made)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.LayerNorm(4))
    normed = federation_of("loop", Task(net, classes=4, head="2"), classification())
    with pytest.raises(SettingError, match="its head '2' is no dense layer"):
        method("fedgh", normed).start(normed)


# FedTGP ----------------------------------------------------------------------------------------------------


def test_the_network_of_prototypes_is_an_embedding_and_two_layers() -> None:
    network = initial_network(4, 5, seed=7)
    embedding, first, second = nn.Embedding(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
    nn.utils.vector_to_parameters(
        network, [*embedding.parameters(), *first.parameters(), *second.parameters()]
    )
    torch.testing.assert_close(generated(network, 4, 5), second(F.relu(first(embedding.weight))).detach())
    assert torch.equal(network, initial_network(4, 5, seed=7))
    assert not torch.equal(network, initial_network(4, 5, seed=8))


def test_the_margin_is_the_largest_distance_to_a_nearest_class() -> None:
    means = torch.tensor([[[0.0], [1.0], [5.0], [100.0]], [[0.0], [3.0], [9.0], [50.0]]])
    here = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    # Classes at 0, 2 and 5; the nearest other class is 2, 2 and 3 away. Nobody holds the last one.
    assert float(separation(means, here)) == 3.0
    assert float(separation(means, torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]]))) == float("inf")


@pytest.mark.parametrize("margin", [100.0, 0.01])
def test_the_server_draws_prototypes_to_their_class_means(margin: float) -> None:
    server, after, means, labels = after_a_round("fedtgp", server_lr=0.2, server_steps=2, margin=margin)
    centres = torch.stack([means[labels == label].mean(dim=0) for label in sorted(set(labels.tolist()))])
    apart = torch.cdist(centres, centres) + 1e9 * torch.eye(len(centres))
    gap = min(float(apart.amin(dim=1).max()), margin)
    network = server.network.clone()
    for _ in range(2):
        network = network.detach().requires_grad_()
        distances = torch.linalg.vector_norm(means[:, None] - generated(network, 4, 5), dim=2)
        distances = distances + gap * F.one_hot(labels, 4)
        (gradient,) = torch.autograd.grad(F.cross_entropy(-distances, labels), network)
        network = network - 0.2 * gradient
    torch.testing.assert_close(after.prototypes, generated(network, 4, 5).detach(), rtol=1e-4, atol=1e-5)
    assert set(torch.nonzero(after.known).flatten().tolist()) == set(labels.tolist())


def test_the_first_round_is_fedprotos() -> None:
    made, proto = federation(), federation()
    play(method("fedtgp", made, lr=0.1), made, [[0, 1, 2, 3, 4, 5]])
    play(method("fedproto", proto, lr=0.1), proto, [[0, 1, 2, 3, 4, 5]])
    for client in range(6):
        one, other = (held.states.rows("w_i", np.array([client])) for held in (made, proto))
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["fedtgp", "fedgh"])
def test_nothing_but_class_means_goes_up(name: str) -> None:
    made = federation()
    play(method(name, made, lr=0.1), made, [[0, 1, 2]])
    assert made.traffic.up == 3 * 4 * (4 * 6)
    assert made.traffic.down == 3 * 4 * (24 if name == "fedgh" else 4 * 5 + 4)
