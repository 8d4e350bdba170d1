"""A schema for a table that has none, and what is to be seen in a table before anybody trains on it.

:func:`propose` reads the table and says what its columns seem to be; :func:`findings` says per client what is
missing, constant, unlike the others, or tells the label by itself. Both only look: what is written into an
experiment is the reader's to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.data.labels import listed
from sartor.data.readers import read_table
from sartor.data.schema import NUMBERS, Column, features, read_columns, role
from sartor.data.statistics import MOST_VALUES
from sartor.data.tables import (
    DAY,
    as_numbers,
    as_seconds,
    files_of,
    gaps_of,
    read_raw,
    texts_of,
)
from sartor.errors import DataError, SettingError

CLIENTS = ("client", "site", "hospital", "centre", "center", "clinic", "institution", "node", "plant")
LABELS = ("label", "target", "outcome", "class", "diagnosis")
SPLIT_WORDS = {"train", "test", "validation"}
IDENTITY = re.compile(r"(^|[ _-])(id|uuid|key|nr|number|patient)$", re.IGNORECASE)
FEW_ROWS = 10
"""Rows with which a client cannot say much."""
FAR = 3.0
"""Deviations of the others by which a client's mean lies far from theirs."""
TELLING = 0.1
"""Of the errors of whoever knows the shares of classes alone: a column that leaves fewer tells the label."""


@dataclass(frozen=True)
class Finding:
    """Something to know of a column, or of a client's whole table."""

    client: str
    column: str
    what: str
    """missing, constant, unlike, leaking, left out, label or rows."""
    words: str


def propose(path: Path, client: str | None = None, label: str | None = None) -> tuple[Column, ...]:
    """What the columns of a table, or of all tables of a folder, seem to be.

    ``client`` and ``label`` name those columns; left out, they are found by usual names. A label must be.
    """
    files = {file: read_table(file, None) for file in files_of(path)}
    # One without a name, as pandas writes the numbers of rows, is no feature.
    names = list(dict.fromkeys(name for held in files.values() for name in held if name))
    client = _chosen("client", client, names, CLIENTS, path)
    label = _chosen("label", label, names, LABELS, path)
    if label is None:
        raise SettingError(
            f"{path}: which column is the label? Say data.label_column=NAME; it has {', '.join(names)}"
        )
    roles = {client: "client", label: "label"}
    schema: dict[str, Any] = {}
    for name in names:
        parts = {file: held[name] for file, held in files.items() if name in held}
        schema[name] = {"kind": roles[name]} if name in roles else _column(name, parts)
    return read_columns(schema)


def _chosen(
    what: str, given: str | None, names: Sequence[str], usual: Sequence[str], path: Path
) -> str | None:
    if given is not None and given not in names:
        raise DataError(f"{path}: no column {given} (data.{what}_column); it has {', '.join(names)}")
    return given or next((name for name in names if name.lower() in usual), None)


def _column(name: str, parts: Mapping[Path, Any]) -> dict[str, Any]:
    """What a column seems to be, over all files that have it."""
    texts = np.concatenate([texts_of(file, values, name) for file, values in parts.items()])
    there = [text for text in texts.tolist() if text is not None]
    gaps = len(there) < len(texts)
    distinct = set(there)
    if len(distinct) < 2:
        return {"kind": "out"}
    if distinct <= SPLIT_WORDS:
        return {"kind": "split"}
    numbers = _tried(lambda file, values: as_numbers(file, name, values), parts)
    single = len(distinct) == len(there) > FEW_ROWS and not any(" " in text for text in there)
    whole = numbers is None or bool((numbers[~np.isnan(numbers)] % 1 == 0).all())
    dates = None
    if numbers is None:
        dates = _tried(lambda file, values: as_seconds(file, Column(name, kind="date"), values) / DAY, parts)
    if single and whole and dates is None and (numbers is None or IDENTITY.search(name)):
        return {"kind": "out"}
    if numbers is not None:
        return {"kind": "number", **_filled(numbers, gaps)}
    if dates is not None:
        return {"kind": "date", **_filled(dates, gaps)}
    words = sum(len(text.split()) for text in there) / len(there)
    if words >= 3 or len(distinct) > MOST_VALUES:
        return {"kind": "text", **({"missing": "place"} if gaps else {})}
    return {"kind": "category", **({"missing": "place"} if gaps else {})}


def _tried(read: Any, parts: Mapping[Path, Any]) -> npt.NDArray[np.float64] | None:
    """All values, where all of them can be read so."""
    try:
        return np.concatenate([read(file, values) for file, values in parts.items()])
    except DataError:
        return None


