"""Real processes for tests: ``sartor`` and other programs on this machine, which can be killed.

Importing takes longer than training here, so one process, the stem, imports everything and every other is
forked from it: a process of its own all the same, in a session of its own. Run as a script this is the stem,
or, for shells, ``sartor``, ``torchrun`` or a program of Flower's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
ALONE = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PATIENCE = 300.0  # seconds, generous also on a busy machine
EVERYTHING = (
    *("sartor.commands.main", "sartor.remote.flower", "sartor.remote.join", "sartor.remote.serve"),
    *("flwr.superlink.main", "httpcore", "uvicorn.lifespan.on", "uvicorn.protocols.http.h11_impl"),
    *("anyio._backends._asyncio", "alembic.command", "sqlalchemy.dialects.sqlite", "sqlite3"),
    *("pyarrow.parquet", "dateutil.parser", "cloudpickle", "cryptography.x509", "numpy.random"),
    *("numpy.ctypeslib", "cryptography.hazmat.backends.openssl.backend", "sartor.studies.presets"),
    *("pandas", "pyarrow.compute", "pyarrow.dataset", "pyarrow.pandas_compat", "torch._dynamo"),
    *("sartor.runs.resume", "typer.main"),
)
"""What runs, servers and nodes import sooner or later."""
FLOWER = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr": "flwr.cli.app:app",
}
"""Programs of Flower's, which start each other by name, and what each of them calls."""


class Child:
    """A forked process that runs a command of ours, with its output in a file."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection, self._log = connection, log
        self.pid = _read_number(connection)
        self._code: int | None = None

    @property
    def output(self) -> str:
        return self._log.read_text()

    def code(self, seconds: float = 0) -> int | None:
        """The exit status, None where it still runs after so many seconds."""
        if self._code is None and select.select([self._connection], [], [], seconds)[0]:
            self._code = _read_number(self._connection)
            self._connection.close()  # a long test starts more processes than it may have handles
        return self._code

    def kill(self) -> None:
        """End it as a crash would."""
        if self.code() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        code = self.code(seconds)
        assert code is not None, f"still running:\n{self.output}"
        return code

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        """Wait until it has said this."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, f"{text!r} was not said:\n{self.output}"
            assert self.code() is None or text in self.output, f"ended without {text!r}:\n{self.output}"
            time.sleep(0.01)

    def close(self) -> None:
        """End it, and all that it has started."""
        self._connection.close()


class Nursery:
    """Processes that work in a folder, and end with the nursery."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._number = folder, 0
        self.children: list[Child] = []

    def start(self, *words: Any, script: str = "sartor", env: Mapping[str, str] | None = None) -> Child:
        """A process that runs ``sartor`` with these words, or another script's ``main(words)``."""
        self._number += 1
        log = self.folder / f"{self._number}.log"
        command = [script, *map(str, words)]
        with open(os.devnull) as nothing, log.open("a") as output:
            files = (nothing.fileno(), output.fileno(), output.fileno())
            environment = {**os.environ, **ALONE, **(env or {})}
            connection = _ask(_stem(), command, files, self.folder, environment)
        self.children.append(Child(connection, log))
        return self.children[-1]

    def close(self) -> None:
        for child in self.children:
            child.close()


def program(folder: Path, name: str = "sartor") -> Path:
    """``sartor``, ``torchrun`` or one of ``FLOWER`` for a shell, as an executable file in a folder."""
    file = folder / name
    words = (sys.executable, "-SE", __file__, name, _stem())
    file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    file.chmod(0o755)
    return file


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@functools.cache
def _stem() -> str:
    """Where the stem listens: one for all processes that run tests, with whose parent it ends."""
    parent = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"stem-{os.getuid()}-{parent}"
    folder.mkdir(mode=0o700, exist_ok=True)
    address = folder / "address"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes first starts it
        if not address.exists():
            _STARTED.append(_grown(address, parent))
    return str(address)


_STARTED: list[subprocess.Popen[bytes]] = []


