"""``sartor reproduce``: the papers' tables and figures, listed and run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sartor.commands.base import AsJson, Device, Imports, app, print_table, reported
from sartor.commands.compare import Seeds, Together, parse_seeds, show
from sartor.commands.words import refuse_unused, split_words
from sartor.errors import SartorError, SettingError

if TYPE_CHECKING:
    from sartor.studies.entries import Column, Entry
    from sartor.studies.forecast import Forecast
    from sartor.studies.library import Failure
    from sartor.studies.reproduction import Reproduction


class Scale(StrEnum):
    """The setting that is run."""

    small = "small"
    paper = "paper"


@app.command()
@reported
def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]... [KEY=VALUE]...",
            help="Tables or figures such as comfed/table4, left out: list them; settings that win over them.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[Scale, typer.Option(help="The paper's setting, or one of a few minutes.")] = Scale.small,
    seeds: Seeds = None,
    methods: Annotated[
        str | None, typer.Option(help="Some of the methods, as in fedavg,fedprox.", show_default=False)
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Some of the columns, as in 100,200.", show_default=False)
    ] = None,
    together: Together = None,
    jobs: Annotated[int, typer.Option(help="Processes that make the runs at once.", min=1)] = 1,
    device: Device = None,
    imports: Imports = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs, where earlier ones are found; left out: one in reproductions/. "
            "Of several tables it has a folder for each.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say how many runs there are and what they would take; run nothing."),
    ] = False,
    only_made: Annotated[
        bool,
        typer.Option(
            "--only-made", help="Show what finished runs give, also where others are missing; run nothing."
        ),
    ] = False,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing", help="Leave out what the entry has a number of ours for, with these seeds."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run papers' tables or figures, and print our numbers beside the papers'.

    sartor reproduce

    sartor reproduce comfed/table4 --methods fedavg,prox-yogi

    sartor reproduce diversifed/table1 --scale paper --device cuda --columns CIFAR-10

    sartor reproduce diversifed/table1 --scale paper --device cuda --dry-run

    sartor reproduce diversifed/table1 --scale paper --device cuda --jobs 4

    sartor reproduce diversifed/table1 --scale paper --device cuda --only-made

    sartor reproduce diversifed/table1 --scale paper --device cuda --missing --seeds 1

    sartor reproduce comfed/table4 pfllib/fashion-mnist --scale paper --device cuda --jobs 6

    What was run before is found again, and a run that was interrupted goes on.
    """
    words, overrides = split_words(arguments or ())
    refuse_unused(overrides, dict.fromkeys(("compare", "search", "algorithm"), "the entry says it"))
    from sartor.runs.experiment import collect
    from sartor.runs.record import to_json
    from sartor.studies import entries, reproduction

    if not words:
        if overrides:
            raise SettingError(f"{overrides[0]!r}: name the table or figure it is for")
        _print_entries(entries.entries(), as_json)
        return
    asked: dict[str, Any] = {
        "scale": scale.value,
        "seeds": parse_seeds(seeds),
        "methods": _parts(methods),
        "columns": _parts(columns),
        "device": device,
        "settings": collect(None, overrides, imports=imports or None),
        "missing": missing,
        "out": out,
    }
    if dry_run and only_made:
        raise SettingError("--dry-run and --only-made: either runs nothing; give one of them")
    if dry_run:
        from sartor.studies.forecast import forecast_all

        expected = forecast_all(words, **asked, jobs=jobs)
        if as_json:
            print(to_json(_alone(words, [each.to_mapping() for each in expected])))
        else:
            _print_forecasts(expected, jobs)
        return
    how: dict[str, Any] = {"together": together, "jobs": jobs, "only_made": only_made}
    failed: list[Failure] = []
    made = []
    try:
        for result in reproduction.reproduce_all(words, **asked, **how, progress=True):
            figures = _drawn(result)
            made.append({**result.to_mapping(), "figures": [str(path) for path in figures]})
            failed += result.failed
            if not as_json:
                print(end="\n" * (len(made) > 1))
                _print_reproduction(entries.entry(result.name), result)
                for path in figures:
                    print(f"figure: {path}")
                print(f"reproduction: {result.out / reproduction.FILE}")
    finally:  # also where nothing came of another one
        if as_json and made:
            print(to_json(_alone(words, made)))
    if failed:
        first = failed[0]
        left_out = ", ".join(dict.fromkeys(failure.label for failure in failed))
        raise SartorError(
            f"left out, as runs failed: {left_out}; the first, {first.label} with seed {first.seed}: "
            f"{first.message}"
        )