def _filled(values: npt.NDArray[np.float64], gaps: bool) -> dict[str, Any]:
    """How gaps of numbers are filled: by the median, on a grid a little wider than the values."""
    if not gaps:
        return {}
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-12)))
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    return {"missing": "median", "indicator": True, "low": low, "high": high if high > low else low + step}


def findings(path: Path, columns: Sequence[Column], targets: str = "class") -> list[Finding]:
    """What is to be seen in a table by its schema, client by client."""
    raw, clients = read_raw(path, columns)
    names = sorted(set(clients.tolist()))
    found = [finding for name in names for finding in _of_client(name, raw, clients, columns, len(names))]
    found += [
        Finding("all", column.name, "left out", "is no feature: an id, or one value everywhere")
        for column in columns
        if column.kind == "out"
    ]
    label = role(columns, "label")
    if label is not None:
        y = raw[label].astype(str)
        found += [
            Finding("all", column.name, "leaking", "tells the label by itself; is it known beforehand?")
            for column in features(columns)
            if column.kind != "text" and _tells(column, raw[column.name], y, targets)
        ]
    return found


def _of_client(
    name: str,
    raw: Mapping[str, npt.NDArray[Any]],
    clients: npt.NDArray[Any],
    columns: Sequence[Column],
    several: int,
) -> list[Finding]:
    mine = clients == name
    found = []
    rows = int(mine.sum())
    if rows < FEW_ROWS:
        found.append(Finding(name, "", "rows", f"has {rows} rows"))
    label = role(columns, "label")
    if label is not None and len(set(raw[label][mine].tolist())) == 1:
        found.append(Finding(name, label, "label", f"every row is {raw[label][mine][0]!r}"))
    for column in features(columns):
        values = raw[column.name]
        gaps = gaps_of(values[mine])
        if gaps.any():
            found.append(Finding(name, column.name, "missing", f"{gaps.mean():.0%} of its rows"))
        own, others = _there(values[mine]), _there(values[~mine])
        if len(own) > 1 and len(set(own.tolist())) == 1:
            found.append(Finding(name, column.name, "constant", f"is {own[0]} in all its rows"))
        words = _unlike(column, own, others) if several > 1 and len(own) and len(others) else None
        if words:
            found.append(Finding(name, column.name, "unlike", words))
    return found


def _there(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(values[~gaps_of(values)])


def _unlike(column: Column, own: npt.NDArray[Any], others: npt.NDArray[Any]) -> str | None:
    """How a client's values differ from those of all others."""
    if column.kind in NUMBERS:
        spread = float(others.std()) or 1.0
        apart = abs(float(own.mean()) - float(others.mean())) / spread
        mean, theirs = f"{own.mean():.4g}", f"{others.mean():.4g}"
        return f"its mean is {mean}, that of the others {theirs}" if apart > FAR else None
    alone = sorted(set(own.tolist()) - set(others.tolist())) if column.kind != "text" else []
    share = float(np.isin(own, alone).mean()) if alone else 0.0
    if share < 0.05:
        return None
    return (
        f"{share:.0%} of its rows are {listed(alone)}, which no other client has; other codes for the same?"
    )


def _tells(column: Column, values: npt.NDArray[Any], y: npt.NDArray[Any], targets: str) -> bool:
    """Whether a column tells the label by itself."""
    there = ~gaps_of(values)
    if there.sum() < 2 * FEW_ROWS:
        return False
    values, y = values[there], y[there]
    if targets == "number":
        known = column.kind in NUMBERS and values.std() > 0
        return bool(known and abs(np.corrcoef(values.astype(float), y.astype(float))[0, 1]) > 0.999)
    _, codes = np.unique(y, return_inverse=True)
    if column.kind not in NUMBERS:
        _, values = np.unique(values.astype(str), return_inverse=True)
        groups = int(values.max()) + 1
        if groups > len(y) / FEW_ROWS:
            return False
        hits = sum(int(np.bincount(codes[values == group]).max()) for group in range(groups))
    else:
        hits = _by_two_cuts(values.astype(float), codes)
    blind = len(y) - int(np.bincount(codes).max())
    return blind > 0 and len(y) - hits <= TELLING * blind


def _by_two_cuts(values: npt.NDArray[np.float64], codes: npt.NDArray[np.int64]) -> int:
    """How many labels are told by cutting numbers into as many parts as there are classes, and one."""
    from sklearn.tree import DecisionTreeClassifier

    tree = DecisionTreeClassifier(max_leaf_nodes=int(codes.max()) + 2, random_state=0).fit(
        values[:, None], codes
    )
    return int((tree.predict(values[:, None]) == codes).sum())
