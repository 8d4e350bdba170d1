"""How good predictions are: metrics of what clients have counted, and how they are spread over clients.

Clients count (:mod:`sartor.model.objectives`), counts add up over clients, and ``METRICS`` has what is made
of them, by name: exactly, but for scores, whose histogram takes those within 1/64 of each other in log-odds
for equal. All metrics take any number of counts at once, ``[..., *shape]``, so one call scores every client;
their sum over clients, ``counts.sum(0)``, scores the pooled predictions.

A confusion matrix has true classes in rows and predicted ones in columns. Macro averages run over the classes
that occur in truth or prediction, each class counting the same.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.errors import SettingError
from sartor.model.objectives import Objective
from sartor.settings import unknown

Floats = npt.NDArray[np.float64]
Score = Callable[[Floats], Floats]


def confusion(truth: npt.ArrayLike, predicted: npt.ArrayLike, classes: int) -> npt.NDArray[np.int64]:
    """The confusion matrix of labels in ``0..classes - 1``.

    >>> confusion([0, 0, 1], [0, 1, 1], 2).tolist()
    [[1, 1], [0, 1]]
    """
    rows, columns = np.asarray(truth, np.int64), np.asarray(predicted, np.int64)
    if rows.shape != columns.shape or rows.ndim != 1:
        raise ValueError(
            f"truth {rows.shape} and prediction {columns.shape} must be equally long lists of labels"
        )
    for labels in (rows, columns):
        if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
            raise ValueError(f"labels must lie in 0..{classes - 1}")
    return (
        np.bincount(rows * classes + columns, minlength=classes**2).reshape(classes, classes).astype(np.int64)
    )


class Confusions:
    """Confusion matrices, ``[..., true, predicted]``, with the sums that their scores are made of."""

    def __init__(self, matrices: npt.ArrayLike) -> None:
        self.matrices = np.asarray(matrices, np.float64)

    @cached_property
    def right(self) -> Floats:
        """How many samples of each class were predicted so."""
        return np.diagonal(self.matrices, axis1=-2, axis2=-1)

    @cached_property
    def true(self) -> Floats:
        """How many samples are of each class."""
        return np.asarray(self.matrices.sum(-1))

    @cached_property
    def predicted(self) -> Floats:
        """How many samples were predicted as each class."""
        return np.asarray(self.matrices.sum(-2))

    @cached_property
    def either(self) -> Floats:
        """How many samples are of each class, and how many were predicted as it, added up."""
        return self.true + self.predicted


Matrices = npt.ArrayLike | Confusions
"""Confusion matrices, perhaps with sums that are known already."""


def _sums(matrices: Matrices) -> Confusions:
    return matrices if isinstance(matrices, Confusions) else Confusions(matrices)


def accuracy(matrices: Matrices) -> Floats:
    """The share of right predictions; nan without samples."""
    sums = _sums(matrices)
    return _share(sums.right.sum(-1), sums.matrices.sum((-2, -1)), empty=np.nan)


def precision(matrices: Matrices, average: str = "macro") -> Floats:
    """Of what was predicted as a class, the share that is of it; 0 for a class never predicted."""
    sums = _sums(matrices)
    return _average(sums.right, sums.predicted, sums, average)


def recall(matrices: Matrices, average: str = "macro") -> Floats:
    """Of what is of a class, the share that was predicted so; 0 for a class that does not occur."""
    sums = _sums(matrices)
    return _average(sums.right, sums.true, sums, average)


def f1(matrices: Matrices, average: str = "macro") -> Floats:
    """The harmonic mean of precision and recall, per class and then averaged."""
    sums = _sums(matrices)
    return _average(2 * sums.right, sums.either, sums, average)


def scores(matrices: npt.ArrayLike) -> dict[str, Floats]:
    """Accuracy, and macro and micro precision, recall and F1, by name.

    >>> {name: round(float(value), 3) for name, value in scores([[1, 1], [0, 1]]).items() if "macro" in name}
    {'macro_precision': 0.75, 'macro_recall': 0.75, 'macro_f1': 0.667}
    """
    named, sums = {"precision": precision, "recall": recall, "f1": f1}, Confusions(matrices)
    result = {"accuracy": accuracy(sums)}
    for average in ("macro", "micro"):
        result |= {f"{average}_{name}": score(sums, average) for name, score in named.items()}
    return result


def balanced_accuracy(matrices: Matrices) -> Floats:
    """The recall of every class that occurs in truth, averaged: the accuracy if all were equally frequent.

    >>> float(balanced_accuracy([[98, 0], [2, 0]]))
    0.5
    """
    sums = _sums(matrices)
    there = sums.true
    each = _share(sums.right, there)
    return _share((each * (there > 0)).sum(-1), (there > 0).sum(-1).astype(np.float64), empty=np.nan)


def iou(matrices: Matrices) -> Floats:
    """Intersection over union, averaged over the classes that occur in truth or prediction."""
    sums = _sums(matrices)
    return _average(sums.right, sums.either - sums.right, sums, "macro")


def _labels_average(name: str, average: str, matrices: Floats) -> Floats:
    """Precision, recall or F1 over labels."""
    right, missed, wrong = matrices[..., 1, 1], matrices[..., 1, 0], matrices[..., 0, 1]
    totals = {"precision": right + wrong, "recall": right + missed, "f1": 2 * right + missed + wrong}
    right, total = (2 * right if name == "f1" else right), totals[name]
    if average == "micro":
        return _share(right.sum(-1), total.sum(-1))
    return np.asarray(_share(right, total).mean(-1))


def _labels_accuracy(matrices: Floats) -> Floats:
    right = matrices[..., 0, 0] + matrices[..., 1, 1]
    return _share(right.sum(-1), matrices.sum((-3, -2, -1)), empty=np.nan)


def roc_auc(counts: npt.ArrayLike) -> Floats:
    """The chance that a sample with a label scores higher than one without, ties counting half.

    ``[..., labels, 2, bins]`` are samples without and with each label by score; the mean is over the labels
    of which there are both.
    """
    without, having = _without_and_having(counts)
    below = np.cumsum(without, -1) - without
    pairs = without.sum(-1) * having.sum(-1)
    won = (having * (below + without / 2)).sum(-1)
    return _mean_over(_share(won, pairs), pairs > 0)


def average_precision(counts: npt.ArrayLike) -> Floats:
    """Precision at every threshold, weighted by the recall that it adds; the mean over labels that occur."""
    without, having = _without_and_having(counts)
    found, taken = np.cumsum(having[..., ::-1], -1), np.cumsum((having + without)[..., ::-1], -1)
    gained = (having[..., ::-1] * _share(found, taken)).sum(-1)
    total = having.sum(-1)
    return _mean_over(_share(gained, total), total > 0)


def _class_precision(counts: Floats) -> Floats:
    """The average precision of classes: of two, that of the second."""
    return average_precision(counts[..., 1:, :, :] if counts.shape[-3] == 2 else counts)


def _without_and_having(counts: npt.ArrayLike) -> tuple[Floats, Floats]:
    given = np.asarray(counts, np.float64)
    return given[..., 0, :], given[..., 1, :]


def _mean_over(values: Floats, there: npt.NDArray[np.bool_]) -> Floats:
    return _share((values * there).sum(-1), there.sum(-1).astype(np.float64), empty=np.nan)


def calibration_error(bins: npt.ArrayLike) -> Floats:
    """How far confidence and accuracy lie apart, bin by bin of confidence, weighted by samples."""
    count, confidence, right = np.moveaxis(np.asarray(bins, np.float64), -1, 0)
    return _share(np.abs(confidence - right).sum(-1), count.sum(-1), empty=np.nan)


def _mae(sums: Floats) -> Floats:
    return np.asarray(_share(sums[..., 1], sums[..., 4], empty=np.nan).mean(-1))


def _rmse(sums: Floats) -> Floats:
    return np.asarray(np.sqrt(_share(sums[..., 0], sums[..., 4], empty=np.nan).mean(-1)))


def _r2(sums: Floats) -> Floats:
    """1 less the squared errors' share of the targets' squared distances from their mean.

    It is averaged over the numbers of a target; those that do not differ have none.
    """
    errors, _, total, squares, number = np.moveaxis(sums, -1, 0)
    spread_out = squares - _share(total**2, number)
    differ = spread_out > 1e-12 * np.maximum(squares, 1e-300)
    return _mean_over(1 - _share(errors, np.where(differ, spread_out, 1.0)), differ)


def _of_tokens(place: int, sums: Floats) -> Floats:
    return _share(sums[..., place], sums[..., 1], empty=np.nan)


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is: how it follows from what is counted, and what is better."""

    ways: Mapping[str, Score]
    """By the tally it is computed from; an objective has one of them, or the metric is not for it."""
    more: bool = True
    """Whether more is better."""
    share: bool = True
    """Whether it is shown in percent."""


