"""Several seeds in one batch on CUDA: every run gives what it gives alone, on the loop engine of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_lockstep import SIZES, network
from torch import Tensor

from helpers import classification
from sartor.algorithms import registered
from sartor.client.settings import Local
from sartor.data.clients import ClientData
from sartor.engines import federation_of
from sartor.engines.lockstep import Maker, in_lockstep
from sartor.engines.loop import LoopEngine
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task

DEVICES = [pytest.param("cuda", marks=pytest.mark.cuda)]


def trained(name: str, seed: int, device: str, make: Maker) -> Tensor:
    """Five rounds of a method, of other cohorts in every seed."""
    task, data = network(seed, "plain"), clouds(seed)
    method = registered()[name]()
    settings = FederationSettings(local=Local(batch=8), hyper=method.hyper, seed=seed, device=device)
    federation = federation_of(task, make(task, data, settings), settings)
    server, rng = method.start(federation), np.random.default_rng(seed)
    for _ in range(5):
        server = method.round(server, federation, np.sort(rng.choice(data.clients, 3, replace=False)))
        federation.round += 1
    w: Tensor = server.w
    return w.cpu()


def clouds(seed: int) -> ClientData:
    return classification(SIZES[seed], shape=(5,), classes=4, seed=seed, dtype=torch.float64)


def by_the_loop(task: Task, data: ClientData, settings: FederationSettings) -> LoopEngine:
    return LoopEngine(task, data, replace(settings, device="cpu"))


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_seeds_together_are_seeds_alone(name: str, device: str) -> None:
    runs: list[Callable[[Maker], Tensor]] = [partial(trained, name, seed, device) for seed in range(3)]
    found = in_lockstep(runs)
    for seed, w in enumerate(found):
        assert isinstance(w, Tensor), w
        torch.testing.assert_close(w, trained(name, seed, "cpu", by_the_loop), rtol=1e-8, atol=1e-9)
