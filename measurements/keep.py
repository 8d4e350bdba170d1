"""Keep what ``sartor reproduce`` has made: its runs as lines of ``results/``, its numbers for its entry.

    sartor reproduce comfed/table4 --scale paper --device cuda --out made
    python measurements/keep.py made             # results/comfed-table4-paper.jsonl

The lines have the scores of every evaluation. What is printed is written into the entry's file below
``src/sartor/studies/papers`` (with ``--out``, which is for looking, it is not), as the numbers that later
runs are compared with: of every method and column the mean over all seeds that the lines have, whichever
commands made them. Numbers of the entry that no lines stand for stay: one of a single seed counts as that
seed's, a mean of several as it is, until there are lines of all these seeds. Where the file of another entry
has a run of the same experiment, by the same code, its line is taken over too: tables and figures share some.
Of settings of one's own nothing is printed, as they make another experiment.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sartor.algorithms.source import method_code
from sartor.errors import SartorError
from sartor.files import write
from sartor.runs.experiment import fingerprint, to_mapping
from sartor.runs.record import RunFolder
from sartor.studies import papers
from sartor.studies.comparison import estimate
from sartor.studies.entries import Entry, entry, seeds_of
from sartor.studies.library import name_of
from sartor.studies.planning import as_stated, planned
from sartor.studies.reproduction import FILE, number_of, row_seconds
from sartor.studies.results import Record, Results

RESULTS = Path(__file__).parent.parent / "results"


def kept(folder: Path, made: dict[str, Any], run: str) -> Record:
    """A run as a line."""
    stored = RunFolder.open(folder / run)
    experiment, numbers = stored.experiment, [n for n in made["numbers"] if run in n["runs"]]
    label, given = numbers[0]["method"], {}
    if as_stated(made["settings"]):  # else they are of another experiment
        values = shown(made, run)
        given = {"values": values.pop(label), **({"same": values} if values else {})}
    return Record(
        key=run,
        method=experiment.algorithm,
        code=str(stored.environment["method"]),
        fingerprint=fingerprint(experiment),
        sartor=str(stored.environment["sartor"]),
        date=str(stored.environment["started"])[:10],
        numbers={
            "label": label,
            "columns": [number["column"] for number in numbers],
            "seed": experiment.seed,
            "device": experiment.engine.device,
            "hyper": to_mapping(experiment)["hyper"],
            "curves": curves(stored, entry(made["name"]).score),
            "seconds": sum(map(row_seconds, stored.rounds)),
            **given,
        },
    )


def shown(made: dict[str, Any], run: str) -> dict[str, dict[str, float | None]]:
    """By method and column what a run gave, as the table has it; some tables have one run in several rows."""
    found: dict[str, dict[str, float | None]] = {}
    for number in made["numbers"]:
        if run in number["runs"]:
            value = number["ours"]["values"][number["runs"].index(run)]
            found.setdefault(number["method"], {})[number["column"]] = value
    return found


def curves(run: RunFolder, score: str) -> dict[str, dict[str, float]]:
    """The score of every cell by round, and what the method recorded of itself as single numbers.

    Six digits of each: with all of them a table of some twenty runs takes more than a megabyte.
    """
    found: dict[str, dict[str, float]] = {}
    for row in run.rounds:
        cells = {cell: values.get(score) for cell, values in row.get("evaluation", {}).items()}
        for name, value in {**cells, **row.get("observed", {})}.items():
            if isinstance(value, (int, float)):
                found.setdefault(name, {})[str(row["round"])] = float(f"{value:.6g}")
    return found


def elsewhere(made: dict[str, Any], device: str, known_cells: Cells) -> dict[str, Record]:
    """Lines for what is not at hand of an entry that files of other entries have, of the same hardware."""
    stated = entry(made["name"])
    work = planned(stated.name, scale=made["scale"], seeds=made["seeds"])
    if work.at.tuning is not None:  # what is run follows from trials
        return {}
    others = [Results(path) for path in sorted(RESULTS.glob(f"*-{made['scale']}.jsonl"))]
    known = {
        (key.rpartition("/")[2], record.code): record
        for other in others
        if _serves(other.about, stated, made["hardware"])
        for key, record in other.records.items()
    }
    found: dict[str, Record] = {}
    for group, seed in product(work.trained, made["seeds"]):
        plan, methods, _ = group.planned(device)
        for method in methods:
            name = name_of(plan.inputs(method, seed))
            record = known.get((name, method_code(method.algorithm)))
            missing = any(seed not in known_cells.get((method.label, at.label), {}) for at in group.columns)
            if record is None or not missing:
                continue
            rounds, of = rounds_of(record, stated.score), 100.0 if made["percent"] else 1.0
            numbers = {column.label: number_of(rounds, column, stated) for column in group.columns}
            values = {label: None if value is None else of * value for label, value in numbers.items()}
            key = f"{group.name}/{name}"
            if key in found:  # one run in several rows
                found[key].numbers.setdefault("same", {})[method.label] = values
                continue
            own = {word: value for word, value in record.numbers.items() if word != "same"}
            about = {"label": method.label, "columns": list(values), "values": values}
            found[key] = replace(record, key=key, numbers={**own, **about})
    return found


def _serves(about: Mapping[str, Any], stated: Entry, hardware: Iterable[str]) -> bool:
    """Whether lines of another file may stand for this entry's runs."""
    if about["name"] == stated.name or not as_stated(about["settings"]):
        return False
    return entry(about["name"]).score == stated.score and set(about["hardware"]) <= set(hardware)


