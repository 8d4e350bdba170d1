"""What a federation trains on: the samples of all clients, laid out client by client.

:class:`ClientData` is the one container every source, partition and kind of own data ends in. Inputs and
targets are nests of tensors (:mod:`sartor.nests`) of any type, and all samples of a split lie one after the
other in each of them, so that a client is a slice and a cohort a gather. :func:`from_clients` builds
it from data that is split by client already; see :mod:`sartor.data.partitions` for data that is not.
:func:`lazy_clients` is for more clients than fit into memory: their samples are fetched when they are asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch

from sartor import nests
from sartor.data.apportion import cut
from sartor.data.labels import check_labels, listed, other_kind, texts_of
from sartor.data.moments import Moments, moments_of
from sartor.data.preprocessing import NumberColumns, Preprocessing
from sartor.data.samples import TARGETS, array_of, inputs_of, is_class, number_of_classes, targets_of
from sartor.data.streams import stream
from sartor.errors import DataError
from sartor.nests import Nest
from sartor.settings import shown

if TYPE_CHECKING:
    from sartor.data.schema import Column
    from sartor.data.tables import Table

log = logging.getLogger(__name__)

SPLITS = ("train", "test", "validation")
PIECE = 1 << 20
"""Clients whose numbers of samples are hashed at a time."""
POOLED_CLIENTS = 100
"""Lazy clients whose test samples are the pooled test set where none is given."""
Samples: TypeAlias = "tuple[Any, Any] | tuple[Any, Any, Any]"
"""The samples of one client as ``(x, y)``: arrays, tensors, or tuples and dicts of such; perhaps with their
weights, ``(x, y, weight)``."""
Pair: TypeAlias = "tuple[Nest, Nest]"
"""Those that were read: inputs and targets as nests of tensors."""
Change: TypeAlias = "Callable[[Nest], Nest]"


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of all clients, one after the other: client ``i`` has ``count[i]`` from ``start[i]`` on."""

    x: Nest
    y: Nest
    start: np.ndarray
    count: np.ndarray
    weight: torch.Tensor | None = None
    """How much each sample counts in training, 1 on average over each client's; None: all the same."""

    def of(self, client: int) -> Pair:
        """The samples of one client, as views."""
        rows = slice(int(self.start[client]), int(self.start[client] + self.count[client]))
        return nests.rows(self.x, rows), nests.rows(self.y, rows)

    def to(self, device: torch.device | str) -> Split:
        """The same samples on a device."""
        x, y = nests.mapped(lambda leaf: leaf.to(device), (self.x, self.y))
        weight = None if self.weight is None else self.weight.to(device)
        return dataclasses.replace(self, x=x, y=y, weight=weight)

    def map(self, function: Change, targets: Change | None = None) -> Split:
        """The same samples with a function applied to ``x``, and perhaps another to ``y``."""
        return dataclasses.replace(self, x=function(self.x), y=self.y if targets is None else targets(self.y))

    @property
    def whole(self) -> bool:
        """Whether every sample is one client's."""
        order = np.lexsort((self.count, self.start))  # who has none before who begins at the same place
        ends = np.cumsum(self.count[order])
        there = self.start[order] == ends - self.count[order]
        none = self.count[order] == 0
        return bool((there | none).all()) and int(ends[-1]) == nests.length(self.y)

    def owner(self, row: int) -> tuple[int, int]:
        """The client that has the sample in a row, and the sample's number there."""
        client = int(np.flatnonzero((self.start <= row) & (row < self.start + self.count))[0])
        return client, row - int(self.start[client])

    def some(self, clients: np.ndarray) -> Split:
        """Those of some clients, in this order."""
        return dataclasses.replace(self, start=_of(self.start, clients), count=_of(self.count, clients))

    def packed(self) -> Split:
        """The same without the samples that are nobody's; one is left where nobody has any, to show."""
        parts = [np.arange(first, first + n) for first, n in zip(self.start, self.count, strict=True)]
        places = np.concatenate(parts) if self.count.any() else np.arange(min(1, nests.length(self.y)))
        rows = torch.from_numpy(places)
        x, y = nests.rows((self.x, self.y), rows)
        weight = None if self.weight is None else self.weight[rows]
        return dataclasses.replace(self, x=x, y=y, start=np.cumsum(self.count) - self.count, weight=weight)