def _grown(address: Path, parent: int) -> subprocess.Popen[bytes]:
    """A stem that listens there."""
    process = subprocess.Popen(
        [sys.executable, __file__, "stem", str(address), str(parent)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return process


def _ask(
    address: str, command: Sequence[str], files: Sequence[int], folder: Path, environment: Mapping[str, str]
) -> socket.socket:
    """Have a process started; its number and at last its exit status come through the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b"."], files)
    told = {"command": command, "folder": str(folder), "environment": dict(environment)}
    connection.sendall(json.dumps(told).encode() + b"\n")
    return connection


def _read_number(connection: socket.socket) -> int:
    """The next line, and nothing beyond it."""
    with connection.makefile("rb", buffering=0) as lines:
        return int(lines.readline())


def _be(name: str, address: str, words: Sequence[str]) -> None:
    """Be this program for whoever has started this; what torchrun starts is ours too, not Python anew.

    Whoever would kill it sends SIGUSR1, as SIGKILL would only kill what stands for it here.
    """
    command = [name, *words]
    if name == "torchrun":
        command = ["torch.distributed.run", *("--no-python" if word == "-m" else word for word in words)]
    with _ask(address, command, (0, 1, 2), Path.cwd(), os.environ) as connection:
        pid = _read_number(connection)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.signal(signal.SIGUSR1, lambda *_: os.kill(pid, signal.SIGKILL))
        code = _read_number(connection)
    sys.exit(code if code >= 0 else 128 - code)


# The stem --------------------------------------------------------------------------------------------------


def _grow(address: str, parent: int) -> None:
    """Import everything, and start processes for as long as the parent of those who ask is there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in EVERYTHING:
        with contextlib.suppress(ImportError):  # what is not installed is not needed
            importlib.import_module(name)
    import torch
    import typer.main

    from sartor.commands.main import app

    torch.set_num_threads(1)
    typer.main.get_command = functools.cache(typer.main.get_command)  # the same for all
    typer.main.get_command(app)
    gc.freeze()  # what is here already is never garbage, and so stays shared
    ended, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told)
    started: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready\n")
        while _is_there(parent):
            ready = select.select([listener, ended, *started.values()], [], [], 1.0)[0]
            if ended in ready:
                os.read(ended, 4096)
            for pid in [pid for pid, connection in started.items() if connection in ready]:
                _end(pid)  # nobody waits for it any more
            _tell_ends(started)
            if listener in ready:
                connection, _ = listener.accept()
                started[_start(connection, [listener, *started.values()])] = connection
    for pid in started:
        _end(pid)
    shutil.rmtree(Path(address).parent)
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass


def _end(pid: int) -> None:
    """End a process, and all of its session."""
    for end in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _tell_ends(started: dict[int, socket.socket]) -> None:
    """Tell those who wait for them how processes have ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with contextlib.suppress(OSError):
                os.killpg(found[0], signal.SIGKILL)  # what it has left
            with started.pop(found[0]) as connection, contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(found[1])}\n".encode())


def _start(connection: socket.socket, others: Sequence[socket.socket]) -> int:
    """Start what is asked for; the process's number."""
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    told = json.loads(connection.makefile("rb").readline())
    pid = _fork(lambda: _run(told, files, [connection, *others]))
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):
        connection.sendall(f"{pid}\n".encode())
    return pid


def _is_there(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _fork(work: Callable[[], int]) -> int:
    """A process that does this; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = work()
    except Exception:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _run(told: Mapping[str, Any], files: Sequence[int], others: Sequence[socket.socket]) -> int:
    """What a forked process does; it ends with the stem, where the system has a way to see to that."""
    os.setsid()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for connection in others:
        connection.close()
    for old, new in zip(files, (0, 1, 2), strict=True):
        os.dup2(old, new)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place not in sys.path]
    script, *words = told["command"]
    try:
        if script == "sartor":
            from sartor.commands.main import main

            sys.argv = ["sartor", *words]
            main()
        elif script in FLOWER:
            sys.argv = [script, *words]
            module, function = FLOWER[script].split(":")
            sys.exit(getattr(importlib.import_module(module), function)())
        else:
            importlib.import_module(script).main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "stem":
        _grow(sys.argv[2], int(sys.argv[3]))
    else:
        _be(sys.argv[1], sys.argv[2], sys.argv[3:])
