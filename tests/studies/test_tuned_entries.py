"""Entries whose hyper-parameters are chosen on validation data, with as many trials for every method."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sartor.algorithms import registered
from sartor.commands.main import app
from sartor.errors import SartorError
from sartor.runs import cost
from sartor.runs.experiment import Experiment
from sartor.runs.inputs import gather
from sartor.runs.record import RunFolder
from sartor.studies import library
from sartor.studies.entries import Tuning, entries, entry
from sartor.studies.forecast import forecast
from sartor.studies.library import failure_of
from sartor.studies.planning import planned
from sartor.studies.reproduction import reproduce

NAME = "sartor/leaderboard"
FEW: dict[str, Any] = {
    "methods": ["fedavg", "separate"],
    "columns": ["two classes"],
    "settings": {"rounds": 2, "data": {"clients": 6}, "model": {"name": "softmax"}},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stored(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_runs_have_the_hyper_parameters_that_were_best_on_validation_data() -> None:
    result = reproduce(NAME, **FEW, out="made")
    place = Path("made", result.comparisons[0])
    found, compared = stored(place / "search" / "search.json"), stored(place / "comparison.json")
    assert found["seeds"] == [100]
    assert result.seeds == (0,)
    for tuned, method in zip(found["methods"], compared["methods"], strict=True):
        assert len(tuned["trials"]) == 2
        scores = [trial["validation"]["mean"] for trial in tuned["trials"]]
        best = tuned["trials"][scores.index(max(scores))]["hyper"]["lr"]
        assert method["hyper"]["lr"] == best
    again = reproduce(NAME, **FEW, out="made")
    assert [number.ours for number in again.numbers] == [number.ours for number in result.numbers]
    trials = [
        trial for tuned in stored(place / "search" / "search.json")["methods"] for trial in tuned["trials"]
    ]
    assert all(run["reused"] for trial in trials for run in trial["runs"])


def test_trials_count_among_the_runs() -> None:
    work = planned(NAME, **FEW, seeds=3)
    assert (work.trials, work.runs, work.rounds) == (2, 2 * (2 + 3), 2 * (2 + 3) * 2)
    expected = forecast(NAME, **FEW, seeds=3)
    assert (expected.runs, expected.rounds) == (10, 20)
    assert [part.runs for part in expected.parts] == [5, 5]
    work = planned(NAME, scale="paper")
    assert work.runs == 40 * 6 * (4 + 3)


def test_trials_may_have_fewer_rounds_than_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    work = planned(NAME, scale="paper", seeds=1)
    assert work.rounds == 40 * 6 * (4 * 50 + 200)
    assert planned(NAME, scale="paper", seeds=1, settings={"rounds": 20}).rounds == 40 * 6 * 5 * 20
    monkeypatch.setattr(Tuning, "rounds_of", lambda self, runs: 1)
    result = reproduce(NAME, **FEW, out="made")
    place = Path("made", result.comparisons[0])
    trials = {len(run.read_text().splitlines()) for run in place.glob("search/*/rounds.jsonl")}
    runs = {len(run.read_text().splitlines()) for run in place.glob("*/rounds.jsonl")}
    assert (trials, runs) == ({1}, {2})
    shown = reproduce(NAME, **FEW, out="made", only_made=True)
    assert [number.ours for number in shown.numbers] == [number.ours for number in result.numbers]


def test_a_forecast_needs_no_rate_that_does_not_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are tried may be others than the one it is measured with."""
    rates: list[float] = []
    estimate = cost.estimate

    def noted(experiment: Experiment, **given: Any) -> dict[str, Any]:
        rates.append(experiment.hyper.lr)
        return estimate(experiment, **given)

    monkeypatch.setattr(cost, "estimate", noted)
    settings = {**FEW["settings"], "hyper": {"lr": 1e30}}
    expected = forecast("comfed/table4", methods=["fedavg"], settings=settings)
    assert set(rates) == {1e30}
    assert expected.seconds > 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_that_diverged_is_not_made_again(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    at = entry(NAME).scales["small"]
    assert at.tuning is not None
    monkeypatch.setitem(at.tuning.every, "lr", [1e30, 0.1])
    result = reproduce(NAME, **FEW, out="made", jobs=jobs)
    place = Path("made", result.comparisons[0], "search")
    failed = [RunFolder.open(file.parent) for file in place.glob("*/diverged.json")]
    assert {run.experiment.algorithm for run in failed} == {"fedavg", "separate"}
    assert all("is not finite" in str(failure_of(run)) and not run.finished for run in failed)
    assert not [*place.glob("*/checkpoints/*")]
    for name in ("execute", "execute_setup", "resume"):
        monkeypatch.setattr(library, name, None)
    for only_made in (False, True):
        again = reproduce(NAME, **FEW, out="made", only_made=only_made)
        assert [number.ours for number in again.numbers] == [number.ours for number in result.numbers]
    assert sum(part.seconds for part in forecast(NAME, **FEW, out="made").parts) == 0


def test_a_run_that_diverged_is_tried_again_once_its_method_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"rounds": 2, "data": {"name": "digits", "clients": 4}, "hyper": {"lr": 1e30}}
    inputs = gather({"experiment": {"algorithm": "fedavg", **settings}}).inputs()
    runs = library.Runs(Path("made"))
    for _ in range(2):
        assert isinstance(runs.attempt(inputs, "fedavg"), library.Failure)
    run = runs.stored(inputs)
    assert run is not None
    assert library.has_ended(run)
    monkeypatch.setattr(library, "method_code", lambda name: "other")
    assert not library.has_ended(run)

    def again(path: Path, **how: Any) -> None:
        raise SartorError(f"{path} is tried again")

    monkeypatch.setattr(library, "resume", again)
    with pytest.raises(SartorError, match=f"{run.path} is tried again"):
        runs.get(inputs)


