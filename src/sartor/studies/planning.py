"""What of the papers' tables and figures is run: entries, with what was asked of each.

An entry (:mod:`sartor.studies.entries`) comes to some comparisons, each of the columns that one serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from sartor.errors import SartorError, SettingError
from sartor.runs.experiment import Experiment
from sartor.runs.inputs import gather
from sartor.settings import unknown
from sartor.studies.comparison import CompareSettings, Method, Plan, split_table
from sartor.studies.entries import Column, Entry, Setting, entry, merged, seeds_of

SCALES = ("small", "paper")
HOW = ("engine", "checkpoint", "tracking")
"""Settings that say how something is run and leave its numbers alone."""
COMPUTED = "computed"
"""The cell of an entry that is no training."""

log = logging.getLogger(__name__)


class NothingLeft(SartorError):
    """Of an entry nothing is asked for that is there to be run or shown."""


@dataclass(frozen=True)
class Group:
    """Columns and methods that one comparison serves: equal settings and hyper-parameters."""

    name: str
    """Of its folder: the same for the same settings, whatever else is asked for."""
    settings: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    columns: list[Column]

    @property
    def rounds(self) -> int:
        """How many rounds each of its runs has."""
        return int(self.settings.get("rounds", Experiment.rounds))

    @property
    def words(self) -> str:
        """Its columns in a few words."""
        labels = [column.label for column in self.columns]
        return ", ".join(labels) if len(labels) < 3 else f"{labels[0]} to {labels[-1]}"

    def planned(
        self,
        device: str | None,
        together: str | None = None,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> tuple[Plan, list[Method], CompareSettings]:
        """The plan of the comparison and its methods, checked; ``tables`` stand in place of its own."""
        plan = Plan(gather({"experiment": self.settings, "device": device}))
        asked, chosen = {"together": together}, self.tables if tables is None else tables
        options, split = split_table(plan.compare, CompareSettings, "compare", asked, chosen)
        methods = plan.methods(list(chosen), split, "compare")
        plan.check(methods)
        return plan, methods, options


class Asked(TypedDict, total=False):
    """What of an entry is run: keywords of who runs it, and of who says what that would take."""

    scale: str
    """``small``, which it is where nothing is said, or ``paper``."""
    seeds: int | Sequence[int] | None
    """A number or a list; left out: as many as the paper has (small: one)."""
    methods: Iterable[str] | None
    """Some of its methods."""
    columns: Iterable[str] | None
    """Some of its columns."""
    device: str | None
    """Where the engine works."""
    settings: Mapping[str, Any] | None
    """Settings that win over the entry's; what they give is not held against the bands."""
    missing: bool
    """Only methods of which we have no number with these seeds in a column."""
    out: str | Path | None
    """The folder of its runs; left out: one in ``reproductions/``."""


@dataclass(frozen=True)
class Work:
    """What an entry comes to with what was asked for: the comparisons to be made."""

    entry: Entry
    asked: str
    """The name that was given."""
    scale: str
    at: Setting
    groups: tuple[Group, ...]
    seeds: int | tuple[int, ...]
    settings: dict[str, Any]
    out: Path = Path()
    among: bool = False
    """Whether it is one of several that were asked for."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """What is wrong with settings within is said of this entry."""
        try:
            yield
        except SettingError as error:
            raise SettingError(f"{self.asked}, {self.scale}: {error}") from None

    def place(self, group: Group) -> str:
        """Where a run is, in a few words."""
        return f"{self.entry.name}, {group.words}" if self.among else group.words

    @property
    def folder(self) -> str:
        """What a folder of its runs is called."""
        return f"{self.entry.name.replace('/', '-')}-{self.scale}"

    @property
    def trained(self) -> tuple[Group, ...]:
        """The comparisons; an entry that is computed has none."""
        return () if self.entry.cell == COMPUTED else self.groups

    @property
    def trials(self) -> int:
        """How many runs each method has besides, to choose its hyper-parameters."""
        tuning = self.at.tuning
        return 0 if tuning is None else tuning.trials * len(tuning.seeds)

    @property
    def numbered(self) -> tuple[int, ...]:
        """The seeds one by one."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def seed_count(self) -> int:
        """How many runs each method has in each column."""
        return self.seeds if isinstance(self.seeds, int) else len(self.seeds)

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return (self.trials + self.seed_count) * sum(len(group.tables) for group in self.trained)

    @property
    def rounds(self) -> int:
        """How many rounds all runs have together."""
        return sum(
            len(group.tables) * (self.seed_count * group.rounds + self.tried_rounds(group))
            for group in self.trained
        )

    def tried_rounds(self, group: Group) -> int:
        """How many rounds the trials of one method have together."""
        tuning = self.at.tuning
        return 0 if tuning is None else self.trials * tuning.rounds_of(group.rounds)


