"""Observers: whoever is told what happens in a run. What a run shows, stores and saves is done by them.

The round loop knows no file and no bar. It tells of the start, of every evaluation and round, and of the end;
a user's own observers (``sartor.run(..., observers=[...])``) are told the same as those of Sartor itself.

>>> import sartor
>>> class Enough(sartor.Observer):
...     def round(self, run, row):
...         if row["bytes_up"] * row["round"] > 40_000:
...             run.stop("40 kB are sent")
>>> result = sartor.run(data="digits", model="softmax", clients=4, store=False, observers=[Enough()])
>>> result.summary["rounds"], result.summary["stopped"]["reason"]
(4, '40 kB are sent')
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sartor.engines import sharded as distributed
from sartor.errors import SartorError, SettingError
from sartor.runs import checkpoint
from sartor.runs.durations import duration, left
from sartor.runs.outputs import final_outputs
from sartor.runs.record import RunFolder
from sartor.runs.run import Run, tensors_of

log = logging.getLogger(__name__)

SHARE_FOR_SAVING = 0.05
"""``checkpoint.every = 0`` saves as often as takes at most this share of the time."""

BYTES_A_SECOND = 1e9
"""At what pace a checkpoint is expected to be written before there was one."""


class Kept(IntEnum):
    """What a run keeps when it is finished; a model may be as large as those of all clients together."""

    RESULTS = 0
    """Scores and the record of its rounds."""
    MODELS = 1
    """Its final models too."""
    ALL = 2
    """And its last checkpoint, by which it can be extended."""


HOOKS = ("start", "evaluation", "round", "end")


class Observer:
    """Is told what happens in a run; any of it may be left out, and the class too.

    Everything is read from ``run`` (:class:`~sartor.runs.run.Run`): its ``experiment``, ``round``, ``rows``,
    ``evaluations``, ``clients``, ``folder`` and ``state_dict()``. ``run.stop(reason)`` ends it after the
    round under way, evaluated and complete as any finished run.

    What an observer raises ends the run: the round is stored and saved first, the message names the observer,
    and the run can be resumed. With ``torchrun`` rank 0 alone tells them; all ranks stop together.

    >>> import sartor
    >>> class Enough(sartor.Observer):
    ...     def round(self, run, row):
    ...         if row["round"] == 2:
    ...             run.stop("two are enough")
    >>> len(sartor.run("fedavg", clients=3, rounds=9, observers=[Enough()], store=False).rounds)
    2
    """

    def start(self, run: Run) -> None:
        """The run begins, or goes on after ``run.round``."""

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """The models were evaluated: ``cells["shared_local"]["accuracy"]``.

        It comes before the round is told, or after it where that stopped the run.
        """

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """A round is over; ``row`` will be its line of ``rounds.jsonl``."""

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """All is stored; or, with None, the run was interrupted or has failed."""


def check_observers(observers: Sequence[Any]) -> None:
    """Refuse what cannot be told anything, before anything has started."""
    if not isinstance(observers, (list, tuple)):
        raise SettingError(f"observers: give a list of them, got {type(observers).__name__}")
    for observer in observers:
        if isinstance(observer, type):
            raise SettingError(f"observers: {observer.__name__} is a class; give {observer.__name__}()")
        if not any(callable(getattr(observer, hook, None)) for hook in HOOKS):
            raise SettingError(
                f"observers: {type(observer).__name__} has no method to tell; define {', '.join(HOOKS[:-1])} "
                f"or {HOOKS[-1]}"
            )


class ObserverFailed(SartorError):
    """A user's observer has raised something."""


class Several(Observer):
    """Observers that are told one after the other; of the end once, if they were told of the start."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self._started: list[Observer] = []

    def start(self, run: Run) -> None:
        """Tell of the start."""
        for observer in self._observers:
            self._started.append(observer)
            observer.start(run)

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell of an evaluation."""
        for observer in self._observers:
            observer.evaluation(run, cells)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Tell of a round."""
        for observer in self._observers:
            observer.round(run, row)

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Tell those of the end who have not been told."""
        while self._started:
            self._started.pop(0).end(run, summary)


class Guarded(Observer):
    """A user's observer: what it raises interrupts the run once the round is stored; it is told no more."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self._failed = False

    def start(self, run: Run) -> None:
        """Tell of the start; nothing is to be stored yet, so an error ends the run at once."""
        self._tell("start", run)
        run.check()

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell of an evaluation."""
        self._tell("evaluation", run, cells)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Tell of a round."""
        self._tell("round", run, row)

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Tell of the end; where something else has ended the run, an error is no more than a warning."""
        self._tell("end", run, summary)

    def _tell(self, hook: str, run: Run, *arguments: Any) -> None:
        act: Callable[..., None] | None = getattr(self._observer, hook, None)
        if act is None or self._failed:
            return
        try:
            act(run, *arguments)
        except Exception as error:
            self._failed = True
            reason = str(error).strip().partition("\n")[0]
            kind = type(error).__name__
            failed = ObserverFailed(
                f"observer {type(self._observer).__name__}: its {hook}, after round {run.round}, failed: "
                f"{kind}{': ' if reason else ''}{reason}"
            )
            failed.__cause__ = error
            if hook == "end" and arguments[0] is None:
                log.warning("%s", failed)
            else:
                run.leave(failed)


