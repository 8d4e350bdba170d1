"""The papers' tables and figures, run again: our numbers beside theirs.

Each entry (:mod:`sartor.studies.entries`) is run in the paper's setting
(``paper``) or in a small one (``small``) that two cores do in minutes. Numbers of the small setting do not
compare with the paper's in size, only in the order of the methods, which Kendall's τ measures: 1 for the
same order, −1 for the opposite one. Runs go through :func:`sartor.studies.comparison.compare`, so what was
run before is found again.

A number lies *within a band* if it is at most two standard deviations from the band's mean, or half a point
(of a hundred) where that is more: the paper's band where it prints deviations, ours where we have measured.
With settings of one's own a number is of another experiment, and is not held against either band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from sartor.errors import SettingError
from sartor.runs.observers import Kept
from sartor.runs.record import RunFolder, environment, write_json
from sartor.studies.comparison import (
    Comparison,
    Estimate,
    Method,
    NothingFinished,
    Plan,
    compare,
    estimate,
)
from sartor.studies.computed import computed
from sartor.studies.entries import Column, Entry, Tuning
from sartor.studies.jobs import After, Study
from sartor.studies.library import Failure, Runs
from sartor.studies.planning import (
    COMPUTED,
    Asked,
    Group,
    NothingLeft,
    Work,
    as_stated,
    planned_all,
    unless_all,
)
from sartor.studies.progress import Tally
from sartor.studies.tuning import Trials, Tuned, planned_trials, search, tune

FILE = "reproduction.json"
SEARCH = "search"
"""The folder of a comparison's trials, beside its runs."""
LEAST_BAND = 0.005
"""Half the width of the narrowest band: numbers are printed with few digits, and of few seeds."""
Queued = dict[Path, tuple[dict[str, dict[str, Any]], Runs]]
"""By a comparison's folder its methods and its runs, which several processes have made."""


@dataclass(frozen=True)
class Number:
    """What came out for a method in a column, beside the paper's number and ours from before."""

    method: str
    column: str
    ours: Estimate
    paper: float | None
    paper_deviation: float | None
    difference: float | None
    """Ours minus the paper's; None where the two do not compare in size: in the small setting, and with
    settings of one's own."""
    within_paper: bool | None
    """None where the paper prints no deviation, or the two do not compare."""
    measured: float | None
    measured_deviation: float | None
    within_measured: bool | None
    runs: tuple[str, ...] = ()
    """The folders of the runs behind it, one for each seed, inside the reproduction's."""


@dataclass(frozen=True)
class Order:
    """How alike two orders of methods are in a column."""

    column: str
    paper: str
    """The paper's column."""
    methods: int
    tau: float | None
    """Kendall's τ; None where all are equal in one of the two."""


@dataclass(frozen=True)
class Reproduction:
    """The result of :func:`reproduce`, as it is stored."""

    name: str
    asked: str
    """The name that was given: of a figure, where ``name`` is the table that it draws."""
    scale: str
    percent: bool
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    """Those that were given and win over the entry's."""
    numbers: tuple[Number, ...]
    orders: tuple[Order, ...]
    failed: tuple[Failure, ...]
    comparisons: tuple[str, ...]
    """The folders of the comparisons behind the numbers."""
    hardware: tuple[str, ...]
    """What the runs were made on."""
    seconds: float
    """How long all of them took together, evaluation included."""
    out: Path

    def to_mapping(self) -> dict[str, Any]:
        """What ``reproduction.json`` holds."""
        values = asdict(self)
        del values["out"]
        return {"sartor": environment()["sartor"], **values}


