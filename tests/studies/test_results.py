"""Measured numbers on file: read as written, and known to be old when their method has changed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sartor.algorithms import registered
from sartor.algorithms.source import code_hash, method_code
from sartor.errors import SartorError, SettingError
from sartor.runs.experiment import Experiment, fingerprint, from_mapping, to_mapping
from sartor.runs.record import RunFolder
from sartor.studies import library
from sartor.studies import results as module
from sartor.studies.comparison import compare
from sartor.studies.entries import Band, entries, entry
from sartor.studies.planning import planned
from sartor.studies.reproduction import reproduce
from sartor.studies.results import Record, Results

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


def fingerprint_then(experiment: Experiment) -> str:
    """As it was while ``engine.compile`` was a setting, until 2026-11-18."""
    mapping = to_mapping(experiment)
    mapping["engine"]["compile"] = "auto"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sartor.runs.experiment.portable", lambda _: mapping)
        return fingerprint(experiment)


def test_the_experiments_of_the_scripts_are_those_of_their_files() -> None:
    """A sample of each file: what the script would run today is what has the stored fingerprint."""
    spfl, diversifed = script("spfl_tables"), script("diversifed_tables")
    stored = Results(ROOT / "results" / "spfl-table2-mnist.jsonl")
    for key, record in list(stored.records.items())[::6]:
        label, preset, *rest = json.loads(key)
        run = next(row for row in spfl.TABLE_2 if row.label == label)
        made = from_mapping(spfl.experiment(run, preset, *rest))
        assert record.fingerprint == fingerprint_then(made)
    stored = Results(ROOT / "results" / "diversifed-cifar10.jsonl")
    for key, record in list(stored.records.items())[::40]:
        if not key.startswith("search"):
            split, method, candidate, seed = key.split(" | ")
            made = from_mapping(
                diversifed.experiment("cifar10", split, method, int(candidate), int(seed), 100)
            )
            assert record.fingerprint == fingerprint_then(made)


def test_a_reproduction_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some: dict[str, Any] = {"methods": ["tau-0.5"], "settings": {"engine": {"name": "loop"}}}
    at = {"rounds": 1, "data": {"name": "digits", "clients": 5}, "model": {"name": "softmax"}}
    monkeypatch.setattr("sartor.studies.entries._experiment", lambda *_: at)
    entry.cache_clear()
    try:
        made = reproduce("diversifed/fig7", **some, seeds=3, out=tmp_path)  # as many as the entry has
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
    assert table["code"]["tau-0.5"] == method_code("diversifed")
    ours = [number.ours.mean for number in made.numbers]
    assert table["values"]["tau-0.5"] == pytest.approx(ours, abs=1e-4)
    assert Band(table["values"], table["deviations"]).at("tau-0.5", 0)[1] is not None


ENTRY = """
title = "Few clients"
paper = "none"
place = "Table 1"

[experiment]
rounds = 1
data = {name = "digits", clients = 5}
model = {name = "softmax"}
engine = {name = "loop"}

[[columns]]
label = "all alike"
settings = {partition = {name = "iid"}}

[[columns]]
label = "two classes"
settings = {partition = {name = "classes", k = 2}}

[methods.fedavg]
algorithm = "fedavg"

[methods.twin]
algorithm = "fedavg"

