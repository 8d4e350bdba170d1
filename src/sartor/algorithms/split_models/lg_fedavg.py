"""LG-FedAvg (Liang et al. 2020): every client's own body under a shared head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sartor.algorithms.base import TRAINS_FOR_EVALUATION, Server, register
from sartor.algorithms.split_models.fedper import SplitHyper, SplitModel, assemble
from sartor.algorithms.split_models.fedrep import train_outside
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.model.parts import Part
from sartor.model.task import Task
from sartor.settings import setting


@dataclass(frozen=True)
class LGFedAvgHyper(SplitHyper):
    """LG-FedAvg's hyper-parameters."""

    shared: tuple[str, ...] = setting(
        ("head",), "module paths of the layers that are shared; `head` is the declared head"
    )
    refit_epochs: int = setting(
        0, "epochs of fitting the personal layers to the shared ones before a client uses its model", low=0
    )

    def own(self, task: Task) -> tuple[Part, Part]:
        """All but those that are named."""
        return task.outside(self.shared)


@personal
def own_model(client: Client, hyper: LGFedAvgHyper, body: Tensor, own: Tensor) -> Reply:
    """The server's layers with the client's own, refitted to them if that is asked for."""
    y = assemble(client, hyper, body, own)
    epochs = hyper.refit_epochs
    return Reply(w=train_outside(client, y, hyper.shared, lr=hyper.lr, epochs=epochs, stream="refit"))


@register
class LGFedAvg(SplitModel[LGFedAvgHyper]):
    """Body and head are trained together; the server averages the heads, and each client keeps its body.

    Variant: FedPer with the parts exchanged. All start from the initial model; the authors train some rounds
    of FedAvg first. Float buffers of the body stay with it. Evaluated: the head after aggregation with the
    client's body as its last training left it. A newcomer has the initial body; the paper gives it all
    clients' models to vote instead. ``refit_epochs`` lets every client, drawn or not, fit its body to the
    head on its training data before each evaluation; training never sees that.
    """

    name = "lg-fedavg"
    sums_only = True
    family = "personal"
    paper = "Liang et al. 2020"
    server_keeps = "head"
    client_keeps = "body, with float buffers"
    traffic = "|head| / |head|"
    sums_only = True
    unprotected = (("samples", TRAINS_FOR_EVALUATION),)

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The head with the client's own body."""
        return Call(own_model, {"body": server.w})
