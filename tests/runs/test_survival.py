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

from helpers import PATIENCE, completed, process, wait_until
from sartor.runs.record import SEAL_LINE, RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork"),
]

SMALL = ("--clients", "6", "model.hidden=8", "cohort.fraction=0.5", "data.validation=0.2")

STAY_READY = """
import os, sys
# Everything slow to import, before any thread is started.
import sartor.runs.resume, sartor.commands.main, pyarrow.parquet, torch._dynamo
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

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process, self.number = process, 0
        self.start("--version")
        assert self.wait() == 0

    def start(self, *words: str) -> None:
        """Start the program with these words."""
        assert self.process.stdin is not None
        self.process.stdin.write(("\t".join(words) + "\n").encode())
        self.number = self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
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
    # Without buffers, so that an answer waits in the pipe, where it can be seen.
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with process([sys.executable, "-c", STAY_READY], **pipes, text=False, bufsize=0) as started:
        yield Ready(started)


def numbers(folder: Path) -> dict[str, Any]:
    """All a finished run has come to, but the times."""
    run = RunFolder.open(folder)
    return {
        "summary": {key: value for key, value in run.summary.items() if key != "seconds"},
        "rounds": [{key: value for key, value in row.items() if "seconds" not in key} for row in run.rounds],
        "clients": (folder / "clients.parquet").read_bytes(),
        "models": (folder / "models.safetensors").read_bytes(),
    }


# What differs is what is written: states in the checkpoint or beside it, everybody's models, work in flight.
KINDS = {
    "scaffold": ("engine.name=stacked",),
    "separate": ("engine.name=loop", "engine.states=disk"),
    "diversifed": ("engine.name=loop",),
    "fedbuff": ("engine.name=loop", "delay.name=lognormal", "replies.dropout=0.2"),
}


def rows(folder: Path) -> int:
    """How many rounds a run has recorded so far."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("name", KINDS)
def test_a_run_killed_again_and_again_comes_to_the_same_numbers(
    name: str, ready: Ready, tmp_path: Path
) -> None:
    """kill -9 at moments spread over the whole run, from before the first checkpoint to the last file."""
    words = ("run", name, "--rounds", "30", *SMALL, *KINDS[name])
    ready.start(*words, "--out", str(tmp_path / "whole"))
    assert ready.wait() == 0
    chance = random.Random(name)
    for attempt in range(10):  # on a busy machine a run may be over before it is killed
        folder = tmp_path / f"killed {attempt}"
        reached = killed_again_and_again(ready, words, folder, chance)
        assert numbers(folder) == numbers(tmp_path / "whole")
        assert not list(folder.rglob(".unfinished*"))
        if sum(0 < round < 30 for round in reached) >= 2:
            return
    pytest.fail("the run was always over before it was killed")


def killed_again_and_again(
    ready: Ready, words: tuple[str, ...], folder: Path, chance: random.Random
) -> list[int]:
    """The rounds that a run had come to when it was killed, and at last when it ended."""
    reached: list[int] = []
    for target in (0, 1, 8, 16, 24, 30, None):  # rounds to wait for; the last time it may finish
        begun = (folder / "config.toml").is_file()  # else killed before there was a run at all
        ready.start(*(("resume", str(folder)) if begun else (*words, "--out", str(folder))))
        if target is not None:
            while ready.running() and rows(folder) < target:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.1 if target else 0.5))
            ready.kill()
        status = ready.wait()
        reached.append(rows(folder))
        if status == 0:
            return reached
        assert status == -signal.SIGKILL
    raise AssertionError("the run did not come to its end")


def sartor(*words: str) -> list[str]:
    return [sys.executable, "-m", "sartor", *words]


def test_the_program_itself_is_killed_and_resumed(tmp_path: Path, ready: Ready) -> None:
    """As a user does it, in processes of their own; the number of rounds is extended on the way."""
    words, folder = ("run", "scaffold", *SMALL), tmp_path / "run"
    ready.start(*words, "--rounds", "60", "--out", str(tmp_path / "whole"))
    assert ready.wait() == 0
    with process(sartor(*words, "--rounds", "50000", "--out", "run"), cwd=tmp_path) as first:
        wait_until((folder / "checkpoints" / "round-000000001.safetensors").exists, first)
        first.kill()
    config = folder / "config.toml"
    written = config.read_text().partition(SEAL_LINE)[0]  # changed by hand, as its last line says
    config.write_text(written.replace("rounds = 50000", "rounds = 30"))
    ready.start("resume", str(folder))
    assert ready.wait() == 0
    again = completed(sartor("resume", "run", "--rounds", "60", "--json"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (
        json.loads(again.stdout)["model_sha256"] == RunFolder.open(tmp_path / "whole").summary["model_sha256"]
    )


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    with process(
        sartor("run", "fedavg", *SMALL, "--rounds", "50000", "--out", "run"), cwd=tmp_path
    ) as started:
        wait_until((tmp_path / "run" / "rounds.jsonl").exists, started)
        started.send_signal(signal.SIGINT)
        _, messages = started.communicate(timeout=PATIENCE)
    assert started.returncode == 130
    assert "Traceback" not in messages
    done = len(RunFolder.open(tmp_path / "run").rounds)
    assert messages.splitlines()[-1] == f"sartor: stopped; `sartor resume run` goes on after round {done}"
    assert (tmp_path / "run" / "clients.parquet").exists()


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
    stopped = completed(sartor(*words, "--out", str(small_disk / "run")))
    assert stopped.returncode == 2, stopped.stderr
    assert stopped.stderr.count("sartor: ") == 1
    assert "No space left on device" in stopped.stderr
    assert f"then `sartor resume {small_disk / 'run'}`" in stopped.stderr
    (small_disk / "filler").unlink()
    ready.start("resume", str(small_disk / "run"))
    assert ready.wait() == 0
    assert numbers(small_disk / "run") == numbers(tmp_path / "whole")
