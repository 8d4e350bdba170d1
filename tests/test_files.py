"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sartor import files
from sartor.files import NotWritten, leftovers, replacing, write

OLD, NEW = b"old" * 1000, b"new!" * 500_000


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may enter, as a test's own is its user's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def in_a_child(action: Callable[[], None]) -> str:
    """What an action in another process came to: the text of its error, if it had one."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            action()
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as told:
        text = told.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for content in (OLD, NEW, b""):
        write(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_a_secret_is_nobody_elses_at_any_time(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with replacing(tmp_path / "key", 0o600) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
            temporary.write_bytes(b"secret")
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
        write(tmp_path / "other", b"")
        assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o644
        # One that a process of the same number has left, with other permissions, gives them to nobody.
        left = tmp_path / temporary.name
        left.touch(0o666)
        write(tmp_path / "key", b"secret", 0o600)
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_it_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file first, then its name: a power cut at any time leaves one of the two."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        done.append(
            "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} bytes"
        )
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        done.append("moved")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", noted_fsync)
    monkeypatch.setattr(files.os, "replace", noted_replace)
    write(tmp_path / "file", b"12345")
    assert done == ["5 bytes", "moved", *(["folder"] if os.name == "posix" else [])]


def test_an_error_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    write(tmp_path / "file", OLD)

    def interrupted(error: type[BaseException]) -> None:
        with replacing(tmp_path / "file") as temporary:
            temporary.write_bytes(NEW[:100])
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            interrupted(error)
        assert (tmp_path / "file").read_bytes() == OLD
        assert os.listdir(tmp_path) == ["file"]


def test_a_process_killed_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.npz"
    path.parent.mkdir()
    write(path, OLD)
    program = (
        "import sys, time; from pathlib import Path; from sartor.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary, open(temporary, 'wb', buffering=0) as file:\n"
        "    file.write(b'half'); print('half', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
    finally:
        child.kill()
        child.communicate()
    assert path.read_bytes() == OLD
    (left,) = leftovers(tmp_path)
    assert left.read_bytes() == b"half"
    assert left.suffix == ".npz"
    write(path, NEW)
    assert path.read_bytes() == NEW


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no other processes of this one")
def test_a_process_killed_at_any_time_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, OLD)
    for wait in (0.0, 0.003, 0.01, 0.02, 0.05, 0.08):
        child = os.fork()
        if not child:
            while True:
                write(path, NEW)
                write(path, OLD)
        try:
            until = os.times().elapsed + wait
            while os.times().elapsed < until:
                assert path.read_bytes() in (OLD, NEW)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert path.read_bytes() in (OLD, NEW)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a limit is a process's own")
def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "file"
    write(path, OLD)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, len(NEW)))
        write(path, NEW)

    assert in_a_child(limited) == (
        f"NotWritten: {path}: cannot be written: File too large; free some space or choose another folder"
    )
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="permissions are those of POSIX")
def test_a_folder_that_is_read_only(place: Path) -> None:
    path = place / "file"
    write(path, OLD)
    place.chmod(0o555)

    def as_nobody() -> None:
        if os.getuid() == 0:  # whom permissions do not stop
            os.setuid(65534)
        write(path, NEW)

    assert f"NotWritten: {path}: cannot be written: Permission denied" in in_a_child(as_nobody)
    assert path.read_bytes() == OLD
    assert os.listdir(place) == ["file"]


def test_no_folder_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    for path, reason in (
        (tmp_path / "none" / "a", "No such file"),
        (tmp_path / "file" / "a", "Not a directory"),
    ):
        with pytest.raises(NotWritten, match=f"cannot be written: {reason}"):
            write(path, NEW)
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotWritten, match="folder: cannot be written: Is a directory"):
        write(tmp_path / "folder", NEW)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
