"""The command line: ``sartor run``, ``sartor data`` and the lists of algorithms and settings.

It turns words into an experiment, hands it on and shows what comes back. Results go to standard output,
progress and messages to standard error. A mistake in the input is one message and exit status 2; an error in
the program keeps its traceback. Everything heavy is imported inside the commands, so help comes at once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sartor.errors import SartorError, SettingError

Command = TypeVar("Command", bound=Callable[..., None])

app = typer.Typer(
    name="sartor",
    help="Federated learning when clients differ: every client gets a model cut to its own data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients (data.clients).", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="The seed (seed).", show_default=False)]


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without η shall show something else, not end the run
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="sartor")


def _reported(command: Command) -> Command:
    """Let a command end in one message where the user can mend it: a mistake (2) or an interruption (130)."""

    @functools.wraps(command)
    def reporting(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except SartorError as error:
            print(f"sartor: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("sartor: stopped", file=sys.stderr)
            raise typer.Exit(130) from None

    return reporting  # type: ignore[return-value]


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


@app.command()
@_reported
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

    words, overrides = _sort_out([algorithm, *(arguments or ())])
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


@app.command()
@_reported
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show this one with its hyper-parameters.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or the hyper-parameters of one."""
    from dataclasses import asdict

    from sartor.algorithms import algorithms as registered
    from sartor.experiment import describe_class
    from sartor.record import to_json
    from sartor.settings import unknown

    known = registered()
    if name is not None and name not in known:
        raise unknown("algorithm", name, known, what="name")
    cards = [_card(key, known[key]) for key in sorted(known)]
    if name is None:
        if as_json:
            print(to_json(cards))
            return
        heads = ("name", "family", "paper", "server keeps", "client keeps", "traffic per round")
        columns = ("name", "family", "paper", "server_keeps", "client_keeps", "traffic")
        _print_table(heads, ([card[column] for column in columns] for card in cards))
        return
    card = next(card for card in cards if card["name"] == name)
    hyper = describe_class(known[name].Hyper, "hyper")
    if as_json:
        print(to_json({**card, "hyper": [asdict(row) for row in hyper]}))
        return
    _print_table(("", ""), ((key.replace("_", " "), text) for key, text in card.items()))
    heads = ("setting", "symbol", "type", "default", "range", "meaning")
    _print_table(
        heads,
        ((row.key, row.symbol, row.type, _text(row.default), row.range, row.meaning) for row in hyper),
    )


@app.command()
@_reported
def settings(
    section: Annotated[str | None, typer.Argument(help="Only this section or key, as in `local`.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every setting of an experiment."""
    from dataclasses import asdict

    from sartor.experiment import describe_settings
    from sartor.record import to_json
    from sartor.settings import unknown

    rows = describe_settings()
    if section is not None:
        known = {row.key for row in rows} | {row.key.split(".")[0] for row in rows}
        if section not in known:
            raise unknown("", section, known)
        rows = [row for row in rows if row.key == section or row.key.startswith(f"{section}.")]
    if as_json:
        print(to_json([asdict(row) for row in rows]))
        return
    heads = ("setting", "type", "default", "range", "meaning", "only for")
    _print_table(
        heads,
        ((row.key, row.type, _text(row.default), row.range, row.meaning, row.only_for) for row in rows),
    )


@app.command(context_settings={"ignore_unknown_options": True})
@_reported
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set (data.name).")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Any settings of an experiment.", show_default=False),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Partition scheme (partition.name).", show_default=False)
    ] = None,
    clients: Clients = None,
    seed: Seed = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw who holds what to this PNG file.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a data set is divided among the clients.

    The scheme's parameters are given by their names: --alpha 0.1 is short for partition.alpha=0.1.

    sartor data digits --partition dirichlet --alpha 0.1 --clients 10 --plot digits.png
    """
    from sartor.data.partitions import describe, plot_partition
    from sartor.data.sources import SOURCES
    from sartor.experiment import load
    from sartor.record import to_json
    from sartor.runner import load_data

    words, overrides = _sort_out(_expand_shorthand([name, *(arguments or ())]))
    if len(words) != 1:
        raise SettingError("name one data set, as in `sartor data digits`; settings are given as key=value")
    own = words[0] not in SOURCES and os.path.exists(words[0])
    flags = {
        "data.path" if own else "data.name": words[0],
        "partition.name": partition,
        "data.clients": clients,
        "seed": seed,
    }
    held, made = load_data(load(None, overrides, **flags))
    divided = made or held
    rows = describe(divided)
    if plot is not None:
        plot_partition(divided, plot)
    if as_json:
        notes = () if made is None else made.notes
        print(to_json({"name": words[0], "hash": divided.hash, "notes": notes, "clients": rows}))
        return
    _print_table(list(rows[0]), ([_text(value) for value in row.values()] for row in rows))
    print(f"{words[0]}: {len(rows)} clients, hash {divided.hash}")


def _sort_out(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """The arguments without and with an equals sign: names and files, and ``key=value``."""
    words: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        is_override = "=" in argument and not os.path.isfile(argument)
        (overrides if is_override else words).append(argument)
    return words, overrides


def _expand_shorthand(arguments: Sequence[str]) -> list[str]:
    """``--alpha 0.1`` and ``--alpha=0.1`` as ``partition.alpha=0.1``."""
    expanded = []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("-") and len(argument) > 1:
            name, equals, value = argument.lstrip("-").partition("=")
            if not equals:
                following = next(rest, None)
                if following is None:
                    raise SettingError(f"{argument}: expected a value, as in {argument} 0.1")
                value = following
            argument = f"partition.{name.replace('-', '_')}={value}"
        expanded.append(argument)
    return expanded


def _card(name: str, algorithm: Any) -> dict[str, str]:
    """What there is to say about an algorithm besides its hyper-parameters."""
    fields = ("family", "paper", "server_keeps", "client_keeps", "traffic")
    summary = (algorithm.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, **{field: getattr(algorithm, field) for field in fields}}


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
        rows.append((*name.split("_"), *map(_text, numbers)))
    _print_table(heads, rows)
    size = f"{summary['clients']} clients, {summary['rounds']} rounds, {summary['seconds']:.1f} s"
    traffic = f"{summary['bytes_down']:,} bytes down, {summary['bytes_up']:,} bytes up"
    print(f"{summary['algorithm']} on {summary['data']}: {size}, {traffic}")


def _text(value: Any) -> str:
    """A value for a table cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; in a pipe wide enough that lines stay whole."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE, show_header=any(heads), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
