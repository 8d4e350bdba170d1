"""ComFed's mechanism Nova: changes in units of their effective steps, as in FedNova (Wang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sartor.algorithms.comfed.mechanisms import TINY, ComFed, ComFedServer, Mechanism, solve
from sartor.algorithms.comfed.prox import pulled
from sartor.client.local import Client, refuse
from sartor.federation.exchange import Replies, Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class Nova(Mechanism):
    """What Nova can be told."""

    mu: float = setting(0.0, "pull towards the global model", symbol="μ", low=0)


def nova(client: Client, hyper: Nova, w: Tensor, m: Tensor | None = None) -> Reply:
    """Lines 8, 11 and 14: Δ_i with η‖a_i‖₁ and η K_i."""
    direction = pulled(client, hyper.mu, w) if hyper.mu else client.grad
    reply = solve(client, hyper, w, direction, m, hyper.mu, measured=True)
    return Reply(**reply, steps=client.work(hyper.lr))


class ComFedNova(ComFed[Nova]):
    """Nova: each change divided by its effective number of steps ‖a_i‖₁ before averaging (line 19).

    Δ = (Σ p'_i ‖a_i‖₁) Σ p'_i Δ_i / ‖a_i‖₁; with a proximal term ``mu`` the first sum is over the numbers of
    steps. ‖a_i‖₁ is that of the local optimiser in use, with momentum, weight decay and schedules; Adam,
    Adagrad and clipping, which have none, are refused. ``as_printed``: section III-D prints ‖a_i‖₁ = 1/τ_i
    for τ_i plain steps, which multiplies where it should divide.
    """

    client_function = staticmethod(nova)
    folds = ()
    sums_only = False

    def start(self, federation: Federation) -> ComFedServer:
        """The initial model, for a solver that has an a_i."""
        why = "divides by ‖a_i‖₁, which only a change that is a weighted sum of gradients has"
        refuse(federation.local, self.name, why, "optimizer", "clip")
        return super().start(federation)

    def aggregate(
        self, server: ComFedServer, replies: Replies, federation: Federation
    ) -> tuple[Tensor, ComFedServer]:
        """Line 19, in units of η, which cancels."""
        work = replies["work"]
        if self.hyper.as_printed:
            work = 1 / replies["steps"].clamp(min=TINY)
        effective = replies["steps"] if self.hyper.mu and not self.hyper.as_printed else work
        normalised = replies.sum("delta", replies.weights / work.clamp(min=TINY))
        return (replies.weights @ effective) * normalised, server
