"""Seeds of one experiment belong together, whatever each has learned from its training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_runs import store_run

from sartor.report.runs import read


def stored(path: Path, algorithm: str, seed: int, centre: float, kind: str = "standard") -> Path:
    columns: dict[str, Any] = {
        "age": {"scale": kind, **({"centre": centre, "spread": 2.0} if kind == "standard" else {})},
        "ill": "label",
    }
    return store_run(path, algorithm, seed, data={"path": "t.csv"}, columns=columns)


def test_what_is_learned_does_not_part_the_seeds_of_a_method(tmp_path: Path) -> None:
    for seed in (0, 1):
        for algorithm in ("fedavg", "separate"):
            stored(tmp_path / f"{algorithm}{seed}", algorithm, seed, 50.0 + seed)
    material = read([tmp_path])
    assert [(group.label, len(group.runs)) for group in material.groups] == [("fedavg", 2), ("separate", 2)]
    assert not any("same seeds" in note for note in material.notes)


def test_what_is_said_does(tmp_path: Path) -> None:
    stored(tmp_path / "a", "fedavg", 0, 50.0)
    stored(tmp_path / "b", "fedavg", 0, 50.0, "none")
    stored(tmp_path / "c", "fedavg", 0, 60.0)  # of the same rows: it was said
    assert len(read([tmp_path]).groups) == 3
