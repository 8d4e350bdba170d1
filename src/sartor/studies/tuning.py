"""Hyper-parameters chosen on validation data, with the same number of trials for every method.

:func:`search` tries points of a method's space, drawn at random or all of a grid, and chooses the one with
the best mean score on the clients' validation data after the last round. No test score is read. The space is
written as one table for each method, ``every`` standing for all of them::

    [search.every]
    lr = [0.01, 0.03, 0.1]                         # these values

    [search.fedprox]
    mu = {low = 0.001, high = 1, log = true}       # a range; ``points = 4`` of it make a grid

A hyper-parameter with one value is fixed. A method without a table is searched over the declared ranges
of its numbers (:func:`declared_space`). The result is stored as ``search.json`` beside the run folders:

=====================  ================================================================================
format, sartor         1, and the version of Sartor
experiment             the settings all methods share, every one written out
seeds, method, budget  the seeds of every trial, ``random`` or ``grid``, and the trials a method may have
score                  what is judged: the headline metric of its runs, such as ``accuracy``
methods                for each ``label``, ``algorithm``, ``space``, ``chosen`` (the number of a trial, null
                       if all failed) and ``trials``: ``number``, ``hyper``, ``cell`` (whose score counts),
                       ``validation`` (``mean``, ``deviation``, ``values`` over seeds; null if it failed),
                       ``failed`` (the message or null) and ``runs`` (``seed``, ``folder``, ``reused``)
=====================  ================================================================================

and as ``chosen.toml``, an experiment that ``sartor compare`` takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sartor import random
from sartor.algorithms import registered
from sartor.errors import SartorError, SettingError
from sartor.runs.experiment import Experiment, toml_text
from sartor.runs.inputs import RunSettings, gather
from sartor.runs.observers import Kept, Observer
from sartor.runs.record import environment, write_json, write_text
from sartor.runs.setup import load_data
from sartor.settings import Meaning, build, meaning, setting, unknown
from sartor.studies.comparison import (
    REFERENCES,
    TOGETHER,
    CompareSettings,
    Estimate,
    Method,
    OwnTables,
    Plan,
    RunOf,
    check_hyper,
    estimate,
    hyper_fields,
    shared_settings,
    split_table,
)
from sartor.studies.library import Failure, KeptRun, Runs
from sartor.studies.progress import Tally

FILE = "search.json"
CHOSEN = "chosen.toml"
FORMAT = 1
EVERY = "every"
"""The table whose hyper-parameters are searched for all methods."""

GRID_POINTS = 3
"""Of each number, where a grid is searched over a method's declared ranges."""

DRAWS_PER_TRIAL = 50
"""Points drawn at most for each trial, where a space has so few that they repeat."""


@dataclass(frozen=True)
class SearchSettings:
    """The keys of ``[search]`` besides one table for each method."""

    algorithms: tuple[str, ...] = setting(
        (), "the methods; left out: those with a table, or the experiment's"
    )
    budget: int = setting(8, "trials of every method", low=1)
    method: str = setting("random", "how points are chosen", choices=("random", "grid"))
    seeds: int | tuple[int, ...] = setting(1, "seeds of a trial, from `seed` on, or a list", low=0)
    together: str = setting(
        "auto", "whether the seeds of a trial are trained in one batch; auto: where faster", choices=TOGETHER
    )


@dataclass(frozen=True)
class Range:
    """A range of numbers to search, its ends included."""

    low: float
    high: float
    log: bool = False
    points: int = 0
    """How many of them make a grid, evenly spaced."""


Space = dict[str, "tuple[Any, ...] | Range"]


@dataclass(frozen=True)
class Trial:
    """One point of the space and how it did on validation data."""

    number: int
    hyper: dict[str, Any]
    cell: str | None
    validation: Estimate | None
    """The score over seeds after the last round; None if a run failed."""
    failed: str | None
    runs: tuple[RunOf, ...]


@dataclass(frozen=True)
class Tuned:
    """All trials of a method."""

    label: str
    algorithm: str
    space: dict[str, Any]
    trials: tuple[Trial, ...]
    chosen: int | None
    """The number of the best trial, the first of equals; None if all failed."""

    @property
    def best(self) -> dict[str, Any]:
        """The chosen hyper-parameters."""
        if self.chosen is None:
            raise SartorError(f"{self.label}: all trials failed; the first: {self.trials[0].failed}")
        return self.trials[self.chosen].hyper