def rounds_of(record: Record, score: str) -> list[dict[str, Any]]:
    """The rows of a run's rounds, as far as its line has them."""
    found: dict[int, dict[str, Any]] = {}
    for name, values in record.numbers["curves"].items():
        for round, value in values.items():
            row = found.setdefault(int(round), {"round": int(round), "evaluation": {}, "observed": {}})
            row["evaluation"][name], row["observed"][name] = {score: value}, value
    return [found[round] for round in sorted(found)]


Cells = dict[tuple[str, str], dict[int, float]]
"""By method and column the number of every seed."""


def at_hand(results: Results, made: dict[str, Any]) -> Cells:
    """What was made, else the newest line of a file has, else was noted in its head."""
    found: Cells = {}
    for label, column, seed, value in results.about.get("before", []):
        found.setdefault((label, column), {})[seed] = value
    for record in _by_date(results):
        for label, values in _rows(record).items():
            for column, value in values.items():
                if value is not None:
                    found.setdefault((label, column), {})[record.numbers["seed"]] = value
    for number in made["numbers"]:  # what is computed has no lines
        for seed, value in zip(made["seeds"], number["ours"]["values"], strict=True):
            if value is not None:
                found.setdefault((number["method"], number["column"]), {})[seed] = value
    return found


def _by_date(results: Results) -> list[Record]:
    return sorted(results.records.values(), key=lambda record: record.date)


def _rows(record: Record) -> dict[str, dict[str, float | None]]:
    """The methods that a line stands for, with its values; none of a line from before there were any."""
    if "values" not in record.numbers:
        return {}
    return {record.numbers["label"]: record.numbers["values"], **record.numbers.get("same", {})}


def note(results: Results, made: dict[str, Any]) -> None:
    """Note in a file's head the entry's numbers of a single seed that are in none of its lines.

    Once they are part of a mean they would be known nowhere else.
    """
    stated, found = entry(made["name"]), at_hand(results, made)
    before = stated.measured.get(made["scale"])
    if before is None:
        return
    columns = [column.label for column in stated.scales[made["scale"]].columns]
    for label, row in before.band.values.items():
        for column, value in zip(columns, row, strict=True):
            seeds = seeds_of(before.seeds, label, column, columns)
            if value is not None and len(seeds) == 1 and seeds[0] not in found.get((label, column), {}):
                results.about.setdefault("before", []).append([label, column, seeds[0], value])