def _averages() -> dict[str, Metric]:
    named = {"precision": precision, "recall": recall, "f1": f1}
    return {
        f"{average}_{name}": Metric(
            {"confusion": partial(score, average=average), "labels": partial(_labels_average, name, average)}
        )
        for average in ("macro", "micro")
        for name, score in named.items()
    }


METRICS: dict[str, Metric] = {
    "accuracy": Metric({"confusion": accuracy, "labels": _labels_accuracy, "tokens": partial(_of_tokens, 2)}),
    **_averages(),
    "balanced_accuracy": Metric({"confusion": balanced_accuracy}),
    "roc_auc": Metric({"scores": roc_auc, "label_scores": roc_auc}),
    "average_precision": Metric({"scores": _class_precision, "label_scores": average_precision}),
    "log_loss": Metric({"likelihood": lambda sums: sums[..., 0]}, more=False, share=False),
    "brier": Metric({"likelihood": lambda sums: sums[..., 1]}, more=False, share=False),
    "calibration_error": Metric({"calibration": calibration_error}, more=False),
    "mae": Metric({"errors": _mae}, more=False, share=False),
    "rmse": Metric({"errors": _rmse}, more=False, share=False),
    "r2": Metric({"errors": _r2}, share=False),
    "iou": Metric({"confusion": iou}),
    "dice": Metric({"confusion": f1}),
    "perplexity": Metric({"tokens": lambda sums: np.exp(_of_tokens(0, sums))}, more=False, share=False),
}
"""The metrics by name. The loss is always measured."""
MEANS = ("likelihood",)
"""Tallies that are sums over samples, which are divided by their number before anything else."""