@dataclass(frozen=True)
class Search:
    """The result of :func:`search`, as it is stored."""

    out: Path
    experiment: dict[str, Any]
    seeds: tuple[int, ...]
    method: str
    budget: int
    score: str
    methods: tuple[Tuned, ...]

    def to_mapping(self) -> dict[str, Any]:
        """What ``search.json`` holds."""
        values = asdict(self)
        del values["out"]
        return {"format": FORMAT, "sartor": environment()["sartor"], **values}


def search(
    algorithms: str | Sequence[str] | OwnTables | None = None,
    *,
    budget: int | None = None,
    method: str | None = None,
    seeds: int | Sequence[int] | None = None,
    together: str | None = None,
    out: str | Path | Runs | None = None,
    progress: bool | Tally = False,
    observers: Sequence[Observer] = (),
    **settings: Unpack[RunSettings],
) -> Search:
    """Choose hyper-parameters by their score on validation data, with ``budget`` trials for every method.

    ``algorithms`` are names whose spaces are in the experiment's ``[search]``, or a mapping from names to
    spaces: ``{"fedprox": {"lr": [0.01, 0.1], "mu": {"low": 0.001, "high": 1, "log": True}}}``. All else is
    as for :func:`sartor.compare`. Clients need validation data, of ``data.validation`` or their own.

    >>> from tempfile import mkdtemp
    >>> settings = {"data": {"validation": 0.2}, "local": {"batch": 16}}
    >>> space = {"fedavg": {"lr": [0.001, 0.1]}}
    >>> found = search(space, experiment=settings, method="grid", clients=4, rounds=2, out=mkdtemp())
    >>> found.methods[0].best
    {'lr': 0.1}
    """
    asked = {"budget": budget, "method": method, "seeds": seeds, "together": together}
    wanted = planned_trials(algorithms, asked, settings)
    plan, options, base = wanted.plan, wanted.options, wanted.base
    count = len(wanted.trials) * len(wanted.seeds)
    tally = progress if isinstance(progress, Tally) else Tally(count, count * base.rounds, shown=progress)
    folder = plan.folder("searches", base) if out is None else out
    if not isinstance(folder, Runs):
        folder = Runs(Path(folder), tally, options.together, observers, kept=Kept.RESULTS)
    runs = folder
    tuned: list[Tuned] = []
    score = "accuracy"
    for each in wanted.methods:
        done, some = tune(wanted, each, runs)
        tuned.append(done)
        score = score if some is None else some.score
    result = Search(
        out=runs.out,
        experiment=shared_settings(base),
        seeds=wanted.seeds,
        method=options.method,
        budget=options.budget,
        score=score,
        methods=tuple(tuned),
    )
    write_json(runs.out / FILE, result.to_mapping())
    found = [each for each in tuned if each.chosen is not None]
    if not found:
        raise SartorError(f"every trial of every method failed; the first: {tuned[0].trials[0].failed}")
    write_text(runs.out / CHOSEN, _chosen_toml(plan, base, found, wanted.seeds[0]))
    return result


# What is tried ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """What a search will try, checked."""

    plan: Plan
    options: SearchSettings
    methods: list[Method]
    spaces: dict[str, Space]
    points: dict[str, list[dict[str, Any]]]
    """By method."""
    base: Experiment
    seeds: tuple[int, ...]

    @property
    def trials(self) -> list[tuple[str, Method]]:
        """Every trial as a method with the hyper-parameters of its point, with what it is called."""
        return [
            (_title(each, number), dataclasses.replace(each, hyper=point))
            for each in self.methods
            for number, point in enumerate(self.points[each.label])
        ]


