"""The tables of SPFL and PLGA: ten clients with six classes each, IID and not, some of them stragglers.

    python measurements/spfl_tables.py --table 1 --dataset mnist --device cuda --seeds 3 --json table1.jsonl
    python measurements/spfl_tables.py --table 2 --dataset cifar10 --device cuda --json table2.jsonl
    python measurements/spfl_tables.py --table stragglers --device cuda --json stragglers.jsonl

Every run is written to the file as soon as it ends, and what is in there is not run again: a script
that was stopped goes on where it was. The tables are printed as Markdown at the end: means and standard
deviations over seeds, in percent, of the last round and, for table 1, of the best one on the test data. The
data is downloaded, or read from the folder that the environment variable SARTOR_DATA names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import sartor
from sartor.algorithms import registered
from sartor.errors import SartorError
from sartor.runs.experiment import read_toml
from sartor.studies.presets import path
from sartor.studies.results import Results


class Run(NamedTuple):
    """A row of a table: a label, a method, its hyper-parameters and further settings."""

    label: str
    algorithm: str
    hyper: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    settings: dict[str, dict[str, Any]] = {}  # noqa: RUF012


ONE = {"local_updates": 1}
TABLE_1 = [
    Run("FedAvg", "fedavg"),
    Run("FedUpdate", "fedupdate", {"finetune_epochs": 1, "finetune_lr": 0.01}),
    Run("Per-FedAvg", "per-fedavg", {"alpha": 0.01}),
    Run("pFedMe", "pfedme", {"personal_lr": 0.01}),
    Run("SPFL-w (1-step)", "spfl-w", ONE),
    Run("SPFL-w", "spfl-w"),
    Run("SPFL (1-step)", "spfl", ONE),
    Run("SPFL", "spfl"),
    Run("Separate", "separate"),
]
DROPPED = {"replies": {"deadline": 1.0}}
EVERY_ROUND = {"arrivals": 0, "deadline": 1.0}
TABLE_2 = [
    Run("FedAvg (async)", "fedavg-async"),
    Run("FedAvg (sync)", "fedavg-sync"),
    Run("Per-FedAvg", "per-fedavg", {"alpha": 0.001}, DROPPED),
    Run("FedAsync", "fedasync", EVERY_ROUND),
    Run("LGA", "lga"),
    Run("PLGA", "plga"),
]
PAPER_1 = {
    ("mnist", "IID"): [98.46, 98.46, 98.89, 98.80, 98.46, 98.90, 98.35, 98.82, 97.31],
    ("mnist", "non-IID"): [96.52, 97.21, 97.19, 97.18, 96.52, 97.22, 97.71, 98.33, 97.19],
    ("cifar10", "IID"): [67.00, 66.45, 74.00, 72.82, 67.03, 74.04, 65.53, 71.91, 63.56],
    ("cifar10", "non-IID"): [48.76, 59.45, 55.65, 55.47, 48.96, 55.36, 61.36, 67.22, 59.43],
}
"""The paper's client averages, in the order of the table; Separate is from its appendix, one seed."""
PAPER_2 = {
    "mnist": ([97.24, 97.31, 97.27, 97.18, 97.48, 97.83], [97.61, 97.72, 97.68, 97.59, 97.82, 97.82]),
    "cifar10": ([42.09, 42.36, 41.79, 43.59, 44.06, 46.11], [46.52, 46.86, 45.48, 46.51, 45.73, 45.96]),
}
"""The paper's accuracies of clients and of the server, in the order of the table."""


def rounds_of(preset: str, rounds: int) -> int:
    """The rounds asked for, or those of the table."""
    return rounds or (100 if preset == "spfl/table1" else 800)


