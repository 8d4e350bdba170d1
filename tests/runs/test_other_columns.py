"""Newcomers' tables: columns by name, and what lies far from the run's is questioned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sartor.commands.main import app
from sartor.runs.newcomers import evaluate_run

COLUMNS = ["columns.age=number", "columns.dose=number", "columns.sex=category", "columns.ill=label"]
PLAIN = ["data.client_column=sex", "data.label_column=ill"]


def table(path: Path, names: str = "age,dose,sex,ill", swapped: bool = False) -> Path:
    random = np.random.default_rng(0)
    rows = [names]
    for row in range(30):
        age, dose = random.normal(60, 10), random.normal(1, 0.2)
        held = {"age": age, "dose": dose, "sex": row % 2, "ill": row // 2 % 2}
        if swapped:
            held |= {"age": dose, "dose": age}
        rows.append(",".join(str(held[name]) for name in names.split(",")))
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("words", [COLUMNS, PLAIN])
def test_a_swapped_column_is_found(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = table(tmp_path / "own.csv")
    common = [f"data.path={own}", "model.name=softmax", "engine.name=loop", "--rounds", "1"]
    outcome = CliRunner().invoke(app, ["run", "fedavg", *words, *common, "--out", str(tmp_path / "run")])
    assert outcome.exit_code == 0, outcome.output
    (tmp_path / "turned").mkdir()
    turned = table(tmp_path / "turned" / "own.csv", "ill,sex,dose,age")  # splits are drawn by its name
    same, other = (evaluate_run(tmp_path / "run", data=path)["last"] for path in (own, turned))
    assert not caplog.records  # another order is none
    assert other["shared_local"]["loss"] == pytest.approx(same["shared_local"]["loss"], rel=1e-4)
    evaluate_run(tmp_path / "run", data=table(tmp_path / "wrong.csv", swapped=True))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("wrong: age, dose: the mean lies more than 3 deviations from that of the run's")
