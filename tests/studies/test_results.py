"""Measured numbers on file: read as written, and known to be old when their method has changed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sartor.algorithms import registered
from sartor.algorithms.source import code_hash, method_code
from sartor.errors import SartorError
from sartor.runs.experiment import fingerprint, from_mapping
from sartor.runs.record import RunFolder
from sartor.studies import library
from sartor.studies import results as module
from sartor.studies.comparison import compare
from sartor.studies.entries import Band, Measured, entries, entry
from sartor.studies.reproduction import reproduce
from sartor.studies.results import Results

ROOT = Path(__file__).parents[2]
STORED = sorted((ROOT / "results").glob("*.jsonl"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "measurements" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = Results(tmp_path / "deep" / "mine.jsonl", {"seeds": [0, 1]})
    kept.add("a", {"accuracy": [0.1, None]}, method="ditto", experiment={"rounds": 3, "hyper": {"lam": 0.5}})
    kept.add("b", {"curve": {"1": 1 / 3}}, method="fedavg")
    kept.add("a", {"accuracy": [0.2]}, method="ditto", experiment={"rounds": 3, "hyper": {"lam": 0.5}})
    again = Results(kept.path)
    assert again.about == {"seeds": [0, 1]}
    assert again.records == kept.records
    assert again.numbers == {"a": {"accuracy": [0.2]}, "b": {"curve": {"1": 1 / 3}}}
    assert again.stale() == {}
    settings = {"algorithm": "ditto", "rounds": 3, "hyper": {"lam": 0.5}}
    assert again.records["a"].fingerprint == fingerprint(from_mapping(settings))
    assert again.records["b"].fingerprint is None
    assert len(kept.path.read_text().splitlines()) == 3


@pytest.mark.parametrize("line", ["{", "{}", '{"key": "a"}', "[1]"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(f'{{"about": {{}}}}\n{line}\n')
    with pytest.raises(SartorError, match=r"mine\.jsonl, line 2: not a file of results"):
        Results(file)


# What counts as a change -----------------------------------------------------------------------------------

METHOD = """
from sartor.algorithms.base import Algorithm
from sartor.algorithms.server.weights import mean

class Hyper:
    mu: float = setting(0.1, "pull")

class Method(Algorithm):
    name = "method"
    buffers = "average"

    def round(self, w, z):
        return mean(w - self.mu * z)
