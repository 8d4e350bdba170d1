"""The stacked engine on CUDA: captured calls give what the plain loop gives on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_engines import as_allowed, assert_close, ended, network, vectors
from torch import nn

import sartor
from helpers import RAGGED, classification, federation_of, model_task, plain_cnn, play, resnet18
from sartor import random
from sartor.algorithms import registered
from sartor.client.settings import Local
from sartor.data.clients import ClientData
from sartor.engines import make_federation
from sartor.engines.stacked.engine import StackedEngine
from sartor.federation import Federation
from sartor.model.task import Task
from sartor.runs.result import Result

pytestmark = pytest.mark.cuda


def test_the_streams_give_the_same_integers() -> None:
    keys = random.stream(7, "batch", torch.arange(50))
    index = torch.arange(1000)
    here = random.words(keys[:, None], index)
    there = random.words(keys.cuda()[:, None], index.cuda())
    assert torch.equal(here, there.cpu())
    sizes = torch.arange(1, 51)
    for places in (index, torch.arange(random.FEW + 100)):
        here = random.shuffled(keys, sizes, places)
        there = [value.cuda() for value in (keys, sizes, places)]
        assert torch.equal(here, random.shuffled(*there).cpu())


@pytest.mark.parametrize("name", sorted(name for name, kind in registered().items() if not kind.public))
def test_graphs_equal_the_loop(name: str) -> None:
    """Every method on ragged clients in double precision, so that only a mistake can make a difference."""
    data, task = vectors(), network(adapters=2 if registered()[name].adapters else 0)
    left = {}
    for device, engine in (("cpu", "loop"), ("cuda", "stacked")):

        def federation(local: dict[str, float], device: str = device, engine: str = engine) -> Federation:
            return federation_of(engine, task, data, local={"batch": 8, **local}, device=device)

        left[device] = {key: value.cpu() for key, value in as_allowed(name, federation).items()}
    assert_close(left["cpu"], left["cuda"], 1e-8)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "diversifed"])
@pytest.mark.parametrize("sizes", [RAGGED, (32,) * 6])
def test_convolutions_equal_the_loop(name: str, sizes: tuple[int, ...]) -> None:
    data = classification(sizes, shape=(3, 16, 16), seed=1)  # seed 0 has a unit on the edge of being active
    left = {}
    for device, engine in (("cpu", "loop"), ("cuda", "stacked")):
        federation = federation_of(engine, model_task("lenet", data), data, local={"batch": 8}, device=device)
        everyone = [[0, 1, 2, 3, 4, 5]]
        ended_with = ended(name, federation, everyone * 5)
        left[device] = {key: value.cpu() for key, value in ended_with.items()}
    assert_close(left["cpu"], left["cuda"], 1e-3)


# A user's own model ----------------------------------------------------------------------------------------


def ran(
    model: nn.Module, data: ClientData, device: str, engine: str, rounds: int = 2, batch: int = 8
) -> Result:
    """FedAvg with a user's own model, for a few small steps."""
    settings = {"local": {"batch": batch}, "hyper": {"lr": 0.01}}
    return sartor.run(
        "fedavg", data=data, model=model, device=device, engine=engine, rounds=rounds, store=False, **settings
    )


def by_groups(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels), channels)


def by_channels(channels: int) -> nn.Module:
    return nn.GroupNorm(channels, channels)


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (plain_cnn, (1, 28, 28)),
    "resnet18-groups": (lambda: resnet18(by_groups, 8), (3, 16, 16)),
    "resnet18-batch": (lambda: resnet18(nn.BatchNorm2d, 8), (3, 16, 16)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 5e-2)])
