"""Optimisers, schedules, clipping and micro-batches of local training, against PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of, flat, module_of, quadratics
from sartor.client.local import Client
from sartor.client.rates import Schedule
from sartor.client.settings import Local
from sartor.data.clients import ClientData
from sartor.errors import SettingError
from sartor.federation import Reply
from sartor.model.batch import Batch
from sartor.model.task import Task

ENGINES = ["loop", "stacked"]
SIZES = (3, 11, 16, 21)


def small() -> tuple[nn.Module, Task, ClientData]:
    data = classification(SIZES, shape=(5,), classes=4, dtype=torch.float64)
    module = module_of("mlp", (5,), 4, hidden=6)
    return module, Task(module, classes=4, head="output"), data


def train(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lr=0.1))


def trained(engine: str, local: dict[str, Any], round: int = 1, task: Task | None = None) -> Tensor:
    """Every client's model after its training."""
    _, own, data = small()
    task = task or own
    federation = federation_of(engine, task, data, local={"batch": 4, "epochs": 2, **local})
    federation.round = round
    return federation.map(train, range(len(SIZES)), {"w": task.initial()})["w"]


def seen_by(number: int, **local: Any) -> list[Batch]:
    """The batches of a client."""
    _, task, data = small()
    seen: list[Batch] = []

    def record(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Batch) -> Tensor:
            seen.append(batch)
            return client.grad(w_k, batch)

        return Reply(w=client.descend(w, direction, lr=0.1))

    federation = federation_of("loop", task, data, local={"batch": 4, "epochs": 2, **local})
    federation.round = 1
    federation.map(record, [number], {"w": task.initial()})
    return seen


Make = Callable[[Any], torch.optim.Optimizer]
TORCH: dict[str, tuple[dict[str, Any], Make]] = {
    "nesterov": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    ),
    "adam": (
        {"optimizer": "adam", "beta2": 0.9, "epsilon": 1e-3},
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.9), eps=1e-3),
    ),
    "adamw": (
        {"optimizer": "adamw", "momentum": 0.8, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.999), weight_decay=0.3),
    ),
    "adagrad": (
        {"optimizer": "adagrad", "weight_decay": 0.05},
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.05),
    ),
}


@pytest.mark.parametrize("name", sorted(TORCH))
def test_optimisers_are_pytorchs_on_both_engines(name: str) -> None:
    settings, make = TORCH[name]
    module, _, _ = small()
    after = {engine: trained(engine, settings) for engine in ENGINES}
    assert torch.allclose(after["loop"], after["stacked"], rtol=1e-9, atol=1e-11)
    optimiser = make(module.parameters())
    for batch in seen_by(1, **settings):
        optimiser.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        optimiser.step()
    assert torch.allclose(after["loop"][1], flat(module), rtol=1e-10, atol=1e-12)


def test_adamw_without_decay_is_adam_and_with_it_is_not_l2() -> None:
    plain, decayed = {"optimizer": "adam"}, {"optimizer": "adamw", "weight_decay": 0.1}
    assert torch.equal(trained("loop", plain), trained("loop", {"optimizer": "adamw"}))
    assert not torch.allclose(trained("loop", decayed), trained("loop", {**decayed, "optimizer": "adam"}))


# Limits: settings that do nothing, to the bit ---------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "nothing",
    [
        {"clip": 1e300},
        {"micro": 4},
        {"micro": 100},
        {"schedule": "constant", "schedule_over": "steps", "schedule_every": 3, "schedule_factor": 0.5},
    ],
)
def test_settings_at_their_limit_change_nothing(engine: str, nothing: dict[str, Any]) -> None:
    momentum = {"momentum": 0.5}
    assert torch.equal(trained(engine, {**momentum, **nothing}), trained(engine, momentum))


