"""Many measurements at once, in processes that stay, so that importing and loading is done once in each."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

Cell = TypeVar("Cell")
Found = TypeVar("Found")


def _begin() -> None:
    logging.getLogger("sartor").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def _call(measure: Callable[[Cell], Found], cell: Cell) -> Found:
    found = measure(cell)
    gc.collect()  # captured graphs hold the memory of a GPU
    torch.cuda.empty_cache()
    return found


def measured(
    measure: Callable[[Cell], Found], cells: Iterable[Cell], workers: int
) -> Iterator[tuple[Cell, Found]]:
    """Each cell with what was measured, as they finish; begun in their order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
        waiting = {pool.submit(_call, measure, cell): cell for cell in cells}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
