"""Figures for paper: the same data as on the page, drawn by matplotlib to PNG or PDF files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sartor.errors import SartorError
from sartor.report.figures import Boxes, Dots, Figure, Grid, Lines, Number, Panel, Ranks, Spans, tick_names
from sartor.report.style import DIVERGING, SEQUENTIAL, SERIES, colour, dash, marker

FORMATS = ("png", "pdf")
GREY = "#57606a"
QUIET = "#c4cad1"
"""Of lines behind others."""


def write_figures(figures: Sequence[Figure], folder: str | Path, format: str = "png") -> list[Path]:
    """Every view of every figure as a file; of a series of rounds only the last. Returns what was written."""
    if format not in FORMATS:
        raise SartorError(f"format: must be one of {', '.join(FORMATS)}, got {format!r}")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_pdf import FigureCanvasPdf
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise SartorError(
            "writing figures needs matplotlib; install it with: pip install 'sartor[plot]'"
        ) from None
    folder = Path(folder)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A name such as "$a" is not mathematics, and text in a PDF stays text.
        with matplotlib.rc_context({"text.parse_math": False, "pdf.fonttype": 42, "font.size": 9}):
            for figure in figures:
                for key, view in figure.printed().items():
                    canvas = Canvas(layout="constrained", dpi=150)
                    axes = canvas.add_subplot()
                    draw(view.panel, canvas, axes)
                    path = folder / f"{_file_name(figure, key)}.{format}"
                    backend: Any = FigureCanvasAgg if format == "png" else FigureCanvasPdf
                    getattr(backend(canvas), f"print_{format}")(path)  # savefig would draw it twice
                    written.append(path)
    except OSError as error:
        raise SartorError(f"{folder}: figures cannot be written: {error.strerror or error}") from None
    return written


def draw(panel: Panel, canvas: Any, axes: Any) -> None:
    """Draw a panel on a matplotlib figure and its axes."""
    if isinstance(panel, Lines):
        _lines(panel, canvas, axes)
    elif isinstance(panel, Boxes):
        _boxes(panel, canvas, axes)
    elif isinstance(panel, Dots):
        _dots(panel, canvas, axes)
    elif isinstance(panel, Ranks):
        _ranks(panel, canvas, axes)
    elif isinstance(panel, Grid):
        _grid(panel, canvas, axes)
    else:
        _spans(panel, canvas, axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _file_name(figure: Figure, key: Sequence[str]) -> str:
    """The figure's name and its options, in letters that every file system takes."""
    words = [figure.name]
    for choice, option in zip(figure.choices, key, strict=True):
        if len(choice.options) > 1 or choice.name in ("cell", "axis"):
            words.append(choice.options[option] if choice.name in ("run", "partition", "panel") else option)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-")