def planned_trials(
    algorithms: str | Sequence[str] | OwnTables | None, asked: Mapping[str, Any], settings: RunSettings
) -> Trials:
    """The trials of a search; ``asked`` are settings of ``[search]`` that win over the experiment's."""
    plan = Plan(gather(settings))
    options, tables = split_table(plan.search, SearchSettings, "search", asked, algorithms)
    named = tuple(name for name in options.algorithms if name != EVERY)
    options = dataclasses.replace(options, algorithms=named)
    methods = _methods(plan, options, tables)
    spaces = {each.label: _space(each) for each in methods}
    # The first seed is checked below with all else; before that, any number may stand for a wrong one.
    start = plan.given["seed"] if isinstance(plan.given.get("seed"), int) else 0
    points = {
        each.label: _grid(each, spaces[each.label], options.budget)
        if options.method == "grid"
        else _draw(spaces[each.label], options.budget, start)
        for each in methods
    }
    trials = [dataclasses.replace(each, hyper=point) for each in methods for point in points[each.label]]
    base = plan.check(trials)
    seeds = plan.seeds(options.seeds, "search")
    _require_validation(plan, trials[0], seeds[0])
    return Trials(plan, options, methods, spaces, points, base, seeds)


def _title(method: Method, number: int) -> str:
    return f"{method.label}, trial {number + 1}"


def _methods(plan: Plan, options: SearchSettings, tables: dict[str, dict[str, Any]]) -> list[Method]:
    """The methods, with their spaces in place of hyper-parameters; values of ``[compare]`` are fixed."""
    everyone = tables.pop(EVERY, {})
    _, fixed = split_table(plan.compare, CompareSettings, "compare", {}, None)
    labels = [*options.algorithms, *tables] if options.algorithms else [*plan.named_algorithm, *tables]
    merged = {}
    for label in labels:
        own = {key: value if key == "algorithm" else [value] for key, value in fixed.get(label, {}).items()}
        merged[label] = {**own, **everyone, **tables.get(label, {})}
        if label not in tables and "algorithm" not in own and label not in registered():
            raise unknown("algorithm", label, registered(), what="name")
    methods = plan.methods(options.algorithms, merged, "search")
    return [_with_space(method, plan.hyper, options.method) for method in methods]


def _with_space(method: Method, given: Mapping[str, Any], how: str) -> Method:
    """A method with the declared ranges of its numbers for a space, where it was given none."""
    if method.hyper:
        return method
    space = {key: values for key, values in declared_space(method.algorithm).items() if key not in given}
    if not space:
        raise SettingError(
            f"search.{method.label}: no number to search, all are set; write [search.{method.label}] with "
            "lists or ranges, as in lr = [0.01, 0.1]"
        )
    points = {"points": GRID_POINTS} if how == "grid" else {}
    made = {key: {**asdict(values), **points} for key, values in space.items()}
    return dataclasses.replace(method, hyper=made)


def declared_space(algorithm: str) -> dict[str, Range]:
    """The numbers of a method, each in a range about its default that its declaration allows.

    From a tenth of the default to ten times as much, evenly in the logarithm; between both ends where two are
    declared; whole numbers from half to twice. What is 0, None, a word or yes or no stays as it is: it is
    another variant of the method rather than another strength.

    >>> {key: (values.low, values.high) for key, values in declared_space("ditto").items()}
    {'lr': (0.01, 1.0), 'lam': (0.1, 10.0)}
    """
    cls = registered()[algorithm].Hyper
    hints = typing.get_type_hints(cls)
    space = {}
    for each in dataclasses.fields(cls):
        default, allowed = each.default, meaning(each)
        if not each.init or hints[each.name] not in (int, float) or allowed.choices is not None:
            continue
        if isinstance(default, bool) or not isinstance(default, (int, float)) or default <= 0:
            continue
        found = _declared_range(default, allowed, whole=hints[each.name] is int)
        if found.low < found.high:
            space[each.name] = found
    return space


