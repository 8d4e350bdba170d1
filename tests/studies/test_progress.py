"""The tally of many runs: how many of how many, and the time that all of them still take."""

from __future__ import annotations

import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from sartor.studies.comparison import compare
from sartor.studies.progress import PAUSE, Tally


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that is set by hand."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    return now


def at(round: int, rounds: int = 100) -> Any:
    return SimpleNamespace(round=round, experiment=SimpleNamespace(algorithm="fedavg", rounds=rounds))


def test_rounds_of_the_current_run_say_what_is_left_of_all(clock: SimpleNamespace) -> None:
    tally = Tally(4, 400)
    assert tally.time_left() is None
    with tally.making(100):
        tally.start(at(0))
        clock.seconds += 10
        tally.round(at(50), {})
        assert tally.time_left() == pytest.approx(350 * 10 / 50)
        clock.seconds += 10
        tally.round(at(100), {})
    assert tally.time_left() == pytest.approx(300 * 20 / 100)
    tally.found(100)  # a run that was made earlier takes no time
    assert tally.time_left() == pytest.approx(200 * 20 / 100)
    tally.skip(1, 100)
    assert (tally.time_left(), tally.done) == (pytest.approx(100 * 20 / 100), 1)


def test_a_run_that_goes_on_has_fewer_rounds_left(clock: SimpleNamespace) -> None:
    tally = Tally(2, 200)
    with tally.making(100):
        tally.start(at(60))
        clock.seconds += 5
        tally.round(at(70), {})
        assert tally.time_left() == pytest.approx(0.5 * (30 + 100))


def test_seeds_in_one_batch_are_played_at_once(clock: SimpleNamespace) -> None:
    tally = Tally(4, 400)
    with tally.making(100):
        tally.together(3)
        tally.start(at(0))
        clock.seconds += 30
        tally.round(at(50), {})
        assert tally.time_left() == pytest.approx(30 / 150 * 250)
        clock.seconds += 30
        tally.round(at(100), {})
    assert tally.time_left() == pytest.approx(60 / 300 * 100)


def test_a_failed_run_is_done_too(clock: SimpleNamespace) -> None:
    tally = Tally(2, 200)
    with suppress(ValueError), tally.making(100):
        tally.start(at(0))
        clock.seconds += 2
        tally.round(at(20), {})
        raise ValueError("diverged")
    assert tally.time_left() == pytest.approx(100 * 2 / 20)


def test_lines_tell_the_run_the_place_and_the_rest(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally(3, 300)
    tally.place = "non-IID"
    with tally.making(100):
        tally.start(at(0))
        clock.seconds += PAUSE / 2
        tally.round(at(10), {})  # too early for a line
        clock.seconds += PAUSE
        tally.round(at(30), {})
    tally.tell("fedavg, seed 0", "done")
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3: fedavg, round 30 of 100; about 14 minutes left",
        "1 of 3: fedavg, seed 0, non-IID: done; about 10 minutes left",
    ]


def test_a_comparison_counts_its_runs(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"clients": 4, "rounds": 1, "model": "softmax", "references": False}
    for ends in (["done"] * 4, ["reused"] * 4):
        compare(["fedavg", "fedprox"], **asked, seeds=2, out=tmp_path, progress=True)
        lines = capsys.readouterr().err.splitlines()
        told = [line for line in lines if " of 4: " in line]
        assert [line.partition(" of ")[0] for line in told] == ["1", "2", "3", "4"]
        assert [line.partition(";")[0].rpartition(": ")[2] for line in told] == ends
