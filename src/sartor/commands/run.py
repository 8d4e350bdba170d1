"""``sartor run``: an experiment from words and files, carried out and stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.commands.base import (
    AsJson,
    Clients,
    DataName,
    Device,
    EngineName,
    Imports,
    Rounds,
    Seed,
    app,
    print_table,
    reported,
    text,
)
from sartor.commands.words import common_flags, read_words


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
    data: DataName = None,
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    engine: EngineName = None,
    device: Device = None,
    imports: Imports = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; left out: a new one in runs/.", show_default=False)
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(
            help="Show the run elsewhere too, as in tensorboard,mlflow (tracking.loggers).",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would take; run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and store it in a run folder.

    sartor run fedavg

    sartor run fedprox experiment.toml --rounds 50 hyper.mu=0.1 partition.alpha=0.3
    """
    from sartor.runs.experiment import from_mapping
    from sartor.runs.record import to_json

    loggers = None if track is None else [name.strip() for name in track.split(",")]
    flags = {**common_flags(data, clients, rounds, seed, engine, device), "tracking.loggers": loggers}
    words = [algorithm, *(arguments or ())]
    needed = "name an algorithm or an experiment file, as in `sartor run fedavg`"
    experiment = from_mapping(read_words(words, imports, flags, needed=needed))
    if dry_run:
        from sartor.runs.cost import estimate

        cost = estimate(experiment)
        print(to_json(cost)) if as_json else _print_cost(cost)
        return
    from sartor.runs.execute import execute  # after the experiment is known to be right

    result = execute(experiment, out=out, progress=True)
    if as_json:
        print(to_json(result.summary))
    else:
        print_result(result.summary)
        print(f"run folder: {result.folder}")


def print_result(summary: dict[str, Any]) -> None:
    """The evaluation matrix after the last round, a row per cell, and what the run took."""
    print_cells(summary)
    size = f"{summary['clients']} clients, {summary['rounds']} rounds, {summary['seconds']:.1f} s"
    traffic = f"{summary['bytes_down']:,} bytes down, {summary['bytes_up']:,} bytes up"
    print(f"{summary['algorithm']} on {summary['data']}: {size}, {traffic}")
    if summary.get("privacy"):
        print(_private(summary["privacy"]))
    if summary.get("stopped"):
        print(f"stopped after round {summary['stopped']['round']}: {summary['stopped']['reason']}")


def _private(told: dict[str, Any]) -> str:
    """What privacy costs or has cost, and for whom."""
    hidden = "a client" if told["mode"] != "samples" else "a sample"
    whom = f"{hidden} more or less" if told["neighbours"] == "add-remove" else f"{hidden} replaced"
    spent = "no bound on ε" if told["epsilon"] is None else f"ε = {told['epsilon']:.4g}"
    noise = f"noise {told['noise']:.4g}, clip {told['clip']:g}"
    return f"{told['mode']} privacy: {spent} at δ = {told['delta']:g} for {whom} ({noise})"


def print_cells(summary: dict[str, Any]) -> None:
    """The evaluation matrix, a row per cell; with the best rounds, where the summary has them."""
    bests = [key for key in ("best_by_validation", "best_on_test") if key in summary]
    headline = summary["headline"]
    heads = ["model", "tested on", headline.replace("_", " "), "by samples", "worst decile"]
    heads += [] if headline == "loss" else ["loss"]
    rows = []
    for name, cell in summary["last"].items():
        if cell is None:
            continue
        worst = cell.get(f"{headline}_spread", {}).get("worst_decile")
        numbers = [cell.get(headline), cell.get(f"{headline}_weighted"), worst]
        numbers += [] if headline == "loss" else [cell["loss"]]
        for key in bests:
            best = summary[key][name]
            numbers.append(None if best is None else best[headline])
        rows.append((*name.split("_"), *map(text, numbers)))
    print_table((*heads, *(key.replace("_", " ") for key in bests)), rows)
    for note in summary.get("notes", ()):
        print(f"note: {note}")


def _print_cost(cost: dict[str, Any]) -> None:
    """What a run would take, a line each."""
    from sartor.runs.durations import duration

    steps, memory = cost["steps_per_client"], cost["memory"]
    rows = [
        ("method", f"{cost['algorithm']} on {cost['data']}, {cost['rounds']} rounds"),
        ("clients", f"{cost['clients']:,}, of them {cost['cohort']:,} in a round"),
        ("model", f"{cost['model']}, {cost['parameters']:,} parameters"),
        ("steps of a client per round", f"{steps['mean']:.1f} ({steps['least']} to {steps['most']})"),
    ]
    for way in ("down", "up"):
        each, total = cost["bytes_per_round"][way], cost["bytes"][way]
        rows.append((f"sent {way}", f"{_bytes(each)} per round, {_bytes(total)} in all"))
    rows += [
        (f"memory: {name.replace('_', ' ')}", _bytes(memory[name]))
        for name in ("data", "client_states", "server", "cohort_models")
    ]
    times = {
        name: duration(cost[name]) for name in ("seconds_per_round", "seconds_per_evaluation", "seconds")
    }
    rows += [
        ("a round", times["seconds_per_round"]),
        ("an evaluation", times["seconds_per_evaluation"]),
        ("the run", f"about {times['seconds']} ({_where(cost)})"),
    ]
    if cost["privacy"]:
        rows.append(("privacy", _private(cost["privacy"])))
    print_table(("", ""), rows)
    if cost["measured_clients"] < cost["clients"]:
        print(f"drawn out from one round with {cost['measured_clients']} clients")
    if cost["quadratic"]:
        print("the server's work grows with the square of the number of clients")


def _where(cost: dict[str, Any]) -> str:
    """Engine, device and, where clients are stacked on a GPU, how their steps are computed."""
    way = f", steps {cost['way']}" if cost["engine"] == "stacked" and cost["device"] == "cuda" else ""
    return f"{cost['engine']} engine on {cost['device']}{way}"


def _bytes(count: float) -> str:
    """A size in the largest unit that leaves a whole part."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
