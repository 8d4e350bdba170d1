"""The command line. The commands are in :mod:`sartor.commands`; importing one registers it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sartor.commands import data, lists, run
from sartor.commands.base import app

__all__ = ["app", "data", "lists", "main", "run"]


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without η shall show something else, not end the run
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="sartor")


def _show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from sartor.record import environment

        print(f"sartor {environment()['sartor']}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""
