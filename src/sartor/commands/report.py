"""``sartor report``: run folders as one HTML page, and as figures for paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sartor.commands.base import app, reported


class Format(StrEnum):
    """What figures are written as."""

    png = "png"
    pdf = "pdf"


@app.command()
@reported
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, or folders that hold some, such as a comparison's."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Also write every figure to this folder.", show_default=False)
    ] = None,
    format: Annotated[Format, typer.Option(help="What the figures are written as.")] = Format.png,
) -> None:
    """Write a report of runs: one HTML file that opens anywhere.

    sartor report runs/* --out report.html

    sartor report runs/* --figures figures --format pdf
    """
    from sartor.report import write_report

    path = write_report(runs, out, figures=figures, format=format.value)
    print(f"report: {path}")
    if figures is not None:
        print(f"figures: {figures}")
