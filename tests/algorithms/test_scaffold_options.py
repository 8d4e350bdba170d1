"""Which new c_i SCAFFOLD takes unless it is told, where its correction goes, and ComFed's own defaults."""

from __future__ import annotations

import pytest
import torch

from helpers import batches_of, federation_of, method, play, task_and_data
from sartor.algorithms import registered
from sartor.algorithms.comfed.comfed import MECHANISMS
from sartor.algorithms.comfed.scaf import Scaf, anew
from sartor.engines import ENGINES
from sartor.errors import SettingError
from sartor.model.batch import Batch
from sartor.runs.experiment import load
from sartor.studies import presets
from sartor.studies.entries import entry

COHORTS = [[0, 1, 2], [1, 3, 5], [0, 4, 5]]


@pytest.mark.parametrize("name", ["scaffold", "scaf-yogi"])
@pytest.mark.parametrize(
    ("local", "option"),
    [({}, "II"), ({"momentum": 0.5}, "I"), ({"weight_decay": 0.1}, "I"), ({"optimizer": "adam"}, "I")],
)
def test_plain_steps_take_option_ii_and_others_option_i(
    name: str, local: dict[str, float], option: str
) -> None:
    found = []
    for own in ({}, {"option": option}):
        task, data = task_and_data()
        federation = federation_of("loop", task, data, local={"batch": 8, **local})
        found.append(play(method(name, federation, lr=0.1, **own), federation, COHORTS).w)
    assert torch.equal(found[0], found[1])


def test_comfeds_presets_have_its_option() -> None:
    for preset in ("comfed/table4", "comfed/digits"):
        experiment = load(presets.path(preset), [], algorithm="scaf-adam")
        assert anew(experiment.hyper, experiment.local)
    assert not anew(Scaf(), load(None, []).local)


def test_comfeds_adagrad_has_its_momentum() -> None:
    """β1 = 0.9 without exception in the paper; FedAdagrad by its own name has none (Reddi et al. 2021)."""
    for mechanism in MECHANISMS:
        assert registered()[f"{mechanism}-adagrad"].Hyper().beta1 == 0.9
    assert registered()["fedadagrad"].Hyper().beta1 == 0.0
    rows = entry("comfed/table4").scales["paper"].methods
    adagrad = [registered()[row.algorithm].Hyper() for label, row in rows.items() if "adagrad" in label]
    assert [hyper.beta1 for hyper in adagrad] == [0.9] * 4


def test_behind_plain_steps_is_before_them() -> None:
    found = []
    for behind in (False, True):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        algorithm = method("scaffold", federation, lr=0.1, option="II", behind=behind)
        found.append(play(algorithm, federation, COHORTS).w)
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_correction_behind_momentum_is_added_to_pytorchs_own_steps(engine: str) -> None:
    """y ← y − η (m + c − c_i), where PyTorch's optimiser takes the step along m."""
    task, data = task_and_data()
    local = {"batch": 8, "momentum": 0.9, "weight_decay": 0.01}
    federation = federation_of(engine, task, data, local=local)
    found = play(method("scaffold", federation, lr=0.1, behind=True), federation, COHORTS)

    plain = federation_of("loop", task, data, local={"batch": 8}, workers=1)
    w = plain.initial()
    c, c_i = torch.zeros_like(w), torch.zeros(data.clients, len(w), dtype=w.dtype)
    for round, cohort in enumerate(COHORTS, 1):
        moved, news = [], c_i.clone()
        for client in cohort:
            y = w.clone()
            steps = torch.optim.SGD([y], lr=0.1, momentum=0.9, weight_decay=0.01)
            for batch in batches_of(plain, client, round):
                y.grad = task.grad(y, batch)
                steps.step()
                y -= 0.1 * (c - c_i[client])
            moved.append(y - w)
            news[client] = task.grad(w, Batch(*data.train.of(client)))
        c_i, c, w = news, news.mean(0), w + torch.stack(moved).mean(0)
    assert float(c.abs().max()) > 1e-3
    assert torch.allclose(found.w, w, rtol=0, atol=1e-10)
    assert torch.allclose(found.c, c, rtol=0, atol=1e-10)


def test_behind_and_the_servers_momentum_are_refused_together() -> None:
    federation = federation_of("loop", *task_and_data())
    with pytest.raises(SettingError, match=r"hyper\.behind: scaf-adam has hyper\.local_beta"):
        method("scaf-adam", federation, behind=True, local_beta=0.5).start(federation)


def test_the_papers_rows_have_it_behind() -> None:
    table = entry("comfed/table4")
    for scale, behind in (("paper", True), ("small", False)):
        rows = table.scales[scale].methods
        scaf = [row.hyper for label, row in rows.items() if label.startswith("scaf")]
        assert [hyper["behind"] for hyper in scaf] == [behind] * 4
