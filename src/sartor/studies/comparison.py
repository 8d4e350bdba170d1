"""Several methods on the same clients, cohorts and batches, over several seeds, with paired statistics.

:func:`compare` runs what is missing, reuses what is there (see :mod:`sartor.studies.library`) and stores
the result as ``comparison.json`` beside the run folders. That file is a :class:`Comparison`, field by field:

=====================  ================================================================================
format, sartor         1, and the version of Sartor
experiment             the settings all methods share, every one written out
seeds                  the seeds, in the order of every list below that has one entry per seed
score                  what methods are judged by: the headline metric of its runs, such as ``accuracy``
more_is_better         whether more of it is better
target, against        as asked for; null if not
methods                for each method ``label``, ``algorithm``, ``hyper``, ``reference`` (whether it was
                       added as one), ``main`` (the cell of its main number) and its numbers, each with
                       ``mean``, ``deviation`` and ``values`` (one per seed, null where there is none):
                       ``cells`` and ``best_by_validation`` (by cell), ``client_deviation`` and
                       ``worst_decile`` (of the main cell), ``bytes``, ``seconds``, and ``to_target`` with
                       ``reached`` (the number of seeds), ``rounds``, ``bytes``, ``seconds``, or null;
                       ``runs``, one per seed: ``seed``, ``folder`` (its name beside this file), ``reused``
pairs                  for two methods ``first`` and ``second``, over clients × seeds, all differences
                       being first minus second and turned so that a positive one is in favour of the
                       first: ``pairs``, ``better``, ``equal``, ``worse``, ``seeds_better``,
                       ``mean_difference``, ``interval``, ``rank_biserial``, ``p``, ``p_holm``
ranking                ``methods`` (from the best average rank to the worst), ``ranks``, ``statistic`` and
                       ``p`` (Friedman), ``critical_difference`` (Nemenyi, at 0.05), ``cliques`` (labels),
                       ``blocks`` (clients × seeds); null for a single method
failed                 ``label``, ``algorithm``, ``seed``, ``message`` of runs that came to no end; their
                       methods are in none of the above
=====================  ================================================================================
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sartor.algorithms import registered
from sartor.algorithms.cards import why_unprotected
from sartor.errors import SartorError, SettingError
from sartor.extensions import function_file
from sartor.runs.evaluation import CELLS
from sartor.runs.experiment import Experiment, fingerprint, from_mapping, to_mapping
from sartor.runs.inputs import Given, Inputs, RunSettings, gather
from sartor.runs.metrics import spread
from sartor.runs.observers import Observer
from sartor.runs.record import environment, write_json
from sartor.settings import build, check, meaning, setting, shown, unknown
from sartor.studies.library import Failure, KeptRun, Runs
from sartor.studies.progress import Tally
from sartor.studies.statistics import bootstrap_interval, holm, ranking, signed_ranks

FILE = "comparison.json"
FORMAT = 1
REFERENCES = ("separate", "fedupdate")
"""What stands beside every comparison: training alone, and FedAvg with fine-tuning."""

TOGETHER = ("auto", "yes", "no")

OwnTables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CompareSettings:
    """The keys of ``[compare]`` besides one table for each method."""

    algorithms: tuple[str, ...] = setting(
        (), "the methods; left out: those that have a table, or the experiment's"
    )
    seeds: int | tuple[int, ...] = setting(5, "number of seeds from `seed` on, or a list of them", low=0)
    target: float | None = setting(None, "score to reach, for rounds and bytes to it")
    against: str | None = setting(None, "test the other methods against this one; left out: all pairs")
    references: bool = setting(
        True, "whether separate and fedupdate are compared too, as far as [privacy] has a guarantee for them"
    )
    together: str = setting(
        "auto", "whether the seeds of a method are trained in one batch; auto: where faster", choices=TOGETHER
    )


@dataclass(frozen=True)
class Method:
    """What is compared: an algorithm with hyper-parameters, under a label of its own."""

    label: str
    algorithm: str
    hyper: dict[str, Any]
    """Those that were set for this method alone, not yet checked as a whole."""
    reference: bool = False


@dataclass(frozen=True)
class Estimate:
    """A number over seeds: its mean and sample deviation over those that have it, and each one's value."""

    mean: float | None
    deviation: float | None
    """None for fewer than two values."""
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class ToTarget:
    """What it took until the main score was at its target in an evaluation."""

    reached: int
    """The number of seeds that came there; the estimates are over these."""
    rounds: Estimate
    bytes: Estimate
    """Down and up together."""
    seconds: Estimate
    """Of training."""


