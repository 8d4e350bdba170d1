"""All cells of the MNIST figures of "Tailored Federated Learning" (Zhao et al. 2024), and its baselines.

    python measurements/tailored_mnist.py --device cuda --out tailored.jsonl

Three seeds of MA-FSVRG and GA-FSVRG at the paper's settings over participation, number of models C, threshold
T and first moment β1, and of the methods that the paper compares with over participation. Every method,
MA-FSVRG and GA-FSVRG too, is tried with the same seven learning rates on one more seed at 10 % participation,
judged by the accuracy on the pooled test data after 50 rounds, and then runs with its best rate. The paper's
α_l = 12 is a rate of 0.08 at clients of 150 samples.

The file is written after every run, and what is in it is not run again: a run that was stopped goes on.
At the end the tables are printed as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sartor.algorithms import registered
from sartor.data import ClientData, apply, make_partition
from sartor.data.sources import Source, load_source
from sartor.errors import SartorError, SettingError
from sartor.runs.execute import execute
from sartor.runs.experiment import from_mapping, read_toml
from sartor.studies import presets
from sartor.studies.results import Results

TAILORED = ("ma-fsvrg", "ga-fsvrg")
COMPARED = ("fedprox", "per-fedavg", "scaffold", "mimesvrg", "losac")
RELATED = ("fsvrg", "a-fsvrg")
PARTICIPATION = (0.2, 0.15, 0.1, 0.05)
SWEEPS = {"groups": (2, 4, 6, 8), "threshold": (2, 4, 6, 8), "beta1": (0.0, 0.5, 0.8, 0.9)}
DEFAULTS = {"groups": 4, "threshold": 4, "beta1": 0.0}
RATES = (0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
TUNING_SEED = 100
SAMPLES, STEPS = 150, 15
SHOWN = (20, 40, 60, 80, 100)


@dataclass(frozen=True)
class Run:
    method: str
    seed: int
    fraction: float = 0.1
    rounds: int = 100
    hyper: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        settings = ",".join(f"{name}={value:g}" for name, value in sorted(self.hyper.items()))
        return f"{self.method}/{settings}/{self.fraction:g}/{self.rounds}/{self.seed}"


def rate_of(method: str, rate: float) -> float:
    """The ``lr`` under which a method's local steps have this rate."""
    if method in (*TAILORED, "a-fsvrg"):
        return rate * SAMPLES  # α_i = α_l / n_i
    return rate * STEPS if method == "fsvrg" else rate  # h / T_k


class Book:
    """The runs made so far, on file."""

    def __init__(self, path: Path, device: str) -> None:
        self.file, self.device = Results(path), device
        self.runs = self.file.numbers
        self.data: dict[int, ClientData] = {}
        self.base = read_toml(presets.path("tailored/participation"))
        self.source: Source | None = None

    def clients(self, seed: int) -> ClientData:
        """The clients of a seed; histograms of gradients are made once for all seeds."""
        experiment = from_mapping(self.base)
        if self.source is None:
            source, hog = load_source("mnist", None), experiment.features.settings
            self.source = replace(source, train_x=hog(source.train_x), test_x=hog(source.test_x))
        if seed not in self.data:
            partition = make_partition(
                self.source, experiment.partition.settings, experiment.data.clients, seed
            )
            self.data[seed] = apply(self.source, partition)
        return self.data[seed]

    def get(self, run: Run) -> dict[str, Any]:
        """The curve of a run, which is made unless it is on file."""
        if run.key not in self.runs:
            begin = time.perf_counter()
            result = self._make(run)
            result["seconds"] = round(time.perf_counter() - begin, 2)
            self.runs[run.key] = {**vars(run), **result}
            self.file.add(run.key, self.runs[run.key], method=run.method, experiment=self.experiment(run))
            last = result.get("error") or f"{result['curve'][str(run.rounds)]['accuracy']:.4f}"
            print(f"{len(self.runs):4d}  {run.key}: {last}, {result['seconds']} s", flush=True)
        return self.runs[run.key]

    def experiment(self, run: Run) -> dict[str, Any]:
        """The settings of a run."""
        local = dict(self.base["local"])
        if run.method in ("losac", "per-fedavg"):
            local["weight_decay"] = 0.0  # their estimates have no place for it, and they refuse it
        return {
            **self.base,
            "algorithm": run.method,
            "seed": run.seed,
            "rounds": run.rounds,
            "local": local,
            "cohort": {"fraction": run.fraction},
            "hyper": run.hyper,
        }

    def _make(self, run: Run) -> dict[str, Any]:
        mapping = {**self.experiment(run), "engine": {"name": "stacked", "device": self.device}}
        try:
            result = execute(from_mapping(mapping), data=self.clients(run.seed), store=False)
        except SettingError:
            raise
        except SartorError as error:  # a rate that is too large for the method
            return {"error": str(error)}
        curve = {}
        for row in result.rounds:
            if "evaluation" in row:
                pooled = row["evaluation"]["shared_pooled"]
                curve[str(row["round"])] = {
                    "accuracy": pooled["accuracy"],
                    "mean_over_models": pooled.get("mean_over_models", pooled)["accuracy"],
                    "personal_local": row["evaluation"].get("personal_local", {}).get("accuracy"),
                    **{name: value for name, value in pooled.items() if name.startswith(("macro", "micro"))},
                }
        return {"curve": curve}


