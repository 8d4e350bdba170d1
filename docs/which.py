"""What was measured for "which method for my problem": the tables of that page.

The numbers are those of ``results/which-method.jsonl``, which ``measurements/which_method.py`` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sartor.studies.results import Results

FILE = Path(__file__).parent.parent / "results" / "which-method.jsonl"
REFERENCES = ("central", "separate", "fedavg")
BEST = 5
"""How many methods are named for a problem."""


@cache
def results() -> dict[str, Any]:
    """All that was measured."""
    found = Results(FILE)
    problems: dict[str, Any] = {}
    for key, numbers in found.numbers.items():
        problem, _, method = key.partition("/")
        problems.setdefault(problem, {})[method] = numbers
    return {**found.about, "problems": problems}


def ranked(problem: str) -> list[tuple[str, dict[str, Any]]]:
    """The methods of a problem that ran, the best first; the references are not among them."""
    measured = results()["problems"][problem]
    ran = [(name, found) for name, found in measured.items() if found["failed"] is None]
    chosen = [(name, found) for name, found in ran if name not in REFERENCES]
    return sorted(chosen, key=lambda each: -each[1]["mean"])


def best(problem: str, page_of: Callable[[str], str]) -> str:
    """The best methods of a problem beside the references, in one line each."""
    measured = results()["problems"][problem]
    lines = [
        "| | accuracy (%) | worst tenth (%) | megabytes | models |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [*ranked(problem)[:BEST], *((name, measured[name]) for name in REFERENCES)]
    for place, (name, found) in enumerate(rows):
        shown = f"[{name}]({page_of(name)})" if place < BEST else f"*[{name}]({page_of(name)})*"
        cells = (
            shown,
            percent(found),
            f"{100 * found['worst']:.1f}",
            f"{found['bytes'] / 1e6:.1f}",
            "personal" if found["cell"] == "personal_local" else "shared",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(page_of: Callable[[str], str]) -> str:
    """All that was measured, a row for each method; bold: not clearly worse than the best of the column."""
    problems = results()["problems"]
    names = sorted({name for measured in problems.values() for name in measured})
    lines = [
        "| method | " + " | ".join(f"`{problem}`" for problem in problems) + " |",
        "| --- " * (len(problems) + 1) + "|",
    ]
    for name in names:
        cells = [_cell(problem, name) for problem in problems]
        lines.append(f"| [{name}]({page_of(name)}) | " + " | ".join(cells) + " |")
    about = results()["environment"]
    seeds = ", ".join(map(str, results()["seeds"]))
    lines += [
        "",
        "Mean accuracy of the clients on their own test data in percent, ± standard deviation over seeds "
        f"{seeds}; bold: not clearly worse than the best but for the references; "
        f"`{results()['command']}`, Sartor {about['sartor']}, PyTorch {about['torch']}, "
        f"{about['device_name']}, {about['started'][:10]}.",
    ]
    return "\n".join(lines)


def percent(found: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{100 * found['mean']:.1f} ± {100 * found['deviation']:.1f}"


def _cell(problem: str, name: str) -> str:
    found = results()["problems"][problem].get(name)
    if found is None or found["failed"] is not None:
        return "–"
    _, top = ranked(problem)[0]
    close = found["mean"] >= top["mean"] - max(found["deviation"], top["deviation"])
    return f"**{percent(found)}**" if close and name not in REFERENCES else percent(found)
