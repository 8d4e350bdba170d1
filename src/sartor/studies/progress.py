"""How far a study of many runs is, and how long all that is left of it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sartor.runs.durations import duration, left
from sartor.runs.observers import Observer, ProgressBar
from sartor.runs.run import Run

PAUSE = 60.0
"""Seconds between two lines about one run, where there is no terminal for a bar."""


class Tally(Observer):
    """Counts runs and rounds, and tells on standard error how many of how many are done.

    The time left is reckoned in rounds: those played so far, the current run's among them, say what one
    takes. Runs that were found made count as done and took none. In a terminal a bar shows the current run;
    elsewhere there is a line for each run, and one every minute within a long one.
    """

    def __init__(self, runs: int, rounds: int, shown: bool = True) -> None:
        self.runs = runs
        """How many there will be in all."""
        self.done = 0
        self.place = ""
        """What is run, in a few words: where many comparisons make one study, which of them it is."""
        self.shown = shown
        self._rest, self._played, self._seconds = rounds, 0, 0.0
        self._begin: float | None = None
        self._rounds, self._together, self._first, self._now = 0, 1, 0, 0
        self._bar: ProgressBar | None = None
        self._told = 0.0

    @contextmanager
    def making(self, rounds: int) -> Iterator[None]:
        """Runs of so many rounds are made: one, or as many as :meth:`together` says."""
        self._begin = self._told = time.monotonic()
        self._rounds, self._together, self._first, self._now = rounds, 1, 0, 0
        try:
            yield
        finally:
            self._played += self._now
            self._seconds += time.monotonic() - self._begin
            self.found(self._together * rounds)
            self._begin, self._now, self._first = None, 0, 0

    def together(self, runs: int) -> None:
        """So many runs are made in one batch now."""
        self._together = runs

    def found(self, rounds: int) -> None:
        """These rounds need not be played any more."""
        self._rest -= rounds

    def played(self, rounds: int) -> None:
        """These rounds were played elsewhere, meanwhile."""
        self._played += rounds
        self.found(rounds)

    def skip(self, runs: int, rounds: int) -> None:
        """So many runs of so many rounds will not be made after all."""
        self.done += runs
        self.found(runs * rounds)

    def time_left(self) -> float | None:
        """How long the rest of all runs takes; None before the first round."""
        under_way = 0.0 if self._begin is None else time.monotonic() - self._begin
        played = self._played + self._now
        rest = self._rest - self._together * self._first - self._now
        return left(self._seconds + under_way, played, played + max(0, rest))

    def tell(self, what: str, end: str) -> None:
        """A run is there: say so, and what is left."""
        self.done += 1
        if self.shown:
            place = f", {self.place}" if self.place else ""
            print(f"{self.done} of {self.runs}: {what}{place}: {end}{self._words()}", file=sys.stderr)

    def _words(self) -> str:
        rest = self.time_left()
        return f"; about {duration(rest)} left" if rest else ""

    def start(self, run: Run) -> None:
        """Note where the run stands, and show its bar."""
        self._first = run.round
        if sys.stderr.isatty():
            title = f"{self.done + 1} of {self.runs}: "
            self._bar = ProgressBar(title, lambda: self._words().replace("left", "left for all"))
            self._bar.start(run)

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Show the headline."""
        if self._bar is not None:
            self._bar.evaluation(run, cells)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Count the round, and show it where it is time to."""
        self._now = self._together * (run.round - self._first)
        if self._bar is not None:
            self._bar.round(run, row)
        elif time.monotonic() - self._told > PAUSE:
            self._told = time.monotonic()
            where = f"{run.experiment.algorithm}, round {run.round} of {run.experiment.rounds}"
            print(f"{self.done + 1} of {self.runs}: {where}{self._words()}", file=sys.stderr)

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.end(run, summary)
            self._bar = None
