"""Central: all training data in one place. The reference that no federation can be expected to beat."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Batches, Client
from sartor.errors import SettingError
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class CentralHyper(Hyper):
    """Central's hyper-parameters."""

    steps: int = setting(
        0, "steps of a round; 0: as many as pass the share of the samples that the cohort's would be", low=0
    )


def training_on_all(client: Client, hyper: CentralHyper, w: Tensor) -> Reply:
    """T steps y ← y − η g(y) on batches of everyone's samples."""
    return Reply(delta=client.descend(w, lr=hyper.lr, steps=hyper.steps, split="union") - w)


@register
class Central(Algorithm[CentralHyper, Server]):
    """One model is trained on the training data of all clients at once, as if they were in one place.

    This is no federated method: it needs what a federation is there to avoid, and cannot be deployed. It
    shows what could be had. A round is as much work as a cohort would do together: of E epochs by a share of
    the clients, that share of E passes over all samples; of K steps by m clients, m K steps. Whose samples
    they are does not depend on the cohort. The optimiser starts afresh in every round. Nobody is late or
    away, transforms find no message, and no traffic is counted. Evaluated: w.
    """

    name = "central"
    family = "global"
    paper = "central training"
    server_keeps = "w, and all data"
    client_keeps = "nothing"
    reduces = "nothing"
    traffic = "0 / 0"
    deployable = False

    def start(self, federation: Federation) -> Server:
        """The initial model; data that is not in one place is refused."""
        federation.union()
        if federation.policy == "local":
            raise SettingError("model.buffers = 'local': central has one model for all; take 'average'")
        return Server(federation.initial())

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Steps on everyone's samples."""
        hyper = replace(self.hyper, steps=self.hyper.steps or self._steps(federation, len(cohort)))
        return replace(
            server, w=server.w + federation.together(training_on_all, {"w": server.w}, hyper)["delta"]
        )

    def _steps(self, federation: Federation, drawn: int) -> int:
        """T: as many steps as give the samples of a round."""
        local = federation.local
        if local.steps:
            return local.steps * drawn
        epochs = local.most_epochs if local.law is None else round(local.law.mean)
        whole = int(Batches("union", local.batch, epochs).count(federation.union()))
        return max(min(1, whole), round(whole * drawn / federation.clients))
