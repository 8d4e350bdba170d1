"""Your own data: a folder of files, a table with a client column, a torch data set, Flower's partitions.

Data already in memory go through :func:`sartor.data.clients.from_clients`; everything here ends there or in a
:class:`~sartor.data.sources.Source`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sartor import nests
from sartor.data.apportion import cut
from sartor.data.clients import SPLITS, ClientData, Pair, Samples, by_client, from_clients, relabel
from sartor.data.labels import check_labels, listed, texts_of
from sartor.data.partitions import Partition, apply, make_partition
from sartor.data.preprocessing import NumberColumns, Preprocessing
from sartor.data.readers import check_column, read_npz, read_table
from sartor.data.samples import inputs_of, is_class, number_of_classes, targets_of
from sartor.data.schemes import Scheme
from sartor.data.sources import Source
from sartor.data.streams import stream
from sartor.data.texts import TextColumn, Tokenizer, encoded
from sartor.errors import DataError
from sartor.settings import unknown


def from_folder(
    path: str | Path,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    targets: str = "class",
    labels: Sequence[str] | None = None,
) -> ClientData:
    """A folder with one npz file per client, named after it.

    A file holds ``x`` and ``y``, or ``train_x, train_y, test_x, test_y`` and perhaps ``validation_x,
    validation_y``; beside them may be ``weight``, or ``train_weight``, of the training samples. A dict of
    arrays is written with its names behind a dot: ``x.input_ids``, ``x.length``; a tuple with its places:
    ``x.0``, ``x.1``. What is not given is drawn as in :func:`~sartor.data.clients.from_clients`, which has
    the other settings too.
    """
    path = Path(path)
    files = sorted(path.glob("*.npz"))
    if not files:
        raise DataError(f"{path}: no npz files; expected one per client")
    clients = {file.stem: read_client(file) for file in files}
    data = from_clients(
        clients,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        targets=targets,
        name=path.name,
    )
    return data if labels is None else relabel(data, labels, str(path))


def read_client(file: Path) -> Samples | Mapping[str, Samples]:
    """What an npz file holds of one client, as :func:`~sartor.data.clients.from_clients` takes it."""
    held = nested(read_npz(file))
    if set(held) - {"weight"} == {"x", "y"}:
        return tuple(held[part] for part in ("x", "y", "weight") if part in held)
    weight = (held.pop("train_weight"),) if "train_weight" in held else ()
    known = {f"{split}_{part}" for split in SPLITS for part in "xy"}
    pairs = {split: (f"{split}_x", f"{split}_y") for split in SPLITS}
    given = {split: pair for split, pair in pairs.items() if set(pair) & set(held)}
    if (
        set(held) - known
        or "train" not in given
        or any(not set(pair) <= set(held) for pair in given.values())
    ):
        raise DataError(
            f"{file}: expected the arrays x and y, or train_x, train_y, test_x, test_y and perhaps "
            f"validation_x, validation_y; it has {', '.join(held) or 'nothing'}"
        )
    return {
        split: (held[x], held[y], *weight) if split == "train" else (held[x], held[y])
        for split, (x, y) in given.items()
    }


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays whose names have dots as dicts of arrays, or as tuples where the names are places."""
    held: dict[str, Any] = {}
    for name, array in arrays.items():
        root, dot, rest = name.partition(".")
        if dot and isinstance(held.setdefault(root, {}), dict):
            held[root][rest] = array
        else:
            held[name] = array
    return {root: _inner(value) if isinstance(value, dict) else value for root, value in held.items()}


def _inner(named: dict[str, Any]) -> Any:
    inner = nested(named)
    if set(inner) == {str(place) for place in range(len(inner))}:
        return tuple(inner[str(place)] for place in range(len(inner)))
    return inner


