"""PFLlib's own server and clients, from a checkout of its source.

    PYTHONPATH=bench python -m peers.by_pfllib mlp --path PFLlib

Its server is trained as its ``main.py`` does, with the workload's network and data, and tells how long a
round took by itself; before its first round it evaluates, which belongs to the warm-up. Clients read their
samples from a file in every round, as always there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from peers.network import accuracy, module, waiter
from peers.workload import WORKLOADS, Clock, Samples, Workload, arguments, report, samples, versions


class Budget(list[float]):
    """PFLlib's list of seconds, one for each round, which ticks when one is added."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def append(self, seconds: float) -> None:
        super().append(seconds)
        self.clock.tick()


def write(data: Samples, folder: Path) -> None:
    """The clients' files, as PFLlib's generators write them."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
    tests = np.array_split(np.arange(len(data.y_test)), len(data.y))
    for number, (x, y, rows) in enumerate(zip(data.x, data.y, tests, strict=True)):
        parts = {"train": (x, y), "test": (data.x_test[rows], data.y_test[rows])}
        for part, (inputs, labels) in parts.items():
            np.savez_compressed(folder / part / f"{number}.npz", data={"x": inputs, "y": labels})


def settings(workload: Workload, rounds: int, device: str) -> SimpleNamespace:
    """What PFLlib's server reads, with its own defaults where the workload has no say."""
    return SimpleNamespace(
        algorithm="FedAvg",
        dataset="peers",
        model=module(workload).to(device),
        device=device,
        num_classes=10,
        global_rounds=rounds - 1,  # it does one more
        local_epochs=workload.epochs,
        batch_size=workload.batch,
        local_learning_rate=workload.lr,
        learning_rate_decay=False,
        learning_rate_decay_gamma=0.99,
        num_clients=workload.clients,
        join_ratio=workload.drawn / workload.clients,
        random_join_ratio=False,
        few_shot=0,
        time_select=False,
        goal="peers",
        time_threthold=10_000,
        save_folder_name="items",
        top_cnt=100,
        auto_break=False,
        eval_gap=10**6,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        dlg_eval=False,
        dlg_gap=100,
        batch_num_per_client=2,
        num_new_clients=0,
        fine_tuning_epoch_new=0,
    )


def commit(checkout: Path) -> str:
    """Which PFLlib it is: it has no releases. A copy without its history has a file that says so."""
    noted = checkout / "COMMIT"
    if noted.exists():
        return noted.read_text(encoding="utf-8").strip()[:12]
    asked = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def train(workload: Workload, asked: argparse.Namespace, clock: Clock) -> Any:
    from flcore.servers.serveravg import FedAvg  # PFLlib's

    server = FedAvg(settings(workload, asked.warm_up + asked.rounds, asked.device), 0)
    server.Budget = Budget(clock)
    clock.tick()
    server.train()
    return server.global_model


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--path", type=Path, required=True, help="a checkout of PFLlib")
    asked = parser.parse_args()
    checkout = asked.path.resolve()
    sys.path.insert(0, str(checkout / "system"))
    workload = WORKLOADS[asked.workload]
    clock, data = Clock(waiter(asked.device)), samples(workload)
    with tempfile.TemporaryDirectory() as place:
        write(data, Path(place) / "dataset" / "peers")
        (Path(place) / "system").mkdir()
        os.chdir(Path(place) / "system")
        model = train(workload, asked, clock)
        os.chdir("/")
    report("PFLlib", clock, asked, accuracy(model, data), {**versions("torch"), "pfllib": commit(checkout)})


if __name__ == "__main__":
    main()
