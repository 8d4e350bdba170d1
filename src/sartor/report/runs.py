"""What a report is made of: run folders read back, and the runs of one experiment put together."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sartor.data.partitions import Partition
from sartor.data.schema import LEARNED
from sartor.errors import SartorError
from sartor.extensions import function_file
from sartor.runs.metrics import more_is_better
from sartor.runs.outputs import Outputs, read_outputs
from sartor.runs.record import CONFIG, OUTPUTS, PARTITION, RunFolder
from sartor.studies.comparison import FILE as COMPARISON

OWN = "own"
"""Stands for ``personal_local`` where a method has personal models and for ``shared_local`` where not."""

CELL_WORDS = {
    OWN: "each client's own model (or the shared one), own test data",
    "personal_local": "personal models, own test data",
    "shared_local": "shared model, own test data",
    "shared_pooled": "shared model, pooled test data",
    "personal_pooled": "personal models, pooled test data",
    "personal_validation": "personal models, validation data",
    "shared_validation": "shared model, validation data",
}


class NotEvaluated(SartorError):
    """A run of which there is nothing to show."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, read."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: dict[str, list[Any]]
    """Column -> values of the last evaluation, a row per client."""
    partition: Partition | None
    summary: dict[str, Any] | None
    """None for a run that has not finished."""
    label: str | None = None
    """What a comparison calls it."""
    outputs: dict[str, Outputs] = field(default_factory=dict)
    """What its final models say of every sample, by split, where that is stored."""
    failed: str | None = None
    """The message with which it ended, if its numbers were not finite."""

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return str(self.config.get("algorithm", "unknown"))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config.get("seed", 0))

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary is not None

    @property
    def hash(self) -> str | None:
        """Which clients hold which samples, as a hash; None where the folder does not tell."""
        if self.partition is not None:
            return self.partition.hash
        return None if self.summary is None else self.summary.get("partition_hash")

    @property
    def data(self) -> str:
        """The name of the data."""
        stored = self.config.get("data", {})
        own = stored.get("path")
        named = None if self.summary is None else self.summary.get("data")
        named = named or (None if own is None else Path(function_file(own) or own).resolve().stem)
        return str(named or stored.get("name", "unknown"))

    @property
    def headline(self) -> str | None:
        """What it is judged by; None where its folder does not tell."""
        told = None if self.summary is None else self.summary.get("headline")
        found: str | None = told or self.config.get("evaluate", {}).get("headline")
        return found

    @cached_property
    def evaluated(self) -> list[dict[str, Any]]:
        """The rounds that have an evaluation, with the bytes sent up to then as ``bytes``."""
        rows, sent = [], 0
        for row in self.rounds:
            sent += (row.get("bytes_down") or 0) + (row.get("bytes_up") or 0)
            if row.get("evaluation"):
                rows.append({**row, "bytes": sent})
        return rows

    @property
    def last(self) -> dict[str, Any]:
        """The last evaluation, cell by cell."""
        cells: dict[str, Any] = self.evaluated[-1]["evaluation"]
        return cells

    @cached_property
    def names(self) -> list[str]:
        """The clients' names, in their order; those that attack are marked."""
        if "client" in self.clients:
            names = [str(name) for name in self.clients["client"]]
            attacks = self.clients.get("attacker") or [False] * len(names)
            return [f"{name} (attacker)" if bad else name for name, bad in zip(names, attacks, strict=True)]
        if self.partition is not None:
            return list(self.partition.names)
        return []

    def name_of(self, client: int) -> str:
        """A client's name, or its number where the folder has no names."""
        return self.names[client] if 0 <= client < len(self.names) else str(client)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one experiment that differ in nothing but the seed."""

    label: str
    runs: list[Run]
    place: int
    """Where it stands among the groups; its colour, dash and marker follow from it."""


@dataclass(frozen=True)
class Material:
    """All a report shows."""

    groups: list[Group]
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    """The contents of the ``comparison.json`` files."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know about the runs."""

    @property
    def runs(self) -> list[Run]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def headline(self) -> str:
        """What the runs are judged by; accuracy where they differ in that."""
        found = {run.headline for run in self.runs} - {None}
        return str(found.pop()) if len(found) == 1 else "accuracy"

    def more_is_better(self, measure: str) -> bool:
        """Whether more of a metric is better; of a measure of an objective's own, its runs say."""
        told = [run.summary for run in self.runs if run.summary is not None and run.headline == measure]
        return more_is_better(measure) or any(summary.get("more_is_better", False) for summary in told)

    def labelled(self) -> list[tuple[str, Group, Run]]:
        """Every run with a label of its own."""
        return [
            (group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}", group, run)
            for group in self.groups
            for run in group.runs
        ]


