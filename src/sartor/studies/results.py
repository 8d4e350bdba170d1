"""Measured numbers on file: a line of JSON for each, with what it takes to tell what they are of.

The first line is what all numbers of a file share (``about``: settings, seeds, command, hardware). Every
other line is one of them:

===========  =========================================================================================
key          what was measured, in the words of the script that did
method       the method
code         a hash of the method's source when it ran: see :func:`~sartor.algorithms.source.method_code`
fingerprint  of the experiment (:func:`sartor.runs.experiment.fingerprint`), of its first seed where there are
             several, with the settings of the version that ran it: one that has come or gone since makes
             another; null where the experiment cannot be written as settings alone
sartor       the version that ran it
date         the day it was measured
numbers      what came out
===========  =========================================================================================

>>> from tempfile import mkdtemp
>>> kept = Results(Path(mkdtemp()) / "mine.jsonl", {"seeds": [0]})
>>> kept.add("iid", {"accuracy": 0.5}, method="fedavg", experiment={"rounds": 3})
>>> Results(kept.path).numbers, Results(kept.path).stale()
({'iid': {'accuracy': 0.5}}, {})
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sartor.algorithms import registered
from sartor.algorithms.source import method_code
from sartor.errors import SartorError
from sartor.files import write
from sartor.runs.experiment import fingerprint, from_mapping
from sartor.runs.record import environment, to_json


@dataclass(frozen=True)
class Record:
    """A line of a file."""

    key: str
    method: str
    code: str
    fingerprint: str | None
    sartor: str
    date: str
    numbers: dict[str, Any]


class Results:
    """A file of measured numbers, read if it is there and written whole after each that is added."""

    def __init__(self, path: Path, about: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.about = dict(about or {})
        self.records: dict[str, Record] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        number = 0
        try:
            with self.path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        self.about = json.loads(line)["about"] | self.about
                    else:
                        record = Record(**json.loads(line))
                        self.records[record.key] = record
        except (ValueError, KeyError, TypeError) as error:
            raise SartorError(f"{self.path}, line {number}: not a file of results ({error})") from None

    @property
    def numbers(self) -> dict[str, dict[str, Any]]:
        """What was measured, by key."""
        return {key: record.numbers for key, record in self.records.items()}

    def add(
        self,
        key: str,
        numbers: Mapping[str, Any],
        *,
        method: str,
        experiment: Mapping[str, Any] | None = None,
    ) -> None:
        """Store what was measured of a method in an experiment, in place of what was there under this key."""
        made = None
        if experiment is not None:
            made = fingerprint(from_mapping({**experiment, "algorithm": method}))
        today = datetime.now(UTC).date().isoformat()
        version = str(environment()["sartor"])
        self.records[key] = Record(key, method, method_code(method), made, version, today, dict(numbers))
        self.write()

    def write(self) -> None:
        """Write the file, a line each."""
        lines = [to_json({"about": self.about}), *(to_json(asdict(each)) for each in self.records.values())]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, ("\n".join(lines) + "\n").encode())

    def stale(self) -> dict[str, str]:
        """Methods whose source has changed since their numbers were taken, with the day of the oldest."""
        found: dict[str, str] = {}
        for record in self.records.values():
            if record.method in registered() and record.code != method_code(record.method):
                found[record.method] = min(record.date, found.get(record.method, record.date))
        return dict(sorted(found.items()))
