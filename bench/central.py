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
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from sartor.algorithms import registered
from sartor.algorithms.base import make
from sartor.federation import Federation
from sartor.studies.computed import central_round, idle_federation, seconds

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


def measure(
    name: str, federation: Federation, clients: int, models: int, repeats: int, means: bool
) -> dict[str, Any]:
    algorithm = make(registered()[name], groups=models)
    federation.states = type(federation.states)(federation.clients, federation.engine.device)
    taken = seconds(
        central_round(algorithm, federation, clients, models, means), str(federation.engine.device), repeats
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
    federation = idle_federation(nn.Linear(576, 10), 576, CLIENTS, device)
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
    federation = idle_federation(module, 784, 160, device)
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
