"""The papers' tables and figures as entries: what is run at which scale, and what it is compared with.

An entry is a TOML file of :mod:`sartor.studies.papers`, read and checked here and run by
:mod:`sartor.studies.reproduction`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from sartor.algorithms.source import method_code
from sartor.errors import SettingError
from sartor.runs.experiment import read_toml
from sartor.settings import build, setting, unknown
from sartor.studies import papers, presets


@dataclass(frozen=True)
class Column:
    """A column of a table, or one of the panels of a figure."""

    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)
    """By method."""
    methods: dict[str, Any] = field(default_factory=dict)
    """Settings by method, of this column alone."""
    round: int = 0
    """The state after so many rounds; 0: at the end."""
    cell: str = ""
    score: str = ""
    paper: str = ""
    """For a small setting, the paper's column whose order of methods is compared."""


@dataclass(frozen=True)
class Row:
    """A method of a table."""

    algorithm: str
    title: str = ""
    """As the paper prints it."""
    hyper: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Band:
    """Numbers by method, one per column, None where there is none; in the unit of the print."""

    values: dict[str, tuple[float | None, ...]]
    deviations: dict[str, tuple[float | None, ...]]

    def at(self, method: str, place: int) -> tuple[float | None, float | None]:
        """Mean and deviation of a method in a column."""
        mean, deviation = self.values.get(method), self.deviations.get(method)
        return mean[place] if mean else None, deviation[place] if deviation else None


@dataclass(frozen=True)
class Measured:
    """What we have measured, and how."""

    date: str
    hardware: str
    seeds: str
    command: str
    band: Band
    code: dict[str, str] = field(default_factory=dict)
    """By method the hash of its source as it was measured (:mod:`sartor.algorithms.source`), where known."""

    def stale(self, at: Setting) -> list[str]:
        """The methods that have changed since."""
        now = {label: method_code(at.methods[label].algorithm) for label in self.code}
        return [label for label, code in self.code.items() if code != now[label]]


def seeds_of(text: str, label: str, column: str, columns: Sequence[str]) -> tuple[int, ...]:
    """The seeds of a method in one of the columns by an entry's words; none where these are no seeds.

    >>> words = "0, 1, 2; CIFAR-10: 0; CIFAR-10 IID (ditto, spfl): 0, 1"
    >>> columns = ["MNIST IID", "CIFAR-10 IID", "CIFAR-10 non-IID"]
    >>> [seeds_of(words, "ditto", column, columns) for column in columns]
    [(0, 1, 2), (0, 1), (0,)]
    """
    said, *others = text.split("; ")
    for other in others:
        place, _, own = other.rpartition(": ")
        where, _, names = place.removesuffix(")").partition(" (")
        here = column == where if where in columns else column.startswith(f"{where} ")
        if here and (not names or label in names.split(", ")):
            said = own
    return tuple(map(int, said.split(", "))) if re.fullmatch(r"\d+(, \d+)*", said) else ()


@dataclass(frozen=True)
class Tuning:
    """Hyper-parameters that are chosen on validation data, by a grid of as many points for every method."""

    seeds: tuple[int, ...] = setting((0,), "seeds of a trial")
    rounds: int = setting(0, "rounds of a trial; 0: as many as the runs have", low=0)
    every: dict[str, Any] = field(default_factory=dict)
    """The values that are tried of every method."""
    methods: dict[str, Any] = field(default_factory=dict)
    """Those of some methods, in their place."""

    def space(self, label: str) -> dict[str, Any]:
        """What is tried of a method."""
        return {**self.every, **self.methods.get(label, {})}

    @property
    def trials(self) -> int:
        """How many points each method has; more than any of them would be refused."""
        return math.prod(len(values) for values in self.every.values())

    def rounds_of(self, runs: int) -> int:
        """How many rounds a trial has where runs have so many."""
        return min(self.rounds or runs, runs)


@dataclass(frozen=True)
class Setting:
    """What is run at one scale."""

    experiment: dict[str, Any]
    columns: tuple[Column, ...]
    methods: dict[str, Row]
    note: str = ""
    tuning: Tuning | None = None


@dataclass(frozen=True)
class Entry:
    """A table or a figure of a paper."""

    name: str
    title: str
    paper: str
    place: str
    same_as: str
    cannot: str
    over: str
    """What a figure's axis has: ``rounds``, ``columns``, ``methods`` or ``clients``; empty: no figure."""
    axis: str
    """What that axis is called."""
    cell: str
    score: str
    when: str
    percent: bool
    seeds: int
    source: str
    scales: dict[str, Setting]
    band: Band
    measured: dict[str, Measured]

    @property
    def status(self) -> str:
        """In a few words what there is to compare with."""
        if self.same_as:
            return f"see {self.same_as}"
        if self.cannot:
            return "not run"
        return f"measured ({', '.join(self.measured)})" if self.measured else "not measured yet"


