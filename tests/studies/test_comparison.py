"""Comparing methods: the same clients for all, numbers that follow from the runs, runs found again."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from typer.testing import CliRunner

import sartor.studies.comparison
from helpers import classification
from sartor.algorithms import registered
from sartor.commands.compare import ranking_lines
from sartor.commands.main import app
from sartor.data.clients import ClientData, from_clients
from sartor.data.features import Hog
from sartor.errors import DataError, SartorError, SettingError
from sartor.runs.experiment import fingerprint, load
from sartor.runs.record import RunFolder
from sartor.studies import library
from sartor.studies.comparison import Comparison, RankingResult, compare

SIZES = (12, 30, 18, 24, 15)
SETTINGS: dict[str, Any] = {"model": "softmax", "rounds": 3, "engine": "loop", "local": {"batch": 8}}


@pytest.fixture(scope="module")
def data() -> ClientData:
    """Five clients; the last one has no test samples."""
    made = classification(SIZES, shape=(6,), classes=4)
    count = made.test.count.copy()
    count[4] = 0
    return dataclasses.replace(made, test=dataclasses.replace(made.test, count=count))


def go(algorithms: Any, data: Any, out: Path, **settings: Any) -> Comparison:
    return compare(algorithms, data=data, out=out, **{**SETTINGS, "seeds": 2, **settings})


@pytest.fixture(scope="module")
def result(data: ClientData, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """FedAvg against the references, with a target that some seeds may miss."""
    return go(["fedavg"], data, tmp_path_factory.mktemp("compared"), target=0.6)


def stored(result: Comparison, label: str) -> list[RunFolder]:
    return [RunFolder.open(result.out / run.folder) for run in result.method(label).runs]


def values_of(run: RunFolder, column: str) -> list[float | None]:
    columns = run.clients
    last = max(columns["round"])
    return [value for value, round in zip(columns[column], columns["round"], strict=True) if round == last]


def without_times(mapping: dict[str, Any]) -> Any:
    """A comparison without what differs between two that should be equal."""
    mapping = json.loads(json.dumps(mapping, default=str))
    for method in mapping["methods"]:
        del method["seconds"], method["runs"]
        if method["to_target"]:
            del method["to_target"]["seconds"]
    return mapping


# The numbers follow from the runs --------------------------------------------------------------------------


def test_the_references_stand_beside_every_comparison(
    result: Comparison, data: ClientData, tmp_path: Path
) -> None:
    assert [(method.label, method.reference) for method in result.methods] == [
        ("fedavg", False),
        ("separate", True),
        ("fedupdate", True),
    ]
    named = go(["fedupdate", "fedavg"], data, tmp_path, seeds=1, rounds=1)
    assert [(method.label, method.reference) for method in named.methods] == [
        ("fedupdate", False),
        ("fedavg", False),
        ("separate", True),
    ]
    alone = go(["fedavg"], data, tmp_path, seeds=1, rounds=1, references=False)
    assert [method.label for method in alone.methods] == ["fedavg"]
    assert (alone.pairs, alone.ranking) == ((), None)


def test_the_main_number_is_of_the_personal_model_where_there_is_one(result: Comparison) -> None:
    assert {method.label: method.main for method in result.methods} == {
        "fedavg": "shared_local",
        "separate": "personal_local",
        "fedupdate": "personal_local",
    }
    assert set(result.method("fedavg").cells) == {"shared_pooled", "shared_local"}
    assert set(result.method("separate").cells) == {"personal_pooled", "personal_local"}
    assert len(result.method("fedupdate").cells) == 4


@pytest.mark.parametrize("label", ["fedavg", "separate", "fedupdate"])
def test_a_number_is_mean_and_sample_deviation_over_the_runs(result: Comparison, label: str) -> None:
    method = result.method(label)
    summaries = [run.summary for run in stored(result, label)]
    assert [summary["seed"] for summary in summaries] == list(result.seeds) == [0, 1]
    expected = {
        **{cell: [summary["accuracy"][cell] for summary in summaries] for cell in method.cells},
        "worst": [summary["last"][method.main]["accuracy_spread"]["worst_decile"] for summary in summaries],
        "clients": [summary["last"][method.main]["accuracy_spread"]["deviation"] for summary in summaries],
        "bytes": [summary["bytes_down"] + summary["bytes_up"] for summary in summaries],
        "seconds": [summary["seconds"] for summary in summaries],
    }
    found = {
        **method.cells,
        "worst": method.worst_decile,
        "clients": method.client_deviation,
        "bytes": method.bytes,
        "seconds": method.seconds,
    }
    for name, values in expected.items():
        assert found[name].values == pytest.approx(values), name
        assert found[name].mean == pytest.approx(statistics.mean(values)), name
        assert found[name].deviation == pytest.approx(statistics.stdev(values)), name
    assert method.best_by_validation == {}


def test_pairs_are_tested_over_clients_and_seeds(result: Comparison) -> None:
    assert [(pair.first, pair.second) for pair in result.pairs] == [
        ("fedavg", "separate"),
        ("fedavg", "fedupdate"),
        ("separate", "fedupdate"),
    ]
    for pair in result.pairs:
        differences = []
        for one, other in zip(stored(result, pair.first), stored(result, pair.second), strict=True):
            main = f"{result.method(pair.first).main}_accuracy", f"{result.method(pair.second).main}_accuracy"
            both = zip(values_of(one, main[0]), values_of(other, main[1]), strict=True)
            differences.append([a - b for a, b in both if a is not None and b is not None])
        every = np.round(np.concatenate(differences), 12)
        assert pair.pairs == len(every) == 2 * 4  # the client without test samples is left out
        counts = ((every > 0).sum(), (every == 0).sum(), (every < 0).sum())
        assert (pair.better, pair.equal, pair.worse) == counts
        assert pair.seeds_better == sum(np.mean(each) > 0 for each in differences)
        assert pair.mean_difference == pytest.approx(every.mean())
        assert pair.interval[0] <= pair.mean_difference <= pair.interval[1]
        ranks = stats.rankdata(abs(every[every != 0]))
        signed = (np.sign(every[every != 0]) * ranks).sum() / ranks.sum() if len(ranks) else 0.0
        assert pair.rank_biserial == pytest.approx(signed)
    p_values = sorted(pair.p for pair in result.pairs)
    assert min(pair.p_holm for pair in result.pairs) == pytest.approx(min(1.0, 3 * p_values[0]))


def test_ranks_are_friedmans(result: Comparison) -> None:
    assert result.ranking is not None
    columns = [
        [
            value
            for run in stored(result, method.label)
            for value in values_of(run, f"{method.main}_accuracy")
            if value is not None
        ]
        for method in result.methods
    ]
    expected = stats.friedmanchisquare(*columns)
    assert result.ranking.statistic == pytest.approx(expected.statistic)
    assert result.ranking.blocks == 8
    assert list(result.ranking.ranks) == sorted(result.ranking.ranks)
    ranks = stats.rankdata(-np.asarray(columns), axis=0).mean(axis=1)
    found = dict(zip(result.ranking.methods, result.ranking.ranks, strict=True))
    assert [found[method.label] for method in result.methods] == pytest.approx(ranks)


def test_what_it_took_to_the_target_is_counted_in_the_rounds(result: Comparison, data: ClientData) -> None:
    for method in result.methods:
        assert method.to_target is not None
        for seed, run in enumerate(stored(result, method.label)):
            rows = run.rounds
            there = [row["evaluation"][method.main]["accuracy"] >= 0.6 for row in rows]
            until = there.index(True) + 1 if any(there) else None
            assert method.to_target.rounds.values[seed] == until
            sent = sum(row["bytes_down"] + row["bytes_up"] for row in rows[:until])
            assert method.to_target.bytes.values[seed] == (None if until is None else sent)
            seconds = sum(row["seconds"] for row in rows[:until])
            found = method.to_target.seconds.values[seed]
            assert found == (None if until is None else pytest.approx(seconds))
        reached = [value for value in method.to_target.rounds.values if value is not None]
        assert method.to_target.reached == len(reached)
    never = go(["fedavg"], data, result.out, target=1.0, references=False)
    assert never.methods[0].to_target is not None
    assert never.methods[0].to_target.reached == 0
    assert never.methods[0].to_target.rounds.mean is None


def test_a_limit_case_differs_from_its_method_nowhere(data: ClientData, tmp_path: Path) -> None:
    """The same clients, cohorts and batches for all: without its pull FedProx is FedAvg, to the bit."""
    methods = {"fedavg": {}, "no pull": {"algorithm": "fedprox", "mu": 0.0}}
    found = go(methods, data, tmp_path, references=False, cohort={"count": 3})
    (pair,) = found.pairs
    assert (pair.equal, pair.mean_difference, pair.interval, pair.p) == (8, 0.0, (0.0, 0.0), 1.0)
    one, other = (
        [run.summary["accuracy"] for run in stored(found, label)] for label in ("fedavg", "no pull")
    )
    assert one == other
    assert found.ranking is not None
    assert found.ranking.cliques == (("fedavg", "no pull"),)
    assert one[0] != one[1]  # a seed is a run of its own


def test_the_order_of_methods_turns_signs_only(result: Comparison, data: ClientData) -> None:
    turned = go(["fedupdate", "separate", "fedavg"], data, result.out)
    there = {(pair.first, pair.second): pair for pair in turned.pairs}
    for pair in result.pairs:
        other = there[pair.second, pair.first]
        assert other.mean_difference == -pair.mean_difference
        assert other.interval == (-pair.interval[1], -pair.interval[0])
        assert other.rank_biserial == -pair.rank_biserial
        assert (other.better, other.equal, other.worse) == (pair.worse, pair.equal, pair.better)
        assert (other.p, other.p_holm) == (pair.p, pair.p_holm)


def test_methods_may_be_tested_against_one(result: Comparison, data: ClientData) -> None:
    against = go(["fedavg"], data, result.out, against="separate")
    assert [(pair.first, pair.second) for pair in against.pairs] == [
        ("fedavg", "separate"),
        ("fedupdate", "separate"),
    ]
    before = {(pair.first, pair.second): pair for pair in result.pairs}
    assert against.pairs[0].p == before["fedavg", "separate"].p
    smallest = min(pair.p for pair in against.pairs)
    assert min(pair.p_holm for pair in against.pairs) == pytest.approx(min(1.0, 2 * smallest))


def lines() -> ClientData:
    """Clients whose targets are numbers, of one slope and different heights."""
    generator = np.random.default_rng(0)
    clients = {}
    for number in range(4):
        x = generator.normal(size=(20, 3)).astype(np.float32)
        clients[f"c{number}"] = (x, (x @ np.array([1.0, -2.0, 0.5]) + number).astype(np.float32))
    return from_clients(clients, targets="number")


def test_a_target_may_lie_below_zero(tmp_path: Path) -> None:
    """As with R², which is 0 for whoever answers with the mean."""
    given: dict[str, Any] = {"model": "softmax", "rounds": 2, "seeds": 1, "references": False}
    given |= {"objective": "regression", "evaluate": {"headline": "r2"}}
    methods = {"still": {"algorithm": "fedavg", "lr": 0.0}}
    scores = compare(methods, data=lines(), out=tmp_path, **given)
    reached = scores.method("still").cells["shared_local"].mean
    assert reached is not None
    assert reached < 0
    for target, rounds in ((reached - 0.1, 1), (reached / 2, None)):
        found = compare(methods, data=lines(), out=tmp_path, target=target, **given)
        assert found.score == "r2"
        assert found.methods[0].to_target is not None
        assert found.methods[0].to_target.rounds.values == (rounds,)


def test_without_classes_the_smaller_loss_is_better(tmp_path: Path) -> None:
    data = lines()
    torch.manual_seed(0)
    task = sartor.Task(nn.Linear(3, 1), loss=lambda outputs, y: (outputs[:, 0] - y) ** 2, name="line")
    methods = {"still": {"algorithm": "fedavg", "lr": 0.0}, "moving": {"algorithm": "fedavg", "lr": 0.05}}
    found = compare(
        methods, data=data, model=task, rounds=3, seeds=2, references=False, target=4.0, out=tmp_path
    )
    assert found.score == "loss"
    still, moving = found.methods
    assert moving.cells["shared_local"].mean < still.cells["shared_local"].mean  # type: ignore[operator]
    assert moving.worst_decile.mean > moving.cells["shared_local"].mean  # type: ignore[operator]
    (pair,) = found.pairs
    assert pair.mean_difference < 0 < pair.worse
    assert found.ranking is not None
    assert found.ranking.methods[0] == "moving"
    assert moving.to_target is not None
    first = min(
        row["round"]
        for row in stored(found, "moving")[0].rounds
        if row["evaluation"]["shared_local"]["loss"] <= 4.0
    )
    assert moving.to_target.rounds.values[0] == first


# Runs are found again --------------------------------------------------------------------------------------


def reused(result: Comparison) -> dict[str, list[bool]]:
    return {method.label: [run.reused for run in method.runs] for method in result.methods}


def test_seeds_that_are_judged_otherwise_are_compared_by_one_score(tmp_path: Path) -> None:
    """Where the largest class has about 60 %, the seed decides whether accuracy is the headline."""
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [600, 400])
    rows = generator.normal(size=(1000, 2)) + labels[:, None]
    lines = [f"{a:.3f},{b:.3f},{label}" for (a, b), label in zip(rows.tolist(), labels.tolist(), strict=True)]
    (tmp_path / "all.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    data = {"path": str(tmp_path / "all.csv"), "label_column": "y", "validation": 0.2, "clients": 15}
    settings = {"data": data, "model": {"name": "softmax"}, "evaluate": {"every": 1}}
    found = compare(
        ["fedavg"], experiment=settings, rounds=3, seeds=8, references=False, out=tmp_path / "compared"
    )
    runs = stored(found, "fedavg")
    assert {run.summary["headline"] for run in runs} == {"accuracy", "balanced_accuracy"}
    assert found.score == runs[0].summary["headline"]
    for run, value in zip(runs, found.methods[0].best_by_validation["shared_local"].values, strict=True):
        cells = [row["evaluation"] for row in run.rounds if "evaluation" in row]
        scores = [each["shared_validation"][found.score] for each in cells]
        assert value == cells[int(np.argmax(scores))]["shared_local"][found.score]


def test_only_what_is_missing_is_run(data: ClientData, tmp_path: Path) -> None:
    first = go(["fedavg"], data, tmp_path, references=False)
    assert reused(first) == {"fedavg": [False, False]}
    more = go(["fedavg", "separate"], data, tmp_path, references=False, seeds=3)
    assert reused(more) == {"fedavg": [True, True, False], "separate": [False] * 3}
    assert more.methods[0].cells["shared_local"].values[:2] == first.methods[0].cells["shared_local"].values
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(
        run.folder for method in more.methods for run in method.runs
    )
    for method in more.methods:
        for run in method.runs:
            assert run.folder.startswith(f"{method.algorithm}-s{run.seed}-")


def test_runs_are_found_again_without_their_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those take long to compute, and whose samples they are does not depend on them."""
    settings: Any = {"data": "digits", "clients": 3, "rounds": 1, "features": {"name": "hog", "block": 4}}
    settings |= {"references": False, "seeds": 2, "out": tmp_path}
    first = compare(["fedavg"], **settings)

    def computed(*given: Any) -> Any:
        raise AssertionError("features were computed")

    monkeypatch.setattr(Hog, "__call__", computed)
    again = compare(["fedavg"], **settings)
    assert reused(again) == {"fedavg": [True, True]}
    assert again.methods[0].cells == first.methods[0].cells


