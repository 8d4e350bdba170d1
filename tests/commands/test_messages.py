"""What goes wrong is told in one line, also where the disk or a number is at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sartor
from sartor.commands.main import app
from sartor.errors import DataError, SartorError
from sartor.runs.record import RunFolder


def told(*words: str) -> str:
    """The one line that a refused command ends with."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("sartor: ")
    return line


@pytest.mark.parametrize("kind", [SartorError, DataError])
def test_a_message_is_one_line_whatever_is_in_it(kind: type[SartorError]) -> None:
    assert str(kind("a\n  b\r\nc\x1b[0m\0")) == r"a b c\x1b[0m\x00"


@pytest.mark.parametrize("setting", ["local.epochs=1000000000000000000", f"local.steps={2**62}"])
def test_numbers_beyond_all_use_are_refused(setting: str) -> None:
    assert "must be at least 0, at most" in told("run", "fedavg", setting)


def test_a_network_beyond_all_memory_is_refused() -> None:
    assert "GB of memory are free; take a smaller one" in told("run", "fedavg", "model.hidden=10000000000")


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    words = ["run", "fedavg", "rounds=1", "--out", str(tmp_path / ("x" * 300))]
    assert "File name too long" in told(*words)
    for command in ("resume", "report", "evaluate"):
        assert "File name too long" in told(command, "y" * 300)
    assert "File name too long" in told("run", "fedavg", "data.path=" + "z" * 300)


def test_a_list_of_seeds_beside_a_seed_is_refused(tmp_path: Path) -> None:
    words = ("--algorithms", "fedavg", "--seed", "3", "--seeds", "1,2")
    for command in ("compare", "search"):
        assert "--seed 3: the seeds are the list 1,2; give one of the two" in told(command, *words)
    (tmp_path / "e.toml").write_text("[compare]\nseeds = [4, 5]\n")
    assert "the list 4,5" in told(
        "compare", str(tmp_path / "e.toml"), "--seed", "3", "--algorithms", "fedavg"
    )


def test_a_run_that_cannot_be_changed_is_not_extended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    sartor.run("fedavg", data="digits", model="softmax", clients=2, rounds=1, out=out)
    summary = (out / "summary.json").read_bytes()
    (out / "summary.json").unlink()
    (out / "summary.json").mkdir()  # as root no mode keeps anybody from writing; this does
    assert f"{out}: cannot be written" in told("resume", str(out), "--rounds", "3")
    (out / "summary.json").rmdir()
    (out / "summary.json").write_bytes(summary)
    assert RunFolder.open(out).summary["rounds"] == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": "b"}', "\0"])
def test_a_damaged_list_of_servers_is_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("flwr")
    (tmp_path / "known.json").write_text(text)
    (tmp_path / "mine.npz").touch()
    words = ("join", "127.0.0.1:1", "--data", str(tmp_path / "mine.npz"), "--state", str(tmp_path))
    assert f"{tmp_path / 'known.json'}: damaged; remove it" in told(*words)


def test_the_packages_of_a_run_are_known_by_their_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that an installed package adds is recorded as one that was imported by name is."""
    from sartor import extensions
    from sartor.algorithms import base
    from sartor.runs.resume import resume

    text = (
        "from sartor import register\nfrom sartor.algorithms.references.fedavg import FedAvg\n"
        "@register\nclass Theirs(FedAvg):\n    'FedAvg.'\n    name = 'theirs-{0}'\n"
    )
    package = tmp_path / "sartor_theirs.py"
    package.write_text(text.format("x"))
    info = tmp_path / "sartor_theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sartor_theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sartor.algorithms]\ntheirs = sartor_theirs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(base._REGISTRY, "_loaded", False)
    monkeypatch.setattr(base._REGISTRY, "_known", dict(base._REGISTRY._known))
    out = tmp_path / "run"
    sartor.run("theirs-x", data="digits", model="softmax", clients=2, rounds=1, out=out)
    (code,) = json.loads((out / "environment.json").read_text())["imports"]
    assert code["source"] == "sartor_theirs"
    assert code["sha256"] == extensions.read_code("sartor_theirs").sha256
    assert resume(out).summary["rounds"] == 1
    package.write_text(text.format("x") + "# changed\n")
    monkeypatch.delitem(extensions._IMPORTED, "sartor_theirs")
    with pytest.raises(SartorError, match="was made with another sartor_theirs"):
        resume(out)
    monkeypatch.delitem(__import__("sys").modules, "sartor_theirs")


def test_imports_that_are_no_texts_are_refused() -> None:
    assert "imports: expected a list, got [[]]" in told("run", "fedavg", "imports=[[]]")
