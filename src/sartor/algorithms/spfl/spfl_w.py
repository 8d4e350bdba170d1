"""SPFL-W: SPFL that averages the clients' models instead of their updates."""

from __future__ import annotations

from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.server.stages import mixed_by_stage
from sartor.algorithms.spfl.spfl import SimilarHyper, Together
from sartor.federation.reduction import Reducer
from sartor.model.parts import Part


@register
class SPFLW(Together[SimilarHyper]):
    """SPFL on models instead of updates: w_{g,i} ← Σ_j ω_ij w_j, stage by stage.

    Everything else is as in SPFL; there is no α. Evaluated: w_{g,i}.
    """

    name = "spfl-w"

    def mix(
        self, start: Tensor, delta: Tensor, weights: dict[str, Tensor], stages: list[Part], reducer: Reducer
    ) -> Tensor:
        """Averages of the trained models."""
        return mixed_by_stage(start + delta, weights, stages, reducer)
