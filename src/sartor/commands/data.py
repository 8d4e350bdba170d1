"""``sartor data``: how a data set is divided among the clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sartor.commands.base import AsJson, Clients, Imports, Seed, app, print_table, reported, text
from sartor.commands.words import import_words, refuse_unused, sort_words
from sartor.errors import SettingError

USED = {"data", "partition", "features", "seed", "imports"}
"""The settings that say how data are divided."""


@app.command(context_settings={"ignore_unknown_options": True})
@reported
def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH|EXPERIMENT.toml|PRESET",
            help="The data set (data.name), your own data (data.path), or an experiment that names them.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings of data, partition, features.", show_default=False
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Partition scheme (partition.name).", show_default=False)
    ] = None,
    clients: Clients = None,
    seed: Seed = None,
    imports: Imports = None,
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
    from sartor.extensions import function_file
    from sartor.runs.experiment import describe_settings, load
    from sartor.runs.record import to_json
    from sartor.runs.setup import load_data

    import_words(imports)
    file, words, overrides = sort_words(_expand_shorthand([name, *(arguments or ())]))
    if len(words) + (file is not None) != 1:
        raise SettingError("name one data set, as in `sartor data digits`; settings are given as key=value")
    tables = {row.key.partition(".")[0] for row in describe_settings()} | {"compare", "search"}
    refuse_unused(overrides, dict.fromkeys(tables - USED, "it says nothing of how data are divided"))
    flags = {"partition.name": partition, "data.clients": clients, "seed": seed, "imports": imports or None}
    if words:
        known = words[0] in SOURCES
        own = not known and (os.path.exists(words[0]) or function_file(words[0]) is not None)
        flags["data.path" if own else "data.name"] = words[0]
    experiment = load(file, overrides, **flags)
    shown = words[0] if words else experiment.data.path or experiment.data.name
    held, made = load_data(experiment)
    divided = made or held
    rows = describe(divided)
    if plot is not None:
        plot_partition(divided, plot)
    if as_json:
        notes = () if made is None else made.notes
        print(to_json({"name": shown, "hash": divided.hash, "notes": notes, "clients": rows}))
        return
    print_table(list(rows[0]), ([text(value) for value in row.values()] for row in rows))
    print(f"{shown}: {len(rows)} clients, hash {divided.hash}")


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
