"""Seconds of five seeds one after the other and in one batch, from the first round to the summaries.

    python bench/seeds.py [--device cuda] [--seeds 5] [--repeats 3] [--only digits-mlp] [--method fedavg]
        [--json FILE]

Both ways write the same run folders. Every figure is the best of the repeats, which take turns so that a
busy machine slows both alike. ``auto`` says how many a comparison would run at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sartor.data.clients import ClientData, Split
from sartor.runs.execute import execute_setup
from sartor.runs.experiment import from_mapping
from sartor.runs.setup import Setup, set_up
from sartor.runs.together import execute_together, seeds_at_once


class Workload(NamedTuple):
    model: str
    clients: int
    batch: int
    rounds: int
    samples: int = 0
    """Of each client, at random, of 784 numbers; 0 for the digits, dealt out by Dirichlet's law."""
    hidden: int = 64
    large: bool = False
    """Whether it is for a GPU alone."""


WORKLOADS = {
    "digits-softmax": Workload("softmax", 10, 10, 20),
    "digits-softmax-100": Workload("softmax", 100, 10, 20),
    "digits-mlp": Workload("mlp", 10, 10, 20),
    "digits-mlp-100": Workload("mlp", 100, 10, 20),
    "mlp-20x300": Workload("mlp", 20, 100, 10, 300),
    "mlp-40x300": Workload("mlp", 40, 100, 10, 300),
    "mlp-100x300": Workload("mlp", 100, 100, 5, 300),
    "mlp-wide": Workload("mlp", 20, 100, 5, 300, 512),
    "cnn-10x500": Workload("cnn", 10, 32, 20, 500, large=True),
}


def random_data(workload: Workload, seed: int) -> ClientData:
    generator = torch.Generator().manual_seed(seed)

    def split(samples: int) -> Split:
        total = workload.clients * samples
        shape = (1, 28, 28) if workload.model == "cnn" else (784,)
        x = torch.randn(total, *shape, generator=generator)
        y = torch.randint(0, 10, (total,), generator=generator)
        count = np.full(workload.clients, samples)
        return Split(x, y, np.cumsum(count) - count, count)

    names = tuple(f"client {number}" for number in range(workload.clients))
    test = split(workload.samples // 5)
    train = split(workload.samples)
    return ClientData(names, train, test, None, test.x, test.y, 10, f"random {seed}", "random")


def prepared(workload: Workload, method: str, seed: int, device: str) -> Setup:
    settings: dict[str, Any] = {
        "algorithm": method,
        "seed": seed,
        "rounds": workload.rounds,
        "data": {"clients": workload.clients},
        "model": {"name": workload.model},
        "local": {"batch": workload.batch},
        "hyper": {"lr": 0.05},
        "engine": {"name": "stacked", "device": device},
    }
    if workload.model == "mlp":
        settings["model"]["hidden"] = workload.hidden
    if workload.samples:
        settings["data"].update(name="own", normalise=False)
        return set_up(from_mapping(settings), data=random_data(workload, seed))
    return set_up(from_mapping(settings))


def seconds(work: Callable[[Path], object]) -> tuple[float, float]:
    """Seconds on the wall and of the processors."""
    with tempfile.TemporaryDirectory() as folder:
        wall, processors = time.perf_counter(), time.process_time()
        work(Path(folder))
        return time.perf_counter() - wall, time.process_time() - processors


def measure(workload: Workload, method: str, device: str, seeds: int, repeats: int) -> dict[str, Any]:
    setups = [prepared(workload, method, seed, device) for seed in range(seeds)]

    def one_by_one(folder: Path) -> None:
        for number, setup in enumerate(setups):
            execute_setup(setup, out=folder / str(number))

    def together(folder: Path) -> None:
        for outcome in execute_together(setups, [folder / str(number) for number in range(seeds)]):
            if isinstance(outcome, BaseException):
                raise outcome

    figures: dict[str, list[tuple[float, float]]] = {"one by one": [], "together": []}
    for _ in range(repeats):
        figures["one by one"].append(seconds(one_by_one))
        figures["together"].append(seconds(together))
    best = {name: [min(column) for column in zip(*values, strict=True)] for name, values in figures.items()}
    return {
        "method": method,
        "device": device,
        "parameters": setups[0].task.size,
        "auto": min(seeds, seeds_at_once(setups[0], "auto")),
        "seconds": {name: wall for name, (wall, _) in best.items()},
        "processor_seconds": {name: used for name, (_, used) in best.items()},
        "ratio": best["one by one"][0] / best["together"][0],
        "processor_ratio": best["one by one"][1] / best["together"][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--method", nargs="*", default=["fedavg"])
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    where = f"{torch.get_num_threads()} threads, {os.cpu_count()} cores"
    if arguments.device == "cuda":
        where = torch.cuda.get_device_name()
    table = Table(title=f"{arguments.seeds} seeds, seconds ({where})")
    for column in ("workload", "method", "one by one", "together", "ratio", "of processor time", "auto"):
        table.add_column(column, justify="left" if column in ("workload", "method") else "right")
    results = []
    for name, workload in WORKLOADS.items():
        if workload.large and arguments.device == "cpu":
            continue
        for method in arguments.method if not arguments.only or name in arguments.only else ():
            result = measure(workload, method, arguments.device, arguments.seeds, arguments.repeats)
            results.append({"workload": name, **result})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            table.add_row(
                name,
                method,
                *(f"{value:.2f}" for value in result["seconds"].values()),
                f"{result['ratio']:.2f}",
                f"{result['processor_ratio']:.2f}",
                str(result["auto"]),
            )
    Console(width=120).print(table)
    print(json.dumps(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
