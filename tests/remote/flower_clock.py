"""``sartor`` on a machine whose clock is wrong by so many seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from sartor.commands.base import app

    right, wrong = time.time, float(words[0])
    time.time = lambda: right() + wrong
    app(list(words[1:]), prog_name="sartor", standalone_mode=True)
