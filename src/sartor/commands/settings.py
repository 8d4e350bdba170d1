"""``sartor settings``: every setting of an experiment, and of a node's policy."""

from __future__ import annotations

from typing import Annotated

import typer

from sartor.commands.base import AsJson, Imports, app, print_table, reported, text


@app.command()
@reported
def settings(
    section: Annotated[str | None, typer.Argument(help="Only this section or key, as in `local`.")] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """List every setting of an experiment, and of a node's policy."""
    from dataclasses import asdict

    from sartor.commands.words import import_words
    from sartor.remote.policy import Policy, Requirement
    from sartor.runs.experiment import describe_class, describe_settings
    from sartor.runs.record import to_json
    from sartor.settings import unknown

    import_words(imports)
    rows = [*describe_settings(), *describe_class(Policy, "policy")]
    rows += describe_class(Requirement, "policy.require")
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
