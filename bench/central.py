"""Milliseconds of the server's own work in a round of MA-FSVRG and GA-FSVRG, and how they grow.

    python bench/central.py [--device cuda] [--repeats 20] [--large] [--json FILE]

400 clients of which 10 to 40 % answer, 2 to 8 models, softmax regression on 576 features: the cells of the
paper's Table I, whose seconds (10 to 148) stand beside. Replies are random; measured is all that the server
does with them: the means of gradients (17) and (61), grouping, scaling and acceleration. A figure is the best
of the repeats, with their median. ``--large`` measures 160 clients and a model of 1.6 million parameters,
without the means of gradients, whose replies alone would be 8 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm, make
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.engines import make_federation
from sartor.federation import Federation
from sartor.federation.exchange import Replies
from sartor.model.task import Task

CLIENTS = 400
SHARES = (10, 20, 30, 40)
MODELS = (2, 4, 6, 8)
PAPER = {
    "ma-fsvrg": (
        (10.14, 20.13, 29.31, 39.30),
        (20.27, 38.27, 56.88, 74.94),
        (29.19, 57.32, 84.67, 110.64),
        (38.75, 74.31, 111.52, 147.30),
    ),
    "ga-fsvrg": (
        (10.66, 20.74, 31.15, 41.32),
        (20.69, 40.33, 59.69, 79.01),
        (29.63, 58.16, 86.84, 113.04),
        (38.62, 75.05, 111.47, 147.73),
    ),
}


def federation_of(module: nn.Module, features: int, clients: int, device: str) -> Federation:
    """Clients with two samples each: their replies are drawn, not computed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * clients, features, generator=generator)
    y = torch.arange(2 * clients) % 10
    split = Split(x, y, np.arange(clients) * 2, np.full(clients, 2))
    names = tuple(f"client {number}" for number in range(clients))
    data = ClientData(names, split, split, None, x[:10], y[:10], 10, "random", "random")
    return make_federation(
        "loop", Task(module, classes=10), data, local=Local(weight_decay=1e-4), device=device
    )


def central(algorithm: Algorithm, federation: Federation, clients: int, models: int, means: bool) -> Any:
    """The server's work of one round on drawn replies, as a function without arguments."""
    task, device = federation.task, federation.engine.device
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    cohort = np.arange(clients)
    w, trained = draw(models, task.size), draw(clients, task.size)
    values = {"gradient": draw(clients, models, task.size)} if means else {}
    replies = Replies(cohort, np.full(clients, 2), values, device, torch.float32)
    start = replace(algorithm.start(federation), w=w, m=torch.zeros_like(w), v=torch.zeros_like(w))
    federation.round = algorithm.hyper.threshold + 1
    fixed = draw(models, task.size)

    def one_round() -> Any:
        g = replies.mean("gradient") if means else fixed
        found = algorithm.grouped(start, federation, trained, g)
        scale = algorithm.scale(start, federation, replies)
        moved = start.w + scale * algorithm.change(start, federation, found, scale)
        gradient = (replies.mean("gradient") if means else fixed) + federation.local.weight_decay * moved
        return algorithm.accelerated(start, moved, gradient)

    return one_round


def seconds(one_round: Any, device: str, repeats: int) -> list[float]:
    taken = []
    for turn in range(repeats + 1):
        begin = time.perf_counter()
        one_round()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn:  # the first is for warming up
            taken.append(time.perf_counter() - begin)
    return taken


def measure(
    name: str, federation: Federation, clients: int, models: int, repeats: int, means: bool
) -> dict[str, Any]:
    algorithm = make(registered()[name], groups=models)
    federation.states = type(federation.states)(federation.clients, federation.engine.device)
    taken = seconds(
        central(algorithm, federation, clients, models, means), str(federation.engine.device), repeats
    )
    return {
        "method": name,
        "clients": clients,
        "models": models,
        "parameters": federation.task.size,
        "best": min(taken),
        "median": statistics.median(taken),
    }


def table_one(device: str, repeats: int) -> list[dict[str, Any]]:
    federation = federation_of(nn.Linear(576, 10), 576, CLIENTS, device)
    console, results = Console(width=120), []
    for name, paper in PAPER.items():
        table = Table(title=f"{name}: milliseconds of central work, best (median; the paper's seconds)")
        for column in ("models", *(f"{share} %" for share in SHARES), "40 % / 10 %"):
            table.add_column(column, justify="right")
        rows = []
        for models, theirs in zip(MODELS, paper, strict=True):
            row = [
                measure(name, federation, CLIENTS * share // 100, models, repeats, True) for share in SHARES
            ]
            rows.append(row)
            cells = [
                f"{cell['best'] * 1e3:.2f} ({cell['median'] * 1e3:.2f}; {their:.1f})"
                for cell, their in zip(row, theirs, strict=True)
            ]
            table.add_row(str(models), *cells, f"{row[-1]['best'] / row[0]['best']:.2f}")
        table.add_row(
            "8 / 2",
            *(f"{last['best'] / first['best']:.2f}" for first, last in zip(rows[0], rows[-1], strict=True)),
            "linear: 4",
        )
        console.print(table)
        results.extend(cell for row in rows for cell in row)
    return results


def large(device: str, repeats: int) -> list[dict[str, Any]]:
    module = nn.Sequential(nn.Linear(784, 2016), nn.ReLU(), nn.Linear(2016, 10))
    federation = federation_of(module, 784, 160, device)
    results = [measure(name, federation, 160, models, repeats, False) for name in PAPER for models in (2, 8)]
    for cell in results:
        print(
            f"{cell['method']}, 160 clients, {cell['parameters']:,} parameters, {cell['models']} models: "
            f"{cell['best']:.2f} s (median {cell['median']:.2f})"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--large", action="store_true", help="a model of 1.6 million parameters too")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    results = table_one(arguments.device, arguments.repeats)
    if arguments.large:
        results += large(arguments.device, max(3, arguments.repeats // 4))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