def from_table(
    path: str | Path,
    client_column: str,
    label_column: str,
    feature_columns: Sequence[str] | None = None,
    *,
    text_column: str | None = None,
    tokens: str | Tokenizer | TextColumn = "words",
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

    Features are the given columns, or all others; they must be numbers. With a ``text_column`` a sample is
    its text in ``tokens`` instead, as in :func:`~sartor.data.texts.encoded`, or numbered as those of other
    data are (``tokens=data.preprocessing.table``). Labels are whole numbers from 0,
    or texts, which are numbered in alphabetical order, or as in ``labels``: then every label in a CSV file is
    a text, also one that looks like a number. ``split_column`` may say ``train``, ``test`` or ``validation``
    for each row; otherwise the splits are drawn. Clients are in ascending order.
    """
    path = Path(path)
    columns = read_table(path, texts=_texts(label_column if labels is not None else None, text_column))
    reserved = list(_texts(client_column, label_column, split_column))
    split = None
    if split_column is not None:
        check_column(columns, split_column, str(path))
        split = np.asarray(columns[split_column].to_pylist()).astype(str)
    learnt = None if split is None else (split == "train").tolist()
    wanted = feature_columns, text_column, tokens, length, vocabulary, path, learnt
    reader = _reader(columns, reserved, *wanted)
    x, y = reader.samples(columns, str(path)), np.asarray(columns[label_column].to_pylist())
    owners = np.asarray(columns[client_column].to_pylist())
    if (owners == "").any():
        row = int(np.argmax(owners == ""))
        raise DataError(f"{path}: column {client_column} names no client in row {row} (first row is 0)")
    clients = by_client(
        owners, lambda rows: (nests.rows(x, rows), y[rows]), split, f"{path}: column {split_column}"
    )
    data = from_clients(
        clients,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        targets=targets,
        name=path.stem,
    )
    data = replace(data, preprocessing=Preprocessing(table=reader))
    return data if labels is None else relabel(data, labels, str(path))


def source_from_table(
    path: str | Path,
    label_column: str,
    feature_columns: Sequence[str] | None = None,
    *,
    text_column: str | None = None,
    tokens: str | Tokenizer | TextColumn = "words",
    length: int = 64,
    vocabulary: int = 10_000,
    targets: str = "class",
    labels: Sequence[str] | None = None,
) -> Source:
    """A CSV or Parquet table whose rows a partition is to divide; the rest is as in :func:`from_table`."""
    path = Path(path)
    columns = read_table(path, texts=_texts(label_column if labels is not None else None, text_column))
    reader = _reader(columns, [label_column], feature_columns, text_column, tokens, length, vocabulary, path)
    x = inputs_of(reader.samples(columns, str(path)), str(path))
    given = np.asarray(columns[label_column].to_pylist())
    texts = texts_of(given) if targets in ("class", "any") else None
    found = None if texts is None else tuple(sorted(set(texts.tolist()))) if labels is None else tuple(labels)
    if found is not None and texts is not None:
        check_labels(found)
        given = np.array([_place_of(label, found, path, row) for row, label in enumerate(texts.tolist())])
    y = targets_of(given, str(path), targets)
    classes = number_of_classes(y, targets) if found is None else len(found)
    test_x, test_y = nests.rows((x, y), slice(0, 0))
    return Source(path.stem, x, y, test_x, test_y, classes, found, Preprocessing(table=reader))


def _place_of(label: str, labels: Sequence[str], path: Path, row: int) -> int:
    if label not in labels:
        raise DataError(f"{path}: row {row} has the label {label!r}, not among the classes {listed(labels)}")
    return labels.index(label)


def _texts(*columns: str | None) -> tuple[str, ...]:
    return tuple(column for column in columns if column is not None)


def _reader(
    columns: Mapping[str, Any],
    reserved: Sequence[str],
    features: Sequence[str] | None,
    text: str | None,
    tokens: str | Tokenizer | TextColumn,
    length: int,
    vocabulary: int,
    path: Path,
    learnt: Sequence[bool] | None = None,
) -> NumberColumns | TextColumn:
    """How the rows of a table are read: as numbers, or as a text."""
    if not len(next(iter(columns.values()), ())):
        raise DataError(f"{path}: no rows")
    if features is None:
        features = [] if text is not None else [column for column in columns if column not in reserved]
        if "" in features:
            raise DataError(
                f"{path}: a column has no name, as numbers of rows that pandas writes; give it one, or name "
                "the columns that are features (feature_columns)"
            )
    for column in (*reserved, *features, *_texts(text)):
        check_column(columns, column, str(path))
    if text is not None and features:
        raise DataError(f"{path}: with the text {text} other columns cannot be read; leave them out")
    if set(_texts(text) or features) & set(reserved) or not (features or text):
        raise DataError(f"{path}: give at least one feature column besides {', '.join(reserved)}")
    if text is None:
        return NumberColumns(tuple(features))
    return TextColumn.learnt(text, columns, tokens, length, vocabulary, learnt, str(path))


def from_columns(
    dataset: Any,
    x: str | Sequence[str],
    y: str,
    *,
    client: str | None = None,
    partition: Partition | Scheme | str | Mapping[str, Any] | None = None,
    clients: int | None = None,
    test: Any = None,
    tokens: str | Tokenizer = "words",
    length: int = 64,
    vocabulary: int = 10_000,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    targets: str = "class",
    name: str = "columns",
) -> ClientData:
    """A Hugging Face ``datasets`` object in memory, whose columns ``x`` and ``y`` are the samples.

    ``x`` is a column, or several, whose samples are then dicts. A column of texts becomes ``tokens`` (see
    :func:`~sartor.data.texts.encoded`), images in bytes numbers in 0..1 with their channels first. The column
    ``client`` names the client of each row; or a ``partition`` divides the rows, and perhaps those of
    ``test``, as in :func:`from_dataset`.
    """
    if (client is None) == (partition is None):
        raise DataError(f"{name}: say whose rows are: by the column client=..., or by partition=...")
    rows = _rows_of(dataset, [*([x] if isinstance(x, str) else x), y, *([client] if client else [])], name)
    options: dict[str, Any] = {"length": length, "vocabulary": vocabulary}

    def inputs(rows: Mapping[str, Any]) -> Any:
        if isinstance(x, str):
            return _column(rows[x], tokens, options, f"{name}, column {x}")
        found = {column: _column(rows[column], tokens, options, f"{name}, column {column}") for column in x}
        return found

    if client is None:
        assert partition is not None
        pairs = [(inputs(rows), rows[y])]
        if test is not None:
            if callable(tokens) is False and tokens != "hashed" and _has_texts(rows, x):
                raise DataError(
                    f"{name}: texts of test are numbered apart; give tokens='hashed' or a function"
                )
            other = _rows_of(test, list(rows), f"{name} test")
            pairs.append((inputs(other), other[y]))
        source = _source_of(pairs, name, targets)
        if not isinstance(partition, Partition):
            partition = make_partition(source, partition, clients, seed, validation_fraction, test_fraction)
        return apply(source, partition)
    if test is not None:
        raise DataError(f"{name}: test rows go with a partition; each client's own are drawn from its rows")
    held = inputs_of(inputs(rows), name)
    label = np.asarray(rows[y])
    return from_clients(
        by_client(np.asarray(rows[client]).astype(str), lambda own: (nests.rows(held, own), label[own])),
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        targets=targets,
        name=name,
    )


def _has_texts(rows: Mapping[str, Any], x: str | Sequence[str]) -> bool:
    return any(isinstance(rows[column][0], str) for column in ([x] if isinstance(x, str) else x))


def _rows_of(dataset: Any, columns: Sequence[str], name: str) -> Mapping[str, Any]:
    """Some columns of a ``datasets`` object, whole."""
    known = getattr(dataset, "column_names", None)
    if not isinstance(known, list) or not hasattr(dataset, "with_format"):
        raise DataError(
            f"{name}: expected one split of Hugging Face's datasets, as load_dataset(...)['train'] is, got "
            f"{type(dataset).__name__}"
        )
    for column in columns:
        if column not in known:
            raise unknown(name, column, known, what="column")
    rows: Mapping[str, Any] = dataset.with_format("numpy")[:]
    return {column: rows[column] for column in columns}


def _column(values: Any, tokens: str | Tokenizer, options: dict[str, Any], where: str) -> Any:
    """A column as an array, or as what texts become."""
    if len(values) and isinstance(values[0], str):
        return encoded([str(text) for text in values], tokens, where=where, **options)
    try:
        return _channels_first(_stacked(values))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _source_of(pairs: Sequence[tuple[Any, Any]], name: str, targets: str) -> Source:
    """A source of training samples and perhaps of test samples."""
    read = [
        (inputs_of(x, where), targets_of(_stacked(y), where, targets))
        for (x, y), where in zip(pairs, (name, f"{name} test"), strict=False)
    ]
    (x, y), (test_x, test_y) = read[0], read[1] if len(read) > 1 else nests.rows(read[0], slice(0, 0))
    if nests.form(test_x) != nests.form(x):
        raise DataError(f"{name}: test samples of {nests.words(test_x)}, training {nests.words(x)}")
    found = [number_of_classes(part, targets) for part in (y, test_y) if nests.length(part)]
    known = [number for number in found if number is not None]
    return Source(name, x, y, test_x, test_y, max(known) if len(known) == len(found) else None)


def is_dataset(given: Any) -> bool:
    """Whether something is a torch data set whose samples can be taken by number."""
    return isinstance(given, torch.utils.data.Dataset) and hasattr(given, "__len__")


def source_from_dataset(
    dataset: Any, test: Any = None, name: str = "dataset", targets: str = "class"
) -> Source:
    """A source from a torch data set that gives ``(x, y)`` pairs, and perhaps another to test on.

    ``x`` may be a dict or a tuple, and so may ``y`` with ``targets="any"``; see :mod:`sartor.data.samples`.
    """
    pairs = [_collect(dataset, name)]
    if test is not None:
        pairs.append(_collect(test, f"{name} test"))
    return _source_of(pairs, name, targets)


def from_dataset(
    dataset: Any,
    partition: Partition | Scheme | str | Mapping[str, Any],
    *,
    test: Any = None,
    clients: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    normalise: bool = False,
    targets: str = "class",
    leaf: str | None = None,
    name: str = "dataset",
) -> ClientData:
    """A torch data set of ``(x, y)`` pairs, divided among clients.

    ``partition`` is a partition, a scheme to draw one with as in :func:`make_partition` (give ``clients``
    too), or the sample numbers of each client: ``{"a": [0, 1, 2], "b": {"train": [3, 4], "test": [5]}}``.
    In such a mapping samples are numbered through ``dataset`` and then ``test``; no sample may be in two
    splits. ``targets`` says what ``y`` is, ``leaf`` names the leaf to divide by: :func:`make_partition`.
    """
    source = source_from_dataset(dataset, test, name, targets)
    if isinstance(partition, Mapping) and not isinstance(partition.get("name"), str):
        partition = _partition_by_index(source, partition, test_fraction, validation_fraction, seed)
    elif not isinstance(partition, Partition):
        partition = make_partition(source, partition, clients, seed, validation_fraction, test_fraction, leaf)
    return apply(source, partition, normalise=normalise)


def from_flower_partitioner(
    partitioner: Any,
    x: str,
    y: str,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    targets: str = "class",
) -> ClientData:
    """The partitions of a Flower Datasets partitioner with its ``dataset`` set; ``x``, ``y`` name columns.

    Images in bytes become float32 ``[channels, height, width]`` in 0..1. Clients are named by partition
    number.
    """
    for needed in ("num_partitions", "load_partition"):
        if not hasattr(partitioner, needed):
            raise DataError(f"not a Flower Datasets partitioner: it has no {needed}")
    clients: dict[str, Samples | Mapping[str, Samples]] = {}
    for number in range(int(partitioner.num_partitions)):
        part = partitioner.load_partition(number)
        missing = {x, y} - set(part.column_names)
        if missing:
            raise DataError(
                f"the partitions have no column {', '.join(sorted(missing))}; they have {part.column_names}"
            )
        rows = part.with_format("numpy")[:]
        clients[str(number)] = (_channels_first(_stacked(rows[x])), _stacked(rows[y]))
    return from_clients(
        clients,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        targets=targets,
        name="flower",
    )


def _collect(dataset: Any, name: str) -> Pair:
    """All samples of a data set, inputs and targets."""
    try:
        pairs = [dataset[i] for i in range(len(dataset))]
        xs, ys = zip(*((pair[0], pair[1]) for pair in pairs), strict=True)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"{name}: expected a data set with a length that gives (x, y) pairs ({error})"
        ) from None
    return _stacked(xs), ys


def _stacked(values: Any) -> Any:
    """Samples, given one by one or together, as one array, or as arrays in dicts and tuples like theirs."""
    if isinstance(values, (np.ndarray, torch.Tensor)) and values.dtype != object:
        return values
    first = values[0]
    try:
        if isinstance(first, Mapping):
            return {key: _stacked([value[key] for value in values]) for key in first}
        if isinstance(first, tuple) and any(isinstance(part, (np.ndarray, torch.Tensor)) for part in first):
            return tuple(_stacked(part) for part in zip(*values, strict=True))
        return np.stack([np.asarray(value) for value in values])
    except (ValueError, KeyError):
        raise DataError("the samples have different shapes; bring them to one shape first") from None


def _channels_first(images: Any) -> Any:
    """Byte images with the channels last, or without channels, as numbers in 0..1 with the channels first."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        return images
    images = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
    return images.astype(np.float32) / 255


def _partition_by_index(
    source: Source, given: Mapping[str, Any], test_fraction: float, validation_fraction: float, seed: int
) -> Partition:
    """A partition from sample numbers; missing splits are drawn from each client's training samples."""
    labels = np.zeros(sum(source.sizes), np.int64)
    if is_class(source.train_y):
        labels = np.concatenate(source.labels())
    parts: dict[str, list[npt.NDArray[np.int64]]] = {split: [] for split in SPLITS}
    for client, value in given.items():
        own = _index_of(client, value, len(labels))
        for split, fraction in (("test", test_fraction), ("validation", validation_fraction)):
            if split not in own and (fraction > 0 or split == "test"):
                random = stream(seed, "cut", split, str(client))
                own["train"], own[split] = cut(own["train"], labels[own["train"]], fraction, random)
        for split, index in own.items():
            parts[split].append(np.sort(index))
    return Partition(
        name="index",
        parameters={},
        seed=seed,
        names=tuple(str(client) for client in given),
        train=tuple(parts["train"]),
        test=tuple(parts["test"]),
        validation=tuple(parts["validation"]) or None,
        labels=labels,
        train_total=source.sizes[0],
    )


def _index_of(client: str, value: Any, total: int) -> dict[str, npt.NDArray[np.int64]]:
    """The sample numbers of one client by split, checked."""
    splits = value if isinstance(value, Mapping) else {"train": value}
    if "train" not in splits or set(splits) - set(SPLITS):
        raise DataError(
            f"client {client}: expected the splits train, test, validation, got {', '.join(splits)}"
        )
    own = {}
    for split, index in splits.items():
        array = np.asarray(index)
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise DataError(f"client {client}, {split}: expected a list of sample numbers")
        if array.min() < 0 or array.max() >= total:
            raise DataError(f"client {client}, {split}: sample numbers must lie in 0..{total - 1}")
        own[split] = array.astype(np.int64)
    return own
