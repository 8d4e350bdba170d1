"""What privacy costs: accuracy against ε, for methods that share a model and for methods that keep a part.

    python measurements/privacy.py --workers 16      # what is missing of the results
    python measurements/privacy.py --cells central/fedrep/8
    python measurements/privacy.py --table           # what was measured, as a table and as docs/privacy.svg

The images are MNIST's without their margin, shrunk to 8×8; 100 clients hold 100 of them each, whose classes
are drawn by Dirichlet 0.3, and are tested on 200 of the same kind. The network is ``mlp`` with 16 units.
``central`` hides clients: a coin draws half of them each round, 40 rounds. ``samples`` hides samples: all
clients, two epochs a round, 20 rounds. δ is 10⁻³ for 100 clients and 10⁻⁴ for a client's 100 samples. For
every cell, which is a mode, a method and an ε, the learning rate (three) and the clip (three) are those with
the best accuracy on the clients' validation data in a run with a seed of its own; without privacy there is no
clip to choose. What is chosen so is not accounted, for any method alike. ``results/privacy.jsonl`` is written
after each cell, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from method_curves import SEARCH_SEED, SEEDS
from pictures import panels, save
from which_method import Images
from workers import measured

import sartor
from sartor.runs.record import environment
from sartor.studies.results import Results

COMMAND = "python measurements/privacy.py"
FILE = Path(__file__).parent.parent / "results" / "privacy.jsonl"
CLIENTS = 100
ENGINE = "stacked"
RATES = (0.03, 0.1, 0.3)
CLIPS = (0.1, 0.3, 1.0)
EPSILONS: dict[str, tuple[float | None, ...]] = {
    "central": (2, 4, 8, 16, None),
    "samples": (2, 4, 8, 16, None),
}
METHODS = {
    "central": ("fedavg", "ditto", "fedper", "fedrep", "separate"),
    "samples": ("fedavg", "ditto", "diversifed", "separate"),
}
"""With a guarantee there: DiversiFed's server needs more than sums, FedRep's loss is more than a sample's."""
SETTINGS: dict[str, dict[str, Any]] = {
    "central": {
        "rounds": 40,
        "cohort": {"fraction": 0.5, "sampling": "poisson"},
        "local": {"epochs": 2, "batch": 20},
    },
    "samples": {"rounds": 20, "local": {"epochs": 2, "batch": 20}},
}
DELTA = {"central": 1e-3, "samples": 1e-4}


def cells() -> list[str]:
    """All cells, by name."""
    return [
        f"{mode}/{method}/{'none' if epsilon is None else f'{epsilon:g}'}"
        for mode in METHODS
        for method, epsilon in itertools.product(METHODS[mode], EPSILONS[mode])
        if epsilon is None or (mode, method) != ("central", "separate")  # it tells nobody, and spends nothing
    ]


def data(seed: int) -> dict[str, Any]:
    """The clients of a seed."""
    images = Images(seed)
    shares = [images.random.dirichlet([0.3] * 10) for _ in range(CLIENTS)]
    return {f"c{place:02d}": images.client(share, 100) for place, share in enumerate(shares)}


def play(cell: str, seed: int, lr: float, clip: float) -> sartor.Result:
    """One run of a cell."""
    mode, method, epsilon = cell.split("/")
    private: dict[str, Any] = {}
    if epsilon != "none":
        private = {"mode": mode, "epsilon": float(epsilon), "delta": DELTA[mode], "clip": clip}
    experiment = {
        **SETTINGS[mode],
        "evaluate": {"every": 0, "personal_pooled": "no"},
        "model": {"name": "mlp", "hidden": 16},
        "privacy": private,
    }
    return sartor.run(
        method,
        experiment=experiment,
        data=data(seed),
        seed=seed,
        hyper={"lr": lr},
        engine=ENGINE,
        store=False,
    )


