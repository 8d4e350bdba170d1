"""Milliseconds per round of FedAvg in Sartor and in others: runs every framework's script, keeps its figures.

    PYTHONPATH=bench python -m peers.measure --python pfl=ENV/bin/python --pfllib CHECKOUT

Every framework runs in a process of its own, with the interpreter that is named for it, or else this one. One
after the other has its turn, and then all again (``--repeats``), so that a busy machine slows all of them
alike. What does not run is kept with the last line of its message. ``draw.py`` makes tables of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
RESULT = BENCH.parent / "results" / "peers.json"


@dataclass(frozen=True)
class Runner:
    """A script and how it is asked."""

    module: str
    extra: tuple[str, ...] = ()
    environment: str = ""
    """Which of the interpreters it needs; none: this one."""
    devices: tuple[str, ...] = ("cpu", "cuda")


RUNNERS = {
    "sartor": Runner("by_sartor", ("--engine", "stacked")),
    "jax": Runner("by_jax", ("--over", "vmap"), "jax"),
    "pytorch": Runner("by_pytorch"),
    "pfllib": Runner("by_pfllib", (), "pfllib"),
    "pfl": Runner("by_pfl", (), "pfl"),
    "fedjax": Runner("by_fedjax", (), "fedjax", ("cpu",)),
    "flower": Runner("by_flower", (), "flower", ("cpu",)),
    "jax-map": Runner("by_jax", ("--over", "map"), "jax", ("cpu",)),
    "sartor-loop": Runner("by_sartor", ("--engine", "loop")),
}


def machine(device: str, cores: int) -> str:
    """The hardware that a figure is of."""
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{model}, {cores} core" + ("s" if cores > 1 else "")


def turn(
    runner: Runner, workload: str, asked: argparse.Namespace, cores: list[int], left: float
) -> dict[str, Any]:
    """What one process found, or why it found nothing."""
    interpreter = dict(asked.python).get(runner.environment, sys.executable)
    command = [interpreter, "-m", f"peers.{runner.module}", workload, "--device", asked.device, *runner.extra]
    command += ["--rounds", str(asked.rounds), "--warm-up", str(asked.warm_up)]
    if runner.module == "by_pfllib":
        command += ["--path", str(asked.pfllib)]
    paths = os.pathsep.join((str(BENCH), str(BENCH.parent / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(len(cores))}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=left if left < float("inf") else None,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    except subprocess.TimeoutExpired:
        return {"failed": "no time was left"}
    if done.returncode:
        return {"failed": (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of both, where what was measured anew has taken the place of what it replaces."""

    def place(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["runner"], run["workload"], run["device"]

    tried = {place(run) for run in new}
    done = {place(run) for run in new if "failed" not in run}
    return [run for run in old if place(run) not in (tried if "failed" in run else done)] + new


def pair(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    return name, path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workloads", nargs="*", default=["mlp", "cnn"])
    parser.add_argument("--only", nargs="*", default=list(RUNNERS), choices=RUNNERS)
    parser.add_argument("--python", type=pair, action="append", default=[], metavar="ENVIRONMENT=INTERPRETER")
    parser.add_argument("--pfllib", type=Path, help="a checkout of PFLlib")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every framework")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed in a turn")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them")
    parser.add_argument("--cores", type=int, default=0, help="cores of the machine to use; 0: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="an end to all of it")
    parser.add_argument("--json", type=Path, default=RESULT)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[-asked.cores :]
    old = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json.exists() else []
    begin, hardware, found = time.monotonic(), machine(asked.device, len(cores)), []
    chosen = [name for name in asked.only if asked.device in RUNNERS[name].devices]
    if asked.pfllib is None:
        chosen = [name for name in chosen if name != "pfllib"]
    turns = [(r, w, name) for r in range(asked.repeats) for w in asked.workloads for name in chosen]
    for repeat, workload, name in turns:
        left = asked.seconds - (time.monotonic() - begin)
        if left < 1:
            print(f"{asked.seconds:.0f} s are over before turn {repeat + 1} of {name} on {workload}")
            break
        run = turn(RUNNERS[name], workload, asked, cores, left)
        about = {"runner": name, "workload": workload, "device": asked.device, "hardware": hardware}
        found.append({**about, "date": date.today().isoformat(), **run})
        figure = run.get("failed") or " ".join(f"{value:.4g}" for value in run["milliseconds"])
        print(f"{workload} {name}: {figure}", flush=True)
        asked.json.write_text(json.dumps(merged(old, found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
