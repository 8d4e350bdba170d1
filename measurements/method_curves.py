"""The curve on every method's page: all registered methods on the embedded digits, in one setting.

    python measurements/method_curves.py                       # what misses in results/method-curves.jsonl
    python measurements/method_curves.py --methods ditto apple # only these

20 clients share the digits by Dirichlet 0.1 and differ in classes and size, half of them are drawn in each
of 30 rounds, and half are stragglers that take 2, 3 or 4 units of time: synchronous methods wait for them,
asynchronous ones do not. Each method's learning rate is the one of five with the best accuracy on the
clients' validation data, in a run with a seed of its own; all its other hyper-parameters have their defaults.
Where the rate is not that of one step (FSVRG divides it), the five are multiplied so that steps are of the
same size.

The file is written after each method, and what is in it is not run again. A method that fails is written down
with the message, and is tried again the next time.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import sartor
from sartor.algorithms import registered
from sartor.data import Source
from sartor.data.named import register_data
from sartor.data.sources import load_source
from sartor.errors import SartorError
from sartor.model.networks import seeded
from sartor.model.task import Task
from sartor.runs.record import environment
from sartor.studies.results import Results

COMMAND = "python measurements/method_curves.py"
FILE = Path(__file__).parent.parent / "results" / "method-curves.jsonl"

SETTING: dict[str, Any] = {
    "rounds": 30,
    "data": {"name": "digits", "clients": 20, "validation": 0.2},
    "partition": {"name": "dirichlet", "alpha": 0.1, "by": "class", "least": 10},
    "local": {"epochs": 2, "batch": 16},
    "cohort": {"fraction": 0.5},
    "delay": {"name": "periodic", "stragglers": 10, "longest": 3},
    "evaluate": {"every": 2, "personal_pooled": "no"},
}
ENGINE = {"name": "loop", "workers": 1}
"""Which does not change results; clients so small gain little from being trained in one batch."""
SEEDS = (0, 1, 2)
SEARCH_SEED = 3
"""Rates are chosen on a partition of their own."""
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)

STEPS, SAMPLES = 8, 57
"""Of a client in a round: its mean number of steps, and of training samples."""
FACTORS = {
    "fsvrg": STEPS,
    "a-fsvrg": SAMPLES,
    "ma-fsvrg": SAMPLES,
    "ma-fsvrg-async": SAMPLES,
    "ga-fsvrg": SAMPLES,
}
"""How many times the rate of a step ``lr`` is, where it is divided by a client's steps or samples."""

OWN: dict[str, dict[str, Any]] = {
    "fedasync": {"arrivals": 0, "deadline": 1.0},
    "fedbuff": {"buffer": 5},
    "pfedhn": {"server_lr": 0.1},
}
"""Hyper-parameters whose defaults would be none here: one answer in a round, or ten of the ten clients at
work, and for pFedHN a step of the server that is for thousands of rounds.
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "BatchNorm": {},  # its network is made in Python
    "everyone": {"cohort": {"fraction": 1.0}},
    "adapters": {"model": {"adapters": 4}},
    "two widths": {"models": [{"name": "mlp", "hidden": 16, "every": 2}]},
}
"""What differs from the setting for methods that cannot show themselves in it."""
NEEDS = {
    "fedbn": "BatchNorm",
    "vrl-sgd": "everyone",
    **dict.fromkeys(("fedit", "ffa-lora", "fedsa-lora"), "adapters"),
    **dict.fromkeys(("heterofl", "fedrolex", "fml", "fedkd", "fedmd", "feddf"), "two widths"),
}
"""The variant that a method needs; what it is compared with is measured there too."""
REFERENCES = ("fedavg", "separate")
SMALL = {"model": {"hidden": 16}}
"""The network that all clients can hold, where they have two widths: FedAvg's, or shared beside their own."""
WIDE = {"models": [{"name": "mlp", "hidden": 64, "every": 2, "first": 1}]}
SMALL_SHARED = ("fml", "fedkd")
PUBLIC = {"public": {"name": "mnist-8x8", "count": 500}}
"""For methods that learn from public samples."""


@register_data("mnist-8x8")
def small_mnist(folder: Path) -> Source:
    """MNIST without its margin, as small as the embedded digits."""
    mnist = load_source("mnist", folder)
    train, test = (
        functional.interpolate(x[:, :, 4:24, 4:24], size=(8, 8), mode="area")
        for x in (mnist.train_x, mnist.test_x)
    )
    return replace(mnist, name="mnist-8x8", train_x=train, test_x=test)


def setting(algorithm: str, variant: str) -> dict[str, Any]:
    """The experiment of a method in a variant of the setting."""
    if registered()[algorithm].public:
        return {**SETTING, **VARIANTS[variant], **PUBLIC}
    if variant == "two widths" and not registered()[algorithm].own_models:
        return {**SETTING, **SMALL}
    if variant == "two widths" and algorithm in SMALL_SHARED:
        return {**SETTING, **SMALL, **WIDE}
    return {**SETTING, **VARIANTS[variant]}


def entries() -> dict[str, tuple[str, str]]:
    """What is measured: label -> method and variant, the references first."""
    compared = {
        f"{name}, {variant}" if variant else name: (name, variant)
        for variant in VARIANTS
        for name in REFERENCES
    }
    return compared | {name: (name, NEEDS.get(name, "")) for name in registered() if name not in compared}


