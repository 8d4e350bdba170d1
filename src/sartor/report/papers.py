"""The figures of papers, drawn from our runs with the paper's own numbers as hollow marks.

What lies on the axis is said by the entry (``over``): rounds, the numbers in its columns' or its methods'
names, or clients. A curve over rounds has at each round what the table would show if it ended there, so that
curve and table agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sartor.errors import SartorError
from sartor.report.figures import (
    Choice,
    Figure,
    Line,
    Lines,
    Number,
    View,
    Views,
    calmed,
    mean_line,
    thinned,
)
from sartor.report.html import document
from sartor.report.images import write_figures
from sartor.report.runs import own_cell, read_run
from sartor.report.tables import Entry as Cell
from sartor.report.tables import Table
from sartor.runs.metrics import more_is_better
from sartor.runs.record import write_text
from sartor.studies import reproduction
from sartor.studies.entries import Column, Entry, Setting, entry
from sartor.studies.reproduction import Reproduction

AXES = {"rounds": "round", "columns": "", "methods": "", "clients": "client"}


@dataclass(frozen=True)
class Drawn:
    """A reproduction and what its entry says of the figure."""

    made: Reproduction
    figure: Entry
    """The figure's entry."""
    table: Entry
    """The entry that has its numbers; often the same."""

    @property
    def at(self) -> Setting:
        """What was run."""
        return self.table.scales[self.made.scale]

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns that have numbers."""
        there = {number.column for number in self.made.numbers}
        return {column.label: column for column in self.at.columns if column.label in there}

    @cached_property
    def numbers(self) -> dict[tuple[str, str], reproduction.Number]:
        """By method and column."""
        return {(number.method, number.column): number for number in self.made.numbers}

    @property
    def methods(self) -> list[str]:
        """The methods that have numbers, in the entry's order."""
        there = {number.method for number in self.made.numbers}
        return [label for label in self.at.methods if label in there]

    def titled(self, method: str) -> str:
        """A method as the paper prints it."""
        return self.at.methods[method].title or method

    def shared(self, value: float | None) -> Number:
        """A number as it is drawn: percents as shares of one."""
        return value if value is None or not self.table.percent else value / 100

    def score(self, column: Column) -> str:
        """What is on the other axis."""
        return column.score or self.table.score


def write_paper_figure(made: Reproduction) -> list[Path]:
    """Draw the figure that was reproduced: an HTML page and a PNG file for each panel, in its folder.

    Nothing is written for an entry that is no figure.

    >>> import sartor, tempfile
    >>> some = {"methods": ["fedavg"], "settings": {"rounds": 5}, "out": tempfile.mkdtemp()}
    >>> [path.name for path in write_paper_figure(sartor.reproduce("comfed/fig2", **some))]
    ['comfed-fig2.html', 'comfed-fig2.png']
    """
    drawn = Drawn(made, entry(made.asked), entry(made.name))
    if not drawn.figure.over:
        return []
    figure = paper_figure(drawn)
    path = made.out / f"{figure.name}.html"
    about = f"{drawn.figure.paper}, {drawn.figure.place}; {made.scale} setting, seeds {_listed(made.seeds)}."
    note = drawn.at.note
    write_text(
        path,
        document(
            f"{made.asked}: {drawn.figure.title}",
            about,
            [_table(drawn)],
            [figure],
            notes=[note] if note else [],
        ),
    )
    return [path, *write_figures([figure], made.out)]


def paper_figure(drawn: Drawn) -> Figure:
    """The figure: a view for each of its panels."""
    makers = {"rounds": _rounds, "columns": _columns, "methods": _methods, "clients": _clients}
    views: Views = {}
    panels: dict[str, str] = {}
    for name, y_label, lines in makers[drawn.figure.over](drawn):
        if not lines:
            continue
        marked = any(line.hollow for line in lines)
        panel = Lines(
            drawn.figure.axis or AXES[drawn.figure.over],
            f"{y_label}, the best so far" if _best(drawn) else y_label,
            [thinned(line) for line in lines],
            percent=drawn.table.percent,
        )
        key = str(len(panels))
        panels[key] = name
        views[key,] = View(panel, _sentence(drawn, name, marked))
    if not views:
        raise SartorError(f"{drawn.made.asked}: the runs have nothing that its figure shows")
    return Figure(
        name=drawn.made.asked.replace("/", "-"),
        title=drawn.figure.title,
        about="Lines are ours, means over seeds with bands of one standard deviation.",
        choices=[Choice("panel", "panel", panels)],
        views=views,
    )


