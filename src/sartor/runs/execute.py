"""An experiment, carried out: set up, opened, and gone through with its observers."""

from __future__ import annotations

import logging
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sartor.data.clients import ClientData
from sartor.data.settings import OWN_DATA
from sartor.engines import sharded as distributed
from sartor.errors import Diverged, SartorError, SettingError
from sartor.files import NotWritten
from sartor.model.networks import Factory
from sartor.model.task import Task
from sartor.runs.checkpoint import Checkpoint
from sartor.runs.experiment import Experiment, models_given
from sartor.runs.loop import go_through
from sartor.runs.observers import (
    Guarded,
    Interrupting,
    Kept,
    Observer,
    ObserverFailed,
    Recording,
    Saving,
    Several,
    check_observers,
    shown_progress,
)
from sartor.runs.record import STATES, RunFolder
from sartor.runs.result import Result
from sartor.runs.run import Run
from sartor.runs.setup import Loading, Opened, Setup, open_federation, set_up_everywhere
from sartor.runs.signature import Signature
from sartor.runs.stopping import EarlyStop, WithinBudget
from sartor.runs.tracking import Tracking
from sartor.runs.tracking import check as check_trackers

log = logging.getLogger(__name__)


def execute(
    experiment: Experiment,
    *,
    data: ClientData | None = None,
    task: Task | Factory | None = None,
    own: Sequence[Task | Factory | None] = (),
    out: Path | str | None = None,
    store: bool = True,
    progress: bool | Observer = False,
    opened: Opened | None = None,
    observers: Sequence[Observer] = (),
    kept: Kept = Kept.ALL,
    load: Loading | None = None,
) -> Result:
    """Run an experiment. ``data``, ``task`` and ``own``, for ``[[models]]``, stand in for what it names.

    ``store=False`` writes no run folder. ``opened`` gives the federation where it is not an engine's.
    ``progress`` may be an observer that shows it in its own way.
    """
    check_trackers(experiment.tracking.loggers)
    check_observers(observers)
    setup = set_up_everywhere(experiment, data, task, own, load)
    return execute_setup(
        setup, out=out, store=store, progress=progress, opened=opened, observers=observers, kept=kept
    )


def execute_setup(
    setup: Setup,
    *,
    out: Path | str | None = None,
    store: bool = True,
    progress: bool | Observer = False,
    opened: Opened | None = None,
    observers: Sequence[Observer] = (),
    interrupted: Callable[[], bool] | None = None,
    kept: Kept = Kept.ALL,
) -> Result:
    """:func:`execute` of what is set up already; ``interrupted`` says whether to end after the round."""
    if not store:
        return carry_out(setup, None, progress, None, opened, observers, interrupted)
    folder = distributed.together(lambda: _folder(setup, out))
    path = distributed.first_said(None if folder is None else str(folder.path.absolute()))
    if folder is None:
        folder = distributed.together(lambda: _seen(Path(str(path))))
        return carry_out(setup, folder, progress, None, opened, observers, interrupted, kept)
    try:
        distributed.together(lambda: None)
    except SartorError:
        folder.withdraw()
        raise
    with folder.alone():
        try:
            return carry_out(setup, folder, progress, None, opened, observers, interrupted, kept)
        except ObserverFailed:
            raise
        except SartorError as error:
            refused = isinstance(error, SettingError) or isinstance(error.__cause__, SettingError)
            if refused and not folder.rounds:  # before it has begun
                folder.withdraw()
            raise


def _folder(setup: Setup, out: Path | str | None) -> RunFolder | None:
    """The run folder, made by the first process."""
    if distributed.rank():
        return None
    signature = Signature.of(setup.data).to_mapping()
    return RunFolder.create(out, setup.experiment, setup.partition, signature)


def _seen(path: Path) -> RunFolder:
    """The run folder that the first process has made, where another stores the states of its clients."""
    if not path.is_dir():
        raise SartorError(
            f"{path}: the run folder is not seen here; every process stores the states of its clients in it, "
            "so give --out a folder that all machines share"
        )
    return RunFolder.open(path)


