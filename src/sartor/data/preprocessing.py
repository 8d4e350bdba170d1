"""Preprocessing: what a run learned to do with raw rows before a model sees them, to be done again later.

:class:`~sartor.data.clients.ClientData` carries it: whatever reads a table says how (a :class:`TableReader`),
features and normalising add what they did. :meth:`Preprocessing.transform` does the same with new rows, and
:meth:`Preprocessing.to_mapping` is JSON, so that an exported model has it with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sartor import nests
from sartor.data.features import FEATURES
from sartor.data.moments import Moments
from sartor.data.readers import check_column
from sartor.data.samples import inputs_of
from sartor.data.texts import TextColumn
from sartor.errors import DataError
from sartor.nests import Nest

Columns = Mapping[str, Any]
"""The columns of a table by name, as Arrow arrays."""


class TableReader(Protocol):
    """How the rows of a table become samples: what is learned from a table is in its fields."""

    kind: ClassVar[str]
    """What it is called in an exported model."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns that it needs."""
        ...

    def samples(self, table: Columns, where: str) -> Nest:
        """The samples of all rows; ``where`` is the place that an error names."""
        ...

    def values(self, x: Nest, column: str) -> list[str] | None:
        """A column as words, from samples that were read; None where these do not tell."""
        ...

    def to_mapping(self) -> dict[str, Any]:
        """All of it as JSON; ``from_mapping`` makes the same of it."""
        ...

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> TableReader:
        """What :meth:`to_mapping` gave."""
        ...


@dataclass(frozen=True)
class NumberColumns:
    """Columns of numbers, in this order, each a feature.

    >>> import pyarrow
    >>> NumberColumns(("b", "a")).samples({"a": pyarrow.array([1, 2]), "b": pyarrow.array([0.5, 1])}, "t")
    tensor([[0.5000, 1.0000],
            [1.0000, 2.0000]], dtype=torch.float64)
    """

    kind: ClassVar[str] = "numbers"
    columns: tuple[str, ...]

    def samples(self, table: Columns, where: str) -> Nest:
        """A row of float64 each; a model's own type comes after all else."""
        for column in self.columns:
            check_column(table, column, where)
        return torch.from_numpy(
            np.column_stack([_numbers(where, column, table[column]) for column in self.columns])
        )

    def values(self, x: Nest, column: str) -> list[str] | None:
        """Numbers as they are, where no features were made of them."""
        if not isinstance(x, torch.Tensor) or x.shape[1:] != (len(self.columns),):
            return None
        return [
            f"{value:g}" for value in x[:, self.columns.index(column)].double().round(decimals=4).tolist()
        ]

    def to_mapping(self) -> dict[str, Any]:
        """Their names."""
        return {"columns": list(self.columns)}

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> NumberColumns:
        """Of their names."""
        return cls(tuple(stored["columns"]))


def _numbers(where: str, column: str, values: Any) -> npt.NDArray[Any]:
    """A column as numbers."""
    array = np.asarray(values.to_numpy(zero_copy_only=False))
    if array.dtype.kind not in "iufb":
        raise DataError(
            f"{where}: column {column} does not hold numbers ({values.type}); leave it out of the features"
        )
    return array.astype(np.float64)


READERS: dict[str, type[TableReader]] = {reader.kind: reader for reader in (NumberColumns, TextColumn)}
"""Ways to read a table, by kind."""


