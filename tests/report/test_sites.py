"""Is it worth it for my site: each client's models on its own samples, with intervals, curves and groups."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import csv
from torch import nn

import sartor
from sartor.errors import SartorError, SettingError
from sartor.report import write_report
from sartor.report.runs import Material, read
from sartor.report.sites import (
    SCORES,
    Part,
    Site,
    _reliability,
    _roc,
    best_threshold,
    site_figures,
    site_tables,
    sites_of,
)
from sartor.runs import outputs
from sartor.runs.outputs import read_outputs
from sartor.runs.record import RunFolder

NAMES = ("Bergen", "Narvik", "Oslo")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A method and training alone, on tables of three hospitals with a column of groups."""
    folder = tmp_path_factory.mktemp("hospitals")
    random = np.random.default_rng(0)
    rows = 240
    x = random.normal(0, 1, (rows, 2))
    sex = random.integers(0, 2, rows)
    columns = {
        "hospital": np.array(NAMES)[np.arange(rows) % 3],
        "a": x[:, 0] + 5,
        "b": x[:, 1],
        "sex": sex,
        "state": np.where(x[:, 0] + x[:, 1] + random.normal(0, 0.5, rows) > 0, "ill", "well"),
    }
    csv.write_csv(arrow.table(columns), folder / "all.csv")
    data = {"path": str(folder / "all.csv"), "client_column": "hospital", "label_column": "state"}
    data |= {"validation": 0.2}
    for method in ("ditto", "separate"):
        settings = {"data": data, "evaluate": {"by": "sex"}, "model": {"name": "softmax"}}
        sartor.run(method, experiment=settings, rounds=3, out=folder / "runs" / method)
    return folder / "runs"


def site(correct: dict[str, list[int]], **changes: Any) -> Site:
    """A site with two classes, whose models are right (1) or wrong (0) on these samples."""
    count = len(next(iter(correct.values())))
    truth = np.arange(count) % 2

    def outputs(right: list[int]) -> np.ndarray:
        says = np.where(np.array(right) == 1, truth, 1 - truth)
        return np.stack([1.0 - says, says], 1)

    models = {name: outputs(right) for name, right in correct.items()}
    part = Part(truth, models, None)
    return Site("Oslo", part, None, SCORES["accuracy"], 0, **changes)


def test_stored_outputs_are_those_of_the_models(runs: Path) -> None:
    folder = RunFolder.open(runs / "ditto")
    stored = read_outputs(folder.outputs or b"")
    assert set(stored) == {"test", "validation"}
    test = stored["test"]
    rows = folder.clients
    for kind in ("personal", "shared"):
        right = test.by_model[kind].argmax(1) == test.truth
        for number, name in enumerate(test.names):
            wanted = rows[f"{kind}_local_accuracy"][-3:][rows["client"][-3:].index(name)]
            assert right[test.client == number].mean() == pytest.approx(wanted)
    assert set(test.group.tolist()) == {"0", "1"}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_stored_outputs_are_those_of_models_that_are_no_vectors(engine: str, tmp_path: Path) -> None:
    """Also of clients that have not trained yet, and of those who have fewer samples than others."""
    for method in ("fedrod", "feddbe", "knn-per", "fedem", "fedproto", "gpfl"):
        settings = {"partition": {"alpha": 0.1}, "cohort": {"fraction": 0.34}, "engine": {"name": engine}}
        settings["data"] = {"validation": 0.2}
        sartor.run(method, clients=6, rounds=1, experiment=settings, out=tmp_path / method)
        folder = RunFolder.open(tmp_path / method)
        stored, rows = read_outputs(folder.outputs or b""), folder.clients
        for split, cell in (("test", "personal_local"), ("validation", "personal_validation")):
            found = stored[split]
            right = found.by_model["personal"].argmax(1) == found.truth
            for client, wanted in zip(rows["client"], rows[f"{cell}_accuracy"], strict=True):
                own = right[found.client == found.names.index(client)]
                assert own.mean() == pytest.approx(wanted), (method, split, client)


