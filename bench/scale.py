"""Cost of a round, of starting up and of memory as the number of registered clients grows a thousandfold.

    python bench/scale.py [--clients 1000 1000000] [--rounds 50] [--device cuda] [--json FILE]
    python bench/scale.py --ranks 1 4 [--clients 1000000] [--cohort 100] [--rounds 120] [--features 8192]
    python bench/scale.py --plays 100 [--clients 100000000] [--cohort 10000] [--features 576] [--rounds 3]

SCAFFOLD, which keeps a state of the model's size at every client, on softmax regression (576 features, 10
classes), 100 clients a round of 20 samples each, with run folder, checkpoints and evaluation. The clients'
samples are drawn when they are asked for and not remembered, so that every round of every size has the same
to do. Every size runs in a process of its own.

With ``--ranks`` the loop engine over so many processes that torchrun starts, one step of four samples at
every client, with the clients' states in memory and no run folder: the peak of the largest process, and
whether the final model is the same to the bit. What a process takes before the run (Python, PyTorch, the
data) is given apart.

With ``--plays`` one process does what the first of so many would do: the clients at home there, and the
server's work with the replies of all, of which the others' are copies of its own. So memory and time of one
of a hundred processes are measured without the others, all but the exchange itself.
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


def drawn(clients: int, features: int = FEATURES, samples: int = SAMPLES) -> Any:
    """Clients whose samples are drawn when they are asked for."""
    import numpy as np

    from sartor.data import lazy_clients

    centres = np.random.default_rng(0).standard_normal((CLASSES, features), dtype=np.float32) / 8

    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(client)
        y = generator.integers(0, CLASSES, samples + 5)
        return centres[y] + generator.standard_normal((samples + 5, features), dtype=np.float32), y

    return lazy_clients(clients, fetch, n_train=samples, n_test=5, classes=CLASSES, cache_bytes=0)


def peak_megabytes() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure_rank(arguments: argparse.Namespace) -> None:
    """One of several processes of a run: what it took, in a file of its own."""
    import torch

    import sartor
    from sartor.engines import sharded

    torch.set_num_threads(1)
    data = drawn(arguments.one, arguments.features, samples=4)
    before = peak_megabytes()
    result = sartor.run(
        "scaffold",
        data=data,
        model="softmax",
        rounds=arguments.rounds,
        store=False,
        cohort={"count": arguments.cohort},
        local={"batch": 10},
        evaluate={"every": 0, "clients": COHORT, "personal_models": "no"},
        engine={"name": "loop", "states": "memory", "workers": 1},
    )
    found = {
        "rank": sharded.rank(),
        "before_megabytes": before,
        "megabytes": peak_megabytes(),
        "seconds_per_round": statistics.median(row["seconds"] for row in result.rounds[1:]),
        "model": result.summary["model_sha256"],
    }
    Path(arguments.out, f"{sharded.rank()}.json").write_text(json.dumps(found), encoding="utf-8")


def compare_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same run over each number of processes."""
    results = []
    state = (arguments.features + 1) * CLASSES * 4
    clients = arguments.clients[-1]
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            options = [f"--{name}={getattr(arguments, name)}" for name in ("rounds", "cohort", "features")]
            mine = [__file__, "--one", str(clients), "--out", folder, *options]
            subprocess.run([sys.executable, *launcher, *mine], check=True)
            each = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).iterdir())]
        largest = max(each, key=lambda one: one["megabytes"])
        results.append({"ranks": ranks, "clients": clients, "state_bytes": state, **largest, "each": each})
    return results


