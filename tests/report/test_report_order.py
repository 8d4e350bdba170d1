"""What stands out in a report: the best first and bold, few lines in colour, and critical differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import store_run

from sartor.report.figures import BRIGHT, MOST_LINES, Lines, Ranks, curves, figures
from sartor.report.html import page
from sartor.report.images import write_figures
from sartor.report.interactive import spec
from sartor.report.runs import Material, read
from sartor.report.tables import comparison


def stored(folder: Path, ends: dict[str, float], **changes: Any) -> Material:
    for name, end in ends.items():
        store_run(folder / name, name, accuracies=(0.1, end), names="ab", partition=False, **changes)
    return read([folder / name for name in ends])


def test_the_best_comes_first_and_is_bold(tmp_path: Path) -> None:
    material = stored(tmp_path, {"fedavg": 0.5, "ditto": 0.75, "separate": 0.7501})
    table = comparison(material)
    assert [row[0].text for row in table.rows] == ["separate", "ditto", "fedavg"]
    own, loss = (table.heads.index(f"{head}, own test data") for head in ("shared model", "loss"))
    assert [row[own].best for row in table.rows] == [True, True, False]  # equal to the shown digits
    assert [row[loss].best for row in table.rows] == [True, False, False]  # less is better
    assert not any(row[place].best for row in table.rows for place in (0, 1))
    text = page(material, figures(material))
    assert "<strong>75.0</strong>" in text
    assert "<strong>50.0</strong>" not in text
    alone = comparison(read([tmp_path / "fedavg"]))
    assert not any(entry.best for entry in alone.rows[0])


def test_of_many_lines_the_best_few_are_in_colour(tmp_path: Path) -> None:
    names = ["fedavg", "ditto", "separate", "fedprox", "scaffold", "fedper", "apfl", "moon", "pfedme"]
    assert len(names) == MOST_LINES + 1
    ends = {name: 0.2 + 0.05 * place for place, name in enumerate(names)}
    material = stored(tmp_path, ends)
    figure = curves(material, "accuracy")
    assert figure is not None
    view = figure.views["shared_local", "round"]
    assert isinstance(view.panel, Lines)
    bright = [line.label for line in view.panel.lines if not line.quiet]
    assert bright == names[: -BRIGHT - 1 : -1]
    assert [line.quiet for line in view.panel.lines] == [True] * (len(names) - BRIGHT) + [False] * BRIGHT
    drawn = spec(view)["data"]
    assert {trace["name"] for trace in drawn if trace["line"]["color"] == "@rule"} == set(names) - set(bright)
    lowest = curves(material, "loss")
    assert lowest is not None
    panel = lowest.views["shared_local", "round"].panel
    assert isinstance(panel, Lines)
    assert {line.label for line in panel.lines if not line.quiet} == set(bright)
    few = curves(read([tmp_path / name for name in names[:MOST_LINES]]), "accuracy")
    assert few is not None
    assert not any(line.quiet for line in few.views["shared_local", "round"].panel.lines)


@pytest.fixture
def compared(tmp_path: Path) -> Material:
    names = ["ditto", "fedavg", "separate"]
    for name in names:
        store_run(tmp_path / "c" / name, name, names="ab", partition=False)
    ranking = {"methods": names, "ranks": [1.2, 1.9, 2.9], "statistic": 9.0, "p": 0.01, "blocks": 10}
    ranking |= {"critical_difference": 1.05, "cliques": [["ditto", "fedavg"], ["fedavg", "separate"]]}
    methods = [{"label": name, "runs": [{"seed": 0, "folder": name}]} for name in names]
    content = {"methods": methods, "pairs": [], "ranking": ranking, "failed": [], "score": "accuracy"}
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(content))
    return read([tmp_path / "c"])


def test_critical_differences_are_drawn(compared: Material, tmp_path: Path) -> None:
    (figure,) = [figure for figure in figures(compared) if figure.name == "ranks"]
    (view,) = figure.views.values()
    assert view.panel == Ranks(["ditto", "fedavg", "separate"], [1.2, 1.9, 2.9], [[0, 1], [1, 2]], 1.05)
    assert "ditto, fedavg; fedavg, separate" in view.sentence
    points, *bars = spec(view)["data"]
    assert points["x"] == [1.2, 1.9, 2.9]
    assert [(bar["x"], bar["y"]) for bar in bars] == [([1.2, 1.9], [0, 1]), ([1.9, 2.9], [1, 2])]
    assert "Critical differences" in page(compared, [figure])
    (written,) = write_figures([figure], tmp_path / "figures")
    assert written.stat().st_size > 1000


def test_two_methods_need_no_diagram(compared: Material) -> None:
    ranking = compared.comparisons[0]["ranking"]
    ranking["methods"], ranking["ranks"] = ranking["methods"][:2], ranking["ranks"][:2]
    assert all(figure.name != "ranks" for figure in figures(compared))