@dataclass(frozen=True)
class _File:
    """The keys of an entry's file."""

    title: str
    paper: str
    place: str
    note: str = ""
    same_as: str = ""
    cannot: str = ""
    over: str = setting("", "", choices=("", "rounds", "columns", "methods", "clients"))
    axis: str = ""
    preset: str = ""
    experiment: dict[str, Any] = field(default_factory=dict)
    cell: str = "local"
    score: str = "accuracy"
    when: str = setting("last", "", choices=("last", "best"))
    percent: bool = True
    seeds: int = 0
    columns: tuple[Any, ...] = ()
    methods: dict[str, Any] = field(default_factory=dict)
    source: str = setting("printed", "", choices=("printed", "stated", "drawn", "ours"))
    values: dict[str, Any] = field(default_factory=dict)
    deviations: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Small:
    """The keys of ``small``."""

    note: str = ""
    preset: str = ""
    experiment: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)
    columns: tuple[Any, ...] = ()
    methods: tuple[str, ...] = ()
    tuning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Measured:
    """The keys of a table of ``measured``."""

    date: str
    hardware: str
    seeds: str
    command: str
    values: dict[str, Any]
    deviations: dict[str, Any] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)


def entries() -> list[Entry]:
    """All tables and figures there are.

    >>> [entry.title for entry in entries() if entry.name == "comfed/table4"]
    ['Sixteen pairs of client mechanism and server optimizer, CIFAR-10']
    """
    return [entry(name) for name in papers.names()]


@cache
def entry(name: str) -> Entry:
    """One of them, read and checked."""
    file = build(_File, read_toml(papers.path(name)), name)
    columns = _columns(file.columns, f"{name}.columns")
    methods = {label: build(Row, table, f"{name}.methods.{label}") for label, table in file.methods.items()}
    scales: dict[str, Setting] = {}
    if methods:
        tuning = build(Tuning, file.tuning, f"{name}.tuning") if file.tuning else None
        experiment = _experiment(file.preset, file.experiment)
        scales["paper"] = Setting(experiment, columns, methods, file.note, tuning)
    if file.small:
        small = build(_Small, file.small, f"{name}.small")
        for label in [*small.methods, *small.hyper]:
            if label not in methods:
                raise unknown(f"{name}.small", label, methods)
        rows = {label: methods[label] for label in small.methods or methods}
        rows = {
            label: replace(row, hyper={**row.hyper, **small.hyper.get(label, {})})
            for label, row in rows.items()
        }
        chosen = _columns(small.columns, f"{name}.small.columns") or columns
        experiment = _experiment(small.preset, small.experiment)
        tuning = build(Tuning, small.tuning, f"{name}.small.tuning") if small.tuning else None
        scales["small"] = Setting(experiment, chosen, rows, small.note, tuning)
    measured = {}
    for scale, table in file.measured.items():
        kept = build(_Measured, table, f"{name}.measured.{scale}")
        place = f"{name}.measured.{scale}"
        band = _band(kept.values, kept.deviations, scales[scale], place)
        for label in kept.code:
            if label not in band.values:
                raise unknown(f"{place}.code", label, band.values)
        measured[scale] = Measured(kept.date, kept.hardware, kept.seeds, kept.command, band, kept.code)
    return Entry(
        name=name,
        title=file.title,
        paper=file.paper,
        place=file.place,
        same_as=file.same_as,
        cannot=file.cannot,
        over=file.over,
        axis=file.axis,
        cell=file.cell,
        score=file.score,
        when=file.when,
        percent=file.percent,
        seeds=file.seeds,
        source=file.source,
        scales=scales,
        band=_band(file.values, file.deviations, scales.get("paper"), name),
        measured=measured,
    )


def _columns(tables: Sequence[Any], place: str) -> tuple[Column, ...]:
    return tuple(build(Column, table, f"{place}[{number}]") for number, table in enumerate(tables))


def _experiment(preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return merged(read_toml(presets.path(preset)) if preset else {}, settings)


def _band(values: Mapping[str, Any], deviations: Mapping[str, Any], at: Setting | None, place: str) -> Band:
    """Numbers of a file, as many as there are columns for methods there are."""
    made = []
    for table in (values, deviations):
        rows = {}
        for label, numbers in table.items():
            if at is None or label not in at.methods or len(numbers) != len(at.columns):
                raise SettingError(f"{place}: {label} is no method, or has not one number for every column")
            rows[label] = tuple(None if math.isnan(number) else float(number) for number in numbers)
        made.append(rows)
    return Band(*made)


def merged(first: Mapping[str, Any], *more: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, later ones winning; where a table names another choice, the old one's keys go.

    >>> merged({"partition": {"name": "parts", "k": 6}}, {"partition": {"name": "iid"}})
    {'partition': {'name': 'iid'}}
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in first.items()}
    for settings in more:
        for key, value in settings.items():
            if not isinstance(value, Mapping):
                result[key] = value
                continue
            before = result.get(key, {})
            if "name" in value and key != "data" and value["name"] != before.get("name"):
                before = {}
            result[key] = {**before, **value}
    return result
