"""Figures of papers: our curves with the paper's numbers on them; forecasts; going on after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers import process, wait_until
from sartor.commands.main import app
from sartor.report.figures import Lines
from sartor.report.papers import Drawn, _number_in, paper_figure, write_paper_figure
from sartor.runs import cost
from sartor.runs.experiment import Experiment, from_mapping
from sartor.runs.record import RunFolder
from sartor.runs.setup import set_up
from sartor.studies import forecast as forecasts
from sartor.studies import reproduction
from sartor.studies.comparison import NothingFinished
from sartor.studies.entries import Column, Entry, entries, entry
from sartor.studies.forecast import forecast
from sartor.studies.library import Failure
from sartor.studies.planning import planned
from sartor.studies.reproduction import Reproduction, number_of, reproduce

TINY = {"rounds": 6, "data": {"clients": 6}, "partition": {"name": "iid"}, "model": {"name": "softmax"}}
FIGURES = [each for each in entries() if each.over]


def drawn(made: Reproduction) -> Drawn:
    return Drawn(made, entry(made.asked), entry(made.name))


def lines(made: Reproduction) -> dict[tuple[str, ...], Lines]:
    panels = {key: view.panel for key, view in paper_figure(drawn(made)).views.items()}
    assert all(isinstance(panel, Lines) for panel in panels.values())
    return panels  # type: ignore[return-value]


@pytest.mark.parametrize("each", FIGURES, ids=lambda each: each.name)
def test_a_figure_has_numbers_where_its_axis_needs_them(each: Entry) -> None:
    table = entry(each.same_as) if each.same_as else each
    for at in table.scales.values():
        if each.over == "columns":
            assert [_number_in(column.label)[1] for column in at.columns]
        if each.over == "methods":
            places = [_number_in(row.title)[1] for row in at.methods.values()]
            assert len(set(places)) == len(places)
    assert bool(each.axis) is (each.over in ("columns", "methods"))


@pytest.mark.parametrize(
    ("label", "found"),
    [
        ("CIFAR-10 N = 40", ("CIFAR-10", 40.0)),
        ("CIFAR-10 N = 100", ("CIFAR-10", 100.0)),
        ("τ = 0.5", ("", 0.5)),
        ("7", ("", 7.0)),
        ("40 %", ("", 40.0)),
        ("groups = 2", ("", 2.0)),
    ],
)
def test_the_number_of_a_label_is_at_its_end(label: str, found: tuple[str, float]) -> None:
    assert _number_in(label) == found


def test_a_curve_ends_where_the_table_ends_and_the_papers_numbers_are_on_it(tmp_path: Path) -> None:
    settings = {**TINY, "data": {"name": "digits", "clients": 6}, "cohort": {"fraction": 1.0}}
    made = reproduce(
        "comfed/fig2", scale="paper", seeds=2, methods=["fedavg", "fedprox"], settings=settings, out=tmp_path
    )
    ((_, panel),) = lines(made).items()
    ours = [line for line in panel.lines if not line.hollow]
    marks = [line for line in panel.lines if line.hollow]
    assert [line.label for line in ours] == ["SgdSgd (FedAvg)", "ProxSgd (FedProx)"]
    table = entry("comfed/table4")
    for method, line, mark in zip(("fedavg", "fedprox"), ours, marks, strict=True):
        assert mark.place == line.place
        assert mark.x == [100.0 * (place + 1) for place in range(20)]
        assert mark.y == pytest.approx([value / 100 for value in table.band.values[method] if value])
        folders = next(number.runs for number in made.numbers if number.method == method)
        rows = [RunFolder.open(tmp_path / folder).rounds for folder in folders]
        for x, y in zip(line.x, line.y, strict=True):
            assert x is not None
            values = [number_of(each, Column("", round=int(x)), table) for each in rows]
            assert y == pytest.approx(sum(value or 0.0 for value in values) / 2)
        assert line.y == sorted(line.y)  # the best so far, as the paper has it
        assert line.low is not None
    assert "the best so far" in panel.y_label
    sentence = next(iter(paper_figure(drawn(made)).views.values())).sentence
    assert "Settings were changed, so that the two do not compare" in sentence


def test_columns_methods_and_clients_lie_on_an_axis(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "local": {"epochs": 1}}
    made = reproduce("diversifed/fig8", seeds=2, settings=tiny, out=tmp_path / "columns")
    (panel,) = lines(made).values()
    assert panel.x_label == "clients"
    assert panel.lines[0].x == [10.0, 20.0, 25.0]
    assert panel.lines[0].y == pytest.approx([(number.ours.mean or 0) / 100 for number in made.numbers])
    some = ["tau-1.1", "tau-0.5"]
    made = reproduce("diversifed/fig7", methods=some, settings=tiny, out=tmp_path / "methods")
    panels = lines(made)
    assert [panel.lines[0].x for panel in panels.values()] == [[0.5, 1.1], [0.5, 1.1]]
    assert not next(iter(panels.values())).percent
    made = reproduce(
        "spfl/fig6", methods=["spfl"], columns=["IID"], settings={"rounds": 1}, out=tmp_path / "c"
    )
    (panel,) = lines(made).values()
    (folder,) = made.numbers[0].runs
    clients = RunFolder.open(tmp_path / "c" / folder).clients
    assert panel.lines[0].x == [float(n + 1) for n in range(10)]
    assert panel.lines[0].y == pytest.approx(clients["personal_local_accuracy"][-10:])


def test_the_command_names_the_files_and_a_table_has_none(tmp_path: Path) -> None:
    words = ["reproduce", "comfed/fig2", "--methods", "fedavg", "--columns", "5", "--out", str(tmp_path)]
    words += ["rounds=5", "data.clients=6", "partition.name=iid", "model.name=softmax"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for ending in ("html", "png"):
        assert f"figure: {tmp_path / 'comfed-fig2'}.{ending}" in done.stdout
    assert "the runs end after" not in done.stdout
    text = (tmp_path / "comfed-fig2.html").read_text(encoding="utf-8")
    assert "Hollow marks are the paper's numbers, of its own setting and not of this one." in text
    assert "circle-open" in text
    words[1] = "comfed/table4"
    stored = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (stored["name"], stored["asked"], stored["figures"]) == ("comfed/table4", "comfed/table4", [])
    assert stored["hardware"]
    assert stored["seconds"] > 0
    assert stored["settings"]["rounds"] == 5


def test_what_cannot_be_drawn_leaves_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    words = ["comfed/fig2", "--methods", "fedavg", "--columns", "5", "--out", str(tmp_path), "rounds=2"]
    done = CliRunner().invoke(app, ["reproduce", *words, "model.name=softmax"])
    assert done.exit_code == 0, done.output
    assert "the figure is not drawn: a report needs plotly" in done.stderr
    assert "5 (the runs end after round 2)" in done.stdout
    assert "reproduction:" in done.stdout


def test_a_table_writes_no_figure(tmp_path: Path) -> None:
    made = reproduce("comfed/table4", methods=["fedavg"], columns=["5"], settings=TINY, out=tmp_path)
    assert write_paper_figure(made) == []


def test_a_column_whose_methods_all_fail_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, broken = reproduction.compare, Failure("diversifed", "diversifed", 0, "diverged")

    def some(tables: Any, **asked: Any) -> Any:
        if asked["experiment"]["data"]["clients"] == 10:
            raise NothingFinished([broken])
        return compare(tables, **asked)

    monkeypatch.setattr(reproduction, "compare", some)
    asked: dict[str, Any] = {"settings": {"rounds": 1}, "out": tmp_path}
    made = reproduce("diversifed/fig8", **asked)
    assert [number.column for number in made.numbers] == ["N = 20", "N = 25"]
    assert made.failed == (broken,)
    with pytest.raises(NothingFinished, match="no method came to its end; diversifed: diverged"):
        reproduce("diversifed/fig8", columns=["N = 10"], **asked)


def test_a_forecast_counts_runs_and_leaves_out_what_is_there(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"methods": ["fedavg", "fedprox"], "settings": TINY, "out": tmp_path}
    before = forecast("comfed/table4", **asked, seeds=2)
    assert (before.runs, before.there, before.rounds) == (4, 0, 24)
    assert before.seconds == pytest.approx(sum(12 * part.seconds_per_round for part in before.parts))
    assert not list(tmp_path.iterdir())
    reproduce("comfed/table4", **asked, seeds=1)
    after = forecast("comfed/table4", **asked, seeds=2)
    assert (after.runs, after.there) == (4, 2)
    for part in after.parts:
        assert part.seconds == pytest.approx(6 * part.seconds_per_round)  # one of its two runs
    assert forecast("comfed/table4", **asked).seconds == 0


@pytest.mark.parametrize(
    ("name", "some", "read"),
    [
        ("spfl/table7", {"columns": ["MNIST IID", "MNIST non-IID"]}, "mnist"),
        ("spfl/table2-epochs", {"columns": ["CIFAR-10 client"], "methods": ["lga", "plga"]}, "cifar10"),
        ("spfl/fig4", {"methods": ["mnist-iid", "mnist-non-iid"]}, "mnist"),
    ],
)
def test_a_forecast_reads_what_is_asked_for_once(
    name: str, some: dict[str, Any], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, asked = forecasts.load_data, []

    def digits(experiment: Experiment) -> Any:
        asked.append(experiment.data.name)
        return load(replace(experiment, data=replace(experiment.data, name="digits")))

    monkeypatch.setattr(forecasts, "load_data", digits)
    small = {"rounds": 1, "model": {"name": "softmax"}, "partition": {"name": "iid"}}
    expected = forecast(name, scale="paper", seeds=1, settings={**small, "data": {"clients": 6}}, **some)
    assert expected.runs == len(expected.parts) > 1
    assert asked == [read]


def test_a_forecast_measures_samples_as_a_run_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def told(*given: Any, **more: Any) -> Any:
        seen.append(set_up(*given, **more).data.train.x)
        return set_up(*given, **more)

    monkeypatch.setattr(cost, "set_up", told)
    for normalise in (True, False):
        data = {**TINY["data"], "normalise": normalise}
        forecast("comfed/table4", methods=["fedavg"], settings={**TINY, "data": data})
        alone = set_up(from_mapping({**TINY, "data": data})).data.train.x
        assert torch.equal(seen[-1], alone)


def test_the_forecast_of_a_papers_setting_needs_no_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    work = planned("diversifed/table2", scale="paper")
    assert work.runs == 5 * sum(len(group.tables) for group in work.groups) == 5 * 12 * 9
    assert work.rounds == work.runs * 500
    words = [
        "reproduce",
        "comfed/table4",
        "--methods",
        "fedavg",
        "--dry-run",
        "rounds=7",
        "model.name=softmax",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "comfed/table4, small: 1 runs, 7 rounds in all; 0 runs are there" in done.stdout
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["parts"][0]["rounds"] == 7
    counted = CliRunner().invoke(app, ["reproduce", "diversifed/table8", "--dry-run"])
    assert "is computed in moments" in counted.stdout
    wrong = CliRunner().invoke(app, [*words, "local.stpes=1"])
    assert wrong.exit_code == 2
    assert "comfed/table4, small: " in wrong.stderr


@pytest.mark.nightly
def test_a_killed_reproduction_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    words = [
        "comfed/table4",
        "--methods",
        "fedavg,fedprox",
        "--columns",
        "5",
        "rounds=20",
        "checkpoint.every=2",
    ]
    words += ["data.clients=6", "partition.name=iid", "model.name=softmax", "--out"]
    command = [sys.executable, "-m", "sartor", "reproduce", *words, str(tmp_path / "killed")]

    def second_is_under_way() -> bool:
        folder = next(iter((tmp_path / "killed").glob("*/fedprox-*/checkpoints")), None)
        return folder is not None and any(folder.glob("round-*"))

    with process(command) as started:
        wait_until(second_is_under_way, started)
        os.killpg(started.pid, signal.SIGKILL)
    (left,) = (tmp_path / "killed").glob("*/fedprox-*")
    begun = RunFolder.open(left)
    assert not begun.finished
    done = CliRunner().invoke(app, ["reproduce", *words, str(tmp_path / "killed")])
    assert done.exit_code == 0, done.output
    assert "1 of 2: fedavg, seed 0, 5: reused" in done.stderr
    assert "2 of 2: fedprox, seed 0, 5: done" in done.stderr
    assert [row["round"] for row in RunFolder.open(left).rounds] == list(range(1, 21))
    CliRunner().invoke(app, ["reproduce", *words, str(tmp_path / "whole")])
    killed, whole = (
        json.loads((tmp_path / name / reproduction.FILE).read_text()) for name in ("killed", "whole")
    )
    assert [number["ours"] for number in killed["numbers"]] == [number["ours"] for number in whole["numbers"]]


def test_seeds_may_be_asked_to_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compare = reproduction.compare

    def told(tables: Any, **settings: Any) -> Any:
        asked.append(settings["together"])
        return compare(tables, **settings)

    monkeypatch.setattr(reproduction, "compare", told)
    words = ["reproduce", "comfed/table4", "--methods", "fedavg", "--columns", "5", "--out", str(tmp_path)]
    words += ["rounds=1", "model.name=softmax", "--together"]
    assert CliRunner().invoke(app, [*words, "no"]).exit_code == 0
    wrong = CliRunner().invoke(app, [*words, "maybe"])
    assert wrong.exit_code == 2
    assert "compare.together" in wrong.stderr
    assert asked == ["no", "maybe"]
