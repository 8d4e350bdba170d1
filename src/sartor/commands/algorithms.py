"""``sartor algorithms``: the methods there are, or the hyper-parameters of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sartor.commands.base import AsJson, Imports, app, print_table, reported, text


@app.command()
@reported
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show this one with its hyper-parameters.")] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or the hyper-parameters of one."""
    from dataclasses import asdict

    from sartor.algorithms import registered
    from sartor.commands.words import import_words
    from sartor.runs.experiment import describe_class
    from sartor.runs.record import to_json
    from sartor.settings import unknown

    import_words(imports)
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
        print_table(heads, ([card[column] for column in columns] for card in cards))
        return
    card = next(card for card in cards if card["name"] == name)
    hyper = describe_class(known[name].Hyper, "hyper")
    if as_json:
        print(to_json({**card, "hyper": [asdict(row) for row in hyper]}))
        return
    print_table(("", ""), ((key.replace("_", " "), text) for key, text in card.items()))
    heads = ("setting", "symbol", "type", "default", "range", "meaning")
    print_table(
        heads,
        ((row.key, row.symbol, row.type, text(row.default), row.range, row.meaning) for row in hyper),
    )


def _card(name: str, algorithm: Any) -> dict[str, str]:
    """What there is to say about an algorithm besides its hyper-parameters."""
    fields = ("family", "paper", "server_keeps", "client_keeps", "traffic")
    summary = (algorithm.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, **{field: getattr(algorithm, field) for field in fields}}
