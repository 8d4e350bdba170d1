"""Keep what ``sartor reproduce`` has made: its runs as lines of ``results/``, its numbers for its entry.

    sartor reproduce comfed/table4 --scale paper --device cuda --out made
    python measurements/keep.py made             # results/comfed-table4-paper.jsonl

The lines have the scores of every evaluation. What is printed is written into the entry's file below
``src/sartor/studies/papers`` (with ``--out``, which is for looking, it is not), as the numbers that later
runs are compared with, along with those that the file has of other methods and columns by the same seeds; of
settings of one's own nothing is printed, as they make another experiment.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from sartor.errors import SartorError
from sartor.files import write
from sartor.runs.experiment import fingerprint, to_mapping
from sartor.runs.record import RunFolder
from sartor.studies import papers
from sartor.studies.entries import entry
from sartor.studies.reproduction import FILE, as_stated, row_seconds
from sartor.studies.results import Record, Results

RESULTS = Path(__file__).parent.parent / "results"


def kept(folder: Path, made: dict[str, Any], run: str) -> Record:
    """A run as a line."""
    stored = RunFolder.open(folder / run)
    experiment, numbers = stored.experiment, [n for n in made["numbers"] if run in n["runs"]]
    return Record(
        key=run,
        method=experiment.algorithm,
        code=str(stored.environment["method"]),
        fingerprint=fingerprint(experiment),
        sartor=str(stored.environment["sartor"]),
        date=str(stored.environment["started"])[:10],
        numbers={
            "label": numbers[0]["method"],
            "columns": [number["column"] for number in numbers],
            "seed": experiment.seed,
            "device": experiment.engine.device,
            "hyper": to_mapping(experiment)["hyper"],
            "curves": curves(stored, entry(made["name"]).score),
            "seconds": sum(map(row_seconds, stored.rounds)),
        },
    )


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


def measured(made: dict[str, Any], day: str, code: dict[str, str], device: str = "cpu") -> str:
    """The tables of the entry's file with what was measured."""
    stated, seeds = entry(made["name"]), ", ".join(map(str, made["seeds"]))
    columns = [column.label for column in stated.scales[made["scale"]].columns]
    digits = 1 if made["percent"] else 4
    tables: dict[str, dict[str, list[float]]] = {"values": {}, "deviations": {}}
    before = stated.measured.get(made["scale"])
    if before is not None and before.seeds == seeds:  # other methods or columns of the same experiments
        for table, known in (("values", before.band.values), ("deviations", before.band.deviations)):
            for method, row in known.items():
                tables[table][method] = [float("nan") if value is None else value for value in row]
        code = before.code | code
    for number in made["numbers"]:
        place = columns.index(number["column"])
        for table, key in (("values", "mean"), ("deviations", "deviation")):
            if number["ours"][key] is not None:
                row = tables[table].setdefault(number["method"], [float("nan")] * len(columns))
                row[place] = round(number["ours"][key], digits)
    words = ["sartor reproduce", made["name"], "--scale", made["scale"]]
    words += [*([] if device == "cpu" else ["--device", device]), "--seeds", str(len(made["seeds"]))]
    about = {
        "date": day,
        "hardware": ", ".join(made["hardware"]),
        "seeds": seeds,
        "command": " ".join(words),
    }
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
    results.about |= {key: made[key] for key in ("name", "scale", "seeds", "settings", "hardware")}
    runs = dict.fromkeys(run for number in made["numbers"] for run in number["runs"])
    new = {run: kept(arguments.folder, made, run) for run in runs}
    results.records |= new
    if results.records:  # what is computed has no runs
        results.write()
    print(f"{results.path}: {len(results.records)} runs", file=sys.stderr)
    if as_stated(made["settings"]):
        code = {record.numbers["label"]: record.code for record in new.values()}
        written = date.fromtimestamp((arguments.folder / FILE).stat().st_mtime).isoformat()
        last = max((record.date for record in new.values()), default=written)
        device = next((record.numbers["device"] for record in new.values()), "cpu")
        tables = measured(made, last, code, device)
        print(tables)
        if arguments.out is None:
            file = papers.path(made["name"])
            write(file, placed(file.read_text(encoding="utf-8"), made["scale"], tables).encode())


if __name__ == "__main__":
    try:
        main()
    except SartorError as error:
        sys.exit(str(error))