@dataclass(frozen=True, eq=False)
class LazySplit(Split):
    """Samples that are fetched when a client is asked; ``x`` and ``y`` are those of one client, to show.

    Samples of client ``i`` are ``count[i]`` from ``start[i]`` on of what is fetched for it.
    """

    fetch: Callable[[int], Pair] = field(kw_only=True)

    def of(self, client: int) -> Pair:
        """The samples of one client, fetched or remembered."""
        x, y = self.fetch(client)
        rows = slice(int(self.start[client]), int(self.start[client] + self.count[client]))
        return nests.rows(x, rows), nests.rows(y, rows)

    def map(self, function: Change, targets: Change | None = None) -> Split:
        """The same samples with functions applied to ``x`` and ``y`` whenever they are fetched."""

        def fetch(client: int) -> Pair:
            x, y = self.fetch(client)
            return function(x), y if targets is None else targets(y)

        y = self.y if targets is None else targets(self.y)
        return dataclasses.replace(self, x=function(self.x), y=y, fetch=fetch)

    def owner(self, row: int) -> tuple[int, int]:
        """The client whose samples are there to show."""
        return int(np.argmax(self.count > 0)), row

    def some(self, clients: np.ndarray) -> Split:
        """Those of some clients, in this order."""
        return dataclasses.replace(
            self,
            start=_of(self.start, clients),
            count=_of(self.count, clients),
            fetch=lambda client: self.fetch(int(clients[client])),
        )

    def packed(self) -> Split:
        """These hold nobody's samples."""
        return self


