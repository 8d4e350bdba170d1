"""The scripts in examples/ run as they stand, and do what their first lines say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sartor.algorithms import base

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base._REGISTRY, "_known", dict(base._REGISTRY._known))


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_methods_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("compare_methods", capsys)
    scores = dict(re.findall(r"^(\w+) +(0\.\d+) +\(", out, re.MULTILINE))
    assert set(scores) == {"fedavg", "ditto", "separate"}
    assert float(scores["ditto"]) > float(scores["separate"])  # sharing helps
    assert Path("comparison/comparison.json").exists()


def test_own_data_and_an_own_network_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    found = [float(number) for number in re.findall(r"\d\.\d+", printed("own_data_and_model", capsys))]
    assert len(found) == 3
    assert min(found) > 0.6  # of three classes
    assert Path("north.pt").exists()


def test_an_own_method_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (accuracy,) = re.findall(r"'shared_local': (0\.\d+)", printed("own_method", capsys))
    assert float(accuracy) > 0.5


def test_an_observer_stops_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("early_stop", capsys)
    worst = [float(number) for number in re.findall(r"worst tenth (0\.\d+)\n", out)]
    assert len(worst) < 50
    assert worst[-1] >= 0.8 > max(worst[:-1])
    assert f"{len(worst)} rounds" in out


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_short_and_says_how_it_is_run(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert f"\n    python examples/{file.name}\n" in text.split('"""')[1]


def test_every_example_is_run() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    assert FILES
    assert all(f'printed("{file.stem}"' in tests for file in FILES)
