"""How much a node may ask of a server: so many requests a second, and so many bytes on their way at a time.

A node is known by its key. What it asks beyond is answered with "later", so that one node, or many processes
that have its key, cannot keep the server from the others or fill its memory with half a request each.
"""

from __future__ import annotations

import time

RATE = 100.0
"""Requests a second; a node at rest asks four times a second, one in a hurry fifty times."""
BURST = 500.0
"""Requests at once, after a while of rest."""
AT_ONCE = 32 << 20
"""Bytes of requests that have begun to arrive; a node uploads two pieces of 5 MB at a time."""


class Limits:
    """What the keys have asked for of late.

    >>> limits = Limits(rate=1.0, burst=2.0, at_once=10)
    >>> [limits.begin(b"north", 4) for _ in range(3)], limits.begin(b"south", 11)
    ([True, True, False], False)
    """

    def __init__(self, rate: float = RATE, burst: float = BURST, at_once: int = AT_ONCE) -> None:
        self._rate, self._burst, self._at_once = rate, burst, at_once
        self._left: dict[bytes, tuple[float, float]] = {}
        """Requests that a key may make at once, and when that was found."""
        self._coming: dict[bytes, int] = {}

    def begin(self, key: bytes, size: int) -> bool:
        """Whether a request of so many bytes may come; :meth:`end` follows one that may."""
        now = time.monotonic()
        left, since = self._left.get(key, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        coming = self._coming.get(key, 0) + size
        allowed = left >= 1 and coming <= self._at_once
        self._left[key] = (left - allowed, now)
        if allowed:
            self._coming[key] = coming
        return allowed

    def end(self, key: bytes, size: int) -> None:
        """A request has come, or will not."""
        self._coming[key] -= size
