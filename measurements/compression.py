"""Accuracy against bytes: FedAvg with every compressor at several strengths.

    python measurements/compression.py --device cuda       # what is missing of results/compression.jsonl
    python measurements/compression.py --cells int8 sign   # some of it
    python measurements/compression.py --draw              # draws it, docs/compression.svg, as a table too

Fashion-MNIST, 100 clients with unlike mixtures of classes (Dirichlet 0.3) and 200 training samples each, ten
of them in a round, LeNet, 200 rounds, three seeds. Each cell has the learning rate of four that is best on
validation data, with a seed of its own, so all have the same budget; where one of its seeds diverges, the
next best. Up is compressed, and down is whole; the last cells compress both. The file is written after each
cell.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pictures import panels, save
from workers import measured

import sartor
from sartor import Result
from sartor.errors import SartorError
from sartor.runs.record import environment
from sartor.studies.results import Results

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results" / "compression.jsonl"
SEEDS, SEARCH_SEED, RATES = (0, 1, 2), 100, (0.03, 0.1, 0.3, 1.0)
SETTINGS: dict[str, Any] = {
    "rounds": 200,
    "data": {"name": "fashion-mnist", "clients": 100, "validation": 0.2},
    "partition": {"name": "dirichlet", "by": "client", "alpha": 0.3, "train": 200},
    "cohort": {"count": 10},
    "model": {"name": "lenet"},
    "local": {"epochs": 2, "batch": 20},
    "evaluate": {"every": 0},
}


def up(name: str, **settings: Any) -> list[dict[str, Any]]:
    """A compressor of what clients send."""
    return [{"name": name, **settings}]


BOTH = [{"name": "int8"}, {"name": "int8", "place": "down"}]
CELLS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "top-k 10 %": up("top-k", share=0.1),
    "top-k 1 %": up("top-k", share=0.01),
    "top-k 0.1 %": up("top-k", share=0.001),
    "random-k 10 %": up("random-k", share=0.1),
    "random-k 1 %": up("random-k", share=0.01),
    "qsgd 8 bits": up("qsgd", levels=127),
    "qsgd 4 bits": up("qsgd", levels=7),
    "qsgd 2 bits": up("qsgd", levels=1),
    "int8": up("int8"),
    "int4": up("int4"),
    "sign": up("sign"),
    "sign, majority": [*up("sign"), {"name": "majority"}],
    "low-rank 4": up("low-rank", rank=4),
    "low-rank 1": up("low-rank", rank=1),
    "top-k 1 %, int8": [*up("top-k", share=0.01), *up("int8")],
    "int8 both ways": BOTH,
    "top-k 10 %, int8; difference, int8 down": [*up("top-k", share=0.1), {"name": "difference"}, *BOTH],
}


def run(cell: str, lr: float, seed: int, device: str, rounds: int) -> Result:
    """One run."""
    experiment = {**SETTINGS, "rounds": rounds, "transforms": CELLS[cell]}
    hyper = {"lr": lr}
    return sartor.run("fedavg", experiment=experiment, hyper=hyper, seed=seed, device=device, store=False)


def final(cell: str, rates: list[float], device: str, rounds: int) -> tuple[float, list[dict[str, Any]]]:
    """The first rate with which no seed diverges, and the summaries."""
    for lr in rates:
        try:
            return lr, [run(cell, lr, seed, device, rounds).summary for seed in SEEDS]
        except SartorError as error:
            print(f"{cell}, lr {lr:g}: {error}", file=sys.stderr)
    raise SartorError(f"{cell}: diverges with every rate")


def measure(cell: str, device: str, rounds: int) -> dict[str, Any]:
    """The rate of a cell, and what its seeds gave."""
    began, tried = time.perf_counter(), {}
    for rate in RATES:
        try:
            rows = run(cell, rate, SEARCH_SEED, device, rounds).clients["shared_validation_accuracy"]
            tried[rate] = float(np.nanmean(rows[-SETTINGS["data"]["clients"] :]))
        except SartorError as error:
            print(f"{cell}, lr {rate:g}: {error}", file=sys.stderr)  # it diverges
    lr, runs = final(cell, sorted(tried, key=lambda rate: -tried[rate]), device, rounds)
    accuracy = [each["accuracy"]["shared_pooled"] for each in runs]
    return {
        "lr": lr,
        "validation": {f"{rate:g}": accuracy for rate, accuracy in tried.items()},
        "accuracy": accuracy,
        "mean": statistics.mean(accuracy),
        "deviation": statistics.stdev(accuracy),
        "up": runs[0]["bytes_up"],
        "down": runs[0]["bytes_down"],
        "seconds": time.perf_counter() - began,
    }


def draw(cells: dict[str, Any]) -> None:
    """Accuracy against bytes sent up, in logarithms."""
    figure, (axes,) = panels(1, 1, (8, 4.5))
    for name, cell in cells.items():
        sent, mean = cell["up"] / 1e6, 100 * cell["mean"]
        axes.errorbar(sent, mean, 100 * cell["deviation"], fmt="o", markersize=4)
        axes.annotate(name, (sent, mean), xytext=(4, 4), textcoords="offset points", fontsize=9)
    axes.set(xscale="log", xlabel="MB sent by all clients", ylabel="accuracy on pooled test data, %")
    save(figure, "compression")


def table(cells: dict[str, Any]) -> str:
    """A row for each cell."""
    lines = [
        "| transforms | accuracy (%) | MB up | MB down | learning rate |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in CELLS:
        if name in cells:
            cell = cells[name]
            accuracy = f"{100 * cell['mean']:.1f} ± {100 * cell['deviation']:.1f}"
            sent = " | ".join(f"{cell[way] / 1e6:.3g}" for way in ("up", "down"))
            lines.append(f"| {name} | {accuracy} | {sent} | {cell['lr']:g} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=SETTINGS["rounds"])
    parser.add_argument("--cells", nargs="*", choices=CELLS, default=list(CELLS), metavar="NAME")
    parser.add_argument("--json", type=Path, default=RESULT, help="the file")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="cells at once")
    chosen = parser.parse_args()
    results = Results(chosen.json)
    if chosen.draw:
        draw(results.numbers)
        print(table(results.numbers))
        return
    settings = {**SETTINGS, "rounds": chosen.rounds}
    results.about |= {"settings": settings, "rates": RATES, "seeds": SEEDS}
    results.about |= {"environment": environment(chosen.device)}
    missing = [cell for cell in chosen.cells if cell not in results.records]
    one = partial(measure, device=chosen.device, rounds=chosen.rounds)
    for cell, found in measured(one, missing, chosen.workers):
        chosen_rate = {"transforms": CELLS[cell], "hyper": {"lr": found["lr"]}, "seed": SEEDS[0]}
        results.add(cell, found, method="fedavg", experiment={**settings, **chosen_rate})
        words = [f"{100 * found['mean']:.2f} %", f"lr {found['lr']:g}", f"{found['seconds']:.0f} s"]
        print(f"{cell}: {', '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
