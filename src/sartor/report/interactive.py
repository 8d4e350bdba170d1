"""Figures for plotly, as plain JSON values.

A colour is written ``@name`` or ``@name/opacity`` and stands for the custom property ``--name`` of the page's
style sheet: the page puts in what it is in the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sartor.report.figures import Boxes, Dots, Grid, Lines, Number, Panel, Ranks, Spans, View, tick_names
from sartor.report.style import DIVERGING, SEQUENTIAL, SERIES, colour, dash, marker

Json = dict[str, Any]


def spec(view: View) -> Json:
    """A view as what the page needs to draw it: traces, axes, height, and what to say about it."""
    return {**_drawn(view.panel), "sentence": view.sentence, "table": view.table}


def _drawn(panel: Panel) -> Json:
    if isinstance(panel, Lines):
        return _lines(panel)
    if isinstance(panel, Boxes):
        return _boxes(panel)
    if isinstance(panel, Dots):
        return _dots(panel)
    if isinstance(panel, Ranks):
        return _ranks(panel)
    return _grid(panel) if isinstance(panel, Grid) else _spans(panel)


def _ranks(panel: Ranks) -> Json:
    rows = list(range(len(panel.methods)))
    traces: list[Json] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": _round(panel.ranks),
            "y": rows,
            "marker": {"color": "@series-0", "size": 10},
            "text": [plain(name) for name in panel.methods],
            "hovertemplate": "%{text}: %{x}<extra></extra>",
        }
    ]
    for clique in panel.cliques:  # a bar at every member's rank, down the rows of all of them
        middle = sum(panel.ranks[member] for member in clique) / len(clique)
        ends = [min(clique), max(clique)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": _round([panel.ranks[ends[0]], panel.ranks[ends[1]]]),
                "y": ends,
                "line": {"color": "@quiet", "width": 5},
                "opacity": 0.5,
                "hovertemplate": f"not told apart, around {middle:.2f}<extra></extra>",
            }
        )
    x_axis = {"title": {"text": "average rank, 1 is best"}}
    y_axis = {**_named_axis("", panel.methods), "autorange": "reversed", "showgrid": False}
    return _made(traces, x_axis, y_axis, int(min(900, max(220, 120 + 26 * len(rows)))))


def _lines(panel: Lines) -> Json:
    traces: list[Json] = []
    y_format = ".1%" if panel.percent else ".4~g"
    named: set[str] = set()
    for line in panel.lines:
        ink = "@rule" if line.quiet else f"@series-{colour(line.place)}"
        if line.low is not None and line.high is not None:
            known = [
                (x, low, high)
                for x, low, high in zip(line.x, line.low, line.high, strict=True)
                if low is not None and high is not None
            ]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": _round([x for x, _, _ in known] + [x for x, _, _ in reversed(known)]),
                    "y": _round([high for _, _, high in known] + [low for _, low, _ in reversed(known)]),
                    "fill": "toself",
                    "fillcolor": f"{ink}/0.15",
                    "line": {"width": 0, "color": ink},
                    "legendgroup": str(line.place),
                    "showlegend": False,
                    "hoverinfo": "skip",
                }
            )
        traces.append(
            {
                "type": "scatter",
                "mode": "markers" if line.hollow else "lines" if line.quiet else "lines+markers",
                "name": plain(line.label),
                "x": _round(line.x),
                "y": _round(line.y),
                "line": {
                    "color": ink,
                    "dash": "solid" if line.quiet else dash(line.place)[0],
                    "width": 1.5 if line.quiet else 2,
                },
                "marker": {
                    "color": ink,
                    "symbol": f"{marker(line.place)[0]}{'-open' if line.hollow else ''}",
                    "size": 9 if line.hollow else 7,
                },
                "legendgroup": str(line.place),
                "showlegend": not line.hollow or line.label not in named,
                "hovertemplate": f"%{{y:{y_format}}} at %{{x}}",
            }
        )
        named.add(line.label)
    x_axis: Json = {"title": {"text": panel.x_label}}
    if panel.x_label == "round" and max(x for line in panel.lines for x in line.x if x is not None) <= 12:
        x_axis["dtick"] = 1
    if panel.bytes:
        x_axis |= {"tickformat": "~s", "ticksuffix": "B", "hoverformat": ".3s"}
    y_axis: Json = {"title": {"text": panel.y_label}}
    if panel.percent:
        y_axis["tickformat"] = ".0%"
    return _made(traces, x_axis, y_axis, 380, legend=len(panel.lines))


def _boxes(panel: Boxes) -> Json:
    traces = []
    for position, box in enumerate(panel.boxes):
        ink = f"@series-{colour(box.place)}"
        low, lower, middle, upper, high = box.five
        traces.append(
            {
                "type": "box",
                "name": plain(box.label),
                "x": [position],
                "lowerfence": [low],
                "q1": [lower],
                "median": [middle],
                "q3": [upper],
                "upperfence": [high],
                "mean": [box.mean],
                "line": {"color": ink, "width": 2},
                "fillcolor": f"{ink}/0.15",
                "width": 0.6,
                "hoverinfo": "skip",
            }
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": _round([position + offset for offset in box.offsets]),
                "y": _round(box.values),
                "marker": {"color": ink, "symbol": marker(box.place)[0], "size": 6, "opacity": 0.7},
                "hovertemplate": f"%{{y:{'.1%' if panel.percent else '.4~g'}}}<extra></extra>",
            }
        )
    names = [box.label for box in panel.boxes]
    x_axis = {**_named_axis("", names), "showgrid": False}
    y_axis: Json = {"title": {"text": panel.y_label}}
    if panel.percent:
        y_axis["tickformat"] = ".0%"
    return _made(traces, x_axis, y_axis, 400)


def _dots(panel: Dots) -> Json:
    words = [
        plain(
            f"{panel.x_label} {panel.x_names[x]}, {panel.y_label} {panel.y_names[y]}: "
            f"{size} {panel.size_label}"
        )
        for x, y, size in zip(panel.x, panel.y, panel.size, strict=True)
    ]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": panel.x,
        "y": panel.y,
        "text": words,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": "@series-0",
            "size": panel.size,
            "sizemode": "area",
            "sizemin": 1,
            "opacity": 0.8,
        },
    }
    made = _made(
        [trace],
        {**_named_axis(panel.x_label, panel.x_names), "range": [-0.7, len(panel.x_names) - 0.3]},
        {**_named_axis(panel.y_label, panel.y_names), "range": [-0.7, len(panel.y_names) - 0.3]},
        min(900, 160 + 28 * len(panel.y_names)),
    )
    # How large a dot may be is known when the axes are drawn.
    return {**made, "cells": [len(panel.x_names), len(panel.y_names)], "largest": max(panel.size)}


def _grid(panel: Grid) -> Json:
    rows = [_round(row) for row in panel.values]
    trace: Json = {
        "type": "heatmap",
        "z": rows,
        "xgap": 1 if len(panel.x_names) <= 60 else 0,
        "ygap": 1 if len(panel.y_names) <= 60 else 0,
        "colorbar": {
            "title": {"text": panel.value_label, "side": "right"},
            "thickness": 14,
            "outlinewidth": 0,
        },
        "text": [
            [plain(f"{panel.y_label} {y}, {panel.x_label} {x}") for x in panel.x_names] for y in panel.y_names
        ]
        if len(panel.x_names) * len(panel.y_names) <= 2500
        else None,
        "hovertemplate": f"%{{text}}: {panel.value_label} %{{z}}<extra></extra>",
        "hoverongaps": False,
    }
    if trace["text"] is None:
        del trace["text"]
        trace["hovertemplate"] = f"row %{{y}}, column %{{x}}: {panel.value_label} %{{z}}<extra></extra>"
    known = [value for row in panel.values for value in row if value is not None]
    if panel.kind == "groups":
        trace |= _group_colours(known)
        small = len(panel.x_names) <= 40 and len(panel.y_names) <= 60
        if small:  # numbers in the cells, so that groups are told apart without colours
            trace |= {"texttemplate": "%{z}", "textfont": {"size": 10}}
    elif panel.kind == "diverging":
        end = max((abs(value) for value in known), default=1.0) or 1.0
        last = len(DIVERGING["light"]) - 1
        scale = [[place / last, f"@diverging-{place}"] for place in range(last + 1)]
        trace |= {"zmin": -end, "zmax": end, "colorscale": scale}
    else:
        last = len(SEQUENTIAL) - 1
        trace["colorscale"] = [[place / last, ink] for place, ink in enumerate(SEQUENTIAL)]
    return _made(
        [trace],
        {**_named_axis(panel.x_label, panel.x_names), "showgrid": False},
        {**_named_axis(panel.y_label, panel.y_names), "autorange": "reversed", "showgrid": False},
        int(min(760, max(260, 120 + 22 * len(panel.y_names)))),
    )


def _group_colours(groups: Sequence[float]) -> Json:
    """One flat colour per group number, in a scale with steps."""
    low, high = int(min(groups, default=0)), int(max(groups, default=0))
    count = high - low + 1
    scale: list[list[Any]] = []
    for number in range(count):
        ink = f"@series-{(low + number) % len(SERIES['light'])}"
        scale += [[number / count, ink], [(number + 1) / count, ink]]
    trace: Json = {"zmin": low - 0.5, "zmax": high + 0.5, "colorscale": scale}
    if count <= 20:
        trace["colorbar"] = {
            "title": {"text": "group", "side": "right"},
            "thickness": 14,
            "outlinewidth": 0,
            "tickvals": list(range(low, high + 1)),
        }
    return trace


def _spans(panel: Spans) -> Json:
    last = len(SEQUENTIAL) - 1
    trace = {
        "type": "bar",
        "orientation": "h",
        "base": _round(panel.start),
        "x": _round([finish - start for start, finish in zip(panel.start, panel.finish, strict=True)]),
        "y": panel.row,
        "text": [plain(words) for words in panel.words],
        "textposition": "none",
        "width": 0.7,
        "marker": {
            "color": panel.value,
            "colorscale": [[place / last, ink] for place, ink in enumerate(SEQUENTIAL)],
            "cmin": 0,
            "cmax": max(1.0, *panel.value),
            "line": {"width": 0.6, "color": "@quiet"},
            "colorbar": {
                "title": {"text": panel.value_label, "side": "right"},
                "thickness": 14,
                "outlinewidth": 0,
            },
        },
        "hovertemplate": "%{text}, %{base} to %{x}<extra></extra>",
    }
    return _made(
        [trace],
        {"title": {"text": panel.x_label}, "zeroline": False},
        {**_named_axis(panel.y_label, panel.names), "autorange": "reversed", "showgrid": False},
        int(min(900, max(260, 120 + 18 * len(panel.names)))),
        layout={"barmode": "overlay"},
    )


def _made(
    traces: list[Json], x_axis: Json, y_axis: Json, height: int, legend: int = 0, layout: Json | None = None
) -> Json:
    return {
        "data": traces,
        "layout": {"xaxis": x_axis, "yaxis": y_axis, **(layout or {})},
        "height": height,
        "legend": legend,
    }


def _named_axis(title: str, names: Sequence[str]) -> Json:
    """An axis of places with names, of which as many are written as have room."""
    places, words = tick_names(names)
    return {
        "title": {"text": title},
        "tickvals": places,
        "ticktext": [plain(word) for word in words],
        "zeroline": False,
    }


def plain(text: str) -> str:
    """Text that plotly shows as it is, though it reads tags and entities in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _round(values: Sequence[Number]) -> list[Number]:
    """Five significant digits are more than a screen shows."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
