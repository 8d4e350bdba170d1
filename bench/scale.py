"""Cost of a round, of starting up and of memory as the number of registered clients grows a thousandfold.

    python bench/scale.py [--clients 1000 1000000] [--rounds 50] [--device cuda] [--json FILE]

SCAFFOLD, which keeps a state of the model's size at every client, on softmax regression (576 features, 10
classes), 100 clients a round of 20 samples each, with run folder, checkpoints and evaluation. The clients'
samples are drawn when they are asked for and not remembered, so that every round of every size has the same
to do. Every size runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
SIZES = (1_000, 10_000, 100_000, 1_000_000)
COHORT, SAMPLES, FEATURES, CLASSES = 100, 20, 576, 10
WARM_UP = 3
"""Rounds that trace, compile and capture, and are not counted."""
GOALS = {"ratio": 1.3, "megabytes": 2000, "start_seconds": 30}


def measure(clients: int, rounds: int, device: str) -> dict[str, Any]:
    """One size, in this process."""
    import numpy as np

    import sartor
    from sartor.data import lazy_clients

    centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES), dtype=np.float32) / 8

    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(client)
        y = generator.integers(0, CLASSES, SAMPLES + 5)
        return centres[y] + generator.standard_normal((SAMPLES + 5, FEATURES), dtype=np.float32), y

    data = lazy_clients(clients, fetch, n_train=SAMPLES, n_test=5, classes=CLASSES, cache_bytes=0)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        result = sartor.run(
            "scaffold",
            data=data,
            model="softmax",
            rounds=WARM_UP + rounds,
            out=Path(folder, "run"),
            device=device,
            cohort={"count": COHORT},
            local={"batch": 10},
            evaluate={"every": 0, "clients": COHORT},
        )
        whole = time.perf_counter() - begin
        stored = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    seconds = [row["seconds"] for row in result.rounds[WARM_UP:]]
    return {
        "clients": clients,
        "seconds_per_round": statistics.median(seconds),
        "fastest_round": min(seconds),
        "seconds_in_all": result.summary["seconds"],
        "start_seconds": begin - STARTED + whole - result.summary["seconds"],
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "run_folder_megabytes": stored / 1e6,
        "accuracy": result.summary["accuracy"]["shared_pooled"],
    }


def main() -> None:
    """Measure every size in turn and compare the largest with the smallest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="*", default=SIZES)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rounds, arguments.device)))
        return
    from rich.console import Console
    from rich.table import Table

    results = []
    heads = ("clients", "ms / round", "fastest", "ratio", "start-up, s", "peak MB", "run folder, MB")
    table = Table(*heads, title=f"SCAFFOLD, {COHORT} clients a round, {arguments.device}")
    for clients in arguments.clients:
        options = ["--one", str(clients), "--rounds", str(arguments.rounds), "--device", arguments.device]
        done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        result["ratio"] = result["seconds_per_round"] / (results or [result])[0]["seconds_per_round"]
        results.append(result)
        table.add_row(
            f"{clients:,}",
            f"{result['seconds_per_round'] * 1e3:.1f}",
            f"{result['fastest_round'] * 1e3:.1f}",
            f"{result['ratio']:.2f}",
            f"{result['start_seconds']:.1f}",
            f"{result['megabytes']:.0f}",
            f"{result['run_folder_megabytes']:.1f}",
        )
    console = Console(width=110)
    console.print(table)
    for name, most in GOALS.items():
        met = "met" if results[-1][name] <= most else "MISSED"
        console.print(f"{name} of the largest: {results[-1][name]:.2f}, at most {most}: {met}")
    print(json.dumps(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
