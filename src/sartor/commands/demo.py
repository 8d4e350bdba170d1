"""``make run``: some methods on the embedded digits, as a table and a report.

All of them see the same clients, cohorts and batches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sartor.algorithms import registered
from sartor.report import write_report
from sartor.runs.execute import execute
from sartor.runs.experiment import load

METHODS = (
    *("fedavg", "fedprox", "scaffold", "fedyogi", "prox-yogi", "ma-fsvrg"),
    *("fedupdate", "per-fedavg", "ditto", "fedrep", "spfl", "plga", "diversifed", "separate"),
)
SETTINGS = (
    "data.name=digits",
    "data.clients=20",
    "partition.name=dirichlet",
    "partition.alpha=0.3",
    "local.epochs=2",
    "local.batch=16",
    "rounds=40",
    "evaluate.every=4",
)


def main() -> None:
    """Run these methods, or those named on the command line (``all``: every one); print and report."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title="20 clients with unlike digits (Dirichlet 0.3), 40 rounds, seed 0")
    for column in (
        "method",
        "shared: pooled",
        "shared: own",
        "personal: own",
        "worst decile",
        "MB sent",
        "seconds",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    folders = []
    names = list(registered()) if sys.argv[1:] == ["all"] else sys.argv[1:] or METHODS
    for name in names:
        summary, folder = _run(name)
        folders.append(folder)
        best = summary["last"]["personal_local"] or summary["last"]["shared_local"]
        table.add_row(
            name,
            _percent(summary["accuracy"]["shared_pooled"]),
            _percent(summary["accuracy"]["shared_local"]),
            _percent(summary["accuracy"]["personal_local"]),
            _percent(best["accuracy_spread"]["worst_decile"]),
            f"{(summary['bytes_down'] + summary['bytes_up']) / 1e6:.1f}",
            f"{summary['seconds']:.1f}",
        )
    console.print(table)
    console.print(
        "Accuracies in percent. pooled: on all test data; own: mean over clients on their own test data; "
        "worst decile: of the clients with their own model, or the shared one where there is no other."
    )
    console.print(f"Results: {folders[0].parent}/", *(f"  {folder.name}" for folder in folders), sep="\n")
    path = write_report(folders, folders[0].parent / "report.html")
    console.print(f"Report: {path} (open it in a browser)", soft_wrap=True)


def _run(name: str) -> tuple[dict[str, Any], Path]:
    """A method's run; one that was finished earlier with the same settings is made again beside it."""
    result = execute(load(None, SETTINGS, algorithm=name), progress=True)
    assert result.folder is not None
    return result.summary, result.folder


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
