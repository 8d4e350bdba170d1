"""The leaderboard's page from stored runs: a table to sort and a critical-difference diagram for each column.

    sartor reproduce sartor/leaderboard --scale paper --device cuda
    python docs/leaderboard.py reproductions/sartor-leaderboard-paper

The second command stores the numbers of the runs in ``results/leaderboard.jsonl`` and writes the page. What
other commands gave stays there, so that methods, columns and seeds may be made one after the other: means are
over all seeds at hand, ranks over the clients of the seeds that all methods of a column have. Runs of the
small setting, or with settings of one's own, are no results and are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sartor.runs.experiment import fingerprint
from sartor.runs.record import RunFolder, to_json
from sartor.studies.comparison import FILE as COMPARISON
from sartor.studies.comparison import estimate
from sartor.studies.comparison import ranked as compared
from sartor.studies.entries import entry
from sartor.studies.reproduction import FILE as REPRODUCTION
from sartor.studies.results import Record, Results

ENTRY = "sartor/leaderboard"
FILE = Path(__file__).parent.parent / "results" / "leaderboard.jsonl"
COMMAND = f"sartor reproduce {ENTRY} --scale paper --device cuda"
REFERENCES = ("central", "separate", "fedavg", "fedupdate")
DIGITS = 5
"""Of a client's accuracy: enough to tell two counts of its test samples apart."""
LEFT, WIDTH, STEP, TOP, BAR = 100, 640, 18, 34, 9


Lines = dict[str, dict[int, dict[str, Any]]]
"""The numbers of a column by method and seed."""


