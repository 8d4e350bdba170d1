"""``sartor algorithms``: the methods there are, filtered and sorted, or the hyper-parameters of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sartor.commands.base import AsJson, Imports, app, print_table, reported, text

if TYPE_CHECKING:
    from sartor.algorithms import Card

FILTERS = "Which methods"
Choice = bool | None


def _only(flag: str, words: str) -> Any:
    return typer.Option(flag, help=words, rich_help_panel=FILTERS)


@app.command()
@reported
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show this one with its hyper-parameters.")] = None,
    family: Annotated[str | None, _only("--family", "Of families with this in their name.")] = None,
    year: Annotated[str | None, _only("--year", "Published in 2020, 2019-2021, 2020- or -2018.")] = None,
    models: Annotated[str | None, _only("--models", "That give shared, personal or both models.")] = None,
    stateless: Annotated[
        Choice, _only("--stateless/--stateful", "Whose clients keep nothing between rounds, or something.")
    ] = None,
    asynchronous: Annotated[
        Choice, _only("--asynchronous/--synchronous", "That take what arrives, or wait for all.")
    ] = None,
    validation: Annotated[
        Choice, _only("--validation/--no-validation", "That need validation data at the clients, or do not.")
    ] = None,
    sums: Annotated[
        Choice, _only("--sums/--rows", "Whose server needs only weighted sums (secure aggregation), or more.")
    ] = None,
    private: Annotated[
        str | None, _only("--private", "With a guarantee under [privacy]: central, local or samples.")
    ] = None,
    sort: Annotated[str, _only("--sort", "By a column, as in year or sent.")] = "name",
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms that fit, or the hyper-parameters of one."""
    from dataclasses import asdict

    from sartor.algorithms import card, cards, registered
    from sartor.algorithms.cards import years_of
    from sartor.commands.words import import_words
    from sartor.errors import SettingError
    from sartor.runs.experiment import describe_class
    from sartor.runs.record import to_json
    from sartor.settings import unknown

    import_words(imports)
    wanted: dict[str, Any] = {
        "family": family,
        "years": None if year is None else years_of(year),
        "models": models,
        "stateless": stateless,
        "asynchronous": asynchronous,
        "needs_validation": validation,
        "sums_only": sums,
        "private": private,
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    if name is None:
        found = cards(sort=sort, **given)
        if as_json:
            print(to_json([asdict(one) for one in found]))
        else:
            _print(found)
        return
    if name not in registered():
        raise unknown("algorithm", name, registered(), what="name")
    if given or sort != "name":
        raise SettingError(
            f"{name}: one algorithm is not filtered or sorted; leave its name or the options out"
        )
    hyper = describe_class(registered()[name].Hyper, "hyper")
    if as_json:
        print(to_json({**asdict(card(name)), "hyper": [asdict(row) for row in hyper]}))
        return
    shown = asdict(card(name)).items()
    print_table(("", ""), ((key.replace("_", " "), text(value)) for key, value in shown))
    heads = ("setting", "symbol", "type", "default", "range", "meaning")
    print_table(
        heads,
        ((row.key, row.symbol, row.type, text(row.default), row.range, row.meaning) for row in hyper),
    )


def _print(found: list[Card]) -> None:
    heads = ("name", "family", "paper", "models", "server keeps", "client keeps", "traffic per round", "also")
    print_table(
        heads,
        (
            (
                *(one.name, one.family, one.paper, one.models, one.server_keeps, one.client_keeps),
                *(one.traffic, also(one)),
            )
            for one in found
        ),
    )


def also(one: Card) -> str:
    """What else there is to know of a method, in a few words."""
    words = {
        "asynchronous": one.asynchronous,
        "needs validation data": one.needs_validation,
        "sums only": one.sums_only,
    }
    known = [word for word, true in words.items() if true]
    return ", ".join([*known, *(["private: " + " ".join(one.private)] if one.private else [])])
