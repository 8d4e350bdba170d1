"""The measured curve of a method as a picture in its page, and the words that say the same.

The numbers are those of ``results/method-curves.jsonl``, which ``measurements/method_curves.py`` measures. A
picture is inline SVG: text and axes have the page's own colour, light or dark, and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from sartor.studies.results import Results

FILE = Path(__file__).parent.parent / "results" / "method-curves.jsonl"
REFERENCES = {"fedavg": "6 4", "separate": "2 3"}
"""The methods drawn in grey for comparison, and how their lines are dashed."""
CELLS = {"personal_local": "the personal models", "shared_local": "the shared model"}

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 132, 12, 40
MEASURED = "../measured.md"
"""The page that describes the setting, from the page of a method."""
ACCENT = "var(--md-typeset-a-color, #4a64d9)"
LINE_HEIGHT = 15


@cache
def results() -> dict[str, Any]:
    """All that was measured."""
    found = Results(FILE)
    return {**found.about, "methods": found.numbers, "stale": found.stale()}


def entry(name: str) -> dict[str, Any]:
    """What was measured of a method."""
    if name not in results()["methods"]:
        raise SystemExit(
            f"{FILE.name}: has no {name}; run `python measurements/method_curves.py --methods {name}`"
        )
    found: dict[str, Any] = results()["methods"][name]
    return found


def compared(name: str) -> dict[str, dict[str, Any]]:
    """The methods of a picture: the references in the method's own variant of the setting, then itself."""
    variant = entry(name)["variant"]
    shown = {other: entry(f"{other}, {variant}" if variant else other) for other in REFERENCES}
    return {**{other: found for other, found in shown.items() if other != name}, name: entry(name)}


def percent(found: dict[str, Any]) -> str:
    """The last round in words: mean and standard deviation over seeds."""
    return f"{100 * found['mean'][-1]:.1f} ± {100 * found['deviation'][-1]:.1f} %"