@dataclass(frozen=True, eq=False)
class ClientData:
    """Everything a run needs to know of its data: each client's splits and the pooled test set.

    ``pooled_x, pooled_y`` are the official test set where there is one, otherwise all clients' test samples
    together. ``classes`` is how many classes (or labels, of which a sample may have several) the targets
    have, None where they are something else. ``hash`` identifies the partition, for own data the contents.
    ``labels`` are the names of the classes, in the order of their numbers, where labels are texts.
    """

    names: Sequence[str]
    train: Split
    test: Split
    validation: Split | None
    pooled_x: Nest
    pooled_y: Nest
    classes: int | None
    hash: str
    name: str
    labels: tuple[str, ...] | None = None
    public_x: torch.Tensor | None = None
    """Samples without labels that server and clients know, where there are any."""
    columns: tuple[Column, ...] | None = None
    """The schema of the table that the samples are rows of, where there is one."""
    table: Table | None = None
    """What the table holds, until the samples are prepared: they are the numbers of its rows."""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    """What was done with the raw rows, so that it can be done with new ones."""
    places: np.ndarray | None = None
    """Where each of the clients' test samples lies in a pooled test set of its own, where that is known."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """What the samples take that lie here; the pooled test set may be the clients' own."""
        splits = [split for name in SPLITS if (split := getattr(self, name)) is not None]
        leaves = nests.leaves([(self.pooled_x, self.pooled_y), *((split.x, split.y) for split in splits)])
        return sum({leaf.data_ptr(): int(leaf.nbytes) for leaf in leaves}.values())

    @property
    def features(self) -> tuple[str, ...] | None:
        """The names of the columns of a plain table, in their order."""
        reader = self.preprocessing.table
        return reader.columns if isinstance(reader, NumberColumns) else None

    @property
    def rest(self) -> np.ndarray | None:
        """Which of the pooled test samples are no client's, where every client's are among them.

        None where that is not certain, or where two clients have the same one.
        """
        test, pooled = self.test, (self.pooled_x, self.pooled_y)
        if isinstance(test, LazySplit) or not test.whole:
            return None
        if self.pooled_x is test.x and self.pooled_y is test.y:
            return np.empty(0, dtype=np.int64)
        places, number = self.places, nests.length(self.pooled_y)
        if places is None or len(places) != nests.length(test.y) or len(np.unique(places)) < len(places):
            return None
        if not nests.same(nests.rows(pooled, torch.from_numpy(places)), (test.x, test.y)):
            return None
        return np.setdiff1d(np.arange(number), places)

    def to(self, device: torch.device | str) -> ClientData:
        """The same data on a device."""
        x, y = nests.mapped(lambda leaf: leaf.to(device), (self.pooled_x, self.pooled_y))
        return dataclasses.replace(
            self,
            train=self.train.to(device),
            test=self.test.to(device),
            validation=None if self.validation is None else self.validation.to(device),
            pooled_x=x,
            pooled_y=y,
            public_x=None if self.public_x is None else self.public_x.to(device),
        )

    def some(self, clients: np.ndarray) -> ClientData:
        """Some of the clients, in this order."""
        return dataclasses.replace(
            self,
            names=names.some(clients)
            if isinstance(names := self.names, _Numbers)
            else tuple(names[number] for number in clients.tolist()),
            train=self.train.some(clients),
            test=self.test.some(clients),
            validation=None if self.validation is None else self.validation.some(clients),
        )

    def packed(self) -> ClientData:
        """The same without the samples that are no client's, as :meth:`some` leaves them; the pooled stay."""
        splits = {name: getattr(self, name) for name in SPLITS if getattr(self, name) is not None}
        return dataclasses.replace(self, **{name: split.packed() for name, split in splits.items()})

    def map(self, function: Change, targets: Change | None = None) -> ClientData:
        """The same data with every sample mapped; a pooled test set that is the clients' stays theirs."""
        splits = {name: getattr(self, name) for name in SPLITS if getattr(self, name) is not None}
        mapped = {name: split.map(function, targets) for name, split in splits.items()}
        x = mapped["test"].x if self.pooled_x is self.test.x else function(self.pooled_x)
        y = self.pooled_y if targets is None else targets(self.pooled_y)
        y = mapped["test"].y if self.pooled_y is self.test.y else y
        return dataclasses.replace(self, pooled_x=x, pooled_y=y, **mapped)

    def preprocessed(self, function: Change, **step: Any) -> ClientData:
        """The same data with every input mapped, which is noted as a step of the preprocessing."""
        noted = dataclasses.replace(self.preprocessing, **step)
        return dataclasses.replace(self.map(function), preprocessing=noted)


