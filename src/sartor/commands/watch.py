"""``sartor watch``: runs while they go, as a page of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sartor.commands.base import app, reported


@app.command()
@reported
def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, or folders that hold some: a comparison's, or runs.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0: one that is free.")
    ] = 0,
) -> None:
    """Show runs while they go: curves, clients that are not heard of, and the time left, until Ctrl-C.

    The page is for this machine alone, at an address with a secret in it, and reads the run folders.

    sartor watch runs

    sartor watch comparisons/digits-12345678 --port 8080
    """
    from sartor.report.watch import Watch

    page = Watch(runs, port)
    print(f"watch: {page.address}", flush=True)
    try:
        page.serve()
    except KeyboardInterrupt:
        return
