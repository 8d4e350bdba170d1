"""What ``make run`` runs: a table of methods, a run folder for each of them, and a report of all."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

import sartor.commands.demo
from sartor.algorithms import registered
from sartor.commands.demo import METHODS
from sartor.runs.execute import execute
from sartor.runs.record import RunFolder


def test_the_methods_of_the_demo_exist() -> None:
    assert set(METHODS) <= set(registered())


def test_the_demo_prints_a_table_stores_its_runs_and_reports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer rounds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "fedavg", "separate"])
    monkeypatch.setattr(
        "sartor.runs.execute.execute",
        lambda experiment, **settings: execute(dataclasses.replace(experiment, rounds=4), **settings),
    )
    runpy.run_path(sartor.commands.demo.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(folders) == 2
    for folder in folders:
        assert folder.name in printed
        summary = RunFolder.open(folder).summary
        cell = "shared_local" if summary["algorithm"] == "fedavg" else "personal_local"
        assert f"{100 * summary['accuracy'][cell]:.1f}" in printed
    assert str(Path("runs") / "report.html") in printed
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    for folder in folders:
        assert str(folder.relative_to(tmp_path)) in page
