"""The audit log of a node: every line is what was written, in its place, and a kill is no forgery."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sartor.commands.main import app
from sartor.remote.audit import BEGINNING, HEAD, LOG, Audit, Damaged, Entry, answered, introduced, read


def filled(folder: Path, lines: int = 4) -> list[bytes]:
    audit = Audit(folder)
    for number in range(lines):
        audit.add("answered", f"Sent {number}.", exchange=number)
    return (folder / LOG).read_bytes().splitlines(keepends=True)


def told(folder: Path) -> str:
    with pytest.raises(Damaged) as error:
        list(read(folder))
    done = CliRunner().invoke(app, ["audit", str(folder)])
    assert done.exit_code == 2
    assert str(error.value) in done.stderr
    return str(error.value)


def test_lines_are_chained_and_shown(tmp_path: Path) -> None:
    filled(tmp_path)
    entries = [entry for entry in read(tmp_path) if isinstance(entry, Entry)]
    assert [entry.line for entry in entries] == [1, 2, 3, 4]
    assert [entry.before for entry in entries] == [BEGINNING, *(entry.sha256 for entry in entries[:-1])]
    done = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert done.exit_code == 0
    assert [line.split("  ")[-1] for line in done.stdout.splitlines()[:4]] == [f"Sent {n}." for n in range(4)]
    assert done.stdout.splitlines()[-1] == f"4 lines, whole; the last has SHA-256 {entries[-1].sha256}"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / LOG, tmp_path / HEAD)} == {0o600}
    as_json = CliRunner().invoke(app, ["audit", str(tmp_path), "--json"])
    assert [json.loads(line)["details"]["exchange"] for line in as_json.stdout.splitlines()] == [0, 1, 2, 3]


def test_another_process_goes_on_with_the_chain(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    filled(tmp_path, 2)
    assert Audit(tmp_path).answered == 4
    assert len(list(read(tmp_path))) == 4


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_a_line_that_is_taken_out_changed_or_put_in_is_named(tmp_path: Path, line: int) -> None:
    lines = filled(tmp_path)

    def store(changed: list[bytes]) -> None:
        (tmp_path / LOG).write_bytes(b"".join(changed))

    store(lines[: line - 1] + lines[line:])
    assert f"line {line}" in told(tmp_path)
    assert "missing" in told(tmp_path)
    store([*lines[: line - 1], lines[line - 1].replace(b"Sent", b"Told"), *lines[line:]])
    assert f"line {line}: was changed" in told(tmp_path)
    store([*lines[: line - 1], lines[line - 1], lines[line - 1], *lines[line:]])
    assert f"line {line + 1} was put in" in told(tmp_path)
    store([*lines[: line - 1], b"{}\n", *lines[line:]])
    assert f"line {line}: is damaged" in told(tmp_path)


def test_lines_of_another_log_do_not_fit(tmp_path: Path) -> None:
    mine = filled(tmp_path / "mine")
    Audit(tmp_path / "other").add("started", "Something else.")
    other = filled(tmp_path / "other", 3)
    (tmp_path / "mine" / LOG).write_bytes(mine[0] + other[1] + b"".join(mine[2:]))
    assert "line 2: does not follow line 1" in told(tmp_path / "mine")
    (tmp_path / "mine" / LOG).write_bytes(b"".join(other))
    assert "line 4: is not the one that audit.head tells of" in told(tmp_path / "mine")


def test_a_kill_at_any_byte_leaves_a_torn_line_and_no_forgery(tmp_path: Path) -> None:
    lines = filled(tmp_path, 2)
    head = (tmp_path / HEAD).read_bytes()
    Audit(tmp_path).add("answered", "The last.")
    whole = (tmp_path / LOG).read_bytes()
    first = len(b"".join(lines))
    for length in range(first, len(whole) + 1, 61):
        (tmp_path / LOG).write_bytes(whole[:length])
        (tmp_path / HEAD).write_bytes(head)  # written after the line
        *entries, last = read(tmp_path)
        torn = 0 < length - first < len(whole) - first
        assert isinstance(last, bytes) is torn
        assert CliRunner().invoke(app, ["audit", str(tmp_path)]).exit_code == 0
        audit = Audit(tmp_path)
        assert audit.last is not None
        if torn:
            assert len(entries) == 2
            assert audit.last.event == "cut"
            assert f"{length - first} bytes" in audit.last.words
        audit.add("ended", "The run is over.")
        assert len(list(read(tmp_path))) >= 3
    (tmp_path / LOG).write_bytes(whole[: first + 20])
    (tmp_path / HEAD).write_text(f"3 {'0' * 64}\n")
    assert "line 3: is damaged; audit.head tells of 3 lines" in told(tmp_path)


def test_a_damaged_log_lets_no_node_start(tmp_path: Path) -> None:
    lines = filled(tmp_path)
    (tmp_path / LOG).write_bytes(b"".join(lines[1:]))
    with pytest.raises(Damaged, match="line 1 is missing"):
        Audit(tmp_path)
    (tmp_path / LOG).write_bytes(b"".join(lines))
    (tmp_path / HEAD).write_bytes(b"\xff")
    with pytest.raises(Damaged):
        Audit(tmp_path)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert (done.exit_code, "no node's state folder" in done.stderr) == (2, True)


def test_words_say_what_left() -> None:
    reply = {
        "names": ["oslo"],
        "counts": {"train": [80], "test": [20]},
        "labels": ["ill", "well"],
        "number": 80,
    }
    words = introduced(reply)
    assert "1 client:" in words
    assert "80 train, 20 test" in words
    assert "names of their classes" in words
    assert "mean and spread of their features" in words
    assert "names of their classes" not in introduced({**reply, "labels": None})
    header = {"function": "m:train", "round": 3, "exchange": 7, "transformed": {}}
    words, details = answered(
        {**header, "transformed": {"a": 1}}, ["oslo"], {"sent": {"delta": torch.zeros(1, 15)}}
    )
    assert words == (
        "Trained 1 client by m:train in round 3; sent for each of them delta (15 numbers), "
        "after the transforms of the experiment."
    )
    assert details["sent"] == {"delta": 15}
    words, _ = answered({**header, "function": "evaluation_of/test/confusion/m:train"}, ["oslo"], {})
    assert words.startswith("Evaluated a model on the test samples of 1 client ")
