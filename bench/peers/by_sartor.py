"""Sartor as a user runs it: ``sartor.run`` with an observer that looks at the clock.

PYTHONPATH=bench:src python -m peers.by_sartor mlp --engine stacked
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import sartor
from peers.network import accuracy, module, waiter
from peers.workload import WORKLOADS, Clock, Samples, Workload, arguments, report, samples, versions
from sartor.data.clients import ClientData, Split


class Ticks(sartor.Observer):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def start(self, run: Any) -> None:
        self.clock.tick()

    def round(self, run: Any, row: Mapping[str, Any]) -> None:
        self.clock.tick()


def clients(data: Samples) -> ClientData:
    """Its container: all clients' samples one after the other, and next to nothing to evaluate at the end."""
    count, size = data.y.shape
    x, y = (torch.from_numpy(part).flatten(0, 1) for part in (data.x, data.y))
    train = Split(x, y, np.arange(count) * size, np.full(count, size))
    test = Split(x, y, train.start, np.ones_like(train.count))
    names = tuple(f"client {number}" for number in range(count))
    return ClientData(names, train, test, None, x[:10], y[:10], 10, "fashion-mnist", "fashion-mnist")


def train(
    workload: Workload, data: Samples, rounds: int, device: str, clock: Clock, **engine: Any
) -> torch.nn.Module:
    model = module(workload)
    result = sartor.run(
        "fedavg",
        data=clients(data),
        model=model,
        rounds=rounds,
        device=device,
        engine=engine,
        local={"batch": workload.batch, "epochs": workload.epochs},
        cohort={"count": workload.drawn},
        evaluate={"every": 0},
        hyper={"lr": workload.lr},
        observers=[Ticks(clock)],
        store=False,
    )
    model.load_state_dict(result.state_dict())
    return model


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--engine", default="stacked", choices=("stacked", "loop"))
    asked = parser.parse_args()
    workload = WORKLOADS[asked.workload]
    clock, data = Clock(waiter(asked.device)), samples(workload)
    rounds = asked.warm_up + asked.rounds
    model = train(workload, data, rounds, asked.device, clock, name=asked.engine)
    packages = {"sartor": sartor.__version__, **versions("torch")}
    report(f"Sartor, {asked.engine}", clock, asked, accuracy(model, data), packages)


if __name__ == "__main__":
    main()
