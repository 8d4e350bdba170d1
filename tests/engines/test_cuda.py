"""The stacked engine on CUDA: captured and compiled calls give what the plain loop gives on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_engines import as_allowed, assert_close, ended, network, vectors

from helpers import RAGGED, classification, federation_of, model_task
from sartor import random
from sartor.algorithms import registered
from sartor.client.settings import Local
from sartor.engines import make_federation
from sartor.federation import Federation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Convolutions use TF32 by default; equality with a CPU needs all digits."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


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
        for shuffled in (random.shuffled, torch.compile(random.shuffled, dynamic=False)):
            assert torch.equal(here, shuffled(*there).cpu())


@pytest.mark.parametrize("name", sorted(registered()))
def test_graphs_equal_the_loop(name: str) -> None:
    """Every method on ragged clients in double precision, so that only a mistake can make a difference."""
    data, task = vectors(), network()
    left = {}
    for device, engine in (("cpu", "loop"), ("cuda", "stacked")):

        def federation(local: dict[str, float], device: str = device, engine: str = engine) -> Federation:
            return federation_of(engine, task, data, local={"batch": 8, **local}, device=device)

        left[device] = {key: value.cpu() for key, value in as_allowed(name, federation).items()}
    assert_close(left["cpu"], left["cuda"], 1e-8)


@pytest.mark.parametrize(
    ("name", "compiled"), [("fedavg", False), ("fedavg", True), ("scaffold", False), ("diversifed", False)]
)
@pytest.mark.parametrize("sizes", [RAGGED, (32,) * 6])
def test_convolutions_equal_the_loop(name: str, compiled: bool, sizes: tuple[int, ...]) -> None:
    data = classification(sizes, shape=(3, 16, 16))
    left = {}
    for device, engine in (("cpu", "loop"), ("cuda", "stacked")):
        settings = {"compile": compiled} if engine == "stacked" else {}
        federation = federation_of(
            engine, model_task("lenet", data), data, local={"batch": 8}, device=device, **settings
        )
        everyone = [[0, 1, 2, 3, 4, 5]]
        ended_with = ended(name, federation, everyone * 5)
        left[device] = {key: value.cpu() for key, value in ended_with.items()}
    assert_close(left["cpu"], left["cuda"], 1e-3)


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
    hoard = torch.empty(
        int(torch.cuda.mem_get_info()[0] * 0.999) - (24 << 20), dtype=torch.uint8, device="cuda"
    )
    federation.engine.chunk = 8  # type: ignore[attr-defined]
    try:
        server = algorithm.round(server, federation, np.arange(8))
    except torch.OutOfMemoryError:
        pytest.skip("not even one client fits beside the hoard")
    finally:
        del hoard
        torch.cuda.empty_cache()
    assert torch.isfinite(server.w).all()