def _declared_range(default: float, allowed: Meaning, whole: bool) -> Range:
    low = allowed.low if allowed.low is not None else allowed.above
    high = allowed.high if allowed.high is not None else allowed.below
    if whole:
        least, most = max(1, default // 2), 2 * default
        fits = [value for value in range(int(least), int(most) + 1) if allowed.accepts(value)]
        return Range(min(fits, default=default), max(fits, default=default))
    if low is not None and high is not None:
        inside = 0.05 * (high - low)  # the ends are often another method
        return Range(min(low + inside, default), max(high - inside, default))
    ends = [float(f"{default * factor:.12g}") for factor in (0.1, 10)]
    low = ends[0] if low is None else max(low, ends[0])
    return Range(low, ends[1] if high is None else min(high, ends[1]), log=True)


def _space(method: Method) -> Space:
    """A method's space, every value in it one that the hyper-parameter takes."""
    where = f"search.{method.label}"
    hints = typing.get_type_hints(registered()[method.algorithm].Hyper)
    for key in method.hyper:
        if key not in hints:
            raise unknown(where, str(key), hyper_fields(method.algorithm))
    space: Space = {}
    for key, value in method.hyper.items():
        place = f"{where}.{key}"
        if isinstance(value, Mapping):
            if hints[key] not in (int, float):
                raise SettingError(f"{place}: a range is for numbers; give a list of values")
            space[key] = _range(build(Range, value, place), method.algorithm, key, where)
            continue
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise SettingError(f"{place}: an empty list; give at least one value")
        checked = [check_hyper(method.algorithm, {key: each}, where)[key] for each in values]
        space[key] = tuple(each for at, each in enumerate(checked) if each not in checked[:at])
    return space


def _range(given: Range, algorithm: str, key: str, where: str) -> Range:
    place = f"{where}.{key}"
    if given.low >= given.high:
        raise SettingError(f"{place}: low must be below high, got {given.low:g} and {given.high:g}")
    if given.log and given.low <= 0:
        raise SettingError(f"{place}: a range with log = true must begin above 0, got {given.low:g}")
    if given.points < 0:
        raise SettingError(f"{place}.points: must be at least 1, got {given.points}")
    whole = typing.get_type_hints(registered()[algorithm].Hyper)[key] is int
    ends: list[Any] = [given.low, given.high]
    if whole:
        ends = [int(end) if end == int(end) else end for end in ends]  # a fraction is refused below
    low, high = (check_hyper(algorithm, {key: end}, where)[key] for end in ends)
    return dataclasses.replace(given, low=low, high=high)


def value_at(range: Range, share: float) -> float:
    """The number a share in [0, 1] of the way through a range, a whole one where its ends are.

    >>> value_at(Range(0.01, 1.0, log=True), 0.5)
    0.1
    >>> [value_at(Range(1, 3), share) for share in (0.0, 0.3, 0.5, 0.99, 1.0)]
    [1, 1, 2, 3, 3]
    """
    low, high = range.low, range.high
    whole = isinstance(low, int) and isinstance(high, int)
    if whole and not range.log:
        return min(low + math.floor(share * (high - low + 1)), high)
    value = low * (high / low) ** share if range.log else low + share * (high - low)
    return round(value) if whole else min(max(value, low), high)


def _grid(method: Method, space: Space, budget: int) -> list[dict[str, Any]]:
    """Every combination of the values of a space, the last hyper-parameter changing first."""
    axes: list[list[Any]] = []
    for key, values in space.items():
        if not isinstance(values, Range):
            axes.append(list(values))
            continue
        if not values.points:
            raise SettingError(
                f"search.{method.label}.{key}: a grid needs a list, or a range with points, as in "
                f"{{low = {values.low:g}, high = {values.high:g}, points = 4}}"
            )
        shares = np.linspace(0, 1, values.points).tolist() if values.points > 1 else [0.5]
        axes.append(list(dict.fromkeys(value_at(values, share) for share in shares)))
    size = math.prod(map(len, axes))
    if size > budget:
        raise SettingError(
            f"search.{method.label}: the grid has {size} points and the budget is {budget}; raise "
            "search.budget, shorten the grid, or take method random"
        )
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*axes)]


def _draw(space: Space, budget: int, seed: int) -> list[dict[str, Any]]:
    """``budget`` different points, or all of them where there are no more.

    A hyper-parameter's draws follow from the seed and its name: methods that search the same range of
    learning rates try the same learning rates.
    """
    if not any(isinstance(values, Range) for values in space.values()):
        lists = [values for values in space.values() if not isinstance(values, Range)]
        size = math.prod(map(len, lists))
        points = []
        for number in random.choose(random.stream(seed, "search"), size, min(budget, size)):
            chosen: list[Any] = []
            for values in reversed(lists):
                number, place = divmod(number, len(values))
                chosen.append(values[place])
            points.append(dict(zip(space, reversed(chosen), strict=True)))
        return points
    count = DRAWS_PER_TRIAL * budget
    shares = {key: random.uniform(random.stream(seed, f"search.{key}"), count).tolist() for key in space}
    found: list[dict[str, Any]] = []
    for at in range(count):
        point = {
            key: value_at(values, shares[key][at])
            if isinstance(values, Range)
            else values[int(shares[key][at] * len(values))]
            for key, values in space.items()
        }
        if point not in found:
            found.append(point)
        if len(found) == budget:
            break
    return found


