"""Several entries that are asked for at once: each gives the numbers that it gives by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sartor.algorithms import registered
from sartor.commands.main import app
from sartor.errors import SartorError
from sartor.studies import forecast, reproduction
from sartor.studies.comparison import NothingFinished
from sartor.studies.planning import NothingLeft, planned_all
from sartor.studies.reproduction import Reproduction, reproduce, reproduce_all

TWO = ("comfed/table4", "spfl/table6")
TINY = {"rounds": 2, "data": {"clients": 6}, "partition": {"name": "iid"}, "model": {"name": "softmax"}}
FEW: dict[str, Any] = {"methods": ["fedavg", "fedprox"], "columns": ["5", "IID"], "settings": TINY}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def both(**more: Any) -> list[Reproduction]:
    return list(reproduce_all(TWO, **{**FEW, "out": "made", **more}))


def invoke(*words: str) -> Any:
    small = ("rounds=2", "data.clients=6", "partition.name=iid", "model.name=softmax")
    few = ("--methods", "fedavg,fedprox", "--columns", "5,IID", "--out", "made")
    return CliRunner().invoke(app, ["reproduce", *TWO, *few, *small, *words])


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_gives_the_numbers_that_it_gives_by_itself(
    jobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [
        reproduce(TWO[0], **{**FEW, "columns": ["5"], "out": "a"}),
        reproduce(TWO[1], **{**FEW, "columns": ["IID"], "methods": ["fedavg"], "out": "b"}),
    ]
    capsys.readouterr()
    made = both(jobs=jobs, progress=True)
    assert [result.numbers for result in made] == [result.numbers for result in alone]
    assert [result.out for result in made] == [
        Path("made/comfed-table4-small"),
        Path("made/spfl-table6-small"),
    ]
    for result in made:
        stored = json.loads((result.out / reproduction.FILE).read_text(encoding="utf-8"))
        assert stored == json.loads(json.dumps(result.to_mapping()))
    told = [line.partition(":") for line in capsys.readouterr().err.splitlines() if " of 3: " in line]
    assert [count for count, _, _ in told] == ["1 of 3", "2 of 3", "3 of 3"]
    places = {words.split(": ")[0].strip() for _, _, words in told}
    assert places == {
        "fedavg, seed 0, comfed/table4, 5",
        "fedprox, seed 0, comfed/table4, 5",
        "fedavg, seed 0, spfl/table6, IID",
    }


@pytest.mark.slow
def test_trials_of_one_and_runs_of_another_stand_in_one_queue() -> None:
    names = ["sartor/leaderboard", "comfed/table4"]
    few: dict[str, Any] = {"methods": ["fedavg"], "columns": ["two classes", "5"]}
    small = {"rounds": 2, "data": {"clients": 6}, "model": {"name": "softmax"}}
    one, two = (list(reproduce_all(names, **few, settings=small, out=f"{n}", jobs=n)) for n in (1, 2))
    assert [result.numbers for result in two] == [result.numbers for result in one]
    found = [path.parts[1:] for path in Path().rglob("search.json")]
    assert len(found) == 2  # one in each folder, in the same place
    assert found[0] == found[1]


def test_what_is_there_is_found_whoever_asked_for_it() -> None:
    reproduce(TWO[0], **{**FEW, "columns": ["5"], "out": "made/comfed-table4-small"})
    before = {path: path.stat().st_mtime_ns for path in Path("made").rglob("rounds.jsonl")}
    both()
    after = {path: path.stat().st_mtime_ns for path in Path("made").rglob("rounds.jsonl")}
    assert before.items() < after.items()


def test_only_what_is_made_is_shown_and_one_without_anything_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(NothingLeft, match="made/comfed-table4-small: no method has all"):
        both(only_made=True)
    (whole,) = (each for each in both() if each.name == TWO[0])
    for path in Path("made/spfl-table6-small").rglob("summary.json"):
        path.unlink()
    assert [each.numbers for each in both(only_made=True)] == [whole.numbers]
    assert "left out, made/spfl-table6-small: no method has all its runs there" in caplog.text


def test_an_entry_of_which_no_number_is_missing_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    (work,) = planned_all([TWO[0], "diversifed/table6"], scale="paper", missing=True, seeds=1)
    assert work.entry.name == "diversifed/table6"
    assert caplog.messages == ["left out, comfed/table4, paper: no number is missing; leave that word out"]
    with pytest.raises(NothingLeft, match="comfed/table4, small: no number is missing"):
        planned_all(TWO, missing=True)


def test_one_of_which_nothing_came_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise SartorError("out of luck")

    monkeypatch.setattr(registered()["fedprox"], "round", fail)
    asked = {**FEW, "methods": ["fedprox", "separate"], "out": "made"}
    results = reproduce_all(TWO, **asked)
    made = next(results)
    assert (made.name, made.numbers[0].method) == ("spfl/table6", "separate")
    with pytest.raises(NothingFinished, match="out of luck"):
        next(results)
    done = invoke("--methods", "fedprox,separate", "--json")
    assert done.exit_code == 2
    assert [each["name"] for each in json.loads(done.stdout)] == ["spfl/table6"]
    assert "out of luck" in done.stderr.splitlines()[-1]


def test_a_forecast_is_of_each_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast.cost, "estimate", lambda experiment, **given: {"seconds": 30.0})
    done = invoke("--dry-run")
    assert done.exit_code == 0, done.output
    assert "comfed/table4, small: 2 runs" in done.stdout
    assert "spfl/table6, small: 1 runs" in done.stdout
    assert done.stdout.splitlines()[-1] == "in all 3 runs, about 90 s left to do"
    told = json.loads(invoke("--dry-run", "--json").stdout)
    assert [each["name"] for each in told] == [*TWO]
    assert not Path("made").exists()


def test_the_command_prints_each_table_and_json_is_a_list() -> None:
    done = invoke()
    assert done.exit_code == 0, done.output
    assert [line for line in done.stdout.splitlines() if line.startswith("reproduction: ")] == [
        "reproduction: made/comfed-table4-small/reproduction.json",
        "reproduction: made/spfl-table6-small/reproduction.json",
    ]
    assert [each["name"] for each in json.loads(invoke("--json").stdout)] == [*TWO]


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        ([], {}, "names: name at least one table or figure"),
        (["comfed/table4", "comfed/fig2"], {}, "comfed/fig2: is the same as comfed/table4; name one of them"),
        (TWO, {"methods": ["fedvag"]}, "method = 'fedvag': unknown name; did you mean fedavg"),
        (TWO, {"columns": ["5"]}, "spfl/table6: has none of these columns, but IID, non-IID"),
        (TWO, {"methods": ["fedavg"], "scale": "papr"}, "scale = 'papr': unknown name"),
        ([*TWO, "comfed/fig1"], {}, "comfed/fig1: is not run"),
        (TWO, {"settings": {"data": {"clinets": 3}}}, r"comfed/table4, small: data\.clinets: unknown key"),
    ],
)
def test_a_mistake_ends_all_before_anything_is_run(names: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SartorError, match=message):
        list(reproduce_all(names, **asked, out="made"))
    assert not Path("made").exists()
