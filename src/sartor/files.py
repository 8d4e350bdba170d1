"""A file is written whole, or the one that was there before stays.

What is written lies under another name beside its place until it is on the disk, and is moved there in one
step. A process that is killed meanwhile leaves such a file, which is known by its name (:func:`leftovers`)
and taken for nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from sartor.errors import SartorError

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None  # type: ignore[assignment]

LOOKS = 10
"""How often what is locked is tried, 20 ms apart."""
UNFINISHED = ".unfinished-"
"""How the name of a file begins that is being written."""


OWNER_ALONE = 0o600
"""Permissions of a file that is nobody else's business."""


class NotWritten(SartorError):
    """The disk did not take a file."""


class Busy(SartorError):
    """Another process is at it."""


def write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a whole file; what the disk reports, such as being full, is one clear error."""
    with writing(path), replacing(path, mode) as temporary:
        temporary.write_bytes(content)


def private_folder(path: Path) -> None:
    """A folder that only its owner may look into, with those above it where they are not there."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside ``path`` to write to; at the end it is made durable and moved there in one step.

    ``mode`` are its permissions, less what the process takes away from all files. After an error it is gone.
    """
    # The process is named, as two may write the same file; the ending stays, as numpy adds its own to others.
    temporary = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk reports, such as being full, into one clear error."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise NotWritten(
            f"{path}: cannot be written: {reason}; free some space or choose another folder"
        ) from None


def locked(handle: int) -> bool:
    """Whether an open file or folder is this process's alone from now on, until it closes it or ends.

    Whoever only looks whether it is lets go again at once. Where there are no locks it always is.
    """
    for _ in range(LOOKS if fcntl is not None else 0):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return True
    return fcntl is None


@contextlib.contextmanager
def alone(folder: Path, message: str) -> Iterator[None]:
    """Have a folder for this process alone, until it ends; where another has it, that is the error."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        yield
        return
    with writing(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        if not locked(handle):
            raise Busy(f"{folder}: {message}")
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def leftovers(folder: Path) -> list[Path]:
    """What killed processes left half written in a folder and those inside it."""
    return list(folder.rglob(f"{UNFINISHED}*"))
