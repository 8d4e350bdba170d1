"""Rules on CUDA give what they give on a CPU, and most of them without waiting for the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import sartor.robust  # noqa: F401  # registers its rules
from sartor.federation.exchange import Replies
from sartor.federation.reduction import AGGREGATES, Reducer

pytestmark = pytest.mark.cuda

ASKS = {"geometric-median"}
"""Those that ask the device how far they have come."""


def replies(name: str, n: int, ragged: bool, device: str) -> Replies:
    """Of clients out of order, three of whom are far away."""
    drawn = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 40_000, generator=drawn) + 2
    rows[:3] *= -4
    counts = np.arange(n) % 7 + 3 if ragged else np.full(n, 5)
    clients = np.arange(n)[::-1].copy()
    there = torch.device(device)
    reducer = Reducer(AGGREGATES[name]())
    return Replies(clients, counts, {"x": rows.to(there)}, there, torch.float32, reducer=reducer)


@pytest.mark.parametrize("n", [13, 100])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_cuda_gives_what_a_cpu_gives(name: str, ragged: bool, n: int) -> None:
    expected: list[Tensor] = []
    found: list[Tensor] = []
    for device, means in (("cpu", expected), ("cuda", found)):
        asked = replies(name, n, ragged, device)
        for turn in range(3):
            further = replace(asked, values={"x": asked.values["x"] * (1 + turn)})
            waits = device == "cuda" and turn and name not in ASKS
            torch.cuda.set_sync_debug_mode("error" if waits else "default")
            try:
                means.append(further.mean("x"))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
