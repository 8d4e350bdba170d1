"""Methods that learn from public samples: scores that clients agree on, an ensemble that is distilled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, part_of
from torch import Tensor
from torch.nn import functional as F

from helpers import classification, federation_of, method, model_task, play
from sartor import random
from sartor.algorithms.own_models.fedmd import FedMDHyper, digested, scored
from sartor.data import Source
from sartor.data.clients import ClientData
from sartor.data.named import register_data
from sartor.data.sources import SOURCES
from sartor.errors import SettingError
from sartor.federation import Federation, Reply
from sartor.model.groups import grouped
from sartor.model.task import Task
from sartor.remote.node import Node
from sartor.remote.policy import Policy
from sartor.remote.serve import Service, serve_on
from sartor.runs.execute import execute
from sartor.runs.experiment import from_mapping

COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]
SMALL, LARGE = model_task("mlp", hidden=3), model_task("mlp", hidden=8)
OF = np.array([0, 1, 1, 0, 1, 0])
PUBLIC = torch.randn(21, 1, 8, 8, generator=torch.Generator().manual_seed(9))


def data(public: Tensor = PUBLIC) -> ClientData:
    return replace(classification(), public_x=public)


def models() -> Task:
    return grouped(SMALL, [SMALL, LARGE], OF, [0, 1])


def federation(task: Task | None = None, engine: str = "loop", **local: Any) -> Federation:
    return federation_of(engine, task or models(), data(), local={"batch": 8, **local})


def owned(made: Federation, client: int) -> Tensor:
    return made.states.rows("w_i", np.array([client]))[0]


# FedMD -----------------------------------------------------------------------------------------------------


def test_a_client_that_digests_nothing_is_alone() -> None:
    made, alone = federation(), federation()
    play(method("fedmd", made, lr=0.05, digest_lr=0.0), made, COHORTS)
    play(method("separate", alone, lr=0.05), alone, COHORTS)
    for client in range(6):
        assert torch.equal(owned(made, client), owned(alone, client))


def test_the_first_round_has_no_consensus_to_digest() -> None:
    made, alone = federation(), federation()
    play(method("fedmd", made, lr=0.05, digest_lr=1.0), made, COHORTS[:1])
    play(method("separate", alone, lr=0.05), alone, COHORTS[:1])
    for client in range(6):
        assert torch.equal(owned(made, client), owned(alone, client))


def test_the_consensus_is_the_mean_of_the_clients_scores() -> None:
    made = federation()
    server = play(method("fedmd", made, lr=0.05), made, [[0, 1, 4]])
    scores = [task.outputs(owned(made, k), PUBLIC) for task, k in ((SMALL, 0), (LARGE, 1), (LARGE, 4))]
    torch.testing.assert_close(server.scores, sum(scores, torch.zeros(21, 4)) / 3, rtol=1e-5, atol=1e-6)
    assert made.traffic.up == 3 * 4 * 21 * 4


def digest(client: Any, hyper: FedMDHyper, w: Tensor, scores: Tensor, known: Tensor) -> Reply:
    return Reply(w=digested(client, hyper, w, scores, known), scores=scored(client, w, scores))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_digesting_descends_on_the_absolute_difference(engine: str) -> None:
    scores = torch.randn(21, 4, generator=torch.Generator().manual_seed(2))
    made = federation(LARGE, engine)
    made.round = 1
    w = LARGE.initial()
    hyper = FedMDHyper(digest_lr=0.5, digest_batch=21)
    sent = {"w": w, "scores": scores, "known": torch.ones(())}
    replies = made.map(digest, [0, 3], sent, hyper=hyper)
    live = w.clone().requires_grad_()
    loss = (LARGE.outputs(live, PUBLIC) - scores).abs().mean()
    (gradient,) = torch.autograd.grad(loss, live)
    for row in replies["w"]:
        torch.testing.assert_close(row, w - 0.5 * gradient, rtol=1e-4, atol=1e-6)
    for row in replies["scores"]:
        torch.testing.assert_close(row, LARGE.outputs(w, PUBLIC), rtol=1e-5, atol=1e-6)
    small = FedMDHyper(digest_lr=0.05, digest_batch=8, digest_epochs=30)
    moved = made.map(digest, [0], sent, hyper=small)["w"][0]
    assert float((LARGE.outputs(moved, PUBLIC) - scores).abs().mean()) < 0.95 * float(loss.detach())


# FedDF -----------------------------------------------------------------------------------------------------


def test_without_distillation_it_is_fedavg() -> None:
    made, average = federation(LARGE), federation(LARGE)
    algorithm = method("feddf", made, lr=0.05, server_steps=0)
    server = play(algorithm, made, COHORTS)
    expected = play(method("fedavg", average, lr=0.05), average, COHORTS)
    assert torch.equal(server.w[0], expected.w)
    assert torch.equal(algorithm.shared(server), expected.w)  # type: ignore[arg-type]


def test_without_distillation_each_group_is_fedavg_of_its_own() -> None:
    made = federation()
    algorithm = method("feddf", made, lr=0.05, server_steps=0)
    server = play(algorithm, made, COHORTS)
    for group, task in enumerate((SMALL, LARGE)):
        alone = federation(task)
        cohorts = [[client for client in cohort if OF[client] == group] for cohort in COHORTS]
        assert torch.equal(server.w[group], play(method("fedavg", alone, lr=0.05), alone, cohorts).w)
    assert algorithm.shared(server) is None


def test_a_step_of_distillation_is_adams_towards_the_ensemble() -> None:
    plain, made = federation(), federation()
    before = play(method("feddf", plain, lr=0.05, server_steps=0), plain, [[0, 1, 2]])
    after = play(
        method("feddf", made, lr=0.05, server_steps=1, server_lr=0.01, server_batch=9), made, [[0, 1, 2]]
    )
    alone = [federation() for _ in range(3)]
    for client, one in enumerate(alone):
        play(method("separate", one, lr=0.05), one, [[client]])
    key = random.fold(random.fold(made.stream("distil"), 1), 0)
    x = PUBLIC[random.uniform(key, 21).argsort()[:9]]
    tasks = (SMALL, LARGE, LARGE)
    teacher = (
        sum(task.outputs(owned(one, k), x) for k, (task, one) in enumerate(zip(tasks, alone, strict=True)))
        / 3
    )
    for group, task in enumerate((SMALL, LARGE)):
        w = before.w[group].clone().requires_grad_()
        optimizer = torch.optim.Adam([w], lr=0.01)
        F.kl_div(
            F.log_softmax(task.outputs(w, x), 1), F.softmax(teacher, 1), reduction="batchmean"
        ).backward()  # type: ignore[arg-type]
        optimizer.step()
        torch.testing.assert_close(after.w[group], w.detach(), rtol=1e-3, atol=2e-4)
        assert not torch.allclose(before.w[group], w.detach(), rtol=1e-3, atol=2e-4)


# Where the samples come from -------------------------------------------------------------------------------


@pytest.fixture
def noise() -> Iterator[None]:
    @register_data("noise")
    def noise(seed: int) -> Source:
        x = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(5))
        return Source(
            "noise", x, torch.zeros(30, dtype=torch.int64), x[:0], torch.zeros(0, dtype=torch.int64), 4
        )

    yield
    SOURCES.remove("noise")


def told(name: str, **tables: Any) -> Any:
    given = {
        "rounds": 2,
        "local": {"batch": 8},
        "model": {"name": "mlp", "hidden": 3},
        "models": [{"name": "mlp", "hidden": 8, "clients": [1, 2, 4]}],
        "public": {"name": "noise", "count": 20},
        "evaluate": {"personal_models": "yes"},
        **tables,
    }
    return experiment_of(name, **given)


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("name", ["fedmd", "feddf"])
def test_nodes_load_the_public_samples_themselves(name: str, tmp_path: Path) -> None:
    clients = classification()
    simulated = execute(told(name), data=clients, store=False)

    def node(place: int, block: list[int]) -> Node:
        return Node(
            lambda experiment: part_of(clients, block),
            tmp_path / str(place),
            policy=Policy(personal_models=True),
        )

    grid = HereGrid({place: node(place, block) for place, block in enumerate([[0, 3], [1, 4], [2, 5]], 1)})
    real = serve_on(grid, told(name), Service(min_nodes=3), out=tmp_path / "run")
    assert real.personal is not None
    assert simulated.personal is not None
    for one, other in zip(real.personal, simulated.personal, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]
    largest = max(sum(map(len, parts.values())) for _, parts in grid.sent)
    assert name == "feddf" or largest < 20 * 64 * 4  # the samples are not in any message


@pytest.mark.usefixtures("noise")
def test_a_node_with_other_public_samples_is_refused(tmp_path: Path) -> None:
    from sartor.errors import SartorError
    from sartor.remote.node import _same_public

    with pytest.raises(SartorError, match=r"of the run \(noise\) are others at this node than at the server"):
        _same_public(told("fedmd"), "0" * 64)
    SOURCES.remove("noise")
    try:
        with pytest.raises(
            SartorError, match=r"of the run \(noise\) cannot be loaded at this node: public.name"
        ):
            _same_public(told("fedmd"), "0" * 64)
    finally:
        register_data("noise")(lambda: None)


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({}, r"fedmd: learns from public samples; say which, by public.name"),
        ({"name": "nois"}, r"public.name = 'nois': unknown name; did you mean noise"),
        ({"name": "mnist", "path": "a.py:b"}, r"public.name: the samples are those of public.path"),
        ({"path": "a.npz"}, r"public.path = 'a.npz': expected a function in a file"),
        ({"count": 3}, r"public.count: of no samples; give public.name"),
        ({"name": "noise", "count": 31}, r"public.count: 31, but noise has 30 samples"),
    ],
)
def test_what_is_refused(public: dict[str, Any], message: str) -> None:
    from sartor.errors import SartorError

    with pytest.raises(SartorError, match=message):
        execute(told("fedmd", public=public), data=classification(), store=False)


def test_public_samples_are_shaped_as_the_clients() -> None:
    with pytest.raises(
        SettingError, match=r"public: its samples have shape \[1, 8, 8\], those of clients \[5\]"
    ):
        execute(
            from_mapping({"algorithm": "fedmd", "rounds": 0, "public": {"name": "digits"}}),
            data=classification(shape=(5,)),
            store=False,
        )
