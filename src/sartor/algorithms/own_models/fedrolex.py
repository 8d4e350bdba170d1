"""FedRolex (Alam et al. 2022): the slice that weak clients train moves on with every round."""

from __future__ import annotations

from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.own_models.heterofl import HeteroFL, HeteroFLHyper
from sartor.algorithms.own_models.slices import positions
from sartor.federation.federation import Federation


@register
class FedRolex(HeteroFL[HeteroFLHyper]):
    """HeteroFL whose narrow models are a window on the units of each layer that moves by one in every round.

    So every number of the full model is trained in turn, also where no client can hold all of them. The
    window begins at unit t mod K of a layer with K units in round t (from 0) and goes on around its end.
    Evaluated: the full model w (shared), and the client's window of the last round on it (personal).
    """

    name = "fedrolex"
    sums_only = True
    paper = "Alam et al. 2022"

    def slices(self, federation: Federation, turn: int) -> tuple[Tensor, ...]:
        """Where each group's numbers lie in this round: those of the window at ``turn``."""
        device = federation.initial().device
        return tuple(positions(task, federation.task, turn).to(device) for task in federation.tasks)
