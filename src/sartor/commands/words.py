"""From words to an experiment: the one way of all commands.

A word is an experiment's file or a preset, a name, or ``key=value``. Files and modules to import are imported
before the words are read, so that they may name what those register. A word that nobody knows, or that the
command has no use for, is an error that names it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sartor.errors import SettingError

NODES = "in a federation it lies at the nodes"
TIME = "in a federation nodes answer when they do"
UNUSED_IN_A_FEDERATION = {
    **dict.fromkeys(("data.name", "data.folder", "data.client_column", "data.label_column"), NODES),
    **dict.fromkeys(("data.text_column", "data.tokens"), NODES),
    **dict.fromkeys(("data.length", "data.vocabulary"), NODES),
    "partition": NODES,
    **dict.fromkeys(("availability", "delay", "replies.dropout", "replies.deadline"), TIME),
    "replies.on_bad_reply": "in a federation bad replies are left out",
}
"""What words of ``sartor serve`` would change nothing; in a file it may stand, for simulations."""


def split_words(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words without and with an equals sign: names and files, and ``key=value``."""
    words: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        is_override = "=" in argument and not os.path.isfile(argument)
        (overrides if is_override else words).append(argument)
    return words, overrides


def sort_words(arguments: Iterable[str]) -> tuple[str | None, list[str], list[str]]:
    """The experiment's file (a preset's is one too), the other words, and those of the form ``key=value``."""
    from sartor.studies import presets

    words, overrides = split_words(arguments)
    files = [word for word in words if word.endswith(".toml") or word in presets.names()]
    if len(files) > 1:
        raise SettingError(f"{files[1]!r}: expected one experiment (a .toml file or a preset), and key=value")
    file = files[0] if files else None
    if file in presets.names():
        file = str(presets.path(file))
    return file, [word for word in words if word not in files], overrides


def common_flags(
    data: str | None = None,
    clients: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    engine: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """The settings that have a flag of their own, by key."""
    from sartor.extensions import function_file

    return {
        "data.name" if function_file(data) is None else "data.path": data,
        "data.clients": clients,
        "rounds": rounds,
        "seed": seed,
        "engine.name": engine,
        "engine.device": device,
    }


def read_words(
    arguments: Iterable[str],
    imports: Sequence[str] | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    needed: str = "",
    unused: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The settings of a command's words, among which an algorithm may be named.

    ``needed`` says what to give where neither a file nor a name is given; ``unused`` are keys and tables the
    command has no use for, with the reason.
    """
    from sartor.runs.experiment import collect, import_named
    from sartor.settings import unknown
    from sartor.studies import presets

    file, names, overrides = sort_words(arguments)
    if needed and file is None and not names:
        raise SettingError(needed)
    for name in names:
        if "/" in name:
            raise unknown("preset", name, presets.names(), what="name")
    if len(names) > 1:
        raise SettingError(
            f"{names[1]!r}: expected one algorithm, one experiment (a .toml file or a preset), and key=value"
        )
    tables = {table: f"is for `sartor {table}`" for table in ("compare", "search")}
    refuse_unused(overrides, {**tables, **(unused or {})})
    given = {"algorithm": names[0] if names else None, "imports": imports or None, **(flags or {})}
    settings = collect(file, overrides, **given)
    import_named(settings)
    return settings


def read_method_words(
    arguments: Iterable[str],
    imports: Sequence[str] | None,
    flags: Mapping[str, Any],
    *,
    section: str,
    algorithms: str | None,
    references: bool | None = False,
) -> dict[str, Any]:
    """The settings of the words of ``compare`` or ``search``: ``METHOD.KEY=VALUE`` is for one method.

    Those go to the method's table in the command's section.
    """
    from sartor.algorithms import registered
    from sartor.runs.experiment import collect, describe_settings, import_named
    from sartor.settings import unknown
    from sartor.studies.comparison import REFERENCES, CompareSettings

    file, names, overrides = sort_words(arguments)
    if names:
        raise SettingError(
            f"{names[0]!r}: expected one experiment (a .toml file or a preset) and key=value; "
            "methods are named with --algorithms"
        )
    stored = collect(file, imports=imports or None)
    import_named(stored)
    tables = [stored.get(name) for name in ("compare", "search")]
    labels = {label for table in tables if isinstance(table, dict) for label in table}
    asked = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    labels |= {*asked, *registered(), "every" if section == "search" else ""}
    keys = {row.key.split(".")[0] for row in describe_settings()} | {"compare", "search"}
    named: list[str] = []
    methods: dict[str, str] = {}
    for override in overrides:
        key = override.partition("=")[0]
        first = key.partition(".")[0].strip()
        if first not in keys and "." in key:
            if first not in labels:
                raise unknown("", first, keys | labels - {""})
            methods[first] = override
            override = f"{section}.{override}"
        named.append(override)
    own = [field.name for field in dataclasses.fields(CompareSettings)]
    unused = (
        {"search": "is for `sartor search`"}
        if section == "compare"
        else {f"compare.{key}": "is for `sartor compare`" for key in own}
    )
    if asked:
        unused["algorithm"] = "methods are named by --algorithms"
    refuse_unused(named, unused)
    settings = collect(file, named, imports=imports or None, **flags)
    import_named(settings)
    table = settings.get(section)
    table = table if isinstance(table, dict) else {}
    listed = asked or table.get("algorithms")
    if isinstance(listed, list) and listed:
        if references is None:
            references = bool(table.get("references", True))
        known = {*map(str, listed), *(REFERENCES if references else ())} | {"every"}
        for label, override in methods.items():
            if label not in known:
                raise SettingError(f"{override}: {label} is not among the methods; add it to --algorithms")
    return settings


def import_words(imports: Sequence[str] | None) -> None:
    """Import what a command without an experiment of its own is given."""
    if imports:
        from sartor.runs.experiment import import_given

        import_given(imports)


def refuse_unused(overrides: Iterable[str], unused: Mapping[str, str]) -> None:
    """An error for the first ``key=value`` that a command has no use for."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        for prefix, reason in unused.items():
            if key == prefix or key.startswith(f"{prefix}."):
                raise SettingError(f"{override}: has no use here, {reason}; leave it out")
