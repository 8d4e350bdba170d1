"""Whether data are what an experiment expects, wherever they lie."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sartor.data.clients import ClientData
from sartor.data.settings import Expect
from sartor.errors import DataError
from sartor.settings import shown


def unexpected(
    expect: Expect, names: Collection[str], shape: Sequence[int], classes: int | None, samples: int
) -> str | None:
    """What of some clients' data is not as expected; None where all is. ``samples`` are the most of one.

    >>> unexpected(Expect(shape=(8, 8)), ["north"], [5, 5], 10, 100)
    'samples of shape [5, 5], expected [8, 8] (expect.shape)'
    """
    if expect.shape is not None and tuple(shape) != expect.shape:
        return f"samples of shape {list(shape)}, expected {list(expect.shape)} (expect.shape)"
    if expect.classes is not None and (classes is None or classes > expect.classes):
        found = "no classes" if classes is None else f"{classes} classes"
        return f"{found}, expected at most {expect.classes} (expect.classes)"
    if expect.samples is not None and samples > expect.samples:
        return f"a client with {samples} training samples, expected at most {expect.samples} (expect.samples)"
    strange = [] if expect.names is None else sorted(set(names) - set(expect.names))
    return f"a client {shown(strange[0])}, who is not expected (expect.names)" if strange else None


def check_expected(expect: Expect, data: ClientData) -> None:
    """Refuse data that are not as expected; their values are looked at by :func:`check_range`."""
    names = () if expect.names is None else data.names
    samples = int(data.train.count.max(initial=0))
    reason = unexpected(expect, names, tuple(data.train.x.shape[1:]), data.classes, samples)
    if reason is not None:
        raise DataError(f"{data.name}: {reason}")


def check_range(expect: Expect, data: ClientData) -> None:
    """Refuse samples with values outside the range that is expected, before they are normalised."""
    if expect.low is None and expect.high is None:
        return
    for split in (data.train, data.test, data.validation):
        if split is None or not split.x.numel():
            continue
        low, high = float(split.x.min()), float(split.x.max())
        if expect.low is not None and low < expect.low:
            raise DataError(f"{data.name}: a value {low:g}, expected at least {expect.low:g} (expect.low)")
        if expect.high is not None and high > expect.high:
            raise DataError(f"{data.name}: a value {high:g}, expected at most {expect.high:g} (expect.high)")