def test_the_groups_are_the_values_of_the_column(runs: Path, tmp_path: Path) -> None:
    table = {"hospital": ["x", "y"] * 20, "a": list(range(40)), "sex": [1, 1, 2, 2] * 10, "y": [0, 1] * 20}
    table["split"] = (["train"] * 4 + ["test"] * 4) * 5
    csv.write_csv(arrow.table(table), tmp_path / "t.csv")
    from sartor.data.clients import prepare
    from sartor.data.loaders import from_table
    from sartor.runs.outputs import values_of

    data = prepare(from_table(tmp_path / "t.csv", "hospital", "y", ["a", "sex"]), normalise=True)
    raw = from_table(tmp_path / "t.csv", "hospital", "y", ["a", "sex"])
    wanted = [f"{value:g}" for value in raw.test.x[:, 1].tolist()]
    assert values_of(data, "sex", data.test).tolist() == wanted
    with pytest.raises(SettingError, match=r"evaluate\.by = 'sxe': no column of the table.*there are a, sex"):
        values_of(data, "sxe", data.test)
    with pytest.raises(SettingError, match="different values, at most 20"):
        values_of(data, "a", data.train)


def test_an_unknown_column_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"evaluate\.by = 'sex'"):
        sartor.run("fedavg", clients=3, rounds=1, evaluate={"by": "sex"}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_interval_is_that_of_paired_samples() -> None:
    alone = [1, 1, 1, 0] * 25
    better = [1, 1, 1, 1] * 10 + [1, 1, 1, 0] * 15  # right in ten more of a hundred, wrong in none
    one = site({"own": better, "alone": alone})
    mean, low, high = one.gain() or (0, 0, 0)
    assert mean == pytest.approx(0.1)
    # The share of a hundred draws that hit ten of the samples: binomial, whatever the models have in common.
    deviation = np.sqrt(0.1 * 0.9 / 100)
    assert low == pytest.approx(0.1 - 1.96 * deviation, abs=0.02)
    assert high == pytest.approx(0.1 + 1.96 * deviation, abs=0.02)
    assert one.sentence().startswith("Oslo gains 10.0 points over training alone (95 % ")
    assert "chance" not in one.sentence()
    worse = site({"own": alone, "alone": better})
    assert worse.gain() == pytest.approx((-mean, -high, -low))
    assert worse.sentence().startswith("Oslo loses 10.0 points over training alone (95 % -")
    same = site({"own": alone, "alone": alone})
    assert same.gain() == (0.0, 0.0, 0.0)
    assert same.sentence() == "Oslo is as well off as training alone (95 % 0.0 to 0.0)"
    assert site({"own": alone}).sentence() is None
    unsure = site({"own": [1, 0, 1, 1], "alone": [0, 1, 0, 1]})
    assert unsure.sentence().endswith("which may be chance")


def test_draws_are_the_same_every_time_and_others_for_another_client() -> None:
    one, again = site({"own": [1, 0] * 20}), site({"own": [1, 0] * 20})
    assert np.array_equal(one.weights, again.weights)
    assert (one.weights.sum(1) == 40).all()
    assert (one.weights[0] == 1).all()
    assert not np.array_equal(one.weights[1], one.weights[2])


def test_scores_are_what_they_are_called() -> None:
    truth = np.array([0, 0, 0, 1])
    outputs = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    weights = np.array([[1.0, 1, 1, 1], [2, 0, 2, 0]])
    assert SCORES["accuracy"].of(weights, truth, outputs).tolist() == [0.75, 0.5]
    # A class that is in no draw has no recall.
    assert SCORES["balanced_accuracy"].of(weights, truth, outputs).tolist() == pytest.approx([5 / 6, 0.5])
    numbers, says = np.array([1.0, 3.0]), np.array([[2.0], [1.0]])
    both = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert SCORES["rmse"].of(both, numbers, says).tolist() == pytest.approx([np.sqrt(2.5), 1.0])
    assert SCORES["mae"].of(both, numbers, says).tolist() == pytest.approx([1.5, 1.0])


def test_roc_and_calibration_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score, roc_curve

    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 60)
    outputs = np.round(4 * random.normal(0, 1, (60, 2)) + 4 * np.stack([-truth, truth], 1)) / 4  # ties
    x, y, area = _roc(truth, outputs)
    chance = outputs[:, 1] - outputs[:, 0]
    far, found, _ = roc_curve(truth, chance, drop_intermediate=False)
    assert np.allclose(x, far)
    assert np.allclose(y, found)
    assert area == f"{roc_auc_score(truth, chance):.3f}"
    assert _roc(np.ones(3), outputs[:3])[2] == "– (one class)"
    sure = np.array([[0.0, np.log(3.0)]] * 4)  # says 1 with 0.75
    x, y, error = _reliability(np.array([1, 1, 1, 0]), sure)
    assert (x.tolist(), y.tolist(), error) == ([pytest.approx(0.75)], [0.75], "0.000")
    assert _reliability(np.array([1, 0, 0, 0]), sure)[2] == "0.500"


