"""Tables by a schema: read by the names of their columns, and made numbers as the schema says.

Reading (:func:`from_schema`) and preparing (:func:`encoded`) are two steps, as clients have to agree between
them on what is learned: in one place :func:`prepared` does it, at nodes the server does
(:mod:`sartor.data.statistics`). Ranks and words are scikit-learn's work, which is fitted to nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from sartor import nests
from sartor.data.clients import ClientData, Samples, by_client, from_clients, relabel
from sartor.data.preprocessing import READERS
from sartor.data.readers import TABLES, read_table
from sartor.data.schema import (
    NUMBERS,
    TEXTS,
    Column,
    columns_mapping,
    feature_names,
    features,
    numbered,
    read_columns,
    role,
)
from sartor.data.statistics import LARGEST, Told, agreed, is_category, merged, statistics_of
from sartor.errors import DataError
from sartor.nests import Nest
from sartor.settings import nearest, shown

log = logging.getLogger(__name__)

DAY = 86400.0
NOTHING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "#N/A")
"""What stands for no value in a text."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows as they were read: numbers with nan for a gap, texts with None, by column."""

    columns: tuple[Column, ...]
    raw: dict[str, npt.NDArray[Any]]

    def statistics(self, rows: npt.NDArray[np.int64]) -> Told:
        """What is told of some of the rows."""
        return statistics_of(self.columns, {name: values[rows] for name, values in self.raw.items()})


def is_table(path: Path) -> bool:
    """Whether a file is a table by its name, or a folder has such files."""
    if path.is_dir():
        return bool(files_of(path))
    return path.suffix.lower() in TABLES


def files_of(path: Path) -> list[Path]:
    """The tables of a folder in the order of their names, or the one that a path names."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix.lower() in TABLES)


def from_schema(
    path: str | Path,
    columns: Sequence[Column] | Mapping[str, Any],
    *,
    name: str | None = None,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    targets: str = "class",
    labels: Sequence[str] | None = None,
) -> ClientData:
    """The clients of a table, or of a folder of tables, whose columns a schema describes; not yet prepared.

    Columns are found by their names, in whatever order they stand. A row's client is said by the column of
    kind ``client``; in a table that has none, all rows are those of one client of the table's name, or of
    ``name``. The samples are the numbers of rows until :func:`prepared` makes them what the schema says. The
    other settings are those of :func:`~sartor.data.clients.from_clients`.
    """
    columns = read_columns(columns) if isinstance(columns, Mapping) else tuple(columns)
    path = Path(path)
    raw, owners = read_raw(path, columns, name)
    y = _targets(raw, columns, targets, labels, path)
    split, weight = role(columns, "split"), role(columns, "weight")

    def samples(rows: npt.NDArray[np.int64]) -> Samples:
        return (rows[:, None], y[rows]) if weight is None else (rows[:, None], y[rows], raw[weight][rows])

    parts = None if split is None else raw[split].astype(str)
    clients = by_client(owners, samples, parts, f"{path}: column {split}")
    data = from_clients(
        clients,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        targets=targets,
        name=path.stem,
    )
    data = data if labels is None else relabel(data, labels, str(path))
    held = [key for column in features(columns) for key in (column.name, _moments(column)) if key in raw]
    seen = {key: raw[key] for key in held}
    digest = hashlib.sha256(data.hash.encode())
    for key, values in seen.items():
        content = values.tobytes() if values.dtype != object else repr(values.tolist()).encode()
        digest.update(key.encode() + content)
    return replace(data, hash=digest.hexdigest(), columns=columns, table=Table(columns, seen))


def read_raw(
    path: Path, columns: Sequence[Column], name: str | None = None
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any]]:
    """The columns of a table, or of all tables of a folder, that a schema has, and each row's client."""
    files = files_of(path)
    if not files:
        raise DataError(f"{path}: no table in it, whose name ends in {', '.join(TABLES)}")
    of: dict[str, Path] = {}
    for file in files if role(columns, "client") is None else ():
        other = of.setdefault(file.stem, file)
        if other != file:
            raise DataError(
                f"{path}: {other.name} and {file.name} are both the table of client {file.stem}; leave one "
                "out"
            )
    parts = [_read(file, columns, None if path.is_dir() else name) for file in files]
    raw = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return raw, raw.pop("").astype(str)


