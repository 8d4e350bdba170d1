"""Numbers that no training gives, against counts by hand, autograd and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sartor.commands.main import app
from sartor.errors import SettingError
from sartor.studies.computed import COMPUTED, computed, seconds, step_flops
from sartor.studies.entries import entries
from sartor.studies.reproduction import reproduce

COUNTED = {"shape": [1, 6, 6], "classes": 3, "samples": 25, "batch": 10, "epochs": 2, "clients": 4}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def number(score: str, **settings: Any) -> float:
    return computed(score, settings, {"algorithm": "diversifed"}, None, seed=0)


# Operations ------------------------------------------------------------------------------------------------


def test_a_dense_layer_is_counted_as_by_hand() -> None:
    first = 2 * 5 * 6 * 4  # x Wᵀ: a multiplication and an addition for every sample, input and output
    assert step_flops(nn.Linear(6, 4), (6,), batch=5) == 2 * first  # forward, and the gradient of W
    second = 2 * 5 * 4 * 3
    both = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    assert step_flops(both, (6,), batch=5) == 2 * first + 3 * second  # the second's input has a gradient


def test_a_convolution_is_counted_as_by_hand() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 4 * 4, 5))
    convolution, dense = 2 * (4 * 4) * (2 * 3 * 3) * 3, 2 * 48 * 5
    assert step_flops(module, (2, 6, 6), batch=1) == 2 * convolution + 3 * dense


def test_a_client_s_round_is_all_its_batches() -> None:
    layer = 2 * 36 * 3
    expected = 2 * 25 * 2 * layer / 1e9  # forward and backward of 25 samples, two epochs; the last batch is 5
    assert number("client flops", **COUNTED, model={"name": "softmax"}) == pytest.approx(expected)
    even = {**COUNTED, "samples": 20}
    assert number("client flops", **even, model={"name": "softmax"}) == pytest.approx(expected * 20 / 25)


def test_the_server_s_distances_are_products_of_all_pairs() -> None:
    for clients in (4, 7):
        settings = {**COUNTED, "clients": clients, "model": {"name": "softmax"}}
        assert number("server flops", **settings) == pytest.approx(2 * clients**2 * (36 * 3 + 3) / 1e9)


# The server's work -----------------------------------------------------------------------------------------


def test_the_least_work_is_once_itself() -> None:
    settings = {"clients": 40, "features": 6, "share": 10, "models": 2, "least": [10, 2]}
    assert computed("central cost", settings, {"algorithm": "ma-fsvrg"}, "cpu", 0) == 1.0
    more = computed("central cost", {**settings, "share": 40}, {"algorithm": "ga-fsvrg"}, "cpu", 0)
    assert more > 0


def test_the_first_time_is_for_warming_up() -> None:
    calls: list[int] = []
    assert len(seconds(lambda: calls.append(1), "cpu", 3)) == 3
    assert len(calls) == 4


# Partitions and equations ----------------------------------------------------------------------------------


def test_small_alpha_leaves_few_classes_and_a_large_share() -> None:
    settings = {"classes": 5, "each": 200, "clients": 8, "samples": 40}
    assert number("held classes", **settings, alpha=1e-3) < 2
    assert number("largest share", **settings, alpha=1e-3) > 0.9
    assert number("held classes", **settings, alpha=1e6) == 5
    assert number("largest share", **settings, alpha=1e6) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_forces_are_those_of_autograd(tau: float) -> None:
    d = torch.tensor([1.0, 2.5], dtype=torch.float64, requires_grad=True)
    terms = (d / tau).log_softmax(0) / 2  # the two items of (5)
    for item, loss in ((1, terms[0]), (2, terms[1]), (0, terms.sum())):
        gradient = torch.autograd.grad(loss, d, retain_graph=True)[0]
        for to in (1, 2):
            force = number("distance force", distances=[1.0, 2.5], tau=tau, item=item, to=to)
            assert force == pytest.approx(-float(gradient[to - 1]))


def test_forces_pull_and_push_as_the_paper_says() -> None:
    def force(item: int, to: int) -> float:
        return number("distance force", distances=[1.0, 2.0], tau=1.0, item=item, to=to)

    assert force(1, 1) < 0 < force(1, 2)
    assert force(2, 2) < 0 < force(2, 1)
    assert force(0, 1) < 0 < force(0, 2)  # the nearer one wins


# Entries ---------------------------------------------------------------------------------------------------


def test_every_computed_entry_names_computations_that_there_are() -> None:
    found = [each for each in entries() if each.cell == "computed"]
    assert len(found) == 4
    for each in found:
        for at in each.scales.values():
            assert {column.score or each.score for column in at.columns} <= set(COMPUTED)


@pytest.mark.parametrize("name", ["diversifed/table8", "diversifed/fig4", "diversifed/fig5"])
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_computed_entries_run(name: str, scale: str) -> None:
    result = reproduce(name, scale=scale, seeds=1)
    at = next(each for each in entries() if each.name == name).scales[scale]
    assert len(result.numbers) == len(at.methods) * len(at.columns)
    assert all(number.ours.mean is not None for number in result.numbers)
    assert (result.out / "reproduction.json").exists()


def test_settings_of_ones_own_must_be_the_computation_s() -> None:
    once, twice = (
        reproduce("diversifed/table8", columns=["client"], settings={"epochs": epochs}).numbers[0].ours.mean
        for epochs in (1, 2)
    )
    assert once is not None
    assert twice == pytest.approx(2 * once)
    with pytest.raises(SettingError, match="rounds: unknown key"):
        reproduce("diversifed/table8", settings={"rounds": 3})
    done = CliRunner().invoke(app, ["reproduce", "diversifed/fig4", "--seeds", "1"])
    assert done.exit_code == 0, done.output
    assert "Small setting: numbers do not compare" in done.stdout


def test_an_unknown_computation_is_named() -> None:
    with pytest.raises(SettingError, match="did you mean client flops"):
        number("client flop")
