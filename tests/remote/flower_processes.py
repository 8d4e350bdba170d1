"""Real processes for tests: servers and nodes of a federation on this machine, which can be killed.

Importing takes longer than training here, so one process imports everything and every other is forked from
it: a process of its own all the same. Run as a script this is that process; it reads a command a line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE = 300.0  # seconds, generous also on a busy machine
EVERYTHING = (
    *("sartor.commands.main", "sartor.remote.flower", "sartor.remote.join", "sartor.remote.serve"),
    *("flwr.superlink.main", "httpcore", "uvicorn.lifespan.on", "uvicorn.protocols.http.h11_impl"),
    *("anyio._backends._asyncio", "alembic.command", "sqlalchemy.dialects.sqlite", "sqlite3"),
    *(
        "pyarrow.parquet",
        "dateutil.parser",
        "cloudpickle",
        "cryptography.x509",
        "numpy.random",
        "numpy.ctypeslib",
    ),
    *("cryptography.hazmat.backends.openssl.backend", "sartor.studies.presets"),
)
"""What servers and nodes import sooner or later."""


class Child:
    """A forked process that runs a command of ours, with its output in a file."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery, self.pid, self._log = nursery, pid, log
        self._code: int | None = None

    @property
    def output(self) -> str:
        return self._log.read_text()

    def code(self) -> int | None:
        """The exit status, None while it runs."""
        if self._code is None:
            self._code = self._nursery.ask({"poll": self.pid})
        return self._code

    def kill(self) -> None:
        """End it as a crash would."""
        if self.code() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        end = time.monotonic() + seconds
        while (code := self.code()) is None:
            assert time.monotonic() < end, f"still running:\n{self.output}"
            time.sleep(0.02)
        return code

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        """Wait until it has said this."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, f"{text!r} was not said:\n{self.output}"
            assert self.code() is None or text in self.output, f"ended without {text!r}:\n{self.output}"
            time.sleep(0.01)


class Nursery:
    """The process that others are forked from; those that still run end with it."""

    def __init__(self, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self.folder, self._number = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        self.children: list[Child] = []

    def start(self, *words: Any, script: str = "sartor") -> Child:
        """A process that runs ``sartor`` with these words, or another script's ``main(words)``."""
        self._number += 1
        log = self.folder / f"{self._number}.log"
        log.touch()
        pid = self.ask({"start": [script, *map(str, words)], "log": str(log)})
        self.children.append(Child(self, pid, log))
        return self.children[-1]

    def ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _run(words: Sequence[str]) -> int:
    """What a forked process does."""
    try:
        if words[0] == "sartor":
            from sartor.commands.base import app

            app(list(words[1:]), prog_name="sartor", standalone_mode=True)
        else:
            importlib.import_module(words[0]).main(words[1:])
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return 70
    return 0


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import torch

    for name in EVERYTHING:
        importlib.import_module(name)

    torch.set_num_threads(1)
    ended: dict[int, int] = {}
    running: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            pid = os.fork()
            if pid == 0:
                log = os.open(command["log"], os.O_WRONLY | os.O_APPEND)
                null = os.open(os.devnull, os.O_RDONLY)
                for old, new in ((null, 0), (log, 1), (log, 2)):
                    os.dup2(old, new)
                code = 70
                try:
                    code = _run(command["start"])
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            running.add(pid)
            answer: Any = pid
        else:
            pid = command["poll"]
            if pid in running:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    running.discard(pid)
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
