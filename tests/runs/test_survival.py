"""Runs in real processes that are killed, interrupted or starved of disk, and come to the same numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flower_processes import Nursery, program

from helpers import completed, process, wait_until
from sartor.runs.record import SEAL_LINE, RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork"),
]

ROUNDS = 15
SMALL = ("--clients", "6", "model.hidden=8", "cohort.fraction=0.5", "data.validation=0.2")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("survival"))
    yield nursery
    nursery.close()


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
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    """kill -9 at moments spread over the whole run, from before the first checkpoint to the last file."""
    words = ("run", name, "--rounds", str(ROUNDS), *SMALL, *KINDS[name])
    assert nursery.start(*words, "--out", tmp_path / "whole").wait() == 0
    chance = random.Random(name)
    for attempt in range(10):  # on a busy machine a run may be over before it is killed
        folder = tmp_path / f"killed {attempt}"
        reached = killed_again_and_again(nursery, words, folder, chance)
        assert numbers(folder) == numbers(tmp_path / "whole")
        assert not list(folder.rglob(".unfinished*"))
        if sum(0 < round < ROUNDS for round in reached) >= 2:
            return
    pytest.fail("the run was always over before it was killed")


def killed_again_and_again(
    nursery: Nursery, words: tuple[str, ...], folder: Path, chance: random.Random
) -> list[int]:
    """The rounds that a run had come to when it was killed, and at last when it ended."""
    reached: list[int] = []
    for target in (0, 1, ROUNDS // 3, 2 * ROUNDS // 3, ROUNDS, None):  # the last time it may finish
        begun = (folder / "config.toml").is_file()  # else killed before there was a run at all
        run = nursery.start(*(("resume", folder) if begun else (*words, "--out", folder)))
        if target is not None:
            while run.code() is None and rows(folder) < target:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.1 if target else 0.5))
            run.kill()
        status = run.wait()
        reached.append(rows(folder))
        if status == 0:
            return reached
        assert status == -signal.SIGKILL, run.output
    raise AssertionError("the run did not come to its end")


def test_the_program_itself_is_killed_and_resumed(tmp_path: Path, nursery: Nursery) -> None:
    """As a user starts it, not forked; the number of rounds is extended on the way."""
    words, folder = ("run", "scaffold", *SMALL), tmp_path / "run"
    assert nursery.start(*words, "--rounds", 20, "--out", tmp_path / "whole").wait() == 0
    command = [sys.executable, "-m", "sartor", *words, "--rounds", "50000", "--out", "run"]
    with process(command, cwd=tmp_path) as first:
        wait_until((folder / "checkpoints" / "round-000000001.safetensors").exists, first)
        first.kill()
    config = folder / "config.toml"
    written = config.read_text().partition(SEAL_LINE)[0]  # changed by hand, as its last line says
    config.write_text(written.replace("rounds = 50000", "rounds = 10"))
    assert nursery.start("resume", folder).wait() == 0
    again = completed([str(program(tmp_path)), "resume", "run", "--rounds", "20", "--json"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (
        json.loads(again.stdout)["model_sha256"] == RunFolder.open(tmp_path / "whole").summary["model_sha256"]
    )


def test_ctrl_c_saves_and_says_how_to_go_on(nursery: Nursery) -> None:
    run = nursery.start("run", "fedavg", *SMALL, "--rounds", 50000, "--out", "run")
    run.wait_for("round 2 of")
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    assert "Traceback" not in run.output
    done = len(RunFolder.open(nursery.folder / "run").rounds)
    assert run.output.splitlines()[-1] == f"sartor: stopped; `sartor resume run` goes on after round {done}"
    assert (nursery.folder / "run" / "clients.parquet").exists()


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
    small_disk: Path, nursery: Nursery, tmp_path: Path
) -> None:
    words = ("run", "separate", *SMALL, "--rounds", "12")
    assert nursery.start(*words, "--out", tmp_path / "whole").wait() == 0
    space = os.statvfs(small_disk)
    room = 5 * (tmp_path / "whole" / "models.safetensors").stat().st_size // 2
    (small_disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize - room))
    stopped = nursery.start(*words, "--out", small_disk / "run")
    assert stopped.wait() == 2, stopped.output
    assert stopped.output.count("sartor: ") == 1
    assert "No space left on device" in stopped.output
    assert f"then `sartor resume {small_disk / 'run'}`" in stopped.output
    (small_disk / "filler").unlink()
    assert nursery.start("resume", small_disk / "run").wait() == 0
    assert numbers(small_disk / "run") == numbers(tmp_path / "whole")
