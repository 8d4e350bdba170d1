"""Which method for which problem: clients that differ in seven ways, and the methods a user would consider.

    python measurements/which_method.py                          # what is missing of the results
    python measurements/which_method.py --problems groups --methods ifca spfl

The images are MNIST's without their margin, shrunk to 8×8, so that a run takes seconds; how clients come by
them is the problem (see ``PROBLEMS``). Everybody is tested on 200 images of the kind it trains on. Each
method's learning rate is the one of three with the best accuracy on the clients' validation data, in a run
with a seed of its own, and everything else has its default. ``results/which-method.jsonl`` is written after
each measurement, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from method_curves import ENGINE, OWN, SEARCH_SEED, SEEDS, small_mnist
from torch import Tensor

import sartor
from sartor.data.sources import data_folder
from sartor.errors import SartorError
from sartor.runs.record import environment
from sartor.studies.results import Results

COMMAND = "python measurements/which_method.py"
FILE = Path(__file__).parent.parent / "results" / "which-method.jsonl"
RATES = (0.03, 0.1, 0.3)
SETTING: dict[str, Any] = {
    "rounds": 30,
    "local": {"epochs": 2, "batch": 16},
    "evaluate": {"every": 0, "personal_pooled": "no"},
}
TRAIN, TEST, VALIDATION = 60, 200, 20
"""Images of a client, where a problem does not say otherwise."""
FACTORS = {"ma-fsvrg": TRAIN}
"""How many times the rate of a step ``lr`` is, where it is divided by a client's samples."""

METHODS = (
    *("central", "separate", "fedavg", "fedprox", "fedavgm", "fedadam", "scaffold", "feddyn"),
    *("fedupdate", "ditto", "pfedme", "apfl", "fedala", "fedphp", "per-fedavg", "knn-per", "fedem"),
    *("fedper", "fedrep", "fedbabu", "lg-fedavg", "fedrod", "feddbe", "fedcac"),
    *("fedamp", "fedfomo", "apple", "spfl", "diversifed", "ma-fsvrg", "ifca", "cfl"),
)
"""The references, shared models, and personal ones of every family."""

Sample = tuple[Tensor, Tensor]


class Images:
    """MNIST's images, handed out by class and never twice."""

    def __init__(self, seed: int) -> None:
        source = small_mnist(data_folder())
        self.x = torch.cat([source.train_x, source.test_x])
        self.y = torch.cat([source.train_y, source.test_y])
        self.random = np.random.default_rng(seed)
        order = self.random.permutation(len(self.y))
        self._left = [order[self.y[order].numpy() == label].tolist() for label in range(10)]

    def take(self, counts: np.ndarray) -> Sample:
        """So many images of each class."""
        chosen = [self._left[label].pop() for label in range(10) for _ in range(counts[label])]
        return self.x[chosen], self.y[chosen]

    def client(self, shares: np.ndarray, train: int = TRAIN) -> dict[str, Sample]:
        """A client whose classes have these shares."""
        sizes = {"train": train, "test": TEST, "validation": VALIDATION}
        return {part: self.take(self.random.multinomial(size, shares)) for part, size in sizes.items()}


EVEN = np.full(10, 0.1)


def alike(images: Images) -> list[dict[str, Sample]]:
    """20 clients, 60 images each, all classes."""
    return [images.client(EVEN) for _ in range(20)]


def classes(images: Images) -> list[dict[str, Sample]]:
    """20 clients, 60 images each, of two classes alone."""
    pairs = np.concatenate([images.random.permutation(10).reshape(5, 2) for _ in range(4)])
    return [images.client(np.isin(np.arange(10), pair) / 2) for pair in pairs]


def mixtures(images: Images) -> list[dict[str, Sample]]:
    """20 clients whose classes are drawn by Dirichlet 0.3, with 20 to 200 images each."""
    sizes = np.geomspace(20, 200, 20).astype(int)
    return [images.client(images.random.dirichlet(np.full(10, 0.3)), int(size)) for size in sizes]


def sizes(images: Images) -> list[dict[str, Sample]]:
    """20 clients with all classes: two with 1,000 images, the others with 10."""
    return [images.client(EVEN, 1000 if place < 2 else 10) for place in range(20)]


def views(images: Images) -> list[dict[str, Sample]]:
    """20 clients with all classes, a quarter of them each with images turned by 0, 90, 180, 270 degrees."""

    def turned(x: Tensor, y: Tensor, turn: int) -> Sample:
        return x.rot90(turn, (2, 3)), y

    return [_changed(images.client(EVEN), place % 4, turned) for place in range(20)]