def reproduce(
    name: str,
    *,
    together: str | None = None,
    jobs: int = 1,
    only_made: bool = False,
    progress: bool = False,
    **asked: Unpack[Asked],
) -> Reproduction:
    """Run a table or figure of a paper and put our numbers beside the paper's.

    ``asked`` are the keywords of :class:`Asked`. ``together`` says whether the seeds of a method are trained
    in one batch, as for :func:`~sartor.studies.comparison.compare`. ``jobs`` processes make the runs, the
    longest first (:mod:`sartor.studies.jobs`); 1 is this one. With ``only_made`` nothing is run: the numbers
    are those of methods whose runs are finished in a column, whatever is missing elsewhere.

    >>> from tempfile import mkdtemp
    >>> some = {"methods": ["fedavg"], "columns": ["5"], "settings": {"rounds": 5}}
    >>> result = reproduce("comfed/table4", **some, out=mkdtemp())
    >>> [(number.method, number.column) for number in result.numbers]
    [('fedavg', '5')]
    """
    (made,) = reproduce_all(
        [name], together=together, jobs=jobs, only_made=only_made, progress=progress, **asked
    )
    return made


def reproduce_all(
    names: Sequence[str],
    *,
    together: str | None = None,
    jobs: int = 1,
    only_made: bool = False,
    progress: bool = False,
    **asked: Unpack[Asked],
) -> Iterator[Reproduction]:
    """Several tables or figures, each as :func:`reproduce` makes it, with the same keywords for all.

    With several ``jobs`` the runs of all of them stand in one queue, so that no process waits for the last
    runs of one entry before those of the next. ``out`` is then the folder of a folder for each. Of
    ``methods`` and ``columns`` each entry takes those it has. One of which nothing is ``missing``, or with
    ``only_made`` nothing made, is left out, unless all are.

    >>> from tempfile import mkdtemp
    >>> some = {"methods": ["fedavg"], "columns": ["5", "IID"], "settings": {"rounds": 5}}
    >>> for result in reproduce_all(["comfed/table4", "spfl/table6"], **some, out=mkdtemp()):
    ...     print(result.out.name, [(number.method, number.column) for number in result.numbers])
    comfed-table4-small [('fedavg', '5')]
    spfl-table6-small [('fedavg', 'IID')]
    """
    if jobs < 1:
        raise SettingError(f"jobs: must be at least 1, got {jobs}")
    device = asked.get("device")
    works = planned_all(names, **asked)
    if only_made:
        works = unless_all([partial(_finished, work, device) for work in works])
    tally = Tally(sum(work.runs for work in works), sum(work.rounds for work in works), shown=progress)
    queued: Queued = {}
    failed: dict[Path, list[Failure]] = {work.out: [] for work in works}
    if jobs > 1:
        queued = _made_at_once(works, device, together, jobs, tally, failed)
    nothing: list[NothingFinished] = []
    for work in works:
        try:
            yield _reproduced(work, device, together, tally, queued, failed[work.out])
        except NothingFinished as error:  # the other entries go on
            nothing.append(error)
    if nothing:
        raise NothingFinished([failure for error in nothing for failure in error.failed])


def _reproduced(
    work: Work, device: str | None, together: str | None, tally: Tally, queued: Queued, failed: list[Failure]
) -> Reproduction:
    """The result of an entry, stored."""
    chosen, at, scale = work.entry, work.at, work.scale
    compared: dict[str, Comparison] = {}
    if chosen.cell == COMPUTED:
        found = _computed(work, device)
    else:
        with work.named():
            compared = _trained(work, device, together, tally, queued, failed)
        found = {}
        for group in work.groups:
            if group.name in compared:
                found.update(_numbers(compared[group.name], group, chosen))
    made = [
        _beside(chosen, scale, label, column, *found[label, column.label], as_stated=as_stated(work.settings))
        for column in at.columns
        for label in at.methods
        if (label, column.label) in found
    ]
    runs = [RunFolder.open(work.out / each) for each in dict.fromkeys(run for n in made for run in n.runs)]
    reproduction = Reproduction(
        name=chosen.name,
        asked=work.asked,
        scale=scale,
        percent=chosen.percent,
        seeds=next((result.seeds for result in compared.values()), work.numbered),
        settings=work.settings,
        numbers=tuple(made),
        orders=tuple(_orders(made, at.columns)),
        failed=tuple(failed),
        comparisons=tuple(compared),
        hardware=tuple(dict.fromkeys(str(run.environment.get("device_name", "unknown")) for run in runs)),
        seconds=sum(row_seconds(row) for run in runs for row in run.rounds),
        out=work.out,
    )
    write_json(work.out / FILE, reproduction.to_mapping())
    return reproduction


