"""Every method either trains with a setting of local training or refuses it, in one sentence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from helpers import METHODS, classification, federation_of, method, module_of, play, quadratics
from sartor.algorithms import make, registered
from sartor.data.clients import ClientData
from sartor.errors import SettingError
from sartor.model.task import Task
from sartor.runs.run import tensors_of

SETTINGS: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "momentum": 0.0, "nesterov": False},
    "adagrad": {"optimizer": "adagrad"},
    "clip": {"clip": 0.1},
    "rounds": {"schedule": "cosine", "schedule_length": 4, "warmup": 1},
    "steps": {"schedule": "step", "schedule_over": "steps", "schedule_every": 1, "schedule_factor": 0.5},
    "micro": {"micro": 2},
    "flip": {"augment": ["flip"]},
    "mix-up": {"augment": [{"name": "mix-up", "alpha": 1.0}]},
}
REFUSED: dict[str, set[str]] = {
    "apfl": {"steps", "micro"},
    "apple": {"adamw", "adagrad", "clip"},
    "fedadc": {"steps", "sgd"},
    "fedas": {"micro", "mix-up"},
    "fedcp": {"micro"},
    "feddbe": {"micro"},
    "feddc": {"sgd"},
    "fedem": {"micro"},
    "fedgen": {"micro"},
    "fedkd": {"micro"},
    "fednova": {"adamw", "adagrad", "clip"},
    "nova-adam": {"adamw", "adagrad", "clip"},
    "fedntd": {"mix-up"},
    "fedpac": {"mix-up"},
    "fedproto": {"mix-up"},
    "fedsam": {"micro"},
    "fedtgp": {"mix-up"},
    "fsvrg": {"sgd", "augment"},
    "gpfl": {"micro", "mix-up"},
    "losac": {"sgd", "micro"},
    "mime": {"sgd", "augment"},
    "mimelite": {"sgd", "augment"},
    "mimesvrg": {"sgd", "augment"},
    "a-fsvrg": {"sgd", "augment"},
    "ga-fsvrg": {"sgd", "augment"},
    "ma-fsvrg": {"sgd", "augment"},
    "ma-fsvrg-async": {"sgd", "augment"},
    "comfed-m": {"adamw", "adagrad", "clip"},
    "per-fedavg": {"sgd", "steps", "micro"},
    "pfedme": {"sgd", "steps", "micro"},
    "vrl-sgd": {"sgd"},
}
GROUPS = {"sgd": {"nesterov", "adamw", "adagrad", "clip"}, "augment": {"flip", "mix-up"}}


def refused(name: str) -> set[str]:
    """The settings that a method cannot be itself with."""
    return set().union(*(GROUPS.get(entry, {entry}) for entry in REFUSED.get(name, ())))


def pictures() -> tuple[Task, ClientData]:
    data = classification((5, 9, 2), shape=(1, 4, 4), classes=3, dtype=torch.float64)
    data = dataclasses.replace(data, validation=data.test, public_x=data.pooled_x[:5])
    return Task(module_of("mlp", (1, 4, 4), 3, hidden=4), classes=3, head="output"), data


def trains(name: str, local: dict[str, Any]) -> None:
    """Train for a round with these settings; what comes out is finite."""
    task, data = pictures()
    federation = federation_of("loop", task, data, local={"batch": 4, **local}, workers=1)
    algorithm = method(name, federation, lr=0.05)
    algorithm.check(federation.local)
    server = play(algorithm, federation, [[0, 1, 2]])
    tensors = [value for _, value in tensors_of(server) if value.is_floating_point()]
    assert all(bool(value.isfinite().all()) for value in tensors)


@pytest.mark.parametrize("name", [*METHODS, *(name for name, kind in registered().items() if kind.public)])
def test_every_method_trains_with_a_setting_or_refuses_it_in_one_sentence(name: str) -> None:
    allowed = [setting for setting in SETTINGS if setting not in refused(name)]
    # Of two that exclude each other the last that is allowed counts. Whoever takes AdamW takes Adagrad.
    assert ("adamw" in allowed) == ("adagrad" in allowed)
    for together in (("nesterov", "adamw", "clip", "rounds"), ("steps", "micro", "flip", "mix-up")):
        chosen: dict[str, Any] = {}
        for setting in together:
            if setting in allowed:
                chosen |= SETTINGS[setting]
        trains(name, chosen)
    for setting in sorted(refused(name)):
        with pytest.raises(SettingError, match=r"^local\.\w+.*(; set local\.|; leave )[^;]*$") as found:
            trains(name, SETTINGS[setting])
        assert f" {name} " in str(found.value)


def test_scaffold_takes_the_option_under_which_it_is_itself() -> None:
    task, data = pictures()
    for option, local, refusal in (
        ("auto", {"clip": 0.1}, None),
        ("II", {"clip": 0.1}, r"local\.clip = 0\.1: scaffold with hyper\.option=II"),
        ("auto", {"augment": ["flip"]}, None),
        ("I", {"augment": ["flip"]}, r"local\.augment.*: scaffold takes c_i over the samples as they are"),
    ):
        federation = federation_of("loop", task, data, local=local)
        algorithm = method("scaffold", federation, option=option)
        if refusal is None:
            algorithm.start(federation)
            continue
        with pytest.raises(SettingError, match=refusal):
            algorithm.start(federation)


def test_the_mean_gradient_of_scaffold_goes_by_the_rates_of_its_steps() -> None:
    """With one client and one step a round, c_i is the gradient at w, whatever the rate of that step."""
    task, data = quadratics(torch.full((1, 2), 4.0), torch.ones(1, 2))
    local = {"schedule_over": "steps", "warmup": 4}
    federation = federation_of("loop", task, data, local=local)
    algorithm = method("scaffold", federation, lr=0.5)
    server = play(algorithm, federation, [[0]])
    assert torch.allclose(server.w, torch.full((2,), 0.5 / 4 * 4.0, dtype=torch.float64))
    assert torch.allclose(server.c, torch.full((2,), -4.0, dtype=torch.float64))


@pytest.mark.parametrize("nesterov", [False, True])
def test_fednova_divides_by_what_its_optimiser_and_its_schedule_do(nesterov: bool) -> None:
    """Under one constant gradient at all clients the normalised changes are equal, whatever their steps."""
    sizes = (4, 12)
    task, data = quadratics(torch.zeros(2, 1), torch.zeros(2, 1), sizes)
    momentum = {"momentum": 0.5, "nesterov": nesterov, "schedule": "cosine", "schedule_over": "steps"}
    federation = federation_of("loop", task, data, local={"batch": 4, **momentum})
    algorithm = method("fednova", federation, lr=0.1)
    function = algorithm.client_function  # type: ignore[attr-defined]
    replies = federation.map(function, [0, 1], {"w": federation.initial()})
    rates = [0.1 * (1 + math.cos(math.pi * k / 3)) / 2 for k in range(3)]
    m, work = 0.0, 0.0
    for rate in rates:
        m = 0.5 * m + 1
        work += rate * (1 + 0.5 * m if nesterov else m)
    assert replies["work"].tolist() == pytest.approx([0.1 * (1.5 if nesterov else 1), work])


def test_the_server_of_comfed_knows_the_rate_of_the_round() -> None:
    """SlowMo's momentum is in units of the local rate: halved rates halve its step, not its memory."""
    task, data = quadratics(torch.full((1, 1), 1e6), torch.ones(1, 1))
    local = {"schedule": "step", "schedule_every": 1, "schedule_factor": 0.5}
    federation = federation_of("loop", task, data, local=local)
    algorithm = make(registered()["slowmo"], lr=1e-3, beta=0.5)
    federation.hyper = algorithm.hyper
    server = play(algorithm, federation, [[0]] * 2)
    first = 1e-3 * 1e6
    gradient = 1e6 - first
    assert float(server.w) == pytest.approx(first + 0.5e-3 * (0.5 * 1e6 + gradient), rel=1e-12)
