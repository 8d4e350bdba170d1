"""What privacy, attackers and fewer bytes cost: the last score over how much of it there is.

A line joins runs that are alike in everything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sartor.report.figures import Figure, Line, Lines, Number, View, spoken
from sartor.report.runs import OWN, Group, Material, Run, cell_of, flat, labels, mean_and_deviation
from sartor.runs.metrics import is_share

Settings: TypeAlias = dict[str, Any]
ELSEWHERE = ("seed.", "engine.", "tracking.")
"""Settings that tell no experiment from another."""


def _spent(run: Run) -> Number:
    told = (run.summary or {}).get("privacy")
    return None if not told else told["epsilon"]


def _share(run: Run) -> Number:
    bad = run.clients.get("attacker")
    return sum(map(bool, bad)) / len(bad) if bad else 0.0


def _sent(run: Run) -> Number:
    return float(run.evaluated[-1]["bytes"])


@dataclass(frozen=True)
class Price:
    """Something that is paid for with a score."""

    name: str
    title: str
    axis: str
    of: Callable[[Run], Number]
    """How much of it a run has; None: it has no place here."""
    section: str
    """Settings that may differ along a line."""
    kind: str = ""
    """But for this one of them. A run that has nothing of it (0) belongs to every kind."""


PRICES = (
    Price("epsilon", "What privacy costs", "ε spent", _spent, "privacy", "privacy.mode"),
    Price("attackers", "What attackers cost", "share of attackers", _share, "attack", "attack.name"),
    Price("bytes", "What fewer bytes cost", "bytes sent, both ways, all clients", _sent, "transforms"),
)


def price_figures(material: Material) -> list[Figure]:
    """A figure for each price of which runs have paid more and less."""
    return [figure for price in PRICES if (figure := _figure(price, material)) is not None]


def _figure(price: Price, material: Material) -> Figure | None:
    measure, word = material.headline, spoken(material.headline)
    lines = []
    for place, (label, groups) in enumerate(_alike(price, material).items()):
        points = sorted(point for group in groups if (point := _point(price, group, measure)) is not None)
        if len({x for x, _, _ in points}) > 1:
            lines.append(_line(label, place, points))
    if not lines:
        return None
    panel = Lines(price.axis, word, lines, percent=is_share(measure), bytes=price.name == "bytes")
    table = [["runs", price.axis, word]]
    for line in lines:
        table += [[line.label, f"{x:.4g}", f"{y:.4g}"] for x, y in zip(line.x, line.y, strict=True)]
    ends = [
        f"{line.label}: {line.y[0]:.4g} at {line.x[0]:.4g}, {line.y[-1]:.4g} at {line.x[-1]:.4g}"
        for line in lines
    ]
    sentence = f"{word.capitalize()} by {price.axis}. {'; '.join(ends)}."
    about = (
        f"The last {word} of each client's own model, else the shared one, on its test data "
        "(honest clients where some attack). A line joins runs that are alike in everything else; bands are "
        "one standard deviation over seeds to either side."
    )
    return Figure(price.name, price.title, about, [], {(): View(panel, sentence, table)})


def _alike(price: Price, material: Material) -> dict[str, list[Group]]:
    """The groups of each line, by its label."""
    lines: dict[str, tuple[Settings, list[Group]]] = {}
    nothing = []
    for group in material.groups:
        amounts = [price.of(run) for run in group.runs]
        if None in amounts:
            continue
        rest = _rest(price, group.runs[0].config)
        if price.kind and not any(amounts):
            nothing.append((rest, group))
        else:
            lines.setdefault(json.dumps(rest, sort_keys=True, default=str), (rest, []))[1].append(group)
    for settings, members in lines.values():
        members += [
            group for rest, group in nothing if {**rest, price.kind: settings.get(price.kind)} == settings
        ]
    found = list(lines.values())
    return dict(zip(labels([rest for rest, _ in found]), (members for _, members in found), strict=True))


def _rest(price: Price, config: Mapping[str, Any]) -> Settings:
    """The settings that are equal along a line."""
    return {
        key: value
        for key, value in flat(config).items()
        if key == price.kind or not f"{key}.".startswith((f"{price.section}.", *ELSEWHERE))
    }


def _point(price: Price, group: Group, measure: str) -> tuple[float, float, float] | None:
    """How much of it a group has, its score, and that one's deviation over seeds; None without a score."""
    amount, _ = mean_and_deviation([price.of(run) for run in group.runs])
    score, deviation = mean_and_deviation([_score(run, measure) for run in group.runs])
    return None if amount is None or score is None else (amount, score, deviation or 0.0)


def _score(run: Run, measure: str) -> Number:
    cell = cell_of(run.last, OWN) or {}
    value: Number = cell.get("benign", cell).get(measure)
    return value


def _line(label: str, place: int, points: list[tuple[float, float, float]]) -> Line:
    x, y, deviation = map(list, zip(*points, strict=True))
    pairs = list(zip(y, deviation, strict=True))
    return Line(
        label, place, x, y, [mean - wide for mean, wide in pairs], [mean + wide for mean, wide in pairs]
    )
