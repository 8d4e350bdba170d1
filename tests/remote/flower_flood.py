"""A node with a valid key that asks for requests as fast as it can, and does nothing with them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from flower_hostile import joined

from sartor.remote.flower_link import Lost


def main(words: Sequence[str]) -> None:
    address, state, key = words[0], Path(words[1]), Path(words[2])
    link = joined(address, state, key)
    while True:
        try:
            link.receive()
        except Lost:
            time.sleep(0.05)
            with contextlib.suppress(Lost):
                link.connect()
