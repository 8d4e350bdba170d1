"""Public data sets by name: embedded, found in the data folder, or downloaded once.

The data folder is the one given, else that of the environment variable ``SARTOR_DATA``, else the user's
cache. Files found there are checked by format, size and class counts; downloads by their published checksum
too. A download has a temporary name until it is checked, so a file with its proper name is whole.
"""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sartor import nests
from sartor.data.apportion import apportion
from sartor.data.download import fetch, user_cache
from sartor.data.preprocessing import Preprocessing
from sartor.data.readers import Bytes, read_cifar, read_idx, read_npz
from sartor.data.samples import is_class
from sartor.data.streams import stream
from sartor.errors import DataError
from sartor.extensions import Registry
from sartor.files import replacing
from sartor.nests import Nest
from sartor.settings import unknown

if TYPE_CHECKING:
    from sartor.data.clients import ClientData


@dataclass(frozen=True, eq=False)
class Source:
    """Samples with their targets that are not divided among clients yet; the test set may be empty.

    Inputs and targets are nests of tensors. ``train_x`` of the named sources is
    ``[n, channels, height, width]`` float32 in 0..1. ``classes`` is None where targets are no classes.
    """

    name: str
    train_x: Nest
    train_y: Nest
    test_x: Nest
    test_y: Nest
    classes: int | None
    names: tuple[str, ...] | None = None
    """The names of the classes, where labels were texts."""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    """What was done to raw rows."""

    @property
    def sizes(self) -> tuple[int, int]:
        """How many training and how many test samples there are."""
        return nests.length(self.train_y), nests.length(self.test_y)

    def merged(self) -> Source:
        """All samples as one set, of which each client's test samples are still to be drawn."""
        train, test = (self.train_x, self.train_y), (self.test_x, self.test_y)
        x, y = nests.mapped(lambda one, other: torch.cat([one, other]), train, test)
        test_x, test_y = nests.rows((x, y), slice(0, 0))
        return replace(self, train_x=x, train_y=y, test_x=test_x, test_y=test_y)

    def labels(self, leaf: str | None = None) -> tuple[Labelled, Labelled]:
        """The whole numbers from 0 by which samples are divided, of training and of test samples.

        ``leaf`` names one that has one number per sample, as in ``x.site``; left out, it is the target.
        """
        held = {
            path: (own, test)
            for name, nest, other in (("x", self.train_x, self.test_x), ("y", self.train_y, self.test_y))
            for (path, own), test in zip(nests.paths(nest, name).items(), nests.leaves(other), strict=True)
        }
        if leaf is not None and leaf not in held:
            raise unknown("partition.leaf", leaf, held, "leaf")
        if leaf is None and not is_class(self.train_y):
            raise DataError(
                f"{self.name}: targets are not one class per sample, by which samples could be divided; name "
                f"a leaf that has one number per sample (partition.leaf: {', '.join(held)}), or take "
                "partition.name = 'iid'"
            )
        train, test = held["y" if leaf is None else leaf]
        if train.ndim != 1:
            shape = list(train.shape[1:])
            raise DataError(f"partition.leaf = {leaf!r}: has {shape} numbers per sample, one is needed")
        if is_class(train) and (not len(train) or int(train.min()) >= 0):
            return train.numpy().astype(np.int64), test.numpy().astype(np.int64)
        _, places = np.unique(torch.cat([train, test]).numpy(), return_inverse=True)
        return places[: len(train)].astype(np.int64), places[len(train) :].astype(np.int64)


