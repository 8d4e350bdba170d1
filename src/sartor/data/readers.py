"""Readers of data files: IDX, CIFAR's binary records, npz and tables.

A file is read whole and checked, or not at all; what is wrong with it becomes a
:class:`~sartor.errors.DataError` that names the file. Nothing is unpickled, and nothing is unpacked that
would not fit into memory.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.errors import DataError
from sartor.memory import free_memory
from sartor.settings import nearest

Bytes = npt.NDArray[np.uint8]
TABLES = (".csv", ".parquet", ".pq")
"""How the names of tables end."""


def read_idx(path: str | Path, shape: Sequence[int | None]) -> Bytes:
    """The bytes of an IDX file, gzipped or not, of the given shape; None stands for any length.

    The format: two zero bytes, a type (8 for bytes), the number of axes, each axis as a big-endian 32-bit
    number, values.
    """
    path = Path(path)
    known = [size for size in shape if size is not None]
    header = 4 + 4 * len(shape)
    content = _content(path, header + math.prod(known) if len(known) == len(shape) else None)
    wanted = struct.pack(">HBB", 0, 8, len(shape))
    if content[:4] != wanted:
        raise DataError(
            f"{path}: not an IDX file of bytes with {len(shape)} axes (it starts with {content[:4].hex()})"
        )
    if len(content) < header:
        raise DataError(f"{path}: truncated within the header")
    found = struct.unpack(f">{len(shape)}I", content[4:header])
    if any(want is not None and want != size for want, size in zip(shape, found, strict=True)):
        words = " x ".join("any" if size is None else str(size) for size in shape)
        raise DataError(f"{path}: holds {' x '.join(map(str, found))} values, expected {words}")
    if len(content) != header + math.prod(found):
        raise DataError(
            f"{path}: {'truncated' if len(content) < header + math.prod(found) else 'too long'}; "
            f"{len(content) - header} values where the header says {math.prod(found)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(found)


def read_cifar(path: str | Path, label_bytes: int, classes: int, records: int | None) -> tuple[Bytes, Bytes]:
    """Images ``[n, 3, 32, 32]`` and labels of a CIFAR binary file; the last label byte is the class.

    CIFAR-10 has one label byte, CIFAR-100 two (coarse, fine); 3,072 pixel bytes follow, plane by plane.
    """
    path = Path(path)
    size = label_bytes + 3072
    content = _content(path, None)
    wanted = len(content) // size if records is None else records
    if not content or len(content) != wanted * size:
        expected = (
            f"{wanted} records of {size} bytes" if records is not None else f"whole records of {size} bytes"
        )
        raise DataError(
            f"{path}: {len(content)} bytes, expected {expected}; the file is damaged or another one"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels = rows[:, label_bytes - 1]
    if labels.max() >= classes:
        row = int(np.argmax(labels >= classes))
        raise DataError(
            f"{path}: record {row} has label {labels[row]}, expected 0..{classes - 1}; the file is damaged"
        )
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def check_file(path: Path) -> None:
    """Refuse what is no file, such as a pipe, whose end might never come."""
    try:
        regular = path.is_file()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)})") from None
    if not regular:
        raise DataError(
            f"{path}: {'cannot be read, it is not a regular file' if path.exists() else 'no such file'}"
        )


def check_fits(path: Path, needed: int) -> None:
    """Refuse data whose bytes, once unpacked, are more than the memory that is free."""
    free = free_memory()
    if needed > free:
        raise DataError(
            f"{path}: holds {needed / 1e9:.1f} GB once it is unpacked, and {free / 1e9:.1f} GB of memory are "
            "free; give less"
        )


def read_npz(path: str | Path, required: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an npz file; objects, which would need pickle, are refused."""
    path = Path(path)
    check_file(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                check_fits(path, sum(member.file_size for member in packed.infolist()))
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it is a single array")
        with file:
            arrays = {name: file[name] for name in file.files}
    except DataError:
        raise
    except (
        Exception
    ) as error:  # damaged bytes surface as almost anything from zip, zlib, the header parser or memory
        raise DataError(f"{path}: cannot be read as npz ({_reason(error)})") from None
    missing = [name for name in required if name not in arrays]
    if missing:
        raise DataError(f"{path}: lacks {', '.join(missing)}; it has {', '.join(arrays) or 'nothing'}")
    return arrays


def _content(path: Path, most: int | None) -> bytes:
    """The bytes of a file, unzipped if gzipped; not much more than ``most``, or than fit into memory."""
    check_file(path)
    check_fits(path, path.stat().st_size)
    most = free_memory() // 4 if most is None else most
    try:
        with open(path, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                return file.read()
        with gzip.open(path) as unzipped:
            return unzipped.read(most + 1)
    except EOFError:
        raise DataError(f"{path}: truncated; the gzip stream ends early") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_table(path: Path, texts: Sequence[str] | None = ()) -> dict[str, Any]:
    """The columns of a table by name, as Arrow arrays, by the ending of its name.

    ``texts`` are columns of a CSV file that are texts whatever they hold; None: all are, and an empty one is
    a gap. The others, and those of a Parquet file, have the types that they seem to have.
    """
    import pyarrow
    from pyarrow import csv, parquet

    check_file(path)
    check_fits(path, path.stat().st_size)
    try:
        if path.suffix.lower() == ".csv":
            parsing = csv.ParseOptions(newlines_in_values=True)
            with csv.open_csv(path, parse_options=parsing) as opened:
                named = opened.schema.names if texts is None else texts
            types = dict.fromkeys(named, pyarrow.string())
            options = csv.ConvertOptions(column_types=types, strings_can_be_null=texts is None)
            table = csv.read_csv(path, parse_options=parsing, convert_options=options)
        elif path.suffix.lower() in TABLES:
            groups = parquet.read_metadata(path)
            check_fits(path, sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)))
            # Threads of Arrow's that are still being made when Python ends abort it, if torch was imported.
            table = parquet.ParquetFile(path).read(use_threads=False)
        else:
            raise DataError(f"{path}: expected a name that ends in {', '.join(TABLES)}")
        names = list(table.column_names)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a table ({' '.join(str(error).split())[:200]})") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: two columns are called {', '.join(twice)}")
    unprintable = [name for name in names if not name.isprintable()]
    if unprintable:
        raise DataError(f"{path}: the column name {unprintable[0]!r} is not printable; rename it")
    return {name: _in_unicode(table.column(name).combine_chunks(), path, name) for name in names}


def check_column(table: Mapping[str, Any], column: str, where: str) -> None:
    """Refuse a table without a column, or with a row that has no value in it."""
    if column not in table:
        guess = nearest(column, table)
        hint = f"did you mean {guess}?" if guess else f"it has {', '.join(table)}"
        raise DataError(f"{where}: no column {column}; {hint}")
    if table[column].null_count:
        row = int(np.argmax(table[column].is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{where}: column {column} has no value in row {row} (first row is 0)")


def _in_unicode(values: Any, path: Path, name: str) -> Any:
    """A column that was read as bytes as texts, if it holds such: a Parquet file may not say so."""
    import pyarrow

    if not (pyarrow.types.is_binary(values.type) or pyarrow.types.is_large_binary(values.type)):
        return values
    try:
        return values.cast(pyarrow.string())
    except pyarrow.ArrowException:
        if path.suffix.lower() != ".csv":  # images, say
            return values
        raise DataError(
            f"{path}: column {name} has a text that is not in UTF-8; save the table in that encoding"
        ) from None