def _alone(words: Sequence[str], made: list[dict[str, Any]]) -> Any:
    """A list where several were asked for."""
    return made if len(words) > 1 else made[0]


def _drawn(result: Reproduction) -> list[Path]:
    """The files of the entry's figure, if it is one; where it cannot be drawn the numbers are there still."""
    from sartor.report.papers import write_paper_figure

    try:
        return write_paper_figure(result)
    except SartorError as error:
        print(f"the figure is not drawn: {error}", file=sys.stderr)
        return []


def _parts(given: str | None) -> list[str] | None:
    """``a,b`` as a list."""
    return None if given is None else [part.strip() for part in given.split(",")]


def _print_entries(entries: Sequence[Entry], as_json: bool) -> None:
    """Every table and figure, a line each."""
    from sartor.runs.record import to_json

    if as_json:
        keys = ("name", "title", "paper", "place", "cannot", "same_as", "source", "status")
        rows = [{key: getattr(entry, key) for key in keys} for entry in entries]
        for row, entry in zip(rows, entries, strict=True):
            row["scales"] = list(entry.scales)
            row["notes"] = {scale: at.note for scale, at in entry.scales.items() if at.note}
            row["columns"] = {scale: [c.label for c in at.columns] for scale, at in entry.scales.items()}
            row["methods"] = {scale: list(at.methods) for scale, at in entry.scales.items()}
        print(to_json(rows))
        return
    heads = ("name", "place", "what it shows", "run by", "ours")
    print_table(
        heads,
        (
            (entry.name, entry.place, entry.title, ", ".join(sorted(entry.scales)[::-1]) or "-", entry.status)
            for entry in entries
        ),
    )
    print("run one with: sartor reproduce NAME --scale small|paper")


def _print_reproduction(entry: Entry, result: Reproduction) -> None:
    """A table for every column: ours, the paper's, and how they compare."""
    small, at = result.scale == "small", entry.scales[result.scale]
    print(f"{entry.name}: {entry.title} ({entry.paper}, {entry.place})")
    if small:
        words = _in_words(at.experiment)
        said = f" ({words})" if words else ""
        print(f"Small setting{said}: numbers do not compare with the paper's in size,")
        print("only in the order of methods.")
    if result.settings:
        print(f"With settings of your own, so that no band is judged by: {_as_words(result.settings)}")
    unit = " (%)" if result.percent else ""
    digits = 1 if result.percent else 4
    for column in dict.fromkeys(number.column for number in result.numbers):
        numbers = [number for number in result.numbers if number.column == column]
        order = next((order for order in result.orders if order.column == column), None)
        said = f", beside the paper's {order.paper}" if small and order else ""
        print(f"\n{column}{said}{_cut(at.columns, column, result.settings)}")
        heads = ["method", f"ours{unit}", f"paper{unit}"]
        heads += [] if small else ["difference", "paper's band"]
        heads += [f"measured before{unit}", "that band"]
        rows = []
        for number in numbers:
            row = [number.method, show(number.ours, digits=digits)]
            row.append(_with_deviation(number.paper, number.paper_deviation, digits))
            if not small:
                sign = "-" if number.difference is None else f"{number.difference:+.{digits}f}"
                row += [sign, _where(number.within_paper)]
            row.append(_with_deviation(number.measured, number.measured_deviation, digits))
            row.append(_where(number.within_measured))
            rows.append(row)
        print_table(heads, rows)
        if order is not None and order.tau is not None:
            print(f"order of {order.methods} methods: Kendall's τ = {order.tau:.2f} (1: the paper's order)")
    if entry.source != "ours" and not any(number.paper is not None for number in result.numbers):
        print("The paper draws its numbers and does not print them, so none stand here.")
    if result.scale not in entry.measured:
        print("Not measured yet: there is no band of ours to compare with.")
    else:
        kept = entry.measured[result.scale]
        print(f"Measured before: {kept.date}, {kept.hardware}, seeds {kept.seeds}, {kept.command}")
        shown = {number.method for number in result.numbers}
        changed = [label for label in kept.stale(at) if label in shown]
        if changed:
            print(f"Changed since that was measured: {', '.join(changed)}")
    if at.note:
        print(f"Note: {at.note}")


