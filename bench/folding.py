"""Memory of a round of FedAvg with many clients: replies added up as they come, or all of them held.

    python bench/folding.py                      # 1,000 clients, two million parameters
    python bench/folding.py --clients 200

Each way runs in a process of its own, whose peak resident memory is what it needed in all; the same
federation without a round is given too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from torch import nn

from sartor.algorithms import make, registered
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.engines import make_federation
from sartor.model.task import Task

FEATURES, HIDDEN = 1000, 2000
WAYS = {"no round": None, "all held": 1 << 62, "added up": 1 << 28}


def measure(way: str, clients: int, engine: str) -> dict[str, float]:
    """Peak memory and time of one round."""
    samples = 2
    x = torch.randn(clients * samples, FEATURES)
    y = torch.arange(clients * samples) % 2
    count = np.full(clients, samples)
    split = Split(x, y, np.arange(clients) * samples, count)
    names = tuple(f"client {number}" for number in range(clients))
    data = ClientData(names, split, split, None, x[:2], y[:2], 2, "random", "random")
    task = Task(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2)), classes=2)
    fold_bytes = WAYS[way] or 1
    algorithm = make(registered()["fedavg"])
    federation = make_federation(
        engine, task, data, local=Local(batch=2), hyper=algorithm.hyper, fold_bytes=fold_bytes
    )
    server = algorithm.start(federation)
    federation.round = 1
    begin = time.perf_counter()
    if WAYS[way]:
        algorithm.round(server, federation, np.arange(clients))
    return {
        "parameters": task.size,
        "seconds": time.perf_counter() - begin,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Each way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--engine", default="loop", choices=("loop", "stacked"))
    parser.add_argument("--way", choices=list(WAYS))
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.clients, arguments.engine)))
        return
    for way in WAYS:
        words = ["--clients", str(arguments.clients), "--engine", arguments.engine, "--way", way]
        done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
        print(f"{way:10} {found['peak MB']:8.0f} MB {found['seconds']:8.1f} s", flush=True)


if __name__ == "__main__":
    main()