def _trained(
    work: Work,
    device: str | None,
    together: str | None,
    tally: Tally,
    queued: Queued,
    failed: list[Failure],
) -> dict[str, Comparison]:
    """The comparisons of an entry by their names; runs that failed are noted."""
    compared: dict[str, Comparison] = {}
    for group in work.groups:
        tally.place = work.place(group)
        out = work.out / group.name
        if out in queued:
            tables, runs = queued[out]
        else:
            tables = _tuned(group, work, device, Runs(out / SEARCH, tally, kept=Kept.RESULTS), failed)
            runs = Runs(out, tally, together or "auto", kept=Kept.MODELS)
        try:
            compared[group.name] = compare(
                tables,
                experiment=group.settings,
                seeds=work.seeds,
                references=False,
                device=device,
                together=together,
                out=runs,
                progress=tally,
            )
            failed += compared[group.name].failed
        except NothingFinished as error:  # the other columns go on
            failed += error.failed
    if not compared:
        raise NothingFinished(failed)
    return compared


def _finished(work: Work, device: str | None) -> Work:
    """The work without all that has a run to be made."""
    if not work.trained:
        return work
    with work.named():
        groups = tuple(
            group for each in work.groups if (group := _finished_methods(each, work, device)).tables
        )
    if not groups:
        raise NothingLeft(
            f"{work.out}: no method has all its runs there; ask for fewer seeds, or make some first"
        )
    return replace(work, groups=groups)


def _finished_methods(group: Group, work: Work, device: str | None) -> Group:
    """A comparison with the methods alone whose runs, and trials before them, are all finished."""

    def made(runs: Runs, plan: Plan, method: Method, seeds: Iterable[int]) -> bool:
        return runs.finished(plan.inputs(method, seed) for seed in seeds)

    tables = group.tables
    if work.at.tuning is not None:
        tried = Runs(work.out / group.name / SEARCH)
        wanted = _planned_trials(group, work.at.tuning, device)
        missing = {
            trial.label for _, trial in wanted.trials if not made(tried, wanted.plan, trial, wanted.seeds)
        }
        tables = {label: table for label, table in tables.items() if label not in missing}
        if tables:
            tables = _tuned(replace(group, tables=tables), work, device, tried, [])
    if tables:
        plan, methods, _ = group.planned(device, tables=tables)
        runs, seeds = Runs(work.out / group.name), plan.seeds(work.seeds, "compare")
        tables = {each.label: group.tables[each.label] for each in methods if made(runs, plan, each, seeds)}
    return replace(group, tables=tables)


