"""Public data sets: official formats, damaged files, downloads, real files where a data folder is given."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import os
import struct
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sartor.data.readers import read_cifar, read_idx, read_npz
from sartor.data.sources import SOURCES, Download, Origin, data_folder, load_source
from sartor.errors import DataError, SettingError

random = np.random.default_rng(1)


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def labels(number: int, classes: int) -> np.ndarray:
    return (np.arange(number) % classes).astype(np.uint8)


def outcome(call):
    """What a call gives, or the error that is a user's to mend; any other error goes through."""
    try:
        return call()
    except DataError as error:
        return error


def images(*shape: int) -> np.ndarray:
    return random.integers(0, 256, shape, np.uint8)


def relaxed(name: str, train: int, test: int):
    """The origin with other sizes than the official ones, and no counts per class."""
    return dataclasses.replace(SOURCES[name], train=train, test=test, train_counts=None, test_counts=None)


def write_idx_source(folder: Path, name: str, zipped: bool = True) -> list[np.ndarray]:
    """Twenty training and ten test images in the files of an IDX source."""
    origin = SOURCES[name]
    arrays = [images(20, 28, 28), labels(20, origin.classes), images(10, 28, 28), labels(10, origin.classes)]
    for file, array in zip(origin.files, arrays, strict=True):
        path = folder / (file if zipped else file.removesuffix(".gz"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return arrays


# --- readers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("shape", [(6,), (3, 2, 5), (0, 2, 2)])
def test_idx_round_trip(tmp_path, shape, zipped):
    array = images(*shape)
    (tmp_path / "a").write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    assert np.array_equal(read_idx(tmp_path / "a", shape), array)
    assert np.array_equal(read_idx(tmp_path / "a", (None, *shape[1:])), array)


@given(st.integers(0, 15), st.integers(1, 255))
@settings(max_examples=60)
def test_any_changed_byte_of_an_idx_header_is_noticed(tmp_path_factory, place, change):
    path = tmp_path_factory.mktemp("idx") / "a-idx3"
    content = bytearray(idx(images(3, 4, 5)))
    content[place] ^= change
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="a-idx3"):
        read_idx(path, (3, 4, 5))
    with pytest.raises(DataError, match="a-idx3"):
        read_idx(path, (None, None, None))


@pytest.mark.parametrize("zipped", [True, False])
def test_any_truncation_of_an_idx_file_is_noticed(tmp_path, zipped):
    content = idx(images(3, 4, 5))
    content = gzip.compress(content) if zipped else content
    for length in range(len(content)):
        (tmp_path / "a").write_bytes(content[:length])
        with pytest.raises(DataError, match=str(tmp_path / "a")):
            read_idx(tmp_path / "a", (None, 4, 5))


def test_any_changed_byte_of_a_gzipped_file_is_noticed_or_carries_nothing(tmp_path):
    array = images(3, 4, 5)
    content = gzip.compress(idx(array), mtime=0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        (tmp_path / "a").write_bytes(bytes(damaged))
        found = outcome(lambda: read_idx(tmp_path / "a", (3, 4, 5)))
        noticed = isinstance(found, DataError) and str(tmp_path / "a") in str(found)
        assert noticed or np.array_equal(found, array)


def test_an_idx_file_says_what_is_wrong(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(idx(images(3, 4)) + b"x")
    with pytest.raises(DataError, match="too long; 13 values where the header says 12"):
        read_idx(path, (3, 4))
    with pytest.raises(DataError, match="holds 3 x 4 values, expected any x 5"):
        read_idx(path, (None, 5))
    with pytest.raises(DataError, match="not an IDX file of bytes with 1 axes"):
        read_idx(path, (None,))
    with pytest.raises(DataError, match="no such file"):
        read_idx(tmp_path / "b", (None,))
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path, (None,))


@pytest.mark.parametrize(("label_bytes", "classes"), [(1, 10), (2, 100)])
def test_cifar_round_trip_and_damage(tmp_path, label_bytes, classes):
    path = tmp_path / "batch.bin"
    pixels, own = images(7, 3, 32, 32), labels(7, classes)
    coarse = np.full((7, label_bytes - 1), 250, np.uint8)
    rows = np.concatenate([coarse, own[:, None], pixels.reshape(7, -1)], axis=1)
    path.write_bytes(rows.tobytes())
    for records in (7, None):
        found_x, found_y = read_cifar(path, label_bytes, classes, records)
        assert np.array_equal(found_x, pixels)
        assert np.array_equal(found_y, own)
    for length in (0, 1, 3073, 7 * rows.shape[1] - 1):
        path.write_bytes(rows.tobytes()[:length])
        with pytest.raises(DataError, match=r"batch\.bin"):
            read_cifar(path, label_bytes, classes, 7)
    path.write_bytes(rows.tobytes() + b"x")
    with pytest.raises(DataError, match="expected whole records"):
        read_cifar(path, label_bytes, classes, None)
    rows[4, label_bytes - 1] = classes
    path.write_bytes(rows.tobytes())
    with pytest.raises(DataError, match=f"record 4 has label {classes}"):
        read_cifar(path, label_bytes, classes, 7)


def test_npz_damage_is_named(tmp_path):
    path = tmp_path / "a.npz"
    x = images(9, 5)
    np.savez_compressed(path, x=x)
    content = path.read_bytes()
    assert np.array_equal(read_npz(path, ["x"])["x"], x)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"a\.npz"):
            read_npz(path)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x21
        path.write_bytes(bytes(damaged))
        found = outcome(lambda: list(read_npz(path).values()))
        noticed = isinstance(found, DataError) and "a.npz" in str(found)
        assert noticed or all(np.array_equal(array, x) for array in found)


def test_npz_with_pickled_objects_or_a_single_array_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    with pytest.raises(DataError, match="cannot be read as npz"):
        read_npz(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match="a single array"):
        read_npz(tmp_path / "b.npy")


# --- sources from files -----------------------------------------------------------------------------------


def test_digits_need_no_file_and_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    source = load_source("digits")
    joined = torch.cat([source.train_x, source.test_x]).flatten(1).mul(16).numpy().astype(int)
    every = np.column_stack([joined, torch.cat([source.train_y, source.test_y])])
    digits = load_digits()
    expected = np.column_stack([digits.data.astype(int), digits.target])
    assert np.array_equal(every[np.lexsort(every.T)], expected[np.lexsort(expected.T)])
    assert source.train_x.shape == (1438, 1, 8, 8)
    shares = torch.bincount(source.test_y) / torch.bincount(torch.cat([source.train_y, source.test_y]))
    assert (shares - 0.2).abs().max() < 1 / 170
    assert torch.equal(load_source("digits").test_x, source.test_x)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist-balanced", "emnist-byclass"])
def test_idx_sources(tmp_path, name, zipped):
    train_x, train_y, test_x, test_y = write_idx_source(tmp_path, name, zipped)
    source = relaxed(name, 20, 10).load(name, tmp_path)
    upright = (0, 2, 1) if name.startswith("emnist") else (0, 1, 2)
    assert np.array_equal(source.train_x[:, 0].mul(255).round().numpy(), train_x.transpose(upright))
    assert np.array_equal(source.test_x[:, 0].mul(255).round().numpy(), test_x.transpose(upright))
    assert np.array_equal(source.train_y, train_y)
    assert np.array_equal(source.test_y, test_y)
    assert source.train_x.dtype == torch.float32
    assert source.train_y.dtype == torch.int64
    assert 0 <= source.train_x.min() <= source.train_x.max() <= 1


def test_cifar10(tmp_path):
    origin = relaxed("cifar10", 10, 2)
    pixels, own = images(12, 3, 32, 32), labels(12, 10)
    for number, file in enumerate(origin.files):
        rows = slice(2 * number, 2 * number + 2)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(np.column_stack([own[rows], pixels[rows].reshape(2, -1)]).tobytes())
    source = origin.load("cifar10", tmp_path)
    assert np.array_equal(source.train_x.mul(255).round().numpy(), pixels[:10])
    assert np.array_equal(source.test_x.mul(255).round().numpy(), pixels[10:])
    assert np.array_equal(torch.cat([source.train_y, source.test_y]), own)
    with pytest.raises(DataError, match="10 training samples, cifar10 has 50000"):
        load_source("cifar10", tmp_path)


def test_cifar100_has_the_fine_labels(tmp_path):
    origin = relaxed("cifar100", 6, 3)
    pixels, own = images(9, 3, 32, 32), labels(9, 100) + 60
    for file, rows in zip(origin.files, (slice(0, 6), slice(6, 9)), strict=True):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        coarse = own[rows] // 5
        (tmp_path / file).write_bytes(
            np.column_stack([coarse, own[rows], pixels[rows].reshape(-1, 3072)]).tobytes()
        )
    source = origin.load("cifar100", tmp_path)
    assert np.array_equal(source.train_y, own[:6])
    assert np.array_equal(source.test_x.mul(255).round().numpy(), pixels[6:])
    with pytest.raises(DataError, match="expected 50000 records of 3074 bytes"):
        load_source("cifar100", tmp_path)


def test_pathmnist(tmp_path):
    pixels, own = images(9, 28, 28, 3), labels(9, 9)
    arrays = {"train_images": pixels[:6], "train_labels": own[:6, None]}
    arrays |= {"val_images": pixels[:0], "val_labels": own[:0, None]}
    arrays |= {"test_images": pixels[6:], "test_labels": own[6:, None]}
    np.savez(tmp_path / "pathmnist.npz", **arrays)
    origin = relaxed("pathmnist", 6, 3)
    source = origin.load("pathmnist", tmp_path)
    assert np.array_equal(source.train_x.mul(255).round().numpy(), pixels[:6].transpose(0, 3, 1, 2))
    assert np.array_equal(source.test_y, own[6:])
    for key, value in (
        ("train_images", pixels[:6, :, :, 0]),
        ("test_labels", own[:2]),
        ("train_labels", own[:6] + 9),
    ):
        np.savez(tmp_path / "pathmnist.npz", **{**arrays, key: value})
        with pytest.raises(DataError, match=r"pathmnist\.npz: .*"):
            origin.load("pathmnist", tmp_path)


def test_class_counts_other_than_the_official_ones_are_noticed(tmp_path):
    write_idx_source(tmp_path, "mnist")
    origin = dataclasses.replace(relaxed("mnist", 20, 10), train_counts=(2,) * 10, test_counts=(1,) * 10)
    assert len(origin.load("mnist", tmp_path).train_y) == 20
    origin = dataclasses.replace(origin, test_counts=(2, 0, *[1] * 8))
    with pytest.raises(DataError, match="test samples per class are"):
        origin.load("mnist", tmp_path)
    with pytest.raises(DataError, match="holds 20 x 28 x 28 values, expected 60000 x 28 x 28"):
        load_source("mnist", tmp_path)


def test_the_official_counts_add_up():
    for origin in [origin for origin in SOURCES.values() if isinstance(origin, Origin)]:
        for total, counts in ((origin.train, origin.train_counts), (origin.test, origin.test_counts)):
            assert counts is None or (sum(counts), len(counts)) == (total, origin.classes)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(SettingError, match="did you mean fashion-mnist"):
        load_source("fashion_mnist")


def test_the_data_folder_is_the_given_one_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SARTOR_DATA", str(tmp_path / "a"))
    assert data_folder(tmp_path / "b") == tmp_path / "b"
    assert data_folder() == tmp_path / "a"
    monkeypatch.setenv("SARTOR_DATA", "")
    assert data_folder().name == "sartor"


# --- downloads --------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder and the address under which it is served, with the paths asked for so far."""
    folder = tmp_path / "served"
    folder.mkdir()
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    served = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=served.serve_forever, args=(0.02,))
    thread.start()
    yield folder, f"http://127.0.0.1:{served.server_port}/", asked
    served.shutdown()
    thread.join()
    served.server_close()


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_missing_files_are_downloaded_once(tmp_path, server):
    folder, address, asked = server
    write_idx_source(folder, "mnist")
    origin = relaxed("mnist", 20, 10)
    downloads = tuple(Download(address + file, md5(folder / file), file) for file in origin.files)
    origin = dataclasses.replace(origin, downloads=downloads)
    first = origin.load("mnist", tmp_path / "data")
    assert len(asked) == 4
    again = origin.load("mnist", tmp_path / "data")
    assert len(asked) == 4
    assert torch.equal(first.train_x, again.train_x)
    (tmp_path / "data" / origin.files[1]).unlink()
    origin.load("mnist", tmp_path / "data")
    assert len(asked) == 5
    assert sorted(path.name for path in (tmp_path / "data" / "mnist").iterdir()) == sorted(
        Path(file).name for file in origin.files
    )