def test_an_interrupted_comparison_gives_the_same_in_the_end(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = go(["fedavg"], data, tmp_path / "whole")
    execute, count = sartor.studies.library.execute, 0

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return execute(*arguments, **keywords)

    monkeypatch.setattr("sartor.studies.library.execute", stopping)
    with pytest.raises(KeyboardInterrupt):
        go(["fedavg"], data, tmp_path / "parts")
    monkeypatch.undo()
    assert not (tmp_path / "parts" / "comparison.json").exists()
    (halfway,) = (tmp_path / "parts").glob("separate-s0-*")
    (halfway / "summary.json").unlink()  # as if this run had not come to its end
    parts = go(["fedavg"], data, tmp_path / "parts")
    assert reused(parts) == {
        "fedavg": [True, False],
        "separate": [False, False],
        "fedupdate": [True, False],
    }
    assert without_times(parts.to_mapping()) == without_times(whole.to_mapping())
    assert len(list((tmp_path / "parts").glob("separate-s0-*"))) == 1


def test_a_run_of_something_else_is_not_taken_for_it(data: ClientData, tmp_path: Path) -> None:
    def again(**settings: Any) -> Comparison:
        return go(["fedavg"], settings.pop("data", data), tmp_path, references=False, seeds=1, **settings)

    first = again()
    folder = tmp_path / first.methods[0].runs[0].folder
    assert reused(again()) == {"fedavg": [True]}
    assert reused(again(rounds=2)) == {"fedavg": [False]}
    assert reused(again(data=dataclasses.replace(data, hash="other samples"))) == {"fedavg": [False]}
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "sartor": "0.0.1"}))
    newer = again()
    assert reused(newer) == {"fedavg": [False]}
    (folder / "environment.json").write_text(json.dumps(environment))
    assert reused(again()) == {"fedavg": [True]}
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("batch = 8", "batch = 9"))
    assert again().methods[0].runs[0].folder == newer.methods[0].runs[0].folder
    (folder / "config.toml").write_text("no TOML")
    assert reused(again()) == {"fedavg": [True]}


