"""The page: one HTML file that holds everything it needs and asks nothing of the network.

Text becomes markup in one place, :func:`element`, which escapes whatever is not markup already. A content
security policy lets only the page's own two scripts run, by their hashes, and allows no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from sartor.errors import SartorError
from sartor.report.figures import Choice, Figure
from sartor.report.interactive import spec
from sartor.report.runs import Material, flat
from sartor.report.sites import site_tables, sites_of
from sartor.report.style import variables
from sartor.report.tables import (
    Entry,
    Table,
    attacks,
    comparison,
    own_models,
    participation,
    privacy,
    settings,
    statistics,
)
from sartor.runs.record import environment, to_json

VOID = ("meta", "input")
Attribute = str | int | bool | None


class Markup(str):
    """Text that is HTML already."""


def element(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """An element; children that are no markup are escaped, and so are attributes.

    ``class_`` stands for class and ``data_value`` for data-value. None and False leave an attribute out.

    >>> element("p", "a < b", class_="quiet")
    '<p class="quiet">a &lt; b</p>'
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            word = key.rstrip("_").replace("_", "-")
            parts.append(word if value is True else f'{word}="{html.escape(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    return Markup(opening if name in VOID else f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Markup:
    """Markup and escaped text, one behind the other."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def page(material: Material, figures: Sequence[Figure]) -> str:
    """The page of some runs."""
    tables = [comparison(material), *own_models(material)]
    for compared in material.comparisons:
        tables += statistics(compared)
    found = (attacks(material), privacy(material), participation(material))
    tables += [table for table in found if table is not None]
    sites = sites_of(material)
    tables = tables if sites is None else [*site_tables(sites), *tables]
    return document(
        _title(material),
        _overview(material),
        tables,
        figures,
        answers=[] if sites is None else sites.sentences(),
        notes=material.notes,
        more=[("settings", "Settings and environment", _settings_section(material))],
    )


def document(
    title: str,
    overview: str,
    tables: Sequence[Table],
    figures: Sequence[Figure],
    *,
    answers: Sequence[str] = (),
    notes: Sequence[str] = (),
    more: Sequence[tuple[str, str, Markup]] = (),
) -> str:
    """A whole page: what it comes to, tables, figures, and sections by name, title and content."""
    sections = [_table_section(f"table-{number}", table) for number, table in enumerate(tables)]
    links = [(f"table-{number}", table.title) for number, table in enumerate(tables)]
    sections += [_figure_section(figure) for figure in figures]
    links += [(figure.name, figure.title) for figure in figures]
    sections += [content for _, _, content in more]
    links += [(name, words) for name, words, _ in more]
    scripts = [_plotly(), own_file("page.js")]
    style = style_of()
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy(scripts))}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"sartor {environment()['sartor']}"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the contents", class_="skip", href="#contents"),
        element(
            "header",
            element("h1", title),
            element("p", overview, class_="quiet"),
            _answers(answers),
            _notes(notes),
            element(
                "nav",
                element(
                    "ul", *(element("li", element("a", words, href=f"#{name}")) for name, words in links)
                ),
                aria_label="Sections",
            ),
        ),
        element(
            "main",
            element(
                "noscript",
                element("p", "The figures need JavaScript; the tables and the captions do without."),
            ),
            *sections,
            id="contents",
        ),
        element("footer", element("p", _made(), class_="quiet")),
        # Data for the scripts; "<" cannot end the element before its end.
        element("script", Markup(_safe_json(_views(figures))), type="application/json", id="figures"),
        *(element("script", Markup(script)) for script in scripts),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en-GB')}\n"


def _title(material: Material) -> str:
    methods = list(dict.fromkeys(group.runs[0].algorithm for group in material.groups))
    shown = (
        ", ".join(methods) if len(methods) <= 4 else f"{', '.join(methods[:3])} and {len(methods) - 3} more"
    )
    return f"{shown} on {', '.join(dict.fromkeys(run.data for run in material.runs))}"


def _overview(material: Material) -> str:
    runs = material.runs
    clients = sorted({len(run.names) for run in runs})
    rounds = sorted({int(run.rounds[-1].get("round", 0)) for run in runs})
    seeds = sorted({run.seed for run in runs})
    return (
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {_span(clients)} clients, "
        f"{_span(rounds)} {'round' if rounds == [1] else 'rounds'}, "
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}."
    )


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _notes(notes: Sequence[str]) -> Markup:
    if not notes:
        return Markup("")
    items = [element("li", note) for note in notes]
    return element("div", element("strong", "Note"), element("ul", *items), class_="notes", role="note")


def _answers(sentences: Sequence[str]) -> Markup:
    """What it comes to, on top."""
    if not sentences:
        return Markup("")
    return element("ul", *(element("li", sentence) for sentence in sentences), class_="answers")


def _table_section(name: str, table: Table) -> Markup:
    heads = [element("th", element("button", head, type="button"), scope="col") for head in table.heads]
    rows = [
        element("tr", *(_cell(entry, column == 0) for column, entry in enumerate(row))) for row in table.rows
    ]
    return element(
        "section",
        element("h2", table.title, id=f"{name}-title"),
        element("p", table.about, class_="about"),
        _scrolling(
            table.title,
            element(
                "table",
                element("thead", element("tr", *heads)),
                element("tbody", *rows),
                class_="sortable",
                aria_labelledby=f"{name}-title",
            ),
        ),
        id=name,
        aria_labelledby=f"{name}-title",
    )


def _cell(entry: Entry, first: bool) -> Markup:
    value = "" if entry.value is None else str(entry.value)
    text = element("strong", entry.text) if entry.best else entry.text
    return element("th" if first else "td", text, scope="row" if first else None, data_value=value)


def _scrolling(title: str, content: Markup) -> Markup:
    """What is too wide scrolls by itself, also by keyboard, and never the page."""
    return element("div", content, class_="scroll", tabindex=0, role="region", aria_label=f"{title}, table")


def _figure_section(figure: Figure) -> Markup:
    sentence = figure.views[figure.first].sentence
    controls = [_control(choice, option) for choice, option in zip(figure.choices, figure.first, strict=True)]
    alone = all(len(choice.options) == 1 for choice in figure.choices)
    return element(
        "section",
        element("h2", figure.title, id=f"{figure.name}-title"),
        element("p", figure.about, class_="about"),
        element(
            "figure",
            element("div", *controls, class_="choices", hidden=alone),
            element("div", class_="plot", role="img", aria_label=sentence),
            element("figcaption", sentence),
            element(
                "details",
                element("summary", "The numbers"),
                _scrolling(f"{figure.title}, numbers", element("table")),
            ),
            data_figure=figure.name,
        ),
        id=figure.name,
        aria_labelledby=f"{figure.name}-title",
    )


def _control(choice: Choice, chosen: str) -> Markup:
    keys = list(choice.options)
    hidden = len(keys) == 1
    if choice.steps:
        slider = element(
            "input",
            type="range",
            min=0,
            max=len(keys) - 1,
            value=keys.index(chosen),
            data_choice=choice.name,
            data_options=" ".join(keys),
        )
        return element("label", choice.label, slider, element("output", chosen), hidden=hidden)
    options = [
        element("option", words, value=key, selected=key == chosen) for key, words in choice.options.items()
    ]
    # Without it a browser shows again what was chosen before the page was reloaded.
    select = element("select", *options, data_choice=choice.name, autocomplete="off")
    return element("label", choice.label, select, hidden=hidden)


def _settings_section(material: Material) -> Markup:
    details = []
    for label, _, run in material.labelled():
        kept = [
            ("run folder", str(run.path)),
            ("partition hash", run.hash or "not recorded"),
            ("finished", "yes" if run.finished else "no"),
        ]
        if run.summary is not None:
            kept.append(("hash of the final models", run.summary.get("model_sha256", "not recorded")))
        details.append(
            element(
                "details",
                element("summary", label, " ", element("code", (run.hash or "")[:12])),
                _words("Run", kept),
                _words("Settings", list(flat(run.config).items())),
                _words("Environment", list(run.environment.items())),
            )
        )
    return element(
        "section",
        element("h2", "Settings and environment", id="settings-title"),
        element(
            "p", "All that a run depends on, to run it again or to tell why numbers differ.", class_="about"
        ),
        *details,
        id="settings",
        aria_labelledby="settings-title",
    )


def _words(title: str, rows: Sequence[tuple[str, Any]]) -> Markup:
    lines = [
        element("tr", element("th", element("code", key), scope="row"), element("td", value))
        for key, value in settings(rows)
    ]
    table = element("table", element("caption", title), element("tbody", *lines), class_="words")
    return _scrolling(title, table)


def _made() -> str:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Made by Sartor {environment()['sartor']} on {when}."


def _views(figures: Sequence[Figure]) -> dict[str, Any]:
    """Figure -> the places of the chosen options -> what to draw."""
    views: dict[str, Any] = {}
    for figure in figures:
        places = [{key: place for place, key in enumerate(choice.options)} for choice in figure.choices]
        views[figure.name] = {
            "-".join(str(each[option]) for each, option in zip(places, key, strict=True)): spec(view)
            for key, view in figure.views.items()
        }
    return views


def _safe_json(value: Any) -> str:
    return to_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def style_of() -> str:
    """The style of a page of ours, light and dark."""

    def block(theme: str) -> str:
        return ":root{" + "".join(f"{name}:{value};" for name, value in variables(theme).items()) + "}"

    return f"{block('light')}\n@media (prefers-color-scheme: dark){{{block('dark')}}}\n{own_file('page.css')}"


def own_file(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise SartorError("a report needs plotly; install it with: pip install 'sartor[report]'") from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def policy(scripts: Sequence[str]) -> str:
    """A content security policy that lets these scripts run and nothing be asked for."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
