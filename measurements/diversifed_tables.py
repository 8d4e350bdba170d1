"""The tables of DiversiFed's paper: twelve methods on two splits, each client's model on its own test data.

    python measurements/diversifed_tables.py --dataset cifar10 --device cuda --json out.jsonl --search
    python measurements/diversifed_tables.py --dataset cifar10 --device cuda --json out.jsonl --seeds 2

40 clients with 500 training and 100 test samples each (Fashion-MNIST: 300), 10 local epochs, batches of 100,
Adam with rate 0.001. Every method goes over its data equally often in a round: pFedMe's inner steps and
FedRep's two phases are counted. Per-FedAvg alone takes two gradients for each of its steps.

The first line tries four settings of every method on each split, once, with a seed of its own: clients keep a
fifth of their training samples for validation, and the personal models' (else the shared one's) accuracy on
those after the last round decides. No test score is read. FedFomo weighs models on the same samples, so its
scores are for comparing its own settings only. The second line trains with what was chosen for the split,
or with a method's first setting where the file does not hold all four. The file is written after each run,
and runs that it holds already are not made again. Parts may run side by side (--methods, --splits), each
with a file of its own; --merge unites them in --json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import sartor
from sartor.errors import DataError, SartorError, SettingError
from sartor.studies.results import Results

SPLITS: dict[str, dict[str, Any]] = {
    "pathological": {"name": "classes", "k": 2},
    "dirichlet 0.1": {"name": "dirichlet", "by": "client", "alpha": 0.1},
}
EPOCHS = 10
SEARCH_SEED = 100
"""The seed of the search; its clients, batches and initial weights are those of no final run."""
SGD = {"optimizer": "sgd"}
RATES = [{"lr": 0.0003}, {"lr": 0.0001}, {"lr": 0.003}]


def with_rates(**other: Any) -> list[dict[str, Any]]:
    """Changes of a method with Adam and settings of its own: another setting, a lower rate, and both."""
    return [other, {"lr": 0.0003}, {**other, "lr": 0.0003}]


# A method's candidates: its `hyper`, near its paper or our default, and that with each change of `tried`. All
# choose between two learning rates or more, so that none is ahead by its rate alone.
METHODS: dict[str, dict[str, Any]] = {
    "separate": {"hyper": {"lr": 0.001}, "tried": RATES},
    "fedavg": {"hyper": {"lr": 0.001}, "tried": RATES},
    "per-fedavg": {
        "hyper": {"lr": 0.01, "alpha": 0.01, "variant": "fo"},
        "tried": [{"alpha": 0.05}, {"lr": 0.05}, {"lr": 0.05, "alpha": 0.05}],
        "local": SGD,
    },
    "pfedme": {
        "hyper": {"lr": 0.01, "personal_lr": 0.01, "lam": 15.0, "inner_steps": 5},
        "tried": [
            {"personal_lr": 0.05},
            {"personal_lr": 0.05, "lr": 0.05},
            {"personal_lr": 0.1, "lr": 0.1, "lam": 5.0},
        ],
        "local": SGD,
    },
    # The other setting is a form in which the penalty counts: with α_k = 10⁴ it carries nothing.
    "fedamp": {
        "hyper": {"lr": 0.001, "alpha": 1e4, "alpha_decay": 0.1, "sigma": 1e6, "start": "u"},
        "tried": with_rates(alpha=1.0, alpha_decay=1.0, sigma=100.0, start="w"),
    },
    "fedfomo": {
        "hyper": {"lr": 0.001, "models": 5, "epsilon": 0.3},
        "tried": with_rates(models=10),
        "data": {"validation": 0.2},
    },
    "apple": {
        "hyper": {"lr": 0.01, "mixing_lr": 0.001},
        "tried": [{"lr": 0.1}, {"mixing_lr": 0.01}, {"lr": 0.1, "mixing_lr": 0.01}],
        "local": SGD,
    },
    "fedrep": {"hyper": {"lr": 0.001, "head_epochs": 5}, "tried": with_rates(head_epochs=8)},
    "fedproto": {"hyper": {"lr": 0.001, "alignment": 1.0}, "tried": with_rates(alignment=0.1)},
    "fedrod": {"hyper": {"lr": 0.001}, "tried": RATES},
    "fedcac": {"hyper": {"lr": 0.001, "tau": 0.5, "beta": 100.0}, "tried": with_rates(beta=20.0)},
    "diversifed": {"hyper": {"lr": 0.001, "lam": 2.0}, "tried": with_rates(lam=0.2)},
}
CANDIDATES = range(4)

Runs = dict[str, dict[str, Any]]


def hyper_of(method: str, candidate: int) -> dict[str, Any]:
    """The hyper-parameters of a candidate; 0 is the method's first setting."""
    return {**METHODS[method]["hyper"], **[{}, *METHODS[method]["tried"]][candidate]}


