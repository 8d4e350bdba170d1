"""FedRolex (Alam et al. 2022): the slice that weak clients train moves on with every round."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.own_models.heterofl import HeteroFL, HeteroFLHyper, Sliced
from sartor.algorithms.own_models.slices import positions
from sartor.federation.federation import Federation


@register
class FedRolex(HeteroFL[HeteroFLHyper]):
    """HeteroFL whose narrow models are a window on the units of each layer that moves by one in every round.

    So every number of the full model is trained in turn, also where no client can hold all of them. The
    window begins at unit t mod K of a layer with K units in round t (from 0) and goes on around its end.
    Evaluated: the full model w, as by the authors; the window of a round is for training alone.
    """

    name = "fedrolex"
    family = "global"
    sums_only = True
    paper = "Alam et al. 2022"

    def slices(self, federation: Federation, turn: int) -> tuple[Tensor, ...]:
        """Where each group's numbers lie in this round: those of the window at ``turn``."""
        device = federation.initial().device
        return tuple(positions(task, federation.task, turn).to(device) for task in federation.tasks)

    def personalize(self, server: Sliced, cohort: np.ndarray) -> None:
        """There are no personal models."""
