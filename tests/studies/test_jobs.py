"""Runs of an entry that several processes make at once: the numbers of one, whatever happens to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sartor.commands.main import app
from sartor.errors import SettingError
from sartor.runs.inputs import gather
from sartor.studies import forecast
from sartor.studies.jobs import After, Job, Made, Study, make
from sartor.studies.library import Failure, Runs, key_of
from sartor.studies.planning import planned
from sartor.studies.progress import Tally
from sartor.studies.reproduction import Reproduction, reproduce

FEW: dict[str, Any] = {
    "methods": ["fedavg", "fedprox"],
    "columns": ["5"],
    "seeds": 2,
    "settings": {
        "rounds": 3,
        "data": {"clients": 6},
        "partition": {"name": "iid"},
        "model": {"name": "softmax"},
    },
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def comfed(out: str, **more: Any) -> Reproduction:
    return reproduce("comfed/table4", **{**FEW, "out": out, **more})


def without_times(value: Any) -> Any:
    """What is stored, but for what it took."""
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key != "seconds"}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def stored(file: Path) -> Any:
    return without_times(json.loads(file.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("together", ["no", "yes"])
def test_two_processes_give_the_numbers_of_one(together: str) -> None:
    one, two = (comfed(f"{jobs}", jobs=jobs, together=together) for jobs in (1, 2))
    assert without_times(two.to_mapping()) == without_times(one.to_mapping())
    files = [path.relative_to("1") for path in Path("1").rglob("*.json")]
    assert len([path for path in files if path.name == "comparison.json"]) == 1
    for path in files:
        if path.name in ("comparison.json", "reproduction.json"):
            assert stored(Path("2", path)) == stored(Path("1", path))


@pytest.mark.slow
def test_trials_are_made_at_once_too() -> None:
    few: dict[str, Any] = {"methods": ["fedavg", "separate"], "columns": ["two classes"]}
    small = {"rounds": 2, "data": {"clients": 6}, "model": {"name": "softmax"}}
    for jobs in (1, 2):
        reproduce("sartor/leaderboard", **few, settings=small, out=f"{jobs}", jobs=jobs)
    found = list(Path("1").rglob("search.json"))
    assert len(found) == 1
    for file in [*found, Path("1", "reproduction.json")]:
        assert stored(Path("2", *file.parts[1:])) == stored(file)
    assert not [path for jobs in "12" for path in Path(jobs).rglob("checkpoints/*")]


@pytest.mark.slow
def test_runs_that_are_there_are_found_and_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"settings": {**FEW["settings"], "rounds": 60}, "together": "no"}
    whole = comfed("whole", **more)
    comfed("parts", **more, methods=["fedprox"], seeds=1)

    def interrupted(tally: Tally, rounds: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Tally, "played", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comfed("parts", **more, jobs=2)
    capsys.readouterr()
    parts = comfed("parts", **more, jobs=2, progress=True)
    told = [line for line in capsys.readouterr().err.splitlines() if " of 4: " in line]
    assert [line.partition(" of ")[0] for line in told] == ["1", "2", "3", "4"]
    assert sum("fedprox, seed 0, 5: reused" in line for line in told) == 1
    assert [number.ours for number in parts.numbers] == [number.ours for number in whole.numbers]
    assert len(list(Path("parts").rglob("summary.json"))) == 4


def test_the_same_run_under_two_names_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    group = planned("comfed/table4", **FEW).groups[0]
    tables = {"one": {"algorithm": "fedavg"}, "other": {"algorithm": "fedavg"}}
    plan, methods, _ = group.planned("cpu", "no", tables)
    study, runs = Study(2, Tally(2, 6)), Runs(Path("made"))
    study.want(runs, plan, [(method.label, method) for method in methods], [0], "")
    study.make()
    assert len(list(Path("made").iterdir())) == 1
    ends = [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()]
    assert ends == ["1 of 2: other, seed 0: reused", "2 of 2: one, seed 0: done"]
    assert not runs.get(plan.inputs(methods[0], 0)).reused
    assert runs.get(plan.inputs(methods[1], 0)).reused


def test_the_longest_run_is_made_first() -> None:
    study, runs = Study(1, Tally(0, 0, shown=False)), Runs(Path("made"))
    for rounds in (2, 4, 3):
        asked = {**FEW, "settings": {**FEW["settings"], "rounds": rounds}}
        plan, methods, _ = planned("comfed/table4", **asked).groups[0].planned("cpu")
        study.want(runs, plan, [(method.label, method) for method in methods], [0, 1], f"{rounds}")
    assert [job.place for job in study._waiting] == ["4", "4", "3", "3", "2", "2"]
    assert [len(job.titles) for job in study._waiting] == [2] * 6


@pytest.mark.parametrize(
    ("rounds", "order"),
    [
        # What a trial takes is unknown until it is made, or as much as those before; a run is behind each.
        ((1, 9), "fedavg, fedprox, fedprox!, fednova, fednova!, fedavg!"),
        ((10, 4), "fedavg, fedprox, fednova, fedprox!, fednova!, fedavg!"),
    ],
)
def test_runs_that_follow_from_others_wait_for_these_alone(
    rounds: tuple[int, int], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"fedavg": 1.0, "fedprox": 9.0, "fednova": 1.5}
    made: list[str] = []

    def at_once(call: Any, cells: list[Job], jobs: int, heard: Any) -> Iterator[Any]:
        while cells:
            job = cells.pop(0)
            made.append(f"{job.label}{'!' * (job.out.name == 'runs')}")
            key = key_of(gather({"experiment": job.settings[0]}).inputs())
            yield job, ([Made(key, job.out / "run", "done", None)], took[job.label])

    monkeypatch.setattr("sartor.studies.jobs.at_once", at_once)
    study = Study(2, Tally(6, 0, shown=False))

    def want(name: str, out: str, rounds: int, after: After | None = None) -> None:
        asked = {**FEW, "methods": [name], "settings": {**FEW["settings"], "rounds": rounds}}
        plan, (method,), _ = planned("comfed/table4", **asked).groups[0].planned("cpu")
        study.want(Runs(Path(out)), plan, [(name, method)], [0], "", after)

    for name in took:
        want(name, "trials", rounds[0], After(partial(want, name, "runs", rounds[1]), rounds[1]))
    study.make()
    assert ", ".join(made) == order


def invoke(*words: str, clients: int = 6) -> Any:
    small = ("rounds=2", f"data.clients={clients}", "partition.name=iid", "model.name=softmax")
    few = ("--methods", "fedavg,fedprox", "--columns", "5", "--jobs", "2", "--out", "made")
    return CliRunner().invoke(app, ["reproduce", "comfed/table4", *few, *small, *words])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("SartorError('out of luck')", "out of luck"),
        ("ZeroDivisionError('by 0')", "ZeroDivisionError: by 0"),
    ],
)
def test_the_command_imports_code_and_leaves_out_what_fails(error: str, words: str) -> None:
    mine = Path(f"{error.partition('(')[0]}.py")  # a file is imported once
    mine.write_text(
        "import multiprocessing\n"
        "from sartor.algorithms import registered\n"
        "from sartor.errors import SartorError\n"
        "def round(self, server, federation, cohort):\n"
        f"    raise {error}\n"
        "if multiprocessing.parent_process() is not None:\n"
        "    registered()['fedprox'].round = round\n"
    )
    done = invoke("--import", str(mine), "--json")
    assert done.exit_code == 2
    assert [number["method"] for number in json.loads(done.stdout)["numbers"]] == ["fedavg"]
    message = f"left out, as runs failed: fedprox; the first, fedprox with seed 0: {words}"
    assert done.stderr.splitlines()[-1] == f"sartor: {message}"


def test_the_command_names_the_run_that_was_a_mistake() -> None:
    done = invoke(clients=100_000)
    assert done.exit_code == 2
    assert done.stderr.count("sartor: ") == 1
    assert "seed 0, 5: " in done.stderr


def test_a_forecast_is_divided_where_that_is_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "processors", lambda: 2)
    monkeypatch.setattr(forecast.cost, "estimate", lambda experiment, **given: {"seconds": 30.0})
    times = {jobs: forecast.forecast("comfed/table4", **FEW, jobs=jobs) for jobs in (1, 2, 8)}
    assert {jobs: (each.jobs, each.seconds) for jobs, each in times.items()} == {
        1: (1, 120.0),
        2: (2, 60.0),
        8: (2, 60.0),
    }
    on_gpu = forecast.forecast("comfed/table4", **FEW, device="cuda", jobs=4)
    assert (on_gpu.jobs, on_gpu.seconds) == (1, 120.0)
    assert "left to do on cpu with 2 jobs" in invoke("--dry-run").stdout
    assert "left to do on cuda, one run at a time" in invoke("--dry-run", "--device", "cuda").stdout


def test_no_jobs_are_refused() -> None:
    with pytest.raises(SettingError, match="jobs: must be at least 1, got 0"):
        comfed("made", jobs=0)


# What is made already ---------------------------------------------------------------------------------------


def test_what_is_made_is_shown_and_nothing_is_run() -> None:
    whole = comfed("there", methods=["fedavg", "fedprox"], columns=["5", "10"])
    before = sorted(Path("there").rglob("rounds.jsonl"))
    some = comfed("there", methods=["fedavg", "fedprox", "fedyogi"], columns=["5", "10"], only_made=True)
    assert without_times(some.numbers) == without_times(whole.numbers)
    assert sorted(Path("there").rglob("rounds.jsonl")) == before
    unfinished = next(path for path in before if path.parent.name.startswith("fedprox-s1"))
    (unfinished.parent / "summary.json").unlink()
    rest = comfed("there", only_made=True)
    assert {number.method for number in rest.numbers} == {"fedavg"}
    assert not (unfinished.parent / "summary.json").exists()


def test_of_a_tuned_entry_only_methods_with_all_trials_are_shown() -> None:
    asked: dict[str, Any] = {"columns": ["two classes"], "out": "tuned", "settings": {"rounds": 2}}
    whole = reproduce("sartor/leaderboard", methods=["fedavg", "separate"], **asked)
    shown = reproduce("sartor/leaderboard", methods=["fedavg", "separate", "ditto"], **asked, only_made=True)
    assert shown.numbers == whole.numbers
    trial = next(Path("tuned").rglob("search/separate-*"))
    (trial / "summary.json").unlink()
    shown = reproduce("sartor/leaderboard", methods=["fedavg", "separate"], **asked, only_made=True)
    assert {number.method for number in shown.numbers} == {"fedavg"}


def test_where_nothing_is_made_yet_that_is_said() -> None:
    done = CliRunner().invoke(app, ["reproduce", "comfed/table4", "--only-made", "--out", "none"])
    assert done.exit_code == 2
    assert "no method has all its runs there" in done.output
    assert not Path("none").exists()


def test_a_forecast_of_what_is_made_is_refused() -> None:
    done = invoke("--dry-run", "--only-made")
    assert done.exit_code == 2
    assert done.stderr == "sartor: --dry-run and --only-made: either runs nothing; give one of them\n"


def test_what_is_missing_is_asked_for_on_the_command_line() -> None:
    done = CliRunner().invoke(app, ["reproduce", "comfed/table4", "--missing", "--out", "none"])
    assert done.exit_code == 2
    assert done.stderr == "sartor: comfed/table4, small: no number is missing; leave that word out\n"
    done = CliRunner().invoke(app, ["reproduce", "comfed/table4", "--missing", "rounds=2", "--out", "none"])
    assert done.exit_code == 2
    assert "our numbers are of the entry's own settings, not of {'rounds': 2}" in done.stderr
    assert not Path("none").exists()


def test_processes_on_a_gpu_have_their_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sartor.studies.jobs.share_device", parts.append)
    monkeypatch.setattr("sartor.studies.jobs.working_at_once", lambda: 4)
    monkeypatch.setattr(Runs, "attempt", lambda *_: Failure("fedavg", "fedavg", 0, "enough"))
    for device in ("cpu", "cuda"):
        settings = {"algorithm": "fedavg", "rounds": 1, "engine": {"device": device}}
        make(Job(tmp_path, "fedavg", ("fedavg",), "", (settings,), 1, "no", False))
    assert parts == [4]