@dataclass(frozen=True)
class RunOf:
    """One run of a method."""

    seed: int
    folder: str
    reused: bool


@dataclass(frozen=True)
class MethodResult:
    """The numbers of one method."""

    label: str
    algorithm: str
    hyper: dict[str, Any]
    reference: bool
    main: str
    """The cell of the main number: ``personal_local`` where there is one, else ``shared_local``."""
    cells: dict[str, Estimate]
    """The score of every cell the method has, after the last round."""
    best_by_validation: dict[str, Estimate]
    """Accuracies in the round that was best on validation data; empty without such data."""
    client_deviation: Estimate
    """How the main score is spread over clients."""
    worst_decile: Estimate
    bytes: Estimate
    seconds: Estimate
    to_target: ToTarget | None
    runs: tuple[RunOf, ...]


@dataclass(frozen=True)
class Pair:
    """Two methods on the same clients and seeds; a positive difference is in favour of the first."""

    first: str
    second: str
    pairs: int
    better: int
    equal: int
    worse: int
    seeds_better: int
    """Seeds in which the first is better on average."""
    mean_difference: float
    interval: tuple[float, float]
    """Bootstrap interval of the mean difference, 95 %."""
    rank_biserial: float
    p: float
    """Wilcoxon signed-rank, two-sided."""
    p_holm: float
    """Corrected for the number of pairs in this comparison."""


