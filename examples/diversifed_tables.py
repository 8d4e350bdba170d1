"""The tables of DiversiFed's paper: twelve methods on two splits, each client's model on its own test data.

    python examples/diversifed_tables.py --dataset cifar10 --device cuda --seeds 2 --json out.json

40 clients with 500 training and 100 test samples each (Fashion-MNIST: 300), 10 local epochs, batches of 100,
Adam with rate 0.001. Every method makes as many gradient evaluations per round as the others: pFedMe's inner
steps and FedRep's two phases are counted. The file is written after each run, and runs that it holds already
are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import sartor

SPLITS: dict[str, dict[str, Any]] = {
    "pathological": {"name": "classes", "k": 2},
    "dirichlet 0.1": {"name": "dirichlet", "by": "client", "alpha": 0.1},
}
SGD = {"optimizer": "sgd"}
METHODS: dict[str, dict[str, Any]] = {
    "separate": {"hyper": {"lr": 0.001}},
    "fedavg": {"hyper": {"lr": 0.001}},
    "per-fedavg": {"hyper": {"lr": 0.01, "alpha": 0.01, "variant": "fo"}, "local": SGD},
    "pfedme": {"hyper": {"lr": 0.01, "personal_lr": 0.01, "lam": 15.0}, "local": {**SGD, "epochs": 2}},
    "fedamp": {"hyper": {"lr": 0.001}},
    "fedfomo": {"hyper": {"lr": 0.001}, "data": {"validation": 0.2}},
    "apple": {"hyper": {"lr": 0.01}, "local": SGD},
    "fedrep": {"hyper": {"lr": 0.001, "head_epochs": 5}, "local": {"epochs": 5}},
    "fedproto": {"hyper": {"lr": 0.001, "alignment": 1.0}},
    "fedrod": {"hyper": {"lr": 0.001}},
    "fedcac": {"hyper": {"lr": 0.001}},
    "diversifed": {"hyper": {"lr": 0.001, "lam": 2.0}},
    "diversifed, lam 0.2": {"algorithm": "diversifed", "hyper": {"lr": 0.001, "lam": 0.2}},
}


def experiment(
    dataset: str, split: str, label: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The settings of one run, as :func:`sartor.run` takes them."""
    method = METHODS[label]
    train = 300 if dataset == "fashion-mnist" else 500
    local = {"epochs": 10, "batch": 100, "optimizer": "adam", **method.get("local", {})}
    return {
        "algorithm": method.get("algorithm", label),
        "data": {"name": dataset, "clients": 40, **method.get("data", {})},
        "partition": {**SPLITS[split], "train": train, "test": 100},
        "model": {"name": "mlp" if dataset == "fashion-mnist" else "lenet"},
        "local": local,
        "hyper": method["hyper"],
        "rounds": options.rounds,
        "seed": seed,
        "evaluate": {"every": 10, "personal_pooled": "no"},
        "engine": {"name": "auto", "device": options.device},
    }


def result_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The last and the best accuracy, of the personal models where there are any."""
    begin = time.perf_counter()
    result = sartor.run(experiment=settings, store=False)
    cell = "personal_local" if result.summary["last"]["personal_local"] else "shared_local"
    curve = {
        row["round"]: row["evaluation"][cell]["accuracy"] for row in result.rounds if "evaluation" in row
    }
    return {
        "cell": cell,
        "last": curve[max(curve)],
        "best": max(curve.values()),
        "curve": curve,
        "worst_decile": result.summary["last"][cell]["accuracy_spread"]["worst_decile"],
        "seconds": time.perf_counter() - begin,
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: mean ± standard deviation over the seeds, last round and best round."""
    columns = sorted({key.split(" | ")[0] for key in results}, reverse=True)
    lines = ["| method | " + " | ".join(f"{name}, last | best" for name in columns) + " |"]
    lines.append("| --- |" + " --- | --- |" * len(columns))
    for label in METHODS:
        cells = []
        for column in columns:
            found = [value for key, value in results.items() if key.startswith(f"{column} | {label} | ")]
            for figure in ("last", "best"):
                numbers = [100 * value[figure] for value in found]
                spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
                cells.append(f"{statistics.mean(numbers):.1f} ± {spread:.1f}" if numbers else "–")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", default="cifar10", choices=["cifar10", "fashion-mnist"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(name for name in METHODS if "," not in name))
    parser.add_argument("--json", type=Path, default=Path("diversifed.json"))
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    labels = [label for label in METHODS if label in options.methods.split(",") or "," in label]
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for label in labels:
            for split in SPLITS:
                key = f"{split} | {label} | {seed}"
                if key in results:
                    continue
                results[key] = result_of(experiment(options.dataset, split, label, seed, options))
                print(key, {name: results[key][name] for name in ("last", "best", "seconds")}, flush=True)
                options.json.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
