"""Pictures of what was measured, for the pages of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row, which share their scales."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "sartor"})
    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def save(figure: Any, name: str) -> None:
    """Write it to the documentation, without the date, so that it changes with its numbers alone."""
    figure.savefig(DOCS / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