def planned(name: str, **asked: Unpack[Asked]) -> Work:
    """What :func:`~sartor.studies.reproduction.reproduce` would run for the same words.

    >>> work = planned("comfed/table4", scale="paper")
    >>> work.runs, work.rounds, str(work.out)
    (48, 96000, 'reproductions/comfed-table4-paper')
    """
    chosen, scale = entry(name), asked.get("scale", "small")
    if chosen.same_as:
        chosen = entry(chosen.same_as)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES, what="name")
    if chosen.cannot:
        raise SartorError(f"{name}: is not run: {chosen.cannot}")
    if scale not in chosen.scales:
        known = " or ".join(chosen.scales)
        raise SartorError(f"{name}: has no setting {scale!r}; run it with --scale {known}")
    at = _some(chosen.scales[scale], asked.get("methods"), asked.get("columns"))
    seeds, out = asked.get("seeds"), asked.get("out")
    if seeds is None:
        seeds = 1 if scale == "small" else max(1, chosen.seeds)
    given = dict(asked.get("settings") or {})
    if chosen.cell == COMPUTED:
        keys = {key for group in _groups(at, {}) for key in group.settings}
        for key in given.keys() - keys:
            raise unknown(name, key, keys)
    counted = seeds if isinstance(seeds, int) else tuple(seeds)
    work = Work(chosen, name, scale, at, tuple(_groups(at, given)), counted, given)
    work = replace(work, out=Path("reproductions") / work.folder if out is None else Path(out))
    return _unmeasured(work) if asked.get("missing") else work


def planned_all(names: Sequence[str], **asked: Unpack[Asked]) -> list[Work]:
    """What :func:`~sartor.studies.reproduction.reproduce_all` would run for the same words.

    >>> [(work.entry.name, work.runs) for work in planned_all(["comfed/table4", "spfl/fig4"], seeds=1)]
    [('comfed/table4', 16), ('spfl/fig4', 2)]
    """
    if not names:
        raise SettingError("names: name at least one table or figure")
    if len(names) == 1:
        return [planned(names[0], **asked)]
    folder = Path(asked.get("out") or "reproductions")
    works = unless_all([partial(planned, name, **own) for name, own in _each_asked(names, asked)])
    works = [replace(work, out=folder / work.folder, among=True) for work in works]
    for place, work in enumerate(works):
        for other in works[:place]:
            if work.out == other.out:
                raise SettingError(f"{work.asked}: is the same as {other.asked}; name one of them")
    return works


def _each_asked(names: Sequence[str], asked: Asked) -> Iterator[tuple[str, Asked]]:
    """What is asked of each of several entries: those of the methods and columns that it has."""
    at = {name: planned(name, scale=asked.get("scale", "small")).at for name in names}
    methods = _divided("method", asked.get("methods"), {name: [*at[name].methods] for name in names})
    labels = {name: [column.label for column in at[name].columns] for name in names}
    columns = _divided("column", asked.get("columns"), labels)
    for name in names:
        own = asked.copy()
        own["methods"], own["columns"] = methods[name], columns[name]
        yield name, own


