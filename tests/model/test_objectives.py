"""Objectives: losses by PyTorch's own, parameters, one's own, and what is shown of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from sartor.errors import SettingError
from sartor.model.batch import Batch
from sartor.model.objectives import (
    OBJECTIVES,
    Classification,
    MultiLabel,
    NextToken,
    Objective,
    Regression,
    Segmentation,
    objective_of,
)
from sartor.model.task import Task
from sartor.runs.experiment import load, to_mapping


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cross_entropy_has_weights_and_smoothing() -> None:
    outputs, y = drawn(0, 7, 3), torch.arange(7) % 3
    for weights, smoothing in (((), 0.0), ((1.0, 2.0, 5.0), 0.0), ((), 0.2), ((1.0, 2.0, 5.0), 0.2)):
        found = Classification(weights=weights, label_smoothing=smoothing).losses(outputs, y)
        weight = torch.tensor(weights, dtype=torch.float64) if weights else None
        expected = F.cross_entropy(outputs, y, weight, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(found, expected)


def test_the_other_losses_are_pytorchs() -> None:
    outputs, y = drawn(1, 7, 3), drawn(2, 7, 3)
    for loss, function in (("mse", F.mse_loss), ("mae", F.l1_loss)):
        expected = function(outputs, y, reduction="none").mean(1)  # type: ignore[operator]
        torch.testing.assert_close(Regression(loss=loss).losses(outputs, y), expected)
    huber = F.huber_loss(outputs, y, reduction="none", delta=0.3).mean(1)
    torch.testing.assert_close(Regression(loss="huber", delta=0.3).losses(outputs, y), huber)
    labels, weight = (y > 0).long(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    binary = F.binary_cross_entropy_with_logits(outputs, labels.double(), pos_weight=weight, reduction="none")
    torch.testing.assert_close(
        MultiLabel(positive_weights=(1.0, 2.0, 3.0)).losses(outputs, labels), binary.mean(1)
    )


def test_places_that_count_nowhere_are_left_out() -> None:
    scores, y = drawn(3, 4, 5, 6), torch.arange(24).reshape(4, 6) % 5
    y[0, 1:], y[1] = -100, -100
    each = F.cross_entropy(scores.transpose(1, 2).transpose(1, 2), y, reduction="none")  # 0 where ignored
    count = (y != -100).sum(1).clamp(min=1)
    torch.testing.assert_close(Segmentation().losses(scores, y), each.sum(1) / count)
    torch.testing.assert_close(NextToken().losses(scores.transpose(1, 2), y), each.sum(1) / count)
    shifted = NextToken(shift=True).losses(scores.transpose(1, 2), y)
    torch.testing.assert_close(shifted, NextToken().losses(scores.transpose(1, 2)[:, :-1], y[:, 1:]))


def test_what_is_given_names_an_objective() -> None:
    assert objective_of("multi-label") == MultiLabel()
    assert objective_of(Regression) == Regression()
    assert objective_of(nn.MSELoss()).name == "own"
    with pytest.raises(SettingError, match=r"objective.name = 'multilabel': .*did you mean multi-label"):
        objective_of("multilabel")
    with pytest.raises(SettingError, match=r"give a name, a sartor\.Objective or a loss function, got 7"):
        objective_of(7)


def test_an_experiment_has_an_objective_with_its_parameters() -> None:
    experiment = load(None, ["objective.name=regression", "objective.loss=huber", "objective.delta=2"])
    assert experiment.objective.settings == Regression(loss="huber", delta=2.0)
    assert to_mapping(experiment)["objective"] == {"name": "regression", "loss": "huber", "delta": 2.0}
    with pytest.raises(SettingError, match=r"objective.weights: unknown key.*objective.name is regression"):
        load(None, ["objective.name=regression", "objective.weights=[1]"])


def test_what_was_given_in_python_is_in_the_experiment_where_it_can_be() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    run: Any = {"data": {"a": (x, y)}, "rounds": 1, "store": False}
    for objective in (Regression(loss="mae"), {"name": "regression", "loss": "mae"}):
        result = sartor.run(objective=objective, **run)
        assert (result.summary["objective"], result.summary["headline"]) == ("regression", "mae")
    task = Task(nn.Linear(3, 1), objective=Regression(loss="mae"))
    assert sartor.run(model=task, **run).summary["headline"] == "mae"
    with pytest.raises(SettingError, match="objective: a Task has one"):
        sartor.run(model=task, objective="regression", **run)


class Relative(Objective):
    """An objective of one's own, with a metric."""

    targets = "number"
    measures = {"off": lambda outputs, y: (outputs[:, 0] - y).abs()}  # noqa: RUF012

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs[:, 0] - y).square()


