"""APFL (Deng et al. 2020): a personal model beside the global one, and how much of each is learnt."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting

Memory = tuple[Tensor, Tensor, Tensor]
"""α_i, whether it has been learnt in this round, and the float buffers of the mixture."""


@dataclass(frozen=True)
class APFLHyper(Hyper):
    """APFL's hyper-parameters."""

    alpha: float = setting(0.5, "share of the personal model, at first", symbol="α", low=0, high=1)
    adaptive: bool = setting(True, "whether each client learns its share")


def mixture(alpha: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """v̄ = α v + (1 − α) w."""
    return alpha * v + (1 - alpha) * w


def local_training(
    client: Client, hyper: APFLHyper, w: Tensor, v_i: Tensor, alpha_i: Tensor, trained: Tensor
) -> Reply:
    """K_i steps of both models on the same batches; α_i learns from the first of them.

    ``v_i`` has the float buffers of the mixture behind it: the two models' statistics are apart.
    """
    size, rate = client.task.size, client.rate(hyper.lr)

    def direction(both: Tensor, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        y, v, (alpha, learnt, statistics) = both[:size], both[size:], memory
        g = client.grad(y, batch)
        buffers = client.buffers
        client.buffers = None if buffers is None else statistics
        g_mixed = client.grad(mixture(alpha, v, y), batch)
        statistics, client.buffers = statistics if client.buffers is None else client.buffers, buffers
        if hyper.adaptive:
            moved = (alpha - rate * (g_mixed @ (v - y))).clamp(0, 1)  # step 3
            after = torch.where(learnt > 0, alpha, moved)
        else:
            after = alpha
        return torch.cat([g, alpha * g_mixed]), (after, torch.ones_like(learnt), statistics)  # steps 1, 2

    start = torch.cat([w, v_i[:size]])
    memory = (alpha_i, torch.zeros_like(trained), v_i[size:])
    both, (alpha, learnt, statistics) = client.descend_with(
        start, direction, memory, lr=hyper.lr, apart=(size, size)
    )
    kept = torch.cat([both[size:], statistics])
    return Reply(delta=both[:size] - w).keep(v_i=kept, alpha_i=alpha, trained=torch.maximum(trained, learnt))


@personal
def personal_model(
    client: Client, hyper: APFLHyper, w: Tensor, v_i: Tensor, alpha_i: Tensor, trained: Tensor
) -> Reply:
    """v̄_i with its buffers; a client that never trained has the global model."""
    size = client.task.size
    if client.buffers is not None:
        client.buffers = torch.where(trained > 0, v_i[size:], client.buffers)
    return Reply(w=torch.where(trained > 0, mixture(alpha_i, v_i[:size], w), w))


@register
class APFL(Algorithm[APFLHyper, Server]):
    """FedAvg, and at every client a personal model, mixed with the global one in a share that is learnt.

    Variant: the paper's algorithm 1, which mixes the models; the authors' code mixes their outputs, and adds
    0.02 α to the gradient of the share. As in that code α_i learns from the first batch of a round. Both
    models take their steps together, from what the step before left, with one rate. Float buffers of the
    mixture are apart from the global ones. Evaluated: α_i v_i + (1 − α_i) w with w after aggregation
    (personal), and w (shared); a newcomer has w.
    """

    name = "apfl"
    sums_only = True
    family = "personal"
    paper = "Deng et al. 2020"
    server_keeps = "w"
    client_keeps = "v_i, with float buffers; its share α_i"
    traffic = "1 / 1"
    refuses = (
        ("micro", "learns its share from a whole batch"),
        ("schedule_over", "learns its share with the rate of the round"),
    )
    gradients_a_step = 2

    def start(self, federation: Federation) -> Server:
        """The initial model, for the server and for every client."""
        w = federation.initial()
        federation.declare(
            v_i=torch.cat([w, federation.initial_buffers()]),
            alpha_i=w.new_full((), self.hyper.alpha),
            trained=w.new_zeros(()),
        )
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Both trainings at the cohort, then the weighted mean of the changes of w."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 4

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The client's mixture, or w where it never trained."""
        return Call(personal_model, {"w": server.w})