def collect(folder: Path, file: Path = FILE, scale: str = "paper") -> Results:
    """Store what a reproduction's runs gave beside what is there: a line for each column, method and seed."""
    made = _read(folder / REPRODUCTION)
    if made["name"] != ENTRY or made["scale"] != scale or made["settings"]:
        raise SystemExit(f"{folder}: no result; make it with: {COMMAND}")
    places: dict[str, str] = {}
    for number in made["numbers"]:
        places[number["column"]] = number["runs"][0].partition("/")[0]
    kept = Results(file)
    kept.about = _about(kept.about, made)
    for column, place in places.items():
        compared = _read(folder / place / COMPARISON)
        for method in compared["methods"]:
            for number in range(len(method["runs"])):
                line = _line(folder / place, column, compared["score"], method, number)
                kept.records[line.key] = line
    kept.write()
    return kept


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise SystemExit(f"{file}: no such file; make it with: {COMMAND}")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _about(before: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """What all lines share: the seeds, machines and failures of every command, as if it had been one."""
    seeds = sorted({*before.get("seeds", ()), *made["seeds"]})
    return {
        "command": f"{COMMAND} --seeds {len(seeds)}",
        "seeds": seeds,
        "hardware": list(dict.fromkeys([*before.get("hardware", ()), *made["hardware"]])),
        "rankings": before.get("rankings", {}),  # of lines that have no clients
        "failed": sorted({*before.get("failed", ()), *(failure["label"] for failure in made["failed"])}),
    }


def _line(place: Path, column: str, score: str, method: dict[str, Any], number: int) -> Record:
    """One of a method's runs as a line."""
    run, main = RunFolder.open(place / method["runs"][number]["folder"]), method["main"]
    return Record(
        key=f"{column}/{method['label']}/{run.experiment.seed}",
        method=method["algorithm"],
        code=str(run.environment["method"]),
        fingerprint=fingerprint(run.experiment),
        sartor=str(run.environment["sartor"]),
        date=str(run.environment["started"])[:10],
        numbers={
            "accuracy": method["cells"][main]["values"][number],
            "worst": method["worst_decile"]["values"][number],
            "bytes": method["bytes"]["values"][number],
            "seconds": method["seconds"]["values"][number],
            "lr": method["hyper"].get("lr"),
            "personal": main.startswith("personal"),
            "seed": run.experiment.seed,
            "clients": _clients(run.clients, f"{main}_{score}"),
        },
    )


def _clients(rows: dict[str, list[Any]], name: str) -> list[float | None]:
    """Each client's score after the last round, in their order; None of those without test data."""
    last = max(rows["round"])
    scores = [score for at, score in zip(rows["round"], rows[name], strict=True) if at == last]
    return [None if score is None else round(score, DIGITS) for score in scores]


def board(page_of: Callable[[str], str], file: Path = FILE) -> str:
    """All columns of the page; where nothing has been measured, that it has not."""
    if not file.is_file():
        return f"Nothing has been measured yet: `{COMMAND}`, then `python docs/leaderboard.py FOLDER`."
    kept, parts = Results(file), []
    columns = _columns(kept)
    for column, lines in columns.items():
        ranking = ranked(lines) or kept.about["rankings"].get(column)
        parts += [f"## {column}", ""]
        if ranking is not None:
            parts += [diagram(column, ranking), ""]
        parts += [*_table(lines, ranking, page_of), ""]
        remarks = _remarks(lines, ranking)
        if remarks:
            parts += [remarks, ""]
    days = sorted({record.date for record in kept.records.values()})
    parts.append(
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {', '.join(kept.about['hardware'])}, "
        f"seeds {_listed(kept.about['seeds'])}: `{kept.about['command']}`."
    )
    failed = [
        name
        for name in kept.about["failed"]
        if any(_seeds({name: lines.get(name, {})}) != _seeds(lines) for lines in columns.values())
    ]
    if failed:
        parts.append(f"Failed, all or some runs: {_listed(failed)}.")
    return "\n".join(parts)


def _columns(kept: Results) -> dict[str, Lines]:
    """The lines by column; columns and methods in the order that the entry has."""
    found: dict[str, Lines] = {}
    for key, numbers in kept.numbers.items():
        column, method, seed = key.rsplit("/", 2)
        found.setdefault(column, {}).setdefault(method, {})[int(seed)] = numbers
    scales = entry(ENTRY).scales
    labels = [column.label for scale in scales.values() for column in scale.columns]
    return {
        label: {name: found[label][name] for name in scales["paper"].methods if name in found[label]}
        for label in labels
        if label in found
    }


def _seeds(lines: Lines) -> list[int]:
    """The seeds that some method has."""
    return sorted({seed for seeds in lines.values() for seed in seeds})


def _listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def ranked(lines: Lines) -> dict[str, Any] | None:
    """The methods of a column ranked as a comparison of them all does, over the seeds that every one has.

    None where there is no such seed of which all have their clients' scores, or a single method.
    """
    scores = [
        {seed: numbers["clients"] for seed, numbers in seeds.items() if "clients" in numbers}
        for seeds in lines.values()
    ]
    shared = [seed for seed in _seeds(lines) if all(seed in each for each in scores)]
    rows = [row for seed in shared for row in zip(*(each[seed] for each in scores), strict=True)]
    blocks = [row for row in rows if None not in row]
    if len(lines) < 2 or not blocks:
        return None
    as_stored = json.loads(to_json(asdict(compared(list(lines), np.array(blocks)))))
    return {**as_stored, "seeds": shared}


def _table(lines: Lines, ranking: dict[str, Any] | None, page_of: Callable[[str], str]) -> list[str]:
    """A row for each method, the best first; with the number of its seeds where not all have as many."""
    heads = ["method", "accuracy (%)", "worst tenth (%)", "rank", "models", "rate", "seconds", "megabytes"]
    counted = len({len(seeds) for seeds in lines.values()}) > 1
    heads += ["seeds"] if counted else []
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    ranks = {} if ranking is None else dict(zip(ranking["methods"], ranking["ranks"], strict=True))
    for name, seeds in sorted(lines.items(), key=lambda each: -_mean(each[1], "accuracy")):
        link, made = f"[{name}](methods/{page_of(name)})", list(seeds.values())
        deviation = estimate(numbers["accuracy"] for numbers in made).deviation
        spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
        cells = [
            f"*{link}*" if name in REFERENCES else link,
            f"{100 * _mean(seeds, 'accuracy'):.1f}{spread}",
            f"{100 * _mean(seeds, 'worst'):.1f}",
            f"{ranks[name]:.1f}" if name in ranks else "–",
            "personal" if made[0]["personal"] else "shared",
            _listed(dict.fromkeys(f"{numbers['lr']:g}" for numbers in made)),
            f"{_mean(seeds, 'seconds'):.1f}",
            f"{_mean(seeds, 'bytes') / 1e6:,.0f}",
        ]
        rows.append("| " + " | ".join([*cells, *([str(len(made))] if counted else [])]) + " |")
    return rows


def _mean(seeds: dict[int, dict[str, Any]], key: str) -> float:
    return fmean(numbers[key] for numbers in seeds.values())


def _remarks(lines: Lines, ranking: dict[str, Any] | None) -> str:
    """In words which methods have other seeds than others, which ranks are of fewer, and what is missing."""
    every, said = _seeds(lines), []
    fewer: dict[str, list[str]] = {}
    for name, seeds in lines.items():
        if sorted(seeds) != every:
            fewer.setdefault(_listed(sorted(seeds)), []).append(name)
    if fewer:
        words = "; ".join(f"{_listed(names)}: {seeds}" for seeds, names in fewer.items())
        said.append(f"Not all methods have all seeds ({_listed(every)}), but {words}.")
    if ranking is None:
        said += ["No seed is there to rank all methods by."] if len(lines) > 1 else []
    elif "seeds" in ranking:
        said += [f"Ranks are over seeds {_listed(ranking['seeds'])}."] if ranking["seeds"] != every else []
    elif fewer or set(lines) != set(ranking["methods"]):
        said.append("Ranks are of an earlier measurement, among the methods that it had.")
    missing = [name for name in entry(ENTRY).scales["paper"].methods if name not in lines]
    if missing:
        said.append(f"Not measured here: {_listed(missing)}.")
    return "\n".join(said)


def diagram(column: str, ranking: dict[str, Any]) -> str:
    """Average ranks as SVG, a bar beside methods that cannot be told apart; in the page's own colours."""
    methods, ranks, cliques = ranking["methods"], ranking["ranks"], ranking["cliques"]
    height, most = TOP + STEP * len(methods) + 8, len(methods)
    right = WIDTH - 20 - BAR * len(cliques)

    def x(rank: float) -> float:
        return LEFT + (right - LEFT) * (rank - 1) / max(1, most - 1)

    def y(place: int) -> float:
        return TOP + STEP * (place + 0.5)

    parts = [f'<text x="{LEFT}" y="14">average rank, 1 is best</text>']
    for tick in range(1, most + 1, max(1, most // 8)):
        parts += [
            f'<line x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{height}" stroke="currentColor" '
            'stroke-opacity="0.15"/>',
            f'<text x="{x(tick):.1f}" y="{TOP - 5}" text-anchor="middle">{tick}</text>',
        ]
    for number, clique in enumerate(cliques, 1):
        (y1, y2), place = (y(methods.index(clique[end])) for end in (0, -1)), right + 10 + BAR * number
        parts.append(
            f'<line x1="{place}" y1="{y1:.1f}" x2="{place}" y2="{y2:.1f}" stroke="currentColor" '
            'stroke-opacity="0.4" stroke-width="4" stroke-linecap="round"/>'
        )
    for place, (name, rank) in enumerate(zip(methods, ranks, strict=True)):
        parts += [
            f'<text x="{LEFT - 6}" y="{y(place) + 4:.1f}" text-anchor="end">{escape(name)}</text>',
            f'<circle cx="{x(rank):.1f}" cy="{y(place):.1f}" r="4" '
            'style="fill: var(--md-typeset-a-color, #4a64d9)"/>',
        ]
    said = "; ".join(f"{name} {rank:.1f}" for name, rank in zip(methods, ranks, strict=True))
    about = (
        f"Average ranks over {ranking['blocks']} clients × seeds. Methods beside one bar are less than "
        f"{ranking['critical_difference']:.2f} apart, which Nemenyi's test at 0.05 cannot tell apart; "
        "clients of one seed learn from each other, so they are not independent."
    )
    return "\n".join(
        [
            "<figure>",
            f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
            'font-size="12" font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">',
            f"<title>Critical differences: {escape(column)}</title>",
            f"<desc>{escape(said)}.</desc>",
            *parts,
            "</svg>",
            f"<figcaption>{about}</figcaption>",
            "</figure>",
        ]
    )


def main() -> None:
    """Store the numbers of a folder and write the page."""
    if len(sys.argv) != 2:
        raise SystemExit("python docs/leaderboard.py FOLDER")
    kept = collect(Path(sys.argv[1]))
    print(f"{FILE}: {len(kept.records)} numbers")
    sys.argv[1:] = []
    import tables

    tables.main()


if __name__ == "__main__":
    main()
