"""The papers' tables: every entry can be run as it stands, and numbers are compared as they say."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import sartor
from sartor.algorithms import registered
from sartor.commands.main import app
from sartor.errors import SartorError, SettingError
from sartor.runs.evaluation import CELLS
from sartor.runs.experiment import read_toml
from sartor.runs.inputs import gather
from sartor.runs.metrics import scores
from sartor.runs.record import RunFolder
from sartor.studies import papers, planning, presets, reproduction
from sartor.studies.comparison import FILE, CompareSettings, Plan, check_hyper, estimate, split_table
from sartor.studies.entries import Column, Entry, entries, entry, merged
from sartor.studies.reproduction import number_of, reproduce, within

ENTRIES = entries()
RUNNABLE = [(each, scale) for each in ENTRIES for scale in each.scales if each.cell != "computed"]
BENCHMARKS = ("flower/niid-bench", "pfllib/fashion-mnist", "sartor/leaderboard")
"""Tables that are no paper's, but a library's."""
SMALL = {"rounds": 3, "data": {"clients": 6}, "partition": {"name": "iid"}, "model": {"name": "softmax"}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def comfed(**more: Any) -> reproduction.Reproduction:
    asked: dict[str, Any] = {"methods": ["fedavg", "fedprox"], "settings": SMALL, "out": "made", **more}
    return reproduce("comfed/table4", **asked)


# The entries -----------------------------------------------------------------------------------------------


def test_every_paper_has_its_tables_and_figures() -> None:
    ours = [name for name in papers.names() if name not in BENCHMARKS]
    found = {name.split("/")[0]: set() for name in ours}
    for name in ours:
        found[name.split("/")[0]].add(name.split("/")[1])
    figures = {"comfed": 2, "spfl": 6, "tailored": 10, "diversifed": 9}
    tables = {
        "comfed": {4},
        "spfl": {1, 2, "2-epochs", 6, 7, 8},
        "tailored": {1},
        "diversifed": set(range(1, 9)),
    }
    for paper, names in found.items():
        assert names == {f"fig{n + 1}" for n in range(figures[paper])} | {f"table{n}" for n in tables[paper]}


@pytest.mark.parametrize("each", ENTRIES, ids=lambda each: each.name)
def test_an_entry_is_run_or_says_why_not(each: Entry) -> None:
    ways = [bool(each.cannot), bool(each.same_as), bool(each.scales)]
    assert sum(ways) == 1
    assert each.title
    assert each.place
    if each.same_as:
        assert entry(each.same_as).scales
    if each.scales:
        assert set(each.scales) == {"small", "paper"}
        labels = [column.label for column in each.scales["paper"].columns]
        assert len(set(labels)) == len(labels) > 0
        assert (each.source in ("drawn", "ours")) == (not each.band.values)


@pytest.mark.parametrize(("each", "scale"), RUNNABLE, ids=lambda value: getattr(value, "name", value))
def test_the_experiments_of_an_entry_are_right(each: Entry, scale: str) -> None:
    at = each.scales[scale]
    names = set(registered())
    known = {*CELLS, "local", "observed"}
    for group in planning._groups(at, {}):
        plan = Plan(gather({"experiment": group.settings}))
        options, tables = split_table(plan.compare, CompareSettings, "compare", {}, group.tables)
        methods = plan.methods(options.algorithms, tables, "compare")
        for method in methods:
            assert method.algorithm in names
            check_hyper(method.algorithm, method.hyper, method.label)
        plan.check(methods)
    measures = {*scores(np.ones((1, 2, 2))), "accuracy_weighted"}
    for column in at.columns:
        cell = column.cell or each.cell
        assert cell in known
        assert cell == "observed" or (column.score or each.score) in measures
        assert set(column.hyper) <= set(at.methods)
        if scale == "small" and each.source not in ("drawn", "ours"):
            assert column.paper in {other.label for other in each.scales["paper"].columns}
        if column.round:
            assert column.round <= at.experiment["rounds"]
            assert column.round % at.experiment.get("evaluate", {}).get("every", 1) == 0


@pytest.mark.parametrize("each", ENTRIES, ids=lambda each: each.name)
def test_numbers_lie_where_such_numbers_can_lie(each: Entry) -> None:
    # What a method records of itself may be a distance or a cosine, and what is computed a force.
    scored = each.cell not in ("observed", "computed")
    low, top = (0.0, 100.0 if each.percent else 1.0) if scored else (-math.inf, math.inf)
    bands = [each.band, *(measured.band for measured in each.measured.values())]
    for band in bands:
        assert set(band.deviations) <= set(band.values)
        for method, numbers in band.values.items():
            assert all(number is None or low < number <= top for number in numbers), method
            largest = max(number for number in numbers if number is not None)
            assert not scored or each.percent is (largest > 1)
        for method, numbers in band.deviations.items():
            assert all(number is None or 0 <= number < 0.15 * top for number in numbers), method


def test_the_small_settings_need_no_download() -> None:
    for each in ENTRIES:
        if each.scales and each.cell != "computed":
            small = each.scales["small"]
            names = {group.settings["data"]["name"] for group in planning._groups(small, {})}
            assert names == {"digits"}


def test_numbers_that_the_papers_state_in_words_are_those_of_the_tables() -> None:
    """Differences that the papers' texts print: a digit read wrongly would break them."""
    table = entry("comfed/table4").band.values
    rounds = {300: 2, 1000: 9}
    for other, early, late in (("fedprox", 11.05, 3.51), ("fedyogi", 2.37, 1.19), ("fedavg", 9.96, 2.07)):
        for column, stated in ((rounds[300], early), (rounds[1000], late)):
            assert table["prox-yogi"][column] - table[other][column] == pytest.approx(stated, abs=0.11)
    for place in range(20):  # it "always achieves the best accuracy", twice together with another
        assert table["prox-yogi"][place] == max(numbers[place] or 0.0 for numbers in table.values())
    shares = entry("diversifed/table7").band.values["diversifed"]
    assert [round(share - shares[0], 2) for share in shares[1:]] == [-0.03, -0.21, -0.59]
    table1 = entry("diversifed/table1").band.values
    for method, numbers in entry("diversifed/table7").band.values.items():
        assert numbers[0] == table1[method][1]  # all clients take part in both
    spfl = entry("spfl/table7").band.values
    assert spfl["refresh-10"] == spfl["clients-10"] == spfl["epochs-1"]  # the setting all three share


