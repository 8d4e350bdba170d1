"""Epochs that are drawn for each client and round: the law, exact counts, and the same on all engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from test_lockstep import SEEDS, SIZES, alone, assert_same_run, prepared, together
from torch import Tensor

import sartor
from helpers import RAGGED, federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.references.fedavg import local_training
from sartor.client.law import Law
from sartor.client.local import Client
from sartor.client.settings import Local
from sartor.errors import SettingError
from sartor.federation import Reply
from sartor.model.batch import Batch
from sartor.runs.experiment import fingerprint, from_mapping, load, to_mapping

COHORTS = [[0, 1, 2, 3, 4, 5], [1, 3, 5], [0, 2, 4, 5]]
DRAWN = {"batch": 8, "epochs": (1, 4), "partial": 0.3}


def drawn(seed: int, round: int, clients: int, **law: Any) -> Tensor:
    return Law(**law).epochs(seed, torch.tensor(round), torch.arange(clients))


def test_every_number_of_epochs_is_as_likely_and_nothing_else_happens() -> None:
    epochs = drawn(0, 1, 40000, least=2, most=5)
    shares = torch.bincount(epochs, minlength=7).double() / 40000
    assert torch.allclose(shares, torch.tensor([0, 0, 0.25, 0.25, 0.25, 0.25, 0]).double(), atol=0.01)
    some = drawn(0, 1, 40000, least=5, most=5, partial=0.4)
    shares = torch.bincount(some, minlength=6).double() / 40000
    assert torch.allclose(shares, torch.tensor([0, 0.1, 0.1, 0.1, 0.1, 0.6]).double(), atol=0.01)
    assert float(some.double().mean()) == pytest.approx(Law(5, 5, 0.4).mean, abs=0.02)
    assert drawn(0, 1, 100, least=1, most=1, partial=1.0).tolist() == [1] * 100


def test_draws_are_keyed_by_seed_round_and_client() -> None:
    law = {"least": 1, "most": 1000}
    first = drawn(0, 1, 50, **law)
    assert torch.equal(first[20:30], Law(**law).epochs(0, torch.tensor(1), torch.arange(20, 30)))
    for seed, round in ((1, 1), (0, 2)):
        assert float((drawn(seed, round, 50, **law) == first).double().mean()) < 0.1
    both = Law(**law).epochs(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([7, 7]))
    assert both.tolist() == [int(first[7]), int(drawn(1, 1, 50, **law)[7])]


def told_and_taken(client: Client, hyper: Any, w: Tensor) -> Reply:
    """K_i as the client says it, and as many batches and samples as there are."""

    def add(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        return carry[0] + 1, carry[1] + batch.size

    start = (torch.zeros_like(client.n), torch.zeros_like(client.n, dtype=w.dtype))
    steps, samples = client.scan(add, start, client.batches())
    return Reply(told=client.steps(), taken=steps, samples=samples, work=client.work(0.5))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("batch", [0, 8])
def test_steps_are_counted_as_they_are_taken(engine: str, batch: int) -> None:
    federation = federation_of(engine, *task_and_data(), local={**DRAWN, "batch": batch})
    federation.round = 3
    replies = federation.map(told_and_taken, [4, 0, 2, 5], shared={"w": torch.zeros(1).double()})
    law = Law(1, 4, 0.3)
    epochs = law.epochs(federation.seed, torch.tensor(3), torch.tensor([4, 0, 2, 5]))
    sizes = torch.tensor(RAGGED)[[4, 0, 2, 5]]
    per_epoch = torch.ones_like(sizes) if batch == 0 else -(-sizes // batch)
    assert replies["told"].tolist() == replies["taken"].tolist() == (epochs * per_epoch).tolist()
    assert replies["samples"].tolist() == (epochs * sizes).tolist()
    assert replies["work"].tolist() == pytest.approx((0.5 * epochs * per_epoch).tolist())
    assert len(set(epochs.tolist())) > 1


def test_a_client_does_what_it_does_with_as_many_epochs() -> None:
    """The batches of the drawn epochs are the first ones of any longer training."""
    task, data = task_and_data()
    one = federation_of("loop", task, data, local=DRAWN)
    one.round = 2
    epochs = Law(1, 4, 0.3).epochs(0, torch.tensor(2), torch.arange(6)).tolist()
    found = one.map(local_training, range(6), shared={"w": task.initial()})["delta"]
    for client, count in enumerate(epochs):
        other = federation_of("loop", task, data, local={"batch": 8, "epochs": count})
        other.round = 2
        alone = other.map(local_training, [client], shared={"w": task.initial()})["delta"]
        assert torch.equal(found[client], alone[0])


@pytest.mark.parametrize("name", ["fednova", "per-fedavg"])
def test_engines_and_nodes_agree(name: str, tmp_path: Path) -> None:
    task, data = task_and_data()
    ended = []
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, task, data, local=DRAWN)
        ended.append(play(method(name, federation, lr=0.05), federation, COHORTS).w)
    assert torch.allclose(ended[0], ended[1], rtol=1e-9, atol=1e-11)
    grid = HereGrid(nodes_of(data, task, [[0, 3], [1, 4], [2, 5]], tmp_path))
    federation = federation_on(grid, experiment_of(name, local=dict(DRAWN)), task)
    assert torch.equal(play(method(name, federation, lr=0.05), federation, COHORTS).w, ended[0])


def test_seeds_in_lockstep_draw_their_own(tmp_path: Path) -> None:
    given = {"local": {**DRAWN, "epochs": [1, 4]}, "evaluate": {"every": 0}}
    setups = [prepared("fedavg", seed, sizes, **given) for seed, sizes in zip(SEEDS, SIZES, strict=True)]
    for one, other in zip(alone(setups, tmp_path, "loop"), together(setups, tmp_path), strict=True):
        assert_same_run(one, other)


def test_fednova_has_the_fixed_point_of_its_paper_when_work_is_drawn() -> None:
    """On quadratics of one curvature: Δ = (Σ q τ) Σ q Δ_i / τ_i with the τ_i that were drawn."""
    centres = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-4.0, 8.0]], dtype=torch.float64)
    task, data = quadratics(centres, torch.ones_like(centres), (2, 4, 3))
    federation = federation_of("loop", task, data, local={"batch": 1, "epochs": (1, 5)})
    server = play(method("fednova", federation, lr=0.1), federation, [[0, 1, 2]] * 3)
    w, sizes = np.zeros(2), np.array([2, 4, 3])
    for round in (1, 2, 3):
        tau = sizes * drawn(federation.seed, round, 3, least=1, most=5).numpy()
        delta = (1 - 0.9**tau)[:, None] * (centres.numpy() - w)
        q = sizes / sizes.sum()
        w = w + (q @ tau) * (q @ (delta / tau[:, None]))
    assert server.w.tolist() == pytest.approx(w.tolist(), rel=1e-12)


def test_a_range_is_a_setting_like_others(tmp_path: Path) -> None:
    plain = load(None, ["local.epochs=3"])
    some = load(None, ["local.epochs=[2, 5]", "local.partial=0.5"])
    assert some.local == Local(epochs=(2, 5), partial=0.5)
    assert from_mapping(to_mapping(some)) == some
    assert fingerprint(some) != fingerprint(dataclasses.replace(some, local=plain.local))
    for wrong, told in (
        ("local.epochs=[5, 2]", r"local: epochs = \[5, 2\]: a range has two ends"),
        ("local.epochs=[0, 2]", "from 1 on"),
        ("local.epochs=[1, 2, 3]", "two ends"),
        ("local.partial=1.5", r"local\.partial: must be at least 0, at most 1"),
    ):
        with pytest.raises(SettingError, match=told):
            load(None, [wrong])
    with pytest.raises(SettingError, match="steps are for all clients the same"):
        load(None, ["local.epochs=[1, 2]", "local.steps=3"])


def test_a_run_that_was_interrupted_draws_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "clients": 4,
        "seed": 1,
        "model": "softmax",
        "engine": {"name": "loop"},
        "local": {"epochs": [1, 3]},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 1},
    }
    whole = sartor.run("fedavg", rounds=4, out=tmp_path / "whole", **settings)
    sartor.run("fedavg", rounds=2, out=tmp_path / "half", **settings)
    half = sartor.resume(tmp_path / "half", rounds=4)
    assert torch.equal(whole.w, half.w)
