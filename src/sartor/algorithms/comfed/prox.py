"""ComFed's mechanism Prox: local steps are pulled to the global model, as in FedProx (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sartor.algorithms.comfed.mechanisms import ComFed, Mechanism, solve
from sartor.client.local import Client, Direction
from sartor.federation.exchange import Reply
from sartor.settings import setting


@dataclass(frozen=True)
class Prox(Mechanism):
    """What Prox can be told."""

    mu: float = setting(0.005, "pull towards the global model", symbol="μ", low=0)


def pulled(client: Client, mu: float, w: Tensor) -> Direction:
    """Line 10: g_i(y) + μ (y − w)."""
    return lambda y, batch: client.grad(y, batch) + mu * (y - w)


def prox(client: Client, hyper: Prox, w: Tensor, m: Tensor | None = None) -> Reply:
    """Line 10: y ← y − η (g_i(y) + μ (y − w))."""
    return Reply(**solve(client, hyper, w, pulled(client, hyper.mu, w), m, hyper.mu))


class ComFedProx(ComFed[Prox]):
    """Prox: a pull μ (y − w) towards the global model in every local step (line 10), averaged as Sgd."""

    client_function = staticmethod(prox)
