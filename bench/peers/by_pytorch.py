"""An expert's loop in plain PyTorch.

PYTHONPATH=bench python -m peers.by_pytorch mlp
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from expert import expert_loop
from peers.network import accuracy, module, waiter
from peers.workload import WORKLOADS, Clock, Samples, Workload, arguments, report, samples, versions


def cohorts(workload: Workload) -> Iterator[list[int]]:
    rng = np.random.default_rng(1)
    while True:
        yield rng.choice(workload.clients, workload.drawn, replace=False).tolist()


def train(workload: Workload, data: Samples, rounds: int, device: str, clock: Clock) -> torch.nn.Module:
    model = module(workload).to(device)
    x, y = (torch.from_numpy(part).flatten(0, 1).to(device) for part in (data.x, data.y))
    clients = [(first, workload.samples) for first in range(0, len(y), workload.samples)]
    one_round = expert_loop(
        model, x, y, clients, cohorts(workload), lr=workload.lr, batch=workload.batch, epochs=workload.epochs
    )
    clock.tick()
    for _ in range(rounds):
        one_round()
        clock.tick()
    return model


def main() -> None:
    asked = arguments(__doc__).parse_args()
    workload = WORKLOADS[asked.workload]
    clock, data = Clock(waiter(asked.device)), samples(workload)
    model = train(workload, data, asked.warm_up + asked.rounds, asked.device, clock)
    report("PyTorch, a loop by hand", clock, asked, accuracy(model, data), versions("torch"))


if __name__ == "__main__":
    main()
