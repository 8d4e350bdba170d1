"""CFL's third condition and its thresholds; how IFCA's models begin, and heads on one body."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers import federation_of, method, model_task, personal_models, play, quadratics, task_and_data
from sartor.algorithms.mixing.cfl import noise
from sartor.algorithms.mixing.ifca import IFCAServer


def split_round(centres: torch.Tensor, rounds: int = 60, **hyper: Any) -> tuple[int | None, list[int]]:
    """The round of the first split, and the groups at the end."""
    task, data = quadratics(centres, torch.ones_like(centres))
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    algorithm = method("cfl", federation, lr=0.3, wait=0, **hyper)
    server, first = algorithm.start(federation), None
    for round in range(1, rounds + 1):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(len(centres)))
        first = round if first is None and len(server.models) > 1 else first
    return first, server.groups.tolist()


def test_cfl_cuts_only_where_the_sides_are_farther_apart_than_their_members() -> None:
    """Four clients around a circle: every cut runs through neighbours as unlike as those that it parts."""
    circle = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64) * 5
    always = {"e1": 1e9, "e2": 0.0, "relative": False}
    assert split_round(circle, 3, gamma=0.0, **always)[0] == 1  # without the condition
    assert split_round(circle, 3, **always)[0] is None
    pairs = torch.tensor([[5.0, 0.4], [-5.0, 0.4], [5.0, -0.4], [-5.0, -0.4]], dtype=torch.float64)
    first, groups = split_round(pairs, 1, **always)
    assert (first, groups[0] == groups[2] != groups[1] == groups[3]) == (1, True)


def test_the_noise_is_measured_on_each_side() -> None:
    """Means (2, 0) and (−4, 0): deviations of 1 and 2 are a half of each; a client at rest tells nothing."""
    changes = torch.tensor([[2.0, 1.0], [2.0, -1.0], [-4.0, 2.0], [-4.0, -2.0]], dtype=torch.float64)
    side, share = torch.tensor([False, False, True, True]), torch.ones(4, dtype=torch.float64)
    assert float(noise(changes, share, side)) == pytest.approx(0.5)
    still = torch.cat([changes, torch.zeros(1, 2, dtype=torch.float64)])
    rest = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    side = torch.tensor([False, False, True, True, False])
    assert float(noise(still, rest, side)) == pytest.approx(0.5)
    # γ < √((1 − α)/2) is decided by γ itself
    pairs = torch.tensor([[5.0, 0.0], [-5.0, 0.0], [5.0, 0.0], [-5.0, 0.0]], dtype=torch.float64)
    always = {"e1": 1e9, "e2": 0.0, "relative": False}
    assert split_round(pairs, 1, gamma=0.999, **always)[0] == 1  # α_cross = −1: the bound is 1
    assert split_round(pairs, 1, gamma=1.001, **always)[0] is None


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_cfls_thresholds_follow_the_size_of_the_changes(size: float) -> None:
    """Two populations split in the same round whatever the units of the model."""
    centres = torch.tensor([[5.0, 6.0], [-5.0, 6.0], [5.0, 6.0], [-5.0, 6.0]], dtype=torch.float64) * size
    first, groups = split_round(centres)
    # the mean's distance shrinks by 0.7 a round from ‖(0, 1.8)‖: below a tenth in the round after 0.7^7
    assert first == 8
    assert groups[0] == groups[2] != groups[1] == groups[3]


# IFCA ------------------------------------------------------------------------------------------------------


def test_a_model_of_your_own_is_not_turned_into_garbage() -> None:
    own, data = task_and_data()
    assert not own.drawn
    assert model_task("mlp", data).drawn
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, own, data, local={"batch": 8})
        algorithm = method("ifca", federation, clusters=2, lr=0.1)
        server = algorithm.start(federation)
        assert torch.equal(server.models[0], server.models[1])
        server = play(algorithm, federation, [[0, 1, 2, 3, 4, 5]])
        assert 0 < float(server.members[0]) < 6  # whom they trained was drawn
        assert not torch.equal(server.models[0], server.models[1])
    federation = federation_of("loop", model_task("mlp", data), data)
    named = method("ifca", federation, clusters=2).start(federation).models
    assert not torch.equal(named[0], named[1])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_heads_on_one_body(engine: str) -> None:
    """The body is everybody's mean, a head that of its members; bodies are sent once."""
    task, data = task_and_data()
    head, body = task.part("head"), task.part("body")
    federation = federation_of(engine, task, data, local={"batch": 8})
    algorithm = method("ifca", federation, clusters=2, lr=0.1, several="head", start="signs")
    start = algorithm.start(federation)
    assert torch.equal(body.take(start.models[0]), body.take(start.models[1]))
    assert not torch.equal(head.take(start.models[0]), head.take(start.models[1]))
    federation.round = 1
    server = algorithm.round(start, federation, np.arange(6))
    assert federation.traffic.down == 6 * (task.size + head.size) * 8
    whole = federation_of(engine, task, data, local={"batch": 8})
    other = method("ifca", whole, clusters=2, lr=0.1)
    whole.round = 1
    apart = other.round(IFCAServer(start.models, start.members), whole, np.arange(6))
    assert torch.equal(server.members, apart.members)
    assert torch.allclose(head.take(server.models), head.take(apart.models), atol=1e-12)
    share = apart.members / apart.members.sum()
    mean = body.take(start.models[0]) + share @ (body.take(apart.models) - body.take(start.models))
    assert torch.allclose(body.take(server.models), mean.expand(2, -1), atol=1e-12)
    assert personal_models(algorithm, server, federation).shape == (6, task.size)
