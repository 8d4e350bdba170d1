"""``sartor algorithms`` and ``sartor settings``: what there is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sartor.commands.base import AsJson, app, print_table, reported, text


@app.command()
@reported
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


@app.command()
@reported
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
    print_table(
        heads,
        ((row.key, row.type, text(row.default), row.range, row.meaning, row.only_for) for row in rows),
    )


def _card(name: str, algorithm: Any) -> dict[str, str]:
    """What there is to say about an algorithm besides its hyper-parameters."""
    fields = ("family", "paper", "server_keeps", "client_keeps", "traffic")
    summary = (algorithm.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, **{field: getattr(algorithm, field) for field in fields}}
