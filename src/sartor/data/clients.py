"""What a federation trains on: the samples of all clients, laid out client by client.

:class:`ClientData` is the one container every source, partition and kind of own data ends in. All samples
of a split lie in one tensor, so that a client is a slice and a cohort a gather. :func:`from_clients` builds
it from data that is split by client already; see :mod:`sartor.data.partitions` for data that is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from sartor.data.apportion import cut
from sartor.data.streams import stream
from sartor.errors import DataError

SPLITS = ("train", "test", "validation")
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


@dataclass(frozen=True, eq=False)
class ClientData:
    """Everything a run needs to know of its data: each client's splits and the pooled test set.

    ``pooled_x, pooled_y`` are the official test set where there is one, otherwise all clients' test samples
    together. ``classes`` is None for regression. ``hash`` identifies the partition, for own data the
    contents.
    """

    names: tuple[str, ...]
    train: Split
    test: Split
    validation: Split | None
    pooled_x: torch.Tensor
    pooled_y: torch.Tensor
    classes: int | None
    hash: str
    name: str

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
        )


def from_clients(
    clients: Mapping[str, Samples | Mapping[str, Samples]],
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    regression: bool = False,
    name: str = "own",
) -> ClientData:
    """Data that is split by client already.

    Each client gives ``(x, y)``, of which a test part and, if asked for, a validation part are drawn; or
    its own splits as ``{"train": (x, y), "test": (x, y), "validation": (x, y)}``, where a missing ``test``
    or ``validation`` is drawn from ``train``. A client with at least two samples has at least one to test
    on and one to train on. Labels are whole numbers from 0, or any finite numbers with ``regression=True``.

    >>> x, y = np.eye(10), np.arange(10) % 2
    >>> data = from_clients({"north": (x, y), "south": (x[:5], y[:5])})
    >>> data.names, data.train.count.tolist(), data.test.count.tolist()
    (('north', 'south'), [8, 4], [2, 1])
    """
    if not clients:
        raise DataError(f"{name}: no clients; give at least one")
    check_fraction("test_fraction", test_fraction)
    check_fraction("validation_fraction", validation_fraction)
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {split: [] for split in SPLITS}
    names = tuple(str(client) for client in clients)
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two clients have the same name")
    for client, given in zip(names, clients.values(), strict=True):
        own = _splits_of(client, given, regression)
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
    return gather(names, parts, regression=regression, name=name)


def gather(
    names: Sequence[str],
    parts: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]],
    *,
    regression: bool,
    name: str,
) -> ClientData:
    """Client data from checked tensors, a pair per client and split; the pooled test set is theirs."""
    splits = {split: _concatenate(parts[split]) for split in SPLITS if parts[split]}
    if not len(splits["test"].y):
        raise DataError(f"{name}: no client has a test sample; give each client at least two samples")
    classes = (
        None if regression else int(max(int(split.y.max()) for split in splits.values() if len(split.y))) + 1
    )
    return ClientData(
        names=tuple(names),
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        pooled_x=splits["test"].x,
        pooled_y=splits["test"].y,
        classes=classes,
        hash=_content_hash(names, splits),
        name=name,
    )


def prepare(
    data: ClientData,
    *,
    normalise: bool = False,
    features: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> ClientData:
    """The same clients with features in place of their samples, and with normalised samples.

    ``features`` comes first (see :mod:`sartor.data.features`). With ``normalise`` each channel, or each
    column of flat samples, gets mean 0 and standard deviation 1 over the clients' *training* samples; a
    constant one is only centred. Nothing is learned from validation or test samples.

    >>> data = from_clients({"a": (np.array([[1.0], [3.0], [9.0]]), [0, 0, 1])})
    >>> sorted(prepare(data, normalise=True).train.x.flatten().tolist())
    [-1.0, 1.0]
    """
    if features is not None:
        data = _map_x(data, features)
    return _map_x(data, _normaliser(data.train.x)) if normalise else data


def check_fraction(name: str, fraction: float) -> None:
    """A share of the samples to set aside lies in [0, 1)."""
    if not 0 <= fraction < 1:
        raise DataError(f"{name}: must be at least 0 and below 1, got {fraction!r}")


def _map_x(data: ClientData, function: Callable[[torch.Tensor], torch.Tensor]) -> ClientData:
    """The same data with every sample mapped; a pooled test set that is the clients' stays theirs."""
    splits = {name: getattr(data, name) for name in SPLITS if getattr(data, name) is not None}
    mapped = {name: dataclasses.replace(split, x=function(split.x)) for name, split in splits.items()}
    pooled = mapped["test"].x if data.pooled_x is data.test.x else function(data.pooled_x)
    return dataclasses.replace(data, pooled_x=pooled, **mapped)


def _normaliser(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Shift and scale by the mean and deviation of each channel of ``x``, summed in double precision."""
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    number = flat.shape[0] * flat.shape[2]
    chunks = torch.split(flat, 4096)
    mean = sum((chunk.double().sum(dim=(0, 2)) for chunk in chunks), torch.zeros(())) / number
    centred = ((chunk.double() - mean[:, None]).square().sum(dim=(0, 2)) for chunk in chunks)
    deviation = (sum(centred, torch.zeros(())) / number).sqrt()
    # A constant channel has a deviation of rounding size at most; dividing by it would blow up noise.
    deviation = torch.where(deviation > 1e-7 * (1 + mean.abs()), deviation, 1.0)
    shape = (-1, *[1] * (x.ndim - 2))
    shift, scale = mean.float().view(shape), deviation.float().view(shape)
    return lambda values: (values - shift).div_(scale)


def _splits_of(
    client: str, given: Samples | Mapping[str, Samples], regression: bool
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
        x, y = tensor_x(samples[0], where), tensor_y(samples[1], where, regression)
        if len(x) != len(y):
            raise DataError(f"{where}: {len(x)} samples in x but {len(y)} labels in y")
        if len(x) == 0:
            raise DataError(f"{where}: no samples; leave the client out or give it data")
        own[split] = (x, y)
    return own


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


def tensor_y(values: Any, where: str, regression: bool) -> torch.Tensor:
    """Labels as an int64 tensor of whole numbers from 0, or targets as finite float32."""
    array = _array(values, where, "y")
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
    with np.errstate(invalid="ignore"):  # nan is reported as not whole
        whole = array == np.trunc(array)
    wrong = ~(whole & (array >= 0) & (array < 2**31))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{where}: labels are whole numbers from 0, got {array[row]} in sample {row}; "
            "use regression=True for targets"
        )
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


def _content_hash(names: Sequence[str], splits: Mapping[str, Split]) -> str:
    """The sha256 of every name, sample and label."""
    digest = hashlib.sha256(repr((tuple(names), list(splits))).encode())
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
