"""Adapters with rules, attacks, privacy and compression: limit cases that must be the plain method's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from torch import Tensor

from helpers import classification, federation_of, module_of
from sartor.algorithms import make, registered
from sartor.data.clients import ClientData, Split
from sartor.federation.attacks import AttackChoice
from sartor.federation.reduction import AGGREGATES
from sartor.federation.transforms import TRANSFORMS, Transform
from sartor.model.adapters import adapter_parts, exchanged_parts, with_adapters
from sartor.model.networks import seeded
from sartor.model.task import Task
from sartor.privacy.settings import Privacy
from sartor.robust.attacks import Scaling, SignFlip
from sartor.robust.centres import GeometricMedian
from sartor.transforms.low_rank import LowRank, layouts_of

METHODS = ("fedit", "ffa-lora", "fedsa-lora")
CLIENTS, LR = 9, 0.3
SHARES = {"krum": 0.2, "multi-krum": 0.2, "bulyan": 0.12}
MANY = 1e9


def alike() -> ClientData:
    """Clients with the same samples."""
    one = classification((8,), shape=(5,), classes=3, dtype=torch.float64)
    starts, counts = np.zeros(CLIENTS, dtype=np.int64), np.full(CLIENTS, 8)
    split = Split(one.train.x, one.train.y, starts, counts)
    names = tuple(f"client {number}" for number in range(CLIENTS))
    return replace(one, names=names, train=split, test=split)


def task() -> Task:
    module = module_of("mlp", (5,), 3, hidden=6)
    adapted = seeded(lambda: with_adapters(module, 2, ("output",)), 1)
    return Task(adapted, classes=3, head="output", name="adapted")


def moved(name: str, engine: str = "loop", **settings: Any) -> Tensor:
    """What the server has learned after a round of everyone, two steps on all samples."""
    federation = federation_of(engine, task(), alike(), local={"batch": 0, "epochs": 2}, **settings)
    algorithm = make(registered()[name], lr=LR)
    federation.hyper = algorithm.hyper
    server = algorithm.start(federation)
    federation.round, federation.drawn = 1, np.arange(CLIENTS)
    return algorithm.round(server, federation, federation.drawn).w - server.w


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return {name: moved(name) for name in METHODS}


def attacked(kind: str, attack: Any, count: int) -> AttackChoice:
    return AttackChoice(name=kind, clients=tuple(f"client {each}" for each in range(count)), settings=attack)


LONG = attacked("scaling", Scaling(factor=1e4), 1)


@pytest.mark.parametrize("rule", [rule for rule in AGGREGATES if rule != "mean"])
@pytest.mark.parametrize("name", METHODS)
def test_every_rule_leaves_one_long_reply_out(name: str, rule: str, plain: dict[str, Tensor]) -> None:
    share = {"share": SHARES[rule]} if rule in SHARES else {}
    found = moved(name, aggregate=AGGREGATES[rule](**share), attack=LONG)
    torch.testing.assert_close(found, plain[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_the_mean_does_not(name: str, plain: dict[str, Tensor]) -> None:
    torch.testing.assert_close(moved(name, attack=LONG), (8 + 1e4) / 9 * plain[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("name", METHODS)
def test_where_all_turn_their_changes_around_the_server_does(
    name: str, engine: str, plain: dict[str, Tensor]
) -> None:
    turned = moved(name, engine, attack=attacked("sign-flip", SignFlip(), CLIENTS))
    assert float(plain[name].abs().max()) > 1e-3
    torch.testing.assert_close(turned, -plain[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["central", "local", "samples"])
@pytest.mark.parametrize("name", METHODS)
def test_privacy_without_noise_and_bound_is_the_plain_method(
    name: str, mode: str, plain: dict[str, Tensor]
) -> None:
    algorithm = make(registered()[name], lr=LR)
    found = moved(name, privacy=Privacy(mode=mode, noise=0.0, clip=MANY), gradients=algorithm.gradients)
    torch.testing.assert_close(found, plain[name], rtol=1e-9, atol=1e-12)


LOSSLESS: dict[str, dict[str, Any]] = {
    "clip": {"norm": MANY},
    "scale": {},
    "difference": {},
    "top-k": {"share": 1.0},
    "random-k": {"share": 1.0},
    "low-rank": {"rank": 6},
}
LOSSY = ("qsgd", "int8", "int4", "sign")


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("name", METHODS)
def test_transforms_that_leave_nothing_out_change_nothing(
    name: str, kind: str, plain: dict[str, Tensor]
) -> None:
    made: Transform = TRANSFORMS[kind](**LOSSLESS[kind])
    torch.testing.assert_close(moved(name, transforms=(made,)), plain[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_rounded_still_points_where_the_change_does(
    name: str, kind: str, plain: dict[str, Tensor]
) -> None:
    """And the engines send the same."""
    loop, stacked = (moved(name, engine, transforms=(TRANSFORMS[kind](),)) for engine in ("loop", "stacked"))
    torch.testing.assert_close(loop, stacked, rtol=1e-6, atol=1e-9)
    assert float(torch.cosine_similarity(loop, plain[name], dim=0)) > 0.3


def test_matrices_are_found_in_what_these_methods_send() -> None:
    own = task()
    a, rest = exchanged_parts(own)
    assert a == adapter_parts(own)[0]
    known = dict(layouts_of(own))
    assert [(each.rows, each.columns) for each in known[a.size]] == [(2, 5)]
    assert [(each.rows, each.columns) for each in known[rest.size]] == [(6, 2), (3, 6)]
    assert exchanged_parts(Task(module_of("mlp", (5,), 3, hidden=6), classes=3)) == ()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_frozen_part_has_no_share_in_the_norm_of_a_samples_gradient(engine: str) -> None:
    """One step on one sample, clipped to C: without A, which does not move, it is as long as ηC."""
    algorithm = make(registered()["ffa-lora"], lr=LR)
    privacy = Privacy(mode="samples", noise=0.0, clip=1e-3)
    federation = federation_of(
        engine,
        task(),
        alike(),
        hyper=algorithm.hyper,
        local={"batch": 1, "steps": 1},
        privacy=privacy,
        gradients=algorithm.gradients,
    )
    server = algorithm.start(federation)
    server = replace(server, w=server.w + 0.5)  # so that B is not zero, and A has a gradient
    federation.round, federation.drawn = 1, np.arange(1)
    after = algorithm.round(server, federation, np.arange(1))
    assert float(torch.linalg.vector_norm(after.w - server.w)) == pytest.approx(LR * 1e-3, rel=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_nodes_give_what_a_simulation_does_with_all_of_it(name: str) -> None:
    """Noise and low rank at the clients, a rule at the server; real messages to nodes in this process."""
    data, own, algorithm = alike(), task(), make(registered()[name], lr=LR)
    tables: dict[str, Any] = {
        "local": {"batch": 0, "epochs": 2},
        "hyper": {"lr": LR},
        "privacy": {"mode": "local", "noise": 0.1, "clip": 0.5},
        "transforms": [{"name": "low-rank", "rank": 1}],
    }
    given: dict[str, Any] = {
        "hyper": algorithm.hyper,
        "privacy": Privacy(**tables["privacy"]),
        "transforms": (LowRank(rank=1),),
        "aggregate": GeometricMedian(),
    }
    grid = HereGrid(nodes_of(data, own, [range(4), range(4, CLIENTS)]))
    there = federation_on(grid, experiment_of(name, **tables), own, **given)
    here = federation_of("loop", own, data, local=tables["local"], workers=1, **given)
    found = []
    for federation in (here, there):
        server = algorithm.start(federation)
        federation.round, federation.drawn = 1, np.arange(CLIENTS)
        found.append(algorithm.round(server, federation, federation.drawn).w)
    assert torch.equal(*found)
    assert here.traffic.up == there.traffic.up
