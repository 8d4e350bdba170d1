"""How good predictions are: from confusion matrices to the spread over clients.

A confusion matrix has true classes in rows and predicted ones in columns. All scores take any number of
matrices at once, ``[..., K, K]``, so one call scores every client; their sum over clients,
``matrices.sum(0)``, scores the pooled predictions. Macro averages run over the classes that occur in truth
or prediction, each class counting the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


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


def accuracy(matrices: npt.ArrayLike) -> Floats:
    """The share of right predictions; nan without samples."""
    matrix = np.asarray(matrices, np.float64)
    return _share(_diagonal(matrix).sum(-1), matrix.sum((-2, -1)), empty=np.nan)


def precision(matrices: npt.ArrayLike, average: str = "macro") -> Floats:
    """Of what was predicted as a class, the share that is of it; 0 for a class never predicted."""
    matrix = np.asarray(matrices, np.float64)
    return _average(_diagonal(matrix), matrix.sum(-2), matrix, average)


def recall(matrices: npt.ArrayLike, average: str = "macro") -> Floats:
    """Of what is of a class, the share that was predicted so; 0 for a class that does not occur."""
    matrix = np.asarray(matrices, np.float64)
    return _average(_diagonal(matrix), matrix.sum(-1), matrix, average)


def f1(matrices: npt.ArrayLike, average: str = "macro") -> Floats:
    """The harmonic mean of precision and recall, per class and then averaged."""
    matrix = np.asarray(matrices, np.float64)
    return _average(2 * _diagonal(matrix), matrix.sum(-1) + matrix.sum(-2), matrix, average)


def scores(matrices: npt.ArrayLike) -> dict[str, Floats]:
    """All scores by name: accuracy, and macro and micro precision, recall and F1.

    >>> {name: round(float(value), 3) for name, value in scores([[1, 1], [0, 1]]).items() if "macro" in name}
    {'macro_precision': 0.75, 'macro_recall': 0.75, 'macro_f1': 0.667}
    """
    named = {"precision": precision, "recall": recall, "f1": f1}
    result = {"accuracy": accuracy(matrices)}
    for average in ("macro", "micro"):
        result |= {f"{average}_{name}": score(matrices, average) for name, score in named.items()}
    return result


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


def _diagonal(matrix: Floats) -> Floats:
    return np.diagonal(matrix, axis1=-2, axis2=-1)


def _share(part: Floats, whole: Floats, empty: float = 0.0) -> Floats:
    """``part / whole``, and ``empty`` where there is nothing to divide by."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), empty)


def _average(right: Floats, total: Floats, matrix: Floats, average: str) -> Floats:
    """Per-class shares averaged over the classes that occur, or the share of all classes together."""
    if average == "micro":
        return _share(right.sum(-1), total.sum(-1), empty=np.nan)
    if average != "macro":
        raise ValueError(f"average must be macro or micro, got {average!r}")
    occurs = (matrix.sum(-1) + matrix.sum(-2)) > 0
    return _share(
        np.where(occurs, _share(right, total), 0.0).sum(-1), occurs.sum(-1).astype(np.float64), empty=np.nan
    )
