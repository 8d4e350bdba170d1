"""What a model is trained for: the loss of every sample, what a prediction is, and what is counted of it.

An :class:`Objective` is a frozen dataclass of its parameters. Clients count on their samples (*tallies*: a
confusion matrix, sums, a histogram of scores), tallies add up over batches and clients, and metrics are
computed from them, so no sample and no prediction travels. One of your own has ``losses``, and ``measures``
where it likes: functions that give one number per sample, whose mean is a metric of that name.

>>> class Relative(Objective):
...     measures = {"percent": lambda outputs, y: 100 * (outputs[:, 0] / y - 1).abs()}
...
...     def losses(self, outputs, y):
...         return (outputs[:, 0].log() - y.log()).square()
>>> Relative().losses(torch.tensor([[1.0], [1.0]]), torch.tensor([1.0, 1.0])).tolist()
[0.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.errors import SartorError, SettingError
from sartor.extensions import Registry, call, find_function
from sartor.kernels.gpu import lanes_under_way
from sartor.settings import setting

Loss = Callable[[Any, Any], Tensor]
"""From outputs and targets to one number per sample, or to their mean."""

IGNORED = -100
"""The class of a position that counts nowhere."""
SCORE_BINS, SCORE_STEP = 2048, 1 / 64
"""Scores are counted by their log-odds, from -16 to 16 in steps of 1/64: closer ones count as equal."""
CALIBRATION_BINS = 15
"""Bins of equal width for the confidence of a prediction."""
IMBALANCED = 0.6
"""Where the largest class has more than this share, accuracy is not what a classifier is judged by."""


@dataclass(frozen=True)
class Tally:
    """Something that is counted: its shape, and the count of a batch whose samples have weights 1 or 0."""

    shape: tuple[int, ...]
    count: Callable[[Any, Any, Tensor | None], Tensor]
    dtype: torch.dtype = torch.float64


class Objective:
    """What a model is trained for. ``losses`` is all that one of your own needs."""

    name: ClassVar[str] = "own"
    targets: ClassVar[str] = "any"
    """What a target is, as data are read: see :mod:`sartor.data.samples`."""
    metrics: tuple[str, ...] = ()
    """What is shown where the experiment does not say; the first is the headline. The loss always is."""
    measures: Mapping[str, Loss] = {}
    """Metrics of your own: the mean of one number per sample."""
    more_is_better: tuple[str, ...] = ()
    """Those of your own measures of which more is better; of the others less is."""

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of every sample."""
        raise NotImplementedError(f"{type(self).__name__}: an objective needs losses(outputs, targets)")

    def predictions(self, outputs: Any) -> Any:
        """What the model says, of what it puts out: by default the outputs themselves."""
        return outputs

    def width(self, outputs: Any, targets: Any, classes: int | None) -> int | None:
        """How many classes, labels or numbers are counted apart, for such outputs and targets.

        By default the outputs, which may be more than the classes that occur.
        """
        scores = isinstance(outputs, Tensor) and outputs.ndim == 2
        return None if classes is None or not scores else max(classes, outputs.shape[1])

    def outputs(self, targets: Any, classes: int | None) -> int | None:
        """How many outputs a network for such targets needs; None where that does not follow from them."""
        if classes is None and isinstance(targets, Tensor) and targets.is_floating_point():
            return int(targets[:1].numel())
        return classes

    def wrong(self, outputs: Any, targets: Any, classes: int | None) -> str | None:
        """What is wrong with a model whose outputs have this shape, or None."""
        return None

    def tallies(self, width: int | None) -> dict[str, Tally]:
        """What can be counted, by name."""
        own = {name: Tally((), _sum_of(measure)) for name, measure in self.measures.items()}
        return (
            own
            if width is None
            else {"confusion": Tally((width, width), _confusion(width), torch.float32), **own}
        )

    def headline(self, largest: float | None) -> str | None:
        """What models are judged by, where the largest class has this share; None: by the loss."""
        return next(iter(self.metrics), None)


