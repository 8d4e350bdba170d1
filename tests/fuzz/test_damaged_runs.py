"""Damaged run folders that are resumed: the numbers of the undisturbed run, or one line that names the file.

Every file of a finished run and of one that was killed is damaged in turn: a bit turned over, cut off,
emptied, removed, continued by zeros, replaced by another file of the run. Never does a run end with rows
missing or other than they were.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sartor
from sartor.errors import SartorError
from sartor.runs.record import RunFolder
from sartor.runs.resume import resume

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "model": "softmax",
    "clients": 3,
    "rounds": 6,
    "evaluate": {"every": 2},
    "checkpoint": {"every": 2},
    "engine": {"name": "loop", "states": "disk"},
}
FLIPS, CUTS = 16, 5
"""Bits that are turned over, and places where it is cut off, of each file."""
LEAST = 369
"""Damaged folders in all, at least."""


class Killed(BaseException):
    """Ends a run at once, as a kill does: nobody catches it."""


class Kills(sartor.Observer):
    """Kills the run in a round after which there was a checkpoint."""

    def round(self, run: Any, row: Any) -> None:
        """Before the round is kept."""
        if row["round"] == 6:
            raise Killed


def made(folder: Path, kind: str) -> Path:
    """A run folder: finished, or killed in its last round."""
    if kind == "finished":
        sartor.run("scaffold", out=folder, **SETTINGS)
    else:
        with pytest.raises(Killed):
            sartor.run("scaffold", out=folder, observers=[Kills()], **SETTINGS)
    return folder


def numbers(folder: Path) -> tuple[Any, ...]:
    """What a finished run says, but for its times."""
    run = RunFolder.open(folder)
    rows = [{key: value for key, value in row.items() if "seconds" not in key} for row in run.rounds]
    told = {key: value for key, value in run.summary.items() if key != "seconds"}
    models = {name: value.tolist() for name, value in run.models.items()}
    return rows, run.clients, told, models


def damages(folder: Path) -> Iterator[tuple[str, Path, bytes | None]]:
    """What is done, to which file, and what it holds then; None: it is removed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for path, other in zip(files, [*files[1:], files[0]], strict=True):
        content, name = path.read_bytes(), path.relative_to(folder)
        chance = random.Random(str(name))
        for _ in range(FLIPS):
            place = chance.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            yield f"bit {place}", name, bytes(flipped)
        for part in range(CUTS):
            yield f"cut at {len(content) * part // CUTS}", name, content[: len(content) * part // CUTS]
        yield "continued", name, content + bytes(64)
        yield f"is {other.relative_to(folder)}", name, other.read_bytes()
        if path.name == "config.toml":  # the one number that a run may change
            for rounds in (b"2", b"4", b"7", b"66"):
                changed = content.replace(b"rounds = 6", b"rounds = " + rounds)
                yield f"rounds = {rounds.decode()}", name, changed
        yield "removed", name, None


@pytest.mark.nightly
def test_a_damaged_run_is_made_whole_or_refused_by_name(tmp_path: Path) -> None:
    expected = numbers(made(tmp_path / "undisturbed", "finished"))
    found: Counter[tuple[str, str]] = Counter()
    wrong = []
    for kind in ("finished", "killed"):
        whole = made(tmp_path / kind, kind)
        for number, (what, name, content) in enumerate(damages(whole)):
            folder = shutil.copytree(whole, tmp_path / f"{kind}-{number}")
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_bytes(content)
            outcome, told = outcome_of(folder, expected)
            found[kind, outcome] += 1
            if outcome == "wrong":
                wrong.append(f"{kind}, {name}, {what}: {told}")
            shutil.rmtree(folder)
    print(dict(found))  # the figures of docs/security.md
    assert not wrong, "\n".join(wrong)
    assert found.total() >= LEAST


def outcome_of(folder: Path, expected: tuple[Any, ...]) -> tuple[str, str]:
    """How the resumption of a damaged folder ended: whole, refused, or wrong, and why."""
    try:
        resume(folder)
        after = numbers(folder)
    except SartorError as error:
        told = str(error)
        names = [path.name for path in itertools.chain([folder], folder.rglob("*"))]
        named = str(folder) in told or any(name in told for name in names)
        return ("refused" if named and "\n" not in told else "wrong"), told
    except Exception as error:  # a traceback for whoever resumes
        return "wrong", f"{type(error).__name__}: {error}"
    return ("whole", "") if after == expected else ("wrong", "ended with other numbers")
