"""The leaderboard's page: numbers of stored runs, and nothing that was not measured."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from sartor.studies.reproduction import reproduce

DOCS = Path(__file__).parents[2] / "docs"
LABELS = ("fedavg", "separate", "fedrep")


@pytest.fixture(scope="module")
def leaderboard() -> Any:
    sys.path.insert(0, str(DOCS))
    try:
        import leaderboard

        yield leaderboard
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction of a few short runs, whose settings are then called the entry's own."""
    place = tmp_path_factory.mktemp("made")
    settings = {"rounds": 1, "data": {"clients": 5}, "engine": {"name": "loop"}}
    reproduce(
        "sartor/leaderboard", methods=LABELS, columns=["two classes"], seeds=2, settings=settings, out=place
    )
    return place


def called_stated(folder: Path, tmp_path: Path) -> Path:
    made = json.loads((folder / "reproduction.json").read_text())
    copied = tmp_path / "stated"
    copied.mkdir(parents=True)
    for place in made["comparisons"]:
        (copied / place).symlink_to(folder / place)
    (copied / "reproduction.json").write_text(json.dumps({**made, "settings": {}}))
    return copied


def test_the_page_has_the_numbers_of_the_runs(leaderboard: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "leaderboard.jsonl"
    leaderboard.collect(called_stated(folder, tmp_path), file, scale="small")
    page = leaderboard.board(lambda name: f"{name}.md", file)
    made = json.loads((folder / "reproduction.json").read_text())
    for number in made["numbers"]:
        ours = number["ours"]
        row = next(line for line in page.splitlines() if f"[{number['method']}](methods/" in line)
        assert f"{ours['mean']:.1f} ± {ours['deviation']:.1f}" in row
    rows = [line for line in page.splitlines() if line.startswith("| [") or line.startswith("| *[")]
    shown = [float(line.split("|")[2].split("±")[0]) for line in rows]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == len(LABELS)
    assert "seeds 0, 1" in page
    assert page.startswith("## two classes")
    told = next(line for line in page.splitlines() if line.startswith("Not measured here: "))
    assert "apple" in told
    assert not any(f" {label}," in told for label in LABELS)
    lines = file.read_text().splitlines()
    about = json.loads(lines[0])
    about["about"]["rankings"]["another"] = None  # a column that was stored before stays
    file.write_text("\n".join([json.dumps(about), *lines[1:]]) + "\n")
    kept = leaderboard.collect(called_stated(folder, tmp_path / "again"), file, scale="small")
    assert set(kept.about["rankings"]) == {"two classes", "another"}


def test_the_diagram_is_whole_and_says_its_ranks(leaderboard: Any) -> None:
    ranking = {
        "methods": ["a", "b<", "c"],
        "ranks": [1.25, 2.0, 2.75],
        "cliques": [["a", "b<"], ["b<", "c"]],
        "critical_difference": 1.0,
        "blocks": 8,
    }
    figure = ET.fromstring(leaderboard.diagram("column", ranking))
    circles = [float(circle.get("cx", "nan")) for circle in figure.iter("circle")]
    assert circles == sorted(circles)
    assert len(circles) == 3
    rows = [circle.get("cy") for circle in figure.iter("circle")]
    bars = [line for line in figure.iter("line") if line.get("stroke-width") == "4"]
    assert [(bar.get("y1"), bar.get("y2")) for bar in bars] == [(rows[0], rows[1]), (rows[1], rows[2])]
    beside = [(float(bar.get("x1", "nan")), float(bar.get("x2", "nan"))) for bar in bars]
    assert beside[0][0] == beside[0][1] < beside[1][0] == beside[1][1] <= leaderboard.WIDTH
    assert max(circles) < beside[0][0]
    assert "b< 2.0" in str(next(figure.iter("desc")).text)
    assert "8 clients × seeds" in ET.tostring(figure, encoding="unicode")


def test_what_was_not_measured_as_stated_is_no_result(leaderboard: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "leaderboard.jsonl"
    with pytest.raises(SystemExit, match="no result"):  # of the small setting
        leaderboard.collect(called_stated(folder, tmp_path), file)
    with pytest.raises(SystemExit, match="no result"):  # with settings of one's own
        leaderboard.collect(folder, file, scale="small")
    with pytest.raises(SystemExit, match="no such file; make it with"):
        leaderboard.collect(tmp_path / "nowhere", file)
    assert not file.exists()
    assert leaderboard.board(str, file).startswith("Nothing has been measured yet")


def test_the_page_asks_for_the_part() -> None:
    text = (DOCS / "leaderboard.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- begin: leaderboard -->\n.*<!-- end -->", text, re.DOTALL)
