"""The workload's network as a PyTorch module, for all frameworks that train such."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from peers.workload import Samples, Workload, initial


def module(workload: Workload) -> nn.Module:
    """The network with the workload's first weights."""
    built = nn.Sequential(*LAYERS[workload.model]())
    with torch.no_grad():
        for parameter, values in zip(built.parameters(), initial(workload), strict=True):
            parameter.copy_(torch.from_numpy(values))
    return built


def _mlp() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)]


def _cnn() -> list[nn.Module]:
    first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return [*first, *second, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)]


LAYERS = {"mlp": _mlp, "cnn": _cnn}


@torch.no_grad()
def accuracy(model: nn.Module, data: Samples) -> float:
    """The share of test images that it gets right."""
    device = next(model.parameters()).device
    parts = torch.from_numpy(data.x_test).split(1000)
    said = torch.cat([model(part.to(device)).argmax(1).cpu() for part in parts])
    return float(np.mean(said.numpy() == data.y_test))


def waiter(device: str) -> Callable[[], object]:
    """What waits for the device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None
