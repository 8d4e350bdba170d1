"""Processes that work at once: what they are given, what they say, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import PATIENCE, process, wait_until
from sartor.errors import SartorError, SettingError
from sartor.studies import workers
from sartor.studies.workers import at_once, hint_of_sharing, say, working_at_once

AGAIN = "what is done is kept, and the same command goes on with the rest"


def about(number: int) -> dict[str, Any]:
    """What a process is like."""
    say(f"at {number}")
    return {
        "number": number,
        "process": os.getpid(),
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "at once": working_at_once(),
        "triton": os.environ["TRITON_CACHE_DIR"],
    }


def fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os._exit(3)
    raise {
        "memory": MemoryError("too much"),
        "mistake": SettingError("rounds: too few"),
        "fault": ZeroDivisionError("by 0"),
    }[how]


def last(folder: Path, number: int) -> None:
    """Work without end, but for Ctrl-C."""
    try:
        say(number)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        say(number)
        (folder / f"{number}").touch()
        raise


def test_they_stay_and_have_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    cells, said = [1, 2, 3, 4], []

    def heard(cell: int, words: str) -> None:
        said.append((cell, words))
        if cell == 1:
            cells.append(5)

    found = dict(at_once(about, cells, 2, heard))
    assert sorted(said) == [(number, f"at {number}") for number in range(1, 6)]
    assert all(made["number"] == cell for cell, made in found.items())
    assert len({made["process"] for made in found.values()} - {os.getpid()}) <= 2
    assert {made["folder"] for made in found.values()} == {str(tmp_path)}
    assert {made["threads"] for made in found.values()} == {3}
    assert {made["at once"] for made in found.values()} == {2}
    assert working_at_once() == 1
    own = {made["process"]: made["triton"] for made in found.values()}
    assert set(own.values()) <= {str(tmp_path / "kernels" / f"job-{number}") for number in (1, 2)}
    assert len(set(own.values())) == len(own)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("kill", SartorError, f"kill: its process was killed by SIGKILL, as where memory runs out; {AGAIN}"),
        ("leave", SartorError, f"leave: its process ended with status 3; {AGAIN}"),
        ("memory", SartorError, f"memory: memory ran out with no other beside it (too much); {AGAIN}"),
        ("mistake", SettingError, "mistake: rounds: too few"),
        ("fault", SartorError, f"fault: ZeroDivisionError: by 0; {AGAIN}"),
    ],
)
def test_a_failure_is_one_message_that_names_what_failed(
    how: str, kind: type[SartorError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind) as caught:
        list(at_once(fail, [how], 2))
    assert type(caught.value) is kind
    assert str(caught.value) == message
    assert ("Traceback" in capfd.readouterr().err) == (how == "fault")
    assert not multiprocessing.active_children()


def greedy(folder: Path, number: int) -> int:
    """Fill memory where others work too, who wait for that; how many there are."""
    if number == 1 and working_at_once() > 1:
        (folder / "full").touch()
        raise torch.cuda.OutOfMemoryError("too much")
    until = time.monotonic() + PATIENCE
    while not (folder / "full").exists() and time.monotonic() < until:
        time.sleep(0.01)
    say("at it")
    return working_at_once()


def test_one_for_which_memory_runs_out_beside_others_is_tried_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cells = [1, 2, 3]

    def heard(cell: int, words: str) -> None:
        if cell == 1:
            cells.append(4)  # as a job leaves what it has not made

    *others, starved, left = at_once(partial(greedy, tmp_path), cells, 2, heard)
    assert (sorted(others), starved, left) == ([(2, 2), (3, 2)], (1, 1), (4, 1))
    told = "1: memory ran out (too much); it is tried by itself when all others are done"
    assert told in caplog.messages
    assert not multiprocessing.active_children()


def test_ctrl_c_lets_all_of_them_end_their_rounds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = []

    def heard(cell: int, words: int) -> None:
        begun.append(cell)
        if len(begun) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the same command goes on with the runs under way"):
        list(at_once(partial(last, tmp_path), [1, 2], 2, heard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert "Traceback" not in capfd.readouterr().err
    assert not multiprocessing.active_children()


def test_one_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.0)

    def heard(cell: int, words: int) -> None:
        raise SartorError("enough")

    with pytest.raises(SartorError, match="enough"):
        list(at_once(partial(last, tmp_path), [1], 1, heard))
    assert not multiprocessing.active_children()


def test_they_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom sartor.studies.workers import at_once\n"
        "def work(number):\n"
        "    Path(f'begun-{number}').touch()\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    list(at_once(work, [1, 2], 2))\n"
    )
    with process([sys.executable, script.name], cwd=tmp_path) as study:
        wait_until(lambda: len([*tmp_path.glob("begun-*")]) == 2, study)
        study.kill()
        study.communicate(timeout=PATIENCE)  # which ends when nobody holds its output any more


def test_a_gpu_is_shared_better_under_a_daemon_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hint_of_sharing(4) is None
    program = tmp_path / "nvidia-cuda-mps-control"
    program.touch(mode=0o755)
    assert hint_of_sharing(4) == (
        "4 processes share the GPU better under its daemon: start it with nvidia-cuda-mps-control -d"
    )
    (tmp_path / "pipes").mkdir()
    (tmp_path / "pipes" / "control").touch()
    assert hint_of_sharing(4) is None