def prepared(data: ClientData) -> ClientData:
    """Clients of a table, with what all of them agree on learned from their training rows.

    >>> import csv
    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "oslo.csv"
    >>> rows = [("sex", "age", "ill"), *[("f", 61, 0), ("m", 47, 1), ("f", "", 1)] * 4]
    >>> with path.open("w", newline="") as file:
    ...     csv.writer(file).writerows(rows)
    >>> schema = {"sex": "category", "age": {"missing": "mean"}, "ill": "label"}
    >>> data = prepared(from_schema(path, schema))
    >>> data.names, data.columns[0].values, tuple(data.train.x.shape)
    (('oslo',), ('f', 'm'), (10, 4))
    """
    assert data.columns is not None
    return encoded(data, agreed(data.columns, told_of(data)))


def told_of(data: ClientData) -> Told:
    """What clients of a table that is not prepared tell of their training rows, added up."""
    assert data.table is not None
    rows = [data.train.of(client)[0][:, 0].numpy() for client in range(data.clients)]
    return merged(data.table.columns, [data.table.statistics(mine) for mine in rows])


def encoded(data: ClientData, columns: Sequence[Column]) -> ClientData:
    """Clients of a table, prepared by columns of which all is known."""
    assert data.table is not None
    x, columns = encode(columns, data.table.raw), tuple(columns)
    data = data.preprocessed(lambda rows: nests.rows(x, rows[:, 0]), table=SchemaColumns(columns))
    return replace(data, columns=columns, table=None)


@dataclass(frozen=True)
class SchemaColumns:
    """Rows by columns of which all is known, without a label: how a table's preprocessing reads new ones.

    >>> import pyarrow
    >>> reader = SchemaColumns(read_columns({"sex": {"kind": "category", "values": ["f", "m"]}}))
    >>> reader.samples({"sex": pyarrow.array(["m", "x"])}, "new")
    tensor([[0., 1., 0.],
            [0., 0., 1.]], dtype=torch.float64)
    """

    kind: ClassVar[str] = "schema"
    schema: tuple[Column, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it needs."""
        return tuple(column.name for column in features(self.schema))

    def samples(self, table: Mapping[str, Any], where: str) -> Nest:
        """The samples of all rows."""
        seen = features(self.schema)
        held = {name: _whole(table[name]) for name in table}
        return encode(seen, _values_of(held, seen, where))

    def values(self, x: Nest, column: str) -> list[str] | None:
        """The words of a category or an ordinal in samples that were read; None for a column of another kind.

        >>> reader = SchemaColumns(read_columns({"sex": {"kind": "category", "values": ["f", "m"]}}))
        >>> reader.values(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), "sex")
        ['m', 'unknown']
        """
        (found,) = (each for each in features(self.schema) if each.name == column)
        words = [str(value) for value in found.values or ()]
        numbers, categories = (x["numbers"], x["categories"]) if isinstance(x, dict) else (x, x)
        if found in numbered(self.schema):
            place = [each.name for each in numbered(self.schema)].index(column)
            return [["unknown", *words][number] for number in categories[:, place].tolist()]
        names = feature_names(self.schema)
        if found.kind == "ordinal":
            places = numbers[:, names.index(column)] * max(len(words) - 1, 1)
            return [[*words, "unknown"][number] for number in places.round().long().tolist()]
        if found.kind != "category":
            return None
        first = names.index(f"{column} = {words[0]}")
        return [
            [*words, "unknown"][place] for place in numbers[:, first:][:, : len(words) + 1].argmax(1).tolist()
        ]

    def to_mapping(self) -> dict[str, Any]:
        """The columns as an experiment has them."""
        return {"columns": columns_mapping(features(self.schema))}

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> SchemaColumns:
        """Of such columns."""
        return cls(read_columns(stored["columns"]))


READERS[SchemaColumns.kind] = SchemaColumns


def _whole(values: Any) -> Any:
    """A column in one piece."""
    return values.combine_chunks() if hasattr(values, "combine_chunks") else values


def blank(columns: Sequence[Column]) -> Nest:
    """One sample of zeros; of every category that is a number the largest one that there is."""
    numbers = torch.zeros((1, len(feature_names(columns))))
    largest = torch.tensor([[len(column.values or ()) for column in numbered(columns)]])
    return _nest(numbers, largest.long())


def encode(columns: Sequence[Column], raw: Mapping[str, npt.NDArray[Any]]) -> Nest:
    """The samples of rows: a tensor of numbers, or with categories for an embedding a dict of the two."""
    made = [_numbers(column, raw) for column in features(columns)]
    indices = [_index(column, raw[column.name])[:, None] for column in numbered(columns)]
    rows = len(raw[features(columns)[0].name])
    numbers = np.concatenate([np.zeros((rows, 0)), *made], axis=1)
    categories = np.concatenate([np.zeros((rows, 0), np.int64), *indices], axis=1)
    return _nest(torch.from_numpy(numbers), torch.from_numpy(categories))


def _nest(numbers: torch.Tensor, categories: torch.Tensor) -> Nest:
    if not categories.shape[1]:
        return numbers
    return {"numbers": numbers, "categories": categories} if numbers.shape[1] else {"categories": categories}


# What a column becomes --------------------------------------------------------------------------------


def _numbers(column: Column, raw: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """The features of a column that are numbers."""
    values = raw[column.name]
    gaps = gaps_of(values)
    if column.kind in NUMBERS:
        parts = [_scaled(column, values), *(_circle(raw[_moments(column)], part) for part in column.parts)]
    elif column.kind == "ordinal":
        place = np.asarray(_index(column, values) - 1, np.float64)
        parts = [place[:, None] / max(len(column.values or ()) - 1, 1)]
    elif column.kind == "text":
        parts = [_hashed(column, values)]
    else:
        parts = [_one_hot(column, values)] if column.code == "one-hot" else []
    parts += [gaps.astype(np.float64)[:, None]] * column.indicator
    return np.concatenate([np.zeros((len(values), 0)), *parts], axis=1)


def gaps_of(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where a column that was read has no value."""
    if values.dtype == object:
        return np.array([value is None for value in values], dtype=bool)
    return np.asarray(np.isnan(values), dtype=bool)