def shown_ranks(results: list[dict[str, Any]]) -> Any:
    """A table of :func:`compare_ranks`."""
    from rich.table import Table

    heads = ("ranks", "ms / round", "before, MB", "peak MB", "the run's MB", "ratio", "same bits")
    table = Table(*heads, title=f"SCAFFOLD, {results[0]['clients']:,} clients, the largest process")
    for result in results:
        taken = [one["megabytes"] - one["before_megabytes"] for one in (results[0], result)]
        table.add_row(
            str(result["ranks"]),
            f"{result['seconds_per_round'] * 1e3:.0f}",
            f"{result['before_megabytes']:.0f}",
            f"{result['megabytes']:.0f}",
            f"{taken[1]:.0f}",
            f"{taken[1] / taken[0]:.2f}",
            "yes" if {one["model"] for one in result["each"]} == {results[0]["model"]} else "NO",
        )
    return table


def play(ranks: int, clients: int, cohort: int, features: int, rounds: int) -> dict[str, Any]:
    """What the first of so many processes takes; the others are played by copies."""
    import numpy as np
    from torch import Tensor, nn

    import sartor.engines
    from sartor.algorithms import make, registered
    from sartor.client.settings import Local
    from sartor.engines import make_federation, sharded
    from sartor.federation.settings import Cohort
    from sartor.model.task import Task
    from sartor.runs.loop import draw_cohort

    exchanged: list[int] = []

    def everyone(mine: Tensor) -> Tensor:
        exchanged.append(mine.nbytes * ranks)
        return mine[None].repeat(ranks, *[1] * mine.dim())

    def received(piece: Tensor, rank: int) -> None:
        exchanged.append(piece.nbytes)  # it holds what this process has sent

    sharded.world = sartor.engines.world = lambda: ranks
    sharded._everyone, sharded._broadcast = everyone, received
    begin = time.perf_counter()
    data = drawn(clients, features)
    task = Task(nn.Linear(features, CLASSES), classes=CLASSES)
    algorithm = make(registered()["scaffold"])
    made = make_federation(
        "stacked",
        task,
        data,
        local=Local(batch=10),
        hyper=algorithm.hyper,
        states="memory",
        method="scaffold",
    )
    server = algorithm.start(made)
    start_seconds, before = time.perf_counter() - begin, peak_megabytes()
    seconds, at_home = [], []
    drawing = Cohort(count=cohort)
    for made.round in range(1, rounds + 1):
        numbers = draw_cohort(0, made.round, clients, drawing)
        at_home.append(len(made.engine.homes.here(numbers)))
        exchanged.clear()
        begin, busy = time.perf_counter(), time.process_time()
        server = algorithm.round(server, made, np.asarray(numbers))
        seconds.append([time.perf_counter() - begin, time.process_time() - busy])
    return {
        "ranks": ranks,
        "clients": clients,
        "cohort": cohort,
        "state_bytes": task.size * 4,
        "clients_at_home": made.engine.homes.count,
        "of_the_cohort": at_home,
        "start_seconds": start_seconds,
        "before_megabytes": before,
        "megabytes": peak_megabytes(),
        "seconds_and_cpu_seconds": seconds,
        "exchanged_bytes": sum(exchanged),
    }


def measure(clients: int, rounds: int, device: str) -> dict[str, Any]:
    """One size, in this process."""
    import sartor

    data = drawn(clients)
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
        "megabytes": peak_megabytes(),
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
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of processes to run it over")
    parser.add_argument("--plays", type=int, help="be the first of so many processes")
    parser.add_argument("--cohort", type=int, default=COHORT, help="clients a round, with --ranks or --plays")
    parser.add_argument("--features", type=int, default=8192, help="of a sample, likewise")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        measure_rank(arguments)
        return
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rounds, arguments.device)))
        return
    from rich.console import Console
    from rich.table import Table

    if arguments.plays:
        options = {name: getattr(arguments, name) for name in ("cohort", "features", "rounds")}
        print(json.dumps(play(arguments.plays, arguments.clients[-1], **options)))
        return
    if arguments.ranks:
        compared = compare_ranks(arguments)
        Console(width=110).print(shown_ranks(compared))
        print(json.dumps(compared))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(compared, indent=1), encoding="utf-8")
        return
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
