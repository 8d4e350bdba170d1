"""Samples and targets as they are read: arrays of any kind become nests of tensors, whose types are kept.

What a target may be is said beforehand, as it follows from what a model is trained for:

=========  ===========================================================================================
class      one class per sample: a whole number from 0, or a text
classes    whole numbers from 0 of any shape: a class for every pixel or word; -100 counts nowhere
labels     0 or 1 for each of several labels, which a sample may have at once
number     finite numbers of any shape
any        any nest, kept as it is; texts are classes, and whole numbers, one per sample, are int64
=========  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sartor import nests
from sartor.data.labels import listed, texts_of
from sartor.errors import DataError
from sartor.nests import Nest
from sartor.settings import shown

TARGETS = ("class", "classes", "labels", "number", "any")
MOST_CLASSES = 2**20
"""Labels are below this: a model has an output for each class."""
IGNORED = -100
"""The class of a position that counts nowhere, as in PyTorch."""
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}
"""What stands in for types that PyTorch can hardly compute with."""


def inputs_of(values: Any, where: str) -> Nest:
    """The inputs of some samples as a nest of tensors in memory of its own, all floats finite."""
    x = _nest_of(values, where, "x")
    if isinstance(x, torch.Tensor) and x.ndim < 2 and x.is_floating_point():
        raise DataError(f"{where}: x must be [samples, features...], got shape {tuple(x.shape)}")
    check_lengths(x, where, "x")
    return x


def targets_of(values: Any, where: str, targets: str, labels: tuple[str, ...] | None = None) -> Nest:
    """Targets of a kind (see above); ``labels``, in alphabetical order, are all those there are."""
    if targets == "class" or (targets == "any" and labels is not None):
        return _classes_of(values, where, labels)
    y = _nest_of(values, where, "y")
    if targets == "any":
        check_lengths(y, where, "y")
        return y.long() if is_class(y) and y.dtype != torch.bool else y
    if not isinstance(y, torch.Tensor):
        raise DataError(f"{where}: y is a {type(y).__name__}; this objective takes one array")
    if targets == "number":
        return y if y.is_floating_point() else y.float()
    if targets == "labels":
        return _yes_or_no(y, where)
    whole = y.long()
    wrong = (whole != y) | ((whole < 0) & (whole != IGNORED)) | (whole >= MOST_CLASSES)
    wrong = wrong.reshape(len(y), -1).any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"{where}: classes are whole numbers from 0 to {MOST_CLASSES - 1} (or {IGNORED}, which counts "
            f"nowhere), got another in sample {row}"
        )
    return whole


def number_of_classes(y: Nest, targets: str) -> int | None:
    """How many classes or labels such targets have; None where they are something else."""
    if targets == "number" or not isinstance(y, torch.Tensor):
        return None
    if targets == "any" and y.is_floating_point():
        return None
    if targets == "labels":
        return int(y.shape[1])
    if targets == "any" and (y.ndim != 1 or not len(y) or int(y.min()) < 0 or y.dtype == torch.bool):
        return None
    return max(0, int(y.max())) + 1 if y.numel() else None


def is_class(y: Nest) -> bool:
    """Whether targets are one whole number per sample."""
    return isinstance(y, torch.Tensor) and y.ndim == 1 and not y.is_floating_point() and not y.is_complex()


def check_lengths(nest: Nest, where: str, name: str) -> None:
    """All leaves have the same samples."""
    lengths = {path: len(leaf) for path, leaf in nests.paths(nest, name).items()}
    if not lengths:
        raise DataError(f"{where}: {name} holds no array")
    first = next(iter(lengths))
    for path, found in lengths.items():
        if found != lengths[first]:
            raise DataError(
                f"{where}: {path} has {found} samples, {first} has {lengths[first]}; all leaves have one "
                "entry per sample along their first axis"
            )


def _nest_of(values: Any, where: str, name: str) -> Nest:
    """Arrays in tuples and dicts as tensors; a list, or a tuple of numbers, is an array itself."""
    if isinstance(values, Mapping):
        for key in values:
            if not isinstance(key, str) or not key.isidentifier():
                raise DataError(f"{where}: {name} has the key {shown(key)}; keys are names, as in input_ids")
        return {key: _nest_of(value, where, f"{name}.{key}") for key, value in values.items()}
    if isinstance(values, tuple) and any(
        isinstance(value, (np.ndarray, torch.Tensor, dict, tuple)) for value in values
    ):
        return tuple(_nest_of(value, where, f"{name}[{place}]") for place, value in enumerate(values))
    return _leaf(values, where, name)


def _leaf(values: Any, where: str, name: str) -> torch.Tensor:
    """One array as a tensor in memory of its own; its floats are finite."""
    if isinstance(values, torch.Tensor):
        leaf = values.detach().cpu().clone(memory_format=torch.contiguous_format)
    else:
        array = array_of(values, where, name)
        if array.dtype == np.uint64 and array.ndim and len(beyond := np.argwhere(array >= 2**63)):
            found = f"{name} has {array[tuple(beyond[0])]} in sample {beyond[0][0]}"
            raise DataError(f"{where}: {found}; whole numbers are below 2^63, number these anew")
        leaf = torch.from_numpy(
            np.array(array, _WIDER.get(array.dtype, array.dtype.newbyteorder("=")), order="C")
        )
    if leaf.ndim < 1:
        raise DataError(f"{where}: {name} is a single number; give one entry per sample")
    if leaf.is_floating_point() and leaf.numel():
        bad = ~torch.isfinite(leaf).reshape(len(leaf), -1).all(dim=1)
        if bad.any():
            raise DataError(
                f"{where}: {name} has a value that is not finite, first in sample {int(bad.nonzero()[0])}"
            )
    return leaf


def array_of(values: Any, where: str, name: str) -> np.ndarray:
    """A numeric array of whatever was given."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        if isinstance(values, (list, tuple)) and any(isinstance(value, torch.Tensor) for value in values):
            values = [np.asarray(value) for value in values]
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{where}: {name} is ragged; every sample must have the same shape") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(f"{where}: {name} must hold numbers, got {array.dtype}")
    return array