def _scaled(column: Column, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    filled = np.where(np.isnan(values), np.nan if column.fill is None else float(column.fill), values)
    if column.scale == "quantile":
        from sklearn.preprocessing import QuantileTransformer

        ranks = np.array(column.quantiles)[:, None]
        scaler = QuantileTransformer(n_quantiles=len(ranks), subsample=None).fit(ranks)
        return np.asarray(scaler.transform(filled[:, None]), np.float64)
    if column.scale == "none":
        return filled[:, None]
    return (filled[:, None] - (column.centre or 0.0)) / (column.spread or 1.0)


def _circle(seconds: npt.NDArray[np.float64], part: str) -> npt.NDArray[np.float64]:
    """Where a date lies in its year, week or day, as a point of a circle; the middle where there is none."""
    gaps = np.isnan(seconds)
    dates = np.where(gaps, 0, seconds).astype("datetime64[s]")
    if part == "month":
        share = (dates.astype("datetime64[M]").astype(np.int64) % 12) / 12
    elif part == "weekday":
        share = ((dates.astype("datetime64[D]").astype(np.int64) + 3) % 7) / 7
    else:
        share = (dates.astype(np.int64) // 3600 % 24) / 24
    return np.where(gaps[:, None], 0.0, np.stack([np.sin(2 * np.pi * share), np.cos(2 * np.pi * share)], 1))


def _hashed(column: Column, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    from sklearn.feature_extraction.text import HashingVectorizer

    hasher = HashingVectorizer(n_features=column.size, alternate_sign=False)
    found = hasher.transform([value or "" for value in values.tolist()]) if len(values) else None
    return np.zeros((0, column.size)) if found is None else np.asarray(found.todense(), np.float64)


def _one_hot(column: Column, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    places = len(column.values or ())
    number = _index(column, values)
    return np.eye(places + 1)[np.where(number == 0, places, number - 1)]


def _index(column: Column, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The number of each category, from 1; 0 is unknown."""
    number: dict[Any, int] = {value: place for place, value in enumerate(column.values or (), start=1)}
    number[None] = number.get(column.fill, 0)
    return np.array([number.get(value, 0) for value in values], np.int64)


# What a file holds ------------------------------------------------------------------------------------


def _read(path: Path, columns: Sequence[Column], name: str | None) -> dict[str, npt.NDArray[Any]]:
    """The columns of one file that a schema describes; ``""`` is the client of each row."""
    held = read_table(path, None)
    rows = len(next(iter(held.values()), ()))
    if not rows:
        raise DataError(f"{path}: no rows")
    client = role(columns, "client")
    others = sorted(set(held) - {column.name for column in columns})
    if others:
        told = ", ".join(name or "without a name" for name in others)
        log.warning("%s: the schema does not have the columns %s; they are left out", path, told)
    wanted = [column for column in columns if column.kind not in ("out", "client")]
    made = _values_of(held, wanted, path)
    if client in held:
        made[""] = texts_of(path, held[client], str(client))
        gaps = gaps_of(made[""])
        if gaps.any():
            row = int(np.argmax(gaps))
            raise DataError(f"{path}: column {client} names no client in row {row} (first row is 0)")
    else:
        made[""] = np.full(rows, name or path.stem, dtype=object)
    return made


def _values_of(
    held: Mapping[str, Any], wanted: Sequence[Column], where: Path | str
) -> dict[str, npt.NDArray[Any]]:
    """The wanted columns of a table as the schema reads them."""
    made: dict[str, npt.NDArray[Any]] = {}
    for column in wanted:
        if column.name not in held:
            guess = nearest(column.name, held)
            hint = f"did you mean {guess}?" if guess else f"it has {', '.join(held)}"
            raise DataError(f"{where}: no column {column.name}, which the schema has ([columns]); {hint}")
        made |= _values(where, column, held[column.name])
    for column in wanted:
        if column.since is not None:
            made[column.name] = made[column.name] - made[column.since]
    for column in wanted:
        _refuse_gaps(where, column, made)
    return made


def _values(path: Path | str, column: Column, values: Any) -> dict[str, npt.NDArray[Any]]:
    """A column as the schema reads it; of a date whose parts are features, the seconds too."""
    if column.kind in ("number", "weight"):
        return {column.name: as_numbers(path, column.name, values)}
    if column.kind == "date":
        seconds = as_seconds(path, column, values)
        return {column.name: seconds / DAY, _moments(column): seconds}
    texts = texts_of(path, values, column.name)
    if column.kind in TEXTS:
        texts = _coded(path, column, texts)
    return {column.name: texts}


def _moments(column: Column) -> str:
    """Where the seconds of a date are; no column has such a name, as it is not printable."""
    return f"{column.name}\0"


def as_numbers(path: Path | str, name: str, values: Any) -> npt.NDArray[np.float64]:
    """A column as numbers, nan where there is none."""
    import pyarrow
    from pyarrow import compute

    values = _said(values)
    try:
        floats = compute.cast(values, pyarrow.float64(), safe=False)
    except pyarrow.ArrowException:
        row, found = _first(values, lambda one: compute.cast(one, pyarrow.float64()))
        raise DataError(
            f"{path}: column {name} holds {shown(found)} in row {row} (first row is 0), which is no number; "
            "correct it, or give the column another kind"
        ) from None
    made: npt.NDArray[np.float64] = np.array(floats.to_numpy(zero_copy_only=False), np.float64)
    wrong = np.isinf(made) | (np.abs(made) > LARGEST)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{path}: column {name} holds {made[row]:g} in row {row}, which is too large a number"
        )
    return made


def as_seconds(path: Path | str, column: Column, values: Any) -> npt.NDArray[np.float64]:
    """A column as seconds since 1970, nan where there is none."""
    import pyarrow
    from pyarrow import compute

    def read(found: Any) -> Any:
        if column.format is not None and pyarrow.types.is_string(found.type):
            return compute.strptime(found, format=column.format, unit="s")
        return compute.cast(found, pyarrow.timestamp("s"), safe=False)

    values = _said(values)
    try:
        seconds = compute.cast(read(values), pyarrow.int64())
    except pyarrow.ArrowException:
        row, found = _first(values, read)
        raise DataError(
            f"{path}: column {column.name} holds {shown(found)} in row {row} (first row is 0), which is no "
            f"date like {column.format or '2026-11-16 or 2026-11-16 08:30:00'}; say how it is written "
            f"({column.place}.format)"
        ) from None
    return np.array(seconds.to_numpy(zero_copy_only=False), np.float64)


def _said(values: Any) -> Any:
    """Numbers or dates that are written as texts, without blanks around them and words for nothing."""
    import pyarrow
    from pyarrow import compute

    if not (pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type)):
        return values
    texts = compute.utf8_trim_whitespace(values)
    return compute.if_else(compute.is_in(texts, pyarrow.array(NOTHING, texts.type)), None, texts)


def _first(values: Any, read: Any) -> tuple[int, Any]:
    """The first value that cannot be read, and its row."""
    import pyarrow

    for row in range(len(values)):
        try:
            read(values.slice(row, 1))
        except pyarrow.ArrowException:
            return row, values[row].as_py()
    return 0, values[0].as_py()


def texts_of(path: Path | str, values: Any, name: str) -> npt.NDArray[Any]:
    """A column as texts, None where there is none; numbers are written as they are."""
    import pyarrow
    from pyarrow import compute

    try:
        texts = compute.cast(values, pyarrow.string())
    except pyarrow.ArrowException:
        raise DataError(f"{path}: column {name} ({values.type}) holds neither texts nor numbers") from None
    found = (value.strip() if value is not None else "" for value in texts.to_pylist())
    return np.array([None, *(None if value in NOTHING else value for value in found)], dtype=object)[1:]


def _coded(path: Path | str, column: Column, texts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Categories by their words in the schema; an ordinal has no others."""
    there = sorted(set(texts.tolist()) - {None})
    words = dict(zip(there, _spelled(column, there), strict=True))
    for value, known in words.items():
        if not is_category(known):
            raise DataError(
                f"{path}: column {column.name} holds {shown(value)}, which names no category; say which one "
                f"it is ({column.place}.codes)"
            )
        if column.kind == "ordinal" and known not in (column.values or ()):
            raise DataError(
                f"{path}: column {column.name} holds {shown(value)}, which is not among its values "
                f"{', '.join(map(shown, column.values or ()))}; say which one it is ({column.place}.codes)"
            )
    return np.array([None, *(words.get(value) for value in texts)], dtype=object)[1:]


def _spelled(column: Column, there: Sequence[str]) -> list[str]:
    """Words as the schema has them; what is not in it may be there as another kind of file writes it."""
    own = [*column.codes, *(column.values or ())]
    alike: dict[str, list[str]] = {}
    for word in own:
        alike.setdefault(_in_any_file(word), []).append(word)
    found = []
    for value in there:
        others = [] if value in own else alike.get(_in_any_file(value), [])
        value = others[0] if len(others) == 1 else value
        found.append(column.codes.get(value, value))
    return found


def _in_any_file(value: str) -> str:
    """One word for True and true, and for 1.0 and 1, which are the same in a file of another kind."""
    if value.lower() in ("true", "false"):
        return value.lower()
    try:
        return repr(float(value))
    except ValueError:
        return value


def _refuse_gaps(path: Path | str, column: Column, made: Mapping[str, npt.NDArray[Any]]) -> None:
    values = made[column.name]
    gaps = gaps_of(values)
    if column.missing != "refuse" or not gaps.any():
        return
    row = int(np.argmax(gaps))
    where = f"{path}: column {column.name} has no value in row {row} (first row is 0)"
    if column.kind in ("label", "split", "weight"):
        raise DataError(f"{where}; every row needs one")
    raise DataError(f"{where}; say what fills gaps ({column.place}.missing), or leave the column out")


def _targets(
    raw: Mapping[str, npt.NDArray[Any]],
    columns: Sequence[Column],
    targets: str,
    labels: Sequence[str] | None,
    path: Path,
) -> npt.NDArray[Any]:
    """The label of each row: whole numbers, numbers, or texts."""
    label = role(columns, "label")
    if label is None:
        raise DataError(f"{path}: the schema has no label; give a column the kind label ([columns])")
    texts = raw[label].astype(str)
    if targets == "number":
        try:
            return texts.astype(np.float64)
        except ValueError:
            raise DataError(f"{path}: column {label} holds no numbers, which are wanted") from None
    if labels is None:
        try:
            return texts.astype(np.int64)
        except ValueError:
            pass
    return texts
