"""``sartor evaluate``: a run's models on its own clients or on newcomers, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sartor.commands.base import AsJson, Imports, app, reported
from sartor.commands.run import print_cells
from sartor.errors import SettingError


@app.command()
@reported
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.", show_default=False)],
    data: Annotated[
        Path | None,
        typer.Option(help="Newcomers: a folder, a table or a function as in data.path.", show_default=False),
    ] = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="Newcomers: a stored partition of the run's data set.", show_default=False),
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's last models without training, by default on its own clients.

    Newcomers never took part; each gets a model the way the method gives one to such a client.

    sartor evaluate runs/fedupdate-digits-s0-12345678 --partition others.npz
    """
    if data is not None and partition is not None:
        raise SettingError("give --data or --partition, not both")
    from sartor.commands.words import import_words
    from sartor.runs.newcomers import evaluate_run
    from sartor.runs.record import to_json

    import_words(imports)
    summary = evaluate_run(run, data=data, partition=partition)
    if as_json:
        print(to_json(summary))
        return
    print_cells(summary)
    who = "newcomers" if summary["newcomers"] else "clients"
    size = f"{summary['clients']} {who} after round {summary['rounds']}"
    print(f"{summary['algorithm']} on {summary['data']}: {size}")