[methods.separate]
algorithm = "separate"
"""
METHODS, COLUMNS = ("fedavg", "twin", "separate"), ("all alike", "two classes")


class Kept:
    """An entry in a file of its own, and the scripts' commands for it one after the other."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.file = place, place / "own.toml"
        self.results = place / "results" / "own-table-paper.jsonl"
        self.file.write_text(ENTRY)
        self.ours: dict[tuple[str, str, int], float] = {}
        self.keep = script("keep")
        self.monkeypatch = monkeypatch
        monkeypatch.setattr("sartor.studies.papers.path", lambda name: self.file)
        monkeypatch.setattr(self.keep, "RESULTS", self.results.parent)

    def command(self, seeds: list[int], **asked: Any) -> dict[str, Any]:
        """Reproduce, keep, and give what the entry has now; the folder is gone for the next."""
        entry.cache_clear()
        out = self.place / f"made{len(list(self.place.iterdir()))}"
        made = reproduce("own/table", scale="paper", seeds=seeds, out=out, **asked)
        for number in made.numbers if "settings" not in asked else ():
            for seed, value in zip(seeds, number.ours.values, strict=True):
                assert value is not None
                self.ours[number.method, number.column, seed] = value
        self.monkeypatch.setattr(sys, "argv", ["keep.py", str(out)])
        self.keep.main()
        return self.measured()

    def measured(self) -> dict[str, Any]:
        entry.cache_clear()
        assert "paper" in entry("own/table").measured  # it can be read
        found: dict[str, Any] = tomllib.loads(self.file.read_text())["measured"]["paper"]
        return found

    def put(self, table: str) -> None:
        """Give the entry other numbers."""
        self.file.write_text(self.keep.placed(self.file.read_text(), "paper", table))

    def lines(self, change: Any) -> None:
        """Change the numbers of all lines."""
        results = Results(self.results)
        results.records = {key: change(record) for key, record in results.records.items()}
        results.write()

    def mean(self, method: str, column: str, seeds: list[int]) -> float:
        return round(statistics.fmean(self.ours[method, column, seed] for seed in seeds), 1)

    def deviation(self, method: str, column: str, seeds: list[int]) -> float:
        return round(statistics.stdev(self.ours[method, column, seed] for seed in seeds), 1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    yield Kept(tmp_path, monkeypatch)
    entry.cache_clear()


def test_seeds_of_several_commands_are_one_mean(kept: Kept) -> None:
    kept.command([0], methods=["separate"])
    table = kept.command([0], methods=["fedavg", "twin"])  # other methods stay
    assert table["seeds"] == "0"
    assert "deviations" not in table
    assert list(table["values"]) == list(METHODS)
    for method in METHODS:
        assert table["values"][method] == [kept.mean(method, column, [0]) for column in COLUMNS]

    table = kept.command([2, 1], columns=["two classes"])
    assert table["seeds"] == "0; two classes: 0, 1, 2"
    assert table["command"] == "sartor reproduce own/table --scale paper --seeds 1"
    for method in METHODS:
        means = [kept.mean(method, "all alike", [0]), kept.mean(method, "two classes", [0, 1, 2])]
        assert table["values"][method] == means
        assert table["deviations"][method][1] == kept.deviation(method, "two classes", [0, 1, 2])

    table = kept.command([1], columns=["all alike"], methods=["separate"])
    assert table["seeds"] == "0; two classes: 0, 1, 2; all alike (separate): 0, 1"
    assert table["values"]["separate"][0] == kept.mean("separate", "all alike", [0, 1])
    assert table["values"]["fedavg"][0] == kept.mean("fedavg", "all alike", [0])

    kept.command([1, 2], columns=["all alike"])
    table = kept.command([1], methods=["fedavg"])  # once more, which changes nothing
    assert table["seeds"] == "0, 1, 2"
    assert table["command"].endswith("--seeds 3")
    for method in METHODS:
        assert table["values"][method] == [kept.mean(method, column, [0, 1, 2]) for column in COLUMNS]
    assert Results(kept.results).about["seeds"] == [0, 1, 2]
    assert "before" not in Results(kept.results).about


def test_a_line_has_what_its_run_gave(kept: Kept) -> None:
    kept.command([0, 1])
    for record in Results(kept.results).records.values():
        label, seed = record.numbers["label"], record.numbers["seed"]
        (column,) = record.numbers["values"]
        assert record.numbers["values"][column] == kept.ours[label, column, seed]
        same = {"twin": {column: kept.ours["twin", column, seed]}} if label == "fedavg" else None
        assert record.numbers.get("same") == same


def without_values(record: Record) -> Record:
    """As lines were written once."""
    numbers = {key: value for key, value in record.numbers.items() if key not in ("values", "same")}
    return dataclasses.replace(record, numbers=numbers)


def test_a_single_seed_whose_lines_have_no_values_is_the_entrys(kept: Kept) -> None:
    table = kept.command([0])
    ours = table["values"]["separate"]

    kept.lines(without_values)
    kept.put(
        kept.file.read_text()[kept.file.read_text().index("[measured.paper]") :].replace(str(ours[1]), "1.0")
    )
    kept.ours["separate", "two classes", 0] = 1.0
    for seeds in ([1], [2, 3]):  # twice: what it had is not lost in a mean
        table = kept.command(seeds, columns=["two classes"], methods=["separate"])
    assert table["seeds"] == "0; two classes (separate): 0, 1, 2, 3"
    assert table["values"]["separate"] == [ours[0], kept.mean("separate", "two classes", [0, 1, 2, 3])]
    assert table["values"]["twin"] == [kept.mean("twin", column, [0]) for column in COLUMNS]
    table = kept.command([0], columns=["two classes"], methods=["separate"])
    assert kept.ours["separate", "two classes", 0] != 1.0  # measured again
    assert table["values"]["separate"][1] == kept.mean("separate", "two classes", [0, 1, 2, 3])


def test_a_mean_of_several_seeds_without_lines_stays_until_all_of_them_are_there(kept: Kept) -> None:
    words = "[measured.paper]\ndate = '2026-01-01'\nhardware = 'one'\nseeds = '0, 1'\ncommand = 'c'\n\n"
    words += "[measured.paper.values]\nfedavg = [1.0, 2.0]\nseparate = [nan, 3.0]\n\n"
    kept.put(
        words + "[measured.paper.deviations]\nfedavg = [0.5, 0.6]\n\n[measured.paper.code]\nfedavg = 'a1'"
    )
    table = kept.command([1, 2], methods=["separate", "fedavg"])
    assert table["values"]["fedavg"] == [1.0, 2.0]
    assert table["deviations"]["fedavg"] == [0.5, 0.6]
    assert table["values"]["separate"] == [kept.mean("separate", "all alike", [1, 2]), 3.0]
    assert table["seeds"] == "0, 1; all alike (separate): 1, 2"
    table = kept.command([0], methods=["fedavg"])  # now there are
    assert table["values"]["fedavg"] == [kept.mean("fedavg", column, [0, 1, 2]) for column in COLUMNS]
    assert table["values"]["separate"][1] == 3.0


def test_settings_of_ones_own_are_in_no_mean(kept: Kept) -> None:
    kept.command([0])
    kept.command([1], settings={"rounds": 2})
    table = kept.command([2])
    assert len({record.numbers["seed"] for record in Results(kept.results).records.values()}) == 3
    assert table["seeds"] == "0, 2"
    assert table["values"]["fedavg"] == [kept.mean("fedavg", column, [0, 2]) for column in COLUMNS]


def test_the_code_is_an_old_one_while_a_number_is_of_it(kept: Kept) -> None:
    now = {
        "fedavg": method_code("fedavg"),
        "twin": method_code("fedavg"),
        "separate": method_code("separate"),
    }
    assert kept.command([0])["code"] == now
    kept.lines(lambda record: dataclasses.replace(record, code="b" * 12, date="2026-01-01"))
    table = kept.command([1], methods=["fedavg"])
    assert table["code"] == dict.fromkeys(METHODS, "b" * 12)
    assert table["values"]["fedavg"][0] == kept.mean("fedavg", "all alike", [0, 1])
    table = kept.command([0], methods=["fedavg", "twin"], columns=["all alike"])
    assert table["code"]["fedavg"] == "b" * 12  # with two classes
    assert kept.command([0])["code"] == now


def test_numbers_without_lines_are_of_the_code_that_the_entry_had(kept: Kept) -> None:
    kept.command([0])

    kept.lines(without_values)
    text = kept.file.read_text()
    kept.put(text[text.index("[measured.paper]") :].replace(method_code("separate"), "b" * 12))
    assert kept.command([0], methods=["separate"], columns=["two classes"])["code"]["separate"] == "b" * 12
    assert kept.command([0], methods=["separate"])["code"]["separate"] == method_code("separate")


def test_what_is_missing_can_be_asked_for(kept: Kept) -> None:
    """From wherever the other numbers are: their runs need not be there."""

    def left(**asked: Any) -> dict[str, list[str]]:
        entry.cache_clear()
        work = planned("own/table", scale="paper", missing=True, **asked)
        return {group.words: list(group.tables) for group in work.groups}

    everything = {column: list(METHODS) for column in COLUMNS}
    assert left(seeds=1) == everything
    kept.command([0], methods=["separate"])
    kept.command([0], methods=["fedavg"], columns=["two classes"])
    assert left(seeds=1) == {"all alike": ["fedavg", "twin"], "two classes": ["twin"]}
    assert left(seeds=1, columns=["two classes"]) == {"two classes": ["twin"]}
    assert left(seeds=[0, 1]) == everything
    made = reproduce("own/table", scale="paper", seeds=1, missing=True, out=kept.place / "rest")
    assert {(number.method, number.column) for number in made.numbers} == {
        ("fedavg", "all alike"),
        ("twin", "all alike"),
        ("twin", "two classes"),
    }
    with pytest.raises(SettingError, match="of the entry's own settings"):
        left(seeds=1, settings={"rounds": 2})
    kept.command([0])
    with pytest.raises(SartorError, match="own/table, paper: no number is missing"):
        left(seeds=1)


FIGURE = (
    ENTRY[: ENTRY.index("[[columns]]")]
    + """
[[columns]]
label = "few"
settings = {partition = {name = "classes", k = 2}}

[methods.usual]
algorithm = "fedavg"

[methods.again]
algorithm = "fedavg"

[methods.slow]
algorithm = "fedavg"
hyper = {lr = 0.001}
"""
)


@pytest.mark.parametrize("changed", [None, "code", "hardware"])
def test_a_run_that_another_entry_has_is_taken_over(
    kept: Kept, changed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it would come out the same."""
    kept.command([0, 1])
    if changed == "code":
        kept.lines(lambda record: dataclasses.replace(record, code="b" * 12))
    if changed == "hardware":
        results = Results(kept.results)
        results.about["hardware"] = ["another"]
        results.write()
    figure, out = kept.place / "figure.toml", kept.place / "figure"
    figure.write_text(FIGURE)
    files = {"own/table": kept.file, "own/figure": figure}
    monkeypatch.setattr("sartor.studies.papers.path", files.__getitem__)
    made = reproduce("own/figure", scale="paper", seeds=[1], methods=["slow"], out=out)
    monkeypatch.setattr(sys, "argv", ["keep.py", str(out)])
    kept.keep.main()
    values = tomllib.loads(figure.read_text())["measured"]["paper"]["values"]
    assert values["slow"] == [round(made.numbers[0].ours.values[0] or 0.0, 1)]
    assert values["slow"] != [kept.mean("fedavg", "two classes", [1])]
    if changed is None:
        assert values["usual"] == values["again"] == [kept.mean("fedavg", "two classes", [1])]
    else:
        assert list(values) == ["slow"]
    lines = Results(kept.results.with_name("own-figure-paper.jsonl")).records.values()
    assert {record.numbers["label"] for record in lines} <= {"usual", "slow"}


def test_words_of_seeds_are_read_as_they_are_written() -> None:
    keep = script("keep")
    columns = ["MNIST IID", "MNIST non-IID", "CIFAR-10 IID", "CIFAR-10 non-IID", "CIFAR-100 IID"]
    seeds: dict[tuple[str, str], tuple[int, ...]] = {}
    seeds |= {(method, column): (0, 1, 2) for column in columns for method in ("a", "b", "c")}
    seeds |= {(method, column): (0,) for column in columns[2:4] for method in ("a", "b", "c")}
    assert keep.seeds_text(seeds) == "0, 1, 2; CIFAR-10: 0"
    seeds |= {("b", "CIFAR-10 IID"): (3, 10), ("c", "MNIST IID"): (0,)}
    del seeds["a", "MNIST non-IID"]
    text = keep.seeds_text(seeds)
    assert text == "0, 1, 2; CIFAR-10: 0; MNIST IID (c): 0; CIFAR-10 IID (b): 3, 10"
    seeds |= {(method, "MNIST IID"): (0,) for method in ("a", "b", "c")}
    for words in (text, keep.seeds_text(seeds)):
        read = {cell: keep.seeds_of(words, *cell, columns) for cell in seeds}
        assert keep.seeds_text(read) == words
    assert read == seeds
    assert keep.seeds_of("0, three times", "a", "MNIST IID", columns) == ()
    columns = ["other", "another", "alike", "alike by seed"]  # a column's name may begin another's
    for own in ((0,), (0, 1)):
        seeds = {
            ("a", "other"): (0,),
            ("a", "another"): (0,),
            ("a", "alike"): (1,),
            ("a", "alike by seed"): own,
        }
        words = keep.seeds_text(seeds)
        assert {cell: keep.seeds_of(words, *cell, columns) for cell in seeds} == seeds


def test_words_of_seeds_of_all_entries_are_known() -> None:
    keep = script("keep")
    for each in entries():
        for scale, measured in each.measured.items():
            methods, columns = each.scales[scale].methods, each.scales[scale].columns
            names = [column.label for column in columns]
            cells = [(label, name) for name in names for label in methods]
            assert not {sign for cell in cells for label in cell for sign in label} & set("();:,")
            if measured.seeds != "0, three times":
                assert all(keep.seeds_of(measured.seeds, *cell, names) for cell in cells)


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
