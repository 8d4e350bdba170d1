"""Work that copies of this process do at once.

A copy has all that this process has, and runs Python without waiting for its other threads. It shares
nothing that it changes, so what it makes are files; and it must leave a GPU alone, which belongs to the
process that it was copied from.
"""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

PATIENCE = 60.0
"""Seconds without a word after which copies are given up: one may wait for what a thread held at the time."""

_PLACE = 4
"""Bytes that name a piece of work."""


@contextmanager
def by_copies(work: Sequence[Callable[[], Any]], copies: int) -> Iterator[None]:
    """Have this work done by so many copies, begun in its order, and wait for it at the end.

    Whether a piece came out is seen by what it made. Where no copy can be made, none is done.
    """
    if not (work and copies and hasattr(os, "fork")):
        yield
        return
    places, written = os.pipe()
    heard, told = os.pipe()
    os.write(written, b"".join(place.to_bytes(_PLACE, "big") for place in range(len(work))))
    os.close(written)
    first = None
    try:
        with warnings.catch_warnings(), suppress(OSError):
            warnings.simplefilter("ignore")  # of threads, which a copy does not have
            if (first := os.fork()) == 0:
                _work(work, copies, places, told)
            os.setpgid(first, first)
        os.close(told)
        yield
        while select.select([heard], [], [], PATIENCE)[0] and os.read(heard, len(work)):
            pass  # a byte for every piece, and nothing more once all copies have ended
    finally:
        if first:
            with suppress(OSError):
                os.killpg(first, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(first, 0)
        os.close(places)
        os.close(heard)


def _work(work: Sequence[Callable[[], Any]], copies: int, places: int, told: int) -> NoReturn:
    """What the first copy does, in a group of its own, with copies of itself: what is left, piece by piece.

    So the process itself makes but one, and has it in the time that one takes.
    """
    made: list[int] = []
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with suppress(OSError):
            os.setpgid(0, 0)
        with suppress(OSError):  # where there is no room for more, these do
            while copies > 1:
                others = copies // 2
                copy = os.fork()
                made, copies = ([*made, copy], copies - others) if copy else ([], others)
        while place := os.read(places, _PLACE):
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)  # ends it, also where nobody is left to do so
            with suppress(Exception):
                work[int.from_bytes(place, "big")]()
            os.write(told, b".")
        signal.setitimer(signal.ITIMER_REAL, 0)
        for copy in made:
            os.waitpid(copy, 0)
    finally:
        os._exit(0)