def groups(images: Images) -> list[dict[str, Sample]]:
    """20 clients with all classes in four groups, for each of which the classes have other numbers."""

    def renamed(x: Tensor, y: Tensor, turn: int) -> Sample:
        return x, (y + 3 * turn) % 10

    return [_changed(images.client(EVEN), place % 4, renamed) for place in range(20)]


def crowd(images: Images) -> list[dict[str, Sample]]:
    """100 clients, of whom 5 take part in a round, 30 images each, classes drawn by Dirichlet 0.3."""
    return [images.client(images.random.dirichlet(np.full(10, 0.3)), 30) for _ in range(100)]


PROBLEMS: dict[str, tuple[Callable[[Images], list[dict[str, Sample]]], dict[str, Any]]] = {
    "alike": (alike, {}),
    "classes": (classes, {}),
    "mixtures": (mixtures, {}),
    "sizes": (sizes, {}),
    "views": (views, {}),
    "groups": (groups, {}),
    "crowd": (crowd, {"cohort": {"count": 5}}),
}
"""How clients differ, and what else is set."""


def _changed(
    client: dict[str, Sample], turn: int, change: Callable[[Tensor, Tensor, int], Sample]
) -> dict[str, Sample]:
    return {part: change(x, y, turn) for part, (x, y) in client.items()}


def inputs(problem: str, seed: int) -> dict[str, Any]:
    """What all runs of a problem and a seed are given."""
    build, settings = PROBLEMS[problem]
    clients = {f"c{place:02d}": client for place, client in enumerate(build(Images(seed)))}
    return {
        "experiment": {**SETTING, **settings},
        "data": clients,
        "model": "mlp",
        "engine": ENGINE,
    }


def measure(problem: str, algorithm: str, scratch: Path) -> dict[str, Any]:
    """A method's rate and its last accuracy with each seed; or the message with which it failed."""
    began, fixed = time.perf_counter(), OWN.get(algorithm, {})
    try:
        rate = choose_rate(problem, algorithm, fixed, scratch)
        runs = [
            sartor.run(
                algorithm, seed=seed, store=False, hyper={**fixed, "lr": rate}, **inputs(problem, seed)
            )
            for seed in SEEDS
        ]
    except SartorError as error:
        return {"failed": str(error)}
    last = [run.summary["last"] for run in runs]
    cell = "personal_local" if last[0]["personal_local"] else "shared_local"
    found = [each[cell]["accuracy"] for each in last]
    worst = [each[cell]["accuracy_spread"]["worst_decile"] for each in last]
    return {
        "lr": rate,
        "cell": cell,
        "accuracy": found,
        "mean": statistics.mean(found),
        "deviation": statistics.stdev(found),
        "worst": statistics.mean(worst),
        "bytes": statistics.mean(run.summary["bytes_down"] + run.summary["bytes_up"] for run in runs),
        "seconds": time.perf_counter() - began,
        "failed": None,
    }


def choose_rate(problem: str, algorithm: str, fixed: dict[str, Any], scratch: Path) -> float:
    """The rate with the best accuracy on validation data."""
    rates = [rate * FACTORS.get(algorithm, 1) for rate in RATES]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        found = sartor.search(
            {algorithm: {**{key: [value] for key, value in fixed.items()}, "lr": rates}},
            method="grid",
            budget=len(rates),
            seeds=[SEARCH_SEED],
            out=Path(folder) / "search",
            **inputs(problem, SEARCH_SEED),
        )
    rate: float = found.methods[0].best["lr"]
    return rate


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=PROBLEMS, metavar="NAME")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS, metavar="NAME")
    parser.add_argument("--json", type=Path, default=FILE, help="the file")
    arguments = parser.parse_args()
    logging.getLogger("sartor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = Results(arguments.json)
    with tempfile.TemporaryDirectory() as scratch:
        for problem in arguments.problems:
            for algorithm in arguments.methods:
                key = f"{problem}/{algorithm}"
                if results.numbers.get(key, {"failed": True})["failed"] is None:
                    continue
                found = measure(problem, algorithm, Path(scratch))
                results.about |= {"command": COMMAND, "seeds": list(SEEDS), "environment": environment()}
                results.add(key, found, method=algorithm)
                last = found["failed"] or f"{100 * found['mean']:.2f} %, lr {found['lr']:g}"
                print(f"{problem}, {algorithm}: {last}, {found.get('seconds', 0):.0f} s", flush=True)


if __name__ == "__main__":
    main()