# Clipping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_is_by_the_norm_of_each_step(engine: str) -> None:
    """On f = ½ ‖w‖² from far away every step has the length η c, until the gradient is shorter than c."""
    task, data = quadratics(torch.zeros(2, 2), torch.ones(2, 2), (2, 5))
    start = torch.tensor([3.0, 4.0], dtype=torch.float64)

    def go(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.5, steps=3))

    after = federation_of(engine, task, data, local={"clip": 2.0}).map(go, range(2), {"w": start})["w"]
    expected = (start * (5 - 3 * 0.5 * 2) / 5).expand(2, -1)
    assert torch.allclose(after, expected, rtol=1e-12)
    short = start / 5  # of norm 1, which is not clipped
    after = federation_of(engine, task, data, local={"clip": 2.0}).map(go, range(2), {"w": short})["w"]
    assert torch.allclose(after, (short * 0.5**3).expand(2, -1), rtol=1e-12)


def test_weight_decay_is_not_clipped_and_what_stays_has_no_part_in_the_norm() -> None:
    module, task, data = small()
    only = task.part("head").mask(task.initial())
    local = {"batch": 4, "clip": 0.3, "weight_decay": 0.5, "momentum": 0.5}
    seen: list[Batch] = []

    def head(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Batch) -> Tensor:
            seen.append(batch)
            return client.grad(w_k, batch)

        return Reply(w=client.descend(w, direction, lr=0.1, only=only))

    after = federation_of("loop", task, data, local=local).map(head, [1], {"w": task.initial()})["w"][0]
    for key, value in module.named_parameters():
        value.requires_grad_(key.startswith("output"))
    moving = [value for value in module.parameters() if value.requires_grad]
    optimiser = torch.optim.SGD(moving, lr=0.1, momentum=0.5, weight_decay=0.5)
    cut = False
    for batch in seen:
        optimiser.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        norm = torch.cat([value.grad.reshape(-1) for value in moving if value.grad is not None]).norm()
        for value in moving:
            assert value.grad is not None
            value.grad *= min(1.0, 0.3 / float(norm))
        cut = cut or float(norm) > 0.3
        optimiser.step()
    assert cut
    assert torch.allclose(after, flat(module), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_models_that_lie_behind_each_other_are_clipped_apart(engine: str) -> None:
    task, data = quadratics(torch.zeros(1, 2), torch.ones(1, 2))

    def go(client: Client, hyper: Any, w: Tensor, apart: Tensor) -> Reply:
        along = torch.tensor([3.0, 0.1], dtype=w.dtype)
        both = client.descend(w, lambda w_k, batch: along, lr=1.0, steps=1, apart=(1, 1))
        return Reply(apart=both, joint=client.descend(w, lambda w_k, batch: along, lr=1.0, steps=1))

    zero = torch.zeros(2, dtype=torch.float64)
    federation = federation_of(engine, task, data, local={"clip": 1.0})
    replies = federation.map(go, [0], {"w": zero, "apart": zero})
    assert torch.allclose(replies["apart"][0], torch.tensor([-1.0, -0.1], dtype=torch.float64))
    norm = math.hypot(3.0, 0.1)
    assert torch.allclose(replies["joint"][0], torch.tensor([-3 / norm, -0.1 / norm], dtype=torch.float64))


# Micro-batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_add_up_to_the_same_gradient(engine: str, micro: int) -> None:
    settings = {"momentum": 0.5, "batch": 7}
    after = trained(engine, {**settings, "micro": micro})
    assert torch.allclose(after, trained("loop", settings), rtol=1e-10, atol=1e-12)


def test_micro_batches_are_equal_on_both_engines_with_layers_that_know_more_than_their_input() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
    task = Task(module.double(), classes=4)
    after = [trained(engine, {"batch": 7, "micro": 3}, task=task) for engine in ENGINES]
    assert torch.allclose(*after, rtol=1e-9, atol=1e-11)


def test_a_direction_with_a_memory_refuses_micro_batches() -> None:
    _, task, data = small()

    def go(client: Client, hyper: Any, w: Tensor) -> Reply:
        zero = torch.zeros_like(w)
        y, _ = client.descend_with(w, lambda y, batch, m: (client.grad(y, batch), m + y), zero, lr=0.1)
        return Reply(w=y)

    federation = federation_of("loop", task, data, local={"micro": 2})
    with pytest.raises(SettingError, match=r"local\.micro = 2: .* set local\.micro to 0"):
        federation.map(go, [0], {"w": task.initial()})


# Schedules --------------------------------------------------------------------------------------------------


def test_the_cosine_has_its_ends_and_pytorchs_middle() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=8, eta_min=0.1)
    expected = []
    for _ in range(9):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    found = Schedule("cosine", end=0.1).at(torch.arange(12), 8).tolist()
    assert found[:9] == pytest.approx(expected, rel=1e-12)
    assert found[0] == 1.0
    assert found[8:] == pytest.approx([0.1] * 4, rel=1e-12)  # and stays there