@dataclass(frozen=True)
class Classification(Objective):
    """One class of several for each sample: cross-entropy of the outputs, a score per class."""

    name: ClassVar[str] = "classification"
    targets: ClassVar[str] = "class"
    weights: tuple[float, ...] = setting(
        (), "weight of each class in the loss; left out: 1. The mean is over samples, not weights", low=0
    )
    label_smoothing: float = setting(
        0.0, "share of a sample's weight that goes to all classes alike", low=0, below=1
    )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, weighted and smoothed where that is set."""
        if not self.weights and not self.label_smoothing:
            return cross_entropy(outputs, targets)
        hot = (targets[:, None] == torch.arange(outputs.shape[-1], device=outputs.device)).to(outputs.dtype)
        wanted = (1 - self.label_smoothing) * hot + self.label_smoothing / outputs.shape[-1]
        if self.weights:
            wanted = wanted * torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        return -(wanted * F.log_softmax(outputs, dim=-1)).sum(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The most likely class."""
        return outputs.argmax(dim=-1)

    def wrong(self, outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
        """Fewer outputs than classes, or other weights."""
        if classes is not None and outputs.shape[1:] < (classes,):
            found = f"outputs of shape {list(outputs.shape[1:])}"
            return f"{found} for {classes} classes; it needs one output per class"
        if self.weights and outputs.shape[-1] != len(self.weights):
            return (
                f"{outputs.shape[-1]} outputs, but objective.weights has {len(self.weights)}; give one each"
            )
        return None

    def tallies(self, width: int | None) -> dict[str, Tally]:
        """The confusion matrix, and what needs probabilities."""
        if width is None:
            return {}
        return {
            "confusion": Tally((width, width), _confusion(width), torch.float32),
            "scores": Tally((width, 2, SCORE_BINS), _class_scores, torch.float32),
            "calibration": Tally((CALIBRATION_BINS, 3), _calibration),
            "likelihood": Tally((2,), _likelihood),
        }

    metrics = (
        "accuracy",
        "macro_precision",
        "macro_recall",
        "macro_f1",
        "micro_precision",
        "micro_recall",
        "micro_f1",
        "balanced_accuracy",
    )

    def headline(self, largest: float | None) -> str:
        """Accuracy; balanced accuracy where the largest class has over 60 % of the samples."""
        return "balanced_accuracy" if largest is not None and largest > IMBALANCED else "accuracy"


@dataclass(frozen=True)
class MultiLabel(Objective):
    """Any number of labels for each sample: an output and 0 or 1 for each, binary cross-entropy."""

    name: ClassVar[str] = "multi-label"
    targets: ClassVar[str] = "labels"
    metrics = ("macro_f1", "micro_f1", "accuracy", "macro_precision", "macro_recall")
    positive_weights: tuple[float, ...] = setting(
        (), "weight of each label in the loss where a sample has it; left out: 1", low=0
    )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over labels."""
        weight = torch.tensor(self.positive_weights, dtype=outputs.dtype, device=outputs.device)
        return F.binary_cross_entropy_with_logits(
            outputs,
            targets.to(outputs.dtype),
            reduction="none",
            pos_weight=weight if self.positive_weights else None,
        ).mean(1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The labels that are more likely than not."""
        return (outputs > 0).long()

    def width(self, outputs: Tensor, targets: Tensor, classes: int | None) -> int | None:
        """The labels."""
        return int(targets.shape[-1])

    def wrong(self, outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
        """Another number of outputs than labels."""
        if outputs.shape[1:] != targets.shape[1:]:
            found = f"outputs of shape {list(outputs.shape[1:])}"
            return f"{found} for {targets.shape[-1]} labels; it needs one per label"
        if len(self.positive_weights) not in (0, outputs.shape[-1]):
            given = len(self.positive_weights)
            return f"{outputs.shape[-1]} outputs, but objective.positive_weights has {given}"
        return None

    def tallies(self, width: int | None) -> dict[str, Tally]:
        """For each label a confusion matrix, and the histogram of scores."""
        if width is None:
            return {}
        return {
            "labels": Tally((width, 2, 2), _label_confusion, torch.float32),
            "label_scores": Tally((width, 2, SCORE_BINS), _label_scores, torch.float32),
        }


@dataclass(frozen=True)
class Regression(Objective):
    """Numbers: outputs of the targets' shape, or with as many numbers."""

    name: ClassVar[str] = "regression"
    targets: ClassVar[str] = "number"
    loss: str = setting("mse", "squared error, absolute error, or Huber's", choices=("mse", "mae", "huber"))
    delta: float = setting(1.0, "where Huber's loss turns from squared to absolute", above=0)
    metrics = ("rmse", "mae", "r2")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the numbers of a target."""
        error = outputs.reshape(targets.shape) - targets
        if self.loss == "mse":
            error = error.square()
        elif self.loss == "mae":
            error = error.abs()
        else:
            error = F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=self.delta)
        return error.reshape(len(targets), -1).mean(1)

    def width(self, outputs: Tensor, targets: Tensor, classes: int | None) -> int | None:
        """The numbers of a target."""
        return int(targets[:1].numel())

    def wrong(self, outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
        """Another number of outputs than a target has numbers."""
        if outputs[:1].numel() != targets[:1].numel():
            shapes = (
                f"outputs of shape {list(outputs.shape[1:])}",
                f"targets of shape {list(targets.shape[1:])}",
            )
            return f"{shapes[0]} for {shapes[1]}; it needs as many numbers"
        return None

    def tallies(self, width: int | None) -> dict[str, Tally]:
        """Sums over samples, for every number of a target."""
        return {} if width is None else {"errors": Tally((width, 5), _errors)}

    def headline(self, largest: float | None) -> str:
        """What is minimised, in the targets' unit."""
        return "mae" if self.loss == "mae" else "rmse"


@dataclass(frozen=True)
class Segmentation(Objective):
    """A class for every pixel: outputs ``[classes, height, width]``, targets ``[height, width]``."""

    name: ClassVar[str] = "segmentation"
    targets: ClassVar[str] = "classes"
    metrics = ("iou", "dice", "accuracy")
    weights: tuple[float, ...] = setting((), "weight of each class in the loss; left out: 1", low=0)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over the pixels that count."""
        counts = targets != IGNORED
        place = torch.where(counts, targets, 0)
        each = -F.log_softmax(outputs, dim=1).gather(1, place.unsqueeze(1)).squeeze(1)
        if self.weights:
            each = each * torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)[place]
        return _masked_mean(each, counts)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The most likely class of every pixel."""
        return outputs.argmax(dim=1)

    def width(self, outputs: Tensor, targets: Tensor, classes: int | None) -> int | None:
        """The classes that the model knows."""
        return int(outputs.shape[1])

    def wrong(self, outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
        """Another size than the targets', or fewer outputs than classes."""
        if outputs.ndim < 2 or (outputs.shape[0], *outputs.shape[2:]) != tuple(targets.shape):
            found, wanted = list(outputs.shape[1:]), ["classes", *targets.shape[1:]]
            return f"outputs of shape {found}; segmentation needs {wanted}"
        if classes is not None and outputs.shape[1] < classes:
            return f"{outputs.shape[1]} outputs per pixel for {classes} classes"
        if len(self.weights) not in (0, outputs.shape[1]):
            return f"{outputs.shape[1]} outputs per pixel, but objective.weights has {len(self.weights)}"
        return None

    def tallies(self, width: int | None) -> dict[str, Tally]:
        """The confusion matrix of pixels."""
        return {} if width is None else {"confusion": Tally((width, width), _pixel_confusion(width))}


@dataclass(frozen=True)
class NextToken(Objective):
    """The next token at every place: outputs ``[length, vocabulary]``, targets ``[length]``.

    Every sequence counts the same in the loss; perplexity is over all tokens.
    """

    name: ClassVar[str] = "next-token"
    targets: ClassVar[str] = "classes"
    metrics = ("perplexity", "accuracy")
    shift: bool = setting(
        False, "whether targets are the inputs themselves, each output for the token after it"
    )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over the tokens that count."""
        each, counts = self._each(outputs, targets)
        return _masked_mean(each, counts)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The most likely token at every place."""
        return outputs.argmax(dim=-1)

    def wrong(self, outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
        """Another length than the targets', or fewer outputs than tokens."""
        if outputs.ndim != 3 or outputs.shape[:2] != targets.shape:
            found, wanted = list(outputs.shape[1:]), [*targets.shape[1:], "vocabulary"]
            return f"outputs of shape {found}; next-token needs {wanted}"
        if classes is not None and outputs.shape[-1] < classes:
            return f"{outputs.shape[-1]} outputs per place, but there is a token {classes - 1}"
        return None

    def width(self, outputs: Tensor, targets: Tensor, classes: int | None) -> int | None:
        """Nothing is counted by token."""
        return None

    def tallies(self, width: int | None) -> dict[str, Tally]:
        """Sums over tokens: their loss, their number, and how many are right."""

        def tokens(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
            each, counts = self._each(outputs, targets)
            right = (outputs if not self.shift else outputs[:, :-1]).argmax(-1) == (
                targets if not self.shift else targets[:, 1:]
            )
            sums = torch.stack(
                [each.where(counts, 0.0), counts.to(each.dtype), (right & counts).to(each.dtype)], 1
            )
            return _weighted(sums.double().sum(2), weight)

        return {"tokens": Tally((3,), tokens)}

    def _each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss at every place, and which places count."""
        if self.shift:
            outputs, targets = outputs[:, :-1], targets[:, 1:]
        counts = targets != IGNORED
        place = torch.where(counts, targets, 0)
        return -F.log_softmax(outputs, dim=-1).gather(-1, place.unsqueeze(-1)).squeeze(-1), counts


@dataclass(frozen=True)
class Own(Objective):
    """An objective given in Python: an experiment can name it, but not make it."""

    metrics = Classification.metrics

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """Refuse: what was given is not in the experiment."""
        raise SettingError("objective.name = 'own': it was given in Python; pass it again as objective=...")

    def headline(self, largest: float | None) -> str:
        """As for a classifier: it is measured where targets are classes and outputs their scores."""
        return Classification().headline(largest)


class OwnLoss(Own):
    """An objective that is a loss function."""

    def __init__(self, loss: Loss) -> None:
        object.__setattr__(self, "loss", loss)

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """What the function gives."""
        found: Tensor = self.loss(outputs, targets)  # type: ignore[attr-defined]
        return found


OWN = "own"
"""The name of an objective that has none: one given in Python, or by ``objective.path``."""

OBJECTIVES: Registry[type] = Registry(
    "sartor.objectives",
    "objective",
    {kind.name: kind for kind in (Classification, MultiLabel, Regression, Segmentation, NextToken, Own)},
)
"""The objectives by name, those of users and of installed packages included."""

Kind = TypeVar("Kind", bound=type)


def register_objective(name: str) -> Callable[[Kind], Kind]:
    """Make an objective known as ``objective.name``: a frozen dataclass of its settings with ``losses``.

    >>> @register_objective("quantile")
    ... @dataclass(frozen=True)
    ... class Quantile(Objective):
    ...     q: float = setting(0.5, "the quantile that is learnt", above=0, below=1)
    ...     targets = "number"
    ...
    ...     def losses(self, outputs, y):
    ...         below = y - outputs[:, 0]
    ...         return torch.maximum(self.q * below, (self.q - 1) * below)
    >>> OBJECTIVES["quantile"](q=0.9).losses(torch.zeros(1, 1), torch.ones(1)).tolist()
    [0.8999999761581421]
    >>> OBJECTIVES.remove("quantile")
    """

    def added(cls: Kind) -> Kind:
        if not is_dataclass(cls) or not issubclass(cls, Objective):
            raise SartorError(
                f"objective {name!r}: expected a dataclass of settings that is an sartor.Objective"
            )
        cls.name = name
        OBJECTIVES.add(name, cls)
        return cls

    return added


@dataclass(frozen=True, kw_only=True)
class ObjectiveChoice:
    """What the model is trained for, by name with its settings, or a function or class in a file."""

    name: str = setting("classification", "what the model is trained for")
    settings: Any
    path: str | None = setting(
        None, "own objective instead of `name`: a loss function or a class in a file, as in mine.py:loss"
    )


def chosen_objective(choice: ObjectiveChoice) -> Objective:
    """The objective of what an experiment says."""
    if choice.path is None:
        made: Objective = choice.settings
        return made
    found = find_function(choice.path, "objective.path")
    return objective_of(found, f"objective.path = {choice.path!r}")


def objective_of(given: Any, what: str = "objective") -> Objective:
    """The objective that a name, an objective, its class or a loss function stands for."""
    if isinstance(given, Objective):
        return given
    if isinstance(given, str):
        return OBJECTIVES[given]() if given in OBJECTIVES else _unknown(given)
    if isinstance(given, type) and issubclass(given, Objective):
        made: Objective = call(given, what)
        return made
    if callable(given) and not isinstance(given, type):
        return OwnLoss(given)
    raise SettingError(f"{what}: give a name, a sartor.Objective or a loss function, got {given!r}")


def _unknown(name: str) -> Objective:
    from sartor.settings import unknown

    raise unknown("objective.name", name, OBJECTIVES, what="name")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of every sample."""
    if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
        if not outputs.is_cuda and not outputs.requires_grad:
            # A CPU goes through many samples at once where those of a class lie side by side.
            return -F.log_softmax(outputs.T.contiguous(), dim=0).gather(0, targets[None])[0]
        if lanes_under_way():
            if outputs.is_cuda:
                return cross_entropies(outputs, targets)
            # The same numbers as below, which has twice the operations under vmap: no label is ever ignored.
            return -F.log_softmax(outputs, dim=-1).gather(1, targets[:, None])[:, 0]
    return F.cross_entropy(outputs, targets, reduction="none")


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same as sums of which one term is not zero: on CUDA that can be merged with its gradient."""
    mine = targets[:, None] == torch.arange(outputs.shape[1], device=outputs.device)
    return -F.log_softmax(outputs, dim=-1).where(mine, 0.0).sum(1)


# What is counted ----------------------------------------------------------------------------------


def _weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    """The sum over real samples of what has one entry per sample."""
    if weight is None:
        return values.sum(0)
    total: Tensor = torch.tensordot(weight.to(values.dtype), values, dims=1)
    return total


def _masked_mean(each: Tensor, counts: Tensor) -> Tensor:
    """For every sample the mean over the places that count; 0 where none does."""
    each, counts = each.flatten(1), counts.flatten(1)
    return each.where(counts, 0.0).sum(1) / counts.sum(1).clamp(min=1)


def _sum_of(measure: Loss) -> Callable[[Any, Any, Tensor | None], Tensor]:
    def summed(outputs: Any, targets: Any, weight: Tensor | None) -> Tensor:
        return _weighted(measure(outputs, targets).double(), weight)

    return summed


def _confusion(classes: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    def counted(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        # The first of equal outputs, as argmax has it, which on a CPU takes five times as long.
        truth, guess = _one_hot(targets, classes), _one_hot(outputs.max(dim=-1).indices, classes)
        truth = truth if weight is None else truth * weight[:, None].to(truth.dtype)
        return truth.T @ guess

    return counted


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(torch.float32)


def _histogram(places: Tensor, amounts: Tensor, bins: int) -> Tensor:
    """Amounts added up by place."""
    return amounts.new_zeros(bins).scatter_add(0, places.flatten(), amounts.flatten())


def _pixel_confusion(classes: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    def counted(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        counts = targets != IGNORED
        amount = counts.double()
        if weight is not None:
            amount = amount * weight.double().view(-1, *[1] * (targets.dim() - 1))
        place = targets.where(counts, torch.zeros_like(targets)) * classes + outputs.argmax(dim=1)
        return _histogram(place, amount, classes * classes).view(classes, classes)

    return counted


def _scores(odds: Tensor, positive: Tensor, weight: Tensor | None) -> Tensor:
    """``[columns, 2, bins]``: how many samples without and with each label have which log-odds."""
    samples, columns = odds.shape
    bins = ((odds / SCORE_STEP).round().long() + SCORE_BINS // 2).clamp(0, SCORE_BINS - 1)
    column = torch.arange(columns, device=odds.device)
    place = (column * 2 + positive.long()) * SCORE_BINS + bins
    amount = torch.ones(samples, device=odds.device) if weight is None else weight.float()
    return _histogram(place, amount[:, None].expand(samples, columns), columns * 2 * SCORE_BINS).view(
        columns, 2, SCORE_BINS
    )


def _class_scores(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    likelihood = F.log_softmax(outputs.double(), dim=-1)
    others = torch.log(-torch.expm1(likelihood.clamp(max=-1e-12)))
    positive = targets[:, None] == torch.arange(outputs.shape[-1], device=outputs.device)
    return _scores(likelihood - others, positive, weight)


def _label_scores(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    return _scores(outputs.double(), targets, weight)


def _label_confusion(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """``[labels, 2, 2]``: truth in rows, prediction in columns."""
    truth, guess = targets.long(), (outputs > 0).long()
    cells = torch.arange(4, device=outputs.device)
    each = ((2 * truth + guess)[..., None] == cells).to(torch.float32)
    return _weighted(each, weight).view(-1, 2, 2)


def _calibration(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """For each bin of confidence: samples, their confidence and how many are right."""
    confidence, guess = F.softmax(outputs.double(), dim=-1).max(-1)
    bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    hot = (bins[:, None] == torch.arange(CALIBRATION_BINS, device=outputs.device)).double()
    each = torch.stack([torch.ones_like(confidence), confidence, (guess == targets).double()], 1)
    return hot.T @ (each if weight is None else each * weight.double()[:, None])


def _likelihood(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """The negative log-likelihood, and the squared distance of the probabilities from the truth.

    Of two classes one of the two equal terms counts, as is usual for a Brier score.
    """
    likelihood = F.log_softmax(outputs.double(), dim=-1)
    hot = (targets[:, None] == torch.arange(outputs.shape[-1], device=outputs.device)).double()
    away = (likelihood.exp() - hot).square().sum(1) / (2 if outputs.shape[-1] == 2 else 1)
    return _weighted(torch.stack([-(likelihood * hot).sum(1), away], 1), weight)


def _errors(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """For every number of a target: squared and absolute errors, targets and their squares, samples."""
    y = targets.reshape(len(targets), -1).double()
    error = outputs.reshape(len(targets), -1).double() - y
    return _weighted(torch.stack([error.square(), error.abs(), y, y.square(), torch.ones_like(y)], 2), weight)
