"""Run folders with everything a report can show, written as a run writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sartor.data.partitions import make_partition
from sartor.runs.experiment import from_mapping
from sartor.runs.record import RunFolder
from sartor.runs.seals import BLANK, sealed

NAMES = ("north", "south", "<script>window.hurt = 1</script>", "<a href='https://example.org'>x</a> & $y$")


def cell(accuracy: float, loss: float) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "loss": loss,
        "accuracy_weighted": accuracy,
        "accuracy_spread": {"worst_decile": accuracy / 2, "deviation": 0.1, "minimum": 0.0, "maximum": 1.0},
    }


def store_run(
    path: Path,
    algorithm: str = "fedavg",
    seed: int = 0,
    accuracies: Sequence[float] = (0.25, 0.5),
    *,
    personal: bool = False,
    names: Sequence[str] = NAMES,
    rows: Sequence[dict[str, Any]] | None = None,
    finished: bool = True,
    partition: bool = True,
    **sections: Any,
) -> Path:
    """A stored run that evaluated to these accuracies, one per round; losses are 1 − accuracy.

    Client i of n has the accuracy of the round times (i + 1) / n. ``rows`` adds to what the rounds hold.
    """
    experiment = from_mapping({"algorithm": algorithm, "seed": seed, "rounds": len(accuracies), **sections})
    kinds = ["shared_pooled", "shared_local", *(["personal_local"] if personal else [])]
    count = len(names)
    with RunFolder.create(path, experiment) as folder:
        if partition:
            labels = np.repeat(np.arange(3), 20)
            made = make_partition(labels, {"name": "classes", "k": 2}, clients=count, seed=seed)
            folder.write_partition(replace(made, names=tuple(names)))
        for round, accuracy in enumerate(accuracies, 1):
            extra = rows[round - 1] if rows else {}
            folder.add_round(
                {
                    "round": round,
                    "cohort": count,
                    "answered": count,
                    "seconds": 0.5,
                    "bytes_down": 1000,
                    "bytes_up": 500,
                    "evaluation": {kind: cell(accuracy, 1 - accuracy) for kind in kinds},
                    **extra,
                }
            )
            each = [accuracy * (place + 1) / count for place in range(count)]
            columns = {"round": [round] * count, "client": list(names)}
            for kind in kinds[1:]:
                columns |= {f"{kind}_accuracy": each, f"{kind}_loss": [1 - value for value in each]}
            folder.add_clients(columns)
        folder.close()
        if finished:
            folder.write_summary(
                {"algorithm": algorithm, "data": "digits", "partition_hash": "h", "last": {}}
            )
    return path


def rewrite(run: Path, old: str, new: str) -> None:
    """Let a run have recorded other rounds."""
    lines = (run / "rounds.jsonl").read_text().replace(old, new).splitlines(keepends=True)
    blank = [re.sub(r"crc32:\w{8}", BLANK, line) for line in lines]
    (run / "rounds.jsonl").write_bytes(b"".join(sealed(line.encode()) for line in blank))


def everything(folder: Path) -> list[Path]:
    """Runs of five methods, two of them under two seeds, that have recorded all that is ever drawn."""
    similar = [[1.0, 0.5, 0.25, 0.0], [0.5, 1.0, 0.5, 0.25], [0.25, 0.5, 1.0, 0.5], [0.0, 0.25, 0.5, 1.0]]
    signed = [[0.0, 0.5, -0.25, 0.0], [0.5, 0.0, 0.0, 0.0], [-0.25, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    halved = [[value / 2 for value in row] for row in signed]
    return [
        store_run(folder / "a0", "fedavg", 0, (0.2, 0.6)),
        store_run(folder / "a1", "fedavg", 1, (0.4, 0.8)),
        store_run(folder / "b0", "fedupdate", 0, (0.3, 0.9), personal=True),
        store_run(folder / "b1", "fedupdate", 1, (0.3, 0.9), personal=True),
        store_run(
            folder / "grouping",
            "fsvrg",
            0,
            (0.1, 0.00001),
            rows=[
                {"observed": {"clients": [0, 1, 2, 3], "groups": [0, 0, 1, 1]}},
                {"observed": {"clients": [0, 2, 3], "groups": [1, 1, 0]}},
            ],
        ),
        store_run(
            folder / "similar",
            "moon",
            0,
            (0.3, 0.4),
            rows=[
                {"observed": {"similarity_conv1": similar, "similarity_output": similar}},
                {
                    "observed": {
                        "similarity_conv1": [row[::-1] for row in similar],
                        "similarity_output": similar,
                    }
                },
            ],
        ),
        store_run(
            folder / "pulled",
            "separate",
            0,
            (0.3, 0.7),
            rows=[
                {
                    "observed": {"coefficients": signed, "attracted": 0.5, "mean_distance": 2.0},
                    "time": 1.5,
                    "arrivals": [[0, 0.0, 1.0, 0, 0], [2, 0.25, 1.5, 0, 1]],
                },
                {
                    "observed": {"coefficients": halved, "attracted": 0.25, "mean_distance": 1.0},
                    "time": 4.0,
                    "arrivals": [[1, 0.5, 4.0, 0, 2]],
                },
            ],
        ),
    ]