def read(paths: Iterable[str | Path]) -> Material:
    """The material of run folders, and of folders that hold run folders or a comparison."""
    folders: dict[Path, tuple[Path, str | None]] = {}
    comparisons, notes = [], []
    for path in map(Path, paths):
        named: list[tuple[Path, str | None]]
        if (path / COMPARISON).is_file():
            comparison = _read_comparison(path / COMPARISON)
            comparisons.append(comparison)
            named = _compared(comparison, path)
            for failure in comparison.get("failed") or ():
                notes.append(f"{failure['label']}, seed {failure['seed']} failed: {failure['message']}")
        else:
            named = [(folder, None) for folder in ([path] if (path / CONFIG).is_file() else _inside(path))]
        folders |= {folder.resolve(): (folder, label) for folder, label in named}
    if not folders:
        raise SartorError("name at least one run folder, as in `sartor report runs/*`")
    runs, empty = [], []
    for folder, label in folders.values():
        try:
            runs.append(read_run(folder, label))
        except NotEvaluated as error:
            empty.append(error)
    if not runs:
        raise empty[0]
    kept, twice = _one_per_seed(runs)
    groups = _grouped(kept)
    left_out = [f"Left out, {error}." for error in empty]
    return Material(groups, comparisons, [*notes, *left_out, *twice, *_notes(groups)])


def read_run(path: Path, label: str | None = None) -> Run:
    """A run folder, with the client rows of its last evaluation."""
    folder = RunFolder.open(path)
    rounds = folder.rounds
    evaluated = [row.get("round") for row in rounds if row.get("evaluation")]
    if not evaluated and folder.diverged is not None:
        raise NotEvaluated(f"{path}: failed before it was evaluated: {folder.diverged['message']}")
    if not evaluated:
        raise NotEvaluated(f"{path}: no evaluation is recorded yet; wait for the first one, or run it again")
    columns = folder.clients
    clients: dict[str, list[Any]] = {}
    if "round" in columns:
        rows = [row for row, round in enumerate(columns["round"]) if round == evaluated[-1]]
        clients = {name: [column[row] for row in rows] for name, column in columns.items()}
    stored = path / PARTITION
    return Run(
        path=path,
        config=folder.config,
        environment=folder.environment,
        rounds=rounds,
        clients=clients,
        partition=Partition.load(stored) if stored.is_file() else None,
        summary=folder.summary if folder.finished else None,
        label=label,
        outputs=_outputs(folder),
        failed=None if folder.diverged is None or folder.finished else str(folder.diverged["message"]),
    )


def _outputs(folder: RunFolder) -> dict[str, Outputs]:
    content = folder.outputs
    try:
        return {} if content is None else read_outputs(content)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SartorError(f"{folder.path / OUTPUTS}: damaged ({error}); remove it, or run it anew") from None


