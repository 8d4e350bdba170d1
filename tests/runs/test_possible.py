"""What clients elsewhere say that they have counted is looked at, whatever it is that they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sartor.model.objectives import Classification, MultiLabel, NextToken, Objective, Regression, Segmentation
from sartor.runs.metrics import possible

SAMPLES = 6
Change = Callable[[np.ndarray], Any]


def negative(row: np.ndarray) -> None:
    row[(0,) * row.ndim] = -1


def broken(row: np.ndarray) -> None:
    row[(0,) * row.ndim] += 0.5


def one_more(row: np.ndarray) -> None:
    row[(0,) * row.ndim] += 1


def surer(row: np.ndarray) -> None:
    row[-1, 1] = row[-1, 0] + 1


def more_right(row: np.ndarray) -> None:
    row[-1] = row[-2] + 1


def fewer(row: np.ndarray) -> None:
    row[0, 4] -= 1


DRAWN = torch.Generator().manual_seed(0)
SCORES, LABELS = torch.randn(SAMPLES, 3, generator=DRAWN), torch.arange(SAMPLES) % 3
MAPS, PIXELS = (
    torch.randn(SAMPLES, 3, 2, 2, generator=DRAWN),
    torch.arange(4 * SAMPLES).view(SAMPLES, 2, 2) % 3,
)
WORDS, TOKENS = torch.randn(SAMPLES, 4, 3, generator=DRAWN), torch.arange(4 * SAMPLES).view(SAMPLES, 4) % 3


@pytest.mark.parametrize(
    ("objective", "outputs", "targets", "tally", "wrong"),
    [
        (Classification(), SCORES, LABELS, "confusion", [negative, broken, one_more]),
        (Classification(), SCORES, LABELS, "scores", [negative, broken, one_more]),
        (Classification(), SCORES, LABELS, "calibration", [negative, broken, one_more, surer]),
        (Classification(), SCORES, LABELS, "likelihood", [negative]),
        (MultiLabel(), SCORES, (SCORES > 0).float(), "labels", [negative, broken, one_more]),
        (MultiLabel(), SCORES, (SCORES > 0).float(), "label_scores", [negative, broken, one_more]),
        (Regression(), SCORES, SCORES + 1, "errors", [negative, fewer]),
        (Segmentation(), MAPS, PIXELS, "confusion", [negative, broken]),
        (NextToken(), WORDS, TOKENS, "tokens", [negative, more_right]),
    ],
)
def test_counts_of_samples_are_possible_and_others_are_not(
    objective: Objective, outputs: torch.Tensor, targets: torch.Tensor, tally: str, wrong: list[Change]
) -> None:
    counted = objective.tallies(3)[tally].count(outputs, targets, None).double().numpy()
    per_sample = objective.targets != "classes"
    rows = np.stack([counted, *[counted] * len(wrong)])
    for row, change in zip(rows[1:], wrong, strict=True):
        change(row)
    assert possible(tally, rows, [SAMPLES] * len(rows), per_sample).tolist() == [True] + [False] * len(wrong)
    assert possible(tally, rows[:0], [], per_sample).shape == (0,)
    if tally not in ("likelihood", "tokens") and per_sample:
        assert not possible(tally, rows[:1], [SAMPLES + 1], per_sample).any()