def test_a_threshold_parts_the_classes() -> None:
    truth, chance = np.array([0, 0, 1, 0, 1]), np.array([0.2, 0.3, 0.35, 0.1, 0.4])
    assert best_threshold(truth, chance) == pytest.approx(0.325)
    assert best_threshold(np.zeros(3), chance[:3]) is None


def test_the_report_answers_for_every_client(runs: Path, tmp_path: Path) -> None:
    material = read([runs])
    sites = sites_of(material)
    assert sites is not None
    assert sites.alone
    assert (sites.group.label, sites.by) == ("ditto", "sex")
    tables = {table.title: table for table in site_tables(sites)}
    assert list(tables) == ["Is it worth it?", "Thresholds", "By sex"]
    worth = tables["Is it worth it?"]
    assert [row[0].text for row in worth.rows] == list(NAMES)
    assert worth.heads == [
        "client", "test samples", "own model", "shared model", "trained alone", "gain over alone"
    ]  # fmt: skip
    clients = next(run for run in material.runs if run.algorithm == "ditto").clients
    assert [row[2].value for row in worth.rows] == pytest.approx(clients["personal_local_accuracy"])
    assert [row[3].value for row in worth.rows] == pytest.approx(clients["shared_local_accuracy"])
    for row in worth.rows:
        assert row[5].value == pytest.approx(row[2].value - row[4].value)
    groups = tables["By sex"]
    assert [(row[0].text, row[1].text) for row in groups.rows] == [(n, s) for n in NAMES for s in "01"]
    for name, row in zip(NAMES, worth.rows, strict=True):
        mine = [each for each in groups.rows if each[0].text == name]
        assert sum(each[2].value for each in mine) == row[1].value
    assert {figure.name for figure in site_figures(sites)} == {"roc", "calibration"}
    page = write_report([runs], tmp_path / "report.html").read_text()
    told = sites.sentences()
    assert told[0].startswith("With ditto ")
    assert len(told) == 4
    for sentence in told:
        assert sentence in page


def test_one_method_alone_says_what_is_missing(runs: Path) -> None:
    sites = sites_of(read([runs / "ditto"]))
    assert sites is not None
    assert sites.sentences() == []
    assert "A run of separate beside it" in site_tables(sites)[0].about
    assert sites_of(read([runs / "separate"])) is None