def test_an_own_model_on_auto_equals_the_loop_on_a_cpu(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    build, shape = OWN[name]
    data = classification((5, 17, 8), shape=shape, dtype=dtype)
    left = {}
    for device, engine in (("cpu", "loop"), ("cuda", "auto")):
        result = ran(build().to(dtype), data, device, engine)
        assert result.summary["engine"] == ("loop" if device == "cpu" else "stacked")
        assert result.w is not None
        left[device] = {"w": result.w}
    assert_close(left["cpu"], left["cuda"], tolerance)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (plain_cnn, (1, 28, 28)),
        (lambda: resnet18(by_groups), (3, 32, 32)),
        (lambda: resnet18(by_channels), (3, 32, 32)),
        (lambda: resnet18(nn.BatchNorm2d), (3, 32, 32)),
    ],
)
def test_an_own_model_runs_stacked_in_the_precision_that_is_usual(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Convolutions in TF32 differ from batch to batch by more than float32 does: no reason to refuse.

    One step each is compared, roughly: such rounding decides whether many a unit is active.
    """
    torch.backends.cudnn.allow_tf32 = True  # the fixture sets it back
    data = classification((16, 9, 8), shape=shape, classes=10)
    moved = {}
    for engine in ("loop", "auto"):
        model = build()
        result = ran(model, data, "cuda", engine, rounds=1, batch=0)
        assert result.summary["engine"] == ("loop" if engine == "loop" else "stacked")
        assert result.w is not None
        moved[engine] = result.w - Task(model).initial()
    assert float(moved["loop"].norm()) > 0
    assert float((moved["auto"] - moved["loop"]).norm()) < 0.5 * float(moved["loop"].norm())


def test_a_model_is_found_to_be_stackable_or_not_for_samples_on_the_device() -> None:
    class Mixing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(x - x.mean(0))
            return result

    torch.backends.cudnn.allow_tf32 = True  # the fixture sets it back
    data = classification((9, 4), shape=(1, 8, 8))
    federation_of("stacked", Task(plain_cnn((1, 8, 8), 4), classes=4), data, device="cuda")
    task = Task(Mixing(plain_cnn((1, 8, 8), 4)), classes=4)
    federation_of("stacked", task, data, device="cuda")
    assert task.mixes_samples(data.train.x.cuda(), data.train.y.cuda())


def test_steps_of_models_that_mix_samples_are_captured_batch_by_batch() -> None:
    data = classification((19, 4, 9, 33, 12), shape=(6,), classes=4)

    class Mixing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(x - x.mean(0))
            return result

    torch.manual_seed(0)
    task = Task(Mixing(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), classes=4)
    cohorts = [[0, 1, 2], [3, 4, 0], [1, 4, 2], [0, 3, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    found = []
    for engine in ("loop", "stacked"):
        algorithm, local = registered()["ditto"](), {"batch": 4, "epochs": 2}
        federation = federation_of(engine, task, data, local=local, hyper=algorithm.hyper, device="cuda")
        found.append(play(algorithm, federation, cohorts).w)
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], task.initial("cuda"), rtol=1e-2, atol=1e-2)


def test_a_federation_may_be_freed_while_another_captures() -> None:
    """Graphs in reference cycles are freed whenever the collector runs: not in the middle of a capture."""
    data, task = vectors(), network()
    threshold = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    try:
        for _ in range(3):
            federation = federation_of("stacked", task, data, local={"batch": 8}, device="cuda")
            federation.itself = federation  # type: ignore[attr-defined]
            ended("fedavg", federation)
    finally:
        gc.set_threshold(*threshold)


def test_running_out_of_memory_halves_the_chunk() -> None:
    data = classification((64,) * 8, shape=(3, 16, 16))
    task = model_task("lenet", data)
    federation = make_federation(
        "stacked", task, data, local=Local(batch=8), hyper=registered()["fedavg"]().hyper, device="cuda"
    )
    torch.cuda.set_per_process_memory_fraction(1.0)
    algorithm = registered()["fedavg"]()
    server = algorithm.start(federation)
    server = algorithm.round(server, federation, np.arange(8))  # kernels are loaded, which takes memory too
    engine = federation.engine
    assert isinstance(engine, StackedEngine)
    engine.graphs.forget()
    hoard = torch.empty(
        int(torch.cuda.mem_get_info()[0] * 0.999) - (24 << 20), dtype=torch.uint8, device="cuda"
    )
    engine.chunk = 8
    try:
        server = algorithm.round(server, federation, np.arange(8))
    except torch.OutOfMemoryError:
        pytest.skip("not even one client fits beside the hoard")
    finally:
        del hoard
        torch.cuda.empty_cache()
    assert torch.isfinite(server.w).all()
