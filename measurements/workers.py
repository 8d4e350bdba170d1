"""Many measurements at once, one thread each, that say nothing but what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import torch

from sartor.studies.workers import at_once

Cell = TypeVar("Cell")
Found = TypeVar("Found")


def _call(measure: Callable[[Cell], Found], cell: Cell) -> Found:
    logging.getLogger("sartor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return measure(cell)


def measured(
    measure: Callable[[Cell], Found], cells: Iterable[Cell], workers: int
) -> Iterator[tuple[Cell, Found]]:
    """Each cell with what was measured, as they finish; begun in their order."""
    return at_once(partial(_call, measure), list(cells), workers)
