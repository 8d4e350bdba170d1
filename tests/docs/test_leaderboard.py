"""The leaderboard's page: numbers of stored runs, and nothing that was not measured."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from sartor.algorithms.source import method_code
from sartor.runs.experiment import fingerprint
from sartor.runs.record import RunFolder
from sartor.studies.reproduction import reproduce
from sartor.studies.results import Results

DOCS = Path(__file__).parents[2] / "docs"
LABELS = ("fedavg", "separate", "fedrep")
COLUMN = "two classes"
SETTINGS: dict[str, Any] = {"rounds": 1, "data": {"clients": 5}, "engine": {"name": "loop"}}


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
    reproduce("sartor/leaderboard", methods=LABELS, columns=[COLUMN], seeds=2, settings=SETTINGS, out=place)
    return place


def called_stated(folder: Path, copied: Path) -> Path:
    shutil.copytree(folder, copied)
    made = json.loads((folder / "reproduction.json").read_text())
    (copied / "reproduction.json").write_text(json.dumps({**made, "settings": {}}))
    return copied


def part(folder: Path, place: Path, methods: tuple[str, ...], seeds: list[int]) -> Path:
    """What a command for some methods and seeds leaves, whose runs were made before."""
    shutil.copytree(folder, place / "own")
    asked: dict[str, Any] = {"methods": methods, "columns": [COLUMN], "seeds": seeds, "only_made": True}
    reproduce("sartor/leaderboard", **asked, settings=SETTINGS, out=place / "own")
    return called_stated(place / "own", place / "stated")


def comparison(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*/comparison.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def row_of(page: str, method: str) -> list[str]:
    line = next(line for line in page.splitlines() if f"[{method}](methods/" in line)
    return [cell.strip() for cell in line.split("|")[1:-1]]


def ranks(page: str) -> dict[str, str]:
    return {label: row_of(page, label)[3] for label in LABELS}


def expected_ranks(ranking: dict[str, Any]) -> dict[str, str]:
    both = zip(ranking["methods"], ranking["ranks"], strict=True)
    return {method: f"{rank:.1f}" for method, rank in both}


def test_the_page_has_the_numbers_of_the_runs(leaderboard: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "leaderboard.jsonl"
    leaderboard.collect(called_stated(folder, tmp_path / "stated"), file, scale="small")
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
    assert ranks(page) == expected_ranks(comparison(folder)["ranking"])


def test_a_line_has_the_numbers_of_its_run(leaderboard: Any, folder: Path, tmp_path: Path) -> None:
    kept = leaderboard.collect(called_stated(folder, tmp_path / "stated"), tmp_path / "l.jsonl", "small")
    assert Results(tmp_path / "l.jsonl").records == kept.records
    assert set(kept.records) == {f"{COLUMN}/{label}/{seed}" for label in LABELS for seed in (0, 1)}
    for method in comparison(folder)["methods"]:
        for number, seed in enumerate((0, 1)):
            record = kept.records[f"{COLUMN}/{method['label']}/{seed}"]
            numbers = record.numbers
            assert numbers["seed"] == seed
            assert numbers["accuracy"] == method["cells"][method["main"]]["values"][number]
            assert numbers["worst"] == method["worst_decile"]["values"][number]
            assert statistics.fmean(numbers["clients"]) == pytest.approx(numbers["accuracy"], abs=1e-5)
            (place,) = folder.glob(f"*/{method['runs'][number]['folder']}")
            run = RunFolder.open(place)
            assert record.fingerprint == fingerprint(run.experiment)
            assert record.code == method_code(method["algorithm"])
            assert record.date == run.environment["started"][:10]


def test_clients_without_test_data_and_earlier_rounds_are_left_out(leaderboard: Any) -> None:
    rows = {"round": [1, 1, 2, 2, 2], "accuracy": [0.1, 0.2, 0.3333333, None, 0.5]}
    assert leaderboard._clients(rows, "accuracy") == [0.33333, None, 0.5]
    line = {"accuracy": 0.5, "clients": [0.5, None, 0.5]}
    other = {"accuracy": 0.4, "clients": [0.4, 0.9, None]}
    found = leaderboard.ranked({"a": {0: line}, "b": {0: other}})
    assert (found["blocks"], found["ranks"]) == (1, [1.0, 2.0])
    assert leaderboard.ranked({"a": {0: line}, "b": {1: other}}) is None  # no seed in common
    assert leaderboard.ranked({"a": {0: line}}) is None


def test_commands_one_after_the_other_are_as_good_as_one(
    leaderboard: Any, folder: Path, tmp_path: Path
) -> None:
    """Ranks are among all methods, and means over all seeds, whatever the last command had."""
    file, two = tmp_path / "leaderboard.jsonl", ("fedavg", "separate")
    whole = tmp_path / "whole.jsonl"
    leaderboard.collect(called_stated(folder, tmp_path / "stated"), whole, "small")
    first = comparison(part(folder, tmp_path / "0", LABELS, [0]))["ranking"]

    leaderboard.collect(part(folder, tmp_path / "1", two, [0]), file, "small")
    kept = leaderboard.collect(part(folder, tmp_path / "2", ("fedrep",), [0, 1]), file, "small")
    assert kept.about["seeds"] == [0, 1]
    page = leaderboard.board(str, file)
    assert ranks(page) == expected_ranks(first)
    assert f"over {first['blocks']} clients × seeds" in page
    assert [row_of(page, label)[-1] for label in LABELS] == ["1", "1", "2"]
    assert ["±" in row_of(page, label)[1] for label in LABELS] == [False, False, True]
    told = page.splitlines()
    assert "Not all methods have all seeds (0, 1), but fedavg, separate: 0." in told
    assert "Ranks are over seeds 0." in told

    leaderboard.collect(part(folder, tmp_path / "3", two, [1]), file, "small")
    again = leaderboard.collect(part(folder, tmp_path / "4", ("fedavg",), [1]), file, "small")
    assert again.about == Results(whole).about
    assert leaderboard.board(str, file) == leaderboard.board(str, whole)
    assert ranks(leaderboard.board(str, file)) == expected_ranks(comparison(folder)["ranking"])


def test_lines_without_clients_have_the_ranks_that_were_stored(
    leaderboard: Any, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "leaderboard.jsonl"
    kept = leaderboard.collect(part(folder, tmp_path / "1", LABELS, [0]), file, "small")
    for label in ("fedavg", "separate"):
        del kept.records[f"{COLUMN}/{label}/0"].numbers["clients"]
    stored = {"methods": ["separate", "fedavg"], "ranks": [1.25, 1.75], "cliques": [], "blocks": 4}
    kept.about["rankings"] = {COLUMN: {**stored, "critical_difference": 0.5}}
    kept.write()
    page = leaderboard.board(str, file)
    assert ranks(page) == {"separate": "1.2", "fedavg": "1.8", "fedrep": "–"}
    assert "Ranks are of an earlier measurement, among the methods that it had." in page

    again = leaderboard.collect(part(folder, tmp_path / "2", ("fedrep",), [1]), file, "small")
    assert again.about["rankings"] == kept.about["rankings"]
    assert ranks(leaderboard.board(str, file)) == ranks(page)
    leaderboard.collect(part(folder, tmp_path / "3", LABELS, [1]), file, "small")
    page = leaderboard.board(str, file)  # there is a seed of all methods' clients now
    assert ranks(page) == expected_ranks(comparison(tmp_path / "3" / "own")["ranking"])
    assert "Ranks are over seeds 1." in page


def test_what_failed_is_told_until_it_is_there(leaderboard: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "leaderboard.jsonl"
    place = part(folder, tmp_path / "1", ("fedavg", "separate"), [0])
    made = json.loads((place / "reproduction.json").read_text())
    failure = {"label": "fedrep", "algorithm": "fedrep", "seed": 0, "message": "diverged"}
    (place / "reproduction.json").write_text(json.dumps({**made, "failed": [failure]}))
    leaderboard.collect(place, file, "small")
    leaderboard.collect(part(folder, tmp_path / "2", ("fedavg",), [0]), file, "small")
    assert "Failed, all or some runs: fedrep." in leaderboard.board(str, file)
    leaderboard.collect(part(folder, tmp_path / "3", ("fedrep",), [0]), file, "small")
    assert "Failed" not in leaderboard.board(str, file)


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
        leaderboard.collect(called_stated(folder, tmp_path / "stated"), file)
    with pytest.raises(SystemExit, match="no result"):  # with settings of one's own
        leaderboard.collect(folder, file, scale="small")
    with pytest.raises(SystemExit, match="no such file; make it with"):
        leaderboard.collect(tmp_path / "nowhere", file)
    assert not file.exists()
    assert leaderboard.board(str, file).startswith("Nothing has been measured yet")


def test_the_page_asks_for_the_part() -> None:
    text = (DOCS / "leaderboard.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- begin: leaderboard -->\n.*<!-- end -->", text, re.DOTALL)
