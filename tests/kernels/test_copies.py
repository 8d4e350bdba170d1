"""Work by copies of this process: all of it is done, elsewhere, and whatever goes wrong ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from helpers import PATIENCE, wait_until
from sartor.kernels import copies
from sartor.kernels.copies import by_copies


def leave(file: Path) -> None:
    """Write which process this is."""
    file.write_text(str(os.getpid()))


def children() -> str:
    """The processes that this thread's process has started and not yet waited for."""
    task = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return task.read_text() if task.exists() else ""


def test_every_piece_is_done_once_and_elsewhere(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(40)]
    before = children()
    with by_copies([partial(leave, file) for file in files], 3):
        pass
    processes = {int(file.read_text()) for file in files}
    assert os.getpid() not in processes
    assert 1 <= len(processes) <= 3
    assert children() == before


def test_threads_have_copies_too(tmp_path: Path) -> None:
    """As the one that has shuffles compiled while an engine is made."""
    file = tmp_path / "done"

    def work() -> None:
        with by_copies([partial(leave, file)], 1):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert int(file.read_text()) != os.getpid()


def test_what_goes_on_here_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    """A copy waits for what this process does after it was made."""
    file, go = tmp_path / "done", tmp_path / "go"

    def wait_and_leave() -> None:
        while not go.exists():
            time.sleep(0.001)
        leave(file)

    with by_copies([wait_and_leave], 1):
        assert not file.exists()
        go.touch()
    assert file.exists()


def test_a_piece_that_fails_leaves_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / str(number) for number in range(4)]
    work: list[Callable[[], object]] = [partial(leave, file) for file in files]
    with by_copies([lambda: 1 / 0, *work], 1):
        pass
    assert all(file.exists() for file in files)
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_dies_or_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PATIENCE", 0.2)
    before = children()
    with by_copies([lambda: os._exit(3), partial(leave, tmp_path / "second")], 1):
        pass
    assert not (tmp_path / "second").exists()
    held = threading.Lock()
    with held, by_copies([held.acquire], 2):
        pass
    assert children() == before


def test_copies_end_with_what_waits_for_them(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt), by_copies([partial(time.sleep, 1000)], 2):
        raise KeyboardInterrupt
    assert children() == before


def test_nothing_to_do_makes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a copy is made"))
    with by_copies([], 4):
        pass


def test_copies_of_a_process_that_was_killed_end_by_themselves(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from sartor.kernels import copies\n"
        "copies.PATIENCE = 1.0\n"
        "def hang():\n"
        "    Path('made').write_text(str(os.getpid()))\n"
        "    Path('made').rename('pid')\n"
        "    time.sleep(1000)\n"
        "with copies.by_copies([hang], 1):\n"
        "    time.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, text=True)
    try:
        wait_until((tmp_path / "pid").exists, process)
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + PATIENCE
    while alive((tmp_path / "pid").read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(process: str) -> bool:
    """Whether a process is there; one that has ended may be, until somebody looks how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
