"""Narrow models as slices of a full one: where their numbers lie in it, and how narrow they are.

A narrow model has the parameters of the full one by name, with fewer units: a layer's outputs are the first
dimension of its weight, its inputs the second. Which units it has is a window, the same for a layer's outputs
and the inputs of the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.errors import SettingError
from sartor.model.task import Task


def positions(narrow: Task, full: Task, turn: int) -> Tensor:
    """Where each number of a narrow model lies in the full one, whose windows begin at unit ``turn``."""
    found, before = [torch.zeros(0, dtype=torch.int64)], (1, 1, 0)
    for name, shape in narrow.shapes.items():
        whole = full.shapes.get(name)
        if whole is None or not _fits(shape, whole):
            raise SettingError(
                f"models: {narrow.name} is no slice of {full.name} ([model]): its parameter {name!r} has "
                f"shape {list(shape)}, there it is {None if whole is None else list(whole)}"
            )
        unit = 1
        if len(shape) == 2 and before[2] > 2 and whole[1] % before[1] == 0:
            unit = whole[1] // before[1]  # a flattened image: so many pixels for each channel
        units = [unit if dimension == 1 else 1 for dimension in range(len(shape))]
        axes = [_window(*sizes, turn) for sizes in zip(shape, whole, units, strict=True)]
        index = torch.zeros(1, dtype=torch.int64)
        for size, axis in zip(whole, axes, strict=True):
            index = (index[:, None] * size + axis).flatten()
        found.append(full.places[name].start + index)
        if len(shape) > 1:
            before = (shape[0], whole[0], len(shape))
    return torch.cat(found)


def _fits(narrow: torch.Size, full: torch.Size) -> bool:
    """Whether a parameter has the form of another one, of which it lacks units at most."""
    if len(narrow) != len(full) or narrow[2:] != full[2:]:
        return False
    return all(own <= whole for own, whole in zip(narrow, full, strict=True))


def _window(narrow: int, full: int, unit: int, turn: int) -> Tensor:
    """So many of the indices of a dimension, from a turn on and around its end."""
    if narrow == full:
        return torch.arange(full)
    first = (torch.arange(narrow // unit) + turn) % (full // unit)
    return (first[:, None] * unit + torch.arange(unit)).flatten()


def widening(narrow: Task, like: Tensor) -> Tensor | None:
    """1 / r for the numbers that make units of a layer with a share r of them; None for a full model.

    With parameters so scaled the units of a narrow layer are as large in all as those of the full one.
    """
    pieces, full = [], True
    for name, shape in narrow.shapes.items():
        layer = narrow.shapes.get(".".join([*name.split(".")[:-1], "weight"]), shape)
        factor = (
            narrow.common.shapes[name][0] / shape[0] if len(layer) > 1 else 1.0
        )  # a norm's are left alone
        pieces.append(like.new_full((shape.numel(),), factor))
        full &= factor == 1
    return None if full else torch.cat(pieces)