def seeds_text(seeds: Mapping[tuple[str, str], tuple[int, ...]]) -> str:
    """The seeds of all methods and columns in words: first what most columns have, then what others do.

    >>> seeds_text({("ditto", "MNIST"): (0,), ("ditto", "CIFAR-10"): (0, 1), ("spfl", "CIFAR-10"): (0, 1)})
    '0; CIFAR-10: 0, 1'
    """
    columns = dict.fromkeys(column for _, column in seeds)
    usual = {column: _most(own for (_, at), own in seeds.items() if at == column) for column in columns}
    most = _most(usual.values())
    parts = [_listed(most)]
    for own in dict.fromkeys(usual.values()):
        if own != most:
            places = [column for column in usual if usual[column] == own]
            parts += [f"{place}: {_listed(own)}" for place in _in_short(places, usual)]
    unlike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (label, column), own in seeds.items():
        if own != usual[column]:
            unlike.setdefault((column, own), []).append(label)
    parts += [f"{at} ({_listed(labels)}): {_listed(own)}" for (at, own), labels in unlike.items()]
    return "; ".join(parts)


def _most(seeds: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return Counter(seeds).most_common(1)[0][0]


def _listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def _in_short(places: Sequence[str], columns: Iterable[str]) -> Sequence[str]:
    """The words that several columns begin with, where no other column does; else the columns."""
    same = takewhile(lambda words: len(set(words)) == 1, zip(*map(str.split, places), strict=False))
    start = " ".join(words[0] for words in same)
    alike = [column for column in columns if column.startswith(f"{start} ")]
    return [start] if start and len(places) > 1 and alike == list(places) else places


class Cell(NamedTuple):
    """A number of an entry's file, and the seeds that it is of."""

    mean: float
    deviation: float | None
    seeds: tuple[int, ...]


def table_of(made: dict[str, Any], found: Cells) -> dict[tuple[str, str], Cell]:
    """All numbers of an entry: over the seeds at hand, or as its file has them."""
    stated, table = entry(made["name"]), {}
    before, at = stated.measured.get(made["scale"]), stated.scales[made["scale"]]
    columns = [column.label for column in at.columns]
    for place, column in enumerate(columns):
        for label in at.methods:
            values = found.get((label, column), {})
            if before is not None:
                mean, deviation = before.band.at(label, place)
                seeds = seeds_of(before.seeds, label, column, columns)
                if mean is not None and seeds and not set(seeds) <= set(values):
                    table[label, column] = Cell(mean, deviation, seeds)
                    continue
            if values:
                deviation = estimate(values.values()).deviation
                table[label, column] = Cell(fmean(values.values()), deviation, tuple(sorted(values)))
    return table


def code_of(made: dict[str, Any], results: Results) -> dict[str, str]:
    """By method the code that its numbers are of: where several are, one that has changed since.

    Of numbers without lines it is the one that the entry has.
    """
    before = entry(made["name"]).measured.get(made["scale"])
    found = {} if before is None else dict(before.code)
    newest: dict[tuple[str, str, int], Record] = {}
    for record in _by_date(results):
        for label, values in _rows(record).items():
            columns = [column for column, value in values.items() if value is not None]
            newest |= dict.fromkeys(((label, column, record.numbers["seed"]) for column in columns), record)
    noted = {(label, column, seed) for label, column, seed, _ in results.about.get("before", [])}
    codes = {label: [found[label]] for label, *_ in noted - newest.keys() if label in found}
    methods: dict[str, str] = {}
    for (label, *_), record in newest.items():
        methods[label] = record.method
        codes.setdefault(label, []).append(record.code)
    for label, method in methods.items():
        now = method_code(method)
        found[label] = next((code for code in codes[label] if code != now), now)
    return found


def measured(made: dict[str, Any], results: Results, day: str, device: str = "cpu") -> str:
    """The tables of the entry's file with what was measured."""
    numbers, digits = table_of(made, at_hand(results, made)), 1 if made["percent"] else 4
    if not numbers:
        raise SartorError(f"{made['name']}: no run has the number of its column")
    at = entry(made["name"]).scales[made["scale"]]
    labels, columns = list(at.methods), [column.label for column in at.columns]
    tables: dict[str, dict[str, list[float]]] = {"values": {}, "deviations": {}}
    for (label, column), cell in sorted(numbers.items(), key=lambda each: labels.index(each[0][0])):
        for key, value in (("values", cell.mean), ("deviations", cell.deviation)):
            if value is not None:
                row = tables[key].setdefault(label, [float("nan")] * len(columns))
                row[columns.index(column)] = round(value, digits)
    seeds = seeds_text({key: cell.seeds for key, cell in numbers.items()})
    words = ["sartor reproduce", made["name"]]
    words += [] if made["scale"] == "small" else ["--scale", made["scale"]]
    words += [] if device == "cpu" else ["--device", device]
    words += ["--seeds", str(len(seeds.partition(";")[0].split(", ")))]
    about = {
        "date": day,
        "hardware": _listed(results.about["hardware"]),
        "seeds": seeds,
        "command": " ".join(words),
    }
    code = {label: own for label, own in code_of(made, results).items() if label in tables["values"]}
    place = f"measured.{made['scale']}"
    parts: dict[str, Any] = {place: about}
    parts |= {f"{place}.{key}": table for key, table in {**tables, "code": code}.items() if table}
    lines: list[str] = []
    for head, table in parts.items():
        lines += ["", f"[{head}]"] if lines else [f"[{head}]"]
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(lines)


def placed(text: str, scale: str, tables: str) -> str:
    """The text of an entry's file with these tables in place of those it has of what was measured."""
    old = rf"^\[measured\.{scale}(?:\.\w+)?\]\n(?:(?!\[)[^\n]*(?:\n|\Z))*"
    first = re.search(old, text, re.MULTILINE)
    if first is None:
        return f"{text.rstrip()}\n\n{tables}\n"
    rest = re.sub(old, "", text[first.start() :], flags=re.MULTILINE)
    return f"{text[: first.start()]}{tables}\n" + (f"\n{rest}" if rest.strip() else "")


def _key(word: str) -> str:
    return word if re.fullmatch(r"[\w-]+", word) else json.dumps(word)


def _toml(value: str | list[float]) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else json.dumps(value)


def main() -> None:
    """Write the runs of a reproduction and print its numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the reproduction")
    parser.add_argument("--out", type=Path, help="the file; left out: one in results/, and the entry")
    arguments = parser.parse_args()
    if not (arguments.folder / FILE).is_file():
        raise SartorError(f"{arguments.folder}: has no {FILE}; run `sartor reproduce` to its end first")
    made = json.loads((arguments.folder / FILE).read_text(encoding="utf-8"))
    name = f"{made['name'].replace('/', '-')}-{made['scale']}"
    results = Results(arguments.out or RESULTS / f"{name}.jsonl")
    before = results.about
    results.about = before | {key: made[key] for key in ("name", "scale", "settings")}
    results.about["seeds"] = sorted({*before.get("seeds", ()), *made["seeds"]})
    results.about["hardware"] = list(dict.fromkeys([*before.get("hardware", ()), *made["hardware"]]))
    runs = dict.fromkeys(run for number in made["numbers"] for run in number["runs"])
    new = {run: kept(arguments.folder, made, run) for run in runs}
    results.records |= new
    if as_stated(made["settings"]):
        device = next((record.numbers["device"] for record in new.values()), "cpu")
        note(results, made)
        if arguments.out is None:
            results.records |= elsewhere(made, device, at_hand(results, made))
    if results.records:  # what is computed has no runs
        results.write()
    print(f"{results.path}: {len(results.records)} runs", file=sys.stderr)
    if as_stated(made["settings"]):
        written = date.fromtimestamp((arguments.folder / FILE).stat().st_mtime).isoformat()
        last = max((record.date for record in new.values()), default=written)
        tables = measured(made, results, last, device)
        print(tables)
        if arguments.out is None:
            file = papers.path(made["name"])
            write(file, placed(file.read_text(encoding="utf-8"), made["scale"], tables).encode())


if __name__ == "__main__":
    try:
        main()
    except SartorError as error:
        sys.exit(str(error))
