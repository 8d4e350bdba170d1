"""A comparison as LaTeX, CSV and Markdown: sorted, the best of a column bold; a search without a space."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sartor.algorithms import registered
from sartor.commands.main import app
from sartor.studies.comparison import Comparison, Estimate, MethodResult, RunOf
from sartor.studies.formats import FORMATS, columns, ordered
from sartor.studies.tuning import check_hyper, declared_space, value_at


def method(label: str, main: float, megabytes: float, shared: float | None = None) -> MethodResult:
    def over(value: float | None) -> Estimate:
        return Estimate(value, None if value is None else 0.01, (value,))

    cells = {"personal_local": over(main)} | ({} if shared is None else {"shared_local": over(shared)})
    return MethodResult(
        label=label,
        algorithm="fedavg",
        hyper={},
        reference=False,
        main="personal_local",
        cells=cells,
        best_by_validation={},
        client_deviation=over(0.1),
        worst_decile=over(main / 2),
        bytes=over(megabytes * 1e6),
        seconds=over(1.0),
        to_target=None,
        runs=(RunOf(0, label, False),),
    )


def compared(*methods: MethodResult, **changes: Any) -> Comparison:
    given = {"experiment": {}, "seeds": (0, 1), "score": "accuracy", "target": None, "against": None}
    return Comparison(out=Path(), methods=methods, pairs=(), ranking=None, failed=(), **{**given, **changes})


RESULT = compared(method("low_one", 0.5, 1.0), method("high", 0.75, 3.0, 0.6), method("alike", 0.7501, 2.0))


def test_methods_are_sorted_and_the_best_of_a_column_is_bold() -> None:
    assert [each.label for each in ordered(RESULT)] == ["alike", "high", "low_one"]
    lines = FORMATS["markdown"](RESULT).splitlines()
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]
    }
    heads = [cell.strip() for cell in lines[0].split("|")[2:-1]]
    assert list(rows) == ["alike", "high", "low_one"]
    accuracy, sent, shared = (heads.index(head) for head in ("accuracy (%)", "MB sent", "shared local"))
    assert rows["alike"][accuracy] == rows["high"][accuracy] == "**75.0 ± 1.0**"  # equal to the shown digits
    assert rows["low_one"][accuracy] == "50.0 ± 1.0"
    assert rows["low_one"][sent].startswith("**1.00")  # less is better
    assert (rows["alike"][shared], rows["high"][shared]) == ("–", "**60.0 ± 1.0**")
    assert "best by validation" not in heads


def test_less_may_be_better() -> None:
    result = compared(method("a", 2.5, 1), method("b", 1.5, 2), score="rmse", more_is_better=False)
    assert [each.label for each in ordered(result)] == ["b", "a"]
    assert "**1.5000 ± 0.0100**" in FORMATS["markdown"](result)
    assert columns(result)[0].head == "rmse"


def test_latex_has_its_signs_escaped() -> None:
    text = FORMATS["latex"](RESULT)
    assert r"low\_one & $50.0 \pm 1.0$" in text
    assert r"accuracy (\%)" in text
    assert r"high & $\mathbf{75.0 \pm 1.0}$" in text
    assert r"& -- &" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") - line.count(r"\&") for line in rows} == {len(columns(RESULT))}
    assert text.splitlines()[0] == rf"\begin{{tabular}}{{l{'r' * len(columns(RESULT))}}}"


def test_latex_reads_every_sign_of_a_name_as_that_sign() -> None:
    text = FORMATS["latex"](compared(method(r"a^2 ~ \b|<c>", 0.5, 1.0)))
    wanted = r"a\textasciicircum{}2 \textasciitilde{} \textbackslash{}b\textbar{}\textless{}c\textgreater{} &"
    assert wanted in text


def test_csv_has_the_numbers_as_they_are() -> None:
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](RESULT))))
    assert [row["method"] for row in rows] == ["alike", "high", "low_one"]
    assert float(rows[0]["accuracy (%) mean"]) == pytest.approx(75.01)
    assert rows[0]["shared local mean"] == ""
    assert rows[1]["seeds"] == "2"


def test_the_command_prints_one_of_them(tmp_path: Path) -> None:
    words = ["compare", "--algorithms", "fedavg,separate", "--no-references", "--clients", "3"]
    words += ["--rounds", "1", "--seeds", "1", "model.name=softmax", "--out", str(tmp_path / "out")]
    for form in ("markdown", "csv", "latex"):
        shown = CliRunner().invoke(app, [*words, f"--{form}"])
        assert shown.exit_code == 0, shown.output
        assert {"markdown": "| method |", "csv": "method,", "latex": r"\begin{tabular}"}[form] in shown.stdout
        assert shown.stdout.startswith({"markdown": "| method", "csv": "method,", "latex": "\\begin"}[form])
    both = CliRunner().invoke(app, [*words, "--csv", "--latex"])
    assert (both.exit_code, both.stderr) == (2, "sartor: --latex and --csv: give one of them\n")


KNOWN = dict(registered())  # other tests register their own


def test_every_method_has_a_declared_space_that_it_takes() -> None:
    for name, kind in KNOWN.items():
        space = declared_space(name)
        assert "lr" in space, name
        for key, values in space.items():
            default = kind.Hyper.__dataclass_fields__[key].default
            assert values.low <= default <= values.high, f"{name}: {key}"
            for share in (0.0, 0.5, 1.0):
                check_hyper(name, {key: value_at(values, share)}, f"search {name}")


def test_a_search_needs_no_space(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text('rounds = 1\n[model]\nname = "softmax"\n[data]\nclients = 3\n')
    words = ["search", str(tmp_path / "experiment.toml"), "data.validation=0.2"]
    words += ["--algorithms", "fedprox,ditto", "--budget", "2", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    stored = json.loads((tmp_path / "out" / "search.json").read_text())
    spaces = {tuned["label"]: tuned["space"] for tuned in stored["methods"]}
    assert spaces["ditto"].keys() == {"lr", "lam"}
    assert spaces["ditto"]["lam"] == {"low": 0.1, "high": 10.0, "log": True, "points": 0}
    tried = [[trial["hyper"]["lr"] for trial in tuned["trials"]] for tuned in stored["methods"]]
    assert tried[0] == tried[1]  # the same learning rates for both
    assert len(set(tried[0])) == 2


def test_what_is_set_is_not_searched(tmp_path: Path) -> None:
    words = ["search", "--algorithms", "ditto", "hyper.lr=0.2", "data.validation=0.2", "--budget", "2"]
    words += ["--clients", "3", "--rounds", "1", "model.name=softmax", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, words).exit_code == 0
    stored = json.loads((tmp_path / "out" / "search.json").read_text())
    assert stored["methods"][0]["space"].keys() == {"lam"}