def picture(name: str) -> str:
    """Accuracy by round as SVG: the method with its deviation over seeds, the references in grey."""
    shown = compared(name)
    rounds = entry(name)["rounds"]
    lowest = min(100 * min(found["mean"]) for found in shown.values())
    low = int(lowest // 20) * 20

    def x(round: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * round / rounds[-1]

    def y(accuracy: float) -> float:
        share = (min(max(100 * accuracy, low), 100) - low) / (100 - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def points(values: list[float]) -> str:
        return " ".join(f"{x(r):.1f},{y(value):.1f}" for r, value in zip(rounds, values, strict=True))

    parts = []
    for level in range(low, 101, 20):
        place = y(level / 100)
        parts += [
            f'<line x1="{LEFT}" y1="{place:.1f}" x2="{WIDTH - RIGHT}" y2="{place:.1f}" '
            'stroke="currentColor" stroke-opacity="0.15"/>',
            f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{level} %</text>',
        ]
    for tick in range(0, rounds[-1] + 1, 5):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">round</text>')

    own = entry(name)
    upper = [mean + deviation for mean, deviation in zip(own["mean"], own["deviation"], strict=True)]
    lower = [mean - deviation for mean, deviation in zip(own["mean"], own["deviation"], strict=True)]
    there, back = points(upper), " ".join(reversed(points(lower).split(" ")))
    parts.append(f'<polygon points="{there} {back}" style="fill: {ACCENT}" fill-opacity="0.15"/>')
    ends = _apart({other: y(found["mean"][-1]) for other, found in shown.items()})
    for other, found in shown.items():
        if other == name:
            style, dashes = f"stroke: {ACCENT}; fill: {ACCENT}", ""
            opacity, width = "1", "2.5"
        else:
            style, dashes = "stroke: currentColor; fill: currentColor", REFERENCES[other]
            opacity, width = "0.75", "1.5"
        parts += [
            f'<g style="{style}" opacity="{opacity}">',
            f'<polyline points="{points(found["mean"])}" style="fill: none" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}"/>',
            f'<text x="{WIDTH - RIGHT + 6}" y="{ends[other] + 4:.1f}" style="stroke: none">'
            f"{escape(other)} {100 * found['mean'][-1]:.1f}</text>",
            "</g>",
        ]
    told = "; ".join(f"{other} {percent(found)}" for other, found in shown.items())
    title, description = f"curve-{name}-title", f"curve-{name}-desc"
    return "\n".join(
        [
            f'<figure id="curve-{name}">',
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" aria-labelledby="{title} {description}" '
            'font-size="12" font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">',
            f'<title id="{title}">Accuracy of {escape(name)} by round</title>',
            f'<desc id="{description}">After {rounds[-1]} rounds: {told}.</desc>',
            *parts,
            "</svg>",
            "</figure>",
        ]
    )


def _apart(places: dict[str, float]) -> dict[str, float]:
    """Heights of labels, moved so that none lies on another and none beyond the axis."""
    moved: dict[str, float] = {}
    above = -float("inf")
    for name in sorted(places, key=places.__getitem__):
        above = max(places[name], above + LINE_HEIGHT)
        moved[name] = above
    return moved


def curve(name: str) -> str:
    """The picture of a method, and below it the numbers and the setting in words."""
    own = entry(name)
    if own["failed"] is not None:
        return f"Not measured in the [common setting]({MEASURED}): {own['failed']}."
    others = [
        f"{other} {percent(found)} ({CELLS[found['cell']]})"
        for other, found in compared(name).items()
        if other != name
    ]
    against = f"; for comparison {' and '.join(others)}" if others else ""
    seeds = ", ".join(map(str, results()["seeds"]))
    chosen = ", ".join(f"`{key} = {value:g}`" for key, value in own["hyper"].items())
    rates = ", ".join(own["validation"])
    text = (
        f"After {own['rounds'][-1]} rounds {CELLS[own['cell']]} of `{name}` have **{percent(own)}** on the "
        f"clients' own test data (mean and standard deviation over seeds {seeds}){against}. Digits, 20 "
        f"clients by Dirichlet 0.1, {_variant(own['variant'])} in a round, 2 local epochs: "
        f"[the setting in full]({MEASURED}). Taken were {chosen}, `lr` by the accuracy on validation "
        f"data out of {rates}; everything else is at its default."
    )
    if own["cell"] == "shared_local":
        text = text.replace("have **", "has **", 1)
    if name in results().get("stale", {}):
        text += (
            f" The source of `{name}` has changed since ({results()['stale'][name]}); this need not matter."
        )
    reference = compared(name).get("fedavg", own)
    if abs(own["time"] - reference["time"]) > 0.05:
        text += (
            f" These rounds ended at virtual time {own['time']:.1f}; those of fedavg, which waits for "
            f"stragglers, at {reference['time']:.1f}."
        )
    return f"{picture(name)}\n\n{text}"


def _variant(variant: str) -> str:
    """The network and the cohort of a variant of the setting."""
    networks = {
        "BatchNorm": "an MLP with BatchNorm",
        "two widths": "MLPs of 64 units, every other of 16",
        "adapters": "a frozen MLP with adapters of rank 4 and a trained head",
    }
    network = networks.get(variant, "an MLP")
    return f"{network}, {'all of them' if variant == 'everyone' else '10 of them'}"


def measured(page_of: Callable[[str], str]) -> str:
    """What was measured of every method: the last round, its rate, how long it took."""
    lines = [
        "| method | models | after 30 rounds (%) | after 10 (%) | `lr` | virtual time | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in sorted(results()["methods"].items()):
        link = f"[{name}]({page_of(found['algorithm'])})"
        if found["failed"] is not None:
            lines.append(f"| {link} | {found['failed']} | | | | | |")
            continue
        tenth = found["rounds"].index(10)
        cells = (
            link,
            "personal" if found["cell"] == "personal_local" else "shared",
            percent(found).removesuffix(" %"),
            f"{100 * found['mean'][tenth]:.1f} ± {100 * found['deviation'][tenth]:.1f}",
            f"{found['hyper']['lr']:g}",
            f"{found['time']:.1f}",
            f"{found['seconds']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    about = results()["environment"]
    lines += [
        "",
        f"`{results()['command']}`, {about['started'][:10]}, {about['processors']} CPU cores "
        f"({about['platform']}), Sartor {about['sartor']}, PyTorch {about['torch']}, "
        f"Python {about['python']}.",
    ]
    return "\n".join(lines)