def more_is_better(name: str, objective: Objective | None = None) -> bool:
    """Whether more of a metric is better; of one that is not known here, of an objective's own, it says."""
    if name in METRICS:
        return METRICS[name].more
    return objective is not None and name in objective.more_is_better


def is_share(name: str) -> bool:
    """Whether a metric is shown in percent."""
    return name in METRICS and METRICS[name].share


@dataclass(frozen=True)
class Measured:
    """What is measured in a run: metrics by name, the headline first, and what has to be counted for them."""

    names: tuple[str, ...]
    tallies: tuple[str, ...]
    headline: str
    more: bool
    """Whether more of the headline is better."""

    def scores(self, answers: Mapping[str, Floats]) -> dict[str, Floats]:
        """All metrics but the loss of what clients have counted."""
        n = np.maximum(answers["n"], 1)
        counted: dict[str, Any] = {**answers}
        counted |= {tally: answers[tally] / n[..., None] for tally in MEANS if tally in answers}
        if "confusion" in answers:
            counted["confusion"] = Confusions(answers["confusion"])
        found = {}
        for name in self.names:
            tally = _tally_of(name, answers)
            found[name] = METRICS[name].ways[tally](counted[tally]) if name in METRICS else answers[tally] / n
        return found


def _tally_of(name: str, tallies: Container[str]) -> str:
    """What a metric is computed from: of an objective's own measure, the sum of that name."""
    return next(tally for tally in METRICS[name].ways if tally in tallies) if name in METRICS else name


def measured(
    objective: Objective,
    width: int | None,
    wanted: Sequence[str] = (),
    headline: str | None = None,
    largest: float | None = None,
) -> Measured:
    """What to measure of models with an objective: what is wanted, or what the objective has by default.

    ``largest`` is the share of the largest class, where that is known.

    >>> from sartor.model.objectives import Regression
    >>> measured(Regression(), 1, headline="mae").names
    ('mae', 'rmse', 'r2')
    """
    tallies = objective.tallies(width)
    known = [name for name, metric in METRICS.items() if metric.ways.keys() & tallies.keys()]
    known += [name for name in objective.measures if name in tallies]
    for place, named in (("metrics", objective.metrics), ("more_is_better", objective.more_is_better)):
        all_known = [*METRICS, *objective.measures, "loss"]
        for name in named:
            if name not in all_known:  # else it may be known, and not to be had of such outputs
                raise unknown(f"{type(objective).__name__}.{place}", name, all_known, "metric")
    own = [name for name in (*objective.metrics, *objective.measures) if name in known]
    for name in (*wanted, *(() if headline is None else (headline,))):
        if name not in known and name != "loss":
            place = "evaluate.metrics" if name in wanted else "evaluate.headline"
            error = unknown(place, name, [*known, "loss"], "metric")
            raise SettingError(f"{error} (objective.name is {objective.name})")
    chosen = [name for name in (wanted or own) if name != "loss"]
    if headline is None:
        best = objective.headline(largest)
        headline = best if best in chosen else next(iter(chosen), "loss")
    names = tuple(dict.fromkeys([*(() if headline == "loss" else (headline,)), *chosen]))
    counted = dict.fromkeys(_tally_of(name, tallies) for name in names)
    return Measured(names, tuple(counted), headline, more_is_better(headline, objective))