def search_key(split: str, method: str, candidate: int) -> str:
    """Where a search run is in the file."""
    return f"search | {split} | {method} | {candidate}"


def final_key(split: str, method: str, candidate: int, seed: int) -> str:
    """Where a final run is in the file."""
    return f"{split} | {method} | {candidate} | {seed}"


def experiment(
    dataset: str, split: str, method: str, candidate: int, seed: int | None, rounds: int
) -> dict[str, Any]:
    """The settings of one run, as :func:`sartor.run` takes them; without a seed it is one of the search."""
    hyper = hyper_of(method, candidate)
    epochs = (EPOCHS - hyper.get("head_epochs", 0)) // hyper.get("inner_steps", 1)
    data = {"name": dataset, "clients": 40, **METHODS[method].get("data", {})}
    return {
        "algorithm": method,
        "data": data if seed is not None else {**data, "validation": 0.2},
        "partition": {**SPLITS[split], "train": 300 if dataset == "fashion-mnist" else 500, "test": 100},
        "model": {"name": "mlp" if dataset == "fashion-mnist" else "lenet"},
        "local": {"epochs": epochs, "batch": 100, "optimizer": "adam", **METHODS[method].get("local", {})},
        "hyper": hyper,
        "rounds": rounds,
        "seed": SEARCH_SEED if seed is None else seed,
        "evaluate": {"every": 10 if seed is not None else rounds, "personal_pooled": "no"},
    }


def result_of(settings: dict[str, Any], device: str, search: bool) -> dict[str, Any]:
    """What the file keeps of a run: of the search the validation score alone; or how the run failed."""
    begin = time.perf_counter()
    kept: dict[str, Any] = {"settings": settings}
    try:
        engine = {"name": "auto", "device": device}
        result = sartor.run(experiment={**settings, "engine": engine}, store=False)
    except (SettingError, DataError):
        raise
    except SartorError as error:
        return {**kept, "failed": str(error), "seconds": time.perf_counter() - begin}
    evaluations = {row["round"]: row["evaluation"] for row in result.rounds if "evaluation" in row}
    last = evaluations[max(evaluations)]
    data = "validation" if search else "local"
    cell = f"personal_{data}" if last.get(f"personal_{data}") else f"shared_{data}"
    kept["cell"] = cell
    if search:
        kept["validation"] = last[cell]["accuracy"]
    else:
        curve = {str(round): cells[cell]["accuracy"] for round, cells in evaluations.items()}
        kept.update(last=last[cell]["accuracy"], best=max(curve.values()), curve=curve)
        kept["worst_decile"] = last[cell]["accuracy_spread"]["worst_decile"]
    return {**kept, "seconds": time.perf_counter() - begin}


def read(path: Path, options: argparse.Namespace) -> Results:
    """The runs of a file, all of them made as they would be made now."""
    results = Results(path)
    for key, value in results.numbers.items():
        try:
            first, second, third, fourth = key.split(" | ")
            asked = (
                (second, third, int(fourth), None, options.search_rounds)
                if first == "search"
                else (first, second, int(third), int(fourth), options.rounds)
            )
            wanted = experiment(options.dataset, *asked)
        except (ValueError, LookupError) as error:
            raise SartorError(
                f"{path}: {key!r} is no run of this script ({error}); give another file"
            ) from None
        other = [name for name in wanted if value["settings"].get(name) != wanted[name]]
        if other:
            name = other[0]
            raise SartorError(
                f"{path}: {key!r} was run with {name} = {value['settings'].get(name)}, and asked for is "
                f"{wanted[name]}; give the options of that run, or another file"
            )
    return results


def chosen(results: Runs, split: str, method: str) -> int | None:
    """The candidate with the best validation score, the first of equals; None without a whole search."""
    tried = [results.get(search_key(split, method, candidate)) for candidate in CANDIDATES]
    # Rounded, so that equal accuracies are equal however their mean was summed.
    scores = [-1.0 if run is None else round(run.get("validation", -1.0), 9) for run in tried]
    return None if None in tried or max(scores) < 0 else scores.index(max(scores))