def tuned(book: Book, method: str) -> float:
    """The rate that does best on the seed for tuning."""
    found = {}
    for rate in RATES:
        run = Run(method, TUNING_SEED, rounds=50, hyper={"lr": rate_of(method, rate)})
        found[rate] = book.get(run).get("curve", {}).get("50", {"accuracy": -1.0})["accuracy"]
    return max(RATES, key=lambda rate: (found[rate], -rate))


def sweep_cells() -> Iterator[tuple[str, float, dict[str, float]]]:
    """Name and value of what is varied, and the hyper-parameters of the cell."""
    for name, values in SWEEPS.items():
        for value in values:
            yield name, value, {} if value == DEFAULTS[name] else {name: value}


def shown(cells: list[dict[str, Any]], quantity: str, round: int) -> str:
    """Mean and standard deviation over seeds, in per cent."""
    values = [cell["curve"][str(round)][quantity] for cell in cells if "curve" in cell]
    if len(values) < len(cells) or None in values:
        return "–"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"


def line(book: Book, label: str, runs: list[Run]) -> str:
    cells = [book.get(run) for run in runs]
    curve = [shown(cells, "accuracy", round) for round in SHOWN]
    for cell in cells:  # on test data, so that it flatters methods that fluctuate
        if "curve" in cell:
            cell["curve"][str(SHOWN[-1])]["best"] = max(row["accuracy"] for row in cell["curve"].values())
    last = [shown(cells, quantity, SHOWN[-1]) for quantity in ("best", "mean_over_models", "personal_local")]
    return f"| {' | '.join([label, *curve, *last])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="tailored_mnist.jsonl", help="the file with all curves")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("tailored", "baselines"), help="half of the tables")
    arguments = parser.parse_args()
    book, seeds = Book(Path(arguments.out), arguments.device), range(arguments.seeds)
    compared = [name for name in (*COMPARED, *RELATED) if name in registered()]
    tailored = TAILORED if arguments.only != "baselines" else ()
    for method in tailored:
        for seed in seeds:
            for fraction in PARTICIPATION:
                book.get(Run(method, seed, fraction))
            for _, _, hyper in sweep_cells():
                book.get(Run(method, seed, hyper=hyper))
    rates: dict[str, float] = {}
    if arguments.only != "tailored":
        rates = {method: tuned(book, method) for method in (*compared, *TAILORED)}

    head = ["method", *(str(round) for round in SHOWN), "best so far", "mean over C", "preferred, own data"]
    header = f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    lines: list[str] = []
    for fraction in PARTICIPATION:
        lines += ["", f"{100 * fraction:g} % of the clients in a round:", "", header]
        for method in tailored:
            lines.append(line(book, f"`{method}`, α_l = 12", [Run(method, seed, fraction) for seed in seeds]))
        for method in (*TAILORED, *compared) if rates else ():
            if method not in RELATED or fraction == 0.1:
                hyper = {"lr": rate_of(method, rates[method])}
                runs = [Run(method, seed, fraction, hyper=hyper) for seed in seeds]
                lines.append(line(book, f"`{method}`, rate {rates[method]:g}", runs))
    for name in SWEEPS if tailored else ():
        lines += ["", f"`hyper.{name}`, 10 % of the clients in a round:", "", header]
        for method in tailored:
            for varied, value, hyper in sweep_cells():
                if varied == name:
                    runs = [Run(method, seed, hyper=hyper) for seed in seeds]
                    lines.append(line(book, f"`{method}`, {value:g}", runs))
    if rates:
        lines += ["", f"Rates tried on seed {TUNING_SEED}, accuracy after 50 rounds:", ""]
        lines += [
            f"| method | {' | '.join(f'{rate:g}' for rate in RATES)} |",
            f"|{'---|' * (len(RATES) + 1)}",
        ]
        for method in (*compared, *TAILORED):
            runs = [Run(method, TUNING_SEED, rounds=50, hyper={"lr": rate_of(method, r)}) for r in RATES]
            cells = [shown([book.get(run)], "accuracy", 50).split(" ")[0] for run in runs]
            lines.append(f"| `{method}` | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    try:
        main()
    except SartorError as error:
        sys.exit(f"error: {error}")