def _lines(panel: Lines, canvas: Any, axes: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    canvas.set_size_inches(6.4, 4.0 + 0.1 * len(panel.lines))
    hollow = ""
    for line in panel.lines:
        ink = QUIET if line.quiet else SERIES["light"][colour(line.place)]
        x, y = _numbers(line.x), _numbers(line.y)
        if line.low is not None and line.high is not None:
            axes.fill_between(x, _numbers(line.low), _numbers(line.high), color=ink, alpha=0.15, linewidth=0)
        if line.hollow:
            axes.scatter(
                x, y, s=36, facecolors="none", edgecolors=ink, marker=marker(line.place)[1], zorder=3
            )
            hollow = line.label
            continue
        every = max(1, len(x) // 12)
        axes.plot(
            x,
            y,
            color=ink,
            linestyle="-" if line.quiet else dash(line.place)[1],
            marker=None if line.quiet else marker(line.place)[1],
            markersize=4,
            markevery=every,
            linewidth=0.8 if line.quiet else 1.5,
            label=line.label,
        )
    if hollow:
        axes.scatter([], [], s=36, facecolors="none", edgecolors=GREY, label=hollow)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    if panel.x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.bytes:
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.grid(alpha=0.25)
    if panel.lines:
        canvas.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)


def _boxes(panel: Boxes, canvas: Any, axes: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    canvas.set_size_inches(max(3.2, 1.2 + 0.9 * len(panel.boxes)), 4.0)
    for position, box in enumerate(panel.boxes):
        ink = SERIES["light"][colour(box.place)]
        low, lower, middle, upper, high = box.five
        numbers = {"whislo": low, "q1": lower, "med": middle, "q3": upper, "whishi": high, "mean": box.mean}
        line = {"color": ink, "linewidth": 1.5}
        axes.bxp(
            [numbers],
            positions=[position],
            widths=0.6,
            showfliers=False,
            showmeans=True,
            meanline=True,
            meanprops={**line, "linestyle": "--", "linewidth": 1},
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            medianprops=line,
        )
        axes.scatter(
            [position + offset for offset in box.offsets],
            box.values,
            s=12,
            color=ink,
            marker=marker(box.place)[1],
            alpha=0.6,
            linewidths=0,
        )
    _name_ticks(axes, [box.label for box in panel.boxes], turned=len(panel.boxes) > 3)
    axes.set(ylabel=panel.y_label, xlim=(-0.6, len(panel.boxes) - 0.4))
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(axis="y", alpha=0.25)


def _ranks(panel: Ranks, canvas: Any, axes: Any) -> None:
    canvas.set_size_inches(6.4, max(2.0, 1.0 + 0.25 * len(panel.methods)))
    for clique in panel.cliques:
        ends = [min(clique), max(clique)]
        axes.plot([panel.ranks[end] for end in ends], ends, color=GREY, linewidth=4, alpha=0.4)
    axes.scatter(panel.ranks, range(len(panel.methods)), color=SERIES["light"][0], zorder=3)
    axes.set_yticks(range(len(panel.methods)), panel.methods)
    axes.invert_yaxis()
    axes.set(xlabel="average rank, 1 is best")
    axes.grid(axis="x", alpha=0.25)


def _dots(panel: Dots, canvas: Any, axes: Any) -> None:
    across, up = len(panel.x_names), len(panel.y_names)
    wide, high = min(14.0, max(4.0, 0.25 * across)), min(14.0, max(2.5, 0.25 * up))
    canvas.set_size_inches(wide + 1.0, high + 0.8)
    dots = axes.scatter(panel.x, panel.y, color=SERIES["light"][0], alpha=0.8, linewidths=0)
    axes.set(xlim=(-0.7, across - 0.3), ylim=(-0.7, up - 0.3))
    _name_axes(panel, axes)
    axes.grid(alpha=0.15)
    canvas.draw_without_rendering()  # the axes get their size: the largest dot fills a cell of it
    room = axes.get_window_extent()
    cell = max(4.0, 0.9 * min(room.width / across, room.height / up) * 72 / canvas.dpi)
    dots.set_sizes([max(0.2, size / max(panel.size) * cell**2) for size in panel.size])


def _grid(panel: Grid, canvas: Any, axes: Any) -> None:
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap

    across, down = len(panel.x_names), len(panel.y_names)
    canvas.set_size_inches(min(12.0, max(4.0, 0.22 * across)) + 1.4, min(12.0, max(2.6, 0.22 * down)) + 0.8)
    values = [_numbers(row) for row in panel.values]
    known = [value for row in panel.values for value in row if value is not None]
    options: dict[str, Any] = {"cmap": LinearSegmentedColormap.from_list("sequential", SEQUENTIAL)}
    ticks = None
    if panel.kind == "groups":
        low, high = int(min(known, default=0)), int(max(known, default=0))
        inks = [SERIES["light"][number % len(SERIES["light"])] for number in range(low, high + 1)]
        borders = [number - 0.5 for number in range(low, high + 2)]
        options = {"cmap": ListedColormap(inks), "norm": BoundaryNorm(borders, len(inks))}
        ticks = list(range(low, high + 1)) if high - low < 20 else None
    elif panel.kind == "diverging":
        end = max((abs(value) for value in known), default=1.0) or 1.0
        colours = LinearSegmentedColormap.from_list("diverging", DIVERGING["light"])
        options = {"cmap": colours, "vmin": -end, "vmax": end}
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    canvas.colorbar(image, ax=axes, label=panel.value_label, ticks=ticks)
    _name_axes(panel, axes)
    if panel.kind == "groups" and across <= 40 and down <= 60:  # told apart without colours too
        for row, line in enumerate(panel.values):
            for column, value in enumerate(line):
                if value is not None:
                    axes.text(column, row, f"{value:g}", ha="center", va="center", color="white", fontsize=7)


def _spans(panel: Spans, canvas: Any, axes: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    canvas.set_size_inches(7.0, min(14.0, max(2.6, 0.2 * len(panel.names))) + 0.8)
    shades = ScalarMappable(
        Normalize(0, max(1.0, *panel.value)), LinearSegmentedColormap.from_list("sequential", SEQUENTIAL)
    )
    lengths = [finish - start for start, finish in zip(panel.start, panel.finish, strict=True)]
    axes.barh(
        panel.row,
        lengths,
        left=panel.start,
        height=0.7,
        color=shades.to_rgba(np.asarray(panel.value)),
        edgecolor=GREY,
        linewidth=0.4,
    )
    canvas.colorbar(shades, ax=axes, label=panel.value_label)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.invert_yaxis()
    axes.set_yticks(*tick_names(panel.names))


def _name_axes(panel: Dots | Grid, axes: Any) -> None:
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    _name_ticks(axes, panel.x_names, turned=max(map(len, panel.x_names)) > 4)
    axes.set_yticks(*tick_names(panel.y_names))


def _name_ticks(axes: Any, names: Sequence[str], turned: bool) -> None:
    places, words = tick_names(names)
    axes.set_xticks(places, words, rotation=45 if turned else 0, ha="right" if turned else "center")


def _numbers(values: Sequence[Number]) -> list[float]:
    """Gaps as matplotlib wants them."""
    return [float("nan") if value is None else value for value in values]