def setting_text(method: str, candidate: int) -> str:
    """What the candidate has where the method's candidates differ."""
    names = dict.fromkeys(name for change in METHODS[method]["tried"] for name in change)
    values = {name: hyper_of(method, candidate)[name] for name in names}
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, 'g')}" for name, value in values.items()
    )


def final_table(results: Runs) -> str:
    """Markdown: setting, and mean ± standard deviation over the seeds, last round and best round."""
    lines = ["| method | " + " | ".join(f"{split}: setting | last | best" for split in SPLITS) + " |"]
    lines.append("| --- |" + " --- | --- | --- |" * len(SPLITS))
    for method in METHODS:
        cells = []
        for split in SPLITS:
            choice = chosen(results, split, method)
            text = setting_text(method, choice or 0)
            cells.append(text if choice is not None else f"{text} (not searched)")
            start = final_key(split, method, choice or 0, 0).removesuffix("0")
            runs = [run for key, run in results.items() if key.startswith(start)]
            cells += [_over_seeds(runs, "last"), _over_seeds(runs, "best")]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over_seeds(runs: list[dict[str, Any]], figure: str) -> str:
    if not runs:
        return "–"
    if any("failed" in run for run in runs):
        return "failed"
    numbers = [100 * run[figure] for run in runs]
    spread = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else " (one seed)"
    return f"{statistics.mean(numbers):.1f}{spread}"


def search_table(results: Runs) -> str:
    """Markdown: every candidate's accuracy on validation data, the chosen one's in bold."""
    lines = ["| method | split | " + " | ".join(f"candidate {number}" for number in CANDIDATES) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(CANDIDATES))
    for method in METHODS:
        for split in SPLITS:
            cells = []
            if not any(search_key(split, method, candidate) in results for candidate in CANDIDATES):
                continue
            for candidate in CANDIDATES:
                run = results.get(search_key(split, method, candidate))
                score = "–" if run is None else "failed"
                if run is not None and "failed" not in run:
                    score = f"{100 * run['validation']:.1f}"
                if candidate == chosen(results, split, method):
                    score = f"**{score}**"
                cells.append(f"{setting_text(method, candidate)}: {score}")
            lines.append(f"| {method} | {split} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _named(given: str, known: dict[str, Any], option: str) -> list[str]:
    """The names of a list with commas, in the order of this script."""
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            raise SartorError(f"{option}: no {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", default="cifar10", choices=["cifar10", "fashion-mnist"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=100, help="of the final runs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--search", action="store_true", help="try the candidates; no final runs")
    parser.add_argument("--search-rounds", type=int, default=50)
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas; left out: all")
    parser.add_argument("--splits", default=",".join(SPLITS), help="with commas; left out: all")
    parser.add_argument("--json", type=Path, default=Path("diversifed.jsonl"))
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="add these files' runs to --json; run nothing"
    )
    options = parser.parse_args()
    methods = _named(options.methods, METHODS, "--methods")
    splits = _named(options.splits, SPLITS, "--splits")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if SEARCH_SEED in seeds:
        raise SartorError(f"--seeds: {SEARCH_SEED} is the seed of the search; take others for final runs")
    stored = read(options.json, options)
    runs: list[tuple[str, int, str, str, int | None]] = []
    if options.merge:
        for path in options.merge:
            stored.records = {**read(path, options).records, **stored.records}
        stored.write()
    elif options.search:
        for method in methods:
            for split in splits:
                for candidate in CANDIDATES:
                    runs.append((search_key(split, method, candidate), candidate, method, split, None))
    else:
        for seed in seeds:
            for method in methods:
                for split in splits:
                    candidate = chosen(stored.numbers, split, method) or 0
                    key = final_key(split, method, candidate, seed)
                    runs.append((key, candidate, method, split, seed))
    for key, candidate, method, split, own_seed in runs:
        if key in stored.records:
            continue
        rounds = options.search_rounds if own_seed is None else options.rounds
        settings = experiment(options.dataset, split, method, candidate, own_seed, rounds)
        found = result_of(settings, options.device, search=own_seed is None)
        shown = ("validation", "last", "best", "failed", "seconds")
        print(key, {name: found[name] for name in shown if name in found}, flush=True)
        stored.add(key, found, method=method, experiment=settings)
    print(final_table(stored.numbers), search_table(stored.numbers), sep="\n\n")


if __name__ == "__main__":
    try:
        main()
    except SartorError as error:
        sys.exit(str(error))
