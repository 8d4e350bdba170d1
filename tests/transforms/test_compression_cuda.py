"""Compressors on CUDA give what they give on a CPU, also in rounds that are replayed as graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import federation_of, play, task_and_data
from sartor.algorithms import make, registered
from sartor.runs.experiment import from_mapping
from sartor.runs.run import tensors_of

pytestmark = pytest.mark.cuda

FIRST: list[dict[str, Any]] = [
    {"name": "difference"},
    {"name": "int8", "place": "down", "block": 16},
    {"name": "clip", "norm": 0.5},
]
LAST: list[dict[str, Any]] = [
    {"name": "top-k", "share": 0.3},
    {"name": "random-k", "share": 0.3},
    {"name": "qsgd"},
    {"name": "int4", "block": 16},
    {"name": "sign"},
    {"name": "low-rank", "rank": 1},
]


@pytest.mark.parametrize("name", ["fedavg", "spfl"])
@pytest.mark.parametrize("last", LAST, ids=lambda table: str(table["name"]))
def test_cuda_gives_what_a_cpu_gives(last: dict[str, Any], name: str) -> None:
    transforms = from_mapping({"transforms": [*FIRST, last]}).transforms
    found, traffic = [], []
    for device in ("cpu", "cuda"):
        task, data = task_and_data()
        settings: dict[str, Any] = {"device": device, "buffers": registered()[name].buffers}
        federation = federation_of(
            "stacked", task, data, local={"batch": 8}, transforms=transforms, **settings
        )
        algorithm = make(registered()[name], lr=0.05)
        federation.hyper = algorithm.hyper
        server = play(algorithm, federation, [[0, 2, 3], [1, 2, 4], range(6)])
        found.append({key: value.cpu() for key, value in tensors_of(server)})
        traffic.append(federation.traffic)
    assert traffic[0] == traffic[1]
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11)
