"""Differences to what a client has been sent before, so that what follows compresses little numbers."""

from __future__ import annotations

from dataclasses import dataclass

from sartor.federation.transforms import Transform, register_transform
from sartor.settings import setting


@register_transform("difference")
@dataclass(frozen=True)
class Difference(Transform):
    """What a client is sent is the difference to what it got the last time, and both ends know the sum.

    It comes first on the way down, before what compresses: the next difference holds what that has left out.
    The server keeps a row for every client. What a client is sent for the first time is told whole.
    """

    place: str = setting("down", "where it is applied", choices=("down",))

    differs = True
    draws = False
