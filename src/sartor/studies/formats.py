"""The numbers of a comparison as a table for paper, a spreadsheet or a page: LaTeX, CSV, Markdown.

Methods stand from the best main score to the worst; the best value of every column is bold, with others that
are as good to the shown digits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sartor.runs.evaluation import CELLS
from sartor.runs.metrics import is_share
from sartor.studies.comparison import Comparison, Estimate, MethodResult

TEX = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
})  # fmt: skip
"""What stands in LaTeX for signs that it reads otherwise."""

Of = Callable[[MethodResult], Estimate | None]


@dataclass(frozen=True)
class Column:
    """A column of numbers over seeds: what it is called, and how its values are written."""

    head: str
    of: Of
    factor: float
    digits: int
    more: bool
    """Whether more is better."""

    def mean(self, method: MethodResult) -> float | None:
        """The mean over seeds, as it is written."""
        found = self.of(method)
        return None if found is None or found.mean is None else round(self.factor * found.mean, self.digits)

    def best(self, methods: Sequence[MethodResult]) -> float | None:
        """The best of the means."""
        there = [mean for method in methods if (mean := self.mean(method)) is not None]
        return (max if self.more else min)(there) if there else None

    def text(self, method: MethodResult, between: str) -> str | None:
        """Mean and deviation."""
        found, mean = self.of(method), self.mean(method)
        if found is None or mean is None:
            return None
        if found.deviation is None:
            return f"{mean:.{self.digits}f}"
        return f"{mean:.{self.digits}f}{between}{self.factor * found.deviation:.{self.digits}f}"


def columns(result: Comparison) -> list[Column]:
    """Those that some method has numbers for: the main score, every cell, spread over clients, costs."""
    share = is_share(result.score)
    factor, digits = (100.0, 1) if share else (1.0, 4)
    more = result.more_is_better
    name = result.score.replace("_", " ") + (" (%)" if share else "")

    def scored(head: str, of: Of, more: bool = more) -> Column:
        return Column(head, of, factor, digits, more)

    made = [
        scored(name, lambda method: method.cells[method.main]),
        *(scored(cell.replace("_", " "), lambda method, cell=cell: method.cells.get(cell)) for cell in CELLS),  # type: ignore[misc]
        scored("client std", lambda method: method.client_deviation, more=False),
        scored("worst decile", lambda method: method.worst_decile),
        scored("best by validation", lambda method: method.best_by_validation.get(method.main)),
        Column("MB sent", lambda method: method.bytes, 1e-6, 2, more=False),
        Column("seconds", lambda method: method.seconds, 1.0, 1, more=False),
    ]
    return [column for column in made if column.best(result.methods) is not None]


def ordered(result: Comparison) -> list[MethodResult]:
    """The methods, the best main score first."""
    main = columns(result)[0]
    sign = -1.0 if main.more else 1.0

    def place(method: MethodResult) -> float:
        found = method.cells[method.main].mean
        return float("inf") if found is None else sign * found

    return sorted(result.methods, key=place)


def markdown(result: Comparison) -> str:
    """A table for a page."""
    shown = columns(result)
    lines = [f"| method | {' | '.join(column.head for column in shown)} |"]
    lines.append(f"| --- |{' ---: |' * len(shown)}")
    for method in ordered(result):
        cells = [_bold(column, method, result, " ± ", "**{}**", "–") for column in shown]
        lines.append(f"| {method.label.replace('|', '&#124;')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def latex(result: Comparison) -> str:
    """A table for paper, with booktabs' rules."""
    shown = columns(result)
    heads = " & ".join(map(_tex, ("method", *(column.head for column in shown))))
    lines = [rf"\begin{{tabular}}{{l{'r' * len(shown)}}}", r"\toprule", rf"{heads} \\", r"\midrule"]
    for method in ordered(result):
        cells = [_bold(column, method, result, r" \pm ", r"\mathbf{{{}}}", "") for column in shown]
        lines.append(
            rf"{_tex(method.label)} & {' & '.join(f'${cell}$' if cell else '--' for cell in cells)} \\"
        )
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def comma_separated(result: Comparison) -> str:
    """Every number as it is, a row for each method: mean and deviation over seeds of each column."""
    shown = columns(result)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", "algorithm", "main", "seeds"] + [
        f"{column.head} {part}" for column in shown for part in ("mean", "deviation")
    ])  # fmt: skip
    for method in ordered(result):
        row: list[object] = [method.label, method.algorithm, method.main, len(result.seeds)]
        for column in shown:
            found = column.of(method)
            values = (None, None) if found is None else (found.mean, found.deviation)
            row += ["" if value is None else column.factor * value for value in values]
        writer.writerow(row)
    return file.getvalue()


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "latex": latex,
    "csv": comma_separated,
    "markdown": markdown,
}
"""What a comparison can be written as."""


def _bold(
    column: Column, method: MethodResult, result: Comparison, between: str, strong: str, nothing: str
) -> str:
    """A cell, strong where it has the best value of its column."""
    text = column.text(method, between)
    if text is None:
        return nothing
    best = len(result.methods) > 1 and column.mean(method) == column.best(result.methods)
    return strong.format(text) if best else text


def _tex(text: str) -> str:
    return text.translate(TEX)
