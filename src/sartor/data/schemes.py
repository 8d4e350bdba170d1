"""Schemes that divide labelled samples among clients.

Each scheme is a frozen dataclass of its parameters with one method, ``split``, a pure function of the
labels, the number of clients and the seed. What they share: samples are drawn without replacement, rounding
is by the largest remainder, every class and every client has a random stream of its own, and no client is
left empty. Tries are bounded; where chance does not give what was asked for, samples are moved and a note
says so.

Two Dirichlet laws go by one name in the literature. ``by="class"`` divides each class among the clients, so
sizes are unequal; ``by="client"`` gives each client a law over the classes and a fixed size. The same alpha
means different things.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sartor.data.apportion import Counts, apportion, cut, round_to
from sartor.data.streams import stream
from sartor.errors import DataError, SettingError
from sartor.settings import build, setting, unknown

TRIES = 100
"""How often a Dirichlet draw is repeated before samples are moved to clients that have too few."""


@dataclass(frozen=True, eq=False)
class Labels:
    """What a scheme may look at: the labels of the training set and of the test set, which may be empty.

    A sample is named by its place in the two sets one after the other, so a test sample by ``len(train) +
    row``.
    """

    train: Counts
    test: Counts

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        return int(max(part.max(initial=-1) for part in (self.train, self.test))) + 1

    def sizes(self) -> Counts:
        """Training samples per class."""
        return np.bincount(self.train, minlength=self.classes).astype(np.int64)

    def test_sizes(self) -> Counts:
        """Test samples per class."""
        return np.bincount(self.test, minlength=self.classes).astype(np.int64)

    def pools(self, seed: int, purpose: str) -> list[Counts]:
        """The training samples of each class, shuffled."""
        return _pools(self.train, 0, self.classes, seed, purpose)

    def test_pools(self, seed: int, purpose: str) -> list[Counts]:
        """The test samples of each class, shuffled."""
        return _pools(self.test, len(self.train), self.classes, seed, purpose + " test")


@dataclass(frozen=True, eq=False)
class Draw:
    """What a scheme hands back: samples per client; no ``test``: matched to the train labels."""

    train: list[Counts]
    test: list[Counts] | None = None
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None


class Scheme(Protocol):
    """A way to divide samples among clients."""

    name: ClassVar[str]

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """The samples of each client."""
        ...


@dataclass(frozen=True)
class Iid:
    """Every client a random, equally large part of everything."""

    name: ClassVar[str] = "iid"

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Shuffle and cut."""
        n = len(labels.train)
        _enough(n, clients, "samples")
        order = stream(seed, "iid").permutation(n)
        return Draw(_pieces(order, apportion(n, np.ones(clients))))


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into equal shards, give each client some at random (McMahan et al., 2017).

    A shard may straddle two labels, so a client sees usually ``shards_per_client`` classes and at most
    twice as many.
    """

    name: ClassVar[str] = "shards"
    shards_per_client: int = setting(2, "shards each client gets", low=1)

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Cut the sorted samples and deal the shards."""
        n, shards = len(labels.train), clients * self.shards_per_client
        _enough(n, shards, "samples", "shards")
        pieces = _pieces(np.concatenate(labels.pools(seed, "shards")), apportion(n, np.ones(shards)))
        hands = stream(seed, "shards", "deal").permutation(shards).reshape(clients, -1)
        return Draw([np.concatenate([pieces[shard] for shard in hand]) for hand in hands])