def possible(tally: str, rows: Floats, samples: npt.ArrayLike, per_sample: bool = True) -> npt.NDArray[Any]:
    """For which clients what they say they have counted, a row each, can come of so many samples.

    With ``per_sample`` every sample stands once in a confusion matrix. A measure of an objective's own may be
    anything, and a sum of losses or errors is not negative, but may be infinite or not a number.

    >>> possible("confusion", np.array([[[1.0, 1.0], [0.0, 1.0]], [[9.0, 0.0], [0.0, 0.0]]]), [3, 3]).tolist()
    [True, False]
    """
    number = np.asarray(samples, np.float64)
    if tally in ("confusion", "labels", "scores", "label_scores"):
        good = _are_counts(rows)
        if per_sample or tally != "confusion":
            # Numbers beyond 2^24 are rounded in single precision.
            total = rows.sum((-2, -1))
            number = number.reshape(-1, *[1] * (total.ndim - 1))
            whole = np.abs(total - number) <= number * 1e-6
            good = good & whole.all(axis=tuple(range(1, whole.ndim)))
        return good
    if tally == "calibration":
        count, confidence, right = np.moveaxis(rows, -1, 0)
        within = ~(confidence < 0) & ~(confidence > count * (1 + 1e-6)) & (right <= count)
        good = _are_counts(count) & _are_counts(right) & (count.sum(-1) == number)
        return np.asarray(good & within.all(-1))
    if tally == "likelihood":
        return np.asarray(~(rows < 0).any(-1))
    if tally == "errors":
        signless = np.delete(rows, 2, axis=-1)
        return np.asarray(~(signless < 0).any((-2, -1)) & (rows[..., 4] == number[:, None]).all(-1))
    if tally == "tokens":
        loss, count, right = np.moveaxis(rows, -1, 0)
        return np.asarray(~(loss < 0) & _are_counts(rows[:, 1:]) & (right <= count))
    return np.ones(len(rows), dtype=bool)


def _are_counts(rows: Floats) -> npt.NDArray[Any]:
    """For which rows all numbers are whole and none is negative."""
    counts = (rows >= 0) & (rows == np.round(rows)) & np.isfinite(rows)
    return np.asarray(counts.all(axis=tuple(range(1, rows.ndim))))


@dataclass(frozen=True)
class Spread:
    """How a score is spread over clients."""

    mean: float
    weighted_mean: float
    deviation: float
    worst_decile: float
    minimum: float
    maximum: float


def spread(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Spread:
    """The plain and the weighted mean over clients, and how far they lie apart.

    ``weights`` are usually the clients' numbers of test samples. The deviation is that of these clients
    (divided by their number). The worst decile is the mean of the lowest tenth of clients, rounded down but
    at least one.

    >>> spread([0.5, 1.0], weights=[1, 3])
    Spread(mean=0.75, weighted_mean=0.875, deviation=0.25, worst_decile=0.5, minimum=0.5, maximum=1.0)
    """
    value = np.asarray(values, np.float64)
    weight = np.ones(value.shape) if weights is None else np.asarray(weights, np.float64)
    if value.ndim != 1 or not len(value) or weight.shape != value.shape:
        raise ValueError(f"one value and one weight per client, got {value.shape} and {weight.shape}")
    if not (weight >= 0).all() or not weight.sum() > 0:
        raise ValueError("weights must be at least 0 and not all 0")
    lowest = np.sort(value)[: max(1, len(value) // 10)]
    return Spread(
        mean=float(value.mean()),
        weighted_mean=float((weight * value).sum() / weight.sum()),
        deviation=float(value.std()),
        worst_decile=float(lowest.mean()),
        minimum=float(value.min()),
        maximum=float(value.max()),
    )


def _share(part: Floats, whole: Floats, empty: float = 0.0) -> Floats:
    """``part / whole``, and ``empty`` where there is nothing to divide by."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), empty)


def _average(right: Floats, total: Floats, sums: Confusions, average: str) -> Floats:
    """Per-class shares averaged over the classes that occur, or the share of all classes together."""
    if average == "micro":
        return _share(right.sum(-1), total.sum(-1), empty=np.nan)
    if average != "macro":
        raise ValueError(f"average must be macro or micro, got {average!r}")
    occurs = sums.either > 0
    return _share(
        np.where(occurs, _share(right, total), 0.0).sum(-1), occurs.sum(-1).astype(np.float64), empty=np.nan
    )