def test_a_download_with_another_checksum_leaves_nothing_behind(tmp_path, server):
    folder, address, _ = server
    write_idx_source(folder, "mnist")
    origin = relaxed("mnist", 20, 10)
    downloads = tuple(Download(address + file, "0" * 32, file) for file in origin.files)
    with pytest.raises(DataError, match=r"could not be downloaded .*hash"):
        dataclasses.replace(origin, downloads=downloads).load("mnist", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_of_an_archive_only_the_wanted_members_are_unpacked(tmp_path, server, kind):
    folder, address, asked = server
    write_idx_source(tmp_path / "made", "mnist")
    origin = relaxed("mnist", 20, 10)
    members = tuple((file, "inside/" + Path(file).name) for file in origin.files)
    contents = {inside: (tmp_path / "made" / file).read_bytes() for file, inside in members}
    contents |= {"../outside": b"never", "inside/other": b"not wanted"}
    path = folder / f"all.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    download = Download(address + path.name, md5(path), f"mnist/all.{kind}", members)
    origin = dataclasses.replace(origin, downloads=(download,))
    origin.load("mnist", tmp_path / "data")
    origin.load("mnist", tmp_path / "data")
    assert len(asked) == 1
    kept = sorted(
        str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*") if path.is_file()
    )
    assert kept == sorted(origin.files)
    lacking = dataclasses.replace(download, members=(*members[:3], (origin.files[3], "inside/none")))
    with pytest.raises(DataError, match=r"could not be downloaded .*inside/none"):
        dataclasses.replace(origin, downloads=(lacking,)).load("mnist", tmp_path / "other")


def test_offline_the_wanted_files_and_the_place_are_named(tmp_path, server):
    _, address, _ = server
    origin = SOURCES["mnist"]
    downloads = tuple(Download(address + file, "0" * 32, file) for file in origin.files)
    with pytest.raises(DataError) as caught:
        dataclasses.replace(origin, downloads=downloads).load("mnist", tmp_path / "data")
    message = str(caught.value)
    assert "\n" not in message
    for words in (*origin.files, str(tmp_path / "data"), "404", "SARTOR_DATA", "data.folder"):
        assert words in message
    assert not (tmp_path / "data").exists()


# --- real files -------------------------------------------------------------------------------------------

folder = Path(os.environ.get("SARTOR_DATA", "/nowhere"))
REAL = {"mnist": "mnist", "fashion-mnist": "fashion-mnist", "cifar10": "cifar-10-batches-bin"}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    if not (folder / REAL[name]).is_dir():
        pytest.skip(f"SARTOR_DATA does not point at a folder with {REAL[name]}")
    source = load_source(name)
    assert (len(source.train_y), len(source.test_y)) == (SOURCES[name].train, 10_000)
    assert source.train_x.shape[1:] == ((3, 32, 32) if name == "cifar10" else (1, 28, 28))
    assert (source.train_x.min(), source.train_x.max()) == (0, 1)
    # Means published for these sets; the order of samples plays no part.
    mean = {"mnist": [0.1307], "fashion-mnist": [0.2860], "cifar10": [0.4914, 0.4822, 0.4465]}[name]
    assert torch.allclose(source.train_x.mean(dim=(0, 2, 3)), torch.tensor(mean), atol=2e-3)
