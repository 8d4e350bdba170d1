"""FedSA-LoRA (Guo et al. 2025): A is shared, and every client has its own B."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sartor.algorithms.base import Server, register
from sartor.algorithms.split_models.fedper import SplitHyper, SplitModel, assemble
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.model.adapters import adapter_parts
from sartor.model.parts import Part
from sartor.model.task import Task


@dataclass(frozen=True)
class FedSALoRAHyper(SplitHyper):
    """FedSA-LoRA's hyper-parameters."""

    def own(self, task: Task) -> tuple[Part, Part]:
        """All that is trained but A; float buffers are as for other methods."""
        shared, _ = adapter_parts(task)
        return task.rest(shared), Part("nothing", ())


@personal
def own_adapter(client: Client, hyper: FedSALoRAHyper, body: Tensor, own: Tensor) -> Reply:
    """The server's A with the client's own B."""
    return Reply(w=assemble(client, hyper, body, own))


@register
class FedSALoRA(SplitModel[FedSALoRAHyper]):
    """Both matrices are trained; the server averages A, and each client keeps its B.

    Variant: what is trained beside the adapters, such as a new head, stays with the client as B does.
    Evaluated: the aggregated A with the client's B as its last training left it. A newcomer has the initial
    B, which is zero: the model as it was before. A model without adapters is refused.
    """

    name = "fedsa-lora"
    paper = "Guo et al. 2025"
    family = "personal"
    adapters = True
    sums_only = True
    server_keeps = "A"
    client_keeps = "B, and what else is trained"
    traffic = "|A| / |A|"

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The shared A with the client's own B."""
        return Call(own_adapter, {"body": server.w})
