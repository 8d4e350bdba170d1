"""What privacy, attackers and fewer bytes cost, as figures of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import store_run

import sartor
from sartor.report import write_report
from sartor.report.figures import Figure, Lines, curves
from sartor.report.images import write_figures
from sartor.report.prices import price_figures
from sartor.report.runs import read

SMALL: dict[str, Any] = {"data": {"name": "digits", "clients": 4}, "rounds": 2, "evaluate": {"every": 1}}


def play(folder: Path, **given: Any) -> Path:
    name = "-".join(str(value) for section in given.values() for value in dict(section).values())
    sartor.run("fedavg", experiment={**SMALL, **given}, out=folder / (name or "plain"))
    return folder


def lines(figures: list[Figure], name: str) -> dict[str, list[tuple[Any, Any]]]:
    (figure,) = (each for each in figures if each.name == name)
    panel = figure.views[()].panel
    assert isinstance(panel, Lines)
    return {line.label: list(zip(line.x, line.y, strict=True)) for line in panel.lines}


def test_attackers_are_counted_and_the_honest_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path)
    for share in (0.25, 0.5):
        for name in ("sign-flip", "scaling"):
            play(tmp_path, attack={"name": name, "share": share})
    material = read([tmp_path])
    (figure,) = price_figures(material)
    drawn = lines([figure], "attackers")
    assert list(drawn) == ["fedavg attack.name=scaling", "fedavg attack.name=sign-flip"]
    by_place = {(run.config["attack"]["name"], run.config["attack"]["share"]): run for run in material.runs}
    for label, points in drawn.items():
        attack = label.rpartition("=")[2]
        assert [x for x, _ in points] == [0.0, 0.25, 0.5]  # the run without attackers begins both lines
        for x, y in points[1:]:
            assert y == by_place[attack, x].last["shared_local"]["benign"]["accuracy"]
            assert y != by_place[attack, x].last["shared_local"]["accuracy"]
    assert "fedavg attack.name=scaling" in figure.views[()].sentence
    drawn_too: list[Figure] = []
    monkeypatch.setattr(sartor.report, "write_figures", lambda figures, *_: drawn_too.extend(figures))
    page = write_report(tmp_path, tmp_path / "report.html", figures=tmp_path / "paper").read_text()
    assert "What attackers cost" in page
    (for_paper,) = (each for each in drawn_too if each.name == "attackers")
    (written,) = write_figures([for_paper], tmp_path / "paper")
    assert "attackers" in written.name


def test_fewer_bytes(tmp_path: Path) -> None:
    play(tmp_path)
    sartor.run("fedavg", experiment={**SMALL, "transforms": [{"name": "int8"}]}, out=tmp_path / "int8")
    drawn = lines(price_figures(read([tmp_path])), "bytes")
    (((less, _), (more, _)),) = drawn.values()
    assert 0 < less < more


def test_privacy_by_what_was_spent(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    for epsilon in (20.0, 40.0):
        play(tmp_path, privacy={"mode": "central", "epsilon": epsilon, "delta": 0.01, "clip": 1.0})
    material = read([tmp_path])
    ((points),) = lines(price_figures(material), "epsilon").values()
    spent = sorted(run.summary["privacy"]["epsilon"] for run in material.runs if run.summary)
    assert [x for x, _ in points] == spent
    assert spent[0] < spent[1]
    learning = curves(material, "accuracy")
    assert learning is not None
    assert "epsilon" in learning.choices[1].options


def test_runs_that_pay_the_same_have_no_figure(tmp_path: Path) -> None:
    play(tmp_path)
    play(tmp_path, hyper={"lr": 0.3})
    assert price_figures(read([tmp_path])) == []


def test_runs_without_a_score_have_no_place(tmp_path: Path) -> None:
    for norm, sent in ((1.0, 1000), (2.0, 10)):
        row = {"bytes_up": sent, "evaluation": {"shared_local": {"loss": 0.5}}}
        transforms = [{"name": "clip", "norm": norm}]
        store_run(tmp_path / str(norm), accuracies=(0.5,), rows=[row], transforms=transforms)
    material = read([tmp_path])
    assert material.headline == "accuracy"
    assert price_figures(material) == []
