"""A whole run: seeds, cohorts, the evaluation matrix, what is reported and what is stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from helpers import METHODS, RAGGED, classification, model_task
from sartor.algorithms import registered
from sartor.algorithms.references.fedavg import FedAvg
from sartor.data.clients import ClientData, Split
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.federation.exchange import Check
from sartor.federation.settings import Cohort
from sartor.runs.loop import draw_cohort
from sartor.runs.record import RunFolder
from sartor.runs.result import Result

CELLS = ("shared_pooled", "shared_local", "personal_pooled", "personal_local")


@pytest.fixture(scope="module")
def data() -> ClientData:
    """Ragged clients with validation data; client 2 has no test data."""
    made = classification(RAGGED, shape=(6,), classes=4)
    count = made.test.count.copy()
    count[2] = 0
    test = dataclasses.replace(made.test, count=count)
    other = classification(RAGGED, shape=(6,), classes=4, seed=5).test
    pooled = classification((40, 40), shape=(6,), classes=4, seed=3).test
    return dataclasses.replace(made, test=test, validation=other, pooled_x=pooled.x, pooled_y=pooled.y)


def go(algorithm: str, data: ClientData, **settings: Any) -> Result:
    given: dict[str, Any] = {
        "rounds": 3,
        "engine": "loop",
        "store": False,
        "cohort": {"count": 4},
        "local": {"batch": 8},
        **settings,
    }
    return sartor.run(algorithm, data=data, model=given.pop("model", "softmax"), **given)


# Seeds and cohorts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "engine"), [("fedavg", "loop"), ("fedavg", "stacked"), ("separate", "loop")]
)
def test_a_seed_gives_a_model_and_another_seed_another(data: ClientData, name: str, engine: str) -> None:
    first, again, other = (go(name, data, engine=engine, seed=seed) for seed in (4, 4, 5))
    assert first.summary["model_sha256"] == again.summary["model_sha256"]
    assert first.summary["model_sha256"] != other.summary["model_sha256"]
    assert first.summary["engine"] == engine


@pytest.mark.parametrize("name", ["fedavg", "fedupdate", "separate"])
def test_evaluating_does_not_change_the_models(data: ClientData, name: str) -> None:
    """Also with running statistics, which evaluation and fine-tuning use."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    hyper = {"finetune_epochs": 1} if name == "fedupdate" else {}
    often, once = (go(name, data, model=model(), hyper=hyper, evaluate={"every": every}) for every in (1, 0))
    assert often.summary["model_sha256"] == once.summary["model_sha256"]
    assert len(often.clients["round"]) == 3 * 6
    assert len(once.clients["round"]) == 6


def test_every_method_sees_the_same_cohorts(data: ClientData, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int]]] = []
    usual = Federation.map

    def noting(self: Federation, function: Any, cohort: Any, *rest: Any, **named: Any) -> Any:
        seen.append((self.round, list(map(int, cohort))))
        return usual(self, function, cohort, *rest, **named)

    monkeypatch.setattr(Federation, "map", noting)
    cohorts = []
    for name in ("fedavg", "fedupdate", "separate"):
        seen.clear()
        go(name, data, evaluate={"every": 0})
        cohorts.append(list(seen))
    assert cohorts[0] == cohorts[1] == cohorts[2]
    assert [round for round, _ in cohorts[0]] == [1, 2, 3]
    assert len({tuple(cohort) for _, cohort in cohorts[0]}) > 1
    for round, cohort in cohorts[0]:
        assert cohort == draw_cohort(0, round, 6, Cohort(count=4)).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10),
        ({"fraction": 0.25}, 3),  # 2.5 rounds up
        ({"fraction": 0.24}, 2),
        ({"fraction": 0.01}, 1),  # at least one
        ({"count": 7}, 7),
        ({"count": 7, "fraction": 0.1}, 7),
    ],
)
def test_a_cohort_has_the_size_asked_for(settings: dict[str, Any], expected: int) -> None:
    cohort = draw_cohort(3, 1, 10, Cohort(**settings))
    assert len(cohort) == len(set(cohort.tolist())) == expected
    assert cohort.tolist() == sorted(cohort.tolist())