@dataclass(frozen=True)
class Preprocessing:
    """From raw rows to what a model takes: a table is read, features are computed, numbers are scaled."""

    table: TableReader | None = None
    """How rows of a table become samples; None where samples are arrays already."""
    features: Callable[[Nest], Nest] | None = None
    """One of :mod:`sartor.data.features`."""
    numbers: tuple[str, ...] = ()
    """Leaves of whole numbers that the model takes as floats, by path."""
    moments: Mapping[str, Moments] | None = None
    """How the leaves of the training samples lie, where they are normalised."""
    dtype: str | None = None
    """The type of a model's floats, where it is not that of the samples."""

    def transform(self, given: Any, where: str = "table") -> Nest:
        """What a model takes for a table's rows, or for samples that are arrays.

        ``given`` is a mapping of columns, a data frame, an Arrow table, or samples as arrays.
        """
        columns = None if self.table is None else columns_of(given, self.table.columns)
        if self.table is not None and columns is not None:
            given = self.table.samples(columns, where)
        x = inputs_of(given, where)
        x = x if self.features is None else self.features(x)
        return self.typed(self.scaled(self.as_floats(x)))

    def as_floats(self, x: Nest) -> Nest:
        """Samples with those leaves of whole numbers as floats that the model takes so."""

        dtype: torch.dtype = getattr(torch, self.dtype or "float32")

        def changed(path: str, leaf: torch.Tensor) -> torch.Tensor:
            return leaf.to(dtype) if path in self.numbers else leaf

        return nests.named(changed, x, "x") if self.numbers else x

    def scaled(self, x: Nest) -> Nest:
        """Samples with every leaf of floats normalised, where that is done."""
        if self.moments is None:
            return x
        moments = self.moments

        def scale(path: str, leaf: torch.Tensor) -> torch.Tensor:
            if not leaf.is_floating_point():
                return leaf
            own = moments[path]
            return own.normalise(leaf[:, None])[:, 0] if leaf.ndim == 1 else own.normalise(leaf)

        return nests.named(scale, x, "x")

    def typed(self, x: Nest) -> Nest:
        """Samples with their floats in the model's type."""
        if self.dtype is None:
            return x
        dtype: torch.dtype = getattr(torch, self.dtype)
        return nests.mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)

    def to_mapping(self) -> dict[str, Any]:
        """All of it as JSON."""
        table, features = self.table, self.features
        name = getattr(features, "name", "own")
        named = {"name": name, **vars(features)} if name in FEATURES else {"name": "own"}
        return {
            "table": None if table is None else {"kind": table.kind, **table.to_mapping()},
            "features": None if features is None else named,
            "numbers": list(self.numbers),
            "moments": {path: _stored_moments(own) for path, own in (self.moments or {}).items()},
            "dtype": self.dtype,
        }

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> Preprocessing:
        """What :meth:`to_mapping` gave."""
        table, features, moments = (dict(stored[key] or {}) for key in ("table", "features", "moments"))
        if features.get("name") == "own":
            raise DataError("its features are a function that was given in Python, which is not stored")
        return cls(
            READERS[table.pop("kind")].from_mapping(table) if table else None,
            FEATURES[features.pop("name")](**features) if features else None,
            tuple(stored["numbers"]),
            {path: _read_moments(own) for path, own in moments.items()} or None,
            stored["dtype"],
        )


def columns_of(given: Any, needed: Collection[str]) -> dict[str, Any] | None:
    """The columns of what is a table, those needed as Arrow arrays; None where it is something else."""
    import pyarrow as arrow

    if isinstance(given, (str, Path)):
        raise DataError(f"{given}: read the file first, as with sartor.data.readers.read_table")
    if isinstance(given, arrow.Table):
        return {name: given.column(name) for name in given.column_names}
    if hasattr(given, "columns") and hasattr(given, "__getitem__"):  # a data frame
        given = {str(name): given[name] for name in given.columns}
    if not isinstance(given, Mapping):
        return None
    made = {str(name): values for name, values in given.items()}
    made |= {name: _column(name, made[name]) for name in needed if name in made}
    lengths = {name: len(made[name]) for name in needed if name in made}
    if len(set(lengths.values())) > 1:
        first, other = next((a, b) for a, b in pairwise(lengths) if lengths[a] != lengths[b])
        raise DataError(
            f"column {first} of the table has {lengths[first]} rows, column {other} has {lengths[other]}"
        )
    return made


def _column(name: str, values: Any) -> Any:
    """A column as an Arrow array, in which what is missing in a data frame is a gap."""
    import pyarrow as arrow

    if isinstance(values, (arrow.Array, arrow.ChunkedArray)):
        return values
    try:
        return arrow.chunked_array([arrow.array(_listed(values), from_pandas=True)])
    except (arrow.ArrowException, TypeError) as error:
        raise DataError(f"column {name} of the table cannot be read: {error}") from None


def _listed(values: Any) -> Any:
    """A column's values as Arrow takes them."""
    if isinstance(values, torch.Tensor):
        return values.numpy(force=True)
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def _stored_moments(moments: Moments) -> dict[str, Any]:
    return {
        "number": moments.number,
        "mean": moments.mean.tolist(),
        "squares": moments.squares.tolist(),
    }


def _read_moments(stored: Mapping[str, Any]) -> Moments:
    mean, squares = (torch.tensor(stored[key], dtype=torch.float64) for key in ("mean", "squares"))
    return Moments(int(stored["number"]), mean, squares)
