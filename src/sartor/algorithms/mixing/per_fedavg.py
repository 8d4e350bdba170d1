"""Per-FedAvg (Fallah et al. 2020): a global model that is good after one step at each client."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import TRAINS_FOR_EVALUATION, Algorithm, Hyper, Server, register
from sartor.algorithms.server.weights import weights_of
from sartor.client.local import Client, require_plain_sgd
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting

TINY = 1e-30
"""Stands for the norm of a gradient of zero, whose Hessian-vector product is zero anyway."""

Memory = tuple[Tensor, Tensor, Tensor]
"""Between the turns of a step: which turn it is, the adapted model, and u."""


@dataclass(frozen=True)
class PerFedAvgHyper(Hyper):
    """Per-FedAvg's hyper-parameters."""

    lr: float = setting(0.1, "rate of the steps on the meta-objective", symbol="β", low=0)
    alpha: float = setting(0.01, "rate of the step that makes a model personal", symbol="α", low=0)
    variant: str = setting(
        "exact",
        "the Hessian in the meta-gradient: left out (fo), by differences (hf), or exact",
        choices=("fo", "hf", "exact"),
    )
    delta: float | None = setting(
        None, "length of the difference in hf; not set: as suits the model's float type", symbol="δ", above=0
    )
    eval_steps: int = setting(1, "steps that make a model personal for its use", low=1)
    weighted: bool = setting(False, "weigh clients by their samples; else all alike")


def local_training(client: Client, hyper: PerFedAvgHyper, w: Tensor) -> Reply:
    """K_i steps on F_i(w) = f_i(w − α ∇f_i(w)), each on independent batches D, D' and D''.

    The batches come one after the other from one stream, so a step takes three turns (two without Hessian):
    a gradient at w on D gives the adapted model w̃, a gradient there on D' is u, and D'' gives H u. Everybody
    takes as many steps as under FedAvg, small clients too.
    """
    phases = 2 if hyper.variant == "fo" else 3

    def with_product(point: Tensor, batch: Batch, u: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient at a point, and the Hessian there times u."""
        if hyper.variant == "hf":
            # δ is a length, not a factor of u: a small u would drown in rounding. What it leaves out grows
            # with δ² and rounding with ε/δ: the cube root of ε balances them.
            length = torch.finfo(w.dtype).eps ** (1 / 3) if hyper.delta is None else hyper.delta
            step = length / u.norm().clamp(min=TINY)
            there = client.grad(point + step * u, batch)
            back = client.grad(point - step * u, batch, track=False)
            return (there + back) / 2, (there - back) / (2 * step)

        def along(w: Tensor) -> tuple[Tensor, Tensor]:
            g = client.grad(w, batch, track=False)
            return g @ u, g

        product, g = torch.func.grad(along, has_aux=True)(point)  # H u is the gradient of ⟨∇f_i, u⟩
        return (g if client.buffers is None else client.grad(point, batch)), product

    def direction(w_i: Tensor, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        turn, point, u = memory
        inner, outer, last = (turn % phases == phase for phase in (0, 1, phases - 1))
        before = client.buffers
        if hyper.variant == "fo":
            g = step = client.grad(torch.where(inner, w_i, point), batch)
        else:
            # Only the last turn wants a product; for u = 0 there is the gradient alone.
            g, product = with_product(torch.where(outer, point, w_i), batch, torch.where(last, u, 0.0))
            u = torch.where(outer, g, u)
            step = u - hyper.alpha * product
        if before is not None and client.buffers is not None:
            client.buffers = torch.where(outer, client.buffers, before)  # the statistics at w̃ on D'
        adapted = torch.sub(w_i, g, alpha=hyper.alpha)
        return torch.where(last, step, 0.0), (turn + 1, torch.where(inner, adapted, point), u)

    memory = (torch.zeros_like(client.n), w, torch.zeros_like(w))
    y, _ = client.descend_with(w, direction, memory, lr=hyper.lr, times=phases)
    return Reply(delta=y - w)


@personal
def adapted_model(client: Client, hyper: PerFedAvgHyper, w: Tensor) -> Reply:
    """v = w − α ∇f_i(w) on all training data, once or several times."""
    v = w
    for _ in range(hyper.eval_steps):
        v = v - hyper.alpha * client.full_gradient(v)
    return Reply(w=v)


@register
class PerFedAvg(Algorithm[PerFedAvgHyper, Server]):
    """FedAvg on the meta-objective Σ f_i(w − α ∇f_i(w)): a start from which one step makes a model personal.

    All three variants of the paper: ``exact`` (Hessian-vector products), ``hf`` (differences of gradients,
    δ long) and ``fo`` (no Hessian). The batches of a step are different ones as long as a client has so many.
    Clients weigh alike, as in the paper (``weighted``: by samples). Defined for plain SGD. Evaluated: w after
    ``eval_steps`` steps of rate α on all training data of the client (personal), made anew each time, and w
    (shared); a newcomer gets its model in the same way.
    """

    name = "per-fedavg"
    sums_only = True
    family = "personal"
    paper = "Fallah et al. 2020"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    unprotected = (("samples", TRAINS_FOR_EVALUATION),)
    refuses = (
        ("micro", "has a direction made of several batches"),
        ("schedule_over", "needs several batches for a step"),
    )

    def start(self, federation: Federation) -> Server:
        """The initial model."""
        require_plain_sgd(federation.local, self.name, weight_decay=False)
        return Server(federation.initial())

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Steps on the meta-objective at the cohort, then the mean of the changes."""
        replies = federation.map(local_training, cohort, {"w": server.w})
        return replace(server, w=server.w + replies.sum("delta", weights_of(replies, self.hyper.weighted)))

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The global model after a step at the client."""
        return Call(adapted_model, shared={"w": server.w})