def _divided(
    kind: str, words: Iterable[str] | None, has: Mapping[str, Sequence[str]]
) -> Mapping[str, list[str] | None]:
    """Each entry's of some words; it has one at least, and each word is one's."""
    if words is None:
        return dict.fromkeys(has)
    words, every = list(words), dict.fromkeys(label for labels in has.values() for label in labels)
    for word in words:
        if word not in every:
            raise unknown(kind, word, every, what="name")
    own = {name: [word for word in words if word in labels] for name, labels in has.items()}
    for name, some in own.items():
        if not some:
            raise SettingError(f"{name}: has none of these {kind}s, but {', '.join(has[name])}")
    return {**own}


def unless_all(works: Sequence[Callable[[], Work]]) -> list[Work]:
    """Those of some works of which something is left, if there is one."""
    found: list[Work] = []
    empty: list[NothingLeft] = []
    for work in works:
        try:
            found.append(work())
        except NothingLeft as error:
            empty.append(error)
    if not found:
        raise empty[0]
    for left_out in empty:
        log.warning("left out, %s", left_out)
    return found


def _unmeasured(work: Work) -> Work:
    """The work without the methods whose numbers we have in all columns of a comparison."""
    if not as_stated(work.settings):
        raise SettingError(f"missing: our numbers are of the entry's own settings, not of {work.settings}")
    measured = work.entry.measured.get(work.scale)
    if measured is None:
        return work
    columns = [column.label for column in work.entry.scales[work.scale].columns]

    def known(label: str, column: str) -> bool:
        there = measured.band.at(label, columns.index(column))[0] is not None
        return there and set(work.numbered) <= set(seeds_of(measured.seeds, label, column, columns))

    groups = []
    for group in work.groups:
        labels = [column.label for column in group.columns]
        left = [label for label in group.tables if not all(known(label, column) for column in labels)]
        if left:
            groups.append(replace(group, tables={label: group.tables[label] for label in left}))
    if not groups:
        raise NothingLeft(f"{work.entry.name}, {work.scale}: no number is missing; leave that word out")
    return replace(work, groups=tuple(groups))


def as_stated(given: Mapping[str, Any]) -> bool:
    """Whether settings leave an experiment the one it is.

    >>> as_stated({"engine": {"name": "loop"}, "data": {"folder": "here"}}), as_stated({"rounds": 10})
    (True, False)
    """
    return all(key in HOW or (key == "data" and set(value) == {"folder"}) for key, value in given.items())


def _some(at: Setting, methods: Iterable[str] | None, columns: Iterable[str] | None) -> Setting:
    """What is asked for of a setting; everything where nothing is."""
    labels = [column.label for column in at.columns]
    for kind, asked, known in (("method", methods, list(at.methods)), ("column", columns, labels)):
        for word in asked or ():
            if word not in known:
                raise unknown(kind, word, known, what="name")
    wanted = set(labels if columns is None else columns)
    return Setting(
        at.experiment,
        tuple(column for column in at.columns if column.label in wanted),
        {label: at.methods[label] for label in at.methods if methods is None or label in set(methods)},
        at.note,
        at.tuning,
    )


def _groups(at: Setting, settings: Mapping[str, Any]) -> list[Group]:
    """The comparisons that are needed, as few as there can be."""
    groups: dict[str, Group] = {}
    for column in at.columns:
        for label, row in at.methods.items():
            here = column.methods.get(label, {})
            own = merged(at.experiment, column.settings, row.settings, here, settings)
            key = json.dumps([own, column.hyper], sort_keys=True, default=str)
            group = groups.setdefault(key, Group(hashlib.sha256(key.encode()).hexdigest()[:8], own, {}, []))
            hyper = {**row.hyper, **column.hyper.get(label, {})}
            group.tables[label] = {"algorithm": row.algorithm, **hyper}
            if column not in group.columns:
                group.columns.append(column)
    return list(groups.values())
