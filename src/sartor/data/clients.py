"""What a federation trains on: the samples of all clients, laid out client by client.

:class:`ClientData` is the one container every source, partition and kind of own data ends in. All samples
of a split lie in one tensor, so that a client is a slice and a cohort a gather. :func:`from_clients` builds
it from data that is split by client already; see :mod:`sartor.data.partitions` for data that is not.
:func:`lazy_clients` is for more clients than fit into memory: their samples are fetched when they are asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias, overload

import numpy as np
import torch

from sartor.data.apportion import cut
from sartor.data.labels import check_labels, listed, other_kind, texts_of
from sartor.data.streams import stream
from sartor.errors import DataError
from sartor.settings import shown

SPLITS = ("train", "test", "validation")
MOST_CLASSES = 2**20
"""Labels are below this: a model has an output for each class."""
POOLED_CLIENTS = 100
"""Lazy clients whose test samples are the pooled test set where none is given."""
Samples: TypeAlias = "tuple[Any, Any]"
"""The samples of one client as ``(x, y)``, arrays or tensors."""


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of all clients, one after the other: client ``i`` has ``count[i]`` from ``start[i]`` on."""

    x: torch.Tensor
    y: torch.Tensor
    start: np.ndarray
    count: np.ndarray

    def of(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of one client, as views."""
        rows = slice(int(self.start[client]), int(self.start[client] + self.count[client]))
        return self.x[rows], self.y[rows]

    def to(self, device: torch.device | str) -> Split:
        """The same samples on a device."""
        return dataclasses.replace(self, x=self.x.to(device), y=self.y.to(device))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Split:
        """The same samples with a function applied to ``x``."""
        return dataclasses.replace(self, x=function(self.x))

    def some(self, clients: np.ndarray) -> Split:
        """Those of some clients, in this order."""
        return dataclasses.replace(self, start=self.start[clients], count=self.count[clients])


@dataclass(frozen=True, eq=False)
class LazySplit(Split):
    """Samples that are fetched when a client is asked; ``x`` and ``y`` are those of one client, to show.

    Samples of client ``i`` are ``count[i]`` from ``start[i]`` on of what is fetched for it.
    """

    fetch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]

    def of(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of one client, fetched or remembered."""
        x, y = self.fetch(client)
        rows = slice(int(self.start[client]), int(self.start[client] + self.count[client]))
        return x[rows], y[rows]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Split:
        """The same samples with a function applied to ``x`` whenever they are fetched."""

        def fetch(client: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = self.fetch(client)
            return function(x), y

        return dataclasses.replace(self, x=function(self.x), fetch=fetch)

    def some(self, clients: np.ndarray) -> Split:
        """Those of some clients, in this order."""
        return dataclasses.replace(
            self,
            start=self.start[clients],
            count=self.count[clients],
            fetch=lambda client: self.fetch(int(clients[client])),
        )


@dataclass(frozen=True, eq=False)
class ClientData:
    """Everything a run needs to know of its data: each client's splits and the pooled test set.

    ``pooled_x, pooled_y`` are the official test set where there is one, otherwise all clients' test samples
    together. ``classes`` is None for regression. ``hash`` identifies the partition, for own data the
    contents. ``labels`` are the names of the classes, in the order of their numbers, where labels are texts.
    """

    names: Sequence[str]
    train: Split
    test: Split
    validation: Split | None
    pooled_x: torch.Tensor
    pooled_y: torch.Tensor
    classes: int | None
    hash: str
    name: str
    labels: tuple[str, ...] | None = None
    public_x: torch.Tensor | None = None
    """Samples without labels that server and clients know, where there are any."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    def to(self, device: torch.device | str) -> ClientData:
        """The same data on a device."""
        return dataclasses.replace(
            self,
            train=self.train.to(device),
            test=self.test.to(device),
            validation=None if self.validation is None else self.validation.to(device),
            pooled_x=self.pooled_x.to(device),
            pooled_y=self.pooled_y.to(device),
            public_x=None if self.public_x is None else self.public_x.to(device),
        )

    def some(self, clients: np.ndarray) -> ClientData:
        """Some of the clients, in this order."""
        return dataclasses.replace(
            self,
            names=tuple(self.names[number] for number in clients.tolist()),
            train=self.train.some(clients),
            test=self.test.some(clients),
            validation=None if self.validation is None else self.validation.some(clients),
        )


def from_clients(
    clients: Mapping[str, Samples | Mapping[str, Samples]],
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    regression: bool = False,
    labels: Sequence[str] | None = None,
    name: str = "own",
) -> ClientData:
    """Data that is split by client already.

    Each client gives ``(x, y)``, of which a test part and, if asked for, a validation part are drawn; or
    its own splits as ``{"train": (x, y), "test": (x, y), "validation": (x, y)}``, where a missing ``test``
    or ``validation`` is drawn from ``train``. A client with at least two samples has at least one to test
    on and one to train on. Labels are whole numbers from 0, or any finite numbers with ``regression=True``;
    or texts, which are numbered in alphabetical order, or as in ``labels``, outside which there is none then.

    >>> x, y = np.eye(10), np.arange(10) % 2
    >>> data = from_clients({"north": (x, y), "south": (x[:5], y[:5])})
    >>> data.names, data.train.count.tolist(), data.test.count.tolist()
    (('north', 'south'), [8, 4], [2, 1])
    >>> data = from_clients({"north": (x, ["ill"] * 10), "south": (x, ["well", "ill"] * 5)})
    >>> data.labels, data.classes, data.test.of(0)[1].tolist()
    (('ill', 'well'), 2, [0, 0])
    """
    if not clients:
        raise DataError(f"{name}: no clients; give at least one")
    check_fraction("test_fraction", test_fraction)
    check_fraction("validation_fraction", validation_fraction)
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {split: [] for split in SPLITS}
    names = tuple(str(client) for client in clients)
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two clients have the same name")
    found = None if regression else _text_labels(clients)
    for client, given in zip(names, clients.values(), strict=True):
        own = _splits_of(client, given, regression, found)
        for split, fraction in (("test", test_fraction), ("validation", validation_fraction)):
            if split not in own and (fraction > 0 or split == "test"):
                x, y = own["train"]
                strata = np.zeros(len(y), np.int64) if regression else y.numpy()
                kept, taken = cut(np.arange(len(y)), strata, fraction, stream(seed, "cut", split, client))
                own["train"], own[split] = (x[kept], y[kept]), (x[taken], y[taken])
        for split, samples in own.items():
            parts[split].append(samples)
    _check_shapes(names, parts)
    if parts["validation"] and len(parts["validation"]) < len(names):
        raise DataError(
            f"{name}: {len(parts['validation'])} of {len(names)} clients have a validation split; "
            "give one to every client, or set validation_fraction to draw the missing ones"
        )
    data = gather(names, parts, regression=regression, labels=found, name=name)
    return data if labels is None else relabel(data, labels)


def lazy_clients(
    count: int,
    fetch: Callable[[int], Samples],
    *,
    n_train: int | Sequence[int] | np.ndarray,
    n_test: int | Sequence[int] | np.ndarray,
    n_validation: int | Sequence[int] | np.ndarray = 0,
    classes: int | None,
    pooled: Samples | None = None,
    cache_bytes: int = 256 << 20,
    name: str = "lazy",
) -> ClientData:
    """Clients whose samples are fetched when they are asked, so that a million of them cost nothing to have.

    ``fetch(i)`` returns ``(x, y)`` of client ``i``, always the same: its ``n_train`` training samples, then
    its ``n_test`` test samples, then its ``n_validation``. The numbers are given beforehand, one for all or
    one for each. ``classes`` is None for regression. What was fetched is remembered up to ``cache_bytes``,
    the least recently used clients are forgotten first. ``pooled`` is the pooled test set; left out, it is
    the test samples of up to 100 clients, evenly spaced.

    >>> def fetch(client):
    ...     generator = np.random.default_rng(client)
    ...     return generator.normal(size=(15, 4)), generator.integers(0, 3, 15)
    >>> data = lazy_clients(1_000_000, fetch, n_train=10, n_test=5, classes=3)
    >>> data.clients, data.names[7], tuple(data.train.of(999_999)[0].shape)
    (1000000, '7', (10, 4))
    """
    if count < 1:
        raise DataError(f"{name}: no clients; give at least one")
    counts = {
        split: _counts_of(f"{name}: n_{split}", given, count)
        for split, given in zip(SPLITS, (n_train, n_test, n_validation), strict=True)
    }
    total = np.add(np.add(counts["train"], counts["test"]), counts["validation"])
    starts = {
        "train": np.broadcast_to(np.int64(0), count),
        "test": counts["train"],
        "validation": counts["train"] + counts["test"],
    }
    if not counts["train"].any():
        raise DataError(f"{name}: n_train: no client has a training sample")
    source = _LazySource(name, fetch, total, classes, cache_bytes)
    first = int(np.argmax(counts["train"] > 0))

    def split_of(split: str) -> LazySplit:
        shown = LazySplit(*source(first), starts[split], counts[split], source)
        x, y = shown.of(first)
        return dataclasses.replace(shown, x=x, y=y)

    splits = {split: split_of(split) for split in SPLITS if split != "validation" or counts[split].any()}
    if pooled is None:
        spaced = np.unique(np.linspace(0, count - 1, POOLED_CLIENTS).astype(np.int64))
        parts = [splits["test"].of(int(client)) for client in spaced]
        pooled_x, pooled_y = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        pooled_x = tensor_x(pooled[0], f"{name}: pooled")
        pooled_y = tensor_y(pooled[1], f"{name}: pooled", classes is None)
    if not len(pooled_y):
        raise DataError(f"{name}: no test samples; raise n_test or give pooled=(x, y)")
    digest = hashlib.sha256(repr((name, count, classes)).encode())
    for part in (*counts.values(), pooled_y.numpy(), pooled_x.numpy()):
        digest.update(np.ascontiguousarray(part).tobytes())
    return ClientData(
        names=_Numbers(count),
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        pooled_x=pooled_x,
        pooled_y=pooled_y,
        classes=classes,
        hash=digest.hexdigest(),
        name=name,
    )


class _Numbers(Sequence[str]):
    """The names "0", "1", …, written when they are read."""

    def __init__(self, count: int) -> None:
        self._numbers = range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...

    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return tuple(map(str, self._numbers[place]))
        return str(self._numbers[place])


class _LazySource:
    """Fetches a client's samples, checks them and remembers those used last."""

    def __init__(
        self,
        name: str,
        fetch: Callable[[int], Samples],
        total: np.ndarray,
        classes: int | None,
        cache_bytes: int,
    ) -> None:
        self._name, self._fetch, self._total = name, fetch, total
        self._classes, self._limit = classes, cache_bytes
        self._shape: torch.Size | None = None
        self._known: OrderedDict[int, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            if client in self._known:
                self._known.move_to_end(client)
                return self._known[client]
        samples = self._checked(client)
        with self._lock:
            if client not in self._known:
                self._known[client] = samples
                self._bytes += _nbytes(samples)
            while self._bytes > self._limit:
                self._bytes -= _nbytes(self._known.popitem(last=False)[1])
        return samples

    def _checked(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        where = f"{self._name}: client {client}"
        given = self._fetch(client)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise DataError(f"{where}: fetch must return (x, y), got {type(given).__name__}")
        x, y = tensor_x(given[0], where), tensor_y(given[1], where, self._classes is None)
        total = int(self._total[client])
        if not len(x) == len(y) == total:
            raise DataError(
                f"{where}: fetch returned {len(x)} samples and {len(y)} labels, but "
                f"n_train, n_test and n_validation add up to {total}"
            )
        if self._classes is not None and len(y) and int(y.max()) >= self._classes:
            raise DataError(f"{where}: label {int(y.max())}, but there are {self._classes} classes")
        if self._shape is None:
            self._shape = x.shape[1:]
        elif x.shape[1:] != self._shape:
            found, others = tuple(x.shape[1:]), tuple(self._shape)
            raise DataError(f"{where}: samples of shape {found}, but those of other clients have {others}")
        return x, y


def _nbytes(samples: tuple[torch.Tensor, torch.Tensor]) -> int:
    return sum(part.nbytes for part in samples)


def _counts_of(where: str, given: int | Sequence[int] | np.ndarray, clients: int) -> np.ndarray:
    """Numbers of samples of all clients; one number for all takes no memory."""
    counts = np.asarray(given)
    if counts.dtype.kind not in "iu" or counts.shape not in ((), (clients,)) or (counts < 0).any():
        raise DataError(
            f"{where}: give a whole number from 0, or one for each of {clients} clients, "
            f"got {given if counts.ndim == 0 else f'an array of {counts.dtype} {counts.shape}'}"
        )
    return np.broadcast_to(counts.astype(np.int64), clients)


def gather(
    names: Sequence[str],
    parts: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]],
    *,
    regression: bool,
    labels: tuple[str, ...] | None,
    name: str,
) -> ClientData:
    """Client data from checked tensors, a pair per client and split; the pooled test set is theirs."""
    splits = {split: _concatenate(parts[split]) for split in SPLITS if parts[split]}
    if not len(splits["test"].y):
        raise DataError(f"{name}: no client has a test sample; give each client at least two samples")
    classes = None if labels is None else len(labels)
    if labels is None and not regression:
        classes = int(max(int(split.y.max()) for split in splits.values() if len(split.y))) + 1
    return ClientData(
        names=tuple(names),
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        pooled_x=splits["test"].x,
        pooled_y=splits["test"].y,
        classes=classes,
        hash=_content_hash(names, splits, labels),
        name=name,
        labels=labels,
    )


def relabel(data: ClientData, labels: Sequence[str] | None, where: str | None = None) -> ClientData:
    """The same data with its classes numbered as in ``labels``; None stands for labels that are numbers.

    A label that is not among them is refused; ``where`` is the place that the message names.

    >>> x = np.eye(4)
    >>> data = from_clients({"a": (x, ["b", "c", "b", "c"])})
    >>> relabel(data, ["a", "b", "c"]).classes, sorted(relabel(data, ["c", "a", "b"]).train.y.tolist())
    (3, [0, 0, 2])
    """
    labels = None if labels is None else tuple(labels)
    where = data.name if where is None else where
    if data.labels == labels:
        return data
    if data.labels is None or labels is None:
        raise DataError(f"{where}: {other_kind(data.labels, labels)}; give it such labels")
    splits = {name: getattr(data, name) for name in SPLITS if getattr(data, name) is not None}
    place = {label: number for number, label in enumerate(labels)}
    for number, label in enumerate(data.labels):
        client = None if label in place else _client_with(number, splits)
        if client is not None:
            raise DataError(
                f"{where}: client {data.names[client]!r} has the label {shown(label)}, which is not among "
                f"the classes {listed(labels)}; correct it, leave its samples out, or start a run with it "
                "in data.labels"
            )
    table = torch.tensor([place.get(label, 0) for label in data.labels], device=data.train.y.device)
    mapped = {name: dataclasses.replace(split, y=table[split.y]) for name, split in splits.items()}
    pooled = mapped["test"].y if data.pooled_y is data.test.y else table[data.pooled_y]
    return dataclasses.replace(data, pooled_y=pooled, classes=len(labels), labels=labels, **mapped)


def _client_with(number: int, splits: Mapping[str, Split]) -> int | None:
    """The first client with a sample of this class."""
    for split in splits.values():
        for client in range(len(split.count)):
            if bool((split.of(client)[1] == number).any()):
                return client
    return None


def prepare(
    data: ClientData,
    *,
    normalise: bool = False,
    features: Callable[[torch.Tensor], torch.Tensor] | None = None,
    like: ClientData | Moments | None = None,
) -> ClientData:
    """The same clients with features in place of their samples, and with normalised samples.

    ``features`` comes first (see :mod:`sartor.data.features`). With ``normalise`` each channel, or each
    column of flat samples, gets mean 0 and standard deviation 1 over the clients' *training* samples; a
    constant one is only centred. Nothing is learned from validation or test samples. ``like`` gives the
    training samples (with features, not normalised), or their moments, that decide in place of the clients'
    own.

    >>> data = from_clients({"a": (np.array([[1.0], [3.0], [9.0]]), [0, 0, 1])})
    >>> sorted(prepare(data, normalise=True).train.x.flatten().tolist())
    [-1.0, 1.0]
    """
    if isinstance(data.train, LazySplit) and normalise:
        raise DataError(f"{data.name}: lazy clients cannot be normalised here; do it in their fetch function")
    if features is not None:
        data = _map_x(data, features)
    if not normalise:
        return data
    moments = like if isinstance(like, Moments) else Moments.of((like or data).train.x)
    return _map_x(data, moments.normalise)


def check_fraction(name: str, fraction: float) -> None:
    """A share of the samples to set aside lies in [0, 1)."""
    if not 0 <= fraction < 1:
        raise DataError(f"{name}: must be at least 0 and below 1, got {fraction!r}")


def _map_x(data: ClientData, function: Callable[[torch.Tensor], torch.Tensor]) -> ClientData:
    """The same data with every sample mapped; a pooled test set that is the clients' stays theirs."""
    splits = {name: getattr(data, name) for name in SPLITS if getattr(data, name) is not None}
    mapped = {name: split.map(function) for name, split in splits.items()}
    pooled = mapped["test"].x if data.pooled_x is data.test.x else function(data.pooled_x)
    return dataclasses.replace(data, pooled_x=pooled, **mapped)


@dataclass(frozen=True)
class Moments:
    """How samples lie in each channel, or in each column of flat ones: in double precision, one number each.

    Those of parts add up to those of the whole, so nobody needs to see all samples.
    """

    number: int
    mean: torch.Tensor
    squares: torch.Tensor
    """Squared distances from the mean, added up."""

    @classmethod
    def of(cls, x: torch.Tensor) -> Moments:
        """The moments of some samples."""
        flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
        number = flat.shape[0] * flat.shape[2]
        chunks = torch.split(flat, 4096)
        nothing = torch.zeros(flat.shape[1], dtype=torch.float64)
        mean = sum((chunk.double().sum(dim=(0, 2)) for chunk in chunks), nothing) / max(number, 1)
        centred = ((chunk.double() - mean[:, None]).square().sum(dim=(0, 2)) for chunk in chunks)
        return cls(number, mean, sum(centred, nothing))

    def __add__(self, other: Moments) -> Moments:
        number = self.number + other.number
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.number / max(number, 1))
        between = apart.square() * (self.number * other.number / max(number, 1))
        return Moments(number, mean, self.squares + other.squares + between)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """Samples shifted and scaled to mean 0 and deviation 1."""
        deviation = (self.squares / self.number).sqrt()
        # A constant channel has a deviation of rounding size at most; dividing by it would blow up noise.
        deviation = torch.where(deviation > 1e-7 * (1 + self.mean.abs()), deviation, 1.0)
        shape = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.float().view(shape)).div_(deviation.float().view(shape))