def test_every_client_is_drawn_equally_often() -> None:
    drawn = np.zeros(5)
    for round in range(1, 2001):
        drawn[draw_cohort(0, round, 5, Cohort(count=2))] += 1
    assert np.abs(drawn - 800).max() < 5 * np.sqrt(2000 * 0.4 * 0.6)


# The evaluation matrix -------------------------------------------------------------------------------------


def measured(w: Tensor, split: Split | tuple[Tensor, Tensor], client: int = 0) -> tuple[float, float]:
    """Accuracy and mean loss of softmax regression, written out."""
    x, y = split.of(client) if isinstance(split, Split) else split
    outputs = x @ w[:24].view(4, 6).T + w[24:]
    return float((outputs.argmax(1) == y).float().mean()), float(F.cross_entropy(outputs, y))


def test_all_cells_are_what_the_final_models_give_on_the_data(data: ClientData) -> None:
    result = go("fedupdate", data, hyper={"lr": 0.3, "finetune_epochs": 1})
    assert result.w is not None
    assert result.personal is not None
    tested = [0, 1, 3, 4, 5]  # client 2 has no test data and counts in no mean
    pooled = (data.pooled_x, data.pooled_y)
    shared = [measured(result.w, data.test, client) for client in tested]
    personal = [measured(result.personal[client], data.test, client) for client in tested]
    expected = {
        "shared_pooled": [measured(result.w, pooled)],
        "shared_local": shared,
        "personal_local": personal,
        "personal_pooled": [measured(row, pooled) for row in result.personal],
    }
    n = data.test.count[tested]
    for cell, values in expected.items():
        accuracy, loss = np.array(values).T
        last = result.summary["last"][cell]
        assert last["accuracy"] == pytest.approx(accuracy.mean(), abs=1e-6)
        assert result.summary["accuracy"][cell] == last["accuracy"]
        assert last["loss"] == pytest.approx(loss.mean(), rel=1e-4)
        weights = n if cell.endswith("local") else np.ones(len(accuracy))
        assert last["accuracy_weighted"] == pytest.approx(
            (weights * accuracy).sum() / weights.sum(), abs=1e-6
        )
        spread = last["accuracy_spread"]
        assert (spread["minimum"], spread["maximum"]) == pytest.approx(
            (accuracy.min(), accuracy.max()), abs=1e-6
        )
        assert spread["deviation"] == pytest.approx(accuracy.std(), abs=1e-6)
    assert len({round(last["accuracy"], 6) for last in result.summary["last"].values()}) > 1


def test_every_client_has_a_row_for_every_evaluation(data: ClientData) -> None:
    result = go("fedupdate", data, hyper={"finetune_epochs": 1})
    rows = result.clients
    assert rows["round"] == [1] * 6 + [2] * 6 + [3] * 6
    assert rows["client"] == list(data.names) * 3
    assert rows["n_train"] == list(RAGGED) * 3
    assert rows["n_test"] == data.test.count.tolist() * 3
    assert result.w is not None
    for client in range(6):
        accuracy, loss = rows["shared_local_accuracy"][12 + client], rows["shared_local_loss"][12 + client]
        if client == 2:
            assert accuracy is None  # no result, rather than a result of zero
            assert loss is None
        else:
            assert (accuracy, loss) == pytest.approx(measured(result.w, data.test, client), rel=1e-4)
    assert "shared_pooled_accuracy" not in rows
    assert None not in rows["personal_pooled_accuracy"]


def test_cells_that_a_method_has_no_model_for_are_null(data: ClientData) -> None:
    shared = go("fedavg", data)
    assert shared.personal is None
    assert [shared.summary["accuracy"][cell] is None for cell in CELLS] == [False, False, True, True]
    separate = go("separate", data)
    assert separate.w is None
    assert [separate.summary["accuracy"][cell] is None for cell in CELLS] == [True, True, False, False]
    for part in ("last", "best_on_test", "best_by_validation"):
        assert [separate.summary[part][cell] is None for cell in CELLS] == [True, True, False, False]
    with pytest.raises(SartorError, match="fedavg: the run has no personal model"):
        shared.state_dict(client=0)
    with pytest.raises(SartorError, match="separate: the run has no shared model"):
        separate.state_dict()


