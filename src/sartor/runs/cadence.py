"""Which rounds are evaluated: as often as is said, or (``auto``) as takes a small share of the time.

Models do not depend on it, but the clock does decide under ``auto`` which rounds have an evaluation. So that
runs have rounds in common whatever they took, the steps between evaluations are :data:`STEPS`, each a
multiple of those before it, and a run never goes back to a smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sartor.engines import sharded as distributed
from sartor.runs.settings import AUTO

SHARE = 0.2
"""``evaluate.every = "auto"`` evaluates as often as takes at most this share of the time."""
FREE = 10.0
"""Seconds of evaluation in all below which ``auto`` is every round."""
STEPS = (1, 5, 10, 50, 100, 500, 1000)
"""Rounds between evaluations under ``auto``."""
MOST_IN_STUDIES = 100
"""Evaluations of a run at most in a comparison or search, under ``auto``."""


def fixed(every: int | str, rounds: int, *, stops: bool = False) -> int:
    """Rounds between evaluations where no clock may decide, as all runs of a study need the same ones.

    A run that ``stops`` by what it measures is evaluated in every round.

    >>> fixed(3, 1000), fixed("auto", 100), fixed("auto", 101), fixed("auto", 2000)
    (3, 1, 5, 50)
    """
    if not isinstance(every, str):
        return every
    if stops:
        return 1
    return next((step for step in STEPS if rounds <= step * MOST_IN_STUDIES), STEPS[-1])


class Cadence:
    """Says of a run's rounds whether they are evaluated, by what earlier ones have taken.

    It follows from the recorded rows alone, so that a resumed run goes on as it began.

    >>> cadence = Cadence("auto", 100)
    >>> cadence.note({"round": 1, "seconds": 1.0, "evaluation_seconds": 11.0, "evaluation": {}})
    >>> [round for round in range(2, 101) if cadence.due(round)][:3], cadence.due(100)
    ([5, 10, 15], True)
    """

    def __init__(self, every: int | str, rounds: int) -> None:
        self._auto, self._rounds = every == AUTO, rounds
        self.every = 1 if isinstance(every, str) else every
        """Rounds between evaluations as it stands; 0: only the last round."""
        self._spent = self._training = self._evaluating = 0.0

    def due(self, round: int) -> bool:
        """Whether a round is evaluated, whoever stops the run."""
        return round == self._rounds or (self.every > 0 and round % self.every == 0)

    def note(self, row: Mapping[str, Any], *, agreed: bool = True) -> None:
        """Take in a round's row; ``agreed``: the processes of a run need not meet, as all read the same."""
        self._training += row.get("seconds", 0.0)
        if not self._auto or "evaluation" not in row:
            return
        taken = row.get("evaluation_seconds", 0.0)
        self._spent, self._evaluating = self._spent + taken, self._evaluating + taken
        share = self._evaluating / max(self._training + self._evaluating, 1e-9)
        much = self._spent > FREE and share > SHARE
        if not agreed:
            much = distributed.first_said("much" if much else None) is not None
        if much and self.every < STEPS[-1]:
            self.every = STEPS[STEPS.index(self.every) + 1]
            self._training = self._evaluating = 0.0
