"""Which new c_i SCAFFOLD takes unless it is told, and what ComFed's own names have by default."""

from __future__ import annotations

import pytest
import torch

from helpers import federation_of, method, play, task_and_data
from sartor.algorithms import registered
from sartor.algorithms.comfed.comfed import MECHANISMS
from sartor.algorithms.comfed.scaf import Scaf, anew
from sartor.runs.experiment import load
from sartor.studies import presets
from sartor.studies.reproduction import entry

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
