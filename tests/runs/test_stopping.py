"""Runs that end early: at the round that their own recorded numbers say, whatever comes between."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sartor
from helpers import RAGGED, classification, quadratics
from sartor.commands.main import app
from sartor.data.clients import ClientData
from sartor.errors import SettingError
from sartor.runs.experiment import from_mapping
from sartor.runs.record import RunFolder
from sartor.runs.result import Result
from sartor.runs.resume import resume
from sartor.runs.run import Run
from sartor.runs.settings import Stop
from sartor.runs.stopping import reason_to_stop

ROUNDS = 16
cli = CliRunner()


@pytest.fixture(scope="module")
def data() -> ClientData:
    made = classification(RAGGED, shape=(6,), classes=4)
    return dataclasses.replace(made, validation=classification(RAGGED, shape=(6,), classes=4, seed=5).test)


@pytest.fixture(scope="module")
def whole(data: ClientData) -> Result:
    """A run that does not stop."""
    return go(data)


def go(data: ClientData, out: Path | None = None, algorithm: str = "fedavg", **given: Any) -> Result:
    """Of large steps, so that the numbers go up and down."""
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "engine": "loop",
        "model": "softmax",
        "local": {"batch": 8},
        "cohort": {"count": 2},
        "hyper": {"lr": 0.5},
        "checkpoint": {"every": 1},
        "store": out is not None,
        "out": out,
        **given,
    }
    return sartor.run(algorithm, data=data, **settings)


def written_out(values: list[float], larger: bool, patience: int, target: float | None) -> int | None:
    """The number of the evaluation to stop after, from the definition."""
    for number in range(1, len(values) + 1):
        so_far = values[:number] if larger else [-value for value in values[:number]]
        aim = None if target is None else target if larger else -target
        if aim is not None and so_far[-1] >= aim:
            return number
        if patience and number > patience and max(so_far[-patience:]) <= max(so_far[:-patience]):
            return number
    return None


def curve(result: Result, metric: str) -> list[float]:
    cell, score = metric.split(".")
    return [row["evaluation"][cell][score] for row in result.rounds if "evaluation" in row]


@pytest.mark.parametrize(
    ("metric", "patience"),
    [
        ("shared_validation.accuracy", 2),
        ("shared_pooled.loss", 1),
        ("shared_local.macro_f1", 2),
        ("shared_local.accuracy_weighted", 3),
    ],
)
def test_a_run_stops_where_its_numbers_have_not_improved(
    data: ClientData, whole: Result, metric: str, patience: int
) -> None:
    expected = written_out(curve(whole, metric), not metric.endswith("loss"), patience, None)
    assert expected is not None
    assert patience < expected < ROUNDS  # so that there is something to test
    found = go(data, stop={"patience": patience, "metric": metric})
    assert found.summary["stopped"]["round"] == found.summary["rounds"] == expected
    assert metric in found.summary["stopped"]["reason"]
    assert found.summary["model_sha256"] == go(data, rounds=expected).summary["model_sha256"]


@pytest.mark.parametrize("metric", ["shared_local.accuracy", "shared_pooled.loss"])
def test_a_run_stops_where_the_target_is_reached(data: ClientData, whole: Result, metric: str) -> None:
    values = curve(whole, metric)
    larger = not metric.endswith("loss")
    best = sorted(values, reverse=larger)[4]
    expected = written_out(values, larger, 0, best)
    assert expected is not None
    assert 1 < expected < ROUNDS
    found = go(data, stop={"target": best, "metric": metric})
    assert found.summary["stopped"]["round"] == expected
    assert curve(found, metric)[-1] == values[expected - 1]
    missed = go(data, stop={"target": max(values) + 1 if larger else min(values) / 2, "metric": metric})
    assert missed.summary["stopped"] is None
    assert missed.summary["rounds"] == ROUNDS


def test_patience_counts_evaluations_not_rounds(data: ClientData) -> None:
    metric = "shared_pooled.loss"
    values = curve(go(data, rounds=30), metric)
    expected = written_out(values[2::3], False, 1, None)
    assert expected is not None
    found = go(data, rounds=30, evaluate={"every": 3}, stop={"patience": 1, "metric": metric})
    assert found.summary["rounds"] == 3 * expected < 30


@pytest.mark.parametrize(
    ("algorithm", "validated", "expected"),
    [
        ("fedavg", True, "shared_validation.accuracy"),
        ("fedavg", False, "shared_local.accuracy"),
        ("separate", True, "personal_validation.accuracy"),
        ("ditto", False, "personal_local.accuracy"),
    ],
)
def test_validation_data_and_personal_models_are_watched_where_there_are_any(
    data: ClientData, algorithm: str, validated: bool, expected: str
) -> None:
    own = data if validated else dataclasses.replace(data, validation=None)
    found = go(own, algorithm=algorithm, rounds=3, stop={"target": 0.0})
    assert found.summary["stopped"]["reason"].startswith(f"{expected} is ")
    assert found.summary["rounds"] == 1


def test_without_classes_the_loss_is_watched() -> None:
    task, data = quadratics(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1))
    found = sartor.run(
        "fedavg", data=data, model=task, rounds=50, store=False, hyper={"lr": 0.5}, stop={"target": 0.51}
    )
    # The mean loss is ½ (w − 2)² + ½, and a round halves w − 2, which begins as −2.
    assert found.summary["rounds"] == 4
    assert "shared_local.loss" in found.summary["stopped"]["reason"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({1: 0.5, 2: None, 3: None, 4: 0.5}, None),  # of nothing nothing follows
        ({1: 0.5, 2: None, 3: 0.5, 4: 0.4}, "0.5 of round 1"),
        ({1: 0.5, 2: float("nan"), 3: 0.6, 4: 0.6, 5: 0.6}, "0.6 of round 3"),
        ({}, None),
    ],
)
def test_an_evaluation_without_a_value_does_not_count(
    values: Mapping[int, float | None], expected: str | None
) -> None:
    reason = reason_to_stop(values, "shared_local.accuracy", Stop(patience=2))
    assert reason is None if expected is None else expected in str(reason)


# Interruptions ---------------------------------------------------------------------------------------------

STOP: dict[str, Any] = {"patience": 2}


class Crash(BaseException):
    """The process ends here, as far as the run can tell."""


class CrashAfter:
    def __init__(self, round: int) -> None:
        self._round = round

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        if run.round == self._round:
            raise Crash


def numbers(result: Result) -> dict[str, Any]:
    assert result.folder is not None
    rows = [{**row, "seconds": 0, "evaluation_seconds": 0} for row in RunFolder.open(result.folder).rounds]
    return {"summary": {**result.summary, "seconds": 0}, "rows": rows, "clients": result.clients}


def test_a_killed_run_stops_in_the_same_round(data: ClientData, tmp_path: Path) -> None:
    class Keeps(sartor.Observer):
        def round(self, run: Run, row: Mapping[str, Any]) -> None:
            shutil.copytree(tmp_path / "whole", tmp_path / f"cut {run.round}")

    whole = go(data, tmp_path / "whole", stop=STOP, observers=[Keeps()])
    last = whole.summary["rounds"]
    assert 3 < last < ROUNDS
    for at in range(1, last + 1):
        assert numbers(resume(tmp_path / f"cut {at}", data=data)) == numbers(whole)


@pytest.mark.parametrize("method", ["models", "summary"])
def test_a_run_killed_after_its_last_checkpoint_only_ends_again(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole = go(data, tmp_path / "whole", stop=STOP)
    usual = getattr(Run, method)

    def crashing(self: Run) -> Any:
        raise Crash

    monkeypatch.setattr(Run, method, crashing)
    with pytest.raises(Crash):
        go(data, tmp_path / "cut", stop=STOP)
    monkeypatch.setattr(Run, method, usual)
    assert numbers(resume(tmp_path / "cut", data=data)) == numbers(whole)


def test_a_stopped_run_is_finished_and_no_longer_run_by_more_rounds(data: ClientData, tmp_path: Path) -> None:
    """A run of more rounds would have stopped in the same one."""
    stopped = go(data, tmp_path / "run", stop=STOP)
    assert numbers(resume(tmp_path / "run", data=data)) == numbers(stopped)
    longer = resume(tmp_path / "run", data=data, rounds=2 * ROUNDS)
    assert numbers(longer) == numbers(stopped)
    assert RunFolder.open(tmp_path / "run").finished


def test_the_evaluation_at_a_former_end_does_not_count(data: ClientData, tmp_path: Path) -> None:
    """Of a run of 7 rounds that is extended, evaluated every second round: what 7 gave decides nothing."""
    given: dict[str, Any] = {
        "evaluate": {"every": 2},
        "stop": {"patience": 1, "metric": "shared_pooled.loss"},
    }
    whole = go(data, **given)
    last = whole.summary["rounds"]
    for former in range(1, last, 2):
        go(data, tmp_path / f"{former}", **{**given, "rounds": former})
        longer = resume(tmp_path / f"{former}", data=data, rounds=ROUNDS)
        assert longer.summary["rounds"] == last
        assert longer.summary["model_sha256"] == whole.summary["model_sha256"]


# Mistakes and the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "metric"),
    [
        ("fedavg", "personal_local.accuracy"),
        ("fedavg", "shared_local.acuracy"),
        ("fedavg", "accuracy"),
        ("fedavg", "shared_local"),
        ("separate", "shared_pooled.loss"),
    ],
)
def test_a_metric_the_run_does_not_have_is_refused_with_those_it_has(
    data: ClientData, tmp_path: Path, algorithm: str, metric: str
) -> None:
    with pytest.raises(SettingError) as refused:
        go(data, tmp_path / "run", algorithm=algorithm, stop={"patience": 1, "metric": metric})
    cell = "shared_validation" if algorithm == "fedavg" else "personal_validation"
    for word in (f"stop.metric = '{metric}': not measured", cell, "accuracy_weighted", "macro_f1", "loss"):
        assert word in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_every_metric_that_is_named_is_one_to_be_had(data: ClientData) -> None:
    with pytest.raises(SettingError) as refused:
        go(data, algorithm="ditto", stop={"patience": 1, "metric": "none"})
    cells, scores = (part.split(")")[0].split(", ") for part in str(refused.value).split("(")[1:3])
    evaluation = go(data, algorithm="ditto", rounds=1).rounds[-1]["evaluation"]
    assert sorted(cells) == sorted(evaluation)
    for cell in cells:
        assert all(isinstance(evaluation[cell][score], float) for score in scores)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": {"metric": "shared_local.loss"}}, "stop.metric: watched for nothing"),
        ({"stop": {"patience": 2}, "evaluate": {"every": 0}}, "stop: with evaluate.every = 0"),
        ({"stop": {"target": 0.5}, "evaluate": {"every": 0}}, "stop: with evaluate.every = 0"),
        ({"stop": {"patience": -1}}, "stop.patience: must be at least 0"),
        ({"stop": {"target": "high"}}, "stop.target: expected a finite number"),
        ({"stop": {"pacience": 1}}, "did you mean stop.patience"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        from_mapping(given)
    assert message in str(refused.value)


def test_the_command_line_stops_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "fedavg", "--clients", "4", "--rounds", "9", "model.name=softmax", "stop.target=0.01"]
    ended = cli.invoke(app, [*words, "--out", "run"])
    assert ended.exit_code == 0, ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith("stopped after round 1: "))
    assert "shared_local.accuracy is 0." in line
    again = cli.invoke(app, ["resume", "run"])
    assert "finished, stopped after round 1" in again.stderr
    assert line in again.stdout
    summary = json.loads(cli.invoke(app, ["resume", "run", "--json"]).stdout)
    assert summary["stopped"]["round"] == 1
    wrong = cli.invoke(app, [*words, "stop.metric=shared_local.gain", "--out", "wrong"])
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("sartor: stop.metric = 'shared_local.gain': not measured in this run")
    assert not Path("wrong").exists()


def test_a_comparison_takes_seeds_that_stop_each_in_its_own_round(tmp_path: Path, data: ClientData) -> None:
    made = sartor.compare(
        ["fedavg", "separate"],
        data=data,
        model="softmax",
        seeds=4,
        references=False,
        rounds=ROUNDS,
        out=tmp_path,
        local={"batch": 8},
        cohort={"count": 2},
        hyper={"lr": 0.5},
        stop={"patience": 1},
    )
    rounds = {json.loads(path.read_text())["rounds"] for path in tmp_path.glob("fedavg-s*/summary.json")}
    assert len(rounds) > 1  # else there is nothing to test
    assert max(rounds) < ROUNDS
    assert {method.label for method in made.methods} == {"fedavg", "separate"}
    sartor.write_report([tmp_path], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
