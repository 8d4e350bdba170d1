"""Observers: what they are told and when, how they stop a run, and what happens when one of them fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sartor
from helpers import RAGGED, classification
from sartor.data.clients import ClientData
from sartor.errors import SartorError, SettingError
from sartor.runs.checkpoint import latest
from sartor.runs.record import RunFolder
from sartor.runs.result import Result
from sartor.runs.resume import resume
from sartor.runs.run import Run


@pytest.fixture(scope="module")
def data() -> ClientData:
    return classification(RAGGED, shape=(6,), classes=4)


def go(data: ClientData, *observers: Any, out: Path | None = None, **given: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": 4,
        "engine": "loop",
        "model": "softmax",
        "local": {"batch": 8},
        "cohort": {"count": 4},
        "checkpoint": {"every": 100},
        "store": out is not None,
        "out": out,
        **given,
    }
    algorithm = settings.pop("algorithm", "scaffold")
    return sartor.run(algorithm, data=data, observers=list(observers), **settings)


class Notes(sartor.Observer):
    """Writes down what it is told, and does something in one of its hooks after a round."""

    def __init__(self, hook: str = "", at: int = 0, act: Any = None) -> None:
        self.told: list[Any] = []
        self._hook, self._at, self._act = hook, at, act

    def _note(self, hook: str, run: Run) -> None:
        self.told.append((hook, run.round))
        if (hook, run.round) == (self._hook, self._at):
            self._act(run)

    def start(self, run: Run) -> None:
        self._note("start", run)

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        assert cells == run.evaluations[run.round]
        assert set(run.evaluated_clients["round"]) == {run.round}
        self._note("evaluation", run)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        assert row is run.rows[-1]
        assert row["round"] == run.round
        self._note("round", run)

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        self._note("end" if summary is not None else "broken off", run)
        self.summary = summary


class Failure(Exception):
    """Something in a user's own code."""


def fail(run: Run) -> None:
    raise Failure("no room\nfor more")


def stop(run: Run) -> None:
    run.stop("enough")
    run.stop("much more than enough")


# What is told ----------------------------------------------------------------------------------------------


def test_start_every_evaluation_every_round_and_the_end_are_told(data: ClientData) -> None:
    notes = Notes()
    result = go(data, notes, evaluate={"every": 3})
    assert notes.told == [
        ("start", 0),
        ("round", 1),
        ("round", 2),
        ("evaluation", 3),
        ("round", 3),
        ("evaluation", 4),
        ("round", 4),
        ("end", 4),
    ]
    assert notes.summary == result.summary
    assert result.summary["stopped"] is None


def test_observing_changes_no_number(data: ClientData, tmp_path: Path) -> None:
    watched, alone = go(data, Notes(), out=tmp_path / "one"), go(data, out=tmp_path / "two")
    assert watched.summary["model_sha256"] == alone.summary["model_sha256"]
    assert watched.clients == alone.clients
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        path.name for path in (tmp_path / "two").iterdir()
    )


def test_a_class_with_some_of_the_hooks_needs_no_base(data: ClientData) -> None:
    class Rows:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def round(self, run: Run, row: Mapping[str, Any]) -> None:
            self.rows.append(row)

    class Ends(sartor.Observer):
        def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
            self.summary = summary

    rows, ends = Rows(), Ends()
    result = go(data, rows, ends)
    assert rows.rows == result.rounds
    assert ends.summary == result.summary


def test_a_run_of_no_rounds_is_told_too(data: ClientData) -> None:
    notes = Notes()
    go(data, notes, rounds=0)
    assert notes.told == [("start", 0), ("evaluation", 0), ("round", 0), ("end", 0)]


def test_the_model_of_every_round_can_be_taken(data: ClientData) -> None:
    taken: list[dict[str, torch.Tensor]] = []

    class Take:
        def round(self, run: Run, row: Mapping[str, Any]) -> None:
            taken.append(run.state_dict())

    result = go(data, Take())
    final = result.state_dict()
    assert all(torch.equal(taken[-1][name], value) for name, value in final.items())
    assert any(not torch.equal(taken[0][name], value) for name, value in final.items())  # no view of the last
    with pytest.raises(SartorError, match=r"Take: its round, after round 1, failed.*no shared model"):
        go(data, Take(), algorithm="separate")


def test_a_resumed_run_tells_from_where_it_goes_on(data: ClientData, tmp_path: Path) -> None:
    go(data, out=tmp_path / "run", rounds=2)
    notes = Notes()
    sartor.resume(tmp_path / "run", rounds=4, data=data, observers=[notes])
    assert notes.told[0] == ("start", 2)
    assert [told for told in notes.told if told[0] == "round"] == [("round", 3), ("round", 4)]
    again = Notes()
    sartor.resume(tmp_path / "run", data=data, observers=[again])
    assert again.told == []  # nothing happens in a run that is read back


@pytest.mark.parametrize("broken", [False, True])
def test_the_bar_shows_where_the_run_is_and_ends_with_it(
    data: ClientData, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    before = set(threading.enumerate())
    if broken:
        with pytest.raises(SartorError):
            go(data, Notes("round", 2, fail), progress=True)
    else:
        go(data, progress=True)
    shown = capsys.readouterr().err
    assert "scaffold" in shown
    assert ("2/4" if broken else "4/4") in shown
    assert "shared_local accuracy 0." in shown
    for thread in set(threading.enumerate()) - before:
        if "Refresh" in type(thread).__name__:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("observers", "message"),
    [
        ([Notes], "Notes is a class; give Notes()"),
        ([print], "has no method to tell; define start, evaluation, round or end"),
        (Notes(), "give a list of them, got Notes"),
    ],
)
def test_what_cannot_be_told_anything_is_refused(
    data: ClientData, tmp_path: Path, observers: Any, message: str
) -> None:
    with pytest.raises(SettingError) as refused:
        sartor.run("fedavg", data=data, model="softmax", out=tmp_path / "run", observers=observers)
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