# Comparing -------------------------------------------------------------------------------------------------


def test_settings_are_merged_and_a_new_choice_forgets_the_old_ones_keys() -> None:
    first = {"rounds": 5, "partition": {"name": "parts", "k": 6}, "data": {"name": "mnist", "clients": 10}}
    assert merged(first, {"rounds": 2}, {"partition": {"k": 3}}) == {
        **first,
        "rounds": 2,
        "partition": {"name": "parts", "k": 3},
    }
    assert merged(first, {"partition": {"name": "dirichlet"}})["partition"] == {"name": "dirichlet"}
    assert merged(first, {"data": {"name": "digits"}})["data"] == {"name": "digits", "clients": 10}
    assert first["partition"] == {"name": "parts", "k": 6}


@pytest.mark.parametrize(
    ("value", "deviation", "percent", "inside"),
    [
        (92.0, 1.0, True, True),
        (91.9, 1.0, True, False),
        (96.1, 1.0, True, False),
        (94.5, 0.0, True, True),
        (94.6, 0.0, True, False),
        (94.004, 0.0, False, True),
        (94.006, 0.0, False, False),
        (94.0, None, True, None),
    ],
)
def test_a_band_is_two_deviations_or_half_a_point(
    value: float, deviation: float | None, percent: bool, inside: bool | None
) -> None:
    assert within(value, 94.0, deviation, percent) is inside


def evaluated(round: int, **cells: float) -> dict[str, Any]:
    return {"round": round, "evaluation": {cell: {"accuracy": value} for cell, value in cells.items()}}


def test_a_number_is_the_last_or_the_best_up_to_its_round() -> None:
    best, last = entry("comfed/table4"), entry("spfl/table1")
    assert (best.when, best.cell, last.when, last.cell) == ("best", "shared_pooled", "last", "local")
    rows = [evaluated(n, shared_pooled=value) for n, value in ((1, 0.2), (2, 0.6), (4, 0.4))]
    assert [number_of(rows, Column("", round=n), best) for n in (1, 3, 4, 0)] == [0.2, 0.6, 0.6, 0.6]
    rows = [evaluated(1, shared_local=0.9, personal_local=0.5), evaluated(2, shared_local=0.3)]
    assert number_of(rows[:1], Column(""), last) == 0.5  # the personal model where there is one
    assert number_of(rows, Column(""), last) == 0.3
    assert number_of(rows, Column("", cell="shared_pooled"), last) is None
    seen = [{"round": 1, "observed": {"distance": 2.5}}]
    assert number_of(seen, Column("", cell="observed", score="distance"), last) == 2.5


def test_the_numbers_are_those_of_the_runs() -> None:
    result = comfed(columns=["5"], seeds=2)
    assert result.seeds == (0, 1)
    (folder,) = result.comparisons
    for number in result.numbers:
        runs = sorted(Path("made", folder).glob(f"{number.method}-s*"))
        expected = [
            100 * max(row["evaluation"]["shared_pooled"]["accuracy"] for row in RunFolder.open(run).rounds)
            for run in runs
        ]
        assert number.ours.values == pytest.approx(expected)
        assert number.ours.mean == pytest.approx(sum(expected) / 2)
    assert json.loads(Path("made/reproduction.json").read_text()) == json.loads(
        json.dumps(result.to_mapping())
    )