"""
HELPER = "def mean(x):\n    return x.mean()\n"


def hashed(method: str = METHOD, helper: str = HELPER) -> str:
    texts = {"sartor.algorithms.mine": method, "sartor.algorithms.server.weights": helper}
    return code_hash(["sartor.algorithms.mine"], texts.get)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        return mean", "        # why\n        return mean"),
        ("z):\n", 'z):\n        """In words."""\n'),
        ('"pull"', '"how strongly it is pulled", symbol="μ"'[:28]),
        ("mean(w - self.mu * z)", "mean(\n            w - self.mu * z\n        )"),
        ("class Hyper", "import math\n\nclass Hyper"),
        ('name = "method"', 'name = "method"\n    unprotected = (("samples", "why"),)'),
        ("    def round", "    @changes(w=lambda task, w: w)\n    def round"),
    ],
)
def test_words_and_declarations_are_no_change(before: str, after: str) -> None:
    assert before in METHOD
    assert hashed(METHOD.replace(before, after)) == hashed()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("w - self", "w + self"),
        ("setting(0.1", "setting(0.2"),
        ('buffers = "average"', 'buffers = "local"'),
        ("mean(w", "sum(w"),
        ("    def round", "    @staticmethod\n    def round"),
    ],
)
def test_what_a_method_does_is_a_change(before: str, after: str) -> None:
    assert before in METHOD
    assert hashed(METHOD.replace(before, after)) != hashed()


def test_a_method_changes_with_what_it_imports_of_others() -> None:
    assert hashed(helper=HELPER.replace("mean()", "sum()")) != hashed()
    assert hashed(helper=f"# Means.\n{HELPER}") == hashed()


def test_methods_of_other_files_differ() -> None:
    names = ("fedavg", "ditto", "spfl", "prox-yogi", "scaf-sgd")
    assert len({method_code(name) for name in names}) == 4  # all of ComFed is one file
    assert method_code("prox-yogi") == method_code("scaf-sgd")


def test_old_numbers_are_known_by_their_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Results(tmp_path / "mine.jsonl")
    for key, method in (("a", "ditto"), ("b", "ditto"), ("c", "fedavg")):
        kept.add(key, {}, method=method)
    today = kept.records["a"].date
    real = method_code
    monkeypatch.setattr(module, "method_code", lambda name: "other" if name == "ditto" else real(name))
    assert Results(kept.path).stale() == {"ditto": today}


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_numbers_say_what_they_are_of(path: Path) -> None:
    stored = Results(path)
    assert stored.records
    for record in stored.records.values():
        assert record.method in registered()
        assert len(record.code) == 12
        assert record.fingerprint is None or len(record.fingerprint) == 64
        assert record.date.startswith("20")
        assert record.numbers


def test_a_run_that_is_used_again_is_told_to_be_older_than_its_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> list[str]:
        compare(["fedavg"], clients=3, rounds=1, model="softmax", references=False, seeds=2, out=tmp_path)
        return [record.message for record in caplog.records if "which is used again" in record.message]

    assert warned() == []
    for folder in tmp_path.glob("fedavg-*"):
        assert RunFolder.open(folder).environment["method"] == method_code("fedavg")
    assert warned() == []
    monkeypatch.setattr(library, "method_code", lambda name: "other")
    (words,) = warned()  # once, of two runs
    assert words.startswith("fedavg: has changed since")


def test_bands_know_which_methods_have_changed() -> None:
    measured = [(each, scale) for each in entries() for scale in each.measured]
    assert measured
    for each, scale in measured:
        band = each.measured[scale]
        assert set(band.code) <= set(band.band.values)
    each = entry("comfed/table4")
    at = each.scales["small"]
    now = {label: method_code(at.methods[label].algorithm) for label in ("fedavg", "fedprox")}
    band = dataclasses.replace(each.measured["small"], code={**now, "fedprox": "before"})
    assert band.stale(at) == ["fedprox"]


# The scripts -----------------------------------------------------------------------------------------------


def test_the_experiments_of_the_scripts_are_those_of_their_files() -> None:
    """A sample of each file: what the script would run today has the stored fingerprint."""
    spfl, diversifed = script("spfl_tables"), script("diversifed_tables")
    stored = Results(ROOT / "results" / "spfl-table2-mnist.jsonl")
    for key, record in list(stored.records.items())[::6]:
        label, preset, *rest = json.loads(key)
        run = next(row for row in spfl.TABLE_2 if row.label == label)
        made = from_mapping(spfl.experiment(run, preset, *rest))
        assert record.fingerprint == fingerprint(made)
    stored = Results(ROOT / "results" / "diversifed-cifar10.jsonl")
    for key, record in list(stored.records.items())[::40]:
        if not key.startswith("search"):
            split, method, candidate, seed = key.split(" | ")
            made = from_mapping(
                diversifed.experiment("cifar10", split, method, int(candidate), int(seed), 100)
            )
            assert record.fingerprint == fingerprint(made)


def test_a_reproduction_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some: dict[str, Any] = {"methods": ["tau-0.5"], "settings": {"engine": {"name": "loop"}}}
    at = {"rounds": 1, "data": {"name": "digits", "clients": 5}, "model": {"name": "softmax"}}
    monkeypatch.setattr("sartor.studies.entries._experiment", lambda *_: at)
    entry.cache_clear()
    try:
        made = reproduce("diversifed/fig7", **some, seeds=2, out=tmp_path)
        monkeypatch.setattr(sys, "argv", ["keep.py", str(tmp_path), "--out", str(tmp_path / "kept.jsonl")])
        script("keep").main()
    finally:
        entry.cache_clear()
    kept = Results(tmp_path / "kept.jsonl")
    assert list(kept.records) == list(made.numbers[0].runs)
    for record in kept.records.values():
        assert record.method == "diversifed"
        assert record.code == method_code("diversifed")
        assert record.numbers["columns"] == ["pulled together", "pushed apart"]
        assert record.numbers["curves"]["distance_repelled"]
    table = tomllib.loads(capsys.readouterr().out)["measured"]["small"]
    assert table["code"] == {"tau-0.5": method_code("diversifed")}
    ours = [number.ours.mean for number in made.numbers]
    assert table["values"]["tau-0.5"] == pytest.approx(ours, abs=1e-4)
    assert Band(table["values"], table["deviations"]).at("tau-0.5", 0)[1] is not None


def test_what_was_measured_of_other_methods_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same seeds alone: other seeds make other means."""
    keep, known = script("keep"), entry("diversifed/fig8")
    before = Measured("2026-01-01", "a GPU", "0", "", Band({"other": (1.0, None, 3.0)}, {}), {"other": "a1"})
    monkeypatch.setattr(keep, "entry", lambda name: dataclasses.replace(known, measured={"small": before}))
    column = known.scales["small"].columns[1].label
    number = {"method": "diversifed", "column": column, "ours": {"mean": 90.04, "deviation": None}}
    made = {"name": known.name, "scale": "small", "percent": True, "numbers": [number], "hardware": ["a GPU"]}
    nan = pytest.approx(float("nan"), nan_ok=True)
    for seeds, others in (([0], {"other": [1.0, nan, 3.0]}), ([0, 1], {})):
        printed = keep.measured({**made, "seeds": seeds}, "2026-01-02", {"diversifed": "b2"})
        table = tomllib.loads(printed)["measured"]["small"]
        assert table["values"] == {**others, "diversifed": [nan, 90.0, nan]}
        assert table["code"] == {**dict.fromkeys(others, "a1"), "diversifed": "b2"}


def test_numbers_take_the_place_of_those_an_entry_had() -> None:
    placed, tables = (
        script("keep").placed,
        "[measured.small]\nseeds = '1'\n\n[measured.small.values]\na = [2]",
    )
    known = "[small]\nrounds = 1\n\n{}[measured.paper]\nseeds = '0'\n\n[measured.paper.values]\na = [9]\n"
    old = "[measured.small]\nseeds = '0'\n\n[measured.small.values]\na = [\n  1]\n\n"
    old += "[measured.small.code]\na = 'x'\n\n"
    for text in (known.format(old), known.format(""), old.rstrip() + "\n", old + "[methods.a]\nb = 1\n"):
        expected = tomllib.loads(text)
        expected.setdefault("measured", {})["small"] = {"seeds": "1", "values": {"a": [2]}}
        once = placed(text, "small", tables)
        assert tomllib.loads(once) == expected
        assert placed(once, "small", tables) == once


def test_what_is_computed_is_kept_without_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = reproduce("diversifed/fig4", out=tmp_path)
    monkeypatch.setattr(sys, "argv", ["keep.py", str(tmp_path), "--out", str(tmp_path / "kept.jsonl")])
    script("keep").main()
    assert not (tmp_path / "kept.jsonl").exists()
    values = tomllib.loads(capsys.readouterr().out)["measured"]["small"]["values"]
    assert values["both"] == pytest.approx(
        [number.ours.mean for number in made.numbers if number.method == "both"], abs=1e-4
    )
