"""The parts of the pages that follow from the program: tables of methods, measured numbers and curves.

    python docs/tables.py            # writes them anew
    python docs/tables.py --check    # says which pages are not as they should be, and ends with 1

A part stands between ``<!-- begin: NAME -->`` and ``<!-- end -->``, and NAME says what is put there:
``methods FAMILY...`` the methods of these pages' files, ``papers`` all tables and figures, ``bands`` the
measured numbers. On a method's own page ``method NAME`` says what it is and keeps, ``settings NAME`` what it
can be told, ``curve NAME`` shows what was measured; ``measured`` is the table of all of these measurements.
``best PROBLEM`` are the methods that did best there, ``which`` what was measured of all of them on every
problem, ``leaderboard`` what its runs gave. ``networks`` are the models by name. ``overview`` is a table of
all methods to choose by; ``house`` and ``rooms`` are the picture and the table of the source's rooms.
``stale`` says which methods have changed since the numbers in the files of ``results/`` were taken.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import curves
import house
import leaderboard
import which

from sartor.algorithms import cards, registered
from sartor.algorithms.comfed.comfed import MECHANISMS
from sartor.model.networks import CUSTOM, MODELS, about
from sartor.runs.experiment import describe_class
from sartor.studies.entries import Entry, entries
from sartor.studies.results import Results

DOCS = Path(__file__).parent
PART = re.compile(r"(<!-- begin: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)

BUFFERS = {
    "average": "averaged with the models",
    "local": "stay with the client",
    "freeze": "stay as they were at the start",
}
"""What happens to float buffers, in words."""


def family_of(name: str) -> str | None:
    """The folder that a method's file is in, which names its page too; None where it is not one of ours."""
    package, _, rest = registered()[name].__module__.partition(".algorithms.")
    return rest.partition(".")[0] if package == "sartor" and rest else None


def is_pair(name: str) -> bool:
    """Whether a method is one of ComFed's pairs by its own name."""
    mechanism, dash, _ = name.partition("-")
    return family_of(name) == "comfed" and bool(dash) and mechanism in MECHANISMS


def page_of(name: str) -> str:
    """A method's page, from the folder of the families' pages; a pair has a section of its mechanism's."""
    if is_pair(name):
        return f"comfed/{name.partition('-')[0]}.md#{name}"
    return f"{family_of(name)}/{name}.md"


