"""Colours, dashes and markers, one place for the page and for printed figures.

The hues are Okabe and Ito's, moved a little until they lie far apart also for readers with protanopia or
deuteranopia, and each has a contrast of 3 : 1 with its background, light or dark. A line also differs from
its neighbours in dash and marker, so that colour is never the only difference.
"""

from __future__ import annotations

from collections.abc import Mapping

SERIES: dict[str, tuple[str, ...]] = {
    "light": ("#0064BA", "#E36C0C", "#00A966", "#AE5598", "#7C570A", "#269BD7", "#000000", "#7B6F6D"),
    "dark": ("#49A3ED", "#F8923F", "#39D28D", "#E68CC6", "#F3DC3D", "#98D7FF", "#FFFFFF", "#879188"),
}
BASE: dict[str, dict[str, str]] = {
    "light": {
        "background": "#ffffff",
        "panel": "#f5f6f8",
        "text": "#1b1f24",
        "quiet": "#57606a",
        "rule": "#d0d7de",
        "link": "#0a58a6",
    },
    "dark": {
        "background": "#14171c",
        "panel": "#1e232b",
        "text": "#e6e8eb",
        "quiet": "#a3acb7",
        "rule": "#3a424d",
        "link": "#7cc0ff",
    },
}

# plotly's word and matplotlib's for the same dash and marker
DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."))
MARKERS = (
    ("circle", "o"),
    ("square", "s"),
    ("diamond", "D"),
    ("cross", "P"),
    ("triangle-up", "^"),
    ("x", "X"),
    ("triangle-down", "v"),
)

SEQUENTIAL = ("#00224e", "#2a3f6d", "#575c6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838")
"""Dark blue to yellow, of steadily rising lightness."""

DIVERGING = {
    "light": ("#b04a00", "#e8a26b", "#f7f7f7", "#74b0d8", "#005a94"),
    "dark": ("#ff9a52", "#a3541c", "#23282f", "#1f6299", "#6cc0ff"),
}
"""Orange for below zero, the background's grey for zero, blue for above."""


def dash(place: int) -> tuple[str, str]:
    """The dash of a series, for plotly and for matplotlib."""
    return DASHES[(place + place // len(SERIES["light"])) % len(DASHES)]


def marker(place: int) -> tuple[str, str]:
    """The marker of a series, for plotly and for matplotlib."""
    return MARKERS[place % len(MARKERS)]


def colour(place: int) -> int:
    """Which of :data:`SERIES` a series has."""
    return place % len(SERIES["light"])


def variables(theme: str) -> Mapping[str, str]:
    """The custom properties of a theme, by which the style sheet and the figures name its colours."""
    return {
        **{f"--{name}": value for name, value in BASE[theme].items()},
        **{f"--series-{place}": value for place, value in enumerate(SERIES[theme])},
        **{f"--diverging-{place}": value for place, value in enumerate(DIVERGING[theme])},
    }
