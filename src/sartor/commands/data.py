"""``sartor data``: how a data set is divided among the clients, and what the columns of a table are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sartor.commands.base import AsJson, Clients, Imports, Seed, app, print_table, reported, text
from sartor.commands.words import import_words, refuse_unused, sort_words
from sartor.errors import SettingError

if TYPE_CHECKING:
    from sartor.data.proposal import Finding
    from sartor.data.schema import Column
    from sartor.runs.experiment import Experiment

USED = {"data", "partition", "features", "columns", "objective", "seed", "imports"}
"""The settings that say what data are and how they are divided."""


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
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="EXPERIMENT.toml",
            help="Write the schema of a table to this experiment; one that is there keeps all else.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a data set is divided among the clients, and of a table what its columns are.

    A table without a schema gets one proposed, with what is missing, constant, unlike the others or tells
    the label. The scheme's parameters are given by their names: --alpha 0.1 is short for partition.alpha=0.1.

    sartor data digits --partition dirichlet --alpha 0.1 --clients 10 --plot digits.png

    sartor data hospitals.csv data.client_column=site data.label_column=ill --write experiment.toml
    """
    from sartor.data.named import named_by
    from sartor.data.partitions import describe, plot_partition
    from sartor.runs.experiment import collect, describe_settings, load
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
        flags[f"data.{named_by(words[0])}"] = words[0]
    experiment = load(file, overrides, **flags)
    experiment, columns, found = _schema(experiment)
    if write is not None:
        if not columns:
            raise SettingError(f"--write: {words[0] if words else file} is no table that has a schema")
        _write(write, file, experiment, collect(None, overrides, **flags))
    shown = words[0] if words else experiment.data.path or experiment.data.name
    held, made = load_data(experiment)
    divided = made or held
    rows = describe(divided)
    if plot is not None:
        plot_partition(divided, plot)
    if as_json:
        notes = () if made is None else made.notes
        about: dict[str, Any] = {"name": shown, "hash": divided.hash, "notes": notes, "clients": rows}
        if columns:
            about["columns"] = {column.name: column.to_mapping() for column in columns}
            about["findings"] = [vars(each) for each in found]
        print(to_json(about))
        return
    if columns:
        _print_schema(columns, found)
    print_table(list(rows[0]), ([text(value) for value in row.values()] for row in rows))
    print(f"{shown}: {len(rows)} clients, hash {divided.hash}")
    if columns and write is not None:
        print(f"the schema is in {write}")


def _schema(experiment: Experiment) -> tuple[Experiment, Sequence[Column], list[Finding]]:
    """The experiment with a schema where its data are a table, the schema, and what is to be seen by it."""
    from sartor.data.proposal import findings, propose
    from sartor.data.tables import is_table
    from sartor.extensions import function_file
    from sartor.model.objectives import chosen_objective

    named = experiment.data.path
    if named is None or function_file(named) is not None or not is_table(path := Path(named)):
        return experiment, (), []
    if not experiment.columns:
        settings = experiment.data
        if settings.text_column is not None:  # whose tokens are the sample, without a schema
            return experiment, (), []
        columns = propose(path, settings.client_column, settings.label_column)
        plain = replace(settings, client_column=None, label_column=None, split_column=None, normalise=False)
        experiment = replace(experiment, data=replace(plain, feature_columns=None), columns=columns)
    targets = chosen_objective(experiment.objective).targets
    return experiment, experiment.columns, findings(path, experiment.columns, targets)


def _write(target: Path, file: str | None, experiment: Experiment, said: Mapping[str, Any]) -> None:
    """Put path and schema of a table into an experiment's file, and what was said; all else in it stays."""
    from sartor.data.schema import columns_mapping
    from sartor.files import write
    from sartor.runs.experiment import from_mapping, read_toml, toml_text
    from sartor.studies.entries import merged

    given = merged(read_toml(target) if target.exists() else {} if file is None else read_toml(file), said)
    table = {key: value for key, value in given.get("data", {}).items() if not key.endswith("_column")}
    table = {**table, "path": str(experiment.data.path)}
    mapping = {**given, "data": table, "columns": columns_mapping(experiment.columns)}
    from_mapping(mapping)
    write(target, toml_text(mapping).encode())


def _print_schema(columns: Sequence[Column], found: Sequence[Finding]) -> None:
    """The columns, and what is to be known of them."""
    rows = []
    for column in columns:
        settings = {key: value for key, value in column.to_mapping().items() if key != "kind"}
        rows.append(
            (column.name, column.kind, ", ".join(f"{key} {_short(v)}" for key, v in settings.items()))
        )
    print_table(["column", "kind", "settings"], rows)
    if found:
        print_table(["client", "column", "", ""], ([e.client, e.column, e.what, e.words] for e in found))


def _short(value: Any) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else text(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


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
