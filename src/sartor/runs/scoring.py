"""New rows in a file, predicted: the table with what a model says of every row beside it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from sartor.data.loaders import nested
from sartor.data.readers import read_npz, read_table
from sartor.data.tables import SchemaColumns
from sartor.data.texts import TextColumn
from sartor.errors import DataError, SettingError
from sartor.files import write
from sartor.runs.predictor import Predictor

ENDINGS = (".csv", ".parquet", ".npz")


def score(predictor: Predictor, table: Path, out: Path) -> int:
    """Predict the rows of a file and write them with their predictions; how many there were."""
    if out.suffix.lower() not in ENDINGS:
        raise SettingError(f"{out}: expected a name that ends in {', '.join(ENDINGS)}")
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    rows = _read(table, predictor)
    predicted = predictor.predict(rows, str(table))
    columns = {} if table.suffix.lower() == ".npz" or out.suffix.lower() == ".npz" else rows
    if columns and table.suffix.lower() == out.suffix.lower() == ".csv":
        columns = read_table(table, tuple(columns))  # as they stand there: 007 is no 7 and NA no gap
    taken = sorted(set(columns) & set(predicted))
    if taken:
        raise DataError(f"{table}: has a column {taken[0]} already; rename it, or give the table without it")
    write(out, _content({**columns, **predicted}, out))
    return len(next(iter(predicted.values())))


def _read(table: Path, predictor: Predictor) -> Any:
    """The rows of a file, as the model's preprocessing takes them."""
    if table.suffix.lower() == ".npz":
        held = nested(read_npz(table))
        if "x" not in held:
            raise DataError(f"{table}: holds no x; it has {', '.join(held) or 'nothing'}")
        return held["x"]
    if predictor.signature.preprocessing.table is None:
        raise DataError(
            f"{table}: the model was trained on arrays, not on a table with named columns; "
            "give an npz file with x"
        )
    reader = predictor.signature.preprocessing.table
    if isinstance(reader, SchemaColumns):
        return read_table(table, None)
    return read_table(table, reader.columns if isinstance(reader, TextColumn) else ())


def _content(columns: dict[str, Any], out: Path) -> bytes:
    """Columns as a file of this ending."""
    import pyarrow as arrow
    from pyarrow import csv, parquet

    file = io.BytesIO()
    if out.suffix.lower() == ".npz":
        np.savez(file, **{name: np.asarray(values) for name, values in columns.items()})  # type: ignore[arg-type]
        return file.getvalue()
    deep = next((name for name, values in columns.items() if getattr(values, "ndim", 1) > 1), None)
    if deep is not None:
        raise SettingError(f"{out}: {deep} has several numbers for each row; write an npz file")
    made = arrow.table({name: _column(values) for name, values in columns.items()})
    if out.suffix.lower() == ".csv":
        csv.write_csv(made, file)
    else:
        parquet.write_table(made, file)
    return file.getvalue()


def _column(values: Any) -> Any:
    return values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind == "U" else values