def _sentence(drawn: Drawn, panel: str, marked: bool) -> str:
    """What a panel shows, in words."""
    words = f"{drawn.figure.title}{', ' if panel else ''}{panel}."
    if _best(drawn):
        words += " Each point is the best on test data so far."
    if marked:
        words += " Hollow marks are the paper's numbers"
        words += ", of its own setting and not of this one." if drawn.made.scale == "small" else "."
    if drawn.made.settings:
        words += (
            " Settings were changed, so that the two do not compare." if marked else " Settings were changed."
        )
    return words


def _best(drawn: Drawn) -> bool:
    """Whether a curve never falls, as the numbers are the best ones so far."""
    return drawn.table.when == "best" and drawn.figure.over == "rounds"


Panels = Iterator[tuple[str, str, list[Line]]]


def _rounds(drawn: Drawn) -> Panels:
    """Curves over rounds, a panel for all columns that show the same runs."""
    panels: dict[str, list[Column]] = {}
    for column in drawn.columns.values():
        shown = (drawn.score(column), column.cell)
        panels.setdefault(repr((column.settings, column.hyper, shown)), []).append(column)
    for columns in panels.values():
        lines: list[Line] = []
        marks: list[Line] = []
        for place, method in enumerate(drawn.methods):
            numbers = {
                c.label: drawn.numbers[method, c.label] for c in columns if (method, c.label) in drawn.numbers
            }
            if not numbers:
                continue
            curves = [_curve(drawn, folder, columns[0]) for folder in next(iter(numbers.values())).runs]
            line = mean_line(drawn.titled(method), place, curves)
            if line is None:
                continue
            lines.append(line)
            ends = {c.label: float(c.round) if c.round else line.x[-1] for c in columns}
            marks += _marks(drawn, place, [(ends[label], number) for label, number in numbers.items()])
        name = columns[0].label if len(panels) > 1 else ""
        score = drawn.score(columns[0])
        yield name, score.replace("_", " "), _together(lines, marks, score)


def _curve(drawn: Drawn, folder: str, column: Column) -> dict[int, tuple[float, Number]]:
    """What the table would show of a run if it ended at each of its rounds."""
    rows = read_run(drawn.made.out / folder).rounds
    points: dict[int, tuple[float, Number]] = {}
    best: float | None = None
    for row in rows:
        value = reproduction.number_of([row], Column("", cell=column.cell, score=column.score), drawn.table)
        if value is None:
            continue
        best = value if best is None else max(best, value)
        points[int(row["round"])] = (float(row["round"]), best if drawn.table.when == "best" else value)
    return points


def _columns(drawn: Drawn) -> Panels:
    """Lines over the numbers in the columns' names; what stands before a number names the line."""
    split = {label: _number_in(label) for label in drawn.columns}
    kinds = list(dict.fromkeys(before for before, _ in split.values()))
    lines: list[Line] = []
    marks: list[Line] = []
    for kind in kinds:
        for method in drawn.methods:
            place = len(lines)
            points = _sorted(
                (x, drawn.numbers[method, label])
                for label, (before, x) in split.items()
                if before == kind and (method, label) in drawn.numbers
            )
            words = [drawn.titled(method)] if len(drawn.methods) > 1 or not kind else []
            lines.append(_line(drawn, ", ".join([*words, *([kind] if kind else [])]), place, points))
            marks += _marks(drawn, place, points)
    score = drawn.score(next(iter(drawn.columns.values())))
    yield "", score.replace("_", " "), _together(lines, marks, score)


def _methods(drawn: Drawn) -> Panels:
    """A line over the numbers in the methods' names, a panel for each column."""
    places = {method: _number_in(drawn.titled(method))[1] for method in drawn.methods}
    for label, column in drawn.columns.items():
        points = _sorted(
            (places[method], drawn.numbers[method, label])
            for method in drawn.methods
            if (method, label) in drawn.numbers
        )
        score = drawn.score(column).replace("_", " ")
        yield label, score, [_line(drawn, label, 0, points), *_marks(drawn, 0, points)]