def _made_at_once(
    works: Sequence[Work],
    device: str | None,
    together: str | None,
    jobs: int,
    tally: Tally,
    failed: Mapping[Path, list[Failure]],
) -> Queued:
    """What several processes have made for some entries."""
    study = Study(jobs, tally)
    made: Queued = {}
    searched: dict[Path, Runs] = {}

    def want(work: Work, group: Group, tables: dict[str, dict[str, Any]]) -> None:
        plan, methods, _ = group.planned(device, together, tables)
        named = [(method.label, method) for method in methods]
        runs = made[work.out / group.name][1]
        study.want(runs, plan, named, plan.seeds(work.seeds, "compare"), work.place(group))

    def want_tuned(work: Work, group: Group, wanted: Trials, method: Method) -> None:
        """A method's runs, as soon as its trials are there."""
        found, _ = tune(wanted, method, searched[work.out / group.name].aside())
        if found.chosen is not None:
            want(work, group, {method.label: _chosen(found)})

    for work in works:
        with work.named():
            for group in work.trained:
                _, _, options = group.planned(device, together)
                out = work.out / group.name
                made[out] = group.tables, Runs(out, together=options.together, kept=Kept.MODELS)
                if work.at.tuning is None:
                    want(work, group, group.tables)
                    continue
                searched[out] = Runs(out / SEARCH, kept=Kept.RESULTS)
                wanted = _planned_trials(group, work.at.tuning, device)
                for method in wanted.methods:
                    trials = [(title, trial) for title, trial in wanted.trials if trial.label == method.label]
                    after = After(partial(want_tuned, work, group, wanted, method), group.rounds)
                    study.want(searched[out], wanted.plan, trials, wanted.seeds, work.place(group), after)
    study.make()
    for work in works:
        for group in work.trained:
            out = work.out / group.name
            if out in searched:
                made[out] = _tuned(group, work, device, searched[out], failed[work.out]), made[out][1]
    return made


def row_seconds(row: Mapping[str, Any]) -> float:
    """How long a round took, with its evaluation."""
    return float(row.get("seconds", 0.0)) + float(row.get("evaluation_seconds", 0.0))


def _tuned(
    group: Group, work: Work, device: str | None, runs: Runs, failed: list[Failure]
) -> dict[str, dict[str, Any]]:
    """The methods of a comparison with hyper-parameters chosen on validation data, where that is wanted.

    Those of which every trial failed are noted and left out.
    """
    tuning = work.at.tuning
    if tuning is None:
        return group.tables
    spaces, asked, settings = _search(group, tuning)
    found = search(spaces, **asked, experiment=settings, device=device, out=runs)
    chosen = {}
    for method in found.methods:
        if method.chosen is not None:
            chosen[method.label] = _chosen(method)
        else:
            message = str(method.trials[0].failed)
            failed.append(Failure(method.label, method.algorithm, tuning.seeds[0], message))
    return chosen


def _chosen(method: Tuned) -> dict[str, Any]:
    """A method with the hyper-parameters that were best."""
    return {"algorithm": method.algorithm, **method.best}


def _planned_trials(group: Group, tuning: Tuning, device: str | None) -> Trials:
    """The trials of a comparison's methods."""
    spaces, asked, settings = _search(group, tuning)
    return planned_trials(spaces, asked, {"experiment": settings, "device": device})


def _search(group: Group, tuning: Tuning) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """The spaces of a comparison's methods, how they are searched, and the settings of every trial."""
    spaces = {}
    for label, table in group.tables.items():
        fixed = {key: value if key == "algorithm" else [value] for key, value in table.items()}
        spaces[label] = {**fixed, **tuning.space(label)}
    asked = {"method": "grid", "budget": tuning.trials, "seeds": tuning.seeds}
    return spaces, asked, {**group.settings, "rounds": tuning.rounds_of(group.rounds)}


def _computed(work: Work, device: str | None) -> dict[tuple[str, str], tuple[Estimate, tuple[str, ...]]]:
    """By method and column what a computation gives, where an entry is no training."""
    found: dict[tuple[str, str], tuple[Estimate, tuple[str, ...]]] = {}
    for group in work.groups:
        for column in group.columns:
            for label, method in group.tables.items():
                asked = (column.score or work.entry.score, group.settings, method, device)
                made = estimate(computed(*asked, seed) for seed in work.numbered)
                found[label, column.label] = (made, ())
    return found


def _numbers(
    result: Comparison, group: Group, chosen: Entry
) -> dict[tuple[str, str], tuple[Estimate, tuple[str, ...]]]:
    """By method and column what the runs of a comparison give, and which runs they are."""
    found = {}
    for method in result.methods:
        runs = [RunFolder.open(result.out / run.folder).rounds for run in method.runs]
        folders = tuple(f"{result.out.name}/{run.folder}" for run in method.runs)
        for column in group.columns:
            values = [number_of(rounds, column, chosen) for rounds in runs]
            scale = 100.0 if chosen.percent else 1.0
            made = estimate(None if value is None else scale * value for value in values)
            found[method.label, column.label] = (made, folders)
    return found