def _require_validation(plan: Plan, method: Method, seed: int) -> None:
    """Refuse to search without validation data: the choice would be made on the test data."""
    inputs = plan.inputs(method, seed)
    data = load_data(inputs.experiment)[0] if inputs.data is None else inputs.data
    if data.validation is None or not data.validation.count.sum():
        raise SettingError(
            "data.validation: a search chooses on validation data and there is none; keep a share of the "
            "training data for it, as in data.validation=0.2"
        )


# What came out ----------------------------------------------------------------------------------------------


def tune(wanted: Trials, method: Method, runs: Runs) -> tuple[Tuned, KeptRun | None]:
    """All trials of a method, and one of their runs, if one has not failed."""
    done: list[Trial] = []
    some: KeptRun | None = None
    for number, point in enumerate(wanted.points[method.label]):
        trial, run = _try(wanted.plan, method, number, point, wanted.seeds, runs)
        done.append(trial)
        some = some if run is None else run
    known = wanted.spaces[method.label]
    space = {key: asdict(v) if isinstance(v, Range) else list(v) for key, v in known.items()}
    best = _best(done, 1.0 if some is None else some.sign)
    return Tuned(method.label, method.algorithm, space, tuple(done), best), some


def _try(
    plan: Plan,
    method: Method,
    number: int,
    point: dict[str, Any],
    seeds: Sequence[int],
    runs: Runs,
) -> tuple[Trial, KeptRun | None]:
    """A trial on all seeds, and one of its runs, if it has not failed."""
    made: list[KeptRun] = []
    tried = dataclasses.replace(method, hyper=point)
    for place, seed in enumerate(seeds):
        later = (plan.inputs(tried, other) for other in seeds[place + 1 :])
        run = runs.attempt(plan.inputs(tried, seed), method.label, later)
        runs.tally.tell(f"{_title(method, number)}, seed {seed}", run.outcome)
        if isinstance(run, Failure):
            rounds = plan.inputs(tried, seed).experiment.rounds
            runs.tally.skip(len(seeds) - place - 1, rounds)
            return Trial(number, point, None, None, run.message, _runs_of(made)), None
        made.append(run)
    cell = made[0].cell("validation")
    score = made[0].score
    found = estimate(run.evaluations[-1]["evaluation"][cell].get(score) for run in made)
    if found.mean is None:
        message = f"no {score} follows from the validation data of the clients that are evaluated; keep a "
        message += "larger share of the training data for them (data.validation)"
        return Trial(number, point, cell, None, message, _runs_of(made)), made[0]
    return Trial(number, point, cell, found, None, _runs_of(made)), made[0]


def _runs_of(runs: Sequence[KeptRun]) -> tuple[RunOf, ...]:
    return tuple(RunOf(run.experiment.seed, run.folder.name, run.reused) for run in runs)


def _best(trials: Sequence[Trial], sign: float) -> int | None:
    """The number of the trial with the best mean score, the first of equals."""
    means = {
        trial.number: sign * trial.validation.mean
        for trial in trials
        if trial.validation is not None and trial.validation.mean is not None
    }
    return max(means, key=lambda number: (means[number], -number)) if means else None


def _chosen_toml(plan: Plan, base: Experiment, found: Sequence[Tuned], seed: int) -> str:
    """The experiment with the chosen hyper-parameters, as ``sartor compare`` takes it."""
    chosen: dict[str, Any] = {"algorithms": [each.label for each in found]}
    for each in found:
        method = Method(each.label, each.algorithm, each.best)
        own = check_hyper(each.algorithm, plan.mapping(method)["hyper"], "hyper")
        chosen[each.label] = own if each.label == each.algorithm else {"algorithm": each.algorithm, **own}
    names = [*REFERENCES, *(each.algorithm for each in found)]
    common = set.intersection(*map(hyper_fields, names))
    shared = {key: value for key, value in plan.hyper.items() if key in common}
    mapping = {**shared_settings(base), "seed": seed, "compare": chosen}
    if shared:
        mapping["hyper"] = check_hyper(REFERENCES[0], shared, "hyper")
    return toml_text(mapping)