def cell_of(evaluation: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A cell of an evaluation; :data:`OWN` is the personal models' or, without them, the shared model's."""
    cell = evaluation.get(own_cell(evaluation) if name == OWN else name)
    return cell if isinstance(cell, Mapping) else None


def own_cell(cells: Iterable[str]) -> str:
    """Which cell :data:`OWN` stands for, where there are these."""
    return "personal_local" if "personal_local" in cells else "shared_local"


def cells_in(runs: Sequence[Run]) -> list[str]:
    """The cells that occur, the one to look at first in front.

    Where some methods have personal models and others have none, that is :data:`OWN`.
    """
    found = {name for run in runs for name in run.last}
    own = {own_cell(run.last) for run in runs}
    ordered = [name for name in CELL_WORDS if name in found] + sorted(found - set(CELL_WORDS))
    return [OWN, *ordered] if len(own) > 1 else ordered


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The mean over seeds and their standard deviation (n − 1); None where there is nothing to take it of.

    >>> mean_and_deviation([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    present = [value for value in values if value is not None]
    if not present:
        return None, None
    return float(np.mean(present)), float(np.std(present, ddof=1)) if len(present) > 1 else None


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as ``section.key`` -> value."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        settings.update(
            flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
        )
    return settings


def _inside(path: Path) -> list[Path]:
    """The run folders right inside a folder."""
    if not path.exists():
        raise SartorError(f"{path}: no such run folder")
    if not path.is_dir():
        raise SartorError(f"{path}: is a file; give the run folder it lies in")
    inside = sorted(child for child in path.iterdir() if (child / CONFIG).is_file())
    if not inside:
        raise SartorError(f"{path}: not a run folder, it has no {CONFIG}, and there is none inside it")
    return inside


def _read_comparison(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SartorError(f"{path}: damaged or not readable: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("methods"), list):
        raise SartorError(f"{path}: damaged, expected a comparison with its methods")
    return value


def _compared(comparison: Mapping[str, Any], path: Path) -> list[tuple[Path, str | None]]:
    """The run folders a comparison is of; others may lie beside them."""
    try:
        return [
            (path / run["folder"], str(method["label"]))
            for method in comparison["methods"]
            for run in method["runs"]
        ]
    except (KeyError, TypeError) as error:
        raise SartorError(f"{path / COMPARISON}: damaged: {error}; make the comparison again") from None


def _experiment_key(run: Run, learned: bool = True) -> str:
    """Equal for runs of one experiment: all settings but the seed, where it was computed and where shown.

    Without what is ``learned`` from training rows, which are others under every seed.
    """
    settings = {key: value for key, value in run.config.items() if key not in ("seed", "engine", "tracking")}
    if not learned:
        settings["columns"] = {name: _stated(column) for name, column in settings.get("columns", {}).items()}
    return json.dumps([settings, run.finished], sort_keys=True, default=str)


def _stated(column: Any) -> Any:
    """A column of a schema without what may have been learned for it."""
    known = isinstance(column, Mapping)
    return {key: value for key, value in column.items() if key not in LEARNED} if known else column


def _one_per_seed(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """A run stored twice must not count as two seeds: the one named last stays."""
    latest: dict[tuple[str, int], Run] = {}
    notes = []
    for run in runs:
        key = (_experiment_key(run), run.seed)
        if key in latest:
            notes.append(f"{latest[key].path} is left out: {run.path} is the same experiment and seed.")
            del latest[key]
        latest[key] = run
    return list(latest.values()), notes


def _grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs by experiment, each under the shortest label that tells it from the others of its method."""
    together: dict[str, list[Run]] = {}
    found = [(_experiment_key(run, learned=False), run.seed) for run in runs]
    for run, key in zip(runs, found, strict=True):
        # Two of one seed have learned the same from their rows: they differ in what was said.
        alike = key[0] if found.count(key) == 1 else _experiment_key(run)
        together.setdefault(alike, []).append(run)
    lists = [sorted(members, key=lambda run: run.seed) for members in together.values()]
    groups = []
    settings = [flat(members[0].config) for members in lists]
    named = labels(settings)
    compared = [members[0].label or label for members, label in zip(lists, named, strict=True)]
    for place, (members, words) in enumerate(zip(lists, compared, strict=True)):
        first = members[0]
        rivals = [other for other, same in enumerate(compared) if same == words]
        apart = dict(zip(rivals, labels([settings[other] for other in rivals]), strict=True))
        if len(set(apart.values())) > 1:  # of several comparisons
            words = apart[place] if apart[place].split()[0] == words else f"{words}: {apart[place]}"
        if not first.finished:
            words += f" (unfinished, round {first.rounds[-1].get('round')})"
        groups.append(Group(words, members, place))
    return groups


def labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of flat settings: the method of each and what tells it from the others of its method.

    >>> labels([{"algorithm": "fedavg", "rounds": 1}, {"algorithm": "fedavg", "rounds": 2}])
    ['fedavg rounds=1', 'fedavg rounds=2']
    """
    ignored = ("seed", "engine.", "tracking.")
    found = []
    for own in settings:
        rivals = [other for other in settings if other.get("algorithm") == own.get("algorithm")]
        differing = [
            f"{key}={own[key]}"
            for key in own
            if not key.startswith(ignored) and any(own[key] != rival.get(key) for rival in rivals)
        ]
        found.append(" ".join([str(own.get("algorithm", "unknown")), *differing]))
    return found


def _notes(groups: Sequence[Group]) -> list[str]:
    """Warnings about runs that do not compare."""
    notes = []
    runs = [run for group in groups for run in group.runs]
    if len({run.data for run in runs}) > 1:
        notes.append(f"The runs are on different data: {', '.join(sorted({run.data for run in runs}))}.")
    by_seed: dict[int, set[str | None]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, set()).add(run.hash)
    unlike = [str(seed) for seed, hashes in sorted(by_seed.items()) if len(hashes) > 1]
    if unlike:
        notes.append(
            f"Not all runs of seed {', '.join(unlike)} have the same partition: "
            "their clients do not hold the same samples."
        )
    seeds = {tuple(run.seed for run in group.runs) for group in groups}
    if len(seeds) > 1:
        notes.append("Not all methods were run with the same seeds.")
    for group in groups:
        if not group.runs[0].finished:
            why = "".join(f", it failed: {run.failed}" for run in group.runs if run.failed is not None)
            notes.append(f"{group.label}: shown as far as it has come{why}.")
    return notes