@dataclass(frozen=True)
class Classes:
    """Exactly ``k`` classes for each client, every class used equally often (within one).

    Which classes go together is random, so that no groups of like clients arise that nobody asked for.
    Without ``even`` a client's first class is the next in turn and its others are drawn, so that some classes
    are used more often (NIID-Bench, Li et al. 2022).
    """

    name: ClassVar[str] = "classes"
    k: int = setting(2, "classes each client holds", low=1)
    even: bool = setting(True, "whether classes are used equally often; else all but the first are drawn")
    train: int | None = setting(None, "training samples of each; all are divided if not given", low=1)
    test: int | None = setting(None, "test samples of each; matched to the train labels if not given", low=1)

    def __post_init__(self) -> None:
        if self.test is not None and self.train is None:
            raise SettingError("partition classes: test needs train too")

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Choose classes client by client, then divide each class evenly among its holders."""
        sizes = labels.sizes()
        present = np.flatnonzero(sizes)
        _at_most("k", self.k, len(present))
        random = stream(seed, "classes", "choose")
        holds = np.zeros((clients, labels.classes), bool)
        choose = self._evenly if self.even else self._drawn
        for client, chosen in enumerate(choose(len(present), clients, random)):
            holds[client, present[chosen]] = True
        unused = [int(label) for label in present if not holds[:, label].any()]
        notes = (f"{clients} clients of {self.k} classes leave classes {unused} unused",) if unused else ()
        if self.train is not None:
            draw = _draw_by_law(self.name, labels, holds / self.k, self.train, self.test, seed)
            if not np.array_equal(class_counts(labels.train, draw.train, labels.classes) > 0, holds):
                raise DataError(
                    f"partition classes: a class has too few samples to give each client {self.train} "
                    f"of exactly {self.k} classes; use a smaller train or fewer clients"
                )
            return dataclasses.replace(draw, notes=(*notes, *draw.notes))
        counts = np.zeros(holds.shape, np.int64)
        for label in present:
            holders = np.flatnonzero(holds[:, label])
            if len(holders) > sizes[label]:
                raise DataError(
                    f"partition classes: class {label} has {sizes[label]} samples for {len(holders)} "
                    "clients; use fewer clients or a smaller k"
                )
            if len(holders):
                counts[holders, label] = apportion(int(sizes[label]), np.ones(len(holders)))
        return Draw(_deal(labels.pools(seed, "classes"), counts), notes=notes)

    def _evenly(self, classes: int, clients: int, random: np.random.Generator) -> Iterator[Counts]:
        """The classes of one client after the other, each used equally often."""
        # Each class may be taken this often; who takes one more, where it does not come out even, is random.
        left = random.permutation(apportion(clients * self.k, np.ones(classes)))
        for _ in range(clients):
            # The k classes with most left, in random order among equals: what is left differs by one at most,
            # so every client finds k different classes.
            chosen = np.lexsort((random.random(classes), -left))[: self.k]
            left[chosen] -= 1
            yield chosen

    def _drawn(self, classes: int, clients: int, random: np.random.Generator) -> Iterator[Counts]:
        """The classes of one client after the other: the next in turn, and others at random."""
        for client in range(clients):
            others = np.delete(np.arange(classes), client % classes)
            yield np.append(random.permutation(others)[: self.k - 1], client % classes)


@dataclass(frozen=True)
class Blocks:
    """Blocks of neighbouring clients share ``k`` classes, each class in parts of random sizes (PFLlib).

    The classes are dealt in order, each to the first clients that hold fewer than ``k``, as many as make all
    classes last: of 20 clients with two of ten classes, 0 to 3 share the first two, 4 to 7 the next two. The
    last of them gets what the others leave, so its part is the largest.
    """

    name: ClassVar[str] = "blocks"
    k: int = setting(2, "classes each client holds", low=1)
    least: float = setting(
        0.1, "smallest part of a class, against an even one; 1: all are even", above=0, high=1
    )

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Deal the classes to blocks of clients and cut each at random."""
        sizes = labels.sizes()
        present = np.flatnonzero(sizes)
        _at_most("k", self.k, len(present))
        width = -(-clients * self.k // len(present))
        counts = np.zeros((clients, labels.classes), np.int64)
        held = np.zeros(clients, np.int64)
        for label in present:
            holders = np.flatnonzero(held < self.k)[:width]
            if len(holders):
                random = stream(seed, "blocks", int(label))
                counts[holders, label] = self._parts(int(sizes[label]), len(holders), int(label), random)
                held[holders] += 1
        notes = []
        unused = [int(label) for label in present if not counts[:, label].any()]
        if unused:
            notes.append(f"{clients} clients of {self.k} classes leave classes {unused} unused")
        if held.min() < self.k:
            notes.append(f"{(held < self.k).sum()} clients, the last, have fewer than {self.k} classes")
        return Draw(_deal(labels.pools(seed, "blocks"), counts), notes=tuple(notes))

    def _parts(self, total: int, holders: int, label: int, random: np.random.Generator) -> Counts:
        """A class in so many parts: from ``least`` of an even one to an even one, the last what is left."""
        even = total // holders
        if not even:
            raise DataError(
                f"partition blocks: class {label} has {total} samples for {holders} clients; use fewer "
                "clients or a smaller k"
            )
        parts = random.integers(max(1, math.ceil(self.least * even)), even + 1, holders)
        parts[-1] = total - parts[:-1].sum()
        return parts


@dataclass(frozen=True)
class Pfllib:
    """The samples that PFLlib's own scripts deal out, by their generator and seed: sample for sample.

    The laws are those of ``blocks`` and of ``dirichlet`` with ``balance``, the order of the draws PFLlib's.
    Training and test set are one, of which every client tests on a part. The run's seed changes nothing.
    """

    name: ClassVar[str] = "pfllib"
    whole: ClassVar[bool] = True
    """Whether it is for training and test set as one."""
    alpha: float = setting(0.0, "of Dirichlet's law; 0: blocks of k classes", symbol="α", low=0)
    k: int = setting(2, "classes each client of a block holds", low=1)
    even: bool = setting(False, "whether the parts of a block's class are equal")
    least: int = setting(40, "Dirichlet: fewest samples of a client, to train and test on", low=1)
    test_fraction: float = setting(0.25, "share of a client's samples to test on", above=0, high=0.9)
    draw: int = setting(1, "the seed of PFLlib's scripts", low=0, high=2**32 - 1)

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Deal out, then cut each client's samples."""
        random = np.random.RandomState(self.draw)
        least = int(min(self.least, len(labels.train) / clients / 2))
        deal = self._blocks if self.alpha == 0 else self._by_law
        train, test = [], []
        for own in deal(labels, clients, least, random):
            order = own[random.permutation(len(own))]
            tested = len(own) - int((1 - self.test_fraction) * len(own))
            test.append(order[:tested])
            train.append(order[tested:])
        return Draw(train, test)

    def _blocks(
        self, labels: Labels, clients: int, least: int, random: np.random.RandomState
    ) -> list[Counts]:
        classes = labels.classes
        _at_most("k", self.k, classes)
        parts: list[list[Counts]] = [[] for _ in range(clients)]
        for label in range(classes):
            holders = [own for own in parts if len(own) < self.k][: math.ceil(clients / classes * self.k)]
            if not holders:
                break
            pool = np.flatnonzero(labels.train == label)
            even = len(pool) / len(holders)
            low = 0 if self.even else int(max(even / 10, least / classes))
            if int(even) <= max(low, 1):
                raise DataError(
                    f"partition pfllib: class {label} has {len(pool)} samples for {len(holders)} clients; "
                    "use fewer clients or a smaller k"
                )
            sizes = np.full(len(holders) - 1, int(even))
            if not self.even:
                sizes = random.randint(low, int(even), len(holders) - 1)
            for own, part in zip(holders, np.split(pool, np.cumsum(sizes)), strict=True):
                own.append(part)
        return [np.concatenate(own) for own in parts]

    def _by_law(
        self, labels: Labels, clients: int, least: int, random: np.random.RandomState
    ) -> list[Counts]:
        full = len(labels.train) / clients
        for _ in range(TRIES):
            own: list[Counts] = [np.zeros(0, np.int64) for _ in range(clients)]
            for label in range(labels.classes):
                pool = np.flatnonzero(labels.train == label)
                random.shuffle(pool)
                shares = random.dirichlet(np.full(clients, self.alpha))
                shares *= [len(held) < full for held in own]
                ends = (np.cumsum(shares / shares.sum()) * len(pool)).astype(np.int64)[:-1]
                own = [np.append(held, part) for held, part in zip(own, np.split(pool, ends), strict=True)]
            if min(map(len, own)) >= least:
                return own
        raise DataError(
            f"partition pfllib: none of {TRIES} draws gives every client {least} samples; use fewer clients, "
            "a smaller least or a larger alpha"
        )


@dataclass(frozen=True)
class Dirichlet:
    """Label shares drawn from a Dirichlet law: the smaller ``alpha``, the less alike the clients."""

    name: ClassVar[str] = "dirichlet"
    alpha: float = setting(0.5, "concentration; small is heterogeneous", symbol="α", above=0)
    by: str = setting(
        "class", "divide each class over clients, or give each client a law", choices=("class", "client")
    )
    balance: bool = setting(False, "by class: a client with its fair share of samples gets no more")
    least: int = setting(10, "by class: fewest training samples of a client", low=1)
    train: int | None = setting(
        None, "by client: training samples of each; all are divided if not given", low=1
    )
    test: int | None = setting(
        None, "by client: test samples of each; matched to the train labels if not given", low=1
    )

    def __post_init__(self) -> None:
        if self.by == "class" and (self.train is not None or self.test is not None):
            raise SettingError(
                'partition dirichlet: train and test need by = "client"; by class sizes follow the draw'
            )
        if self.by == "client" and self.balance:
            raise SettingError(
                'partition dirichlet: balance needs by = "class"; by client all sizes are equal'
            )

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Draw by class or by client."""
        return (self._by_class if self.by == "class" else self._by_client)(labels, clients, seed)

    def _by_class(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Cut every class by shares over clients; repeat until all have enough, then repair."""
        if len(labels.train) < clients * self.least:
            raise DataError(
                f"partition dirichlet: {len(labels.train)} samples cannot give {clients} clients "
                f"{self.least} each; use fewer clients or a smaller least"
            )
        sizes = labels.sizes()
        best = self._counts(sizes, clients, seed, 0)
        tries = 1
        while best.sum(axis=1).min() < self.least and tries < TRIES:
            counts = self._counts(sizes, clients, seed, tries)
            if counts.sum(axis=1).min() > best.sum(axis=1).min():
                best = counts
            tries += 1
        notes = []
        if best.sum(axis=1).min() < self.least:
            moved, receivers = _lift(best, self.least)
            notes.append(
                f"after {tries} draws a client still had fewer than {self.least} samples; "
                f"moved {moved} samples from the largest clients to {receivers} small ones"
            )
        elif tries > 1:
            notes.append(f"drawn {tries} times until every client had {self.least} samples")
        return Draw(_deal(labels.pools(seed, "dirichlet"), best), notes=tuple(notes))

    def _counts(self, sizes: Counts, clients: int, seed: int, attempt: int) -> Counts:
        """One draw: samples per client and class."""
        counts = np.zeros((clients, len(sizes)), np.int64)
        for label in np.flatnonzero(sizes):
            shares = _dirichlet(np.full(clients, self.alpha), stream(seed, "dirichlet", attempt, int(label)))
            if self.balance:
                # Some client is below its fair share until all samples are given out, so one stays open.
                below = counts.sum(axis=1) < sizes.sum() / clients
                shares = np.where(below, shares, 0.0)
                shares = shares if shares.sum() > 0 else below.astype(np.float64)
            counts[:, label] = apportion(int(sizes[label]), shares)
        return counts

    def _by_client(self, labels: Labels, clients: int, seed: int) -> Draw:
        """A law for each client, around the classes' own shares."""
        sizes = labels.sizes()
        present = np.flatnonzero(sizes)
        prior = self.alpha * len(present) * sizes[present] / sizes.sum()
        laws = np.zeros((clients, labels.classes))
        for client in range(clients):
            laws[client, present] = _dirichlet(prior, stream(seed, "dirichlet by client", client))
        return _draw_by_law(self.name, labels, laws, self.train, self.test, seed)


@dataclass(frozen=True)
class Practical:
    """Groups of clients with dominant classes: most of a client's data is of them, the rest of all others.

    Group ``g`` is dominated by ``dominant`` classes in order: the first three, the next three and so on,
    starting again at the first when they run out. Without ``groups`` there are as many groups as that
    gives, equally large.
    """

    name: ClassVar[str] = "practical"
    groups: tuple[int, ...] = setting((), "clients in each group; equal groups if not given", low=1)
    dominant: int = setting(3, "dominant classes of a group", low=1)
    share: float = setting(0.8, "share of a client's samples from its dominant classes", low=0, high=1)
    train: int | None = setting(None, "training samples of each client; all are divided if not given", low=1)
    test: int | None = setting(None, "test samples of each; matched to the train labels if not given", low=1)

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """A law for each group; samples drawn by it."""
        present = np.flatnonzero(labels.sizes())
        _at_most("dominant", self.dominant, len(present))
        groups = np.array(self.groups, np.int64)
        if not len(groups):
            groups = apportion(clients, np.ones(min(clients, max(1, len(present) // self.dominant))))
        if groups.sum() != clients or groups.min() < 1:
            raise SettingError(
                f"partition.groups: sizes from 1 that sum to the {clients} clients, got {groups.tolist()}"
            )
        laws = np.zeros((len(groups), labels.classes))
        for group, law in enumerate(laws):
            chosen = np.arange(group * self.dominant, (group + 1) * self.dominant) % len(present)
            others = np.setdiff1d(np.arange(len(present)), chosen)
            law[present[chosen]] = (self.share if len(others) else 1.0) / self.dominant
            law[present[others]] = (1 - self.share) / max(1, len(others))
        return _draw_by_law(self.name, labels, np.repeat(laws, groups, axis=0), self.train, self.test, seed)


@dataclass(frozen=True)
class Parts:
    """Each class in as many parts as there are clients; a client takes its part of each of its ``k`` classes.

    Its samples are then cut into train and test. With ``iid`` all clients have the same classes, otherwise
    each draws its own. The setting of SPFL and PLGA; test samples come from the training set, as there.
    """

    name: ClassVar[str] = "parts"
    k: int = setting(6, "classes each client holds", low=1)
    iid: bool = setting(False, "the same classes for all clients")
    test_fraction: float = setting(0.2, "share of a client's samples to test on", above=0, high=0.9)

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Cut the classes, choose per client, cut into train and test."""
        sizes = labels.sizes()
        present = np.flatnonzero(sizes)
        _at_most("k", self.k, len(present))
        small = present[sizes[present] < 2 * clients]
        if len(small):
            raise DataError(
                f"partition parts: class {small[0]} has {sizes[small[0]]} samples, too few for {clients} "
                "parts with a training and a test sample each; use fewer clients"
            )
        pieces = [
            _pieces(pool, apportion(len(pool), np.ones(clients))) if len(pool) else []
            for pool in labels.pools(seed, "parts")
        ]
        train, test = [], []
        for client in range(clients):
            key = ("parts", "choose") if self.iid else ("parts", "choose", client)
            chosen = stream(seed, *key).permutation(present)[: self.k]
            own = np.concatenate([pieces[label][client] for label in chosen])
            kept, taken = cut(
                own, labels.train[own], self.test_fraction, stream(seed, "parts", "cut", client)
            )
            train.append(kept)
            test.append(taken)
        return Draw(train, test)


@dataclass(frozen=True)
class Column:
    """The clients that the data name themselves: one per training sample, or a file with one per line."""

    name: ClassVar[str] = "column"
    column_file: str = setting("", "text file with the client of each training sample, one per line")
    values: Any = None

    def __post_init__(self) -> None:
        if self.values is not None:  # a tuple, whatever came in, so that schemes compare and never change
            object.__setattr__(self, "values", tuple(np.asarray(self.values).ravel().tolist()))

    def split(self, labels: Labels, clients: int, seed: int) -> Draw:
        """Group the samples by their entry; 0 clients stands for as many as the column names."""
        column = np.array(self._entries())
        if len(column) != len(labels.train):
            raise DataError(
                f"partition column: {len(labels.train)} training samples but {len(column)} entries; "
                "give the client of every training sample"
            )
        names, owner = np.unique(column, return_inverse=True)
        if clients not in (0, len(names)):
            raise SettingError(
                f"clients: the column names {len(names)} clients, got {clients}; set clients to that"
            )
        train = _pieces(np.argsort(owner, kind="stable"), np.bincount(owner))
        return Draw(train, names=tuple(str(name) for name in names))

    def _entries(self) -> Sequence[Any]:
        if self.values is not None:
            return tuple(self.values)
        if not self.column_file:
            raise SettingError(
                "partition.column_file: the partition column needs a file, or values from Python"
            )
        try:
            return Path(self.column_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.column_file}: cannot read the clients ({error})") from None


PARTITIONS: dict[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (Iid, Shards, Classes, Blocks, Pfllib, Dirichlet, Practical, Parts, Column)
}
"""The schemes by name."""


def find_scheme(spec: str | Mapping[str, Any] | Scheme, where: str = "partition") -> Scheme:
    """A scheme from its name, from a table with its name and parameters, or as it is.

    >>> find_scheme({"name": "dirichlet", "alpha": 0.1}).alpha
    0.1
    """
    if not isinstance(spec, (str, Mapping)):
        return spec
    table = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise SettingError(f"{where}.name: give the name of a partition, one of {', '.join(PARTITIONS)}")
    if name not in PARTITIONS:
        raise unknown(f"{where}.name", name, PARTITIONS, "partition")
    return build(PARTITIONS[name], table, where)


def parameters_of(scheme: Scheme) -> dict[str, Any]:
    """A scheme's parameters for the record; a column's values are in the partition itself."""
    fields = dataclasses.fields(scheme)  # type: ignore[arg-type]  # every scheme is a dataclass
    values = {field.name: getattr(scheme, field.name) for field in fields if field.name != "values"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def match_test(labels: Labels, counts: Counts, seed: int) -> tuple[list[Counts], tuple[str, ...]]:
    """Test samples for clients that hold ``counts [clients, classes]``, by each client's own label law.

    Client ``i`` gets ``max(1, r * counts[i, c])`` samples of each class ``c`` it holds, up to rounding,
    with the one ratio ``r`` for all, as large as the test set allows without sharing samples. A class with
    fewer test samples than holders is divided among those who hold most of it. A client who got nothing
    shares a test sample with another.
    """
    available, holds = labels.test_sizes(), counts > 0
    holders = holds.sum(axis=0)
    scarce = holders > available
    ample = np.flatnonzero(~scarce & (holders > 0))
    number = np.zeros_like(counts)

    def wanted(ratio: float) -> npt.NDArray[np.float64]:
        return np.where(holds[:, ample], np.maximum(1.0, ratio * counts[:, ample]), 0.0)

    if len(ample):
        low, high = 0.0, float((available[ample] / counts[:, ample].sum(axis=0)).min())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if (wanted(middle).sum(axis=0) <= available[ample]).all() else (low, middle)
            )
        if (wanted(high).sum(axis=0) <= available[ample] + 1e-6).all():
            low = high
        exact = wanted(low)
        for column, label in enumerate(ample):
            total = min(int(exact[:, column].sum() + 1e-6), int(available[label]))
            number[:, label] = round_to(total, exact[:, column])
    for label in np.flatnonzero(scarce & (available > 0)):
        number[:, label] = apportion(int(available[label]), counts[:, label])
    pools = labels.test_pools(seed, "match")
    test = _deal(pools, number)
    without = np.flatnonzero(number.sum(axis=1) == 0)
    for client in without:
        usable = np.where(available > 0, counts[client], 0)
        if not usable.any():
            raise DataError(
                f"client {client} holds only classes {np.flatnonzero(counts[client]).tolist()}, "
                "of which the test set has no sample"
            )
        pool = pools[int(np.argmax(usable))]
        test[client] = stream(seed, "share", int(client)).choice(pool, 1)
    notes = []
    if len(without):
        notes.append(
            f"the test set is small: {len(without)} clients share their one test sample with another client"
        )
    return test, tuple(notes)


def class_counts(labels: Counts, parts: Sequence[Counts], classes: int) -> Counts:
    """How many samples of each class each part holds, ``[parts, classes]``."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    joined = np.concatenate([*parts, np.empty(0, np.int64)])
    flat = np.bincount(owner * classes + labels[joined], minlength=len(parts) * classes)
    return flat.reshape(len(parts), classes).astype(np.int64)


def _draw_by_law(
    name: str,
    labels: Labels,
    laws: npt.NDArray[np.float64],
    train: int | None,
    test: int | None,
    seed: int,
) -> Draw:
    """Samples for clients with a law over classes and a fixed size, clients served in random order.

    Where a class runs out, its share goes to the client's other classes. With a given test size the test
    samples follow the training samples drawn, so a class also counts as run out when its test samples are.
    """
    clients, n = len(laws), len(labels.train)
    own_test_pool = len(labels.test) > 0
    needed = clients * ((train or 1) + (0 if own_test_pool or test is None else test))
    if needed > n:
        raise DataError(f"partition {name}: {clients} clients need {needed} training samples, there are {n}")
    if test is not None and own_test_pool and clients * test > len(labels.test):
        raise DataError(
            f"partition {name}: {clients} clients need {clients * test} test samples, "
            f"there are {len(labels.test)}"
        )
    rest = 0 if own_test_pool or test is None else test
    sizes = np.full(clients, train) if train else apportion(n - clients * rest, np.ones(clients))
    left = labels.sizes()
    test_left = labels.test_sizes() if own_test_pool else left  # one pool: the same array, counted down twice
    counts, test_counts = np.zeros(laws.shape, np.int64), np.zeros(laws.shape, np.int64)
    short = unlike = 0
    for client in stream(seed, name, "order").permutation(clients):
        size, law = int(sizes[client]), laws[client]
        room = left
        if test is not None:
            joint = (
                left * size // (size + test)
                if test_left is left
                else np.minimum(left, test_left * size // test)
            )
            room = joint if joint.sum() >= size else left
            unlike += room is left
        counts[client] = apportion(size, law, room)
        short += bool((apportion(size, law) > room).any())
        left -= counts[client]
        if test is not None:
            test_counts[client] = apportion(test, counts[client], test_left)
            test_left -= test_counts[client]
    notes = []
    if short:
        notes.append(f"classes ran out for {short} of {clients} clients; their other classes fill the gap")
    if unlike:
        notes.append(
            f"{unlike} of {clients} clients, served last, have test labels unlike their training labels"
        )
    pools = labels.pools(seed, name)
    test_draw = None
    if test is not None and own_test_pool:
        test_draw = _deal(labels.test_pools(seed, name), test_counts)
    elif test is not None:
        used = counts.sum(axis=0)
        test_draw = _deal([pool[start:] for pool, start in zip(pools, used, strict=True)], test_counts)
    return Draw(_deal(pools, counts), test_draw, tuple(notes))


def _dirichlet(alpha: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """A Dirichlet draw that stays a law where it underflows: all mass on one entry, chosen by ``alpha``."""
    law = random.dirichlet(alpha)
    if not np.isfinite(law).all() or not law.sum() > 0:
        law = np.zeros(len(alpha))
        law[random.choice(len(alpha), p=alpha / alpha.sum())] = 1.0
    return law


def _lift(counts: Counts, least: int) -> tuple[int, int]:
    """Move samples, one at a time, from the largest client to those below ``least``; in place."""
    sizes = counts.sum(axis=1)
    small = np.flatnonzero(sizes < least)
    moved = 0
    for client in small:
        while sizes[client] < least:
            donor = int(np.argmax(sizes))
            label = int(np.argmax(counts[donor]))
            counts[donor, label] -= 1
            counts[client, label] += 1
            sizes[donor] -= 1
            sizes[client] += 1
            moved += 1
    return moved, len(small)


def _pools(labels: Counts, offset: int, classes: int, seed: int, purpose: str) -> list[Counts]:
    """The samples of each class in random order."""
    pieces = _pieces(np.argsort(labels, kind="stable") + offset, np.bincount(labels, minlength=classes))
    return [stream(seed, purpose, "pool", label).permutation(pool) for label, pool in enumerate(pieces)]


def _pieces(order: Counts, sizes: npt.NDArray[np.integer[Any]]) -> list[Counts]:
    """Consecutive pieces of the given sizes."""
    return np.split(order, np.cumsum(sizes)[:-1])


def _deal(pools: Sequence[Counts], counts: Counts) -> list[Counts]:
    """From each class's pool, in order, as many samples to each client as ``counts`` says."""
    clients = np.arange(len(counts))
    owner = np.concatenate([np.repeat(clients, counts[:, label]) for label in range(len(pools))])
    taken = counts.sum(axis=0)
    samples = np.concatenate([pool[:number] for pool, number in zip(pools, taken, strict=True)])
    return _pieces(samples[np.argsort(owner, kind="stable")], counts.sum(axis=1))


def _enough(n: int, needed: int, what: str, places: str = "clients") -> None:
    if n < needed:
        raise DataError(f"partition: {n} {what} for {needed} {places}; use fewer clients")


def _at_most(key: str, value: int, classes: int) -> None:
    if value > classes:
        raise SettingError(f"partition.{key}: the data have {classes} classes, got {value}")