def from_clients(
    clients: Mapping[str, Samples | Mapping[str, Samples]],
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    targets: str = "class",
    labels: Sequence[str] | None = None,
    name: str = "own",
) -> ClientData:
    """Data that is split by client already.

    Each client gives ``(x, y)``, of which a test part and, if asked for, a validation part are drawn; or
    its own splits as ``{"train": (x, y), "test": (x, y), "validation": (x, y)}``, where a missing ``test``
    or ``validation`` is drawn from ``train``. A client with at least two samples has at least one to test
    on and one to train on. ``x`` is an array, or arrays in tuples and dicts; types are kept. ``targets`` says
    what ``y`` is (:mod:`sartor.data.samples`): by default one class per sample, a whole number from 0 or a
    text. Texts are numbered in alphabetical order, or as in ``labels``, outside which there is none then.
    ``(x, y, weight)`` says how much each sample counts in training, compared to others of its client.

    >>> x, y = np.eye(10), np.arange(10) % 2
    >>> data = from_clients({"north": (x, y), "south": (x[:5], y[:5])})
    >>> data.names, data.train.count.tolist(), data.test.count.tolist()
    (('north', 'south'), [8, 4], [2, 1])
    >>> data = from_clients({"north": (x, ["ill"] * 10), "south": (x, ["well", "ill"] * 5)})
    >>> data.labels, data.classes, data.test.of(0)[1].tolist()
    (('ill', 'well'), 2, [0, 0])
    >>> words = {"tokens": np.array([[5, 1], [2, 0]]), "length": np.array([2, 1])}
    >>> data = from_clients({"north": (words, np.array([0.5, 1.5]))}, targets="number")
    >>> data.train.x["tokens"].dtype, data.train.x["tokens"].shape, data.classes
    (torch.int64, torch.Size([1, 2]), None)
    """
    if targets not in TARGETS:
        raise DataError(f"targets: one of {', '.join(TARGETS)}, got {shown(targets)}")
    if not clients:
        raise DataError(f"{name}: no clients; give at least one")
    check_fraction("test_fraction", test_fraction)
    check_fraction("validation_fraction", validation_fraction)
    parts: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    names = tuple(str(client) for client in clients)
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two clients have the same name")
    if len(names) > 1 and {client.lower() for client in names} <= {*SPLITS, "val"}:
        raise DataError(
            f"{name}: clients are called {' and '.join(names)}, as splits are; give the splits of each "
            "client, as in {'a': {'train': (x, y), 'test': (x, y)}}, or a Source, which a partition divides"
        )
    found = _text_labels(clients) if targets in ("class", "any") else None
    weights: list[tuple[torch.Tensor | None, int]] = []
    for client, given in zip(names, clients.values(), strict=True):
        own, weight = _splits_of(client, given, targets, found)
        for split, fraction in (("test", test_fraction), ("validation", validation_fraction)):
            if split not in own and (fraction > 0 or split == "test"):
                x, y = own["train"]
                rows = np.arange(nests.length(y))
                strata = y.numpy() if is_class(y) else np.zeros(len(rows), np.int64)
                kept, taken = cut(rows, strata, fraction, stream(seed, "cut", split, client))
                own["train"], own[split] = nests.rows((x, y), kept), nests.rows((x, y), taken)
                weight = None if weight is None else weight[kept]
        weights.append((_relative(weight, client), nests.length(own["train"][1])))
        for split, samples in own.items():
            parts[split].append(samples)
    _check_shapes(names, parts)
    if parts["validation"] and len(parts["validation"]) < len(names):
        raise DataError(
            f"{name}: {len(parts['validation'])} of {len(names)} clients have a validation split; "
            "give one to every client, or set validation_fraction to draw the missing ones"
        )
    data = gather(names, parts, targets=targets, labels=found, name=name, weight=joined_weights(weights))
    _question_labels(data)
    return data if labels is None else relabel(data, labels)


def _question_labels(data: ClientData) -> None:
    """Say so where clients fall apart into groups without a label in common, which may mean other things."""
    if data.clients < 2 or data.classes is None or not is_class(data.train.y):
        return
    held = [set(data.train.of(client)[1].tolist()) for client in range(data.clients)]
    mine = set(held[0])
    for _ in held:  # all labels that lead from client to client to those of the first
        mine = mine.union(*(own for own in held if own & mine))
    other = next((client for client, own in enumerate(held) if not own & mine), None)
    if other is None or max(map(len, held)) < 2:
        return
    words = [
        listed([data.labels[label] if data.labels else str(label) for label in sorted(held[client])])
        for client in (0, other)
    ]
    log.warning(
        "%s: %s has the labels %s, %s has %s, and no client leads from the ones to the others; do labels "
        "mean the same at all clients?",
        data.name,
        *(data.names[0], words[0], data.names[other], words[1]),
    )


def by_client(
    owners: np.ndarray,
    samples: Callable[[np.ndarray], Samples],
    split: np.ndarray | None = None,
    where: str = "split",
) -> dict[str, Samples | Mapping[str, Samples]]:
    """The samples of every client for :func:`from_clients`, by whose each row is; clients in ascending order.

    ``split`` says ``train``, ``test`` or ``validation`` of each row; ``where`` is what an error names.

    >>> by_client(np.array(["b", "a", "b"]), lambda rows: (rows, rows))["b"][0].tolist()
    [0, 2]
    """
    names, owner = np.unique(owners, return_inverse=True)
    rows = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    own = dict(zip(map(str, names), rows, strict=True))
    if split is None:
        return {name: samples(mine) for name, mine in own.items()}
    wrong = ~np.isin(split, SPLITS)
    if wrong.any():
        found = shown(str(split[np.argmax(wrong)]))
        raise DataError(f"{where} says {found}; expected train, test or validation")
    return {
        name: {part: samples(here) for part in SPLITS if len(here := mine[split[mine] == part])}
        for name, mine in own.items()
    }


