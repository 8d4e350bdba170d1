"""What a node has been asked for and what has left it: a log for whoever answers for the data.

``audit.jsonl`` in the node's state folder has a line of JSON for every request: when it came, what was done,
and in words what left the machine. A line is written, and on the disk, before anything is sent; it holds the
SHA-256 of itself and of the line before, so that a line that was changed, taken out or put in is found
(``sartor audit``). ``audit.head`` has the number and the hash of the last line, so that missing ones are
found at the end too. Whoever can write both files can write them anew; note the last hash elsewhere if that
matters.

A process that is killed while it writes leaves a line without an end. That is told as such, and the next
process cuts it off and says so in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sartor.errors import SartorError
from sartor.files import OWNER_ALONE, write, writing

LOG, HEAD = "audit.jsonl", "audit.head"
BEGINNING = "0" * 64
"""Stands for the hash of the line before the first."""


class Damaged(SartorError):
    """A log that is not what was written."""


@dataclass(frozen=True)
class Entry:
    """A line of the log."""

    line: int
    time: str
    event: str
    """started, joined, introduced, opened, answered, refused, ended or cut."""
    words: str
    """What happened, in a sentence."""
    details: dict[str, Any]
    before: str
    """The hash of the line before."""
    sha256: str
    """Of this line without it, and so of all lines before."""


class Audit:
    """The log of a node; without a folder it is kept in memory alone.

    >>> audit = Audit(None)
    >>> audit.add("answered", "Sent nothing.")
    >>> audit.answered, audit.last.line, audit.last.before == BEGINNING
    (1, 1, True)
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self.answered = folder, 0
        self.last: Entry | None = None
        torn = b""
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            for entry in read(folder):
                if isinstance(entry, bytes):
                    torn = entry
                else:
                    self.last = entry
                    self.answered += entry.event == "answered"
        if torn:
            self._cut(len(torn))

    def add(self, event: str, words: str, **details: Any) -> None:
        """Write a line; when this returns it is on the disk."""
        number, before = (1, BEGINNING) if self.last is None else (self.last.line + 1, self.last.sha256)
        time = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"line": number, "time": time, "event": event, "words": words, "details": details}
        content["before"] = before
        entry = _entry({**content, "sha256": _hash(content)})
        if self._folder is not None:
            path = self._folder / LOG
            with writing(path), open(path, "ab", buffering=0, opener=_owners) as file:
                place = file.seek(0, os.SEEK_END)
                try:
                    file.write((json.dumps(vars(entry), allow_nan=False) + "\n").encode())
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(place)
                    raise
            write(self._folder / HEAD, f"{number} {entry.sha256}\n".encode(), OWNER_ALONE)
        self.last = entry
        self.answered += event == "answered"

    def _cut(self, length: int) -> None:
        """Take a line without an end off, and say so."""
        assert self._folder is not None
        path = self._folder / LOG
        with writing(path):
            os.truncate(path, path.stat().st_size - length)
        self.add(
            "cut", f"A line of which {length} bytes had been written when the node was killed was cut off."
        )


def _owners(path: str, flags: int) -> int:
    """Open a file that is for its owner alone."""
    return os.open(path, flags, OWNER_ALONE)


def introduced(reply: Mapping[str, Any]) -> str:
    """In words what left with an introduction."""
    counts = {split: sum(held) for split, held in reply["counts"].items()}
    samples = ", ".join(f"{count} {split}" for split, count in counts.items())
    classes = "" if reply["labels"] is None else ", the names of their classes"
    moments = ", the mean and spread of their features" if "number" in reply else ""
    told = ", ".join(f"{name} ({_what(table)})" for name, table in reply.get("table", {}).items())
    moments += f", of columns of the table in sum over the training rows {told}" if told else ""
    moments += ", the names of their features" if reply.get("features") else ""
    return (
        f"Told a server of {_clients(reply['names'])}: their names, how many samples each has (in all "
        f"{samples}), the shape of a sample, a hash of the data{classes}{moments}. No samples were sent."
    )


def _what(told: Mapping[str, Any]) -> str:
    """What is told of a column."""
    words = {
        "rows": "how many values",
        "sum": "their sum",
        "squares": "that of their squares",
        "grid": "how many lie in each cell of a grid",
        "values": "how often each category occurs",
    }
    return ", ".join(words[key] for key in told)


def _clients(names: Sequence[str]) -> str:
    return f"{len(names)} client{'' if len(names) == 1 else 's'}"


def answered(
    header: Mapping[str, Any], names: Sequence[str], sent: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """In words, and as values, what leaves with the answer to a request for work."""
    function = str(header["function"])
    split = function.split("/")[1] if function.startswith("evaluation_of/") else None
    done = "Trained" if split is None else f"Evaluated a model on the {split} samples of"
    quantities = {
        name: int(value[0].numel()) for group in sent.values() for name, value in group.items() if len(value)
    }
    listed = ", ".join(f"{name} ({count} numbers)" for name, count in quantities.items()) or "nothing"
    passed = "after the transforms of the experiment" if header.get("transformed") else "as they are"
    words = (
        f"{done} {_clients(names)} by {function} in round {int(header['round'])}; sent for each of them "
        f"{listed}, {passed}."
    )
    details = {
        "exchange": int(header["exchange"]),
        "round": int(header["round"]),
        "function": function,
        "clients": list(names),
        "sent": quantities,
    }
    return words, details


def read(folder: Path) -> Iterator[Entry | bytes]:
    """The lines of a log, checked; at the end the bytes of a torn one, if there is one."""
    try:
        content = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
        head = (folder / HEAD).read_text().split() if (folder / HEAD).exists() else ["0", BEGINNING]
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{folder / LOG}: cannot be read: {error}") from None
    if len(head) != 2 or not head[0].isdecimal():
        raise Damaged(f"{folder / HEAD}: damaged; the lines of {LOG} may be whole, their number is not known")
    *lines, torn = content.split(b"\n")
    before, number = BEGINNING, 0
    for number, line in enumerate(lines, start=1):
        entry = _checked(line, number, before, folder / LOG)
        if number == int(head[0]) and entry.sha256 != head[1]:
            raise Damaged(f"{folder / LOG}, line {number}: is not the one that {HEAD} tells of")
        before = entry.sha256
        yield entry
    if number < int(head[0]):
        what = "is damaged" if torn else "is missing"
        raise Damaged(f"{folder / LOG}, line {number + 1}: {what}; {HEAD} tells of {head[0]} lines")
    if torn:
        yield torn


def _checked(line: bytes, number: int, before: str, path: Path) -> Entry:
    """A line that follows the one before, or an error that names it."""
    try:
        content = json.loads(line)
        entry = _entry(content)
        own = {key: value for key, value in content.items() if key != "sha256"}
        if entry.sha256 != _hash(own):
            raise Damaged(f"{path}, line {number}: was changed, its hash does not fit")
    except (ValueError, TypeError, RecursionError):
        raise Damaged(f"{path}, line {number}: is damaged, it is no line of this log") from None
    if entry.line != number:
        what = f"line {number} is missing" if entry.line > number else f"line {number} was put in"
        raise Damaged(f"{path}: {what}, there is line {entry.line} in its place")
    if entry.before != before:
        raise Damaged(f"{path}, line {number}: does not follow line {number - 1}, which is another one")
    return entry


def _entry(content: Mapping[str, Any]) -> Entry:
    entry = Entry(**content)
    kinds = {"line": int, "details": dict}
    for key, value in vars(entry).items():
        if type(value) is not kinds.get(key, str):
            raise TypeError(key)
    return entry


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
