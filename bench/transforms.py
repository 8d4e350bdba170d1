"""What each transform adds to a round of FedAvg with the CNN of McMahan et al. (1.66 million parameters).

    python bench/transforms.py [--device cuda] [--clients 10] [--samples 600] [--repeats 5] [--json FILE]

Every client trains one epoch of batches of 20 on images of 28×28, as many as MNIST has for each of 100
clients. A round without transforms and one with each of them take turns, and a figure is the ratio of the
medians; besides, bytes of a round and what they were without. On a CPU seconds are those of the processor,
which do not depend on who else uses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sartor.algorithms import make, registered
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.engines import make_federation
from sartor.federation import Federation
from sartor.federation.transforms import Transform
from sartor.model.networks import MODELS, make_task
from sartor.runs.experiment import from_mapping

CASES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "clip": [{"name": "clip"}],
    "top-k": [{"name": "top-k"}],
    "random-k": [{"name": "random-k"}],
    "qsgd": [{"name": "qsgd"}],
    "int8": [{"name": "int8"}],
    "int4": [{"name": "int4"}],
    "sign": [{"name": "sign"}, {"name": "majority"}],
    "low-rank": [{"name": "low-rank"}],
    "clip + top-k + int8": [{"name": "clip"}, {"name": "top-k"}, {"name": "int8"}],
    "int8 down": [{"name": "int8", "place": "down"}],
    "difference + top-k down": [{"name": "difference"}, {"name": "top-k", "place": "down"}],
}


class Case:
    """A federation with some transforms, and how long its rounds took."""

    def __init__(self, transforms: tuple[Transform, ...], data: ClientData, arguments: Any) -> None:
        task = make_task("cnn", MODELS["cnn"](), (1, 28, 28), 10, 0)
        self.algorithm = make(registered()["fedavg"], lr=0.05)
        self.federation: Federation = make_federation(
            arguments.engine,
            task,
            data,
            local=Local(batch=20, epochs=1),
            hyper=self.algorithm.hyper,
            device=arguments.device,
            transforms=transforms,
        )
        self.server = self.algorithm.start(self.federation)
        self.seconds: list[float] = []
        self.clock = time.process_time if arguments.device == "cpu" else time.perf_counter
        self.up = self.down = 0

    def round(self) -> None:
        """One more round, measured."""
        federation, before = self.federation, (self.federation.traffic.down, self.federation.traffic.up)
        federation.round = federation.round + 1
        federation.engine.wait()
        begin = self.clock()
        self.server = self.algorithm.round(self.server, federation, np.arange(federation.clients))
        federation.engine.wait()
        self.seconds.append(self.clock() - begin)
        self.down, self.up = federation.traffic.down - before[0], federation.traffic.up - before[1]


def images(clients: int, samples: int) -> ClientData:
    """Clients with random images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(clients * samples, 1, 28, 28, generator=generator)
    y = torch.arange(clients * samples) % 10
    split = Split(x, y, np.arange(clients) * samples, np.full(clients, samples))
    names = tuple(f"client {number}" for number in range(clients))
    return ClientData(names, split, split, None, x[:10], y[:10], 10, "random", "random")


def main() -> None:
    """All cases in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="stacked", choices=("loop", "stacked"))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data = images(arguments.clients, arguments.samples)
    cases = {
        name: Case(from_mapping({"transforms": CASES[name]}).transforms, data, arguments)
        for name in dict.fromkeys(["none", *arguments.cases])
    }
    for repeat in range(arguments.repeats + 2):  # the first two warm up: graphs, states
        for case in cases.values():
            case.round()
            case.seconds = case.seconds if repeat > 1 else []
    plain = cases["none"]
    usual = statistics.median(plain.seconds)
    found = {
        name: {
            "seconds": statistics.median(case.seconds),
            "ratio": statistics.median(case.seconds) / usual,
            "up": case.up / plain.up,
            "down": case.down / plain.down,
        }
        for name, case in cases.items()
    }
    table = Table(title=f"A round of FedAvg, CNN, {arguments.clients} clients, {arguments.device}")
    for column in ("transforms", "seconds", "beside none", "bytes up", "bytes down"):
        table.add_column(column, justify="left" if column == "transforms" else "right")
    for name, row in found.items():
        share = (f"{row['up']:.1%}", f"{row['down']:.1%}")
        table.add_row(name, f"{row['seconds']:.3f}", f"{row['ratio']:.2f}", *share)
    Console(width=110).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "found": found}, default=str))


if __name__ == "__main__":
    main()
