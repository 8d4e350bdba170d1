"""Searching hyper-parameters: equal budgets, points of the space, a choice that never sees test data."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import sartor.studies.tuning
from helpers import classification
from sartor.commands.main import app
from sartor.data.clients import ClientData, Split, from_clients
from sartor.errors import SartorError, SettingError
from sartor.runs.experiment import read_toml
from sartor.runs.newcomers import evaluate_run
from sartor.runs.record import RunFolder
from sartor.studies.comparison import compare
from sartor.studies.tuning import Range, Search, search, value_at

SIZES = (12, 30, 18, 24)
SETTINGS: dict[str, Any] = {"model": "softmax", "rounds": 3, "engine": "loop", "local": {"batch": 8}}


@pytest.fixture(scope="module")
def data() -> ClientData:
    """Four clients with validation samples like their test samples."""
    made = classification(SIZES, shape=(6,), classes=4)
    return dataclasses.replace(made, validation=made.test)


def go(algorithms: Any, data: Any, out: Path, **settings: Any) -> Search:
    return search(algorithms, data=data, out=out, **{**SETTINGS, **settings})


def points(found: Search) -> dict[str, list[dict[str, Any]]]:
    return {tuned.label: [trial.hyper for trial in tuned.trials] for tuned in found.methods}


def mislabelled(split: Split) -> Split:
    """The samples under wrong labels: what learns the right ones does worse than chance."""
    return dataclasses.replace(split, y=(split.y + 1) % 4)


# The choice ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(data: ClientData, tmp_path_factory: pytest.TempPathFactory) -> Search:
    space = {"lr": [0.0, 0.01, 0.1]}
    methods = {"fedavg": space, "separate": space}
    return go(methods, data, tmp_path_factory.mktemp("search"), method="grid", seeds=2)


def test_the_best_on_validation_data_is_chosen(found: Search) -> None:
    for tuned, cell in zip(found.methods, ("shared_validation", "personal_validation"), strict=True):
        scores = []
        for trial in tuned.trials:
            runs = [RunFolder.open(found.out / run.folder) for run in trial.runs]
            assert [run.experiment.seed for run in runs] == [0, 1]
            assert all(run.config["hyper"]["lr"] == trial.hyper["lr"] for run in runs)
            values = [run.rounds[-1]["evaluation"][cell]["accuracy"] for run in runs]
            assert trial.validation is not None
            assert (trial.cell, trial.validation.values) == (cell, tuple(values))
            scores.append(sum(values) / 2)
        assert tuned.chosen == scores.index(max(scores))
        assert tuned.best == tuned.trials[tuned.chosen].hyper
    assert found.methods[0].best["lr"] > 0


def test_the_choice_does_not_see_test_data(found: Search, data: ClientData, tmp_path: Path) -> None:
    wrong = mislabelled(data.test)
    other = dataclasses.replace(data, test=wrong, pooled_x=wrong.x, pooled_y=wrong.y, hash="mislabelled test")
    space = {"lr": [0.0, 0.01, 0.1]}
    again = go({"fedavg": space, "separate": space}, other, tmp_path, method="grid", seeds=2)
    assert again.methods == tuple(
        dataclasses.replace(
            tuned,
            trials=tuple(
                dataclasses.replace(trial, runs=new.runs)
                for trial, new in zip(tuned.trials, made.trials, strict=True)
            ),
        )
        for tuned, made in zip(found.methods, again.methods, strict=True)
    )
    folder = again.methods[0].trials[2].runs[0].folder
    test_accuracy = RunFolder.open(tmp_path / folder).summary["accuracy"]["shared_local"]
    before = RunFolder.open(found.out / found.methods[0].trials[2].runs[0].folder).summary["accuracy"]
    assert test_accuracy < before["shared_local"]  # it would have chosen otherwise


def test_the_choice_does_see_validation_data(data: ClientData, tmp_path: Path) -> None:
    assert data.validation is not None
    wrong = dataclasses.replace(data, validation=mislabelled(data.validation))
    found = go({"fedavg": {"lr": [0.1, 0.0]}}, wrong, tmp_path, method="grid")
    assert found.methods[0].best == {"lr": 0.0}


def test_of_equal_trials_the_first_is_chosen(data: ClientData, tmp_path: Path) -> None:
    found = go({"fedprox": {"lr": 0.0, "mu": [0.5, 0.1]}}, data, tmp_path, method="grid")
    one, other = found.methods[0].trials
    assert one.validation == other.validation
    assert found.methods[0].best == {"lr": 0.0, "mu": 0.5}


def test_without_classes_the_smallest_loss_is_chosen(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=generator)
    clients = {name: (x + shift, (x + shift).sum(dim=1)) for name, shift in (("a", 0.0), ("b", 0.5))}
    data = from_clients(clients, targets="number", validation_fraction=0.2)
    task = sartor.Task(nn.Linear(2, 1), loss=lambda outputs, y: (outputs[:, 0] - y) ** 2, name="line")
    found = search({"fedavg": {"lr": [0.0, 0.05]}}, data=data, model=task, rounds=2, out=tmp_path)
    assert found.score == "loss"
    assert found.methods[0].best == {"lr": 0.05}


@pytest.mark.parametrize("empty", [True, False])
def test_without_validation_data_nothing_is_run(data: ClientData, tmp_path: Path, empty: bool) -> None:
    assert data.validation is not None
    nothing = dataclasses.replace(data.validation, count=data.validation.count * 0) if empty else None
    bare = dataclasses.replace(data, validation=nothing)
    with pytest.raises(SettingError, match=r"there is none; .* as in data.validation=0.2"):
        go({"fedavg": {"lr": [0.1]}}, bare, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_clients_without_validation_samples_say_nothing(tmp_path: Path) -> None:
    """One client is evaluated; where that has no validation samples, other seeds decide, if there are any."""
    made = classification((12, 12, 12, 12), shape=(6,), classes=4)
    test, few = made.test, 4
    count = np.array([few, 0, 0, 0])
    split = Split(test.x[:few], test.y[:few], np.minimum(np.cumsum(count) - count, few), count)
    data = dataclasses.replace(made, validation=split)
    evaluated = {"clients": 1, "metrics": ["log_loss"], "headline": "log_loss"}
    more: dict[str, Any] = {"method": "grid", "experiment": {"evaluate": evaluated}}
    space = {"fedavg": {"lr": [0.1, 0.2]}}
    found = go(space, data, tmp_path / "several", seeds=range(8), **more)
    for trial in found.methods[0].trials:
        assert trial.validation is not None
        there = [value for value in trial.validation.values if value is not None]
        assert 0 < len(there) < 8
        assert trial.validation.mean == pytest.approx(sum(there) / len(there))
    nothing = [value is None for value in found.methods[0].trials[0].validation.values]  # type: ignore[union-attr]
    with pytest.raises(SartorError, match=r"failed; the first: no log_loss follows from the validation data"):
        go(space, data, tmp_path / "one", seeds=[nothing.index(True)], **more)


def test_a_trial_that_fails_is_recorded_and_not_chosen(data: ClientData, tmp_path: Path) -> None:
    found = go({"fedavg": {"lr": [1e30, 0.1]}}, data, tmp_path, method="grid")
    bad, good = found.methods[0].trials
    assert bad.validation is None
    assert "not finite" in (bad.failed or "")
    assert (good.failed, found.methods[0].best) == (None, {"lr": 0.1})
    partly = go(
        {"fedavg": {"lr": [0.1]}, "wild": {"algorithm": "fedavg", "lr": 1e30}}, data, tmp_path, method="grid"
    )
    with pytest.raises(SartorError, match="wild: all trials failed; the first: fedavg"):
        _ = partly.methods[1].best
    assert read_toml(tmp_path / "chosen.toml")["compare"]["algorithms"] == ["fedavg"]
    with pytest.raises(SartorError, match="every trial of every method failed"):
        go({"fedavg": {"lr": [1e30]}}, data, tmp_path)
    assert json.loads((tmp_path / "search.json").read_text())["methods"][0]["chosen"] is None


# The points ------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination(data: ClientData, tmp_path: Path) -> None:
    space = {"lr": {"low": 0.01, "high": 1, "log": True, "points": 3}, "mu": [0.5, 0.1]}
    found = go({"fedprox": space}, data, tmp_path, method="grid", rounds=0)
    lr, mu = zip(*((point["lr"], point["mu"]) for point in points(found)["fedprox"]), strict=True)
    assert lr == pytest.approx((0.01, 0.01, 0.1, 0.1, 1.0, 1.0))
    assert mu == (0.5, 0.1) * 3
    with pytest.raises(SettingError, match="the grid has 6 points and the budget is 5"):
        go({"fedprox": space}, data, tmp_path, method="grid", budget=5)


def test_every_method_gets_its_budget_and_its_own_points(data: ClientData, tmp_path: Path) -> None:
    lr = {"low": 0.001, "high": 1, "log": True}
    spaces = {"fedavg": {"lr": lr}, "fedprox": {"lr": lr, "mu": {"low": 0, "high": 2}}}
    found = go(spaces, data, tmp_path, rounds=0, budget=3)
    assert {label: len(made) for label, made in points(found).items()} == {"fedavg": 3, "fedprox": 3}
    rates = {label: [point["lr"] for point in made] for label, made in points(found).items()}
    assert rates["fedavg"] == rates["fedprox"]  # the same range is searched at the same places
    assert len(set(rates["fedavg"])) == 3
    assert all(0.001 <= rate <= 1 for rate in rates["fedavg"])
    pulls = [point["mu"] for point in points(found)["fedprox"]]
    shares = [math.log(rate / 0.001) / math.log(1000) for rate in rates["fedavg"]]
    assert [pull / 2 for pull in pulls] != pytest.approx(shares)  # another stream
    alone = go({"fedprox": spaces["fedprox"]}, data, tmp_path, rounds=0, budget=3)
    assert points(alone)["fedprox"] == points(found)["fedprox"]
    other = go({"fedprox": spaces["fedprox"]}, data, tmp_path, rounds=0, budget=3, seed=1)
    assert points(other)["fedprox"] != points(found)["fedprox"]
    more = go({"fedprox": spaces["fedprox"]}, data, tmp_path, rounds=0, budget=4)
    assert points(more)["fedprox"][:3] == points(found)["fedprox"]


def test_points_of_lists_are_different_ones(data: ClientData, tmp_path: Path) -> None:
    space = {"lr": [0.1, 0.2], "mu": [1, 2, 3, 1.0]}
    found = points(go({"fedprox": space}, data, tmp_path, rounds=0, budget=4))["fedprox"]
    assert len({(point["lr"], point["mu"]) for point in found}) == len(found) == 4
    assert all(point["lr"] in space["lr"] and point["mu"] in space["mu"] for point in found)
    every = points(go({"fedprox": space}, data, tmp_path, rounds=0, budget=50))["fedprox"]
    assert len({(point["lr"], point["mu"]) for point in every}) == len(every) == 6
    whole = {"finetune_epochs": {"low": 1, "high": 3}}
    epochs = points(go({"fedupdate": whole}, data, tmp_path, rounds=0, budget=5))["fedupdate"]
    assert sorted(point["finetune_epochs"] for point in epochs) == [1, 2, 3]


@given(st.floats(0, 1), st.booleans())
def test_a_range_is_gone_through_from_end_to_end(share: float, log: bool) -> None:
    range = Range(0.01, 4.0, log)
    value = value_at(range, share)
    assert 0.01 <= value <= 4.0
    covered = math.log(value / 0.01) / math.log(400) if log else (value - 0.01) / 3.99
    assert covered == pytest.approx(share, abs=1e-12)


def test_whole_numbers_are_equally_likely() -> None:
    shares = [(place + 0.5) / 300 for place in range(300)]
    values = [value_at(Range(2, 4), share) for share in shares]
    assert {value: values.count(value) for value in set(values)} == {2: 100, 3: 100, 4: 100}
    assert all(isinstance(value_at(Range(1, 64, log=True), share), int) for share in shares)


@pytest.mark.parametrize(
    ("spaces", "settings", "message"),
    [
        (
            {"fedavg": {}},
            {"hyper": {"lr": 0.1, "server_lr": 1.0}},
            "search.fedavg: no number to search, all are set; write [search.fedavg] with lists or ranges",
        ),
        (["fedvag"], {}, "algorithm = 'fedvag': unknown name; did you mean fedavg?"),
        ({"fedavg": {"lrr": [1]}}, {}, "search.fedavg.lrr: unknown key; did you mean search.fedavg.lr?"),
        ({"fedavg": {"lr": [-1]}}, {}, "search.fedavg.lr: must be at least 0, got -1.0"),
        ({"fedavg": {"lr": ["a"]}}, {}, "search.fedavg.lr: expected a finite number"),
        ({"fedavg": {"lr": []}}, {}, "search.fedavg.lr: an empty list; give at least one value"),
        ({"fedavg": {"lr": {"low": 1, "hihg": 2}}}, {}, "search.fedavg.lr.hihg: unknown key; did you mean"),
        ({"fedavg": {"lr": {"low": 1}}}, {}, "search.fedavg.lr.high: missing"),
        (
            {"fedavg": {"lr": {"low": 2, "high": 1}}},
            {},
            "search.fedavg.lr: low must be below high, got 2 and 1",
        ),
        (
            {"fedavg": {"lr": {"low": 0, "high": 1, "log": True}}},
            {},
            "search.fedavg.lr: a range with log = true must begin above 0, got 0",
        ),
        ({"fedavg": {"lr": {"low": -1, "high": 1}}}, {}, "search.fedavg.lr: must be at least 0, got -1.0"),
        (
            {"fedupdate": {"finetune_epochs": {"low": 0.5, "high": 2}}},
            {},
            "search.fedupdate.finetune_epochs: expected a whole number",
        ),
        (
            {"fedprox": {"as_printed": {"low": 0, "high": 1}}},
            {},
            "search.fedprox.as_printed: a range is for numbers; give a list of values",
        ),
        (
            {"fedavg": {"lr": {"low": 0, "high": 1}}},
            {"method": "grid"},
            "search.fedavg.lr: a grid needs a list, or a range with points",
        ),
        (
            {"fedavg": {"lr": [1]}},
            {"method": "gird"},
            "search.method: must be one of random, grid, got 'gird'",
        ),
        ({"fedavg": {"lr": [1]}}, {"budget": 0}, "search.budget: must be at least 1, got 0"),
        ({"fedavg": {"lr": [1]}}, {"seeds": []}, "search.seeds: give at least one seed"),
        ({"fedavg": {"lr": [1]}}, {"hyper": {"mu": 1}}, "hyper.mu: unknown key"),
        ({"fedavg": {"lr": [1]}}, {"seed": "x"}, "seed: expected a whole number"),
        (
            {"every": {"mu": [1]}, "fedavg": {"lr": [1]}},
            {},
            "search.fedavg.mu: unknown key",
        ),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_run(
    data: ClientData, tmp_path: Path, spaces: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError) as error:
        go(spaces, data, tmp_path / "out", **settings)
    assert str(error.value).startswith(message)
    assert not (tmp_path / "out").exists()


# What is stored --------------------------------------------------------------------------------------------


def test_the_search_is_stored_and_described(found: Search) -> None:
    text = json.loads((found.out / "search.json").read_text())
    assert text == json.loads(json.dumps(found.to_mapping()))
    described = sartor.studies.tuning.__doc__ or ""
    tuned = text["methods"][0]
    for key in (*text, *tuned, *tuned["trials"][0], *tuned["trials"][0]["runs"][0]):
        assert key in described, key
    assert tuned["space"] == {"lr": [0.0, 0.01, 0.1]}
    cells = {trial["cell"] for tuned in text["methods"] for trial in tuned["trials"]}
    assert cells == {"shared_validation", "personal_validation"}


def test_trials_are_found_again(found: Search, data: ClientData) -> None:
    again = go({"fedavg": {"lr": [0.0, 0.01, 0.1, 0.2]}}, data, found.out, method="grid", seeds=2)
    assert [[run.reused for run in trial.runs] for trial in again.methods[0].trials] == [
        [True, True],
        [True, True],
        [True, True],
        [False, False],
    ]


def test_finished_trials_keep_no_checkpoints_and_what_is_compared_does(
    found: Search, data: ClientData, tmp_path: Path
) -> None:
    assert len(list(found.out.glob("*/summary.json"))) >= 12
    assert not [*found.out.rglob("checkpoints/*"), *found.out.rglob("models.safetensors")]
    trial = next(found.out.glob("*/summary.json")).parent
    with pytest.raises(SartorError, match=r"has no checkpoint to evaluate; make one with: sartor run .*toml"):
        evaluate_run(trial)
    compare(["fedavg"], data=data, out=tmp_path, seeds=1, references=False, **SETTINGS)
    assert list(tmp_path.rglob("checkpoints/*"))
    assert list(tmp_path.rglob("models.safetensors"))


def test_what_was_chosen_is_compared(data: ClientData, tmp_path: Path) -> None:
    experiment = {
        "algorithm": "fedprox",
        "seed": 3,
        "hyper": {"lr": 0.02, "server_lr": 0.9},
        "search": {
            "method": "grid",
            "every": {"server_lr": [0.7, 0.8]},
            "fedprox": {"mu": [0.3]},
            "strong": {"algorithm": "fedprox", "mu": 2},
        },
        "compare": {"strong": {"algorithm": "fedprox", "lr": 0.05}},
    }
    found = go(None, data, tmp_path, experiment=experiment)
    assert list(points(found)) == ["fedprox", "strong"]
    assert all(point["lr"] == 0.05 and point["mu"] == 2.0 for point in points(found)["strong"])
    result = compare(experiment=tmp_path / "chosen.toml", data=data, seeds=1, out=tmp_path)
    assert [method.label for method in result.methods] == ["fedprox", "strong", "separate", "fedupdate"]
    assert result.seeds == (3,)
    for tuned in found.methods:
        hyper = result.method(tuned.label).hyper
        assert tuned.best.items() <= hyper.items()
        assert result.method(tuned.label).runs[0].reused  # the very run of the search
    assert result.method("fedprox").hyper["lr"] == 0.02
    assert result.method("separate").hyper["lr"] == 0.02
    assert result.method("fedupdate").hyper["server_lr"] == 1.0  # it was never every method's


def test_the_command_prints_every_trial_and_goes_on_to_compare(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(
        "rounds = 2\n[data]\nclients = 4\nvalidation = 0.2\n"
        "[model]\nname = 'softmax'\n[engine]\nname = 'loop'\n"
        "[search]\nbudget = 2\n[search.every]\nlr = [0.01, 0.1, 0.2]\n"
        "[search.fedprox]\nmu = {low = 0.001, high = 1, log = true}\n"
    )
    out = tmp_path / "out"
    words = ["search", str(file), "--algorithms", "fedavg,fedprox", "fedavg.server_lr=[0.5]"]
    shown = CliRunner().invoke(app, [*words, "--out", str(out)], prog_name="sartor")
    assert shown.exit_code == 0, shown.output
    stored = json.loads((out / "search.json").read_text())
    assert [len(tuned["trials"]) for tuned in stored["methods"]] == [2, 2]
    assert all(trial["hyper"]["server_lr"] == 0.5 for trial in stored["methods"][0]["trials"])
    assert shown.stdout.count("chosen ") == 2 + shown.stdout.count("compare the chosen ones")
    assert shown.stdout.splitlines()[-1].endswith(f"sartor compare {out / 'chosen.toml'}")
    again = CliRunner().invoke(app, [*words, "--out", str(out), "--json"], prog_name="sartor")
    printed = json.loads(again.stdout.splitlines()[-1])
    assert printed == json.loads((out / "search.json").read_text())
    assert all(run["reused"] for tuned in printed["methods"] for t in tuned["trials"] for run in t["runs"])
    compared = CliRunner().invoke(
        app, ["compare", str(out / "chosen.toml"), "--seeds", "1", "--no-references", "--out", str(out)]
    )
    assert compared.exit_code == 0, compared.output
    assert "reused 2 of 2 runs" in compared.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--algorithms", "fedavg", "hyper.lr=0.1", "hyper.server_lr=1"],
            "search.fedavg: no number to search",
        ),
        (
            ["--algorithms", "fedavg", "fedavg.lr=[0.1]"],
            "data.validation: a search chooses on validation data",
        ),
        (["--algorithms", "fedavg", "evry.lr=[0.1]"], "evry: unknown key; did you mean every?"),
        (
            ["--algorithms", "fedavg", "fedavg.algorithm=ditto"],
            "search.fedavg.algorithm = 'ditto': fedavg is a method of its own",
        ),
    ],
)
def test_wrong_words_are_one_message(words: list[str], message: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["search", *words, "--out", str(tmp_path / "out")], prog_name="sartor")
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert shown.stderr.startswith(f"sartor: {message}")


def test_a_search_with_failed_methods_ends_in_an_error(tmp_path: Path) -> None:
    words = ["search", "--algorithms", "fedavg,wild", "wild.algorithm=fedavg", "wild.lr=1e30"]
    words += ["fedavg.lr=0.1", "data.validation=0.2", "model.name=softmax", "engine.name=loop"]
    words += ["--clients", "4", "--rounds", "1"]
    shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")], prog_name="sartor")
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1].startswith("sartor: wild: all trials failed; the first: ")
    assert "failed" in shown.stdout