Labelled: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True)
class Download:
    """A published file: where, its md5, and of an archive the members to keep, as ``(file, name inside)``."""

    url: str
    md5: str
    file: str
    members: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Origin:
    """How to get and read one data set. The sizes are the official ones; another size is an error."""

    about: str
    classes: int
    files: tuple[str, ...]
    downloads: tuple[Download, ...]
    read: Callable[[Origin, Sequence[Path]], tuple[npt.NDArray[Any], ...]]
    train: int
    test: int
    train_counts: tuple[int, ...] | None = None
    test_counts: tuple[int, ...] | None = None

    def load(self, name: str, folder: Path) -> Source:
        """Find the files, downloading what is missing, then read and check them."""
        found = [self.find(folder, file) for file in self.files]
        if any(path is None for path in found):
            _download(name, self, folder)
            found = [self.find(folder, file) for file in self.files]
        paths = [path for path in found if path is not None]
        train_x, train_y, test_x, test_y = self.read(self, paths)
        where = ", ".join(map(str, paths)) or name
        for split, labels, total, counts in (
            ("training", train_y, self.train, self.train_counts),
            ("test", test_y, self.test, self.test_counts),
        ):
            if len(labels) != total:
                raise DataError(f"{where}: {len(labels)} {split} samples, {name} has {total}")
            own = np.bincount(labels, minlength=self.classes)
            if len(own) > self.classes:
                raise DataError(
                    f"{where}: a {split} label is {len(own) - 1}, {name} has {self.classes} classes"
                )
            if counts is not None and tuple(own.tolist()) != counts:
                raise DataError(
                    f"{where}: {split} samples per class are {own.tolist()}, {name} has {list(counts)}"
                )
        return Source(
            name, _pixels(train_x), _labels(train_y), _pixels(test_x), _labels(test_y), self.classes
        )

    @staticmethod
    def find(folder: Path, file: str) -> Path | None:
        """The file in the folder, also gzipped or unzipped."""
        for name in (file, file + ".gz", file.removesuffix(".gz")):
            if (folder / name).is_file():
                return folder / name
        return None


Loaded: TypeAlias = "Source | ClientData | Mapping[str, Any]"
"""What a registered data set gives: samples to divide among clients, or those of every client."""


@dataclass(frozen=True)
class Loader:
    """A data set of a user's own: a function that gives its samples."""

    function: Callable[..., Loaded]


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder for data files: the given one, else ``SARTOR_DATA``, else the user's cache."""
    if folder or os.environ.get("SARTOR_DATA"):
        return Path(folder or os.environ["SARTOR_DATA"]).expanduser()
    return user_cache()


def load_source(name: str, folder: str | Path | None = None) -> Source:
    """A public data set by name; see ``SOURCES`` for the names.

    >>> source = load_source("digits")
    >>> tuple(source.train_x.shape), tuple(source.test_x.shape), source.classes
    ((1438, 1, 8, 8), (359, 1, 8, 8), 10)
    """
    origin = SOURCES.get(name)
    if origin is None:
        raise unknown("data.name", str(name), SOURCES, "data set")
    if isinstance(origin, Loader):
        raise DataError(f"{name}: is no public data set; its own function loads it")
    return origin.load(name, data_folder(folder))


def _pixels(images: npt.NDArray[Any]) -> torch.Tensor:
    """Images as float32 in 0..1: bytes are divided by 255."""
    if images.dtype == np.uint8:
        return torch.from_numpy(np.array(images, np.float32)).div_(255)
    return torch.from_numpy(np.array(images, np.float32))


def _labels(labels: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _read_digits(origin: Origin, paths: Sequence[Path]) -> tuple[npt.NDArray[Any], ...]:
    """The digits that come with scikit-learn, split 80/20 within each class, always the same way."""
    table = _digits()
    images, labels = table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].astype(np.int64)
    test = np.zeros(len(labels), bool)
    sizes = np.bincount(labels)
    for label, number in enumerate(apportion(origin.test, sizes)):
        rows = np.flatnonzero(labels == label)
        test[stream(0, "digits", label).permutation(rows)[:number]] = True
    return images[~test], labels[~test], images[test], labels[test]


@cache
def _digits() -> npt.NDArray[Any]:
    """64 pixels and the class of each, read once: a megabyte that many short runs take."""
    # Its own file is read directly: importing sklearn.datasets takes a second.
    spec = importlib.util.find_spec("sklearn")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    path = folder / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            return np.loadtxt(file, delimiter=",")
    except (OSError, ValueError, EOFError):
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.column_stack([digits.data, digits.target])


