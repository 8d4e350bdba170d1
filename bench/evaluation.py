"""What evaluation takes beside training, as a ratio, with ``evaluate.every = 1``: now, and model by model.

    python bench/evaluation.py [--device cuda] [--rounds 12] [--only WORKLOAD] [--now] [--json FILE]

``one by one`` asks as if nobody knew of another question: every cell makes its models anew, every client's
model goes through the pooled test data, and clients are evaluated all at once whatever a cache holds. Both
ways evaluate the same models after the same rounds of the same run, and their counts are compared. Seconds
are of the process's own CPU time on a CPU, so that other work on the machine counts little; the first third
of the rounds warms up. ``--now`` leaves out the models one by one. MNIST is read from the folder that
SARTOR_DATA names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import sartor
from sartor.engines.samples import Samples
from sartor.engines.stacked import engine as stacked
from sartor.federation.exchange import Call
from sartor.runs import evaluation
from sartor.runs.evaluation import Cell
from sartor.runs.run import Run
from sartor.studies.presets import path

MNIST = {"name": "mnist", "clients": 100}
DRAWN = {"cohort": {"fraction": 0.1}, "partition": {"name": "dirichlet", "alpha": 0.3}}
LEARNS = {"local": {"epochs": 1, "batch": 10}, "hyper": {"lr": 0.05}}
WORKLOADS: dict[str, dict[str, Any]] = {
    "ma-fsvrg, 400 clients, pooled too": {"experiment": path("tailored/groups"), "pooled": "auto"},
    "ma-fsvrg, 400 clients": {"experiment": path("tailored/groups"), "pooled": "no"},
    "spfl table 1": {"experiment": path("spfl/table1"), "pooled": "auto"},
    "comfed on digits": {"experiment": path("comfed/digits"), "pooled": "auto"},
    "fedavg, CNN, 100 clients": {
        "algorithm": "fedavg",
        "experiment": {"data": MNIST, "model": {"name": "cnn"}, **DRAWN, **LEARNS},
        "pooled": "auto",
    },
    "ditto, softmax, 100 clients": {
        "algorithm": "ditto",
        "experiment": {"data": MNIST, "model": {"name": "softmax"}, **DRAWN, **LEARNS},
        "pooled": "auto",
    },
}


def one_by_one(run: Run) -> dict[str, Cell]:
    """All cells, each model and split asked for by itself, of every client."""
    federation, settings, server = run.federation, run.experiment.evaluate, run.server
    clients = evaluation.evaluated_clients(federation, settings)
    what = evaluation.measured_in(federation, settings)

    def cell(call: Call, numbers: np.ndarray, split: str) -> Cell:
        return evaluation.cell_of(evaluation._answers(federation, call, numbers, (split,), what)[split], what)

    cells: dict[str, Cell] = {}
    models = run.algorithm.shared(server)
    if models is not None:
        rows = models[None] if models.dim() == 1 else models
        pooled = [cell(Call(evaluation.shared_model, {"w": w}), clients[:1], "pooled") for w in rows]
        best = max(range(len(rows)), key=lambda place: (evaluation.rank(pooled[place]), -place))
        cells["shared_pooled"] = pooled[best]
        cells["shared_local"] = cell(Call(evaluation.shared_model, {"w": rows[best]}), clients, "test")
    personal = evaluation.personal_models(run.algorithm, server, clients)
    if personal is not None:
        cells["personal_local"] = cell(personal, clients, "test")
        if evaluation._worth_pooling(federation, settings, len(clients)):
            cells["personal_pooled"] = cell(personal, clients, "pooled")
    return cells


class Watch(sartor.Observer):
    """What training and both ways of evaluation took in every round."""

    def __init__(self, now: bool, device: str) -> None:
        self.now = now
        self.clock = time.process_time if device == "cpu" else time.perf_counter
        self.taken: dict[str, list[float]] = {"training": [], "evaluation": [], "one by one": []}
        self._begin = 0.0

    def start(self, run: Run) -> None:
        """The first round begins; every evaluation is made twice."""
        plain = run.evaluate

        def both() -> dict[str, Any]:
            self._note("training", run)
            cells = plain()
            self._note("evaluation", run)
            if self.now:
                return cells
            with plainly():
                found = one_by_one(run)
            self._note("one by one", run)
            for name, cell in found.items():
                told, same = cells[name]["accuracy"], cell.summary()["accuracy"]
                assert told == same, f"{name}: {told} together, {same} one by one"
            return cells

        run.evaluate = both  # type: ignore[method-assign]
        self._begin = self.clock()

    def round(self, run: Run, row: Any) -> None:
        """The next one begins."""
        self._begin = self.clock()

    def _note(self, what: str, run: Run) -> None:
        run.wait()
        now = self.clock()
        self.taken[what].append(now - self._begin)
        self._begin = now


@contextmanager
def plainly() -> Iterator[None]:
    """Evaluation of all clients at once, each with samples of its own."""
    kept = stacked.CACHED, Samples.common, Samples.in_a_row
    stacked.CACHED = 1 << 62
    Samples.common = lambda *_: False  # type: ignore[method-assign]
    Samples.in_a_row = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        stacked.CACHED, Samples.common, Samples.in_a_row = kept  # type: ignore[method-assign]


def measure(workload: dict[str, Any], rounds: int, now: bool, device: str) -> dict[str, float]:
    """Median seconds a round of training and of evaluation, and the ratios."""
    watch = Watch(now, device)
    sartor.run(
        workload.get("algorithm"),
        experiment=workload["experiment"],
        rounds=rounds,
        device=device,
        evaluate={"every": 1, "personal_pooled": workload["pooled"]},
        store=False,
        observers=[watch],
    )
    found = {name: statistics.median(taken[rounds // 3 :]) for name, taken in watch.taken.items() if taken}
    found["ratio"] = found["evaluation"] / found["training"]
    found["ratio one by one"] = found.get("one by one", np.nan) / found["training"]
    return found


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=list(WORKLOADS))
    parser.add_argument("--now", action="store_true", help="leave out the models one by one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    print(f"{'evaluation / training':36} {'training':>9} {'evaluation':>11} {'ratio':>7} {'one by one':>11}")
    for name in [options.only] if options.only else WORKLOADS:
        row = found[name] = measure(WORKLOADS[name], options.rounds, options.now, options.device)
        seconds = f"{row['training']:7.3f} s {row['evaluation']:9.3f} s"
        print(f"{name:36} {seconds} {row['ratio']:7.2f} {row['ratio one by one']:11.2f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
