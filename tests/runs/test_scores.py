"""Metrics of what clients count, against scikit-learn's of the predictions themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as known
from torch import Tensor

from sartor.errors import SettingError
from sartor.model.objectives import (
    SCORE_STEP,
    Classification,
    MultiLabel,
    NextToken,
    Objective,
    Regression,
    Segmentation,
)
from sartor.runs.metrics import METRICS, measured


def counted(
    objective: Objective, outputs: Tensor, targets: Tensor, width: int | None, names: tuple[str, ...]
) -> dict[str, float]:
    """The metrics of samples that are counted in two parts, the second with a sample of padding."""
    what = measured(objective, width, names)
    tallies = objective.tallies(width)
    half = len(outputs) // 3
    weight = torch.ones(len(outputs) - half + 1)
    weight[-1] = 0
    later = torch.cat([outputs[half:], outputs[:1]]), torch.cat([targets[half:], targets[:1]])
    answers: dict[str, Any] = {"n": np.array([float(len(outputs))])}
    for name in what.tallies:
        first = tallies[name].count(outputs[:half], targets[:half], None)
        assert first.shape == tallies[name].shape
        second = tallies[name].count(*later, weight)
        answers[name] = (first + second).double().numpy()[None]
    return {name: float(value[0]) for name, value in what.scores(answers).items()}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_grid(scores: Tensor) -> Tensor:
    return (scores / SCORE_STEP).round() * SCORE_STEP


@pytest.mark.parametrize("classes", [2, 4])
def test_a_classifier_has_scikit_learns_scores(classes: int) -> None:
    y = (drawn(0, 200).abs() * 1.5).long().clamp(max=classes - 1)
    outputs = drawn(1, 200, classes) + 2 * torch.nn.functional.one_hot(y, classes)
    names = ("accuracy", "balanced_accuracy", "log_loss", "brier", "macro_f1", "micro_recall", "roc_auc")
    found = counted(Classification(), outputs, y, classes, (*names, "average_precision", "calibration_error"))
    likely, guess = outputs.softmax(1).numpy(), outputs.argmax(1).numpy()
    assert found["accuracy"] == pytest.approx(known.accuracy_score(y, guess))
    assert found["balanced_accuracy"] == pytest.approx(known.balanced_accuracy_score(y, guess))
    assert found["log_loss"] == pytest.approx(known.log_loss(y, likely))
    assert found["macro_f1"] == pytest.approx(known.f1_score(y, guess, average="macro"))
    assert found["micro_recall"] == pytest.approx(known.recall_score(y, guess, average="micro"))
    hot = np.eye(classes)[y.numpy()]
    halved = 2 if classes == 2 else 1
    assert found["brier"] == pytest.approx(((likely - hot) ** 2).sum(1).mean() / halved)
    if classes == 2:
        assert found["brier"] == pytest.approx(known.brier_score_loss(y, likely[:, 1]))
    # Scores closer than 1/64 in log-odds count as equal: few pairs of 200 samples are.
    scores = likely[:, 1] if classes == 2 else likely
    assert found["roc_auc"] == pytest.approx(known.roc_auc_score(y, scores, multi_class="ovr"), abs=2e-3)
    truth = y.numpy() if classes == 2 else hot
    assert found["average_precision"] == pytest.approx(known.average_precision_score(truth, scores), abs=4e-3)
    sure, right = likely.max(1), guess == y.numpy()
    bins = np.clip(np.ceil(sure * 15), 1, 15)
    apart = sum(abs(sure[bins == at].sum() - right[bins == at].sum()) for at in range(1, 16)) / 200
    assert found["calibration_error"] == pytest.approx(apart)


def test_scores_of_labels_on_the_grid_are_exact() -> None:
    outputs, y = on_grid(drawn(2, 90, 3)), (drawn(3, 90, 3) > 0.4).float()
    names = ("macro_f1", "micro_f1", "macro_precision", "micro_recall", "accuracy", "roc_auc")
    found = counted(MultiLabel(), outputs, y, 3, (*names, "average_precision"))
    guess = (outputs > 0).long()
    for average in ("macro", "micro"):
        assert found[f"{average}_f1"] == pytest.approx(known.f1_score(y, guess, average=average))
    assert found["macro_precision"] == pytest.approx(known.precision_score(y, guess, average="macro"))
    assert found["micro_recall"] == pytest.approx(known.recall_score(y, guess, average="micro"))
    assert found["accuracy"] == pytest.approx(1 - known.hamming_loss(y, guess))
    assert found["roc_auc"] == pytest.approx(known.roc_auc_score(y, outputs))
    assert found["average_precision"] == pytest.approx(known.average_precision_score(y, outputs))


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_regression_has_scikit_learns_errors(shape: tuple[int, ...]) -> None:
    y = 1000 + drawn(4, 80, *shape)
    outputs = (y + 0.3 * drawn(5, 80, *shape)).reshape(80, -1)
    width = outputs.shape[1]
    found = counted(Regression(), outputs, y, width, ("mae", "rmse", "r2"))
    truth = y.reshape(80, -1)
    assert found["mae"] == pytest.approx(known.mean_absolute_error(truth, outputs))
    assert found["rmse"] == pytest.approx(known.mean_squared_error(truth, outputs) ** 0.5)
    assert found["r2"] == pytest.approx(known.r2_score(truth, outputs), abs=1e-6)


def test_a_segmentation_counts_pixels_but_those_that_count_nowhere() -> None:
    y = (drawn(6, 9, 4, 5).abs() * 2).long().clamp(max=2)
    y[0, 0] = -100
    outputs = drawn(7, 9, 3, 4, 5)
    found = counted(Segmentation(), outputs, y, 3, ("iou", "dice", "accuracy"))
    there = y != -100
    truth, guess = y[there].numpy(), outputs.argmax(1)[there].numpy()
    assert found["iou"] == pytest.approx(known.jaccard_score(truth, guess, average="macro"))
    assert found["dice"] == pytest.approx(known.f1_score(truth, guess, average="macro"))
    assert found["accuracy"] == pytest.approx(known.accuracy_score(truth, guess))


@pytest.mark.parametrize("shift", [False, True])
def test_perplexity_is_over_all_tokens(shift: bool) -> None:
    y = (drawn(8, 12, 6).abs() * 3).long().clamp(max=4)
    y[:, -1] = -100
    outputs = drawn(9, 12, 6, 5)
    found = counted(NextToken(shift=shift), outputs, y, None, ("perplexity", "accuracy"))
    given, wanted = (outputs[:, :-1], y[:, 1:]) if shift else (outputs, y)
    there = wanted != -100
    truth, likely = wanted[there].numpy(), given[there].softmax(-1).numpy()
    assert found["perplexity"] == pytest.approx(np.exp(known.log_loss(truth, likely, labels=range(5))))
    assert found["accuracy"] == pytest.approx(known.accuracy_score(truth, likely.argmax(1)))


def test_a_client_with_one_class_has_no_curve() -> None:
    outputs, y = drawn(10, 5, 2), torch.ones(5, dtype=torch.int64)
    found = counted(Classification(), outputs, y, 2, ("roc_auc", "balanced_accuracy"))
    assert np.isnan(found["roc_auc"])
    assert found["balanced_accuracy"] == float((outputs.argmax(1) == 1).double().mean())


def test_a_metric_is_for_some_objectives_only() -> None:
    with pytest.raises(SettingError, match=r"evaluate.metrics = 'rmse': unknown metric.*classification"):
        measured(Classification(), 3, ("rmse",))
    with pytest.raises(SettingError, match=r"evaluate.headline = 'rocauc': .*did you mean roc_auc"):
        measured(Classification(), 3, (), "rocauc")
    assert measured(Classification(), 3, (), "loss").headline == "loss"
    assert measured(Regression(loss="mae"), 1).headline == "mae"
    assert not measured(Regression(), 1).more
    counted_for = {tally for metric in METRICS.values() for tally in metric.ways}
    objectives: list[tuple[Objective, int | None]] = [
        (Classification(), 3),
        (MultiLabel(), 3),
        (Regression(), 3),
        (Segmentation(), 3),
        (NextToken(), None),
    ]
    assert counted_for == {name for each, width in objectives for name in each.tallies(width)}


def test_what_a_classifier_is_judged_by_follows_from_its_largest_class() -> None:
    assert measured(Classification(), 3, largest=0.6).headline == "accuracy"
    assert measured(Classification(), 3, largest=0.61).headline == "balanced_accuracy"
    assert measured(Classification(), 3, ("accuracy", "roc_auc"), largest=0.9).headline == "accuracy"
