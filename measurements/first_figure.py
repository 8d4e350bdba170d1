"""The figure of the README: the accuracy of every client under one model, alone, and under DiversiFed.

    python measurements/first_figure.py --device cuda      # measures: results/first-figure.jsonl
    python measurements/first_figure.py --draw             # draws it: docs/clients.svg

Fashion-MNIST, 20 clients with unlike mixtures of classes (Dirichlet 0.1), 200 training samples each, 100
rounds, three seeds. Each method has the learning rate of four that is best on validation data of the first
seed.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pictures import panels, save

import sartor
from sartor.errors import SartorError
from sartor.runs.record import environment
from sartor.studies.results import Results

CELLS = {"fedavg": "shared", "separate": "personal", "diversifed": "personal"}
COLOURS = {"fedavg": "#888888", "separate": "#d9822b", "diversifed": "#4a64d9"}
CLIENTS, SEEDS, RATES = 20, (0, 1, 2), (0.01, 0.03, 0.1, 0.3)
SETTINGS: dict[str, Any] = {
    "rounds": 100,
    "data": {"name": "fashion-mnist", "clients": CLIENTS, "validation": 0.2},
    "partition": {"name": "dirichlet", "by": "client", "alpha": 0.1, "train": 200},
    "model": {"name": "cnn"},
    "local": {"epochs": 2, "batch": 20},
    "evaluate": {"every": 0},
}
ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results" / "first-figure.jsonl"


def accuracies(method: str, lr: float, seed: int, device: str) -> dict[str, list[float]]:
    """The clients' accuracies on test and on validation data of their own."""
    result = sartor.run(method, experiment=SETTINGS, hyper={"lr": lr}, seed=seed, device=device, store=False)
    kind = CELLS[method]
    columns = {part: f"{kind}_{part}_accuracy" for part in ("local", "validation")}
    return {part: list(map(float, result.clients[column][-CLIENTS:])) for part, column in columns.items()}


def measure(device: str) -> None:
    """Choose the learning rates and run all seeds."""
    about = {"settings": SETTINGS, "rates": RATES, "seeds": SEEDS, "environment": environment(device)}
    results = Results(RESULT, about)
    for method in CELLS:
        tried = {}
        for rate in RATES:
            with suppress(SartorError):  # it diverges
                tried[rate] = accuracies(method, rate, SEEDS[0], device)
        lr = max(tried, key=lambda rate: np.nanmean(tried[rate]["validation"]))
        rows = [tried[lr], *(accuracies(method, lr, seed, device) for seed in SEEDS[1:])]
        found = {"lr": lr, "accuracy": [row["local"] for row in rows]}
        print(f"{method}: lr {lr}, mean {np.mean(found['accuracy']):.4f}")
        settings = {**SETTINGS, "hyper": {"lr": lr}, "seed": SEEDS[0]}
        results.add(method, found, method=method, experiment=settings)


def draw() -> None:
    """Lines from the worst off client to the best, with a band over the seeds."""
    found = Results(RESULT).numbers
    figure, (axes,) = panels(1, 1, (7, 3.4))
    places = range(1, CLIENTS + 1)
    for method, colour in COLOURS.items():
        rows = 100 * np.sort(np.array(found[method]["accuracy"]), axis=1)
        label = f"{method} (mean {rows.mean():.1f} %)"
        axes.plot(places, rows.mean(axis=0), "o-", color=colour, label=label, markersize=4)
        axes.fill_between(places, rows.min(axis=0), rows.max(axis=0), color=colour, alpha=0.15)
    axes.set(xlabel="clients, from the worst off", ylabel="accuracy on own data, %", xlim=(1, CLIENTS))
    axes.legend(frameon=False, loc="lower right")
    save(figure, "clients")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draw", action="store_true")
    chosen = parser.parse_args()
    if chosen.draw:
        draw()
    else:
        measure(chosen.device)
