"""Tables of a user's own, CSV or Parquet: rows of numbers and categories, or a column of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sartor import nests
from sartor.data.clients import SPLITS, ClientData, Samples, from_clients, relabel
from sartor.data.labels import check_labels, listed, texts_of
from sartor.data.readers import check_file, check_fits
from sartor.data.samples import inputs_of, number_of_classes, targets_of
from sartor.data.sources import Source
from sartor.data.texts import Tokenizer, encoded
from sartor.errors import DataError
from sartor.nests import Nest
from sartor.settings import nearest


def from_table(
    path: str | Path,
    client_column: str,
    label_column: str,
    feature_columns: Sequence[str] | None = None,
    *,
    category_columns: Sequence[str] = (),
    text_column: str | None = None,
    tokens: str | Tokenizer = "words",
    length: int = 64,
    vocabulary: int = 10_000,
    split_column: str | None = None,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    targets: str = "class",
    labels: Sequence[str] | None = None,
) -> ClientData:
    """A CSV or Parquet table with a column that names the client of each row.

    Features are the given columns, or all others; they must be numbers. Where there are ``category_columns``
    samples are ``{"numbers": ..., "categories": ...}``: categories are whole numbers from 0, or texts, which
    are numbered in alphabetical order. With a ``text_column`` a sample is its text in ``tokens`` instead, as
    in :func:`~sartor.data.texts.encoded`. Labels are whole numbers from 0, or texts, which are numbered in
    alphabetical order, or as in ``labels``: then every label in a CSV file is a text, also one that looks
    like a number. ``split_column`` may say ``train``, ``test`` or ``validation`` for each row; otherwise the
    splits are drawn. Clients are in ascending order.
    """
    path = Path(path)
    reserved = [column for column in (client_column, label_column, split_column) if column is not None]
    wanted = _Wanted(feature_columns, category_columns, text_column, tokens, length, vocabulary)
    columns = _checked_table(path, reserved, wanted, () if labels is None else (label_column,))
    split = None if split_column is None else np.asarray(columns[split_column].to_pylist()).astype(str)
    if split is not None and not np.isin(split, SPLITS).all():
        wrong = str(split[np.argmax(~np.isin(split, SPLITS))])
        raise DataError(f"{path}: column {split_column} says {wrong!r}; expected train, test or validation")
    x = wanted.inputs(path, columns, reserved, None if split is None else split == "train")
    y = np.asarray(columns[label_column].to_pylist())
    names, owner = np.unique(np.asarray(columns[client_column].to_pylist()), return_inverse=True)
    clients: dict[str, Samples | Mapping[str, Samples]] = {}
    rows_of = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    for name, mine in zip(names, rows_of, strict=True):
        if split is None:
            clients[str(name)] = (nests.rows(x, mine), y[mine])
        else:
            parts = {part: mine[split[mine] == part] for part in SPLITS}
            clients[str(name)] = {
                part: (nests.rows(x, rows), y[rows]) for part, rows in parts.items() if len(rows)
            }
    data = from_clients(
        clients,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        targets=targets,
        name=path.stem,
    )
    return data if labels is None else relabel(data, labels, str(path))


def source_from_table(
    path: str | Path,
    label_column: str,
    feature_columns: Sequence[str] | None = None,
    *,
    category_columns: Sequence[str] = (),
    text_column: str | None = None,
    tokens: str | Tokenizer = "words",
    length: int = 64,
    vocabulary: int = 10_000,
    targets: str = "class",
    labels: Sequence[str] | None = None,
) -> Source:
    """A CSV or Parquet table whose rows a partition is to divide; the rest is as in :func:`from_table`."""
    path = Path(path)
    wanted = _Wanted(feature_columns, category_columns, text_column, tokens, length, vocabulary)
    columns = _checked_table(path, [label_column], wanted, () if labels is None else (label_column,))
    x = inputs_of(wanted.inputs(path, columns, [label_column]), str(path))
    given = np.asarray(columns[label_column].to_pylist())
    texts = texts_of(given) if targets in ("class", "any") else None
    found = None if texts is None else tuple(sorted(set(texts.tolist()))) if labels is None else tuple(labels)
    if found is not None and texts is not None:
        check_labels(found)
        given = np.array([_place_of(label, found, path, row) for row, label in enumerate(texts.tolist())])
    y = targets_of(given, str(path), targets)
    classes = number_of_classes(y, targets) if found is None else len(found)
    test_x, test_y = nests.rows((x, y), slice(0, 0))
    return Source(path.stem, x, y, test_x, test_y, classes, found)


def _place_of(label: str, labels: Sequence[str], path: Path, row: int) -> int:
    if label not in labels:
        raise DataError(f"{path}: row {row} has the label {label!r}, not among the classes {listed(labels)}")
    return labels.index(label)


@dataclass(frozen=True)
class _Wanted:
    """Which columns of a table are the sample, and how texts become tokens."""

    features: Sequence[str] | None
    categories: Sequence[str]
    text: str | None
    tokens: str | Tokenizer
    length: int
    vocabulary: int

    def columns(self, held: Iterable[str], reserved: Sequence[str]) -> list[str]:
        """The columns of numbers: those given, or all others; with a text none."""
        if self.features is None and self.text is None:
            return [column for column in held if column not in (*reserved, *self.categories)]
        return list(self.features or ())

    def inputs(
        self,
        path: Path,
        columns: Mapping[str, Any],
        reserved: Sequence[str],
        learnt: Sequence[bool] | None = None,
    ) -> Nest:
        """The samples."""
        if self.text is not None:
            texts = [str(text) for text in columns[self.text].to_pylist()]
            where = f"{path}, column {self.text}"
            options = {"length": self.length, "vocabulary": self.vocabulary}
            return encoded(texts, self.tokens, **options, learnt=learnt, where=where)
        named = self.columns(columns, reserved)
        numbers = [_numbers(path, column, columns[column]) for column in named]
        if not self.categories:
            return torch.from_numpy(np.column_stack(numbers))
        kinds = [_kinds(path, column, columns[column]) for column in self.categories]
        nest = {"categories": torch.from_numpy(np.column_stack(kinds))}
        return {"numbers": torch.from_numpy(np.column_stack(numbers)), **nest} if numbers else nest


def _checked_table(
    path: Path, reserved: Sequence[str], wanted: _Wanted, texts: Sequence[str]
) -> dict[str, Any]:
    """The columns of a table that has all that are wanted, with a value in every row."""
    columns = _read_table(path, texts=(*texts, *(() if wanted.text is None else (wanted.text,))))
    if not len(next(iter(columns.values()), ())):
        raise DataError(f"{path}: no rows")
    named = wanted.columns(columns, reserved)
    inputs = [*named, *wanted.categories, *(() if wanted.text is None else (wanted.text,))]
    for column in (*reserved, *inputs):
        if column not in columns:
            guess = nearest(column, columns)
            hint = f"did you mean {guess}?" if guess else f"it has {', '.join(columns)}"
            raise DataError(f"{path}: no column {column}; {hint}")
    if wanted.text is not None and len(inputs) > 1:
        raise DataError(f"{path}: with the text {wanted.text} other columns cannot be read; leave them out")
    if not inputs or set(inputs) & set(reserved):
        raise DataError(f"{path}: give at least one feature column besides {', '.join(reserved)}")
    for column in (*reserved, *inputs):
        if columns[column].null_count:
            row = int(np.argmax(columns[column].is_null().to_numpy()))
            raise DataError(f"{path}: column {column} has no value in row {row} (first row is 0)")
    return columns


def _read_table(path: Path, texts: Sequence[str] = ()) -> dict[str, Any]:
    """The columns of a table, by the ending of its name; some of a CSV file are texts, whatever they hold."""
    import pyarrow
    from pyarrow import csv, parquet

    check_file(path)
    check_fits(path, path.stat().st_size)
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            groups = parquet.read_metadata(path)
            check_fits(path, sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)))
            table = parquet.read_table(path)
        elif path.suffix.lower() == ".csv":
            types = csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
            table = csv.read_csv(path, convert_options=types)
        else:
            raise DataError(f"{path}: expected a name that ends in .csv or .parquet")
        names = list(table.column_names)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a table ({' '.join(str(error).split())[:200]})") from None
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise DataError(f"{path}: two columns are called {', '.join(sorted(twice))}")
    unprintable = [name for name in names if not name.isprintable()]
    if unprintable:
        raise DataError(f"{path}: the column name {unprintable[0]!r} is not printable; rename it")
    return {name: table.column(name) for name in names}


def _numbers(path: Path, column: str, values: Any) -> npt.NDArray[Any]:
    """A column as numbers."""
    array = np.asarray(values.to_numpy())
    if array.dtype.kind not in "iufb":
        raise DataError(
            f"{path}: column {column} does not hold numbers ({values.type}); leave it out of the features"
        )
    return array.astype(np.float32)


def _kinds(path: Path, column: str, values: Any) -> npt.NDArray[np.int64]:
    """A column as categories: whole numbers from 0, or texts in alphabetical order."""
    array = np.asarray(values.to_pylist())
    if array.dtype.kind in "iub":
        if array.min() < 0:
            row = int(np.argmax(array < 0))
            raise DataError(f"{path}: column {column} is {array[row]} in row {row}; categories are from 0")
        return array.astype(np.int64)
    if array.dtype.kind != "U":
        raise DataError(f"{path}: column {column} holds {values.type}; categories are whole numbers or texts")
    return np.unique(array, return_inverse=True)[1].astype(np.int64)
