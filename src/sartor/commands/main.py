"""The command line. The commands are in :mod:`sartor.commands`; importing one registers it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from sartor import __version__
from sartor.commands import (
    algorithms,
    compare,
    data,
    deploy,
    evaluate,
    export,
    models,
    report,
    reproduce,
    resume,
    run,
    search,
    settings,
    watch,
)
from sartor.commands.base import app

__all__ = [
    "algorithms",
    "app",
    "compare",
    "data",
    "deploy",
    "evaluate",
    "export",
    "main",
    "models",
    "report",
    "reproduce",
    "resume",
    "run",
    "search",
    "settings",
    "watch",
]


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without η shall show something else, not end the run
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - of the processes of one run the first one prints
    app(prog_name="sartor")


def _show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"sartor {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""