def _splits_of(
    client: str, given: Samples | Mapping[str, Samples], regression: bool, labels: tuple[str, ...] | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The given splits of one client as checked tensors."""
    if not isinstance(given, Mapping):
        given = {"train": given}
    unknown = set(given) - set(SPLITS)
    if unknown or "train" not in given:
        raise DataError(
            f"client {client}: expected the splits train, test, validation, got {', '.join(map(str, given))}"
        )
    own = {}
    for split, samples in given.items():
        where = f"client {client}, {split}"
        if not isinstance(samples, (tuple, list)) or len(samples) != 2:
            raise DataError(f"{where}: expected (x, y)")
        x, y = tensor_x(samples[0], where), tensor_y(samples[1], where, regression, labels)
        if len(x) != len(y):
            raise DataError(f"{where}: {len(x)} samples in x but {len(y)} labels in y")
        if len(x) == 0:
            raise DataError(f"{where}: no samples; leave the client out or give it data")
        own[split] = (x, y)
    return own


def _text_labels(clients: Mapping[str, Samples | Mapping[str, Samples]]) -> tuple[str, ...] | None:
    """All labels that are texts, in alphabetical order; None where there are none."""
    found: set[str] = set()
    for client, given in clients.items():
        new: set[str] = set()
        for samples in given.values() if isinstance(given, Mapping) else (given,):
            # What is no pair of arrays is reported where the samples are read.
            texts = texts_of(samples[1]) if isinstance(samples, (tuple, list)) and len(samples) == 2 else None
            if texts is not None:
                new.update(np.unique(texts).tolist())
        try:
            check_labels(sorted(new - found))
        except DataError as error:
            raise DataError(f"client {client}: {error}") from None
        found |= new
    check_labels(sorted(found))
    return tuple(sorted(found)) or None


def tensor_x(values: Any, where: str) -> torch.Tensor:
    """Features as a finite float32 tensor with samples along the first axis, in memory of its own."""
    array = _array(values, where, "x")
    if array.ndim < 2:
        raise DataError(f"{where}: x must be [samples, features...], got shape {array.shape}")
    with np.errstate(over="ignore"):  # a number beyond float32 becomes inf and is reported below
        x = torch.from_numpy(np.array(array, np.float32, order="C"))
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    if bad.any():
        raise DataError(
            f"{where}: x has a value that is not finite in float32, first in sample {int(bad.nonzero()[0])}"
        )
    return x


def tensor_y(
    values: Any, where: str, regression: bool, labels: tuple[str, ...] | None = None
) -> torch.Tensor:
    """Labels as an int64 tensor of whole numbers from 0, or targets as finite float32.

    ``labels``, in alphabetical order, are all those there are where labels are texts.
    """
    texts = None if labels is None else texts_of(values)
    if labels is not None and texts is None:
        raise DataError(
            f"{where}: labels are numbers, those of other clients the texts {listed(labels)}; "
            "give all clients labels of one kind"
        )
    array = _array(values, where, "y") if texts is None else texts
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{where}: y must have one number per sample, got shape {array.shape}")
    if regression:
        with np.errstate(over="ignore"):
            targets = np.array(array, np.float32)
        if not np.isfinite(targets).all():
            row = int(np.argmin(np.isfinite(targets)))
            raise DataError(f"{where}: y has a value that is not finite, first in sample {row}")
        return torch.from_numpy(targets)
    if labels is not None:
        return torch.from_numpy(np.searchsorted(np.array(labels), array).astype(np.int64))
    with np.errstate(invalid="ignore"):  # nan is reported as not whole
        whole = array == np.trunc(array)
    wrong = ~(whole & (array >= 0) & (array < MOST_CLASSES))
    if wrong.any():
        row = int(np.argmax(wrong))
        beyond = whole[row] and array[row] > 0
        cure = f"there are at most {MOST_CLASSES} classes" if beyond else "use regression=True for targets"
        raise DataError(f"{where}: labels are whole numbers from 0, got {array[row]} in sample {row}; {cure}")
    return torch.from_numpy(array.astype(np.int64))


def _array(values: Any, where: str, what: str) -> np.ndarray:
    """A numeric array of whatever was given."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{where}: {what} is ragged; every sample must have the same shape") from None
    if array.dtype == bool:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iuf":
        raise DataError(f"{where}: {what} must hold numbers, got {array.dtype}")
    return array