# Stopping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "at", "every"),
    [("round", 3, 0), ("round", 3, 2), ("round", 3, 1), ("evaluation", 2, 2), ("evaluation", 2, 1)],
)
def test_a_stopped_run_is_the_finished_run_of_that_many_rounds(
    data: ClientData, tmp_path: Path, hook: str, at: int, every: int
) -> None:
    notes = Notes(hook, at, stop)
    given: dict[str, Any] = {"evaluate": {"every": every}}
    found = go(data, notes, out=tmp_path / "run", rounds=9, **given)
    expected = go(data, out=tmp_path / "short", rounds=at, **given)
    assert found.summary["stopped"] == {"round": at, "reason": "enough"}
    assert found.summary["rounds"] == at
    for key in ("model_sha256", "accuracy", "last", "best_on_test", "bytes_up", "partition_hash"):
        assert found.summary[key] == expected.summary[key]
    assert found.clients == expected.clients
    folders = RunFolder.open(tmp_path / "run"), RunFolder.open(tmp_path / "short")
    assert folders[0].summary == {**found.summary}
    rows = [[{**row, "seconds": 0, "evaluation_seconds": 0} for row in folder.rounds] for folder in folders]
    assert rows[0] == rows[1]
    assert folders[0].clients == folders[1].clients
    assert all(torch.equal(folders[0].models[name], folders[1].models[name]) for name in folders[1].models)
    assert notes.told[-1] == ("end", at)
    assert notes.told.count(("evaluation", at)) == 1


def test_a_stopped_run_is_read_back_and_goes_on_if_it_is_extended(data: ClientData, tmp_path: Path) -> None:
    stopped = go(data, Notes("round", 2, stop), out=tmp_path / "run", rounds=5)
    again = resume(tmp_path / "run", data=data)
    assert again.summary == stopped.summary
    assert torch.equal(again.w, stopped.w)
    longer = resume(tmp_path / "run", data=data, rounds=6)
    whole = go(data, rounds=6)
    assert longer.summary["stopped"] is None
    assert longer.summary["model_sha256"] == whole.summary["model_sha256"]


def test_a_stop_at_the_start_ends_the_run_with_its_first_round(data: ClientData) -> None:
    result = go(data, Notes("start", 0, stop), evaluate={"every": 0})
    assert result.summary["stopped"] == {"round": 1, "reason": "enough"}
    assert [row["round"] for row in result.rounds] == [1]


def test_a_stop_in_the_last_round_is_no_early_end(data: ClientData) -> None:
    assert go(data, Notes("round", 4, stop)).summary["stopped"] is None


def test_a_stop_has_a_reason(data: ClientData) -> None:
    with pytest.raises(SartorError, match=r"run\.stop: give the reason as a text, got None"):
        go(data, Notes("round", 1, lambda run: run.stop(None)))


# Failing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hook", "saved"), [("start", None), ("round", 3), ("evaluation", 3), ("end", 4)])
def test_one_that_fails_ends_the_run_which_can_be_resumed(
    data: ClientData, tmp_path: Path, hook: str, saved: int | None
) -> None:
    """The round is stored and saved first, though it was not due; others are told that the run broke off."""
    failing, other = Notes(hook, {"start": 0, "end": 4}.get(hook, 3), fail), Notes()
    with pytest.raises(SartorError) as failed:
        go(data, failing, other, out=tmp_path / "run")
    assert isinstance(failed.value.__cause__, Failure)
    message = str(failed.value)
    assert message.startswith(
        f"observer Notes: its {hook}, after round {failing._at}, failed: Failure: no room;"
    )
    folder = RunFolder.open(tmp_path / "run")
    checkpoint = latest(folder)
    assert (None if checkpoint is None else checkpoint.round) == saved
    if hook == "end":
        assert "the run is complete" in message
        assert other.told[-1] == ("end", 4)
    else:
        assert not folder.finished
        assert len(folder.rounds) == (saved or 0)
        command = f"`sartor.resume({str(tmp_path / 'run')!r})`, with what was given in Python, "
        assert message.endswith(f"{command}goes on after round 3" if saved else "begins it again")
        assert other.told[-1:] == ([("broken off", 3)] if saved else [])
    whole, resumed = go(data), resume(tmp_path / "run", data=data)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert resumed.clients == whole.clients


def test_one_that_fails_is_told_no_more_in_this_run(data: ClientData) -> None:
    failing = Notes("evaluation", 2, fail)
    with pytest.raises(SartorError, match=r"after round 2, failed: Failure: no room$"):
        go(data, failing)
    assert failing.told[-1] == ("evaluation", 2)


def test_a_failure_at_a_broken_end_does_not_hide_what_ended_the_run(
    data: ClientData, caplog: pytest.LogCaptureFixture
) -> None:
    class Worse(sartor.Observer):
        def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
            fail(run)

    with caplog.at_level(logging.WARNING), pytest.raises(SartorError, match="of its reply is not finite"):
        go(data, Worse(), hyper={"lr": 1e30})
    assert "observer Worse: its end" in caplog.text


def test_a_run_refused_at_its_start_leaves_no_folder(data: ClientData, tmp_path: Path) -> None:
    with pytest.raises(SettingError):
        go(data, out=tmp_path / "new", stop={"patience": 1, "metric": "personal_local.accuracy"})
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    with pytest.raises(SettingError):
        go(data, out=tmp_path / "old", stop={"patience": 1, "metric": "personal_local.accuracy"})
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["notes.txt"]
