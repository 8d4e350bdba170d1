"""``sartor resume``: an interrupted run goes on, a finished one is extended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sartor.commands.base import AsJson, Imports, app, reported
from sartor.commands.run import print_result


@app.command()
@reported
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.", show_default=False)],
    rounds: Annotated[
        int | None, typer.Option(help="Extend the run to so many rounds.", show_default=False)
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its last checkpoint, to the numbers of a run that was never interrupted.

    Code of your own that the run imports is executed again, if it is unchanged; --import says where it lies
    now, if it was moved.

    sartor resume runs/fedavg-digits-s0-12345678

    sartor resume runs/fedavg-digits-s0-12345678 --rounds 50
    """
    from sartor.commands.words import import_words
    from sartor.runs.record import RunFolder, to_json

    import_words(imports)
    folder = RunFolder.open(run)
    if folder.finished and (rounds is None or rounds == folder.experiment.rounds):
        summary = folder.summary
        if summary.get("stopped"):
            state = f"stopped after round {summary['rounds']}"
        else:
            state = f"with {summary['rounds']} rounds; `--rounds` extends it"
        print(f"sartor: {run}: finished, {state}", file=sys.stderr)
    else:
        from sartor.runs.resume import resume

        summary = resume(run, rounds=rounds, progress=True).summary
    if as_json:
        print(to_json(summary))
    else:
        print_result(summary)
        print(f"run folder: {run}")