def test_an_own_objective_has_its_own_metrics() -> None:
    x = torch.randn(30, 3)
    data = {"a": (x, x.sum(1)), "b": (x, -x.sum(1))}
    results = [
        sartor.run(model="mlp", data=data, objective=Relative(), rounds=2, engine=engine, store=False)
        for engine in ("loop", "stacked")
    ]
    one, other = (result.summary["last"]["shared_pooled"] for result in results)
    assert results[0].summary["headline"] == "off"
    assert one["off"] == pytest.approx(other["off"], rel=1e-5)
    assert results[0].w is not None
    outputs = results[0].model()(torch.cat([x, x]))[:, 0]
    assert 0 < one["off"] < float((outputs - torch.cat([x.sum(1), -x.sum(1)])).abs().max())
    headline = {"headline": "loss"}
    assert (
        sartor.run(
            model="mlp", data=data, objective=Relative(), rounds=1, evaluate=headline, store=False
        ).summary["headline"]
        == "loss"
    )


def test_a_metric_of_an_own_objective_that_is_not_known_is_refused() -> None:
    """It would not be shown, or less of it be taken for better."""
    data = {"a": (torch.randn(9, 3), torch.randn(9))}
    for field, name, hint in (("metrics", "rmsee", "rmse"), ("more_is_better", "of", "off")):
        wrong = type("Wrong", (Relative,), {field: (name,)})()
        with pytest.raises(
            SettingError, match=rf"Wrong.{field} = '{name}': unknown metric; did you mean {hint}"
        ):
            sartor.run(model="mlp", data=data, objective=wrong, rounds=1, store=False)


def test_an_objective_can_be_registered() -> None:
    @sartor.register_objective("quartic")
    @dataclass(frozen=True)
    class Quartic(Objective):
        power: int = sartor.setting(4, "of the error", low=1)
        targets = "number"

        def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
            return (outputs[:, 0] - y).abs() ** self.power

    try:
        x = torch.randn(20, 3)
        result = sartor.run(
            data={"a": (x, x[:, 0])}, objective={"name": "quartic", "power": 2}, rounds=1, store=False
        )
        assert result.summary["objective"] == "quartic"
    finally:
        OBJECTIVES.remove("quartic")


def test_classes_of_a_task_are_those_of_the_data() -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    task = Task(nn.Linear(3, 2), loss=lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"))
    result = sartor.run(model=task, data={"a": (x, y)}, rounds=1, store=False)
    assert result.summary["accuracy"]["shared_pooled"] is not None
    assert (task.classes, result.task.classes) == (None, 2)


def test_a_guess_beyond_the_classes_that_occur_counts_as_wrong() -> None:
    module = nn.Linear(1, 3, bias=True)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([0.0, 0.0, 9.0]))
    x, y = torch.zeros(20, 1), torch.arange(20) % 2
    result = sartor.run(model=module, data={"a": (x, y)}, rounds=0, store=False)
    assert result.summary["accuracy"]["shared_pooled"] == 0.0


def test_an_imbalanced_run_is_not_judged_by_accuracy_and_says_what_is_wrong() -> None:
    x, y = torch.zeros(100, 2), (torch.arange(100) % 10 == 0).long()
    result = sartor.run(data={"a": (x, y), "b": (x, y)}, rounds=2, model="softmax", store=False)
    summary = result.summary
    assert summary["headline"] == "balanced_accuracy"
    assert summary["last"]["shared_local"]["balanced_accuracy"] == 0.5
    assert summary["accuracy"]["shared_pooled"] == pytest.approx(0.9)
    assert summary["best_on_test"]["shared_pooled"] == {"balanced_accuracy": 0.5, "round": 1}
    assert summary["notes"] == [
        "shared_pooled: the model always answers the same class, 0",
        "shared_local: at 2 of 2 clients with several classes the model answers the same class, 0",
    ]


def test_losses_of_a_task_are_those_of_its_objective() -> None:
    task = Task(nn.Linear(3, 2).double(), objective="multi-label")
    x, y = drawn(5, 4, 3), (drawn(6, 4, 2) > 0).long()
    outputs = task.outputs(task.initial(), x)
    torch.testing.assert_close(task.losses(task.initial(), Batch(x, y)), MultiLabel().losses(outputs, y))
    assert torch.equal(task.predict(task.initial(), x), (outputs > 0).long())