def number_of(rounds: Sequence[Mapping[str, Any]], column: Column, chosen: Entry) -> float | None:
    """The number a column shows, from the rows of a run; None where the run does not have it."""
    cell, score = column.cell or chosen.cell, column.score or chosen.score
    rows = [row for row in rounds if column.round == 0 or row["round"] <= column.round]
    found = []
    for row in rows:
        if cell == "observed":
            value = row.get("observed", {}).get(score)
        else:
            cells = row.get("evaluation", {})
            own = "personal_local" if "personal_local" in cells else "shared_local"
            value = cells.get(own if cell == "local" else cell, {}).get(score)
        if value is not None:
            found.append(float(value))
    if not found:
        return None
    return max(found) if chosen.when == "best" else found[-1]


def _beside(
    chosen: Entry,
    scale: str,
    label: str,
    column: Column,
    ours: Estimate,
    runs: tuple[str, ...] = (),
    *,
    as_stated: bool,
) -> Number:
    """A number with what it is compared with, and judged by it if it was run as the entry states."""
    paper, deviation = None, None
    same = column.label if scale == "paper" else column.paper
    labels = [each.label for each in chosen.scales["paper"].columns]
    if same in labels:
        paper, deviation = chosen.band.at(label, labels.index(same))
    ours_before, ours_deviation = None, None
    if scale in chosen.measured:
        place = [each.label for each in chosen.scales[scale].columns].index(column.label)
        ours_before, ours_deviation = chosen.measured[scale].band.at(label, place)
    in_size = as_stated and scale == "paper"
    difference = ours.mean - paper if in_size and paper is not None and ours.mean is not None else None
    return Number(
        method=label,
        column=column.label,
        ours=ours,
        paper=paper,
        paper_deviation=deviation,
        difference=difference,
        within_paper=within(ours.mean, paper, deviation, chosen.percent) if in_size else None,
        measured=ours_before,
        measured_deviation=ours_deviation,
        within_measured=within(ours.mean, ours_before, ours_deviation, chosen.percent) if as_stated else None,
        runs=runs,
    )


def within(
    value: float | None, mean: float | None, deviation: float | None, percent: bool = True
) -> bool | None:
    """Whether a value lies in a band; None where there is no band.

    >>> within(95.0, 97.0, 1.0), within(94.9, 97.0, 1.0), within(96.6, 97.0, 0.1), within(96.6, 97.0, None)
    (True, False, True, None)
    """
    if value is None or mean is None or deviation is None:
        return None
    width = max(2 * deviation, LEAST_BAND * (100 if percent else 1))
    return abs(value - mean) <= width + 1e-9


def _orders(numbers: Sequence[Number], columns: Sequence[Column]) -> Iterable[Order]:
    """Kendall's τ in every column that has two methods or more with both numbers.

    Ours have as many digits as the paper prints: what would be printed alike is a tie.
    """
    from scipy.stats import kendalltau

    for column in columns:
        both = [
            (number.ours.mean, number.paper)
            for number in numbers
            if number.column == column.label and number.paper is not None and number.ours.mean is not None
        ]
        if len(both) > 1:
            digits = max(_digits(paper) for _, paper in both)
            ours, theirs = zip(*((round(mine, digits), paper) for mine, paper in both), strict=True)
            tau = float(kendalltau(ours, theirs).statistic)
            place = column.paper or column.label
            yield Order(column.label, place, len(both), None if math.isnan(tau) else tau)


def _digits(number: float) -> int:
    """How many digits a number has behind its point.

    >>> _digits(98.46), _digits(33.1), _digits(90.0)
    (2, 1, 0)
    """
    return len(f"{number:.6f}".rstrip("0").partition(".")[2])