@pytest.mark.parametrize("choice", ["auto", "yes", "no"])
def test_personal_models_are_evaluated_on_the_pooled_data_if_wanted(data: ClientData, choice: str) -> None:
    result = go("separate", data, rounds=1, evaluate={"personal_pooled": choice})
    assert (result.summary["accuracy"]["personal_pooled"] is None) == (choice == "no")
    assert result.summary["accuracy"]["personal_local"] is not None


def test_the_batch_of_evaluation_does_not_matter(data: ClientData) -> None:
    first, second = (go("fedupdate", data, rounds=1, evaluate={"batch": size}) for size in (3, 500))
    assert first.summary["model_sha256"] == second.summary["model_sha256"]
    assert first.summary["accuracy"] == second.summary["accuracy"]
    assert first.clients["shared_local_loss"][0] == pytest.approx(
        second.clients["shared_local_loss"][0], rel=1e-5
    )


# When, and which round is best -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "rounds", "expected"),
    [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (0, 4, [4]), (9, 2, [2]), (1, 0, [0])],
)
def test_evaluations_come_every_so_many_rounds_and_at_the_end(
    data: ClientData, every: int, rounds: int, expected: list[int]
) -> None:
    result = go("fedavg", data, rounds=rounds, evaluate={"every": every})
    assert [row["round"] for row in result.rounds if "evaluation" in row] == expected
    assert [row["round"] for row in result.rounds] == (list(range(1, rounds + 1)) or [0])
    assert result.summary["last"]["shared_local"] == result.rounds[-1]["evaluation"]["shared_local"]
    assert sorted(set(result.clients["round"])) == expected


def test_no_rounds_evaluate_the_initial_model(data: ClientData) -> None:
    result = go("fedavg", data, rounds=0, seed=7)
    assert result.w is not None
    assert torch.equal(result.w, model_task("softmax", data, seed=7).initial())
    assert result.summary["bytes_down"] == result.summary["bytes_up"] == 0


def test_the_best_rounds_are_the_first_with_the_highest_accuracy(data: ClientData) -> None:
    result = go("fedupdate", data, rounds=6, hyper={"lr": 1.5, "finetune_epochs": 1})
    history = {row["round"]: row["evaluation"] for row in result.rounds}
    for cell in CELLS:
        model = cell.split("_")[0]
        for part, judge in (("best_on_test", cell), ("best_by_validation", f"{model}_validation")):
            highest = max(evaluation[judge]["accuracy"] for evaluation in history.values())
            first = min(
                round for round, evaluation in history.items() if evaluation[judge]["accuracy"] == highest
            )
            best = result.summary[part][cell]
            assert best == {"accuracy": history[first][cell]["accuracy"], "round": first}
    assert (
        result.summary["best_on_test"] != result.summary["best_by_validation"]
    )  # the case shows the difference


def test_without_validation_data_nothing_is_best_by_validation(data: ClientData) -> None:
    result = go("fedavg", dataclasses.replace(data, validation=None), rounds=1)
    assert result.summary["best_by_validation"] == dict.fromkeys(CELLS)
    assert result.summary["best_on_test"]["shared_local"]["round"] == 1


def test_validation_cells_are_measured_on_validation_data(data: ClientData) -> None:
    result = go("fedupdate", data, rounds=1, hyper={"finetune_epochs": 1})
    assert result.w is not None
    assert result.personal is not None
    assert data.validation is not None
    models = {"shared_validation": result.w.expand(6, -1), "personal_validation": result.personal}
    for cell, rows in models.items():
        expected = np.mean([measured(rows[client], data.validation, client)[0] for client in range(6)])
        assert result.rounds[-1]["evaluation"][cell]["accuracy"] == pytest.approx(expected, abs=1e-6)


# Bytes and records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedupdate"])
def test_bytes_are_rounds_times_cohort_times_model(data: ClientData, name: str) -> None:
    result = go(name, data)
    size = 4 * (24 + 4)
    assert result.summary["parameters"] * 4 == size
    assert result.summary["bytes_down"] == result.summary["bytes_up"] == 3 * 4 * size
    assert [row["bytes_up"] for row in result.rounds] == [4 * size] * 3
    assert [(row["cohort"], row["answered"]) for row in result.rounds] == [(4, 4)] * 3