def _check_shapes(
    names: Sequence[str], parts: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]]
) -> None:
    """All samples of all clients have one shape."""
    expected = parts["train"][0][0].shape[1:]
    for split, samples in parts.items():
        for client, (x, _) in zip(names, samples, strict=False):
            if x.shape[1:] != expected:
                raise DataError(
                    f"client {client}, {split}: samples of shape {tuple(x.shape[1:])}, "
                    f"but client {names[0]} has {tuple(expected)}"
                )


def _concatenate(samples: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Split:
    """One split from its clients' samples."""
    count = np.array([len(y) for _, y in samples], np.int64)
    x, y = torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])
    return Split(x, y, np.cumsum(count) - count, count)


def _content_hash(names: Sequence[str], splits: Mapping[str, Split], labels: tuple[str, ...] | None) -> str:
    """The sha256 of every name, sample and label."""
    digest = hashlib.sha256(repr((tuple(names), list(splits))).encode())
    if labels is not None:
        digest.update(repr(labels).encode())
    for split in splits.values():
        for part in _bytes_of(split):
            digest.update(part)
    return digest.hexdigest()


def _bytes_of(split: Split) -> Iterator[bytes]:
    """A split as bytes: shape, sizes, labels and samples."""
    yield repr((tuple(split.x.shape), split.y.dtype)).encode()
    yield split.count.astype("<i8").tobytes()
    yield split.y.numpy().tobytes()
    yield split.x.numpy().tobytes()
