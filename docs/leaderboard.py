"""The leaderboard's page from stored runs: a table to sort and a critical-difference diagram for each column.

    sartor reproduce sartor/leaderboard --scale paper --device cuda
    python docs/leaderboard.py reproductions/sartor-leaderboard-paper

The second command stores the numbers of the runs in ``results/leaderboard.jsonl`` and writes the page. Runs
of the small setting, or with settings of one's own, are no results and are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from sartor.runs.experiment import to_mapping
from sartor.runs.record import RunFolder
from sartor.studies.comparison import FILE as COMPARISON
from sartor.studies.entries import entry
from sartor.studies.reproduction import FILE as REPRODUCTION
from sartor.studies.results import Results

ENTRY = "sartor/leaderboard"
FILE = Path(__file__).parent.parent / "results" / "leaderboard.jsonl"
COMMAND = f"sartor reproduce {ENTRY} --scale paper --device cuda"
REFERENCES = ("central", "separate", "fedavg", "fedupdate")
LEFT, WIDTH, STEP, TOP, BAR = 100, 640, 18, 34, 9


def collect(folder: Path, file: Path = FILE, scale: str = "paper") -> Results:
    """Store what a reproduction's runs gave: a line for each column and method."""
    made = _read(folder / REPRODUCTION)
    if made["name"] != ENTRY or made["scale"] != scale or made["settings"]:
        raise SystemExit(f"{folder}: no result; make it with: {COMMAND}")
    places: dict[str, str] = {}
    for number in made["numbers"]:
        places[number["column"]] = number["runs"][0].partition("/")[0]
    about = {
        "command": f"{COMMAND} --seeds {len(made['seeds'])}",
        "seeds": made["seeds"],
        "hardware": made["hardware"],
        "rankings": Results(file).about.get("rankings", {}),  # of columns that were stored before
        "failed": sorted({failure["label"] for failure in made["failed"]}),
    }
    kept = Results(file, about)
    for column, place in places.items():
        compared = _read(folder / place / COMPARISON)
        kept.about["rankings"][column] = compared["ranking"]
        for method in compared["methods"]:
            run = RunFolder.open(folder / place / method["runs"][0]["folder"])
            kept.add(
                f"{column}/{method['label']}",
                {
                    "accuracy": method["cells"][method["main"]],
                    "worst": method["worst_decile"]["mean"],
                    "bytes": method["bytes"]["mean"],
                    "seconds": method["seconds"]["mean"],
                    "lr": method["hyper"].get("lr"),
                    "personal": method["main"].startswith("personal"),
                },
                method=method["algorithm"],
                experiment=to_mapping(run.experiment),
            )
    return kept


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise SystemExit(f"{file}: no such file; make it with: {COMMAND}")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def board(page_of: Callable[[str], str], file: Path = FILE) -> str:
    """All columns of the page; where nothing has been measured, that it has not."""
    if not file.is_file():
        return f"Nothing has been measured yet: `{COMMAND}`, then `python docs/leaderboard.py FOLDER`."
    kept = Results(file)
    parts = []
    for column, ranking in kept.about["rankings"].items():
        parts += [f"## {column}", ""]
        if ranking is not None:
            parts += [diagram(column, ranking), ""]
        parts += [*_table(kept, column, ranking, page_of), ""]
        measured = {key.rpartition("/")[2] for key in kept.numbers if _of(key, column)}
        missing = [name for name in entry(ENTRY).scales["paper"].methods if name not in measured]
        if missing:
            parts += [f"Not measured here: {', '.join(missing)}.", ""]
    days = sorted({record.date for record in kept.records.values()})
    seeds = ", ".join(map(str, kept.about["seeds"]))
    parts.append(
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {', '.join(kept.about['hardware'])}, "
        f"seeds {seeds}: `{kept.about['command']}`."
    )
    if kept.about["failed"]:
        parts.append(f"Failed, all or some runs: {', '.join(kept.about['failed'])}.")
    return "\n".join(parts)


def _table(
    kept: Results, column: str, ranking: dict[str, Any] | None, page_of: Callable[[str], str]
) -> list[str]:
    """A row for each method, the best first."""
    heads = ("method", "accuracy (%)", "worst tenth (%)", "rank", "models", "rate", "seconds", "megabytes")
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    ranks = {} if ranking is None else dict(zip(ranking["methods"], ranking["ranks"], strict=True))
    rows = {key.rpartition("/")[2]: numbers for key, numbers in kept.numbers.items() if _of(key, column)}
    for name, found in sorted(rows.items(), key=lambda each: -each[1]["accuracy"]["mean"]):
        accuracy = found["accuracy"]
        spread = "" if accuracy["deviation"] is None else f" ± {100 * accuracy['deviation']:.1f}"
        link = f"[{name}](methods/{page_of(name)})"
        cells = (
            f"*{link}*" if name in REFERENCES else link,
            f"{100 * accuracy['mean']:.1f}{spread}",
            f"{100 * found['worst']:.1f}",
            f"{ranks[name]:.1f}" if name in ranks else "–",
            "personal" if found["personal"] else "shared",
            f"{found['lr']:g}",
            f"{found['seconds']:.1f}",
            f"{found['bytes'] / 1e6:,.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _of(key: str, column: str) -> bool:
    return key.rpartition("/")[0] == column


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
