"""FedIT (Zhang et al. 2024): FedAvg of the low-rank adapters, A and B each on its own."""

from __future__ import annotations

from sartor.algorithms.base import Server, register
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.federation.federation import Federation
from sartor.model.adapters import adapter_parts


@register
class FedIT(FedAvg[FedAvgHyper]):
    """Both matrices of every adapter are trained and averaged, each on its own.

    Variant: it is FedAvg of whatever is trained, a new head included; what is frozen neither moves nor
    travels. The mean of B times the mean of A is not the mean of the products B A, which FFA-LoRA is about.
    Evaluated: w (shared). A model without adapters is refused.
    """

    name = "fedit"
    paper = "Zhang et al. 2024"
    family = "global"
    adapters = True
    server_keeps = "w: A, B and what else is trained"

    def start(self, federation: Federation) -> Server:
        """The initial adapters."""
        adapter_parts(federation.task)
        return super().start(federation)