def test_a_damaged_file_is_named(runs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(runs / "ditto", tmp_path / "ditto")
    (folder / "outputs.npz").write_bytes(b"nothing")
    with pytest.raises(SartorError, match=r"outputs\.npz: damaged"):
        read([folder])


def test_outputs_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    sartor.run("fedavg", clients=3, rounds=1, evaluate={"outputs": "no"}, out=tmp_path / "run")
    assert not (tmp_path / "run" / "outputs.npz").exists()


def test_without_single_samples_counts_do(runs: Path, tmp_path: Path) -> None:
    """As of runs on real machines."""
    for method in ("ditto", "separate"):
        shutil.copytree(runs / method, tmp_path / method)
        (tmp_path / method / "outputs.npz").unlink()
    sites, whole = sites_of(read([tmp_path])), sites_of(read([runs]))
    assert sites is not None
    assert whole is not None
    assert (sites.counted, sites.alone, whole.counted) == (True, True, False)
    for counted, single in zip(sites.sites, whole.sites, strict=True):
        for model in ("own", "shared", "alone"):
            found, wanted = counted.value(model), single.value(model)
            assert found == pytest.approx(wanted, abs=1.1 / 16)  # drawn anew, of 16 samples
            assert found[0] == pytest.approx(wanted[0])
        (gain, low, high), (same, narrow, wide) = counted.gain(), single.gain()
        assert gain == pytest.approx(same)
        assert high - low >= wide - narrow - 2.2 / 16
    assert site_figures(sites) == []
    assert [table.title for table in site_tables(sites)] == ["Is it worth it?"]
    assert "from counts" in site_tables(sites)[0].about


def test_a_run_whose_own_models_said_nothing_is_told_by_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared model does not stand in for personal ones."""
    monkeypatch.setattr(outputs, "distributed", SimpleNamespace(world=lambda: 2))  # nobody is asked then
    for method in ("fedrod", "separate"):
        settings = {"partition": {"alpha": 0.1}}
        sartor.run(method, clients=3, rounds=2, experiment=settings, out=tmp_path / method)
    material = read([tmp_path])
    run = next(run for run in material.runs if run.algorithm == "fedrod")
    assert set(run.outputs["test"].by_model) == {"shared"}
    sites = sites_of(material)
    assert sites is not None
    assert (sites.counted, sites.alone) == (True, True)
    clients = run.clients
    assert clients["personal_local_accuracy"] != clients["shared_local_accuracy"]
    for model, cell in (("own", "personal_local"), ("shared", "shared_local")):
        values = [(site.value(model) or (None,))[0] for site in sites.sites]
        assert values == pytest.approx(clients[f"{cell}_accuracy"])


def test_what_training_alone_gives_is_told_by_counts_where_samples_do_not(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    (tmp_path / "separate" / "outputs.npz").unlink()
    sites = sites_of(read([tmp_path]))
    assert sites is not None
    assert (sites.counted, sites.alone) == (True, True)


def judged(material: Material, method: str) -> float:
    """What a method is chosen by."""
    run = next(run for run in material.runs if run.algorithm == method)
    return run.last["personal_validation" if "personal_validation" in run.last else "shared_validation"][
        material.headline
    ]


def test_the_best_method_is_spoken_of_whatever_is_stored_of_it(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    config = RunFolder.open(runs / "ditto").config
    settings = {key: config[key] for key in ("data", "evaluate", "model")}
    sartor.run("fedavg", experiment=settings, rounds=1, hyper={"lr": 1e-6}, out=tmp_path / "fedavg")
    (tmp_path / "ditto" / "outputs.npz").unlink()
    material = read([tmp_path])
    assert judged(material, "ditto") > judged(material, "fedavg")
    sites = sites_of(material)
    assert sites is not None
    assert (sites.group.label, sites.counted) == ("ditto", True)
    assert "the best of 2 methods, chosen on validation data" in sites.chosen
    for run in material.runs:  # of which nothing follows from counts
        assert run.summary is not None
        run.summary["headline"] = "balanced_accuracy"
    sites = sites_of(material)
    assert sites is not None
    assert sites.group.label == "fedavg"
    assert sites.chosen.endswith("not stored: ditto.")
    assert sites.chosen in site_tables(sites)[0].about


def test_numbers_have_no_curves_and_no_thresholds(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(0, 1, 90)
    table = {"hospital": np.array(NAMES)[np.arange(90) % 3], "a": x, "b": 2 * x + random.normal(0, 1, 90)}
    csv.write_csv(arrow.table(table), tmp_path / "all.csv")
    data = {"path": str(tmp_path / "all.csv"), "client_column": "hospital", "label_column": "b"}
    settings = {"data": {**data, "validation": 0.2}, "objective": {"name": "regression"}}
    for method in ("ditto", "separate"):
        sartor.run(method, experiment=settings, rounds=1, out=tmp_path / "runs" / method)
    material = read([tmp_path / "runs"])
    sites = sites_of(material)
    assert sites is not None
    assert (sites.counted, sites.alone, material.headline) == (False, True, "rmse")
    assert site_figures(sites) == []
    assert [table.title for table in site_tables(sites)] == ["Is it worth it?"]


def test_few_test_samples_are_no_proof() -> None:
    """Were all of five in favour of one model, that would still happen by chance once in sixteen times."""
    for count, words in ((1, ", which may be chance"), (5, ", which may be chance"), (6, "")):
        one = site({"own": [1] * count, "alone": [0] * count})
        assert one.gain() == (1.0, 1.0, 1.0)
        assert one.beyond_chance == (words == "")
        assert (one.sentence() or "").endswith(
            f"gains 100.0 points over training alone (95 % 100.0 to 100.0){words}"
        )


def test_samples_that_every_seed_has_count_once(tmp_path: Path) -> None:
    """Where the table divides its rows, more seeds are more models and no more samples."""
    random = np.random.default_rng(1)
    rows = 120
    x = random.normal(0, 1, (rows, 2))
    columns = {
        "hospital": np.array(NAMES)[np.arange(rows) % 3],
        "split": np.where(np.arange(rows) // 3 % 4 == 0, "test", "train"),
        "a": x[:, 0],
        "b": x[:, 1],
        "state": (x.sum(1) + random.normal(0, 1, rows) > 0).astype(int),
    }
    csv.write_csv(arrow.table(columns), tmp_path / "all.csv")
    data = {"path": str(tmp_path / "all.csv"), "client_column": "hospital", "label_column": "state"}
    data |= {"split_column": "split", "feature_columns": ["a", "b"]}
    for seed in (0, 1, 2):
        settings = {"data": data, "model": {"name": "softmax"}, "checkpoint": {"every": 0}}
        for method in ("fedavg", "separate"):
            sartor.run(method, experiment=settings, rounds=1, seed=seed, out=tmp_path / f"{method}-{seed}")
    every = [tmp_path / f"{method}-{seed}" for method in ("fedavg", "separate") for seed in (0, 1, 2)]
    for counted in (False, True):
        if counted:
            for run in every:
                (run / "outputs.npz").unlink()
        found = sites_of(read(every))
        assert found is not None
        assert (found.counted, found.alone) == (counted, True)
        for one in found.sites:
            assert one.test.count == 10
            assert len(one.test.truth) == 30
            # What is drawn of one seed is drawn of the others.
            assert (one.weights.reshape(-1, 3, 10) == one.weights[:, None, :10]).all()
            runs = [RunFolder.open(run).clients for run in every[:3]]
            wanted = np.mean([run["shared_local_accuracy"][run["client"].index(one.name)] for run in runs])
            assert (one.value("own") or (None,))[0] == pytest.approx(wanted)


def test_shares_of_labels_are_no_counts_of_samples(tmp_path: Path) -> None:
    """Three of four labels right at a client's only sample are no sample that is right."""
    generator = torch.Generator().manual_seed(0)
    data = {
        name: (torch.randn(count, 3, generator=generator), torch.rand(count, 4, generator=generator).round())
        for name, count in zip(NAMES, (20, 31, 6), strict=True)
    }
    for method in ("fedavg", "separate"):
        settings: dict[str, Any] = {"objective": "multi-label", "evaluate": {"headline": "accuracy"}}
        sartor.run(
            method, data=data, model=lambda: nn.Linear(3, 4), rounds=1, out=tmp_path / method, **settings
        )
    material = read([tmp_path / "fedavg", tmp_path / "separate"])
    assert material.headline == "accuracy"
    assert sites_of(material) is None


def test_a_run_without_the_score_is_named_and_not_judged_by_it(runs: Path, tmp_path: Path) -> None:
    """What models say of numbers was taken for scores of classes, all of them wrong; and training alone is
    that of the same clients, whichever is named first."""
    random = np.random.default_rng(0)
    columns = {"who": ["x", "y"] * 20, "a": random.normal(0, 1, 40), "y": random.normal(0, 1, 40)}
    csv.write_csv(arrow.table(columns), tmp_path / "t.csv")
    data = {"path": str(tmp_path / "t.csv"), "client_column": "who", "label_column": "y"}
    for method in ("fedavg", "separate"):
        settings = {"data": data, "objective": {"name": "regression"}, "model": {"name": "softmax"}}
        sartor.run(method, experiment=settings, rounds=1, out=tmp_path / method)
    folders = [tmp_path / "fedavg", tmp_path / "separate", runs / "ditto", runs / "separate"]
    found, alone = sites_of(read(folders)), sites_of(read(folders[2:]))
    assert found is not None
    assert alone is not None
    assert found.group.runs[0].algorithm == "ditto"
    assert "as they have no accuracy: fedavg, separate " in found.chosen
    assert found.sentences()[1:] == alone.sentences()[1:]
