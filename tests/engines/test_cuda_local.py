"""Settings of local training on CUDA: what the CPU gives, and both engines alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of
from sartor.client.local import Client
from sartor.federation import Reply
from sartor.model.task import Task

pytestmark = pytest.mark.cuda

LOCAL: dict[str, Any] = {
    "batch": 4,
    "optimizer": "adamw",
    "clip": 1.0,
    "schedule": "cosine",
    "schedule_over": "steps",
    "micro": 3,
    "augment": [{"name": "crop", "padding": 1}, "flip", "colour", {"name": "cut-out", "size": 2}, "mix-up"],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.output = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.convolution(x)).relu().flatten(1)
        z = F.dropout(z, 0.2, self.training) + 0.01 * torch.randn_like(z)
        result: Tensor = self.output(z)
        return result


def train(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lr=0.01))


def trained(engine: str, device: str, precision: str) -> Tensor:
    torch.manual_seed(0)
    task = Task(Net(), classes=4).in_precision(precision)
    dtype = torch.float64 if precision == "float64" else torch.float32
    data = classification((3, 11, 16), shape=(3, 4, 4), classes=4, dtype=dtype)
    federation = federation_of(engine, task, data, local=LOCAL, device=device)
    for round in (1, 2, 3):  # the third is a replay of what was captured
        federation.round = round
        after = federation.map(train, range(3), {"w": task.initial(device)})["w"]
    return after.cpu()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("bf16", 0.05)])
def test_cuda_trains_as_the_cpu_does(engine: str, precision: str, tolerance: float) -> None:
    expected = trained("loop", "cpu", precision)
    assert torch.allclose(trained(engine, "cuda", precision), expected, atol=tolerance)
