"""Who took part in a round: how a record writes it down, and how it is read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def written(clients: np.ndarray) -> str:
    """Client numbers as ranges: a round of everyone takes a few letters, whoever many they are.

    >>> written(np.array([7, 0, 1, 2, 4]))
    '0-2,4,7'
    >>> written(np.array([], dtype=np.int64))
    ''
    """
    numbers = np.unique(clients)
    pieces = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(numbers) else []
    ends = [(int(piece[0]), int(piece[-1])) for piece in pieces]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def took_part(row: Mapping[str, Any]) -> list[int] | None:
    """The numbers of the clients whose answers a round used; None where its row does not say.

    >>> took_part({"took_part": "0-2,4,7"})
    [0, 1, 2, 4, 7]
    >>> took_part({"arrivals": [[3, 0.0, 1.0, 1, 0], [1, 0.0, 1.5, 1, 0], [3, 1.0, 2.0, 1, 0]]})
    [1, 3]
    """
    if "took_part" in row:
        ends = [piece.split("-") for piece in row["took_part"].split(",") if piece]
        return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]
    if "arrivals" in row:
        return sorted({int(entry[0]) for entry in row["arrivals"]})
    return None


def by_round(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Round -> the numbers of the clients that took part in it."""
    found = {int(row["round"]): took_part(row) for row in rows}
    return {round: clients for round, clients in found.items() if clients is not None}
