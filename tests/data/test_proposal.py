"""A table without a schema gets one proposed, and what is odd in it is told, client by client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sartor.commands.main import app
from sartor.data.proposal import findings, propose
from sartor.data.schema import read_columns
from sartor.errors import SettingError
from sartor.runs.experiment import load, read_toml

cli = CliRunner()


def rows_of(site: str, number: int, shift: float, codes: tuple[str, str], label: int | None) -> list[str]:
    random = np.random.default_rng(sum(site.encode()))
    lines = []
    for place in range(number):
        ill = place % 4 == 0 if label is None else label
        age = "" if place % 5 == 4 else f"{random.normal(60, 5):.1f}"
        told = f"{ill + random.normal(0, 0.01):.3f}"  # the discharge code that is written afterwards
        seen = f"2024-01-{place % 28 + 1:02d}"
        note = "came with a cough" if place % 2 else "came with a high fever"
        lines.append(
            f"{site},{site}{place},{age},{shift + random.normal():.3f},{codes[place % 2]},{told},{seen},"
            f"{note},1,{int(ill)}"
        )
    return lines


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proposal") / "t.csv"
    blocks = [
        rows_of("north", 40, 0, ("f", "m"), None),
        rows_of("south", 40, 0, ("female", "male"), None),
        rows_of("west", 40, 50, ("f", "m"), 0),
        rows_of("tiny", 3, 0, ("f", "f"), None),
    ]
    head = "site,patient,age,dose,sex,code,seen,note,unit,ill"
    path.write_text("\n".join([head, *(line for block in blocks for line in block)]) + "\n")
    return path


def test_columns_are_what_they_seem(table: Path) -> None:
    columns = {column.name: column for column in propose(table, label="ill")}
    assert {name: column.kind for name, column in columns.items()} == {
        "site": "client",
        "patient": "out",
        "age": "number",
        "dose": "number",
        "sex": "category",
        "code": "number",
        "seen": "date",
        "note": "text",
        "unit": "out",
        "ill": "label",
    }
    age = columns["age"]
    assert (age.missing, age.indicator, age.low, age.high) == ("median", True, 50, 80)
    with pytest.raises(SettingError, match=r"which column is the label\? Say data\.label_column=NAME"):
        propose(table)


def test_numbers_of_rows_without_a_name_are_left_out(table: Path, tmp_path: Path) -> None:
    lines = table.read_text().splitlines()
    numbered = tmp_path / "t.csv"
    numbered.write_text("\n".join(f"{place - 1 if place else ''},{line}" for place, line in enumerate(lines)))
    assert propose(numbered, label="ill") == propose(table, label="ill")


def test_what_is_odd_is_told_with_who_and_where(table: Path) -> None:
    found = findings(table, propose(table, label="ill"))
    seen = {(each.client, each.column, each.what) for each in found}
    expected = {(site, "age", "missing") for site in ("north", "south", "west")}
    expected |= {
        ("south", "sex", "unlike"),
        ("west", "dose", "unlike"),
        ("west", "ill", "label"),
        ("tiny", "", "rows"),
        ("tiny", "sex", "constant"),
        ("all", "code", "leaking"),
        ("all", "patient", "left out"),
        ("all", "unit", "left out"),
    }
    assert seen == expected
    told = next(each.words for each in found if each.column == "sex" and each.what == "unlike")
    assert (
        told == "100% of its rows are 'female', 'male', which no other client has; other codes for the same?"
    )


def test_a_number_that_is_the_target_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    random = np.random.default_rng(0)
    lines = [f"{value},{random.normal()},{2 * value + 1}" for value in random.normal(size=60)]
    path.write_text("a,b,y\n" + "\n".join(lines) + "\n")
    columns = read_columns({"a": "number", "b": "number", "y": "label"})
    assert [each.column for each in findings(path, columns, "number") if each.what == "leaking"] == ["a"]


def call(*words: str) -> Any:
    return cli.invoke(app, ["data", *words])


def test_the_command_proposes_shows_and_writes(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('algorithm = "fedprox"\n[data]\nvalidation = 0.1\nlabel_column = "ill"\n')
    words = "data.label_column=ill", "data.clients=7", "seed=5", "partition.alpha=0.2"
    shown = call(str(table), *words, "--partition", "dirichlet", "--write", str(file))
    assert shown.exit_code == 0, shown.stderr
    for words in ("median", "leaking", "other codes for the same?", f"the schema is in {file}"):
        assert words in shown.stdout
    written = load(file)
    assert (written.algorithm, written.data.validation) == ("fedprox", 0.1)
    assert (written.data.clients, written.seed, written.partition.name) == (7, 5, "dirichlet")
    assert written.columns == propose(table, label="ill")
    assert written.data.path == str(table)
    again = json.loads(call(str(file), "columns.age.scale=robust", "--json").stdout)
    assert again["columns"]["age"]["scale"] == "robust"
    assert {each["what"] for each in again["findings"]} >= {"missing", "leaking"}
    assert [row["client"] for row in again["clients"]] == ["north", "south", "tiny", "west"]
    before = read_toml(file)
    assert call("digits", "--write", str(file)).exit_code == 2
    assert read_toml(file) == before
