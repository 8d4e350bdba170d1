"""Tables and the figure of what ``measure.py`` found.

    PYTHONPATH=bench:measurements python -m peers.draw [--add OTHER.json]   # docs/speed.md, docs/speed.svg

``--add`` first takes over the figures of another file, as they come from another machine.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from peers.measure import RESULT, RUNNERS, merged
from peers.workload import WORKLOADS

PAGE = RESULT.parents[1] / "docs" / "speed.md"
BLOCK = "<!-- {0} -->\n{1}\n<!-- end of {0} -->"
TIME = {"cpu": "ms of one core a round", "cuda": "ms a round"}
Runs = list[dict[str, Any]]


def summary(runs: Runs) -> dict[str, Any]:
    """The rounds of all turns of one framework at one workload on one device, in one.

    On a CPU the processor's time counts, which other work on the machine hardly lengthens, else the clock's.
    """
    cpu = runs[0]["device"] == "cpu"
    times = [1e3 * np.array(run["cpu_seconds"]) if cpu else run["milliseconds"] for run in runs]
    low, middle, high = np.percentile(np.concatenate(times), (25, 50, 75))
    return {
        "framework": runs[0]["framework"],
        "milliseconds": middle,
        "quartiles": (low, high),
        "first": float(np.median([run["first_round_seconds"] for run in runs])),
        "accuracy": float(np.mean([run["accuracy"] for run in runs])),
        "rounds": runs[0]["rounds"],
        "timed": sum(map(len, times)),
    }


def summaries(runs: Runs, workload: str, device: str) -> list[dict[str, Any]]:
    """A row for each framework that ran, the quickest first."""
    chosen = [run for run in runs if (run["workload"], run["device"]) == (workload, device)]
    done = [[run for run in chosen if run["runner"] == name and "failed" not in run] for name in RUNNERS]
    return sorted((summary(some) for some in done if some), key=lambda row: row["milliseconds"])


def figures(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: list[dict[str, Any]], device: str) -> str:
    """One workload's rows as Markdown; the first round's time is the clock's, so it is left out on a CPU."""
    heads = ["framework", TIME[device], "quartiles", "accuracy", "first round, s"]
    shown = heads[: 4 if device == "cpu" else 5]
    lines = ["| " + " | ".join(shown) + " |", "|" + " --- |" * len(shown)]
    for row in rows:
        low, high = row["quartiles"]
        cells = [row["framework"], figures(row["milliseconds"]), f"{figures(low)} to {figures(high)}"]
        cells += [f"{100 * row['accuracy']:.1f} %", figures(row["first"])]
        lines.append("| " + " | ".join(cells[: len(shown)]) + " |")
    return "\n".join(lines)


def caption(runs: Runs, workload: str, device: str, rows: list[dict[str, Any]]) -> str:
    """What a table is of: the workload, the machine, the day, how many rounds."""
    chosen = [run for run in runs if (run["workload"], run["device"]) == (workload, device)]
    hardware, days = sorted({run["hardware"] for run in chosen}), sorted({run["date"] for run in chosen})
    rounds = sorted({row["rounds"] for row in rows})
    timed = sorted({row["timed"] for row in rows})
    return (
        f"{WORKLOADS[workload].words}. {'; '.join(hardware)}, {span(days)}; "
        f"{span(timed)} rounds timed, accuracy after {span(rounds)} rounds."
    )


def span(values: list[Any]) -> str:
    """The first and the last, or the one."""
    return " to ".join(dict.fromkeys((str(values[0]), str(values[-1]))))


def versions(runs: Runs, device: str) -> str:
    """Which versions were measured, a line for each framework."""
    found = {
        run["runner"]: run["versions"] for run in runs if run["device"] == device and "failed" not in run
    }
    lines = ["| script | versions |", "| --- | --- |"]
    for name in RUNNERS:
        if name in found:
            words = ", ".join(f"{package} {number}" for package, number in found[name].items())
            lines.append(f"| `{name}` | {words} |")
    return "\n".join(lines)


def blocks(runs: Runs) -> dict[str, str]:
    """What stands between the marks of the page."""
    made = {}
    for device in ("cuda", "cpu"):
        parts = []
        for workload in WORKLOADS:
            if rows := summaries(runs, workload, device):
                parts += [caption(runs, workload, device, rows), table(rows, device)]
        if parts:
            made[device] = "\n\n".join(["", *parts, versions(runs, device), ""])
    return made


def filled(page: str, made: dict[str, str]) -> str:
    """The page with its blocks made anew."""
    for name, content in made.items():
        marks = re.compile(re.escape(BLOCK).replace(r"\{0\}", name).replace(r"\{1\}", ".*?"), re.DOTALL)
        words = BLOCK.format(name, content).replace("\\", r"\\")
        page, count = marks.subn(words, page)
        assert count == 1, f"the page has no place for {name}"
    return page


def draw(runs: Runs) -> None:
    """Bars of a round's time, a panel for each workload and device that was measured."""
    from pictures import panels, save

    rows = {(w, d): found for d in ("cuda", "cpu") for w in WORKLOADS if (found := summaries(runs, w, d))}
    known = list(dict.fromkeys(row["framework"] for each in rows.values() for row in each))[::-1]
    figure, axes = panels(1, len(rows), (3 + 2.4 * len(rows), 0.8 + 0.33 * len(known)))
    for each, ((workload, device), found) in zip(axes, rows.items(), strict=True):
        values = [row["milliseconds"] for row in found]
        places = [known.index(row["framework"]) for row in found]
        colours = ["#4a64d9" if row["framework"].startswith("Sartor") else "#999999" for row in found]
        each.barh(places, values, color=colours, height=0.7)
        for place, value in zip(places, values, strict=True):
            each.text(value, place, f" {figures(value)}", va="center", fontsize=9)
        hardware = next(run["hardware"] for run in runs if run["device"] == device)
        each.set(xscale="log", yticks=range(len(known)), yticklabels=known, xlabel=TIME[device])
        each.set_title(f"{workload}, {hardware}", fontsize=10)
        each.margins(x=0.25)
    save(figure, "speed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", type=Path, help="take over the figures of this file")
    asked = parser.parse_args()
    runs = json.loads(RESULT.read_text(encoding="utf-8"))
    if asked.add is not None:
        runs = merged(runs, json.loads(asked.add.read_text(encoding="utf-8")))
        RESULT.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks(runs)), encoding="utf-8")
    draw(runs)


if __name__ == "__main__":
    main()
