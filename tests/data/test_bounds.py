"""Data that never end, or that are far more than they look like, are refused before they are read."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sartor.data import loaders, readers
from sartor.data.clients import from_clients
from sartor.errors import DataError, SettingError
from sartor.memory import free_memory
from sartor.model import networks
from sartor.runs.experiment import load

FREE = 100_000


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (readers, networks):
        monkeypatch.setattr(module, "free_memory", lambda: FREE)


def test_free_memory_is_told() -> None:
    assert 0 < free_memory() < 1 << 62


@pytest.mark.usefixtures("little_memory")
def test_an_archive_that_unpacks_to_more_than_fits_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((100, 300), np.float32), y=np.zeros(100, int))
    assert (tmp_path / "bomb.npz").stat().st_size < FREE // 50
    with pytest.raises(DataError, match=r"bomb\.npz: holds 0\.0 GB once it is unpacked"):
        readers.read_npz(tmp_path / "bomb.npz")


@pytest.mark.usefixtures("little_memory")
def test_a_zipped_file_is_not_unpacked_further_than_fits(tmp_path: Path) -> None:
    header = struct.pack(">HBBI", 0, 8, 1, 10)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(header + bytes(10 * FREE)))
    with pytest.raises(DataError, match=rf"too long; {FREE // 4 + 1 - 8} values where the header says 10"):
        readers.read_idx(tmp_path / "bomb.gz", [None])


@pytest.mark.usefixtures("little_memory")
def test_a_table_that_unpacks_to_more_than_fits_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table({"x": np.arange(50_000), "client": np.zeros(50_000, int)})
    pyarrow.parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"bomb\.parquet: holds .* GB once it is unpacked"):
        loaders.from_table(tmp_path / "bomb.parquet", "client", "x")


@pytest.mark.usefixtures("little_memory")
def test_a_network_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(SettingError, match=r"model mlp: has .* GB of parameters for 10 classes, and 0\.0 GB"):
        networks.make_task("mlp", networks.MODELS["mlp"](hidden=10**8), (1, 8, 8), 10, 0)


READERS: dict[str, Any] = {
    "pipe.npz": readers.read_npz,
    "pipe.idx": lambda path: readers.read_idx(path, [None]),
    "pipe.csv": lambda path: loaders.from_table(path, "a", "b"),
    "pipe.parquet": lambda path: loaders.from_table(path, "a", "b"),
    "pipe.toml": load,
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_no_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((DataError, SettingError), match=f"{name}: .*is not a regular file"):
        READERS[name](tmp_path / name)


def test_labels_have_a_bound() -> None:
    x = np.zeros((2, 3))
    assert from_clients({"a": (x, [0, 2**20 - 1])}).classes == 2**20
    with pytest.raises(DataError, match="got 1048576 in sample 1; there are at most 1048576 classes"):
        from_clients({"a": (x, [0, 2**20])})


def test_an_experiment_has_a_bound(tmp_path: Path) -> None:
    with open(tmp_path / "long.toml", "wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(SettingError, match=r"long\.toml: has more than 16 MB"):
        load(tmp_path / "long.toml")
