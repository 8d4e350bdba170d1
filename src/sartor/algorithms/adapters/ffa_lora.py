"""FFA-LoRA (Sun et al. 2024): A stays as it was drawn, and B is trained and averaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from sartor.algorithms.base import Algorithm, Server, register
from sartor.algorithms.references.fedavg import FedAvgHyper
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.federation.federation import Federation
from sartor.model.adapters import adapter_parts


def training_without_a(client: Client, hyper: FedAvgHyper, rest: Tensor, fixed: Tensor) -> Reply:
    """K_i steps of all but A, which no momentum and no weight decay moves."""
    part, _ = adapter_parts(client.task)
    others = client.task.rest(part)
    w = part.put(others.put(rest.new_zeros(client.task.size), rest), fixed)
    y = client.descend(w, lr=hyper.lr, only=others.mask(w))  # step 1
    return Reply(delta=others.take(y) - rest)


@register
class FFALoRA(Algorithm[FedAvgHyper, Server]):
    """A of every adapter stays as it was drawn; B is trained and averaged, so products are averaged exactly.

    Variant: what is trained beside the adapters, such as a new head, is averaged with B; the authors freeze
    that too, which is for the model to say. A is sent once, at the start. Evaluated: w (shared). A model
    without adapters is refused.
    """

    name = "ffa-lora"
    paper = "Sun et al. 2024"
    family = "global"
    adapters = True
    sums_only = True
    server_keeps = "w: the initial A, B and what else is trained"
    client_keeps = "the initial A"
    traffic = "|B| / |B|"

    def start(self, federation: Federation) -> Server:
        """The initial adapters; every client has their A."""
        w = federation.initial()
        federation.declare(fixed=adapter_parts(federation.task)[0].take(w))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Training at the cohort, then the weighted mean of the changes of all but A."""
        others = federation.task.rest(adapter_parts(federation.task)[0])
        rest = others.take(server.w)
        replies = federation.map(training_without_a, cohort, {"rest": rest}, fold=["delta"])
        step = self.hyper.server_lr * replies.mean("delta")
        return replace(server, w=others.put(server.w, rest + step))  # step 2
