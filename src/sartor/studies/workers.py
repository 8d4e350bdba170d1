"""Several processes that work at once, each of which stays, so that it imports and loads once.

They are started afresh, so that nothing of this process is shared but what is sent. PyTorch's threads are
divided among them. Each has a folder of Triton's own below the usual one: of two processes that compile a
kernel into the same folder at once, one may load the other's half.

A script that starts some is imported by each of them, and so has what it does under
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, MutableSequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from sartor.errors import SartorError

log = logging.getLogger(__name__)

Cell = TypeVar("Cell")
Found = TypeVar("Found")

AGAIN = "what is done is kept, and the same command goes on with the rest"
"""What is said where a study is broken off."""
PATIENCE = 60.0
"""Seconds that the others have to end their rounds when one has failed."""

_PIPES: list[Connection] = []
"""In a worker, the way to who started it."""
_AT_ONCE: list[int] = []
"""In a worker, how many there are of its kind."""


def at_once(
    call: Callable[[Cell], Found],
    cells: MutableSequence[Cell],
    jobs: int,
    heard: Callable[[Cell, Any], None] = lambda cell, words: None,
) -> Generator[tuple[Cell, Found], None, None]:
    """Each cell with what ``call`` gives for it, as they finish; begun in their order by ``jobs`` processes.

    ``heard`` gets what a call says by :func:`say` meanwhile, and may add to ``cells``. The first that fails
    ends the others, and so does Ctrl-C: runs end with their round, and are stored. One for which memory ran
    out beside others is begun again when they are done, by itself.
    """
    workers: list[_Worker[Cell]] = []
    starved: list[Cell] = []
    patience: float | None = PATIENCE
    try:
        while cells or any(worker.cells for worker in workers):
            while cells and (worker := _free(workers, jobs, call)) is not None:
                worker.begin(cells.pop(0))
            for pipe in wait([worker.pipe for worker in workers if worker.cells]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                kind, words = worker.hear()
                cell = worker.cells[0]
                if kind == "ready":
                    worker.ready = True
                elif kind == "said":
                    heard(cell, words)
                elif kind == "starved":
                    log.warning("%s: %s; it is tried by itself when all others are done", cell, words)
                    worker.cells.clear()
                    starved.append(cell)
                elif kind == "failed":
                    raise type(words)(f"{cell}: {words}")
                else:
                    worker.cells.clear()
                    yield cell, words
    except KeyboardInterrupt:
        patience = None
        log.warning("stopping after these rounds; press Ctrl-C again to stop at once")
        raise KeyboardInterrupt("stopped; the same command goes on with the runs under way") from None
    finally:
        _end(workers, patience)
    if starved:
        cells.extend(starved)
        yield from at_once(call, cells, 1, heard)


def say(words: Any) -> None:
    """Tell the process that started this one, if it still listens."""
    with suppress(OSError):
        _PIPES[0].send(("said", words))


def working_at_once() -> int:
    """How many processes work at once of which this is one; 1 where it is by itself."""
    return _AT_ONCE[0] if _AT_ONCE else 1


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads_of(jobs: int) -> Iterator[None]:
    """As many threads for PyTorch as each of so many processes has."""
    before = torch.get_num_threads()
    torch.set_num_threads(_share(jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _share(jobs: int) -> int:
    return max(1, torch.get_num_threads() // jobs)


def hint_of_sharing(jobs: int) -> str | None:
    """What to say before so many processes share a GPU, where NVIDIA's daemon for that is there and idle."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    if shutil.which("nvidia-cuda-mps-control") is None or (pipes / "control").exists():
        return None
    return f"{jobs} processes share the GPU better under its daemon: start it with nvidia-cuda-mps-control -d"


# The process that starts them -------------------------------------------------------------------------------


@dataclass
class _Worker(Generic[Cell]):
    """A process, and what it is at."""

    process: BaseProcess
    pipe: Connection
    cells: list[Cell]
    """One or none."""
    ready: bool = False
    """Whether it has begun to listen."""

    def begin(self, cell: Cell) -> None:
        self.cells.append(cell)
        with suppress(OSError):  # it has ended, as is found when it is listened to
            self.pipe.send(cell)

    def hear(self) -> tuple[str, Any]:
        """What it says next; that it has ended is an error."""
        try:
            kind, words = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise SartorError(f"{self.cells[0]}: its process {self._end()}; {AGAIN}") from None
        return kind, words

    def _end(self) -> str:
        code = self.process.exitcode or 0
        if code >= 0:
            return f"ended with status {code}"
        why = ", as where memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{why}"


def _free(workers: list[_Worker[Cell]], jobs: int, call: Callable[[Cell], Any]) -> _Worker[Cell] | None:
    """A process that has nothing to do, started now while there are fewer than may be."""
    for worker in workers:
        if not worker.cells:
            return worker
    if len(workers) >= jobs:
        return None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    about = (theirs, call, Path.cwd(), _share(jobs), jobs, len(workers) + 1)
    process = context.Process(target=_work, args=about, name=f"sartor job {len(workers) + 1}", daemon=True)
    with _uninterrupted():
        process.start()
    theirs.close()
    workers.append(_Worker(process, ours, []))
    return workers[-1]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits, also in a process that is started within until it lets it come."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(workers: list[_Worker[Cell]], patience: float | None) -> None:
    """End all of them: those at work after their round, unless that takes too long or Ctrl-C is pressed."""
    try:
        for worker in workers:
            if not worker.ready:
                worker.process.kill()
            elif worker.cells and worker.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGINT)
            worker.pipe.close()
        until = None if patience is None else time.monotonic() + patience
        for worker in workers:
            worker.process.join(None if until is None else max(0.0, until - time.monotonic()))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


# The processes ----------------------------------------------------------------------------------------------


def _work(
    pipe: Connection, call: Callable[[Any], Any], here: Path, threads: int, jobs: int, number: int
) -> None:
    """Do what comes until nothing does."""
    with suppress(EOFError, OSError, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored
        if hasattr(signal, "pthread_sigmask"):
            os.setpgrp()  # Ctrl-C comes from who started it, once
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        logging.getLogger("sartor.runs.execute").setLevel(logging.ERROR)  # who says what Ctrl-C does
        threading.Thread(target=_end_with_parent, daemon=True).start()
        home = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
        kernels = Path(os.environ.get("TRITON_CACHE_DIR") or home, f"job-{number}")
        os.environ["TRITON_CACHE_DIR"] = str(kernels)
        os.chdir(here)
        torch.set_num_threads(threads)
        _PIPES.append(pipe)
        _AT_ONCE.append(jobs)
        pipe.send(("ready", None))
        while True:
            pipe.send(_answer(call, pipe.recv()))
            gc.collect()  # captured graphs hold the memory of a GPU
            torch.cuda.empty_cache()


def _answer(call: Callable[[Any], Any], cell: Any) -> tuple[str, Any]:
    """What a call gives, or how it failed."""
    try:
        return "done", call(cell)
    except SartorError as error:
        return "failed", error
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        if working_at_once() > 1:
            return "starved", f"memory ran out ({error})"
        return "failed", SartorError(f"memory ran out with no other beside it ({error}); {AGAIN}")
    except Exception as error:
        traceback.print_exc()
        return "failed", SartorError(f"{type(error).__name__}: {error}; {AGAIN}")


def _end_with_parent() -> None:
    """However the process ends that started this one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