def _cut(columns: Sequence[Column], label: str, settings: Mapping[str, Any]) -> str:
    """What to say of a column whose round the runs do not come to."""
    round = next(column.round for column in columns if column.label == label)
    end = settings.get("rounds")
    return f" (the runs end after round {end})" if isinstance(end, int) and end < round else ""


def _print_forecasts(expected: Sequence[Forecast], jobs: int) -> None:
    """What each entry takes, and all of them."""
    from sartor.runs.durations import duration

    for each in expected:
        _print_forecast(each, jobs)
    if len(expected) > 1:
        runs, seconds = sum(each.runs for each in expected), sum(each.seconds for each in expected)
        print(f"in all {runs} runs, about {duration(seconds)} left to do")


def _print_forecast(expected: Forecast, jobs: int) -> None:
    """What an entry takes, a line for each method and its columns."""
    from sartor.runs.durations import duration

    if not expected.runs:
        print(f"{expected.name}, {expected.scale}: is computed in moments; nothing is trained")
        return
    rows = [
        (
            part.method,
            part.columns,
            f"{part.runs}",
            f"{part.there}",
            f"{part.rounds:,}",
            duration(part.seconds_per_round),
            "-" if part.seconds == 0 else duration(part.seconds),
        )
        for part in expected.parts
    ]
    print_table(("method", "columns", "runs", "of them there", "rounds each", "a round", "to do"), rows)
    whole = f"{expected.runs} runs, {expected.rounds:,} rounds in all"
    print(f"{expected.name}, {expected.scale}: {whole}; {expected.there} runs are there")
    took = (
        "nothing is left to do" if expected.seconds == 0 else f"about {duration(expected.seconds)} left to do"
    )
    at_once = (
        f" with {expected.jobs} jobs" if expected.jobs > 1 else ", one run at a time" if jobs > 1 else ""
    )
    print(f"{took} on {expected.device}{at_once}, from a few rounds of each, or those that are there")


def _as_words(settings: Mapping[str, Any], before: str = "") -> str:
    """Settings as they are given: ``rounds=10 data.clients=6``."""
    words = [
        _as_words(value, f"{before}{key}.") if isinstance(value, Mapping) else f"{before}{key}={value}"
        for key, value in settings.items()
    ]
    return " ".join(words)


def _in_words(experiment: Mapping[str, Any]) -> str:
    """What an experiment is about."""
    data = experiment.get("data", {})
    known = {
        "{}": data.get("name"),
        "{} clients": data.get("clients"),
        "divided by {}": experiment.get("partition", {}).get("name"),
        "model {}": experiment.get("model", {}).get("name"),
        "{} rounds": experiment.get("rounds"),
    }
    return ", ".join(text.format(value) for text, value in known.items() if value is not None)


def _with_deviation(mean: float | None, deviation: float | None, digits: int) -> str:
    """A number that was printed or measured."""
    if mean is None:
        return "-"
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _where(inside: bool | None) -> str:
    return "-" if inside is None else "within" if inside else "OUTSIDE"
