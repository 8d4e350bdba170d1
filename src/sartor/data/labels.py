"""Text labels: which texts can name a class, and how classes are named in messages.

Classes are numbered in the order of one list, which a whole run keeps to: the sorted labels of all clients,
or ``data.labels`` of the experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sartor.errors import DataError
from sartor.settings import shown

MOST_LABELS = 2**16
LONGEST_LABEL = 200
SHOWN_LABELS = 8
"""Labels that a message lists."""


def texts_of(values: Any) -> np.ndarray | None:
    """Labels as an array of texts; None where they are something else.

    >>> texts_of(["well", "ill"]).tolist(), texts_of([0, 1])
    (['well', 'ill'], None)
    """
    if isinstance(values, torch.Tensor):
        return None
    try:
        array = np.asarray(values)
        if array.dtype.kind == "S":
            return np.char.decode(array, "utf-8")
    except ValueError:  # ragged, or no text; what reads numbers says so
        return None
    if array.dtype == object and not all(isinstance(value, str) for value in array.flat):
        return None
    return array.astype(str) if array.dtype.kind in "UTO" else None


def check_labels(labels: Sequence[Any]) -> None:
    """Refuse what cannot name classes; the message is for the place where the labels come from."""
    if len(labels) > MOST_LABELS:
        raise DataError(f"{len(labels)} different labels, at most {MOST_LABELS}; are they labels at all?")
    for label in labels:
        if type(label) is not str:
            raise DataError(f"a label is {shown(label)}, which is no text")
        if not label:
            raise DataError("a label is empty; give every sample one")
        if not label.isprintable():
            raise DataError(f"the label {shown(label)} is not printable; rename it")
        if len(label) > LONGEST_LABEL:
            raise DataError(
                f"the label {shown(label)} has {len(label)} characters, at most {LONGEST_LABEL}; rename it"
            )
    if len(set(labels)) < len(labels):
        twice = next(label for place, label in enumerate(labels) if label in labels[:place])
        raise DataError(f"the label {shown(twice)} is given twice")


def other_kind(own: Sequence[str] | None, classes: Sequence[str] | None) -> str | None:
    """How labels differ in kind from the classes of a run; None stands for whole numbers."""
    if (own is None) == (classes is None):
        return None
    if classes is not None:
        return f"its labels are whole numbers, but the classes are the texts {listed(classes)}"
    return f"its labels are the texts {listed(own or ())}, but the classes are whole numbers"


def listed(labels: Sequence[str]) -> str:
    """Labels for a message, the first of them where they are many."""
    texts = ", ".join(shown(label) for label in labels[:SHOWN_LABELS])
    return texts if len(labels) <= SHOWN_LABELS else f"{texts}, ... ({len(labels)} in all)"
