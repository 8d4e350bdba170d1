"""``sartor data``: how a data set is divided among the clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sartor.commands.base import AsJson, Clients, Seed, app, print_table, reported, sort_out, text
from sartor.errors import SettingError


@app.command(context_settings={"ignore_unknown_options": True})
@reported
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
    from sartor.runs.experiment import load
    from sartor.runs.record import to_json
    from sartor.runs.setup import load_data

    words, overrides = sort_out(_expand_shorthand([name, *(arguments or ())]))
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
    print_table(list(rows[0]), ([text(value) for value in row.values()] for row in rows))
    print(f"{words[0]}: {len(rows)} clients, hash {divided.hash}")


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