class Recording(Observer):
    """Writes the run folder: a line for every round, a row for every client, and at the end all the rest."""

    def __init__(self, folder: RunFolder, kept: Kept = Kept.ALL) -> None:
        self._folder, self._kept = folder, kept

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the clients' rows."""
        self._folder.add_clients(run.evaluated_clients)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Write the round's row."""
        self._folder.add_round(row)

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Write models and summary, of a run that has come to its end."""
        if summary is not None:
            if self._kept >= Kept.MODELS:
                self._folder.write_models(run.final)
            outputs = final_outputs(run)
            if outputs is not None:
                self._folder.write_outputs(outputs)
            self._folder.close()
            self._folder.write_summary(summary)


class Saving(Observer):
    """Saves everything a continuation needs: as often as is wanted, and before the run is interrupted.

    All processes of a run do so together, when the first says that it is time.
    """

    def __init__(self, folder: RunFolder, kept: Kept = Kept.ALL) -> None:
        self._folder, self._kept = folder, kept
        self._saved_at, self._saving = -math.inf, 0.0

    def start(self, run: Run) -> None:
        """Reckon what saving will take: the first time it has to pay off as well."""
        self._saved_at = run.federation.engine.seconds()
        self._saving = sum(tensor.nbytes for _, tensor in tensors_of(run.server)) / BYTES_A_SECOND

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Save if it is time."""
        due = distributed.rank() == 0 and (run.left is not None or self._due(run))
        if distributed.first_said("save" if due else None):
            self.save(run)

    def save(self, run: Run) -> None:
        """Store the state of the run after this round."""
        started = time.perf_counter()
        checkpoint.save(
            self._folder,
            round=run.round,
            seconds=run.seconds,
            data=run.data.hash,
            server=run.server,
            federation=run.federation.snapshot(),
            homes=run.federation.engine.homes,
        )
        run.saved = run.round
        self._saved_at = run.federation.engine.seconds()
        self._saving = time.perf_counter() - started

    def _due(self, run: Run) -> bool:
        """Whether to save after this round: by the setting, or when the last saving has paid off."""
        every = run.experiment.checkpoint.every
        if run.round == run.experiment.rounds or run.stopped:
            return self._kept is Kept.ALL
        if every:
            return run.round % every == 0
        return run.federation.engine.seconds() - self._saved_at >= self._saving / SHARE_FOR_SAVING


class Interrupting(Observer):
    """Ends the run after the round in which somebody asked for that, as by Ctrl-C."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Look whether it was asked for."""
        if self._asked():
            run.leave(KeyboardInterrupt())


def shown_progress() -> Observer:
    """A bar in a terminal or a notebook; elsewhere, as in a log file, a line for every evaluation."""
    console = Console(stderr=True)
    return ProgressBar() if console.is_terminal or console.is_jupyter else Lines()


class Lines(Observer):
    """A line on standard error for every evaluation: the round, the headline, and the time left."""

    def start(self, run: Run) -> None:
        """Note where the run stands and when."""
        self._first, self._begin = run.round, time.monotonic()

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the line."""
        rounds, taken = run.experiment.rounds, time.monotonic() - self._begin
        rest = left(taken, run.round - self._first, rounds - self._first)
        value = main_value(cells, run.headline)
        end = "" if not rest else f", about {duration(rest)} left"
        print(
            f"{run.experiment.algorithm}: round {run.round} of {rounds}{value and ', '}{value}{end}",
            file=sys.stderr,
        )


def main_value(cells: Mapping[str, Mapping[str, Any]], headline: str) -> str:
    """The headline of the personal models, or else of the shared one, in words; empty without one."""
    for name in ("personal_local", "shared_local"):
        value = cells.get(name, {}).get(headline)
        if value is not None:
            return f"{name} {headline} {value:.3f}"
    return ""


class ProgressBar(Observer):
    """A bar on standard error with the round, the headline, clients per second and the time left.

    ``title`` stands before it, and what ``note`` says behind it.
    """

    def __init__(self, title: str = "", note: Callable[[], str] = str) -> None:
        self._title, self._note = title, note
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._value = ""

    def start(self, run: Run) -> None:
        """Show the bar."""
        experiment = run.experiment
        self._line = self._bar.add_task(
            f"{self._title}{experiment.algorithm}", total=experiment.rounds, completed=run.round, note=""
        )
        self._bar.start()

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Note the headline."""
        value = main_value(cells, run.headline)
        self._value = f"{value}, " if value else self._value

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Go one step further."""
        speed = row.get("cohort", 0) / max(row.get("seconds", 0.0), 1e-9)
        note = f"{self._value}{speed:,.0f} clients/s{self._note()}"
        self._bar.update(self._line, completed=run.round, note=note)

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Leave the bar as it is."""
        self._bar.stop()