def _read_mnist(origin: Origin, paths: Sequence[Path]) -> tuple[Bytes, ...]:
    """Four IDX files: training images and labels, test images and labels."""
    parts = []
    for images, labels, total in ((paths[0], paths[1], origin.train), (paths[2], paths[3], origin.test)):
        parts += [read_idx(images, (total, 28, 28))[:, None], read_idx(labels, (total,))]
    return tuple(parts)


def _read_emnist(origin: Origin, paths: Sequence[Path]) -> tuple[Bytes, ...]:
    """As MNIST, but published with rows and columns exchanged; turned upright here."""
    train_x, train_y, test_x, test_y = _read_mnist(origin, paths)
    return train_x.swapaxes(2, 3), train_y, test_x.swapaxes(2, 3), test_y


def _read_cifar10(origin: Origin, paths: Sequence[Path]) -> tuple[Bytes, ...]:
    """Five training files and one test file, one label byte."""
    *train, test = [read_cifar(path, 1, origin.classes, None) for path in paths]
    images, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return images, labels, *test


def _read_cifar100(origin: Origin, paths: Sequence[Path]) -> tuple[Bytes, ...]:
    """One training and one test file; the fine labels are the classes."""
    train, test = (
        read_cifar(path, 2, origin.classes, total)
        for path, total in zip(paths, (origin.train, origin.test), strict=True)
    )
    return *train, *test


def _read_pathmnist(origin: Origin, paths: Sequence[Path]) -> tuple[npt.NDArray[Any], ...]:
    """One npz of colour images, channels last. Its official validation set is not used."""
    arrays = read_npz(paths[0], ("train_images", "train_labels", "test_images", "test_labels"))
    parts: list[npt.NDArray[Any]] = []
    for split in ("train", "test"):
        images, labels = arrays[split + "_images"], arrays[split + "_labels"]
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (28, 28, 3):
            raise DataError(
                f"{paths[0]}: {split}_images is {images.dtype} {images.shape}, expected uint8 [n, 28, 28, 3]"
            )
        if labels.dtype.kind not in "iu" or labels.size != len(images) or labels.min(initial=0) < 0:
            raise DataError(
                f"{paths[0]}: {split}_labels is {labels.dtype} {labels.shape}, expected one class per image"
            )
        parts += [images.transpose(0, 3, 1, 2), labels.reshape(-1).astype(np.int64)]
    return tuple(parts)


_IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx_downloads(folder: str, base: str, *md5: str) -> tuple[Download, ...]:
    return tuple(
        Download(base + file, digest, f"{folder}/{file}") for file, digest in zip(_IDX, md5, strict=True)
    )


