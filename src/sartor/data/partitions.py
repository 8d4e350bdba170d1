"""Partitions: which client holds which samples, as an artefact with a hash that can be saved and used again.

:func:`make_partition` draws one by a scheme of :mod:`sartor.data.schemes`, :func:`apply` turns a source and
a partition into :class:`~sartor.data.clients.ClientData`. Two people who name the same hash train and test
on the same split.

>>> labels = np.repeat(np.arange(4), 50)
>>> partition = make_partition(labels, {"name": "classes", "k": 2}, clients=6, seed=1)
>>> [int((counts > 0).sum()) for counts in partition.counts("train")]
[2, 2, 2, 2, 2, 2]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sartor import nests
from sartor.data.apportion import Counts, cut
from sartor.data.clients import SPLITS, ClientData, Split, check_fraction, prepare
from sartor.data.readers import read_npz
from sartor.data.samples import is_class
from sartor.data.schemes import (
    PARTITIONS,
    Labels,
    Scheme,
    class_counts,
    find_scheme,
    match_test,
    parameters_of,
)
from sartor.data.sources import Source
from sartor.data.streams import stream
from sartor.errors import DataError, SettingError
from sartor.files import replacing
from sartor.nests import Nest

__all__ = [
    "PARTITIONS",
    "Partition",
    "apply",
    "describe",
    "find_scheme",
    "make_partition",
    "plot_partition",
]

FORMAT = "sartor partition 1"
LEAF = "leaf"
"""The parameter that names the leaf by which a source was divided."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client, by number: training samples first, then the test samples, of the source.

    ``labels`` are those of all samples, so that the partition can be described without the source and
    refuses a source it was not made for. Samples within a client are in ascending order. Nobody's training
    or validation sample is anybody's test sample.
    """

    name: str
    parameters: Mapping[str, Any]
    seed: int
    names: tuple[str, ...]
    train: tuple[Counts, ...]
    test: tuple[Counts, ...]
    validation: tuple[Counts, ...] | None
    labels: Counts
    train_total: int
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        return int(self.labels.max()) + 1

    @cached_property
    def hash(self) -> str:
        """The sha256 of what the clients hold: names, samples and labels, not of how the split was made."""
        digest = hashlib.sha256(json.dumps([FORMAT, self.names, self.train_total]).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        for split, parts in self.splits().items():
            digest.update(json.dumps([split, [len(part) for part in parts]]).encode())
            digest.update(np.concatenate(parts).astype("<i8").tobytes())
        return digest.hexdigest()

    def splits(self) -> dict[str, tuple[Counts, ...]]:
        """The splits there are, by name."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        return {split: part for split, part in parts.items() if part is not None}

    def counts(self, split: str = "train") -> Counts:
        """Samples of each class each client holds, ``[clients, classes]``."""
        return class_counts(self.labels, self.splits()[split], self.classes)

    def save(self, path: str | Path) -> None:
        """Write to an npz file, all or nothing."""
        path = Path(path)
        header = {
            "format": FORMAT,
            "hash": self.hash,
            "name": self.name,
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "names": self.names,
            "train_total": self.train_total,
            "notes": self.notes,
        }
        arrays: dict[str, npt.NDArray[Any]] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "labels": self.labels.astype(np.int32),
        }
        for split, parts in self.splits().items():
            arrays[split] = np.concatenate(parts).astype(np.int32)
            arrays[split + "_count"] = np.array([len(part) for part in parts], np.int32)
        try:
            with replacing(path) as temporary, open(temporary, "wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no array is a flag
        except OSError as error:
            raise DataError(f"{path}: cannot write the partition ({error.strerror or error})") from None

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read what :meth:`save` wrote; a file that is damaged or does not have its hash is an error."""
        arrays = read_npz(path, required=("header", "labels", "train", "train_count", "test", "test_count"))
        try:
            header = json.loads(arrays["header"].astype(np.uint8).tobytes().decode())
            if header["format"] != FORMAT:
                raise DataError(f"{path}: a partition of another format, {header['format']!r}")
            parts = {}
            for split in SPLITS:
                if split in arrays:
                    count, index = arrays[split + "_count"], arrays[split].astype(np.int64)
                    if count.min(initial=0) < 0 or count.sum() != len(index):
                        raise ValueError(f"the sizes of {split} do not fit")
                    parts[split] = tuple(np.split(index, np.cumsum(count)[:-1]))
            partition = cls(
                name=str(header["name"]),
                parameters=dict(header["parameters"]),
                seed=int(header["seed"]),
                names=tuple(str(name) for name in header["names"]),
                train=parts["train"],
                test=parts["test"],
                validation=parts.get("validation"),
                labels=arrays["labels"].astype(np.int64),
                train_total=int(header["train_total"]),
                notes=tuple(str(note) for note in header["notes"]),
            )
            fits = partition.hash == header["hash"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise DataError(f"{path}: not a partition, or damaged ({error})") from None
        except DataError as error:
            raise DataError(
                f"{path}: {error}" if not str(error).startswith(str(path)) else str(error)
            ) from None
        if not fits:
            raise DataError(f"{path}: damaged; the content does not have the hash it was saved with")
        return partition


def make_partition(
    data: Source | npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike],
    spec: str | Mapping[str, Any] | Scheme,
    clients: int | None = None,
    seed: int = 0,
    validation: float = 0.0,
    test_fraction: float = 0.2,
    leaf: str | None = None,
) -> Partition:
    """Divide the samples of a source, or labels alone, among clients.

    ``data`` is a source, an array of labels, or the labels of a training and a test set. Each client's test
    samples follow its own training labels; they come from the test set, or, where there is none, are cut
    from the client's samples by ``test_fraction``. ``validation`` is the share of each client's training
    samples set aside, class by class. ``clients`` may be left out for a column only. ``leaf`` names the leaf
    of a source whose numbers stand for labels here, as in ``x.site``; left out, the target does.
    """
    check_fraction("validation", validation)
    check_fraction("test_fraction", test_fraction)
    scheme = find_scheme(spec)
    labels = _labels(data, leaf, scheme)
    if clients is None and scheme.name != "column":
        raise SettingError("clients: how many clients is needed for every partition but column")
    if clients is not None and clients < 1:
        raise SettingError(f"clients: must be at least 1, got {clients}")
    draw = scheme.split(labels, clients or 0, seed)
    train, notes = draw.train, draw.notes
    if draw.test is not None:
        test = draw.test
    elif len(labels.test):
        test, more = match_test(labels, class_counts(labels.train, train, labels.classes), seed)
        notes = (*notes, *more)
    else:
        train, test = _cut_all(train, labels.train, test_fraction, seed, "test")
        alone = sum(len(part) == 0 for part in test)
        if alone:
            notes = (
                *notes,
                f"{alone} clients have a single sample, which they train on; they have none to test on",
            )
    held = None
    if validation > 0:
        train, held = _cut_all(train, labels.train, validation, seed, "validation")
    return Partition(
        name=scheme.name,
        parameters=parameters_of(scheme) if leaf is None else {**parameters_of(scheme), LEAF: leaf},
        seed=int(seed),
        names=draw.names or tuple(str(client) for client in range(len(train))),
        train=_ascending(train),
        test=_ascending(test),
        validation=None if held is None else _ascending(held),
        labels=np.concatenate([labels.train, labels.test]),
        train_total=len(labels.train),
        notes=notes,
    )


def apply(
    source: Source,
    partition: Partition,
    *,
    normalise: bool = False,
    features: Callable[[Nest], Nest] | None = None,
) -> ClientData:
    """The clients' data: a source divided by a partition.

    ``features`` and ``normalise`` are as in :func:`~sartor.data.clients.prepare`. The pooled test set is the
    source's, or the clients' together where it has none.
    """
    leaf = partition.parameters.get(LEAF)
    train, test = source.sizes
    known = (partition.train_total, len(partition.labels) - partition.train_total)
    fits = known == (train, test)
    if fits and (leaf is not None or is_class(source.train_y)):
        fits = np.array_equal(partition.labels, np.concatenate(source.labels(leaf)))
    if not fits:
        raise DataError(
            f"the partition was not made for {source.name}: it knows {known[0]} training and "
            f"{known[1]} test samples, the source has {train} and {test}, and all labels must be the same; "
            "make it again from this source"
        )
    splits: dict[str, Split] = {}
    for name, parts in partition.splits().items():
        x, y = _take(source, np.concatenate(parts))
        count = np.array([len(part) for part in parts], np.int64)
        splits[name] = Split(x, y, np.cumsum(count) - count, count)
    official, tried = test > 0, np.concatenate(partition.test) - train
    data = ClientData(
        names=partition.names,
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        pooled_x=source.test_x if official else splits["test"].x,
        pooled_y=source.test_y if official else splits["test"].y,
        classes=source.classes,
        hash=partition.hash,
        name=source.name,
        labels=source.names,
        preprocessing=source.preprocessing,
        places=tried if official and tried.min(initial=0) >= 0 else None,
    )
    return prepare(data, normalise=normalise, features=features)


def describe(data: Partition | ClientData) -> list[dict[str, Any]]:
    """One row per client: samples in each split, classes among its training labels, share of the largest.

    >>> partition = make_partition(np.array([0, 0, 0, 1, 1, 1]), "iid", clients=1)
    >>> describe(partition)
    [{'client': '0', 'train': 5, 'test': 1, 'validation': 0, 'classes': 2, 'largest_share': 0.6}]
    """
    if isinstance(data, Partition):
        sizes = {name: [len(part) for part in parts] for name, parts in data.splits().items()}
    else:
        own = {"train": data.train, "test": data.test, "validation": data.validation}
        sizes = {name: part.count.tolist() for name, part in own.items() if part is not None}
    counts = _train_counts(data)
    rows = []
    for client, name in enumerate(data.names):
        row: dict[str, Any] = {"client": name}
        row |= {split: sizes[split][client] if split in sizes else 0 for split in SPLITS}
        if counts is None:
            row |= {"classes": None, "largest_share": None}
        else:
            mine = counts[client]
            row |= {"classes": int((mine > 0).sum()), "largest_share": float(mine.max() / mine.sum())}
        rows.append(row)
    return rows


def plot_partition(data: Partition | ClientData, path: str | Path) -> None:
    """Draw which client trains on how many samples of which class: dots with the number as area."""
    counts = _train_counts(data)
    if counts is None:
        raise DataError(f"{data.name}: a partition is drawn by class, and its targets have none")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise DataError(
            "drawing a partition needs matplotlib; install it with: pip install 'sartor[plot]'"
        ) from None
    clients, classes = counts.shape
    # A dot fills its cell, but stays visible on a page of bounded size where the cells get too narrow for it.
    wide, high = min(24.0, max(4.0, 0.25 * clients)), min(24.0, max(3.0, 0.25 * classes))
    cell = max(7.0, 72 * min(wide / clients, high / classes) * 0.9)
    client, label = np.nonzero(counts)
    figure = Figure(figsize=(wide + 1.2, high + 1.0), layout="constrained")
    axes = figure.add_subplot()
    area = np.maximum(counts[client, label] / counts.max() * cell**2, 0.2)
    axes.scatter(client, label, s=area, color="#2a6f97", alpha=0.8, linewidths=0)
    axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), xlabel="client", ylabel="class")
    axes.set_title(f"{data.name}: {clients} clients, largest dot {counts.max()} training samples", fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.15)
    axes.set_axisbelow(True)
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise DataError(f"{path}: cannot write the picture ({error.strerror or error})") from None


def _check(partition: Partition) -> None:
    """What must hold of any partition, also of one read from a file or built by hand."""
    labels, total = partition.labels, len(partition.labels)
    if labels.ndim != 1 or not total or labels.min() < 0:
        raise DataError("partition: labels must be whole numbers from 0, one per sample")
    if not 0 < partition.train_total <= total:
        raise DataError(f"partition: train_total must be in 1..{total}, got {partition.train_total}")
    clients = len(partition.names)
    if not clients or len(set(partition.names)) < clients:
        raise DataError("partition: give each client a name of its own")
    use = {}
    for split, parts in partition.splits().items():
        if len(parts) != clients:
            raise DataError(f"partition: {clients} clients but {len(parts)} parts in {split}")
        joined = np.concatenate(parts)
        if len(joined) and (joined.min() < 0 or joined.max() >= total):
            raise DataError(f"partition: {split} names a sample outside 0..{total - 1}")
        if split != "test" and joined.max(initial=0) >= partition.train_total:
            raise DataError(f"partition: {split} holds sample {joined.max()}, which is of the test set")
        use[split] = np.zeros(total, bool)
        use[split][joined] = True
    for name, part in zip(partition.names, partition.train, strict=True):
        if not len(part):
            raise DataError(f"partition: client {name} has no training samples")
    if not use["test"].any():
        raise DataError("partition: no client has a test sample; give each at least two samples")
    pairs = [(first, second) for first in use for second in use if first < second]
    for first, second in pairs:
        shared = np.flatnonzero(use[first] & use[second])
        if len(shared):
            raise DataError(
                f"partition: sample {shared[0]} is in {first} and in {second} ({len(shared)} such samples); "
                "every sample belongs to one split"
            )


def _labels(
    data: Source | npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike], leaf: str | None, scheme: Scheme
) -> Labels:
    """Training and test labels, checked."""
    if isinstance(data, Source):
        if leaf is None and not is_class(data.train_y) and scheme.name in ("iid", "column"):
            return Labels(*(np.zeros(size, np.int64) for size in data.sizes))  # which nobody looks at
        return Labels(*data.labels(leaf))
    given: Sequence[Any] = (
        data if isinstance(data, tuple) and len(data) == 2 and np.ndim(data[0]) == 1 else (data, [])
    )
    arrays = []
    for what, values in zip(("labels", "test labels"), given, strict=True):
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or array.min(initial=0) < 0:
            raise DataError(f"{what}: must be whole numbers from 0, one per sample, to be partitioned by")
        arrays.append(array.astype(np.int64))
    if not len(arrays[0]):
        raise DataError("labels: no samples to partition")
    return Labels(*arrays)


def _cut_all(
    parts: Sequence[Counts], labels: Counts, fraction: float, seed: int, split: str
) -> tuple[list[Counts], list[Counts]]:
    """Every client's samples in two, class by class."""
    pairs = [cut(part, labels[part], fraction, stream(seed, "cut", split, i)) for i, part in enumerate(parts)]
    return [kept for kept, _ in pairs], [taken for _, taken in pairs]


def _ascending(parts: Sequence[Counts]) -> tuple[Counts, ...]:
    return tuple(np.sort(part) for part in parts)


def _take(source: Source, index: Counts) -> Nest:
    """Samples by their number in the training and test set one after the other: inputs and targets."""
    rows = torch.from_numpy(index)
    first = source.sizes[0]
    train, test = (source.train_x, source.train_y), (source.test_x, source.test_y)
    if not len(index) or int(index.max()) < first:
        return nests.rows(train, rows)
    if int(index.min()) >= first:
        return nests.rows(test, rows - first)
    early = rows < first

    def both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        taken = torch.empty((len(rows), *one.shape[1:]), dtype=one.dtype)
        taken[early], taken[~early] = one[rows[early]], other[rows[~early] - first]
        return taken

    return nests.mapped(both, train, test)


def _train_counts(data: Partition | ClientData) -> Counts | None:
    """Training samples per client and class; None where targets are not one class per sample."""
    if isinstance(data, Partition):
        return data.counts("train")
    if data.classes is None or not is_class(data.train.y):
        return None
    parts = np.split(np.arange(len(data.train.y)), np.cumsum(data.train.count)[:-1])
    return class_counts(data.train.y.cpu().numpy(), parts, data.classes)
