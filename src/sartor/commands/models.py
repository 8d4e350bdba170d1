"""``sartor models``: the networks there are, or the settings of one."""

from __future__ import annotations

from typing import Annotated

import typer

from sartor.commands.base import AsJson, Imports, app, print_table, reported, text


@app.command()
@reported
def models(
    name: Annotated[str | None, typer.Argument(help="Show this one with its settings.")] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """List the networks that `model.name` takes, or the settings of one."""
    from dataclasses import asdict, fields

    from sartor.commands.words import import_words
    from sartor.model.networks import CUSTOM, MODELS, about
    from sartor.runs.experiment import describe_class
    from sartor.runs.record import to_json
    from sartor.settings import unknown

    import_words(imports)
    known = {key: kind for key, kind in MODELS.items() if key != CUSTOM}
    if name is None:
        rows = [(key, about(kind), [field.name for field in fields(kind)]) for key, kind in known.items()]
        if as_json:
            print(to_json([dict(zip(("name", "about", "settings"), row, strict=True)) for row in rows]))
        else:
            print_table(
                ("network", "what it is", "settings"),
                ((key, what, ", ".join(own)) for key, what, own in rows),
            )
        return
    if name not in known:
        raise unknown("model.name", name, known, what="name")
    described = describe_class(known[name], "model")
    if as_json:
        print(to_json([asdict(row) for row in described]))
        return
    print(about(known[name]))
    heads = ("setting", "default", "range", "meaning")
    print_table(heads, ((row.key, text(row.default), row.range, row.meaning) for row in described))