def test_runs_of_a_model_given_in_python_are_made_anew(data: ClientData, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(6, 4)
    for _ in range(2):
        found = go(["fedavg"], data, tmp_path, model=module, seeds=1, rounds=1, references=False)
        assert reused(found) == {"fedavg": [False]}


# What is said wrongly --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithms": ["fedvag"]}, "algorithm = 'fedvag': unknown name; did you mean fedavg?"),
        ({"algorithms": []}, "compare: name the algorithms, as in --algorithms fedavg,ditto"),
        (
            {"algorithms": {"fedprox": {"nu": 1}}},
            "compare.fedprox.nu: unknown key; did you mean compare.fedprox.mu?",
        ),
        (
            {"algorithms": {"fedprox": {"mu": -1}}},
            "compare.fedprox.mu: must be at least 0, got -1.0",
        ),
        (
            {"algorithms": {"strong": {"algorithm": "fedporx"}}},
            "compare.strong.algorithm = 'fedporx': unknown name; did you mean fedprox?",
        ),
        (
            {"experiment": {"compare": {"fedporx": {"mu": 1}}}},
            "compare.fedporx: unknown key; did you mean compare.fedprox?",
        ),
        (
            {"experiment": {"compare": {"sedes": 3}}},
            "compare.sedes: unknown key; did you mean compare.seeds?",
        ),
        ({"experiment": {"compare": 3}}, "compare: expected a table, got 3; write [compare] and its keys"),
        (
            {"algorithms": {"fedavg": 3}},
            "compare.fedavg: expected hyper-parameters by name, got 3",
        ),
        (
            {"algorithms": ["fedprox"], "hyper": {"mu": 0.5}},
            "hyper.mu: separate has no such hyper-parameter; say whose it is, as in fedprox.mu=0.5",
        ),
        (
            {"algorithms": ["fedprox"], "hyper": {"lrr": 0.5}},
            "hyper.lrr: unknown key; did you mean hyper.lr?",
        ),
        ({"seeds": 0}, "compare.seeds: give at least one seed"),
        ({"seeds": [1, 1]}, "compare.seeds: every seed once, got [1, 1]"),
        ({"against": "ditot"}, "compare.against = 'ditot': unknown name; known: fedavg, fedupdate, separate"),
        (
            {"experiment": {"compare": {"fedavg": {"algorithm": "ditto"}}}},
            "compare.fedavg.algorithm = 'ditto': fedavg is a method of its own; give the table a name that",
        ),
        ({"rounds": -1}, "rounds: must be at least 0, got -1"),
        ({"seed": "x"}, "seed: expected a whole number"),
        ({"clients": 7}, "clients: 7, but the data has 5 clients; leave it out"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_run(
    data: ClientData, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError) as error:
        go(settings.pop("algorithms", ["fedavg"]), data, tmp_path / "out", **settings)
    assert str(error.value).startswith(message)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_hold_runs_is_refused(
    result: Comparison, data: ClientData, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SartorError, match="is a file; give a folder"):
        go(["fedavg"], data, tmp_path / "file")
    with pytest.raises(SartorError, match=r"holds a run \(config.toml\); give another folder"):
        go(["fedavg"], data, result.out / result.methods[0].runs[0].folder)


def test_missing_data_are_told_at_once(tmp_path: Path) -> None:
    table = {"path": str(tmp_path / "nowhere.csv"), "client_column": "site", "label_column": "y"}
    with pytest.raises(DataError):
        compare(["fedavg"], experiment={"data": table}, out=tmp_path / "out")


def test_many_processes_do_not_run_one_comparison(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(SartorError, match="start them without torchrun"):
        go(["fedavg"], data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_method_that_fails_is_left_out_and_told(data: ClientData, tmp_path: Path) -> None:
    wild = {"wild": {"algorithm": "fedavg", "lr": 1e30}}
    found = go({"fedavg": {}, **wild}, data, tmp_path, references=False, seeds=[3])
    assert [method.label for method in found.methods] == ["fedavg"]
    (failure,) = found.failed
    assert (failure.label, failure.algorithm, failure.seed) == ("wild", "fedavg", 3)
    assert "not finite" in failure.message
    with pytest.raises(SartorError, match=r"no method came to its end; wild: .*not finite"):
        go(wild, data, tmp_path, references=False, seeds=[3])


def test_a_fault_of_one_method_leaves_the_others(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(*_: Any) -> Any:
        raise faults.pop()

    monkeypatch.setattr(registered()["fedprox"], "round", faulty)
    faults = [ZeroDivisionError("by 0")]
    found = go(["fedprox", "fedavg"], data, tmp_path, references=False, seeds=[3])
    assert [method.label for method in found.methods] == ["fedavg"]
    assert [failure.message for failure in found.failed] == ["ZeroDivisionError: by 0"]
    assert "in faulty" in caplog.text  # where it happened
    faults = [MemoryError("too much")]
    with pytest.raises(MemoryError):
        go(["fedprox", "fedavg"], data, tmp_path / "memory", references=False, seeds=[3])
    faults = [torch.AcceleratorError("CUDA error: an illegal memory access was encountered")]
    with pytest.raises(SartorError, match=r"^fedprox, seed 3: the device cannot .*illegal.*; what is done"):
        go(["fedprox", "fedavg"], data, tmp_path / "device", references=False, seeds=[3])


# Hyper-parameters ------------------------------------------------------------------------------------------


def test_hyper_parameters_go_to_those_they_are_meant_for(data: ClientData, tmp_path: Path) -> None:
    experiment = {
        "algorithm": "fedprox",
        "hyper": {"lr": 0.02, "mu": 0.7},
        "compare": {"separate": {"lr": 0.3}, "strong": {"algorithm": "fedprox", "mu": 5}},
    }
    found = go(["fedavg", "fedprox", "strong"], data, tmp_path, experiment=experiment, seeds=1, rounds=1)
    hyper = {method.label: method.hyper for method in found.methods}
    assert {label: values["lr"] for label, values in hyper.items()} == {
        "fedavg": 0.02,
        "fedprox": 0.02,
        "strong": 0.02,
        "separate": 0.3,
        "fedupdate": 0.02,
    }
    assert (hyper["fedprox"]["mu"], hyper["strong"]["mu"]) == (0.7, 5.0)
    assert found.method("strong").algorithm == "fedprox"
    for method in found.methods:
        (run,) = stored(found, method.label)
        assert run.config["hyper"] == method.hyper


def test_a_file_says_it_all(data: ClientData, tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(
        'seed = 4\n[compare]\nseeds = 2\ntarget = 0.5\nreferences = false\nagainst = "fedprox"\n'
        "[compare.fedavg]\n[compare.fedprox]\nmu = 0.2\n"
    )
    found = compare(experiment=file, data=data, out=tmp_path / "out", **{**SETTINGS, "rounds": 1})
    assert [method.label for method in found.methods] == ["fedavg", "fedprox"]
    assert (found.seeds, found.target, found.against) == ((4, 5), 0.5, "fedprox")
    assert found.method("fedprox").hyper["mu"] == 0.2
    assert found.experiment["data"]["name"] == "own"


def test_the_file_of_a_comparison_can_be_run_too(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text("rounds = 3\n[compare.fedprox]\nmu = 0.2\n[search.every]\nlr = [0.1]\n")
    assert load(file) == load(None, rounds=3)
    assert fingerprint(load(file)) == fingerprint(load(None, rounds=3))


def test_data_given_by_client_may_be_compared_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    clients = {
        name: (generator.normal(size=(20, 3)).astype(np.float32), generator.integers(0, 2, 20))
        for name in ("north", "south")
    }
    for known in (False, True):
        found = compare("fedavg", data=clients, model="softmax", rounds=1, seeds=2, references=False)
        assert found.pairs == ()
        assert reused(found) == {"fedavg": [known, known]}
        assert found.out.parent == Path("comparisons")
        assert found.out.name.startswith("own-")


# What is stored and printed --------------------------------------------------------------------------------


def test_the_stored_comparison_is_the_result_and_is_described(result: Comparison, data: ClientData) -> None:
    fresh = go(["fedavg"], data, result.out, target=0.6)
    text = (result.out / "comparison.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(fresh.to_mapping()))
    described = sartor.studies.comparison.__doc__ or ""
    top = json.loads(text)
    for key in (*top, *top["methods"][0], *top["pairs"][0], *top["ranking"], *top["methods"][0]["runs"][0]):
        assert key in described, key
    for method in top["methods"]:
        for run in method["runs"]:
            assert (result.out / run["folder"] / "summary.json").exists()


def test_methods_that_share_a_bar_cannot_be_told_apart() -> None:
    ranking = RankingResult(
        methods=("a", "bb", "c", "d"),
        ranks=(1.0, 1.5, 2.1, 4.0),
        statistic=9.0,
        p=0.0123,
        critical_difference=0.7,
        cliques=(("a", "bb"), ("bb", "c")),
        blocks=12,
    )
    assert ranking_lines(ranking) == [
        "average ranks over 12 clients × seeds (1 is best); Friedman p = 0.012; "
        "critical difference 0.70 (Nemenyi, 0.05)",
        "   1.00  a   |",
        "   1.50  bb  | |",
        "   2.10  c     |",
        "   4.00  d",
        "methods that share a bar cannot be told apart",
    ]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compare", *arguments], prog_name="sartor")


SMALL = ("model.name=softmax", "--clients", "4", "--rounds", "2", "--engine", "loop")


def test_the_command_prints_what_it_stores(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text('[compare]\nalgorithms = ["fedprox"]\n[compare.fedprox]\nmu = 0.2\n[search]\n')
    words = (str(file), *SMALL, "--seeds", "2", "--out", str(tmp_path / "out"), "data.validation=0.2")
    shown = call(*words, "fedprox.server_lr=0.5", "--target", "0.1")
    assert shown.exit_code == 0, shown.output
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [method["label"] for method in stored["methods"]] == ["fedprox", "separate", "fedupdate"]
    hyper = stored["methods"][0]["hyper"]
    assert (hyper["mu"], hyper["server_lr"]) == (0.2, 0.5)
    lines = shown.stdout.splitlines()
    main = stored["methods"][1]["cells"]["personal_local"]
    number = f"{100 * main['mean']:.1f} ± {100 * main['deviation']:.1f}"
    assert any(line.split()[:5] == ["separate", *number.split(), "personal_local"] for line in lines)
    for word in ("best by validation", "rounds to 0.1", "p (Holm)", "critical difference", "over 2 seeds"):
        assert word in shown.stdout
    assert lines[-1] == f"comparison: {tmp_path / 'out' / 'comparison.json'}"
    assert "reused" not in shown.stdout
    again = call(*words, "fedprox.server_lr=0.5", "--json", "--no-references")
    printed = json.loads(again.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [method["label"] for method in printed["methods"]] == ["fedprox"]
    assert all(run["reused"] for run in printed["methods"][0]["runs"])
    folders = [run["folder"] for run in printed["methods"][0]["runs"]]
    third = call(*words, "fedprox.server_lr=0.5", "--no-references")
    assert f"reused 2 of 2 runs: {', '.join(folders)}" in third.stdout


def test_the_command_ends_in_an_error_where_runs_failed(tmp_path: Path) -> None:
    words = ("--algorithms", "fedavg,wild", "wild.algorithm=fedavg", "wild.lr=1e30", "--no-references")
    shown = call(*words, *SMALL, "--seeds", "0,,", "--out", str(tmp_path / "out"))
    assert shown.exit_code == 2
    expected = "how many, or a list such as 0,1,5 (of seed 5 alone: 5,)"
    assert shown.stderr == f"sartor: --seeds: expected {expected}, got '0,,'\n"
    shown = call(*words, *SMALL, "--seeds", "1,", "--out", str(tmp_path / "out"))
    assert shown.exit_code == 2
    last = shown.stderr.splitlines()[-1]
    assert last.startswith("sartor: left out, as runs failed: wild; the first, wild with seed 1: ")
    assert "fedavg" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fedavg"],
            "'fedavg': expected one experiment (a .toml file or a preset) and key=value; methods are named "
            "with --algorithms",
        ),
        (["nowhere.toml"], "nowhere.toml: no such experiment file"),
        (["--algorithms", "fedprox", "fedporx.mu=1"], "fedporx: unknown key; did you mean fedprox?"),
        (["--algorithms", "fedavg", "dta.clients=1"], "dta: unknown key; did you mean data?"),
        (["--algorithms", "fedavg", "--seeds", "x"], "--seeds: expected how many, or a list"),
        (["rounds=3"], "compare: name the algorithms, as in --algorithms fedavg,ditto"),
        (
            ["--algorithms", "fedavg", "fedavg.algorithm=ditto"],
            "compare.fedavg.algorithm = 'ditto': fedavg is a method of its own",
        ),
        (["--algorithms", "fedavg", "--rounds", "3", "rounds=4"], "rounds: given twice, as 4 and as 3"),
    ],
)
def test_wrong_words_are_one_message(words: list[str], message: str) -> None:
    shown = call(*words)
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert shown.stderr.startswith(f"sartor: {message}")


@pytest.mark.parametrize("room", [1.0, 0.0])
def test_data_of_a_seed_are_read_once_where_there_is_room_to_keep_them(
    room: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    usual = library.load_data

    def noting(experiment: Any, objective: Any) -> Any:
        read.append(experiment.seed)
        return usual(experiment, objective)

    monkeypatch.setattr(library, "load_data", noting)
    monkeypatch.setattr(library, "REMEMBERED_MEMORY", room)
    settings: dict[str, Any] = {"data": "digits", "clients": 4, "rounds": 1, "model": "softmax"}
    settings["partition"] = {"name": "dirichlet"}
    asked: dict[str, Any] = {"references": False, "seeds": 2, "together": "no"}
    result = compare(["fedavg", "fedprox"], **settings, **asked, out=tmp_path / "all")
    assert read == ([0, 1] if room else [0, 0, 1, 1])
    for label in ("fedavg", "fedprox"):
        for seed, run in enumerate(stored(result, label)):
            alone = sartor.run(label, **settings, seed=seed, out=tmp_path / label / f"{seed}")
            assert run.summary["model_sha256"] == alone.summary["model_sha256"]
            for name in ("partition.npz", "signature.json"):
                assert (run.path / name).read_bytes() == (tmp_path / label / f"{seed}" / name).read_bytes()