def experiment(
    run: Run, preset: str, dataset: str, rounds: int, seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """The settings of one run, as :func:`sartor.run` takes them."""
    rounds = rounds_of(preset, rounds)
    made = read_toml(path(preset))
    own = {"evaluate": {"every": max(1, rounds // 10), "personal_pooled": "no"}, "data": {"name": dataset}}
    for section, values in [*own.items(), *run.settings.items(), *settings.items()]:
        made[section] = {**made.get(section, {}), **values}
    hyper = {"lr": made["hyper"]["lr"], **run.hyper}
    return {**made, "algorithm": run.algorithm, "rounds": rounds, "seed": seed, "hyper": hyper}


def perform(settings: dict[str, Any], device: str, progress: bool) -> dict[str, Any]:
    """One run: its accuracies by evaluated round, and how long it took."""
    began = time.perf_counter()
    result = sartor.run(experiment=settings, device=device, store=False, progress=progress)
    series = {
        cell: {
            row["round"]: row["evaluation"][cell]["accuracy"] for row in result.rounds if "evaluation" in row
        }
        for cell in ("personal_local", "shared_local", "shared_pooled")
        if result.summary["accuracy"].get(cell) is not None
    }
    last = result.rounds[-1]
    return {
        "accuracy": series,
        "rounds": settings["rounds"],
        "seconds": time.perf_counter() - began,
        "virtual_time": last.get("time"),
        "updates": last.get("updates"),
    }


class Made:
    """What has been run, by its description; on disk after every run."""

    def __init__(self, file: Path | None) -> None:
        self.file = None if file is None else Results(file)
        self.runs: dict[str, dict[str, Any]] = {} if self.file is None else self.file.numbers

    def get(
        self, run: Run, preset: str, arguments: argparse.Namespace, **settings: Any
    ) -> list[dict[str, Any]]:
        """The results of all seeds, run where they are not there yet."""
        found = []
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            described = [run.label, preset, arguments.dataset, arguments.rounds, seed, settings]
            key = json.dumps(described, sort_keys=True)
            if key not in self.runs:
                asked = experiment(run, preset, arguments.dataset, arguments.rounds, seed, settings)
                self.runs[key] = perform(asked, arguments.device, arguments.progress)
                seconds = self.runs[key]["seconds"]
                print(
                    f"{run.label}, {arguments.dataset}, seed {seed}, {settings}: {seconds:.0f} s", flush=True
                )
                if self.file is not None:
                    self.file.add(key, self.runs[key], method=run.algorithm, experiment=asked)
            found.append(self.runs[key])
        return found


def shown(runs: list[dict[str, Any]], cells: tuple[str, ...], best: bool = False) -> str:
    """Mean ± deviation over seeds, in percent, of the first of these cells that there is."""
    values = []
    for run in runs:
        series = next((run["accuracy"][cell] for cell in cells if cell in run["accuracy"]), None)
        if series is None:
            return ""
        values.append(100 * (max(series.values()) if best else list(series.values())[-1]))
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"


CLIENT = ("personal_local", "shared_local")
SERVER = ("shared_pooled",)


def wanted(table: list[Run], arguments: argparse.Namespace) -> list[Run]:
    """The rows asked for that there are."""
    known = registered()
    chosen = arguments.methods or [run.label for run in table]
    return [
        run for run in table if run.algorithm in known and (run.label in chosen or run.algorithm in chosen)
    ]


def table_1(results: Made, arguments: argparse.Namespace) -> list[str]:
    """Client averages, IID and non-IID."""
    lines = [
        f"| {arguments.dataset}, client average (%) | IID | best | paper | non-IID | best | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in wanted(TABLE_1, arguments):
        cells = []
        for iid in (True, False):
            if arguments.split not in ("both", "iid" if iid else "non-iid"):
                cells += ["", "", ""]
                continue
            runs = results.get(run, "spfl/table1", arguments, partition={"iid": iid})
            paper = PAPER_1.get((arguments.dataset, "IID" if iid else "non-IID"))
            printed = f"{paper[TABLE_1.index(run)]:.2f}" if paper else ""
            cells += [shown(runs, CLIENT), shown(runs, CLIENT, best=True), printed]
        lines.append(f"| {run.label} | {' | '.join(cells)} |")
    return lines


def table_2(results: Made, arguments: argparse.Namespace) -> list[str]:
    """Clients and server with stragglers, non-IID."""
    delay = {"stragglers": arguments.stragglers, "longest": max(1, arguments.stragglers)}
    lines = [
        f"| {arguments.dataset}, {arguments.stragglers} stragglers (%) | client | paper | server | paper |",
        "|---|---|---|---|---|",
    ]
    local = {"local": {"steps": 0, "epochs": arguments.epochs}} if arguments.epochs else {}
    for run in wanted(TABLE_2, arguments):
        runs = results.get(run, "spfl/table2", arguments, delay=delay, **local)
        paper = PAPER_2.get(arguments.dataset)
        printed = [f"{column[TABLE_2.index(run)]:.2f}" for column in paper] if paper else ["", ""]
        cells = [shown(runs, CLIENT), printed[0], shown(runs, SERVER), printed[1]]
        lines.append(f"| {run.label} | {' | '.join(cells)} |")
    return lines


def figure(results: Made, arguments: argparse.Namespace) -> list[str]:
    """Client averages over the number of stragglers."""
    numbers = range(10)
    lines = [
        f"| {arguments.dataset}, client average (%) by stragglers | {' | '.join(map(str, numbers))} |",
        "|---" * 11 + "|",
    ]
    for run in wanted(TABLE_2, arguments):
        cells = []
        for number in numbers:
            delay = {"stragglers": number, "longest": max(1, number)}
            cells.append(shown(results.get(run, "spfl/table2", arguments, delay=delay), CLIENT))
        lines.append(f"| {run.label} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=("1", "2", "stragglers"), default="1")
    parser.add_argument("--dataset", choices=("mnist", "cifar10", "fashion-mnist"), default="mnist")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=0, help="0: 100 for table 1, else 800")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--stragglers", type=int, default=5, help="of table 2")
    parser.add_argument("--epochs", type=int, default=0, help="of table 2, in place of its 20 local steps")
    parser.add_argument("--methods", nargs="*", help="labels or names; left out: all of the table")
    parser.add_argument("--split", choices=("both", "iid", "non-iid"), default="both", help="of table 1")
    parser.add_argument("--json", type=Path, help="file with the results, continued if it is there")
    parser.add_argument("--progress", action="store_true")
    arguments = parser.parse_args()
    makers = {"1": table_1, "2": table_2, "stragglers": figure}
    print("\n".join(makers[arguments.table](Made(arguments.json), arguments)))


if __name__ == "__main__":
    try:
        main()
    except SartorError as error:
        sys.exit(f"error: {error}")