@dataclass(frozen=True)
class RankingResult:
    """Average ranks over clients × seeds, from the best to the worst."""

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    statistic: float
    p: float
    critical_difference: float
    cliques: tuple[tuple[str, ...], ...]
    blocks: int


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`, as it is stored."""

    out: Path
    experiment: dict[str, Any]
    seeds: tuple[int, ...]
    score: str
    target: float | None
    against: str | None
    methods: tuple[MethodResult, ...]
    pairs: tuple[Pair, ...]
    ranking: RankingResult | None
    failed: tuple[Failure, ...]
    more_is_better: bool = True
    """Whether more of the score is better."""

    def method(self, label: str) -> MethodResult:
        """The numbers of one method."""
        found = {method.label: method for method in self.methods}
        if label not in found:
            raise unknown("method", label, found, what="name")
        return found[label]

    def to_mapping(self) -> dict[str, Any]:
        """What ``comparison.json`` holds."""
        values = asdict(self)
        del values["out"]
        return {"format": FORMAT, "sartor": environment()["sartor"], **values}


class NothingFinished(SartorError):
    """No method of a comparison came to its end."""

    def __init__(self, failed: Sequence[Failure]) -> None:
        super().__init__(f"no method came to its end; {failed[0].label}: {failed[0].message}")
        self.failed = tuple(failed)


def compare(
    algorithms: str | Sequence[str] | OwnTables | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    target: float | None = None,
    against: str | None = None,
    references: bool | None = None,
    together: str | None = None,
    out: str | Path | Runs | None = None,
    progress: bool | Tally = False,
    observers: Sequence[Observer] = (),
    **settings: Unpack[RunSettings],
) -> Comparison:
    """Run methods on the same clients, cohorts and batches, and compare them.

    ``algorithms`` are names, or a mapping from names to hyper-parameters of that method alone; a name that
    is no algorithm's is a label whose entry ``algorithm`` says what it stands for. ``separate`` and
    ``fedupdate`` are always compared too, unless ``references`` is false. ``seeds`` is a number of seeds
    counted from ``seed``, or a list. The rest is as for :func:`sartor.run`; hyper-parameters in ``hyper``
    are for every method that is compared. What ``[compare]`` of the experiment says stands where nothing is
    given here. ``together`` says whether the seeds of a method are trained in one batch (``yes``, ``no``, or
    ``auto``: where that is faster). Everything is stored in the folder ``out``, where finished runs are
    found again. ``progress`` tells how it goes; a :class:`~sartor.studies.progress.Tally` does so for a study
    of which this is a part, whose :class:`~sartor.studies.library.Runs` may stand for the folder.
    ``observers`` are told of every run that is made, one after the other.

    >>> from tempfile import mkdtemp
    >>> chosen = {"fedavg": {}, "fast": {"algorithm": "fedavg", "lr": 0.5}}
    >>> local = {"batch": 16}
    >>> result = compare(chosen, clients=5, rounds=2, seeds=2, references=False, local=local, out=mkdtemp())
    >>> [(method.label, method.main) for method in result.methods]
    [('fedavg', 'shared_local'), ('fast', 'shared_local')]
    >>> result.pairs[0].pairs
    10
    """
    plan = Plan(gather(settings))
    asked = {
        "seeds": seeds,
        "target": target,
        "against": against,
        "references": references,
        "together": together,
    }
    options, tables = split_table(plan.compare, CompareSettings, "compare", asked, algorithms)
    methods = plan.methods(options.algorithms, tables, "compare")
    if options.references:
        taken = {name for method in methods for name in (method.label, method.algorithm)}
        missing = [name for name in REFERENCES if name not in taken and plan.protects(name)]
        more = plan.methods(missing, tables, "compare") if missing else []
        methods += [dataclasses.replace(method, reference=True) for method in more]
    for method in methods:
        check_hyper(method.algorithm, method.hyper, f"compare.{method.label}")
    labels = [method.label for method in methods]
    if options.against is not None and options.against not in labels:
        raise unknown("compare.against", options.against, labels, what="name")
    base = plan.check(methods)
    chosen_seeds = plan.seeds(options.seeds, "compare")
    count = len(methods) * len(chosen_seeds)
    tally = progress if isinstance(progress, Tally) else Tally(count, count * base.rounds, shown=progress)
    folder = plan.folder("comparisons", base) if out is None else out
    runs = folder if isinstance(folder, Runs) else Runs(Path(folder), tally, options.together, observers)
    made, failed = _run_all(plan, methods, chosen_seeds, runs)
    finished = [method for method in methods if len(made[method.label]) == len(chosen_seeds)]
    if not finished:
        raise NothingFinished(failed)
    result = _comparison(finished, made, chosen_seeds, options, runs.out, failed)
    write_json(runs.out / FILE, result.to_mapping())
    return result


# What is to be run ------------------------------------------------------------------------------------------


class Plan:
    """The settings all methods of a comparison or a search share, and the experiment of each of them."""

    def __init__(self, given: Given) -> None:
        self._inputs = given.inputs
        self.given = {key: value for key, value in given.settings.items() if value is not None}
        self.compare = self.given.pop("compare", {})
        self.search = self.given.pop("search", {})
        hyper = self.given.pop("hyper", {})
        if not isinstance(hyper, Mapping):
            raise SettingError(
                f"hyper: expected a table, got {shown(hyper)}; write [hyper] and its keys below"
            )
        self.hyper = {key: value for key, value in hyper.items() if value is not None}
        algorithm = self.given.pop("algorithm", None)
        self.named_algorithm = [] if algorithm is None else [algorithm]
        self._common: set[str] = set()

    def methods(
        self, names: Sequence[str], tables: Mapping[str, Mapping[str, Any]], section: str
    ) -> list[Method]:
        """The methods of these labels, or where there are none the experiment's and those with a table.

        Every table has to belong to an algorithm, also those of methods that are not asked for.
        """
        known = registered()
        made = {label: _method(label, table, section) for label, table in tables.items()}
        wanted = list(dict.fromkeys(names or [*self.named_algorithm, *tables]))
        if not wanted:
            raise SettingError(f"{section}: name the algorithms, as in --algorithms fedavg,ditto")
        for label in wanted:
            if label not in made and label not in known:
                raise unknown("algorithm", label, known, what="name")
        return [made.get(label) or Method(label, label, {}) for label in wanted]

    def protects(self, name: str) -> bool:
        """Whether an algorithm has a guarantee under the privacy that is asked for, if any is."""
        privacy = self.given.get("privacy")
        mode = privacy.get("mode") if isinstance(privacy, Mapping) else None
        return mode is None or why_unprotected(registered()[name], str(mode)) is None

    def check(self, methods: Sequence[Method]) -> Experiment:
        """Have every method's experiment checked before any of them runs; the first one of them."""
        own = self.named_algorithm[0] if self.named_algorithm else "fedavg"
        fields = [hyper_fields(method.algorithm) for method in methods]
        self._common = set.intersection(*fields)
        mine = hyper_fields(own) if own in registered() else set()
        for key in self.hyper:
            if key not in self._common | mine:
                without = next(m.label for m, known in zip(methods, fields, strict=True) if key not in known)
                known = set.union(*fields)
                if key not in known:
                    raise unknown("hyper", str(key), known)
                owner = next(m.label for m, known in zip(methods, fields, strict=True) if key in known)
                raise SettingError(
                    f"hyper.{key}: {without} has no such hyper-parameter; say whose it is, as in "
                    f"{owner}.{key}={shown(self.hyper[key])}"
                )
        experiments = [from_mapping(self.mapping(method)) for method in methods]
        return experiments[0]

    def mapping(self, method: Method, seed: int | None = None) -> dict[str, Any]:
        """The settings of a method's run: what all share, with its algorithm and its hyper-parameters."""
        own = method.algorithm in (self.named_algorithm or ["fedavg"])
        shared = {key: value for key, value in self.hyper.items() if own or key in self._common}
        run = {**self.given, "algorithm": method.algorithm, "hyper": {**shared, **method.hyper}}
        return run if seed is None else {**run, "seed": seed}

    def inputs(self, method: Method, seed: int) -> Inputs:
        """What a method's run starts from."""
        return self._inputs(self.mapping(method, seed))

    def seeds(self, wanted: int | Sequence[int], section: str) -> tuple[int, ...]:
        """The seeds of a number of them, counted from the experiment's, or of a list."""
        if isinstance(wanted, int):
            first = self.given.get("seed", 0)
            wanted = range(first, first + wanted) if isinstance(first, int) else [first]
        if not wanted:
            raise SettingError(f"{section}.seeds: give at least one seed")
        if len(set(wanted)) < len(wanted):
            raise SettingError(f"{section}.seeds: every seed once, got {shown(list(wanted))}")
        return tuple(wanted)

    def folder(self, parent: str, base: Experiment) -> Path:
        """The folder of all comparisons or searches that share these settings."""
        own = base.data.path
        name = base.data.name if own is None else Path(function_file(own) or own).resolve().stem or "own"
        return Path(parent) / f"{name}-{fingerprint(_without_method(base))[:8]}"


def split_table(
    table: Any,
    cls: type[Any],
    section: str,
    asked: Mapping[str, Any],
    algorithms: str | Sequence[str] | OwnTables | None,
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """A section's own settings, as ``cls``, and its tables by label; what was asked for wins over both.

    No table of the section makes a method's name that of another; ``algorithms`` may, as papers do in theirs.
    """
    if not isinstance(table, Mapping):
        raise SettingError(f"{section}: expected a table, got {shown(table)}; write [{section}] and its keys")
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {key: value for key, value in table.items() if key in fields or not isinstance(value, Mapping)}
    tables = {key: dict(value) for key, value in table.items() if key not in values}
    for label, named in tables.items():
        algorithm = named.get("algorithm")
        if label in registered() and algorithm not in (None, label):
            raise SettingError(
                f"{section}.{label}.algorithm = {shown(algorithm)}: {label} is a method of its own; "
                "give the table a name that no method has"
            )
    values.update({key: value for key, value in asked.items() if value is not None})
    if isinstance(algorithms, Mapping):
        for label, own in algorithms.items():
            if not isinstance(own, Mapping):
                raise SettingError(f"{section}.{label}: expected hyper-parameters by name, got {shown(own)}")
            tables[label] = {**tables.get(label, {}), **own}
    if algorithms is not None:
        names = algorithms.split(",") if isinstance(algorithms, str) else list(algorithms)
        values["algorithms"] = [name.strip() if isinstance(name, str) else name for name in names]
    for key, value in values.items():
        if key not in fields and not isinstance(value, Mapping):
            raise unknown(section, str(key), [*fields, *registered()])
        if isinstance(value, range):
            values[key] = list(value)
    return build(cls, values, section), tables


def _method(label: str, table: Mapping[str, Any], section: str) -> Method:
    known = registered()
    hyper = {key: value for key, value in table.items() if value is not None}
    algorithm = hyper.pop("algorithm", label)
    if not isinstance(algorithm, str) or algorithm not in known:
        if "algorithm" in table:
            raise unknown(f"{section}.{label}.algorithm", str(algorithm), known, what="name")
        raise unknown(section, label, known)
    return Method(label, algorithm, hyper)


def check_hyper(algorithm: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Some hyper-parameters of an algorithm, each one known, of its type and in its range."""
    cls = registered()[algorithm].Hyper
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise unknown(where, str(key), fields)
    return {
        key: check(value, hints[key], meaning(fields[key]), f"{where}.{key}") for key, value in values.items()
    }


def hyper_fields(algorithm: str) -> set[str]:
    """The names of an algorithm's hyper-parameters."""
    return {field.name for field in dataclasses.fields(registered()[algorithm].Hyper) if field.init}


def _without_method(experiment: Experiment) -> Experiment:
    """What methods share: the experiment with the default algorithm, hyper-parameters and seed."""
    plain = registered()["fedavg"].Hyper()
    return dataclasses.replace(experiment, algorithm="fedavg", hyper=plain, seed=0)


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """An experiment's settings without algorithm, hyper-parameters and seed."""
    own = ("algorithm", "hyper", "seed")
    return {key: value for key, value in to_mapping(experiment).items() if key not in own}


def _run_all(
    plan: Plan, methods: Sequence[Method], seeds: Sequence[int], runs: Runs
) -> tuple[dict[str, list[KeptRun]], list[Failure]]:
    """Every method's runs, a seed for all of them before the next where seeds are not run together."""
    made: dict[str, list[KeptRun]] = {method.label: [] for method in methods}
    failed: list[Failure] = []
    for place, seed in enumerate(seeds):
        for method in methods:
            later = (plan.inputs(method, other) for other in seeds[place + 1 :])
            run = runs.attempt(plan.inputs(method, seed), method.label, later)
            if isinstance(run, Failure):
                failed.append(run)
            else:
                made[method.label].append(run)
            runs.tally.tell(f"{method.label}, seed {seed}", run.outcome)
    return made, failed


# What came out ----------------------------------------------------------------------------------------------


def estimate(values: Iterable[float | None]) -> Estimate:
    """Mean and sample deviation of the values there are.

    >>> estimate([1.0, None, 3.0])
    Estimate(mean=2.0, deviation=1.4142135623730951, values=(1.0, None, 3.0))
    """
    every = tuple(None if value is None else float(value) for value in values)
    there = np.asarray([value for value in every if value is not None])
    mean = float(there.mean()) if len(there) else None
    deviation = float(there.std(ddof=1)) if len(there) > 1 else None
    return Estimate(mean, deviation, every)


def _comparison(
    methods: Sequence[Method],
    made: Mapping[str, Sequence[KeptRun]],
    seeds: tuple[int, ...],
    options: CompareSettings,
    out: Path,
    failed: Sequence[Failure],
) -> Comparison:
    """The numbers and the statistics of methods whose runs are all there."""
    mains = {method.label: made[method.label][0].cell("local") for method in methods}
    some = made[methods[0].label][0]
    score, sign = some.score, some.sign
    labels = list(mains)
    blocks = _client_scores(made, mains, score, sign)
    for seed, block in zip(seeds, blocks, strict=True):
        if not len(block):
            raise SartorError(f"seed {seed}: no client that is evaluated has test samples to compare on")
    chosen = list(combinations(range(len(labels)), 2))
    if options.against in labels:
        second = labels.index(options.against)
        chosen = [(first, second) for first in range(len(labels)) if first != second]
    return Comparison(
        out=out,
        experiment=shared_settings(some.experiment),
        seeds=seeds,
        score=score,
        target=options.target,
        against=options.against,
        methods=tuple(
            _method_result(method, made[method.label], mains[method.label], score, options.target, sign)
            for method in methods
        ),
        pairs=_pairs(labels, blocks, chosen, seeds[0]),
        ranking=ranked(labels, np.concatenate(blocks)) if len(labels) > 1 else None,
        failed=tuple(failed),
        more_is_better=sign > 0,
    )


def _client_scores(
    made: Mapping[str, Sequence[KeptRun]], mains: Mapping[str, str], score: str, sign: float
) -> list[np.ndarray]:
    """For every seed the clients' main scores, a column per method, turned so that more is better.

    Clients without test samples are left out: they are the same under every method.
    """
    blocks = []
    for runs in zip(*(made[label] for label in mains), strict=True):
        scores = [
            dict(zip(run.clients["client"], run.clients[f"{main}_{score}"], strict=True))
            for run, main in zip(runs, mains.values(), strict=True)
        ]
        rows = [[one.get(client) for one in scores] for client in scores[0]]
        there = [row for row in rows if None not in row]
        blocks.append(sign * np.asarray(there, np.float64).reshape(len(there), len(scores)))
    return blocks


def _method_result(
    method: Method, runs: Sequence[KeptRun], main: str, score: str, target: float | None, sign: float
) -> MethodResult:
    last = [run.summary["last"] for run in runs]
    validated = {cell: [_best_validated(run, cell, score, sign) for run in runs] for cell in CELLS}
    spreads = []
    for run in runs:
        there = [sign * value for value in run.clients[f"{main}_{score}"] if value is not None]
        spreads.append(spread(there))
    return MethodResult(
        label=method.label,
        algorithm=method.algorithm,
        hyper=to_mapping(runs[0].experiment)["hyper"],
        reference=method.reference,
        main=main,
        cells={
            cell: estimate(None if every[cell] is None else every[cell][score] for every in last)
            for cell in CELLS
            if any(every[cell] is not None for every in last)
        },
        best_by_validation={
            cell: estimate(values)
            for cell, values in validated.items()
            if any(value is not None for value in values)
        },
        client_deviation=estimate(each.deviation for each in spreads),
        worst_decile=estimate(sign * each.worst_decile for each in spreads),
        bytes=estimate(run.summary["bytes_down"] + run.summary["bytes_up"] for run in runs),
        seconds=estimate(run.summary["seconds"] for run in runs),
        to_target=None if target is None else _to_target(runs, main, score, target, sign),
        runs=tuple(RunOf(run.experiment.seed, run.folder.name, run.reused) for run in runs),
    )


def _best_validated(run: KeptRun, cell: str, score: str, sign: float) -> float | None:
    """The score of a cell in the first round in which its model was best by it on validation data.

    A run has noted that for its own headline, which may be another under another seed: where the largest
    class has about the share from which on accuracy says little.
    """
    judge = f"{cell.split('_')[0]}_validation"
    judged = [
        cells
        for row in run.evaluations
        if cell in (cells := row["evaluation"]) and cells.get(judge, {}).get(score) is not None
    ]
    best = max(judged, key=lambda cells: sign * float(cells[judge][score]), default=None)
    return None if best is None else best[cell].get(score)


def _to_target(runs: Sequence[KeptRun], main: str, score: str, target: float, sign: float) -> ToTarget:
    """Rounds, bytes and seconds up to the first evaluation that is at the target."""
    reached = [_first_at(run, main, score, target, sign) for run in runs]
    rounds, sent, seconds = zip(*reached, strict=True)
    count = sum(round is not None for round in rounds)
    return ToTarget(count, estimate(rounds), estimate(sent), estimate(seconds))


def _first_at(
    run: KeptRun, main: str, score: str, target: float, sign: float
) -> tuple[float | None, float | None, float | None]:
    sent, seconds = 0.0, 0.0
    for row in run.rounds:
        sent += row.get("bytes_down", 0) + row.get("bytes_up", 0)
        seconds += row.get("seconds", 0.0)
        value = row.get("evaluation", {}).get(main, {}).get(score)
        if value is not None and sign * value >= sign * target:
            return row["round"], sent, seconds
    return None, None, None


def _pairs(
    labels: Sequence[str], blocks: Sequence[np.ndarray], chosen: Sequence[tuple[int, int]], seed: int
) -> tuple[Pair, ...]:
    """The tests of pairs of methods, corrected together."""
    pairs = []
    for one, other in chosen:
        by_seed = [block[:, one] - block[:, other] for block in blocks]
        differences = np.concatenate(by_seed)
        test = signed_ranks(differences)
        pairs.append(
            Pair(
                first=labels[one],
                second=labels[other],
                pairs=len(differences),
                better=test.better,
                equal=test.equal,
                worse=test.worse,
                seeds_better=sum(round(float(each.mean()), 12) > 0 for each in by_seed),
                mean_difference=float(differences.mean()),
                interval=bootstrap_interval(differences, seed),
                rank_biserial=test.rank_biserial,
                p=test.p,
                p_holm=1.0,
            )
        )
    corrected = holm([pair.p for pair in pairs])
    return tuple(dataclasses.replace(pair, p_holm=p) for pair, p in zip(pairs, corrected, strict=True))


def ranked(labels: Sequence[str], table: np.ndarray) -> RankingResult:
    """Average ranks of these methods, the best first; a row of the table for each client and seed."""
    found = ranking(table)
    order = sorted(range(len(labels)), key=lambda place: (found.ranks[place], place))
    return RankingResult(
        methods=tuple(labels[place] for place in order),
        ranks=tuple(found.ranks[place] for place in order),
        statistic=found.statistic,
        p=found.p,
        critical_difference=found.critical_difference,
        cliques=tuple(tuple(labels[place] for place in clique) for clique in found.cliques),
        blocks=len(table),
    )