def row(cells: Iterable[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def head(*cells: str) -> list[str]:
    """The first two lines of a table."""
    return [row(cells), "|" + " --- |" * len(cells)]


def methods(*families: str) -> str:
    """The methods of some families: what they keep where, their traffic and their settings."""
    lines = head(
        "method", "what it is", "paper", "server keeps", "client keeps", "traffic (down / up)", "settings"
    )
    for name, algorithm in sorted(registered().items()):
        if family_of(name) in families:
            summary = (inspect.getdoc(algorithm) or "").partition("\n")[0]
            own = ", ".join(f"`{field}`" for field in algorithm.Hyper.__dataclass_fields__)
            keeps = (algorithm.server_keeps, algorithm.client_keeps, algorithm.traffic)
            link = f"[`{name}`]({page_of(name)})"
            lines.append(row((link, summary, algorithm.paper, *keeps, own)))
    return "\n".join(lines)


def overview() -> str:
    """All methods but ComFed's pairs, in one table to choose by."""
    lines = head(
        *("method", "family", "year", "gives", "client keeps", "traffic (down / up)"),
        *("asynchronous", "validation data", "sums only"),
    )
    for card in cards():
        if family_of(card.name) is not None and not is_pair(card.name):
            flags = (card.asynchronous, card.needs_validation, card.sums_only)
            year = "–" if card.year is None else str(card.year)
            known = (card.family, year, card.models, card.client_keeps, card.traffic)
            lines.append(
                row(
                    (
                        f"[`{card.name}`]({page_of(card.name)})",
                        *known,
                        *("yes" if flag else "" for flag in flags),
                    )
                )
            )
    return "\n".join(lines)


def method(name: str) -> str:
    """What a method is, as its file describes it, and what it keeps and sends."""
    algorithm = registered()[name]
    file = algorithm.__module__.replace(".", "/")
    lines = [
        *prose(inspect.getdoc(algorithm) or ""),
        *head("paper", algorithm.paper),
        row(("the server keeps", algorithm.server_keeps)),
        row(("a client keeps", algorithm.client_keeps)),
        row(("traffic of a round, down / up", f"{algorithm.traffic} (per participating client, in models)")),
        row(("BatchNorm statistics", BUFFERS[algorithm.buffers])),
        row(("file", f"`src/{file}.py`")),
    ]
    return "\n".join(lines)


def prose(docstring: str) -> list[str]:
    """A docstring's paragraphs as lines of Markdown, each with an empty one behind it."""
    paragraphs = re.split(r"\n\s*\n", docstring.strip())
    lines = []
    for paragraph in paragraphs:
        words = " ".join(paragraph.split()).replace("``", "`")
        # Underscores and stars of formulas are not emphasis; in code they stay as they are.
        pieces = words.split("`")
        pieces[::2] = [re.sub(r"([_*])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
        lines += ["`".join(pieces), ""]
    return lines


def settings(name: str) -> str:
    """The hyper-parameters of a method: symbol, default, range and meaning."""
    lines = head("setting", "symbol", "default", "range", "meaning")
    for found in describe_class(registered()[name].Hyper, "hyper"):
        default = "" if found.default is None else f"`{json.dumps(found.default, ensure_ascii=False)}`"
        key = found.key.removeprefix("hyper.")
        lines.append(row((f"`{key}`", found.symbol, default, found.range, found.meaning)))
    return "\n".join(lines)


def networks() -> str:
    """The networks by name, with their settings and defaults."""
    lines = head("network", "what it is", "settings")
    for name, kind in MODELS.items():
        if name != CUSTOM and kind.__module__.startswith("sartor."):
            own = describe_class(kind, "model")
            said = (f"`{one.key.removeprefix('model.')}` = {json.dumps(one.default)}" for one in own)
            lines.append(row((f"`{name}`", about(kind), ", ".join(said))))
    return "\n".join(lines)


def papers() -> str:
    """All tables and figures, and what there is of ours."""
    lines = head("name", "place", "what it shows", "numbers of the paper", "ours")
    for entry in entries():
        if entry.cannot:
            theirs, ours = "–", f"not run: {entry.cannot}"
        elif entry.same_as:
            theirs, ours = "–", f"see `{entry.same_as}`"
        else:
            theirs, ours = entry.source, entry.status
        lines.append(row((f"`{entry.name}`", entry.place, entry.title, theirs, ours)))
    return "\n".join(lines)


def bands() -> str:
    """The measured numbers, a table for every entry and scale."""
    parts = []
    for entry in entries():
        for scale in entry.measured:
            parts.append(_band(entry, scale))
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _band(entry: Entry, scale: str) -> str:
    at, measured = entry.scales[scale], entry.measured[scale]
    columns = [column.label for column in at.columns]
    digits = 1 if entry.percent else 4
    lines = [
        f"### `{entry.name}`, {scale} setting",
        "",
        f"{entry.title}. Measured {measured.date} on {measured.hardware}, seeds {measured.seeds}: "
        f"`{measured.command}`" + (", in percent." if entry.percent else "."),
        "",
        *head("method", *columns),
    ]
    for label in at.methods:
        if label in measured.band.values:
            cells = []
            for place in range(len(columns)):
                mean, deviation = measured.band.at(label, place)
                shown = "–" if mean is None else f"{mean:.{digits}f}"
                cells.append(shown if deviation is None else f"{shown} ± {deviation:.{digits}f}")
            lines.append(row((f"`{label}`", *cells)))
    changed = measured.stale(at)
    if changed:
        names = "all" if len(changed) == len(measured.code) else ", ".join(f"`{label}`" for label in changed)
        lines += ["", f"Methods that have changed since, which need not change these numbers: {names}."]
    return "\n".join(lines)


def stale() -> str:
    """Of every file of measured numbers which methods have changed since."""
    lines = head("file", "numbers", "taken", "methods", "changed since")
    for path in sorted((DOCS.parent / "results").glob("*.jsonl")):
        results = Results(path)
        records, found = results.records.values(), results.stale()
        dates = sorted({record.date for record in records})
        lines.append(
            row(
                (
                    f"`results/{path.name}`",
                    str(len(records)),
                    dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
                    str(len({record.method for record in records})),
                    ", ".join(found) or "none",
                )
            )
        )
    return "\n".join(lines)


PARTS: dict[str, Callable[..., str]] = {
    "methods": methods,
    "method": method,
    "settings": settings,
    "overview": overview,
    "curve": curves.curve,
    "measured": lambda: curves.measured(page_of),
    "best": lambda problem: which.best(problem, page_of),
    "which": lambda: which.table(page_of),
    "networks": networks,
    "leaderboard": lambda: leaderboard.board(page_of),
    "papers": papers,
    "bands": bands,
    "stale": stale,
    "house": house.picture,
    "rooms": house.table,
}
"""What makes each kind of part."""


def filled(text: str) -> str:
    """A page with its parts made anew."""

    def made(match: re.Match[str]) -> str:
        kind, *words = match[2].split()
        part = PARTS[kind](*words)
        return f"{match[1]}{part}\n{match[3]}"

    return PART.sub(made, text)


def main() -> None:
    """Write the parts, or check them."""
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(page.relative_to(DOCS))
            if "--check" not in sys.argv[1:]:
                page.write_text(new, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'is stale' if '--check' in sys.argv[1:] else 'written'}")
    raise SystemExit(1 if stale and "--check" in sys.argv[1:] else 0)


if __name__ == "__main__":
    main()