def _clients(drawn: Drawn) -> Panels:
    """Every client's own score at the end, a panel for each column."""
    for label, column in drawn.columns.items():
        score = drawn.score(column)
        lines: list[Line] = []
        for place, method in enumerate(drawn.methods):
            number = drawn.numbers.get((method, label))
            if number is None:
                continue
            runs = [read_run(drawn.made.out / folder) for folder in number.runs]
            seeds = [run.clients[f"{own_cell(run.last)}_{score}"] for run in runs]
            points = [{k: (float(k + 1), value) for k, value in enumerate(values)} for values in seeds]
            line = mean_line(drawn.titled(method), place, points)
            lines += [] if line is None else [line]
        yield label, score.replace("_", " "), _together(lines, [], score)


def _sorted(points: Iterable[tuple[float, reproduction.Number]]) -> list[tuple[float, reproduction.Number]]:
    return sorted(points, key=lambda point: point[0])


def _line(drawn: Drawn, label: str, place: int, points: Sequence[tuple[float, reproduction.Number]]) -> Line:
    """Our means at these places, with a band where there are deviations."""
    means = [drawn.shared(number.ours.mean) for _, number in points]
    wide = [drawn.shared(number.ours.deviation) for _, number in points]
    low: list[Number] | None = None
    high: list[Number] | None = None
    if any(each is not None for each in wide):
        pairs = list(zip(means, wide, strict=True))
        low = [None if m is None or w is None else m - w for m, w in pairs]
        high = [None if m is None or w is None else m + w for m, w in pairs]
    return Line(label, place, [x for x, _ in points], means, low, high)


def _marks(drawn: Drawn, place: int, points: Sequence[tuple[Number, reproduction.Number]]) -> list[Line]:
    """The paper's numbers at these places, if it has any."""
    there = [(x, drawn.shared(number.paper)) for x, number in points if number.paper is not None]
    if not there:
        return []
    whose = "the paper" if drawn.made.scale == "paper" else "the paper, in its own setting"
    return [Line(whose, place, [x for x, _ in there], [y for _, y in there], hollow=True)]


def _together(lines: list[Line], marks: Sequence[Line], score: str) -> list[Line]:
    """Lines and the marks of those that are in colour."""
    shown = calmed(lines, more_is_better(score))
    bright = {line.place for line in shown if not line.quiet}
    return [*shown, *(mark for mark in marks if mark.place in bright)]


def _number_in(label: str) -> tuple[str, float]:
    """The number at the end of a label, and what stands before it but for the symbol it is of.

    >>> _number_in("CIFAR-10 N = 40"), _number_in("τ = 0.5"), _number_in("7")
    (('CIFAR-10', 40.0), ('', 0.5), ('', 7.0))
    """
    found = re.fullmatch(r"(?:(.*?)\s*)??(?:\S+\s*=\s*)?(-?\d+(?:\.\d+)?)\s*%?", label)
    if found is None:
        raise SartorError(f"{label!r}: has no number to draw it by")
    return found[1] or "", float(found[2])


def _table(drawn: Drawn) -> Table:
    """The numbers, as the command prints them."""
    digits = 1 if drawn.table.percent else 4
    unit = " (%)" if drawn.table.percent else ""
    rows = []
    for number in drawn.made.numbers:
        paper = "–" if number.paper is None else f"{number.paper:.{digits}f}"
        ours = "–" if number.ours.mean is None else f"{number.ours.mean:.{digits}f}"
        ours += "" if number.ours.deviation is None else f" ± {number.ours.deviation:.{digits}f}"
        rows.append(
            [
                Cell(drawn.titled(number.method), number.method),
                Cell(number.column, number.column),
                Cell(ours, number.ours.mean),
                Cell(paper, number.paper),
            ]
        )
    about = "Ours with standard deviations over seeds, beside the paper's where it gives any."
    return Table("Numbers", about, ["method", "column", f"ours{unit}", f"paper{unit}"], rows)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