def test_the_small_setting_compares_orders_and_not_sizes() -> None:
    result = comfed(methods=["fedavg", "fedprox", "fednova"], columns=["5"])
    assert all(number.difference is None and number.within_paper is None for number in result.numbers)
    paper = entry("comfed/table4").band
    for number in result.numbers:
        assert number.paper == paper.values[number.method][0]  # beside the paper's column 100
    (order,) = result.orders
    assert (order.column, order.paper, order.methods) == ("5", "100", 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "tau"),
    [
        ((1, 2, 3), (10, 20, 30), 1.0),
        ((1, 2, 3), (30, 20, 10), -1.0),
        ((1, 2, 3), (10, 30, 20), 1 / 3),
        ((2, 2, 2), (10, 30, 20), None),
        ((1.04, 0.96, 3), (10.5, 20, 30), 1 / 3**0.5 * 2**0.5),  # the first two are 1.0, as the paper prints
        ((1.26, 1.34, 1.4), (3, 2.5, 1), -2 / 6**0.5),
    ],
)
def test_orders_are_compared_by_pairs(
    ours: tuple[float, ...], theirs: tuple[float, ...], tau: float | None
) -> None:
    numbers = [
        reproduction.Number(f"m{place}", "c", estimate([mine]), other, None, None, None, None, None, None)
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True))
    ]
    numbers.append(dataclasses.replace(numbers[0], method="without", paper=None))
    (order,) = reproduction._orders(numbers, [Column("c", paper="p")])
    assert (order.paper, order.methods) == ("p", 3)
    assert order.tau == (None if tau is None else pytest.approx(tau))
    assert not list(reproduction._orders(numbers[:1], [Column("c")]))


def test_the_papers_setting_compares_sizes() -> None:
    settings = {**SMALL, "data": {"name": "digits", "clients": 6}, "rounds": 2}
    result = reproduce(
        "spfl/table1", scale="paper", seeds=1, methods=["fedavg"], columns=["MNIST IID"], settings=settings
    )
    (number,) = result.numbers
    assert number.paper == 98.46
    assert number.paper_deviation == 0.21
    assert number.ours.mean is not None
    assert number.difference is number.within_paper is None  # it is another experiment
    assert result.settings == settings
    assert result.out == Path("reproductions/spfl-table1-paper")
    at = entry("spfl/table1")
    for seen, within_paper in ((98.0, True), (97.9, False)):
        column = at.scales["paper"].columns[0]
        beside = reproduction._beside(at, "paper", "fedavg", column, estimate([seen]), as_stated=True)
        assert beside.difference == pytest.approx(seen - 98.46)
        assert beside.within_paper is within_paper


def test_runs_are_found_again_also_when_more_is_asked_for() -> None:
    comfed(methods=["fedavg"], columns=["5"])
    again = comfed(columns=["5", "10"])
    (folder,) = again.comparisons
    stored = json.loads(Path("made", folder, FILE).read_text())
    reused = {method["label"]: method["runs"][0]["reused"] for method in stored["methods"]}
    assert reused == {"fedavg": True, "fedprox": False}
    assert {(number.method, number.column) for number in again.numbers} == {
        (method, column) for method in ("fedavg", "fedprox") for column in ("5", "10")
    }


def test_a_column_may_have_hyper_parameters_and_a_method_settings_of_its_own() -> None:
    at = entry("diversifed/table2").scales["paper"]
    some = planning._some(at, ["diversifed", "fedfomo", "separate"], ["CIFAR-10 0.1", "CIFAR-10 1.0"])
    groups = planning._groups(some, {})
    found = {}
    for group in groups:
        (column,) = group.columns
        for label, table in group.tables.items():
            found[label, column.label] = (
                table.get("tau"),
                group.settings["data"].get("validation"),
                group.settings["partition"]["alpha"],
            )
    assert found == {
        ("diversifed", "CIFAR-10 0.1"): (1.0, None, 0.1),
        ("separate", "CIFAR-10 0.1"): (None, None, 0.1),
        ("fedfomo", "CIFAR-10 0.1"): (None, 0.2, 0.1),
        ("diversifed", "CIFAR-10 1.0"): (0.5, None, 1.0),
        ("separate", "CIFAR-10 1.0"): (None, None, 1.0),
        ("fedfomo", "CIFAR-10 1.0"): (None, 0.2, 1.0),
    }
    assert len(groups) == 4


def test_a_figure_that_draws_a_table_is_that_table() -> None:
    result = reproduce("comfed/fig2", methods=["fedavg"], columns=["5"], settings=SMALL)
    assert result.name == "comfed/table4"