def lazy_clients(
    count: int,
    fetch: Callable[[int], Samples],
    *,
    n_train: int | Sequence[int] | np.ndarray,
    n_test: int | Sequence[int] | np.ndarray,
    n_validation: int | Sequence[int] | np.ndarray = 0,
    classes: int | None,
    targets: str | None = None,
    pooled: Samples | None = None,
    cache_bytes: int = 256 << 20,
    name: str = "lazy",
) -> ClientData:
    """Clients whose samples are fetched when they are asked, so that a million of them cost nothing to have.

    ``fetch(i)`` returns ``(x, y)`` of client ``i``, always the same: its ``n_train`` training samples, then
    its ``n_test`` test samples, then its ``n_validation``. The numbers are given beforehand, one for all or
    one for each. ``targets`` says what ``y`` is, as in :func:`from_clients`; left out, one class per sample,
    or numbers where ``classes`` is None. What was fetched is remembered up to ``cache_bytes``, the least
    recently used clients are forgotten first. ``pooled`` is the pooled test set; left out, it is the test
    samples of up to 100 clients, evenly spaced.

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
    starts = {
        "train": np.broadcast_to(np.int64(0), count),
        "test": counts["train"],
        "validation": _sum(counts["train"], counts["test"]),
    }
    total = _sum(starts["validation"], counts["validation"])
    if not counts["train"].any():
        raise DataError(f"{name}: n_train: no client has a training sample")
    targets = targets or ("number" if classes is None else "class")
    source = _LazySource(name, fetch, total, targets, classes, cache_bytes)
    first = int(np.argmax(counts["train"] > 0))

    def split_of(split: str) -> LazySplit:
        shown = LazySplit(*source(first), starts[split], counts[split], fetch=source)
        x, y = shown.of(first)
        return dataclasses.replace(shown, x=x, y=y)

    splits = {split: split_of(split) for split in SPLITS if split != "validation" or counts[split].any()}
    if pooled is None:
        spaced = np.unique(np.linspace(0, count - 1, POOLED_CLIENTS).astype(np.int64))
        # Copied, so that a client's other samples are gone when the next ones are fetched.
        parts = [nests.mapped(torch.clone, splits["test"].of(int(client))) for client in spaced]
        pooled_x, pooled_y = nests.joined(parts)
    else:
        pooled_x = inputs_of(pooled[0], f"{name}: pooled")
        pooled_y = targets_of(pooled[1], f"{name}: pooled", targets)
    if not nests.length(pooled_y):
        raise DataError(f"{name}: no test samples; raise n_test or give pooled=(x, y)")
    digest = hashlib.sha256(repr((name, count, classes)).encode())
    for part in counts.values():
        for first in range(0, count, PIECE):
            digest.update(np.ascontiguousarray(part[first : first + PIECE]).tobytes())
    for content in (*_leaf_bytes(pooled_y, "y"), *_leaf_bytes(pooled_x, "x")):
        digest.update(content)
    return ClientData(
        names=_Numbers(range(count)),
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
    """The names "0", "1", …, or those of some clients among them, written when they are read."""

    def __init__(self, numbers: range | np.ndarray) -> None:
        self._numbers = numbers

    def some(self, clients: np.ndarray) -> _Numbers:
        """Those of some clients, in this order."""
        numbers = self._numbers
        return _Numbers(clients if isinstance(numbers, range) else numbers[clients])

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
        targets: str,
        classes: int | None,
        cache_bytes: int,
    ) -> None:
        self._name, self._fetch, self._total = name, fetch, total
        self._targets, self._classes, self._limit = targets, classes, cache_bytes
        self._like: Pair | None = None
        """Samples that were fetched first, whose form all others have."""
        self._known: OrderedDict[int, Pair] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, client: int) -> Pair:
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

    def _checked(self, client: int) -> Pair:
        where = f"{self._name}: client {client}"
        given = self._fetch(client)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise DataError(f"{where}: fetch must return (x, y), got {type(given).__name__}")
        x, y = inputs_of(given[0], where), targets_of(given[1], where, self._targets)
        total, found = int(self._total[client]), (nests.length(x), nests.length(y))
        if set(found) != {total}:
            raise DataError(
                f"{where}: fetch returned {found[0]} samples and {found[1]} labels, but "
                f"n_train, n_test and n_validation add up to {total}"
            )
        classes = number_of_classes(y, self._targets) if total else None
        if classes is not None and self._classes is not None and classes > self._classes:
            raise DataError(f"{where}: label {classes - 1}, but there are {self._classes} classes")
        if self._like is None:
            self._like = nests.rows((x, y), slice(0, 0))
        check_alike((x, y), self._like, where, "those of other clients have")
        try:
            x, y = nests.mapped(_in_type, (x, y), self._like)
        except TypeError as error:
            raise DataError(f"{where}: {error}") from None
        return x, y


def _in_type(leaf: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A leaf in another's type, if that can hold it."""
    if torch.promote_types(leaf.dtype, like.dtype) != like.dtype:
        raise TypeError(f"numbers of {leaf.dtype}, where the clients fetched first have {like.dtype}")
    return leaf.to(like.dtype)