def carry_out(
    setup: Setup,
    folder: RunFolder | None,
    progress: bool | Observer,
    saved: Checkpoint | None = None,
    opened: Opened | None = None,
    observers: Sequence[Observer] = (),
    interrupted: Callable[[], bool] | None = None,
    kept: Kept = Kept.ALL,
) -> Result:
    """The rounds that are left, with whatever happens on the way."""
    made = opened or open_federation
    federation = distributed.together(lambda: made(setup.experiment, setup.task, setup.data))
    if folder is not None:
        federation.states.keep_in(folder.path / STATES)
    shared, writes = folder, distributed.rank() == 0
    folder = folder if writes else None  # the record is the first process's
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(folder)
            folder.begin_again()
        # Several processes do not see a Ctrl-C in the same round, so there they stop at once.
        if interrupted is None:
            alone = folder is not None and distributed.world() == 1
            interrupted = stack.enter_context(interruptions(alone))
        run = Run(setup, federation, folder)
        run.watched = bool(observers)
        deciding = Several([EarlyStop(), WithinBudget(), *(map(Guarded, observers) if writes else ())])
        first = list(_keeping(setup.experiment, folder, progress, interrupted, kept)) if writes else []
        keeping = Several([*first, *([] if shared is None else [Saving(shared, kept)])])
        try:
            if saved is not None and shared is not None:
                resumed, begun = shared, saved
                distributed.together(lambda: run.restore(begun, resumed))
            else:
                run.begin()
            try:
                summary = go_through(run, deciding, keeping)
            finally:  # whoever has not been told of the end: it has not come to one
                keeping.end(run, None)
                deciding.end(run, None)
            return run.result(summary)
        except Diverged as error:
            if folder is not None:
                folder.write_diverged(str(error), setup.data.hash)
            raise
        except KeyboardInterrupt:
            if folder is None:
                raise
            raise KeyboardInterrupt(f"stopped; {_how_to_resume(folder, run)}") from None
        except (NotWritten, distributed.OtherRank) as error:
            if folder is None or not any(isinstance(one, NotWritten) for one in (error, error.__cause__)):
                raise
            raise SartorError(f"{error}; then {_how_to_resume(folder, run)}") from None
        except ObserverFailed as error:
            if folder is None:
                raise
            hint = "the run is complete" if folder.finished else _how_to_resume(folder, run)
            raise ObserverFailed(f"{error}; {hint}") from error.__cause__


def _keeping(
    experiment: Experiment,
    folder: RunFolder | None,
    progress: bool | Observer,
    interrupted: Callable[[], bool],
    kept: Kept,
) -> Iterator[Observer]:
    """Those who keep and show what there is, in the order they are told."""
    if folder is not None:
        yield Recording(folder, kept)
    if progress:
        yield progress if isinstance(progress, Observer) else shown_progress()
    yield Tracking(experiment.tracking.loggers, None if folder is None else folder.path)
    yield Interrupting(interrupted)


def _how_to_resume(folder: RunFolder, run: Run) -> str:
    begin = f"goes on after round {run.saved}" if run.saved >= 0 else "begins it again"
    data, here = run.experiment.data, run.federation.engine.pools
    if here and (models_given(run.experiment) or (data.name == OWN_DATA and data.path is None)):
        return f"`sartor.resume({str(folder.path)!r})`, with what was given in Python, {begin}"
    command = "resume" if here else "serve --resume"
    return f"`sartor {command} {shlex.quote(str(folder.path))}` {begin}"


@contextmanager
def interruptions(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once, the round is finished first; twice, everything stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        log.warning("stopping after this round; press Ctrl-C again to stop at once")

    # A handler that somebody else has set stays, and only the main thread may set one.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (wanted and usual and threading.current_thread() is threading.main_thread()):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
