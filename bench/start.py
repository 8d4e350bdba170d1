"""How long a first word takes: importing the library, up to its ``run``, and ``sartor --help``.

    python bench/start.py [--repeats 5] [--json FILE]

Every try is a process of its own; the best counts, in seconds of the clock and of the processor, since a busy
machine lengthens the first. PyTorch alone stands beside them: most of an import is its.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

TRIES = {
    "python": ["-c", ""],
    "import torch": ["-c", "import torch"],
    "import sartor": ["-c", "import sartor"],
    "import sartor; sartor.run": ["-c", "import sartor; sartor.run"],
    "sartor --help": ["-m", "sartor", "--help"],
}
WANTED = {"import sartor": 1.5, "sartor --help": 0.2}
"""Seconds that should not be passed."""


def seconds(words: list[str]) -> tuple[float, float]:
    """Of the clock and of the processor."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, used


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    found = {}
    for name, words in TRIES.items():
        clock, processor = zip(*(seconds(words) for _ in range(arguments.repeats)), strict=True)
        found[name] = {"seconds": min(clock), "cpu_seconds": min(processor)}
        wanted = f"  (wanted: under {WANTED[name]} s)" if name in WANTED else ""
        print(f"{name:28} {min(clock):6.2f} s, {min(processor):5.2f} s of the processor{wanted}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
