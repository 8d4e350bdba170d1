"""Client states on disk: our table of rows in a file beside the same rows in SQLite.

    python bench/rows.py [--folder FOLDER] [--repetitions 5] [--json FILE]

A round reads the rows of a cohort and writes new ones; a checkpoint makes them durable, and what the last two
checkpoints refer to stays as it was. SQLite has a write-ahead log, is durable at every commit, and keeps a
row per state, client and version; versions that no checkpoint can refer to are removed. Files are dropped
from the system's memory before they are read, where it lets us.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor.federation.states import StateStore

CASES = {"100,000 rows of 4 kB": (100_000, 4_000, 1_000), "1,000 rows of 8 MB": (1_000, 8_000_000, 10)}
"""Clients, bytes of a row, clients of a cohort."""


class FileRows:
    """The table that we have."""

    def __init__(self, folder: Path, clients: int, row_bytes: int) -> None:
        self._folder = folder
        self._store = StateStore(clients, torch.device("cpu"), "disk")
        self._store.keep_in(folder)
        self._store.declare("c", torch.zeros(row_bytes // 4))

    def write(self, numbers: np.ndarray, rows: torch.Tensor) -> None:
        self._store.write("c", numbers, rows)

    def read(self, numbers: np.ndarray) -> torch.Tensor:
        return self._store.rows("c", numbers)

    def checkpoint(self) -> None:
        self._store.save()

    def close(self) -> None:
        """Nothing is held that is not on the disk."""


class SqliteRows:
    """Versions of rows in SQLite."""

    def __init__(self, folder: Path, clients: int, row_bytes: int) -> None:
        self._database = sqlite3.connect(folder / "rows.db", isolation_level=None)
        self._width, self._version = row_bytes // 4, 0
        for line in ("page_size = 16384", "journal_mode = WAL", "synchronous = FULL"):
            self._database.execute(f"PRAGMA {line}")
        self._database.execute("CREATE TABLE rows (state TEXT, client INT, version INT, data BLOB)")
        self._database.execute("CREATE UNIQUE INDEX places ON rows (state, client, version)")
        self._database.execute("BEGIN")

    def write(self, numbers: np.ndarray, rows: torch.Tensor) -> None:
        values = rows.numpy()
        clients = [int(number) for number in numbers]
        self._database.executemany(
            "INSERT OR REPLACE INTO rows VALUES ('c', ?, ?, ?)",
            ((client, self._version, memoryview(row)) for client, row in zip(clients, values, strict=True)),
        )
        self._database.executemany(
            "DELETE FROM rows WHERE state = 'c' AND client = ? AND version < (SELECT MAX(version) FROM rows "
            "WHERE state = 'c' AND client = ? AND version <= ?)",
            ((client, client, self._version - 2) for client in clients),
        )

    def read(self, numbers: np.ndarray) -> torch.Tensor:
        rows = torch.empty(len(numbers), self._width)
        query = "SELECT data FROM rows WHERE state = 'c' AND client = ? ORDER BY version DESC LIMIT 1"
        for row, number in zip(rows.numpy(), numbers, strict=True):
            (data,) = self._database.execute(query, (int(number),)).fetchone()
            row[:] = np.frombuffer(data, np.float32)
        return rows

    def checkpoint(self) -> None:
        self._database.execute("COMMIT")
        self._version += 1
        self._database.execute("BEGIN")

    def close(self) -> None:
        self._database.execute("COMMIT")
        self._database.close()


def measure(
    kind: type[Any], folder: Path, clients: int, row_bytes: int, cohort: int, repetitions: int
) -> dict[str, float]:
    """Seconds of each step, and the size of what is stored in the end over the rows that count."""
    random = np.random.default_rng(0)
    rows = torch.from_numpy(random.standard_normal((cohort, row_bytes // 4), dtype=np.float32))
    table = kind(folder, clients, row_bytes)
    begin = time.perf_counter()
    for numbers in np.array_split(random.permutation(clients), clients // cohort):
        table.write(numbers, rows[: len(numbers)])
    table.checkpoint()
    found = {"write all": time.perf_counter() - begin}
    steps: dict[str, list[float]] = {"read a cohort": [], "write a cohort": [], "checkpoint": []}
    for _ in range(repetitions):
        drop_pages(folder)
        numbers = np.sort(random.choice(clients, cohort, replace=False))
        begin = time.perf_counter()
        held = table.read(numbers)
        steps["read a cohort"].append(time.perf_counter() - begin)
        assert (held[:1] == rows).all(1).any()  # it is one of those that were written
        begin = time.perf_counter()
        table.write(numbers, rows)
        steps["write a cohort"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        table.checkpoint()
        steps["checkpoint"].append(time.perf_counter() - begin)
    table.close()
    found |= {step: statistics.median(seconds) for step, seconds in steps.items()}
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {**found, "size": stored / (clients * row_bytes)}


def drop_pages(folder: Path) -> None:
    """Let the system forget what it holds of these files, so that they are read from the disk."""
    if hasattr(os, "posix_fadvise"):
        for path in folder.rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on which disk; left out: that of temporary files")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for case, (clients, row_bytes, cohort) in CASES.items():
        for kind in (FileRows, SqliteRows):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                figures = measure(kind, Path(folder), clients, row_bytes, cohort, options.repetitions)
            found[f"{case}, {kind.__name__}"] = figures
            words = ", ".join(f"{step} {value:.3g}" for step, value in figures.items())
            print(f"{case}, {kind.__name__}: {words}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