def test_steps_fall_and_a_warm_up_rises_first() -> None:
    found = Schedule("step", every=2, factor=0.5, warmup=3).at(torch.arange(9), 0).tolist()
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 0.5, 0.5, 0.25, 0.25])
    assert Schedule(warmup=2).at(torch.arange(4), 0).tolist() == [0.5, 1, 1, 1]


OVER_ROUNDS = {"schedule": "cosine", "schedule_length": 4, "schedule_end": 0.5}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_schedule_over_rounds_is_the_rate_of_each_round(engine: str) -> None:
    task, data = quadratics(torch.full((1, 2), 4.0), torch.ones(1, 2))
    federation = federation_of(engine, task, data, local={**OVER_ROUNDS, "lr_decay": 0.5})
    zero = torch.zeros(2, dtype=torch.float64)
    for round in (1, 3, 6):
        federation.round = round
        over = min(round - 1, 4)
        rate = 0.1 * 0.5 ** (round - 1) * (0.5 + 0.5 * (1 + math.cos(math.pi * over / 4)) / 2)
        assert federation.map(train, [0], {"w": zero})["w"][0].tolist() == pytest.approx([rate * 4] * 2)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [0, 3])
def test_a_schedule_over_steps_is_the_rate_of_each_step_of_each_client(engine: str, length: int) -> None:
    """Along a constant direction the way is Σ η_k, which is what the client says too."""
    task, data = quadratics(torch.zeros(3, 1), torch.ones(3, 1), (4, 9, 21))

    def go(client: Client, hyper: Any, w: Tensor) -> Reply:
        moved = client.descend(w, lambda y, batch: torch.ones_like(y), lr=0.5)
        twice = client.descend(w, lambda y, batch: torch.ones_like(y), lr=0.5, updates=2)
        return Reply(w=moved, twice=twice, work=client.work(0.5))

    local = {
        "batch": 4,
        "schedule": "cosine",
        "schedule_over": "steps",
        "schedule_length": length,
        "warmup": 1,
    }
    replies = federation_of(engine, task, data, local=local).map(
        go, range(3), {"w": torch.zeros(1, dtype=torch.float64)}
    )

    def way(steps: int) -> float:
        span = max((length or steps) - 1, 1)
        over = [min(max(k - 1, 0) / span, 1) for k in range(steps)]
        return sum(0.5 * (1 + math.cos(math.pi * share)) / 2 for share in over)

    for number, steps in enumerate((1, 3, 6)):
        assert float(replies["w"][number, 0]) == pytest.approx(-way(steps), rel=1e-12)
        assert float(replies["work"][number]) == pytest.approx(way(steps), rel=1e-12)
        assert float(replies["twice"][number, 0]) == pytest.approx(-way(2 * steps), rel=1e-12)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="nesterov is a form of sgd's momentum"):
        Local(nesterov=True)
    _, task, data = small()
    with pytest.raises(SettingError, match="schedule_length: give the rounds"):
        federation_of("loop", task, data, local={"schedule": "cosine"})