def test_the_run_folder_holds_what_the_run_returned(data: ClientData, tmp_path: Path) -> None:
    result = go(
        "fedupdate", data, hyper={"finetune_epochs": 1}, engine=None, store=True, out=tmp_path / "run"
    )
    folder = RunFolder.open(tmp_path / "run")
    assert result.folder == tmp_path / "run"
    assert folder.finished
    assert folder.summary == result.summary
    assert folder.rounds == result.rounds
    assert folder.clients == result.clients
    models = folder.models
    assert result.w is not None
    assert result.personal is not None
    assert torch.equal(models["server.w"], result.w)
    assert torch.equal(models["personal"], result.personal)
    assert folder.config["hyper"]["finetune_epochs"] == 1
    assert folder.config["engine"]["name"] == result.summary["engine"] == "stacked"  # what auto came to


@pytest.mark.parametrize("choice", ["auto", "yes", "no"])
def test_personal_models_are_stored_unless_they_are_too_many_or_unwanted(
    data: ClientData, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"evaluate": {"personal_models": choice}, "store": True}
    first = go("separate", data, **settings, out=tmp_path / "few")
    assert ("personal" in RunFolder.open(tmp_path / "few").models) == (choice != "no")
    assert (first.personal is not None) == first.personal_stored == (choice != "no")
    monkeypatch.setattr("sartor.runs.run.MOST_MODEL_NUMBERS", 6 * first.summary["parameters"] - 1)
    second = go("separate", data, **settings, out=tmp_path / "many")
    assert ("personal" in RunFolder.open(tmp_path / "many").models) == (choice == "yes")
    if choice != "yes":
        with pytest.raises(SartorError, match=r"were not stored; evaluate\.personal_models = 'yes' stores"):
            second.state_dict(client=0)
    assert second.summary["accuracy"] == first.summary["accuracy"]


def test_a_personal_model_is_marked_as_such(data: ClientData, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node could not tell it from what may be sent; it is found before anything is trained."""
    call = registered()["separate"]().personalize(None, np.arange(1))
    assert call is not None
    monkeypatch.setattr(call.function, "personal", False)
    monkeypatch.setattr(registered()["separate"], "round", None)
    with pytest.raises(SartorError, match=r"separate: .* own_model, .* write @sartor\.personal above it"):
        go("separate", data)


def test_a_stored_experiment_runs_again_to_the_same_models(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "clients": 4,
        "seed": 3,
        "partition": {"name": "dirichlet", "alpha": 0.3},
    }
    first = sartor.run("fedavg", data="digits", model="softmax", out=tmp_path / "run", **settings)
    again = sartor.run(experiment=tmp_path / "run" / "config.toml", store=False)
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    assert again.summary["partition_hash"] == first.summary["partition_hash"]
    assert (tmp_path / "run" / "partition.npz").is_file()


def test_the_hash_is_of_the_final_models(data: ClientData) -> None:
    """Equal settings but one more round: another model, another hash."""
    first, second = (go("fedavg", data, rounds=rounds).summary["model_sha256"] for rounds in (1, 2))
    assert first != second
    assert len(first) == 64


# Errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_diverges_ends_in_one_message(data: ClientData, name: str) -> None:
    with pytest.raises(SartorError, match=rf"{name}, round \d.*: .*not finite.*smaller learning rate"):
        go(name, data, model="mlp", hyper={"lr": 1e30}, rounds=4, cohort={})


def test_a_reply_that_is_not_finite_is_told_before_what_a_method_makes_of_it(
    data: ClientData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is ahead of its host, which looks at replies when the round is over."""

    def round(self: FedAvg, server: Any, federation: Federation, cohort: np.ndarray) -> Any:
        norms = torch.tensor([1.0, norm])
        federation._checks.append(Check("fedavg, round 1", np.arange(2), {"'delta'": norms}, 0.0))
        raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")

    monkeypatch.setattr(FedAvg, "round", round)
    norm = float("nan")
    with pytest.raises(SartorError, match=r"round 1, client .*: 'delta' of its reply is not finite"):
        go("fedavg", data, rounds=1)
    norm = 1.0
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        go("fedavg", data, rounds=1)


def test_a_cohort_larger_than_the_federation_is_refused(data: ClientData) -> None:
    with pytest.raises(SartorError, match=r"cohort\.count: must be at most .*6.*got 7"):
        go("fedavg", data, cohort={"count": 7})