def _nbytes(samples: Pair) -> int:
    return sum(leaf.nbytes for leaf in nests.leaves(samples))


def _counts_of(where: str, given: int | Sequence[int] | np.ndarray, clients: int) -> np.ndarray:
    """Numbers of samples of all clients; one number for all takes no memory."""
    counts = np.asarray(given)
    if counts.dtype.kind not in "iu" or counts.shape not in ((), (clients,)) or (counts < 0).any():
        raise DataError(
            f"{where}: give a whole number from 0, or one for each of {clients} clients, "
            f"got {given if counts.ndim == 0 else f'an array of {counts.dtype} {counts.shape}'}"
        )
    return np.broadcast_to(counts.astype(np.int64), clients)


def _of(counts: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Those of some clients, which take no memory where they are one number for all."""
    return np.broadcast_to(counts[:1], clients.shape) if counts.strides == (0,) else counts[clients]


def _sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Their sum, which takes no memory where each is one number for all."""
    if first.strides == second.strides == (0,):
        return np.broadcast_to(first[:1] + second[:1], first.shape)
    total: np.ndarray = first + second
    return total


def gather(
    names: Sequence[str],
    parts: Mapping[str, Sequence[Pair]],
    *,
    targets: str,
    labels: tuple[str, ...] | None,
    name: str,
    weight: torch.Tensor | None = None,
) -> ClientData:
    """Client data from checked tensors, a pair per client and split; the pooled test set is theirs."""
    splits = _one_type({split: _concatenate(parts[split]) for split in SPLITS if parts[split]})
    splits["train"] = dataclasses.replace(splits["train"], weight=weight)
    classes = None if labels is None else len(labels)
    if labels is None:
        found = [number_of_classes(split.y, targets) for split in splits.values() if nests.length(split.y)]
        known = [number for number in found if number is not None]
        classes = max(known) if len(known) == len(found) else None
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
    features: Change | None = None,
    like: ClientData | Mapping[str, Moments] | None = None,
) -> ClientData:
    """The same clients with features in place of their samples, and with normalised samples.

    ``features`` comes first (see :mod:`sartor.data.features`). With ``normalise`` each channel, or each
    column of flat samples, of every leaf of floats gets mean 0 and standard deviation 1 over the clients'
    *training* samples; a constant one is only centred. Nothing is learned from validation or test samples.
    ``like`` gives the training samples (with features, not normalised), or their leaves' moments, that decide
    in place of the clients' own.

    >>> data = from_clients({"a": (np.array([[1.0], [3.0], [9.0]]), [0, 0, 1])})
    >>> sorted(prepare(data, normalise=True).train.x.flatten().tolist())
    [-1.0, 1.0]
    """
    if isinstance(data.train, LazySplit) and normalise:
        raise DataError(f"{data.name}: lazy clients cannot be normalised here; do it in their fetch function")
    if features is not None:
        data = data.preprocessed(features, features=features)
    if not normalise:
        return data
    moments = moments_of((like or data).train.x) if like is None or isinstance(like, ClientData) else like
    return data.preprocessed(Preprocessing(moments=moments).scaled, moments=moments)