def test_every_method_has_as_many_trials() -> None:
    for each in entries():
        for at in each.scales.values():
            if at.tuning is None:
                continue
            assert set(at.tuning.methods) <= {*at.methods, *each.scales["paper"].methods}
            for label, row in at.methods.items():
                space = at.tuning.space(label)
                assert math.prod(len(values) for values in space.values()) == at.tuning.trials
                assert set(space) <= set(registered()[row.algorithm].Hyper.__dataclass_fields__)
                assert not set(space) & set(row.hyper)
            assert not set(at.tuning.seeds) & set(range(max(1, each.seeds)))  # no seed that is reported


def test_all_personal_methods_are_there_or_named() -> None:
    at = entry(NAME).scales["paper"]
    personal = {name for name, method in registered().items() if method.family == "personal"}
    ours = {name for name in personal if registered()[name].__module__.startswith("sartor.algorithms.")}
    left_out = ours - set(at.methods)
    assert all(name in at.note for name in left_out)
    assert {"fedavg", "fedupdate", "separate", "central"} <= set(at.methods)


def test_a_method_of_which_every_trial_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    at = entry(NAME).scales["small"]
    assert at.tuning is not None
    monkeypatch.setitem(at.tuning.methods, "fedavg", {"lr": [1e38, 1e37]})
    result = reproduce(NAME, **FEW)
    assert {number.method for number in result.numbers} == {"separate"}
    assert [(failure.label, failure.seed) for failure in result.failed] == [("fedavg", 100)]


def test_the_command_says_nothing_of_a_paper() -> None:
    words = ["--methods", "separate", "--columns", "two classes", "rounds=1", "data.clients=4"]
    done = CliRunner().invoke(app, ["reproduce", NAME, *words, "model.name=softmax"])
    assert done.exit_code == 0, done.output
    assert "The paper draws" not in done.stdout


def test_a_space_of_ones_own_stands_in_place_of_everyone_s() -> None:
    tuning = Tuning(every={"lr": [1, 2, 3], "mu": [1, 2]}, methods={"a": {"lr": [4, 5, 6]}})
    assert tuning.trials == 6
    assert tuning.space("a") == {"lr": [4, 5, 6], "mu": [1, 2]}
    assert tuning.space("b") == tuning.every
