"""Whether data are what an experiment expects, wherever they lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sartor import nests
from sartor.data.clients import ClientData
from sartor.data.settings import Expect
from sartor.errors import DataError
from sartor.settings import shown


def unexpected(
    expect: Expect,
    names: Collection[str],
    shapes: Mapping[str, Sequence[int]],
    classes: int | None,
    samples: int,
) -> str | None:
    """What of some clients' data is not as expected; None where all is. ``samples`` are the most of one.

    ``shapes`` are those of a sample's leaves by path; a shape is expected of samples that have one.

    >>> unexpected(Expect(shape=(8, 8)), ["north"], {"x": [5, 5]}, 10, 100)
    'samples of shape [5, 5], expected [8, 8] (expect.shape)'
    """
    if expect.shape is not None and [tuple(shape) for shape in shapes.values()] != [expect.shape]:
        several = len(shapes) > 1
        found = ", ".join(f"{path} " * several + str(list(shape)) for path, shape in shapes.items())
        return f"samples of shape {found}, expected {list(expect.shape)} (expect.shape)"
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
    shapes = {path: tuple(leaf.shape[1:]) for path, leaf in nests.paths(data.train.x, "x").items()}
    reason = unexpected(expect, names, shapes, data.classes, samples)
    if reason is not None:
        raise DataError(f"{data.name}: {reason}")


def check_range(expect: Expect, data: ClientData) -> None:
    """Refuse samples with values outside the range that is expected, before they are normalised."""
    if expect.low is None and expect.high is None:
        return
    for split in (data.train, data.test, data.validation):
        leaves = [] if split is None else [leaf for leaf in nests.leaves(split.x) if leaf.numel()]
        if not leaves:
            continue
        low, high = min(float(leaf.min()) for leaf in leaves), max(float(leaf.max()) for leaf in leaves)
        if expect.low is not None and low < expect.low:
            raise DataError(f"{data.name}: a value {low:g}, expected at least {expect.low:g} (expect.low)")
        if expect.high is not None and high > expect.high:
            raise DataError(f"{data.name}: a value {high:g}, expected at most {expect.high:g} (expect.high)")