def check_fraction(name: str, fraction: float) -> None:
    """A share of the samples to set aside lies in [0, 1)."""
    if not 0 <= fraction < 1:
        raise DataError(f"{name}: must be at least 0 and below 1, got {fraction!r}")


def _splits_of(
    client: str, given: Samples | Mapping[str, Samples], targets: str, labels: tuple[str, ...] | None
) -> tuple[dict[str, Pair], torch.Tensor | None]:
    """The given splits of one client as checked tensors, and the weights of its training samples."""
    if not isinstance(given, Mapping):
        given = {"train": given}
    unknown = set(given) - set(SPLITS)
    if unknown or "train" not in given:
        raise DataError(
            f"client {client}: expected the splits train, test, validation, got {', '.join(map(str, given))}"
        )
    own, weight = {}, None
    for split, samples in given.items():
        where = f"client {client}, {split}"
        if not isinstance(samples, (tuple, list)) or len(samples) not in (2, 3):
            raise DataError(f"{where}: expected (x, y), or (x, y, weight)")
        x, y = inputs_of(samples[0], where), targets_of(samples[1], where, targets, labels)
        in_x, in_y = nests.length(x), nests.length(y)
        if in_x != in_y:
            raise DataError(f"{where}: {in_x} samples in x but {in_y} labels in y")
        if in_x == 0:
            raise DataError(f"{where}: no samples; leave the client out or give it data")
        own[split] = (x, y)
        if len(samples) == 3:
            found = _weights_of(samples[2], in_x, where)
            weight = found if split == "train" else weight
    return own, weight


def _weights_of(values: Any, samples: int, where: str) -> torch.Tensor:
    """Weights of samples as numbers from 0."""
    weight = torch.from_numpy(array_of(values, where, "weight").astype(np.float64))
    if weight.shape != (samples,):
        raise DataError(
            f"{where}: weight has shape {tuple(weight.shape)}, expected one for {samples} samples"
        )
    wrong = ~(weight.isfinite() & (weight >= 0))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(f"{where}: the weight of sample {row} is {float(weight[row])}; it is 0 or more")
    return weight


def _relative(weight: torch.Tensor | None, client: str) -> torch.Tensor | None:
    """Weights that are 1 on average, exactly where all are the same; None where they are not given."""
    if weight is None or not len(weight):
        return weight
    if not weight.any():
        raise DataError(f"client {client}, train: all weights are 0; leave the client out")
    # By the largest one first, as a sum of the largest numbers there are would be none.
    weight = weight / weight.max()
    return torch.ones_like(weight) if weight.min() == 1 else weight / weight.mean()


def joined_weights(weights: Sequence[tuple[torch.Tensor | None, int]]) -> torch.Tensor | None:
    """The weights of several samples one after the other, 1 where they have none; None: all are the same."""
    if all(weight is None or bool((weight == 1).all()) for weight, _ in weights):
        return None
    return torch.cat(
        [torch.ones(samples, dtype=torch.float64) if own is None else own for own, samples in weights]
    )


