"""What ``make run`` runs: a table of methods, a run folder for each of them, and a report of all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sartor.algorithms import registered
from sartor.commands.demo import METHODS
from sartor.runs.record import RunFolder


def test_the_methods_of_the_demo_exist() -> None:
    assert set(METHODS) <= set(registered())


@pytest.mark.slow
def test_the_demo_prints_a_table_stores_its_runs_and_reports_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sartor.commands.demo", "fedavg", "separate"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(folders) == 2
    for folder in folders:
        assert folder.name in done.stdout
        summary = RunFolder.open(folder).summary
        cell = "shared_local" if summary["algorithm"] == "fedavg" else "personal_local"
        assert f"{100 * summary['accuracy'][cell]:.1f}" in done.stdout
    assert str(Path("runs") / "report.html") in done.stdout
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    for folder in folders:
        assert str(folder.relative_to(tmp_path)) in page