def _classes_of(values: Any, where: str, labels: tuple[str, ...] | None) -> torch.Tensor:
    """Labels as an int64 tensor of whole numbers from 0."""
    texts = None if labels is None else texts_of(values)
    if labels is not None and texts is None:
        raise DataError(
            f"{where}: labels are numbers, those of other clients the texts {listed(labels)}; "
            "give all clients labels of one kind"
        )
    if isinstance(values, Mapping):
        raise DataError(f"{where}: y is a dict, expected one class per sample; name another objective")
    array = array_of(values, where, "y") if texts is None else texts
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"{where}: y must have one number per sample, got shape {array.shape}; another objective takes "
            "targets of other shapes, as in objective='multi-label', 'segmentation' or 'regression'"
        )
    if labels is not None:
        return torch.from_numpy(np.searchsorted(np.array(labels), array).astype(np.int64))
    with np.errstate(invalid="ignore"):  # nan is reported as not whole
        whole = array == np.trunc(array)
    wrong = ~(whole & (array >= 0) & (array < MOST_CLASSES))
    if wrong.any():
        row = int(np.argmax(wrong))
        beyond = whole[row] and array[row] > 0
        cure = "objective='regression' takes any numbers"
        cure = f"there are at most {MOST_CLASSES} classes" if beyond else cure
        raise DataError(f"{where}: labels are whole numbers from 0, got {array[row]} in sample {row}; {cure}")
    return torch.from_numpy(array.astype(np.int64))


def _yes_or_no(y: torch.Tensor, where: str) -> torch.Tensor:
    """Labels of which a sample may have several: 0 or 1 each."""
    if y.ndim != 2:
        raise DataError(f"{where}: y must be [samples, labels] of 0 and 1, got shape {tuple(y.shape)}")
    wrong = ((y != 0) & (y != 1)).any(1)
    if wrong.any():
        raise DataError(f"{where}: labels are 0 or 1 each, got another in sample {int(wrong.nonzero()[0])}")
    return y.float()