def score(result: sartor.Result, split: str) -> float:
    """The last accuracy on a split, of personal models where there are any."""
    found = result.rounds[-1]["evaluation"]
    cell = found.get(f"personal_{split}") or found[f"shared_{split}"]
    accuracy: float = cell["accuracy"]
    return accuracy


def measure(cell: str) -> dict[str, Any]:
    """The cell's rate and clip, and its accuracy with each seed."""
    began = time.perf_counter()
    clips = CLIPS[-1:] if cell.endswith("none") else CLIPS
    tried = {
        pair: score(play(cell, SEARCH_SEED, *pair), "validation") for pair in itertools.product(RATES, clips)
    }
    lr, clip = max(tried, key=lambda pair: tried[pair])
    runs = [play(cell, seed, lr, clip) for seed in SEEDS]
    found = [score(run, "local") for run in runs]
    told = runs[0].summary["privacy"]
    return {
        "lr": lr,
        "clip": clip,
        "noise": None if told is None else told["noise"],
        "epsilon": None if told is None else told["epsilon"],
        "accuracy": found,
        "mean": statistics.mean(found),
        "deviation": statistics.stdev(found),
        "seconds": time.perf_counter() - began,
    }


def table(cells: dict[str, dict[str, Any]]) -> str:
    """A row for each method, a column for each ε."""
    lines = []
    for mode, methods in METHODS.items():
        heads = ["no privacy" if epsilon is None else f"ε = {epsilon:g}" for epsilon in EPSILONS[mode]]
        lines += [f"| {mode} | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
        for method in methods:
            ends = ["none" if epsilon is None else f"{epsilon:g}" for epsilon in EPSILONS[mode]]
            found = [cells.get(f"{mode}/{method}/{end}") for end in ends]
            shown = [
                "–" if each is None else f"{100 * each['mean']:.1f} ± {100 * each['deviation']:.1f}"
                for each in found
            ]
            lines.append(f"| `{method}` | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


def draw(cells: dict[str, dict[str, Any]]) -> None:
    """Accuracy against ε, a panel for each mode; dashed without privacy."""
    figure, both = panels(1, 2, (9, 4))
    for axes, (mode, methods) in zip(both, METHODS.items(), strict=True):
        for place, method in enumerate(methods):
            known = [each for each in EPSILONS[mode] if each and f"{mode}/{method}/{each:g}" in cells]
            found = [cells[f"{mode}/{method}/{each:g}"] for each in known]
            means, wide = ([100 * each[key] for each in found] for key in ("mean", "deviation"))
            axes.errorbar(known, means, wide, fmt="o-", markersize=4, color=f"C{place}", label=method)
            without = 100 * cells[f"{mode}/{method}/none"]["mean"]
            axes.axhline(without, color=f"C{place}", linestyle="--", linewidth=0.8)
        axes.set(title=f"{mode}: {'a client' if mode == 'central' else 'a sample'} is hidden", xlabel="ε")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, loc="lower right")
    both[0].set_ylabel("accuracy on own test data, %")
    save(figure, "privacy")


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="*", choices=cells(), default=cells(), metavar="MODE/METHOD/EPSILON")
    parser.add_argument("--workers", type=int, default=1, help="cells at once")
    parser.add_argument("--table", action="store_true", help="print and draw what was measured")
    parser.add_argument("--json", type=Path, default=FILE, help="the file")
    arguments = parser.parse_args()
    results = Results(arguments.json)
    if not arguments.table:
        results.about |= {"command": COMMAND, "seeds": list(SEEDS), "environment": environment()}
        missing = [cell for cell in arguments.cells if cell not in results.records]
        for cell, found in measured(measure, missing, arguments.workers):
            results.add(cell, found, method=cell.split("/")[1])
            print(f"{cell}: {100 * found['mean']:.2f} %, {found['seconds']:.0f} s", flush=True)
        return
    draw(results.numbers)
    print(table(results.numbers))


if __name__ == "__main__":
    main()
