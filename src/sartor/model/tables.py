"""A network for rows of a table: numbers, and whole numbers that stand for categories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sartor.errors import SettingError
from sartor.nests import Nest
from sartor.settings import setting

COLUMNS = ("numbers", "categories")


@dataclass(frozen=True)
class Table:
    """Dense layers on the numbers and on an embedding of each category; samples are dicts of the two."""

    categories: tuple[int, ...] = setting(
        (),
        "how many values each column of categories has; left out: those of the samples, by the largest",
        low=1,
    )
    width: int = setting(8, "numbers that stand for a category", low=1)
    hidden: tuple[int, ...] = setting((64, 32), "units of the hidden layers", low=1)
    dropout: float = setting(0.0, "share of activations that are dropped", low=0, below=1)
    told: ClassVar[tuple[str, ...]] = ("categories",)
    nested: ClassVar[bool] = True
    head: ClassVar[str | None] = "output"

    def seen(self, samples: Sequence[Nest], y: Nest) -> Table:
        """The same settings, with the values that these samples have where it is left open."""
        x = samples[0]
        if (
            not isinstance(x, dict)
            or not isinstance(x.get("categories"), Tensor)
            or x["categories"].dim() != 2
        ):
            return self  # refused where it is built
        held = [each["categories"] for each in samples if len(each["categories"])]
        if any(int(each.min()) < 0 for each in held if each.numel()):
            raise SettingError("model: categories are whole numbers from 0; there is one below")
        found = tuple((torch.stack([each.amax(0) for each in held]).amax(0) + 1).tolist())
        for place, (most, known) in enumerate(zip(found, self.categories, strict=False)):
            if most > known:
                raise SettingError(
                    f"model.categories: {known} values in column {place}, but there is a {most - 1}; they "
                    "are numbered from 0"
                )
        return self if self.categories else replace(self, categories=found)

    def build(self, shape: Any, classes: int) -> nn.Module:
        """The module for rows of these columns."""
        if not isinstance(shape, dict) or set(shape) - set(COLUMNS) or not shape:
            raise SettingError(
                "model.name = 'table': needs samples {'numbers': [columns], 'categories': [columns]}, or one "
                f"of them; the data has {shape}"
            )
        if any(len(sizes) != 1 for sizes in shape.values()):
            raise SettingError(f"model.name = 'table': needs one row of each, the data has {shape}")
        columns = shape.get("categories", (0,))[0]
        if len(self.categories) != columns:
            raise SettingError(
                f"model.categories: for {len(self.categories)} columns, the data has {columns} of categories"
            )
        return _Table(shape.get("numbers", (0,))[0], classes, self)


class _Table(nn.Module):
    def __init__(self, numbers: int, classes: int, settings: Table) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(most, settings.width) for most in settings.categories)
        sizes = [numbers + settings.width * len(settings.categories), *settings.hidden]
        self.dense = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.dropout = nn.Dropout(settings.dropout)
        self.output = nn.Linear(sizes[-1], classes)

    def forward(self, numbers: Tensor | None = None, categories: Tensor | None = None) -> Tensor:
        parts = [] if numbers is None else [numbers]
        if categories is not None:
            parts += [layer(categories[:, place]) for place, layer in enumerate(self.embeddings)]
        y = torch.cat(parts, dim=1)
        for layer in self.dense:
            y = self.dropout(layer(y).relu())
        scores: Tensor = self.output(y)
        return scores
