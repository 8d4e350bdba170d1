"""A node with a valid key that asks for requests as fast as it can, and does nothing with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from flower_hostile import joined

from sartor.remote.flower import Lost


def main(words: Sequence[str]) -> None:
    address, state, key = words[0], Path(words[1]), Path(words[2])
    while True:
        link = joined(address, state, key)
        try:
            while True:
                link.receive()
        except Lost:
            time.sleep(0.05)
