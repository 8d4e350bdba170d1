"""``sartor run``: an experiment from words and files, carried out and stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.commands.base import AsJson, Clients, Seed, app, print_table, reported, sort_out, text
from sartor.errors import SettingError


@app.command()
@reported
def run(
    algorithm: Annotated[
        str,
        typer.Argument(metavar="ALGORITHM", help="The algorithm; left out, the experiment file names it."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT.toml|PRESET|KEY=VALUE",
            help="An experiment file or a preset such as comfed/digits, and settings that win over it.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data set (data.name).", show_default=False)] = None,
    clients: Clients = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds (rounds).", show_default=False)] = None,
    seed: Seed = None,
    engine: Annotated[
        str | None, typer.Option(help="auto, loop or stacked (engine.name).", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda (engine.device).", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; left out: a new one in runs/.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and store it in a run folder.

    sartor run fedavg

    sartor run fedprox experiment.toml --rounds 50 hyper.mu=0.1 partition.alpha=0.3
    """
    from sartor import presets
    from sartor.experiment import load
    from sartor.record import to_json

    words, overrides = sort_out([algorithm, *(arguments or ())])
    files = [word for word in words if word.endswith(".toml") or word in presets.names()]
    names = [word for word in words if word not in files]
    if not words:
        raise SettingError("name an algorithm or an experiment file, as in `sartor run fedavg`")
    if len(files) > 1 or len(names) > 1:
        extra = (files if len(files) > 1 else names)[1]
        raise SettingError(
            f"{extra!r}: expected one algorithm, one experiment (a .toml file or a preset), and key=value"
        )
    flags = {
        "algorithm": names[0] if names else None,
        "rounds": rounds,
        "seed": seed,
        "data.name": data,
        "data.clients": clients,
        "engine.name": engine,
        "engine.device": device,
    }
    files = [str(presets.path(file)) if file in presets.names() else file for file in files]
    experiment = load(files[0] if files else None, overrides, **flags)
    from sartor.runner import execute  # after the experiment is known to be right

    result = execute(experiment, out=out, progress=sys.stderr.isatty())
    if as_json:
        print(to_json(result.summary))
    else:
        _print_result(result.summary)
        print(f"run folder: {result.folder}")


def _print_result(summary: dict[str, Any]) -> None:
    """The evaluation matrix after the last round, a row per cell, and what the run took."""
    heads = (
        "model",
        "tested on",
        "accuracy",
        "by samples",
        "worst decile",
        "loss",
        "best by validation",
        "best on test",
    )
    rows = []
    for name, cell in summary["last"].items():
        if cell is None:
            continue
        worst = cell.get("accuracy_spread", {}).get("worst_decile")
        numbers = [cell["accuracy"], cell.get("accuracy_weighted"), worst, cell["loss"]]
        for key in ("best_by_validation", "best_on_test"):
            best = summary[key][name]
            numbers.append(None if best is None else best["accuracy"])
        rows.append((*name.split("_"), *map(text, numbers)))
    print_table(heads, rows)
    size = f"{summary['clients']} clients, {summary['rounds']} rounds, {summary['seconds']:.1f} s"
    traffic = f"{summary['bytes_down']:,} bytes down, {summary['bytes_up']:,} bytes up"
    print(f"{summary['algorithm']} on {summary['data']}: {size}, {traffic}")
