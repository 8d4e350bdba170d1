"""What a rule in place of means costs: milliseconds of a round of FedAvg with the CNN, with each rule.

    python bench/rules.py [--device cuda] [--repeats 5] [--clients 10 100] [--rules NAME ...] [--ragged]
                          [--json FILE]

Clients have 600 images of 28×28 and take thirty steps in a round; ragged ones have 300 to 900, so that their
weights differ. The mean's round is what others are held against. Rounds of all rules are interleaved and the
best of the repeats counts, so that a busy machine slows all of them alike. Krum, multi-Krum, Bulyan and
``similarity`` compare all pairs of replies: their part grows with the square of the clients, where a round
grows with the clients.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sartor.robust  # noqa: F401  # registers its rules
from sartor.algorithms import make, registered
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.engines import make_federation
from sartor.federation.reduction import AGGREGATES
from sartor.model.networks import MODELS, make_task

SAMPLES, WARM_UP = 600, 2


def federations(sizes: np.ndarray, device: str, rules: list[str]) -> dict[str, tuple[Any, Any]]:
    """A method and a federation for each rule."""
    generator, clients = torch.Generator().manual_seed(0), len(sizes)
    x = torch.randn(int(sizes.sum()), 1, 28, 28, generator=generator)
    y = torch.arange(len(x)) % 10
    split = Split(x, y, sizes.cumsum() - sizes, sizes)
    names = tuple(f"client {number}" for number in range(clients))
    data = ClientData(names, split, split, None, x[:10], y[:10], 10, "random", "random")
    task = make_task("cnn", MODELS["cnn"](), (1, 28, 28), 10, 0)
    made = {}
    for name in rules:
        algorithm = make(registered()["fedavg"], lr=0.05)
        local, rule = Local(batch=20, epochs=1), AGGREGATES[name]()
        federation = make_federation(
            "stacked", task, data, local=local, hyper=algorithm.hyper, aggregate=rule, device=device
        )
        made[name] = algorithm, federation
    return made


def measure(sizes: np.ndarray, device: str, repeats: int, rules: list[str]) -> dict[str, float]:
    """Milliseconds of a round by rule."""
    made, everyone = federations(sizes, device, rules), np.arange(len(sizes))
    servers = {name: algorithm.start(federation) for name, (algorithm, federation) in made.items()}
    best = dict.fromkeys(made, float("inf"))
    for turn in range(1, WARM_UP + repeats + 1):
        for name, (algorithm, federation) in made.items():
            federation.round = turn
            federation.engine.wait()
            begin = time.perf_counter()
            servers[name] = algorithm.round(servers[name], federation, everyone)
            federation.engine.wait()
            if turn > WARM_UP:
                best[name] = min(best[name], 1000 * (time.perf_counter() - begin))
    return best


def main() -> None:
    """A table for each number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--rules", nargs="*", default=list(AGGREGATES), choices=list(AGGREGATES))
    parser.add_argument("--ragged", action="store_true", help="clients of unlike sizes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    found = {}
    for clients in arguments.clients:
        least, most = (SAMPLES // 2, 3 * SAMPLES // 2) if arguments.ragged else (SAMPLES, SAMPLES)
        sizes, rules = (
            np.linspace(least, most, clients).astype(int),
            dict.fromkeys(["mean", *arguments.rules]),
        )
        found[clients] = best = measure(sizes, arguments.device, arguments.repeats, list(rules))
        print(f"{clients} clients, {arguments.device}")
        for name, milliseconds in best.items():
            more = 100 * (milliseconds / best["mean"] - 1)
            print(f"  {name:18} {milliseconds:10.1f} ms  {more:+7.1f} %", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
