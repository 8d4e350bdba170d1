"""Which way a step of many clients is computed goes by its size, and by what its layers have kernels for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import classification, federation_of
from sartor.engines import ways
from sartor.model.task import Task


def net(**settings: Any) -> Task:
    layers = (nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3, **settings), nn.Flatten(), nn.LazyLinear(4))
    module = nn.Sequential(*layers)
    module(torch.zeros(1, 1, 8, 8))
    return Task(module, classes=4)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.output = nn.GRU(8, 3, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(self.cells(x[:, 0])[0][:, -1])
        return scores


@pytest.mark.parametrize(
    ("task", "numbers", "way"),
    [
        (net(), 1 << 22, "together"),
        (net(), 1 << 26, "together"),
        (net(), 1 << 27, "measured"),
        (net(groups=2), 1 << 22, "together"),
        (net(groups=2), 1 << 24, "measured"),
        (net(groups=2), 1 << 25, "apart"),
        (Task(Recurrent(), classes=4), 1 << 25, "apart"),
        (net().in_precision("bf16"), 1 << 25, "apart"),
        (net().in_precision("float64"), 1 << 24, "measured"),
    ],
)
def test_large_layers_without_kernels_go_apart(
    task: Task, numbers: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = classification((4, 6))
    settings = federation_of("stacked", net(), data, local={"batch": 4}).settings
    monkeypatch.setattr(Task, "activations", lambda self, x: numbers // 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(ways, "remembered", lambda path, key, measure: "measured")
    assert ways.choose_way(task, data, replace(settings, device="cuda"), 2, Path("/nowhere")) == way
    assert ways.choose_way(task, data, settings, 2, Path("/nowhere")) == "together"