def _emnist(kind: str, classes: int, train: int, test: int, equal: bool) -> Origin:
    names = [
        f"emnist-{kind}-{split}-{part}-ubyte.gz"
        for split in ("train", "test")
        for part in ("images-idx3", "labels-idx1")
    ]
    archive = Download(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "58c8d27c78d21e728a6bc7b3cc06412e",
        "emnist/gzip.zip",
        tuple((f"emnist/{name}", f"gzip/{name}") for name in names),
    )
    return Origin(
        f"handwritten digits and letters, {classes} classes, 28 x 28",
        classes,
        tuple(f"emnist/{name}" for name in names),
        (archive,),
        _read_emnist,
        train,
        test,
        (train // classes,) * classes if equal else None,
        (test // classes,) * classes if equal else None,
    )


def _cifar(
    number: int,
    folder: str,
    names: Sequence[str],
    md5: str,
    read: Callable[..., tuple[npt.NDArray[Any], ...]],
) -> Origin:
    files = tuple(f"{folder}/{name}" for name in names)
    url = f"https://www.cs.toronto.edu/~kriz/cifar-{number}-binary.tar.gz"
    archive = Download(url, md5, f"{folder}/archive.tar.gz", tuple((file, file) for file in files))
    counts = (50_000 // number,) * number, (10_000 // number,) * number
    about = f"small colour photographs, {number} classes, 3 x 32 x 32"
    return Origin(about, number, files, (archive,), read, 50_000, 10_000, *counts)


_PUBLIC = {
    "digits": Origin("handwritten digits, 8 x 8, part of scikit-learn", 10, (), (), _read_digits, 1438, 359),
    "mnist": Origin(
        "handwritten digits, 28 x 28",
        10,
        tuple(f"mnist/{file}" for file in _IDX),
        _idx_downloads(
            "mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        _read_mnist,
        60_000,
        10_000,
        (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    ),
    "fashion-mnist": Origin(
        "clothes, 10 classes, 28 x 28",
        10,
        tuple(f"fashion-mnist/{file}" for file in _IDX),
        _idx_downloads(
            "fashion-mnist",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        _read_mnist,
        60_000,
        10_000,
        (6000,) * 10,
        (1000,) * 10,
    ),
    "emnist-balanced": _emnist("balanced", 47, 112_800, 18_800, True),
    "emnist-byclass": _emnist("byclass", 62, 697_932, 116_323, False),
    "cifar10": _cifar(
        10,
        "cifar-10-batches-bin",
        (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"),
        "c32a1d4ab5d03f1284b67883e8d87530",
        _read_cifar10,
    ),
    "cifar100": _cifar(
        100, "cifar-100-binary", ("train.bin", "test.bin"), "03b5dce01913d631647c71ecec9e9cb8", _read_cifar100
    ),
    "pathmnist": Origin(
        "colon tissue under the microscope, 9 classes, 3 x 28 x 28",
        9,
        ("pathmnist.npz",),
        (
            Download(
                "https://zenodo.org/records/10519652/files/pathmnist.npz?download=1",
                "a8b06965200029087d5bd730944a56c1",
                "pathmnist.npz",
            ),
        ),
        _read_pathmnist,
        89_996,
        7_180,
    ),
}

SOURCES: Registry[Origin | Loader] = Registry("sartor.data", "data set", _PUBLIC)
"""The data sets by name, those of users and of installed packages included."""


_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zipfile.BadZipFile,
)


def _download(name: str, origin: Origin, folder: Path) -> None:
    """Fetch the missing files into the data folder, or say which files are wanted and where to put them."""
    missing = [file for file in origin.files if origin.find(folder, file) is None]
    for download in origin.downloads:
        wanted = [file for file, _ in download.members] or [download.file]
        if not set(wanted) & set(missing):
            continue
        try:
            _retrieve(name, download, folder)
        except _FAILURES as error:
            reason = " ".join(str(error).split())[:300]
            still = [file for file in origin.files if origin.find(folder, file) is None]
            raise DataError(
                f"{name}: not in {folder} and could not be downloaded from {download.url} ({reason}). "
                f"Wanted in {folder}: {', '.join(still)}. Put the files there, or name the folder that "
                "holds them by data.folder or the environment variable SARTOR_DATA"
            ) from None


def _retrieve(name: str, download: Download, folder: Path) -> None:
    """Download one file, check it, and unpack the members if it is an archive."""
    place = folder / download.file
    if not download.members:
        with _made(place.parent):
            fetch(download.url, download.md5, place, f"downloading {name}")
        return
    with (
        _made(place.parent),
        tempfile.TemporaryDirectory(dir=place.parent, prefix=".download-") as temporary,
    ):
        path = Path(temporary) / place.name
        fetch(download.url, download.md5, path, f"downloading {name}")
        with _Archive(path) as archive:
            for file, member in download.members:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                with (
                    replacing(folder / file) as part,
                    archive.open(member) as packed,
                    open(part, "wb") as out,
                ):
                    shutil.copyfileobj(packed, out)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder, made where there is none; what was made goes again if nothing came into it."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in new:
            with suppress(OSError):  # there is something in it
                place.rmdir()


class _Archive:
    """A zip or tar file from which named members are read; nothing is written where the archive says."""

    def __init__(self, path: Path) -> None:
        self.file = zipfile.ZipFile(path) if path.suffix == ".zip" else tarfile.open(path)  # noqa: SIM115 (closed on exit)

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def open(self, member: str) -> IO[bytes]:
        """The content of a member."""
        content = (
            self.file.open(member)
            if isinstance(self.file, zipfile.ZipFile)
            else self.file.extractfile(member)
        )
        if content is None:
            raise KeyError(f"{member} is not a file in the archive")
        return content
