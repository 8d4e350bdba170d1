"""The figure of the README: the accuracy of every client under one model, alone, and under DiversiFed.

    python measurements/first_figure.py        # writes docs/clients.svg

20 clients share the digits in mixtures of their own (Dirichlet 0.1), 40 rounds, learning rate 0.1, three
seeds; the band is from the lowest to the highest of the seeds.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

import sartor

METHODS = {"fedavg": "shared_local", "separate": "personal_local", "diversifed": "personal_local"}
COLOURS = {"fedavg": "#888888", "separate": "#d9822b", "diversifed": "#4a64d9"}
CLIENTS, SEEDS = 20, (0, 1, 2)
SETTINGS = {
    "data": "digits",
    "clients": CLIENTS,
    "rounds": 40,
    "partition": {"name": "dirichlet", "alpha": 0.1},
    "local": {"epochs": 2, "batch": 16},
    "hyper": {"lr": 0.1},
    "store": False,
}


def accuracies(method: str, seed: int) -> np.ndarray:
    """The clients' accuracies on data of their own, from the lowest."""
    result = sartor.run(method, **SETTINGS, seed=seed)
    return np.sort(np.array(result.clients[f"{METHODS[method]}_accuracy"][-CLIENTS:], dtype=float))


def main() -> None:
    """Run and draw."""
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "sartor"})
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for method, colour in COLOURS.items():
        rows = np.stack([accuracies(method, seed) for seed in SEEDS])
        mean = rows.mean(axis=0)
        label = f"{method} ({100 * rows.mean():.1f} %)"
        axes.plot(range(1, CLIENTS + 1), 100 * mean, "o-", color=colour, label=label, markersize=4)
        axes.fill_between(
            range(1, CLIENTS + 1), 100 * rows.min(axis=0), 100 * rows.max(axis=0), color=colour, alpha=0.15
        )
        print(f"{method}: mean {rows.mean():.4f}, worst client {mean[0]:.4f}")
    axes.set(xlabel="clients, from the worst off", ylabel="accuracy on own data, %", xlim=(1, CLIENTS))
    axes.legend(frameon=False, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path = Path(__file__).parents[1] / "docs" / "clients.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
