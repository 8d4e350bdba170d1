"""Which measured numbers are older than the method: it has changed since they were taken.

    python measurements/stale.py                 # all files of results/
    python measurements/stale.py results/which-method.jsonl

A change of comments, docstrings or imports is none. The pages say the same (``stale`` parts of
``docs/tables.py``), and the tests fail where they do not: run ``python docs/tables.py``, or measure again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sartor.errors import SartorError
from sartor.studies.results import Results

FOLDER = Path(__file__).parent.parent / "results"


def main() -> None:
    """A line for each file, and one for each method that has changed."""
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.jsonl")):
        results = Results(path)
        found = results.stale()
        print(f"{path.name}: {len(results.records)} numbers, {len(found)} methods have changed since")
        for method, date in found.items():
            print(f"  {method}, measured {date}")


if __name__ == "__main__":
    try:
        main()
    except SartorError as error:
        sys.exit(str(error))
