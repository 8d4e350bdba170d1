"""What clients tell of their tables so that all prepare them alike: counts and sums, nobody's rows.

Of a column a client tells what its settings need and no more: how many values there are, their sum and that
of their squares, how many lie in each cell of a fixed grid, how often each category occurs. Sums are whole
numbers of a tiny unit, so that they add up to the same whoever adds them and in whatever order: a table that
is read in one place and its parts at several machines lead to the same settings, to the last bit.

>>> from sartor.data.schema import read_columns
>>> columns = read_columns({"age": {"missing": "mean"}})
>>> told = [statistics_of(columns, {"age": np.array(ages)}) for ages in ([1.0, 2.0], [np.nan, 6.0])]
>>> agreed(columns, merged(columns, told))[0].fill
3.0
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.data.labels import LONGEST_LABEL
from sartor.data.schema import NUMBERS, Column, known
from sartor.errors import DataError
from sartor.settings import shown

Raw = Mapping[str, npt.NDArray[Any]]
"""Columns as they were read: numbers with nan for a gap, texts with None."""
Told = dict[str, dict[str, Any]]
"""Column -> what a client tells of it, in types that JSON has."""

UNIT = 200
"""Sums are counted in units of 2 to the power of minus this."""
LARGEST, SMALLEST = 1e18, 2.0**-140
"""Of a value; one that is nearer to 0 counts as 0."""
CELLS = 256
"""Of a grid."""
RANKS = 33
"""Quantiles of a column that is scaled by them."""
MOST_VALUES = 2**10
"""Categories that a client may tell of."""


def exact_sum(values: npt.NDArray[np.float64]) -> int:
    """The sum of numbers in units of 2^-200, without rounding.

    >>> exact_sum(np.array([1e17, 1.0, -1e17])) == 1 << UNIT
    True
    """
    fractions, exponents = np.frexp(np.where(np.abs(values) < SMALLEST, 0.0, values))
    whole = (fractions * 2.0**53).astype(np.int64)
    total = 0
    for exponent in np.unique(exponents[whole != 0]).tolist():
        part = whole[exponents == exponent]
        # In two halves, as sums of whole 53 bits would overflow.
        both = (int((part >> 27).sum()) << 27) + int((part & (2**27 - 1)).sum())
        total += both << (exponent - 53 + UNIT)
    return total


def statistics_of(columns: Sequence[Column], raw: Raw) -> Told:
    """What one client tells of its rows."""
    return {column.name: _told(column, raw[column.name]) for column in columns if column.wanted}


def _told(column: Column, values: npt.NDArray[Any]) -> dict[str, Any]:
    if column.kind not in NUMBERS:
        counted = Counter(value for value in values.tolist() if value is not None)
        allowed = None if column.values is None else set(column.values)
        return {
            "values": {
                value: count
                for value, count in sorted(counted.items())
                if count >= column.least and (allowed is None or value in allowed)
            }
        }
    there = values[~np.isnan(values)].clip(column.low, column.high)
    told: dict[str, Any] = {"rows": len(there)}
    if "sums" in column.wanted:
        told |= {"sum": exact_sum(there), "squares": exact_sum(there * there)}
    if "grid" in column.wanted:
        told["grid"] = _grid(column, there)
    return told


def _grid(column: Column, values: npt.NDArray[np.float64]) -> list[int]:
    """How many values lie in each cell."""
    assert column.low is not None
    assert column.high is not None
    cells = np.floor((values - column.low) / (column.high - column.low) * CELLS)
    counts: list[int] = np.bincount(cells.clip(0, CELLS - 1).astype(np.int64), minlength=CELLS).tolist()
    return counts


def merged(columns: Sequence[Column], told: Sequence[Told]) -> Told:
    """What several tell, as if one had all the rows."""
    return {column.name: _added([each[column.name] for each in told]) for column in columns if column.wanted}


def _added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    added: dict[str, Any] = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if key == "grid":
            added[key] = [sum(cells) for cells in zip(*values, strict=True)]
        elif key == "values":
            counted: Counter[str] = sum((Counter(value) for value in values), Counter())
            added[key] = dict(sorted(counted.items()))
        else:
            added[key] = sum(values)
    return added


def agreed(columns: Sequence[Column], told: Told) -> tuple[Column, ...]:
    """The columns with what follows from all that was told."""
    return tuple(_learned(column, told[column.name]) if column.wanted else column for column in columns)


def _learned(column: Column, told: Mapping[str, Any]) -> Column:
    if column.kind not in NUMBERS:
        return _categories(column, told["values"])
    rows = told["rows"]
    if not rows:
        raise DataError(
            f"column {column.name}: no client has a value in its training rows; leave it out (kind = 'out')"
        )
    if "sum" in told:
        mean = told["sum"] / (rows << UNIT)
        variance = (rows * (told["squares"] << UNIT) - told["sum"] ** 2) / (rows * rows << 2 * UNIT)
        deviation = math.sqrt(max(variance, 0.0))
        # What squares lose to rounding is no deviation.
        deviation = deviation if deviation > 1e-7 * abs(mean) else 1.0
        column = known(column, fill=mean) if column.missing == "mean" else column
        column = known(column, centre=mean, spread=deviation) if column.scale == "standard" else column
    if "grid" in told:
        column = _by_quantiles(column, told["grid"])
    return column


def _by_quantiles(column: Column, grid: Sequence[int]) -> Column:
    low, middle, high = (quantile(column, grid, share) for share in (0.25, 0.5, 0.75))
    column = known(column, fill=middle) if column.missing == "median" else column
    if column.scale == "robust":
        column = known(column, centre=middle, spread=high - low if high > low else 1.0)
    if column.scale == "quantile":
        ranks = (quantile(column, grid, rank / (RANKS - 1)) for rank in range(RANKS))
        column = known(column, quantiles=tuple(ranks))
    return column


def quantile(column: Column, grid: Sequence[int], share: float) -> float:
    """The value below which a share of those on a grid lie, evenly spread in their cells."""
    assert column.low is not None
    assert column.high is not None
    counts = np.array(grid, np.int64)
    before = np.cumsum(counts) - counts
    wanted = share * int(counts.sum())
    cell = int(np.flatnonzero((counts > 0) & (before <= wanted))[-1])
    within = min((wanted - int(before[cell])) / int(counts[cell]), 1.0)
    return float(column.low + (column.high - column.low) * (cell + within) / CELLS)


def _categories(column: Column, counts: Mapping[str, int]) -> Column:
    if not counts:
        raise DataError(
            f"column {column.name}: no client tells of a category; leave it out (kind = 'out'), or name its "
            "values"
        )
    frequent = min(counts, key=lambda value: (-counts[value], value))
    column = known(column, fill=frequent) if column.missing == "most frequent" else column
    return known(column, values=tuple(sorted(counts)))


def fault(columns: Sequence[Column], told: Any, samples: int) -> str | None:
    """What is wrong with what somebody tells of so many rows; None where it can be true."""
    wanted = {column.name: column for column in columns if column.wanted}
    if not isinstance(told, dict) or told.keys() != wanted.keys():
        return "expected what the columns of the experiment need, by name"
    for name, column in wanted.items():
        if not isinstance(told[name], dict) or not _possible(column, told[name], samples):
            return f"{shown(name)}: not what can be told of {samples} rows"
    return None


def _possible(column: Column, told: Mapping[str, Any], samples: int) -> bool:
    if column.kind not in NUMBERS:
        values = told.get("values")
        return set(told) == {"values"} and isinstance(values, dict) and _possible_values(values, samples)
    keys = {"rows", *(("sum", "squares") if "sums" in column.wanted else ())}
    keys |= {"grid"} & column.wanted
    if told.keys() != keys or not _count(told["rows"], samples):
        return False
    rows, grid = told["rows"], told.get("grid", [])
    if "grid" in keys and not (
        isinstance(grid, list)
        and len(grid) == CELLS
        and all(_count(cell, rows) for cell in grid)
        and sum(grid) == rows
    ):
        return False
    return "sum" not in keys or _possible_sums(column, rows, told["sum"], told["squares"])


def _possible_sums(column: Column, rows: int, total: Any, squares: Any) -> bool:
    """Whether there are so many numbers, of the column's range where it has one, with these sums."""
    if type(total) is not int or type(squares) is not int:
        return False
    most = rows * int(LARGEST) << UNIT
    if not (abs(total) <= most and 0 <= squares <= most * int(LARGEST)):
        return False
    # Squares were rounded one by one, and those of small numbers to nothing.
    lost = (squares >> 50) + rows * int(SMALLEST * 2.0**UNIT)
    if total * total > rows * (squares + lost) << UNIT:
        return False
    if column.low is None or column.high is None:
        return True
    room = (column.high - column.low) / CELLS  # more than rounding
    return not rows or column.low - room <= total / (rows << UNIT) <= column.high + room


def _possible_values(values: Mapping[Any, Any], samples: int) -> bool:
    fine = len(values) <= MOST_VALUES and all(_count(count, samples) for count in values.values())
    return fine and sum(values.values()) <= samples and all(map(is_category, values))


def is_category(value: Any) -> bool:
    """Whether a text can name a category."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_LABEL


def _count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