def _text_labels(clients: Mapping[str, Samples | Mapping[str, Samples]]) -> tuple[str, ...] | None:
    """All labels that are texts, in alphabetical order; None where there are none."""
    found: set[str] = set()
    for client, given in clients.items():
        new: set[str] = set()
        for samples in given.values() if isinstance(given, Mapping) else (given,):
            # What is no pair of arrays is reported where the samples are read.
            texts = (
                texts_of(samples[1])
                if isinstance(samples, (tuple, list)) and len(samples) in (2, 3)
                else None
            )
            if texts is not None:
                new.update(np.unique(texts).tolist())
        try:
            check_labels(sorted(new - found))
        except DataError as error:
            raise DataError(f"client {client}: {error}") from None
        found |= new
    check_labels(sorted(found))
    return tuple(sorted(found)) or None


def _check_shapes(names: Sequence[str], parts: Mapping[str, Sequence[Pair]]) -> None:
    """All samples of all clients have one form."""
    for split, samples in parts.items():
        for client, pair in zip(names, samples, strict=False):
            check_alike(pair, parts["train"][0], f"client {client}, {split}", f"client {names[0]} has")


def check_alike(pair: Pair, like: Pair, where: str, others: str) -> None:
    """Inputs and targets have the leaves, shapes and types of others."""
    for name, nest, known in zip(("x", "y"), pair, like, strict=True):
        found, wanted = nests.paths(nest, name), nests.paths(known, name)
        if found.keys() != wanted.keys():
            raise DataError(f"{where}: {name} holds {', '.join(found)}, but {others} {', '.join(wanted)}")
        for path, leaf in found.items():
            if leaf.shape[1:] != wanted[path].shape[1:]:
                what = "samples" if path == "x" else f"{path} is"
                shapes = tuple(leaf.shape[1:]), tuple(wanted[path].shape[1:])
                raise DataError(f"{where}: {what} of shape {shapes[0]}, but {others} {shapes[1]}")


def _concatenate(samples: Sequence[Pair]) -> Split:
    """One split from its clients' samples."""
    count = np.array([nests.length(y) for _, y in samples], np.int64)
    x, y = nests.joined([x for x, _ in samples]), nests.joined([y for _, y in samples])
    return Split(x, y, np.cumsum(count) - count, count)


def _one_type(splits: dict[str, Split]) -> dict[str, Split]:
    """Every leaf in the one type that holds all its numbers, where clients or splits have several."""

    def widest(*leaves: torch.Tensor) -> torch.Tensor:
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
        return leaves[0][:0].to(dtype)

    x = nests.mapped(widest, *(split.x for split in splits.values()))
    y = nests.mapped(widest, *(split.y for split in splits.values()))
    return {
        name: split.map(
            lambda own: nests.mapped(_in_type, own, x), lambda own: nests.mapped(_in_type, own, y)
        )
        for name, split in splits.items()
    }


def _content_hash(names: Sequence[str], splits: Mapping[str, Split], labels: tuple[str, ...] | None) -> str:
    """The sha256 of every name, sample and label."""
    digest = hashlib.sha256(repr((tuple(names), list(splits))).encode())
    if labels is not None:
        digest.update(repr(labels).encode())
    for split in splits.values():
        for part in _bytes_of(split):
            digest.update(part)
    return digest.hexdigest()


def _bytes_of(split: Split) -> Iterator[bytes | memoryview]:
    """A split as bytes: forms, sizes, labels and samples."""
    yield repr((nests.form(split.x, "x"), nests.form(split.y, "y"))).encode()
    yield split.count.astype("<i8").tobytes()
    yield from _leaf_bytes(split.y, "y")
    yield from _leaf_bytes(split.x, "x")
    if split.weight is not None:
        yield from _leaf_bytes(split.weight, "weight")


def _leaf_bytes(nest: Nest, name: str) -> Iterator[memoryview]:
    """The contents of every leaf, in the order of their paths, where they lie."""
    for _, leaf in sorted(nests.paths(nest, name).items()):
        yield leaf.contiguous().flatten().view(torch.uint8).numpy().data
