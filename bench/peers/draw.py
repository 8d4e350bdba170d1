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
Runs = list[dict[str, Any]]


def summary(runs: Runs) -> dict[str, Any]:
    """The rounds of all turns of one framework at one workload on one device, in one."""
    times = np.concatenate([run["milliseconds"] for run in runs])
    low, middle, high = np.percentile(times, (25, 50, 75))
    return {
        "framework": runs[0]["framework"],
        "milliseconds": middle,
        "quartiles": (low, high),
        "cpu_seconds": float(np.median(np.concatenate([run["cpu_seconds"] for run in runs]))),
        "first": float(np.median([run["first_round_seconds"] for run in runs])),
        "accuracy": float(np.mean([run["accuracy"] for run in runs])),
        "rounds": runs[0]["rounds"],
        "timed": len(times),
    }


def summaries(runs: Runs, workload: str, device: str) -> list[dict[str, Any]]:
    """A row for each framework that ran, the least processor time or the quickest round first."""
    chosen = [run for run in runs if (run["workload"], run["device"]) == (workload, device)]
    done = [[run for run in chosen if run["runner"] == name and "failed" not in run] for name in RUNNERS]
    rows = [summary(some) for some in done if some]
    return sorted(rows, key=lambda row: row[main_figure(device)])


def main_figure(device: str) -> str:
    """What counts: on a shared CPU the processor's time, which others cannot lengthen much."""
    return "milliseconds" if device == "cuda" else "cpu_seconds"


def figures(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: list[dict[str, Any]], device: str) -> str:
    """One workload's rows as Markdown."""
    heads = ["framework", "ms a round", "quartiles", "first round, s", "accuracy"]
    cpu = device == "cpu"
    if cpu:
        heads.insert(1, "CPU ms a round")
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " --- |" * (len(heads) - 1)]
    for row in rows:
        low, high = row["quartiles"]
        cells = [row["framework"], figures(row["milliseconds"]), f"{figures(low)} to {figures(high)}"]
        cells += [figures(row["first"]), f"{100 * row['accuracy']:.1f} %"]
        if cpu:
            cells.insert(1, figures(1e3 * row["cpu_seconds"]))
        lines.append("| " + " | ".join(cells) + " |")
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
    """Bars of a round's time, a panel for each workload: on a GPU, or else the processor's."""
    from pictures import panels, save

    device = "cuda" if any(run["device"] == "cuda" for run in runs) else "cpu"
    rows = {name: summaries(runs, name, device) for name in WORKLOADS}
    known = list(dict.fromkeys(row["framework"] for each in rows.values() for row in each))[::-1]
    figure, axes = panels(1, len(rows), (9, 0.6 + 0.36 * len(known)))
    for each, (workload, found) in zip(axes, rows.items(), strict=True):
        values = [row[main_figure(device)] * (1 if device == "cuda" else 1e3) for row in found]
        places = [known.index(row["framework"]) for row in found]
        colours = ["#4a64d9" if row["framework"].startswith("Sartor") else "#999999" for row in found]
        each.barh(places, values, color=colours, height=0.7)
        for place, value in zip(places, values, strict=True):
            each.text(value, place, f" {figures(value)}", va="center", fontsize=9)
        each.set(xscale="log", title=f"{workload}", yticks=range(len(known)), yticklabels=known)
        each.set_xlabel("ms a round" if device == "cuda" else "ms of one core a round")
        each.margins(x=0.15)
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