def network(variant: str, seed: int) -> str | Task:
    """The network as :func:`sartor.run` takes it, its first weights drawn by the seed."""
    if variant != "BatchNorm":
        return "mlp"

    def build() -> nn.Module:
        layers = {
            "flatten": nn.Flatten(),
            "hidden": nn.Linear(64, 64),
            "norm": nn.BatchNorm1d(64),
            "relu": nn.ReLU(),
            "output": nn.Linear(64, 10),
        }
        return nn.Sequential(OrderedDict(layers))

    return Task(seeded(build, seed), classes=10, head="output", name="mlp with BatchNorm")


def measure(algorithm: str, variant: str, scratch: Path) -> dict[str, Any]:
    """A method's rate and its curves, one for each seed; or the message with which it failed."""
    fixed = OWN.get(algorithm, {})
    began = time.perf_counter()
    described = {"algorithm": algorithm, "variant": variant}
    try:
        rate, tried = choose_rate(algorithm, variant, fixed, scratch)
        hyper = {**fixed, "lr": rate}
        runs = [
            sartor.run(
                algorithm,
                experiment=setting(algorithm, variant),
                model=network(variant, seed),
                seed=seed,
                engine=ENGINE,
                store=False,
                hyper=hyper,
            )
            for seed in SEEDS
        ]
    except SartorError as error:
        return {**described, "failed": str(error)}
    cell = "personal_local" if runs[0].summary["last"]["personal_local"] else "shared_local"
    evaluated = [[row for row in run.rounds if "evaluation" in row] for run in runs]
    curves = [[row["evaluation"][cell]["accuracy"] for row in rows] for rows in evaluated]
    return {
        **described,
        "hyper": hyper,
        "validation": tried,
        "cell": cell,
        "rounds": [row["round"] for row in evaluated[0]],
        "accuracy": curves,
        "mean": [statistics.mean(values) for values in zip(*curves, strict=True)],
        "deviation": [statistics.stdev(values) for values in zip(*curves, strict=True)],
        "time": statistics.mean(run.rounds[-1]["time"] for run in runs),
        "seconds": time.perf_counter() - began,
        "failed": None,
    }


def choose_rate(
    algorithm: str, variant: str, fixed: dict[str, Any], scratch: Path
) -> tuple[float, dict[str, float | None]]:
    """The rate with the best accuracy on validation data, and that of each; null for one that diverged."""
    rates = [rate * FACTORS.get(algorithm, 1) for rate in RATES]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        found = sartor.search(
            {algorithm: {**{key: [value] for key, value in fixed.items()}, "lr": rates}},
            experiment={**setting(algorithm, variant), "evaluate": {"every": 0, "personal_pooled": "no"}},
            model=network(variant, SEARCH_SEED),
            method="grid",
            budget=len(rates),
            seeds=[SEARCH_SEED],
            engine=ENGINE,
            out=Path(folder) / "search",
        )
    (tuned,) = found.methods
    tried = {
        f"{trial.hyper['lr']:g}": None if trial.validation is None else trial.validation.mean
        for trial in tuned.trials
    }
    return tuned.best["lr"], tried


def described(found: dict[str, Any]) -> dict[str, Any] | None:
    """The experiment of a measurement's first seed; None where its network is made in Python."""
    if found["variant"] == "BatchNorm" or found["failed"] is not None:
        return None
    made = setting(found["algorithm"], found["variant"])
    model = {"name": "mlp", **made.get("model", {})}
    return {**made, "model": model, "seed": SEEDS[0], "hyper": found["hyper"]}


def read(file: Path) -> Results:
    """What was measured in this setting so far; a file of another one is refused."""
    shared = {
        "setting": SETTING,
        "variants": VARIANTS,
        "seeds": list(SEEDS),
        "search": {"seed": SEARCH_SEED, "rates": list(RATES), "factors": FACTORS},
    }
    if not file.exists():
        return Results(file, shared)
    results = Results(file)
    if any(results.about.get(key) != value for key, value in shared.items()):
        raise SystemExit(
            f"{file}: was measured in another setting; remove it, or give another file as --json"
        )
    return results


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="*", metavar="NAME", help="only these; left out: all")
    parser.add_argument("--again", action="store_true", help="also those that the file has already")
    parser.add_argument("--json", type=Path, default=FILE, help="the file")
    arguments = parser.parse_args()
    for name in arguments.methods or ():
        if name not in entries():
            parser.error(f"{name}: no such method; `sartor algorithms` lists them")
    logging.getLogger("sartor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = read(arguments.json)
    with tempfile.TemporaryDirectory() as scratch:
        for label, (algorithm, variant) in entries().items():
            if arguments.methods and label not in arguments.methods:
                continue
            known = results.numbers.get(label)
            if known is not None and known["failed"] is None and not arguments.again:
                continue
            found = measure(algorithm, variant, Path(scratch))
            results.about |= {"command": COMMAND, "environment": environment()}
            results.add(label, found, method=algorithm, experiment=described(found))
            last = found["failed"] or f"{100 * found['mean'][-1]:.2f} %, lr {found['hyper']['lr']:g}"
            print(f"{label}: {last}, {found.get('seconds', 0):.0f} s", flush=True)


if __name__ == "__main__":
    main()
