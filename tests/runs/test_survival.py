"""Runs in real processes that are killed, interrupted or starved of disk, and come to the same numbers."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sartor as sartor_package
from sartor.algorithms import registered
from sartor.runs.record import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork"),
]

SOURCE = str(Path(sartor_package.__file__).resolve().parent.parent)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}
SMALL = ("--clients", "6", "model.hidden=8", "cohort.fraction=0.5", "data.validation=0.2")

STAY_READY = """
import os, sys
# everything slow to import, before any thread is started
import sartor.runs.resume, sartor.commands.main, pyarrow.parquet
for line in sys.stdin:
    words = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        sys.argv, sys.stdout = ["sartor", *words], open(os.devnull, "w")
        sartor.commands.main.main()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Ready:
    """A process that has imported everything and starts the program by a fork: in milliseconds."""

    def __init__(self) -> None:
        # Without buffers, so that an answer waits in the pipe, where it can be seen.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        command = [sys.executable, "-c", STAY_READY]
        self.process = subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        self.number = 0
        self.start("--version")
        assert self.wait() == 0

    def start(self, *words: str) -> None:
        """Start the program with these words."""
        assert self.process.stdin is not None
        self.process.stdin.write(("\t".join(words) + "\n").encode())
        self.number = self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], 120)[0]:
            os.kill(self.number, signal.SIGKILL)
            pytest.fail("the program hangs")
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """The exit status, negative where a signal ended it."""
        return self._answer()

    def running(self) -> bool:
        """Whether the program has not ended yet."""
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], 0)[0]

    def kill(self) -> None:
        """End it as a power cut does, if it has not ended."""
        if self.running():
            os.kill(self.number, signal.SIGKILL)


@pytest.fixture(scope="module")
def ready() -> Iterator[Ready]:
    server = Ready()
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.wait(30)


def numbers(folder: Path) -> dict[str, Any]:
    """All a finished run has come to, but the times."""
    run = RunFolder.open(folder)
    return {
        "summary": {key: value for key, value in run.summary.items() if key != "seconds"},
        "rounds": [{key: value for key, value in row.items() if key != "seconds"} for row in run.rounds],
        "clients": (folder / "clients.parquet").read_bytes(),
        "models": (folder / "models.safetensors").read_bytes(),
    }


LOOP = "engine.name=loop"
KINDS = {
    "fedavg": (LOOP,),
    "scaffold": ("engine.name=stacked",),
    "separate": (LOOP, "engine.states=disk"),
    "ditto": (LOOP,),
    "ma-fsvrg": (LOOP,),
    "diversifed": (LOOP,),
    "fedasync": (LOOP, "delay.name=lognormal"),
    "fedbuff": (LOOP, "delay.name=lognormal", "replies.dropout=0.2"),
}


def rows(folder: Path) -> int:
    """How many rounds a run has recorded so far."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("name", [name for name in KINDS if name in registered()])
def test_a_run_killed_again_and_again_comes_to_the_same_numbers(
    name: str, ready: Ready, tmp_path: Path
) -> None:
    """kill -9 at moments spread over the whole run, from before the first checkpoint to the last file."""
    words = ("run", name, "--rounds", "40", *SMALL, *KINDS[name])
    ready.start(*words, "--out", str(tmp_path / "whole"))
    assert ready.wait() == 0
    chance = random.Random(name)
    folder = tmp_path / "killed"
    reached: list[int] = []
    for target in (0, 1, 8, 16, 24, 32, 40, None):  # rounds to wait for; the last time it may finish
        begun = (folder / "config.toml").is_file() and (folder / "config.toml").stat().st_size > 0
        if not begun:  # killed before there was a run at all
            shutil.rmtree(folder, ignore_errors=True)
        ready.start(*(("resume", str(folder)) if begun else (*words, "--out", str(folder))))
        if target is not None:
            while ready.running() and rows(folder) < target:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.1 if target else 0.5))
            ready.kill()
        status = ready.wait()
        reached.append(rows(folder))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert sum(0 < round < 40 for round in reached) >= 2, reached
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert not list(folder.rglob(".unfinished*"))


def sartor(*words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sartor", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes, **options)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def test_the_program_itself_is_killed_and_resumed(tmp_path: Path) -> None:
    """As a user does it, in processes of their own; the number of rounds is extended on the way."""
    words = ("run", "scaffold", *SMALL)
    whole = sartor(*words, "--rounds", "60", "--out", "whole", "--json", cwd=tmp_path)
    expected = json.loads(whole.communicate(timeout=120)[0])
    first = sartor(*words, "--rounds", "50000", "--out", "run", cwd=tmp_path)
    wait_for(tmp_path / "run" / "checkpoints" / "round-000000001.safetensors", first)
    first.kill()
    first.communicate(timeout=60)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 50000", "rounds = 30"))
    for rounds in ((), ("--rounds", "60")):
        again = sartor("resume", "run", *rounds, "--json", cwd=tmp_path)
        printed, messages = again.communicate(timeout=120)
        assert again.returncode == 0, messages
    assert json.loads(printed)["model_sha256"] == expected["model_sha256"]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = sartor("run", "fedavg", *SMALL, "--rounds", "50000", "--out", "run", cwd=tmp_path)
    wait_for(tmp_path / "run" / "rounds.jsonl", process)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in messages
    done = len(RunFolder.open(tmp_path / "run").rounds)
    assert messages.splitlines()[-1] == f"sartor: stopped; `sartor resume run` goes on after round {done}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(
    small_disk: Path, ready: Ready, tmp_path: Path
) -> None:
    words = ("run", "separate", *SMALL, "--rounds", "12")
    ready.start(*words, "--out", str(tmp_path / "whole"))
    assert ready.wait() == 0
    space = os.statvfs(small_disk)
    room = 5 * (tmp_path / "whole" / "models.safetensors").stat().st_size // 2
    (small_disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize - room))
    stopped = sartor(*words, "--out", str(small_disk / "run"))
    _, messages = stopped.communicate(timeout=120)
    assert stopped.returncode == 2, messages
    assert messages.count("\n") == 1
    assert "No space left on device" in messages
    assert f"then `sartor resume {small_disk / 'run'}`" in messages
    (small_disk / "filler").unlink()
    ready.start("resume", str(small_disk / "run"))
    assert ready.wait() == 0
    assert numbers(small_disk / "run") == numbers(tmp_path / "whole")
