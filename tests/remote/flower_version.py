"""``sartor`` as it would be with another version of it installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str]) -> None:
    version, place = words[0], Path(words[1])
    installed = place / f"sartor-{version}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sartor\nVersion: {version}\n")
    sys.path.insert(0, str(place))
    from sartor.commands.base import app

    app(list(words[2:]), prog_name="sartor", standalone_mode=True)