def test_the_measured_band_marks_what_lies_outside() -> None:
    at = entry("comfed/table4")
    column, measured = at.scales["small"].columns[-1], at.measured["small"].band
    for method in ("fedavg", "fedprox"):
        before = measured.values[method][-1]
        assert before is not None
        for seen, inside in ((before, True), (before - 30, False)):
            number = reproduction._beside(at, "small", method, column, estimate([seen]), as_stated=True)
            assert (number.measured, number.within_measured) == (before, inside)


def test_settings_of_ones_own_are_stored_and_no_band_is_judged_by() -> None:
    own = comfed(columns=["60"], settings={**SMALL, "rounds": 1})  # one round cannot do what sixty do
    assert [number.within_measured for number in own.numbers] == [None, None]
    assert None not in [number.measured for number in own.numbers]
    assert own.to_mapping()["settings"] == {**SMALL, "rounds": 1}


def test_notes_are_of_the_scale_that_is_run() -> None:
    done = invoke("tailored/fig9", "--methods", "ma-fsvrg", "--columns", "groups = 2", "rounds=1")
    assert done.exit_code == 0, done.output
    assert "Small setting (digits, 50 clients, divided by shards, model softmax, 40 rounds)" in done.stdout
    assert "With settings of your own, so that no band is judged by: rounds=1" in done.stdout
    assert "ours are 15, 10, 100" not in done.stdout  # which are the paper scale's
    assert "ours are 15, 10, 100" in entry("tailored/fig9").scales["paper"].note


@pytest.mark.slow
def test_the_measured_band_holds_today() -> None:
    result = reproduce("comfed/table4", methods=["nova-adam"], seeds=3)  # a mechanism and an optimizer
    assert len(result.numbers) == 5
    assert all(number.within_measured for number in result.numbers)


# Mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("comfed/table5", {}, r"table or figure = 'comfed/table5': unknown name; did you mean comfed/table4"),
        ("comfed/table4", {"scale": "papr"}, "scale = 'papr': unknown name; did you mean paper"),
        ("comfed/table4", {"methods": ["fedvag"]}, "method = 'fedvag': unknown name; did you mean fedavg"),
        ("comfed/table4", {"columns": ["7"]}, "column = '7': unknown name"),
        ("comfed/table4", {"settings": {"data": {"clinets": 3}}}, r"data\.clinets: unknown key"),
        ("comfed/fig1", {}, "comfed/fig1: is not run: an illustration"),
    ],
)
def test_a_mistake_ends_in_one_message(name: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SartorError, match=message) as caught:
        reproduce(name, **asked)
    assert "\n" not in str(caught.value)


def test_an_entry_with_too_few_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = papers.path("spfl/table6").read_text(encoding="utf-8").replace("[97.313, ", "[")
    (tmp_path / "spfl-table99.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(papers, "_FOLDER", tmp_path)
    with pytest.raises(SettingError, match=r"spfl/table99: separate.*one number for every column"):
        entry("spfl/table99")


# The command line ------------------------------------------------------------------------------------------


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


def test_the_command_lists_every_entry() -> None:
    done = invoke()
    assert done.exit_code == 0
    for name in papers.names():
        assert name in done.stdout
    listed = json.loads(invoke("--json").stdout)
    assert [row["name"] for row in listed] == papers.names()
    assert next(row for row in listed if row["name"] == "spfl/table2")["columns"]["small"] == [
        "client",
        "server",
    ]


def test_the_command_prints_ours_beside_theirs() -> None:
    words = ("comfed/table4", "--methods", "fedavg,fednova", "--columns", "5", "rounds=4", "data.clients=6")
    done = invoke(*words, "partition.name=iid", "partition.alpha=", "model.name=softmax")
    assert done.exit_code == 2  # alpha is no setting of iid
    assert "comfed/table4, small: partition.alpha: unknown key" in done.stderr
    words += ("cohort.fraction=1", "model.name=softmax")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "do not compare with the paper's in size" in done.stdout
    assert "33.1" in done.stdout
    assert "order of 2 methods: Kendall's τ" in done.stdout
    numbers = json.loads(invoke(*words, "--json").stdout)["numbers"]
    assert [number["paper"] for number in numbers] == [33.1, 24.5]


def test_the_command_tells_mistakes() -> None:
    assert "name the table or figure it is for" in invoke("rounds=2").stderr
    done = invoke("diversifed/fig3")
    assert done.exit_code == 2
    assert "is not run: an illustration" in done.stderr


def test_presets_and_entries_of_one_name_have_one_setting() -> None:
    for name in set(presets.names()) & set(papers.names()):
        stored = entry(name).scales["paper"].experiment
        assert stored == read_toml(presets.path(name))


def test_reproduce_is_public() -> None:
    assert sartor.reproduce is reproduce
    assert sartor.reproduce_all is reproduction.reproduce_all
