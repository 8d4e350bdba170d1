"""What stands in place of means: what a group is, that nothing changes without a rule, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import METHODS, RAGGED, classification, federation_of, model_task, module_of, play
from sartor.algorithms import make, registered
from sartor.algorithms.split_models.prototypes import Prototypes, merged
from sartor.errors import SartorError, SettingError
from sartor.federation.exchange import Replies
from sartor.federation.grouped import GroupedFederation
from sartor.federation.reduction import (
    AGGREGATES,
    Mean,
    Reducer,
    Reduction,
    Selection,
    register_aggregate,
)
from sartor.model.task import Task
from sartor.robust.centres import Median
from sartor.runs.experiment import describe_settings, fingerprint, from_mapping, load, to_mapping
from sartor.runs.setup import federation_settings, refuse_rule, set_up

COHORTS = [[0, 2, 3, 5], [1, 2, 4], [0, 1, 2, 3, 4, 5]]


@dataclass(frozen=True)
class Asked(Reduction):
    """The mean; every question is noted."""

    asked: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def reduce(self, key: Any, rows: Tensor, weights: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.asked.append((rows, weights))
        return super().reduce(key, rows, weights, state)


@dataclass(frozen=True)
class Kept(Selection):
    """All rows; every question is noted."""

    asked: ClassVar[list[Tensor]] = []

    def keep(self, key: Any, rows: Tensor, weights: Tensor) -> Tensor:
        self.asked.append(rows)
        return super().keep(key, rows, weights)


@dataclass(frozen=True)
class Slow(Reduction):
    """Half of the last value and half of the mean, so that the state shows."""

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"last": torch.zeros_like(like)}

    def reduce(self, key: Any, rows: Tensor, weights: Tensor, state: Any) -> tuple[Tensor, Any]:
        value = (state["last"] + weights @ rows) / 2
        return value, {"last": value}


@dataclass(frozen=True)
class First(Selection):
    """The first row alone."""

    def keep(self, key: Any, rows: Tensor, weights: Tensor) -> Tensor:
        return torch.arange(len(rows), device=rows.device) == 0


@dataclass(frozen=True)
class Nobody(Selection):
    """No row at all."""

    def keep(self, key: Any, rows: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)


@pytest.fixture
def named() -> Iterator[None]:
    """Rules of this file, by name."""
    for name, cls in (("slow", Slow), ("first", First)):
        register_aggregate(name)(cls)
    yield
    for name in ("slow", "first"):
        AGGREGATES.remove(name)


def ended(name: str, rule: Reduction | None, engine: str = "loop", cohorts: Any = COHORTS) -> Any:
    data = classification(RAGGED, shape=(5,), classes=4, dtype=torch.float64)
    data = dataclasses.replace(data, validation=data.test, public_x=data.pooled_x[:9])
    task = Task(module_of("mlp", (5,), 4, hidden=6), classes=4, head="output")
    settings = {"buffers": registered()[name].buffers, "aggregate": rule}
    federation = federation_of(engine, task, data, local={"batch": 32}, **settings)
    algorithm = make(registered()[name], lr=0.05)
    federation.hyper = algorithm.hyper
    return play(algorithm, federation, cohorts), federation


# Groups ----------------------------------------------------------------------------------------------------


def test_a_sum_is_what_stands_for_the_group_times_its_weight() -> None:
    rows, weights = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 8.0]]), torch.tensor([0.5, 0.0, 1.5])
    reducer = Reducer(Asked())
    Asked.asked.clear()
    assert torch.equal(reducer.sum("x", rows, weights), weights @ rows)
    ((group, shares),) = Asked.asked
    assert torch.equal(group, rows[[0, 2]])  # a row of weight 0 is not in the group
    assert torch.equal(shares, torch.tensor([0.25, 0.75]))
    assert torch.equal(Reducer(First()).sum("x", rows, weights), 2 * rows[0])


def test_an_empty_group_is_zero_and_a_negative_weight_is_refused() -> None:
    reducer, rows = Reducer(Asked()), torch.ones(2, 3, 4)
    assert torch.equal(reducer.sum("x", rows, torch.zeros(2)), torch.zeros(3, 4))
    with pytest.raises(SartorError, match="negative weight"):
        reducer.sum("x", rows, torch.tensor([1.0, -1.0]))


def test_whole_numbers_and_other_quantities_are_added_up() -> None:
    counts = torch.tensor([[1, 2], [3, 4]])
    assert Reducer(First()).sum("n", counts, torch.ones(2)).tolist() == [4, 6]
    rows = torch.tensor([[1.0], [3.0]])
    assert Reducer(First(of=("delta",))).sum("c", rows, torch.ones(2)).tolist() == [4.0]
    assert Reducer(First(of=("delta",))).sum("delta", rows, torch.ones(2)).tolist() == [2.0]


def test_groups_of_one_matrix_share_a_selection() -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 5.0], [4.0, 1.0]])
    matrix = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 2.0]])
    assert torch.equal(Reducer().sums("x", rows, matrix), matrix @ rows)
    assert torch.allclose(Reducer(Asked()).sums("x", rows, matrix), matrix @ rows)
    # The first row is used alone; the second group does not have it and keeps its own.
    assert torch.equal(Reducer(First()).sums("x", rows, matrix), torch.stack([rows[0], matrix[1] @ rows]))


def test_where_a_rule_would_use_nobody_all_are_used() -> None:
    rows, weights = torch.tensor([[1.0, 0.0], [2.0, 5.0]]), torch.tensor([0.5, 0.5])
    assert torch.equal(Reducer(Nobody()).sum("x", rows, weights), weights @ rows)
    assert torch.equal(Reducer(Nobody()).sums("x", rows, weights[None]), weights[None] @ rows)


def test_only_a_rule_that_selects_says_whom_it_trusts() -> None:
    rows = torch.zeros(3, 2)
    assert Reducer().trusted("w", rows).all()
    assert Reducer(First()).trusted("w", rows).tolist() == [True, False, False]
    with pytest.raises(SettingError, match="goes by each client's reply"):
        Reducer(Asked()).trusted("w", rows)


# In a federation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "spfl", "fedproto", "ma-fsvrg", "fedcac"])
def test_a_rule_that_is_the_mean_is_the_method(name: str) -> None:
    plain, _ = ended(name, None)
    same, _ = ended(name, Mean())
    ruled, _ = ended(name, Asked())
    for field in dataclasses.fields(plain):
        one, two, three = (getattr(server, field.name) for server in (plain, same, ruled))
        if isinstance(one, Tensor):
            assert torch.equal(one, two), field.name
            # Groups of MA-FSVRG have their mean itself, not its projection.
            assert name == "ma-fsvrg" or torch.allclose(one, three, atol=1e-6), field.name


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_place_for_a_rule_that_it_says(name: str) -> None:
    reduces, everyone = registered()[name].reduces, [[0, 1, 2, 3, 4, 5]] * 2
    Asked.asked.clear()
    Kept.asked.clear()
    if reduces == "means":
        ended(name, Asked(), cohorts=everyone)
        assert Asked.asked
    elif reduces == "rows":
        ended(name, Kept(), cohorts=everyone)
        assert Kept.asked
        with pytest.raises(SettingError, match="goes by each client's reply"):
            ended(name, Asked(), cohorts=everyone)
    else:
        assert reduces == "nothing"
        experiment = from_mapping({"algorithm": name})
        refuse_rule(experiment)
        choice = dataclasses.replace(experiment.aggregate, name="kept", settings=Kept())
        with pytest.raises(SettingError, match="has no place for it; leave"):
            refuse_rule(dataclasses.replace(experiment, aggregate=choice))


def test_prototypes_are_reduced_class_by_class_among_those_who_hold_it() -> None:
    """Rows of features and a count: two clients hold class 0, all class 1; one lies about its count."""
    first, second = (
        [[2.0, 2.0], [0.0, 0.0], [9.0, 3.0], [7.0, -2.0]],
        [[3.0, 1], [5.0, 1], [80.0, 1], [7.0, 1]],
    )
    sums = torch.tensor([first, second]).transpose(0, 1)
    numbers = np.arange(4)
    replies = Replies(numbers, numbers + 1, {"sums": sums}, torch.device("cpu"), torch.float32)
    replies = dataclasses.replace(replies, reducer=Reducer(Median(weights="equal")))
    found = merged(Prototypes(torch.zeros(2, 1), torch.zeros(2)), replies)
    assert found.prototypes[:, 0].tolist() == [(1.0 + 3.0) / 2, (5.0 + 7.0) / 2]


def test_a_rule_has_all_rows_where_sums_would_be_folded() -> None:
    Asked.asked.clear()
    data = classification(RAGGED, shape=(5,), classes=4)
    federation = federation_of("loop", model_task(data=data), data, aggregate=Asked(), fold_bytes=1)
    play(make(registered()["fedavg"], lr=0.05), federation, [[0, 1, 2, 3, 4, 5]])
    assert [len(rows) for rows, _ in Asked.asked] == [6]


def test_a_method_of_ones_own_that_takes_no_mean_is_told_after_a_round() -> None:
    with pytest.raises(SettingError, match="Kept has no effect"):
        ended("separate", Kept())
    with pytest.raises(SettingError, match="is for 'control'; the means that the method takes: delta"):
        ended("fedavg", Asked(of=("control",)))


def test_buffers_go_by_the_rule_too() -> None:
    Asked.asked.clear()
    data = classification(RAGGED, shape=(1, 8, 8), classes=4)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4))
    task = Task(module, classes=4)
    federation = federation_of("loop", task, data, aggregate=Asked(), local={"batch": 64})
    play(make(registered()["fedavg"], lr=0.05), federation, [[1, 2, 3]])
    assert {rows.shape[1] for rows, _ in Asked.asked} == {task.size, task.buffer_size}


def test_engines_agree_and_states_are_the_servers() -> None:
    loop, first = ended("scaffold", Slow())
    stacked, second = ended("scaffold", Slow(), "stacked")
    assert torch.allclose(loop.w, stacked.w, atol=1e-6)
    assert torch.allclose(loop.c, stacked.c, atol=1e-6)
    saved = first.reducer.save()
    assert saved.keys() == {"delta__0__last", "control__0__last"} == second.reducer.save().keys()


def test_a_run_goes_on_with_what_the_rule_keeps(named: None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 4, "seed": 1}
    experiment = tmp_path / "e.toml"
    experiment.write_text('rounds = 4\n[aggregate]\nname = "slow"\n')
    whole = sartor.run("scaffold", experiment=experiment, out=tmp_path / "whole", **settings)
    sartor.run("scaffold", experiment=experiment, rounds=2, out=tmp_path / "half", **settings)
    resumed = sartor.resume(tmp_path / "half", rounds=4)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_a_rule_that_keeps_a_value_is_refused_for_models_of_ones_own(named: None) -> None:
    groups = [{"name": "mlp", "every": 2}, {"name": "linear", "every": 2, "first": 1}]
    mapping = {"algorithm": "heterofl", "data": {"clients": 4}, "aggregate": {"name": "slow"}}
    setup = set_up(from_mapping({**mapping, "algorithm": "fedproto", "models": [groups[0]]}))
    with pytest.raises(SettingError, match="keeps a value from round to round"):
        GroupedFederation(setup.task, None, federation_settings(setup.experiment))  # type: ignore[arg-type]


# In an experiment ------------------------------------------------------------------------------------------


def test_an_experiment_says_it_and_is_written_back(named: None) -> None:
    experiment = load(None, ["aggregate.name=slow", 'aggregate.of=["delta"]'])
    assert experiment.aggregate.settings == Slow(of=("delta",))
    assert from_mapping(to_mapping(experiment)) == experiment
    assert fingerprint(experiment) != fingerprint(load(None))
    assert {row.only_for for row in describe_settings() if row.key == "aggregate.of"} >= {
        "aggregate.name = slow"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["aggregate.name=slo"], "aggregate.name = 'slo': unknown name; did you mean slow?"),
        (["aggregate.share=0.1"], "aggregate.share: unknown key"),
    ],
)
def test_what_is_wrong_is_said(named: None, words: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load(None, words)


def test_a_rule_that_is_none_is_refused_when_it_is_registered() -> None:
    with pytest.raises(SartorError, match="expected a class that extends"):
        register_aggregate("none")(int)  # type: ignore[type-var]
