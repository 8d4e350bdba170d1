"""Times in words, and how long what is left will take."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(0.25), duration(75), duration(600), duration(9000)
    ('250 ms', '75 s', '10 minutes', '2.5 hours')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def left(seconds: float, done: int, total: int) -> float | None:
    """How long the rest of ``total`` takes where ``done`` of it took so long; None before the first.

    >>> left(10.0, 2, 6), left(0.0, 0, 6)
    (20.0, None)
    """
    return seconds / done * max(0, total - done) if done > 0 else None
