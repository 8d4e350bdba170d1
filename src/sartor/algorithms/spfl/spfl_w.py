"""SPFL-W: SPFL that averages the clients' models instead of their updates."""

from __future__ import annotations

from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.server.stages import mixed_by_stage
from sartor.algorithms.spfl.spfl import SPFL
from sartor.model.task import Part


@register
class SPFLW(SPFL):
    """SPFL on models instead of updates: w_{g,i} ← Σ_j ω_ij w_j, stage by stage.

    Everything else is as in SPFL; α has no part in it. Evaluated: w_{g,i}.
    """

    name = "spfl-w"

    def mix(self, start: Tensor, delta: Tensor, weights: dict[str, Tensor], stages: list[Part]) -> Tensor:
        """Averages of the trained models."""
        return mixed_by_stage(start + delta, weights, stages)
