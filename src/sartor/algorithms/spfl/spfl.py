"""SPFL: every client gets a model of its own, made of everyone's updates weighted by gradient similarity.

The similarity of two clients is the cosine of their updates from a common model (3), stage by stage of the
network, through a softmax (6): SNGS, softmax-normalised gradient similarity. Equation numbers are those of
"Personalized Heterogeneous FL with Gradient Similarity". Updates are written Δ_i = w_i − w, the paper's
gradients are −Δ_i.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.server.similarity import mean_model
from sartor.algorithms.server.stages import cosines_by_stage, mixed_by_stage, stages_of
from sartor.algorithms.server.tables import rows
from sartor.client.local import Client
from sartor.client.settings import Local
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.federation.reduction import Reducer
from sartor.model.parts import Part
from sartor.settings import setting


@dataclass(frozen=True)
class SimilarHyper(Hyper):
    """What SPFL on updates and on models have in common."""

    refresh: int = setting(10, "rounds between refreshes of the similarities", symbol="Γ", low=1)
    local_updates: int = setting(2, "steps on every mini-batch", low=1)
    joined_updates: bool = setting(
        False, "these steps as one of their summed rate, another reading of Algorithm 1"
    )
    temperature: float = setting(1.0, "divides cosines before the softmax; large: all clients alike", above=0)
    as_printed: bool = setting(False, "weights |D_j| / |D| times the softmax, which add up to about 1/N")
    finetune_steps: int = setting(0, "steps of fine-tuning before a client uses its model", low=0)
    finetune_lr: float | None = setting(None, "learning rate of fine-tuning; not set: `lr`", low=0)
    finetune_batch: int = setting(0, "samples per step of fine-tuning; 0: as in training", low=0)
    layers: bool = setting(False, "whether stages are the network's layers, not its body and head")


@dataclass(frozen=True)
class SPFLHyper(SimilarHyper):
    """SPFL's hyper-parameters."""

    alpha: float = setting(1.0, "server learning rate", symbol="α", low=0)


@dataclass(frozen=True)
class SPFLServer:
    """The clients' models w_{g,i}, [N, d], and for each stage the cosines of their updates, [N, N]."""

    models: Tensor
    cosines: dict[str, Tensor]


def local_training(client: Client, hyper: SimilarHyper, w: Tensor) -> Reply:
    """An epoch with ``local_updates`` steps on every batch, or one as long; the update Δ_i (2) goes back."""
    if hyper.joined_updates:
        return Reply(delta=client.descend(w, lr=hyper.local_updates * hyper.lr) - w)
    return Reply(delta=client.descend(w, lr=hyper.lr, updates=hyper.local_updates) - w)


@personal
def personal_model(client: Client, hyper: SimilarHyper, w: Tensor) -> Reply:
    """The client's model w_{g,i}, fine-tuned if that is wanted."""
    if not hyper.finetune_steps:
        return Reply(w=w)
    rate = hyper.or_lr(hyper.finetune_lr)
    steps, batch = hyper.finetune_steps, hyper.finetune_batch or None
    return Reply(w=client.descend(w, lr=rate, steps=steps, batch=batch, stream="finetune"))


def sngs(cosine: Tensor, temperature: float = 1.0) -> Tensor:
    """S̄ (6): the softmax of every row, rows sum to one."""
    return (cosine / temperature).softmax(dim=1)


def mixing_weights(cosine: Tensor, n: Tensor, hyper: SimilarHyper) -> Tensor:
    """ω_ij = |D_j| S̄(i,j) / Σ_k |D_k| S̄(i,k), one row for each client i that is given a model.

    ``as_printed``: (|D_j| / |D|) S̄(i,j) as in (7). As S̄ sums to one already, these add up to about 1/N and
    the step shrinks with the number of clients.
    """
    weights = n * sngs(cosine, hyper.temperature)
    return weights / (n.sum() if hyper.as_printed else weights.sum(dim=1, keepdim=True))


H = TypeVar("H", bound=SimilarHyper)
S = TypeVar("S", bound=SPFLServer)


class Similar(Algorithm[H, S]):
    """What SPFL with and without waiting have in common."""

    paper = "SPFL"
    client_keeps = "nothing"
    traffic = "1 / 1"
    buffers = "local"
    quadratic = True

    def gradients(self, local: Local, n: Any) -> Any:
        """Those of every batch's steps."""
        hyper = self.hyper
        return (1 if hyper.joined_updates else hyper.local_updates) * super().gradients(local, n)

    def stages(self, federation: Federation) -> list[Part]:
        """What similarities are taken of, one by one."""
        return stages_of(federation.task, self.hyper.layers)

    def equal_models(self, federation: Federation, w: Tensor) -> SPFLServer:
        """Everyone has the same model; all are alike."""
        clients = federation.clients
        zeros = federation.table(clients, dtype=torch.float64)
        cosines = {stage.name: zeros for stage in self.stages(federation)}
        return SPFLServer(w.expand(clients, -1).clone(), cosines)

    @abstractmethod
    def mix(
        self, start: Tensor, delta: Tensor, weights: dict[str, Tensor], stages: list[Part], reducer: Reducer
    ) -> Tensor:
        """The new models of those who answered, from where they started and their updates."""

    def is_refresh(self, federation: Federation) -> bool:
        """Whether the similarities are made anew in this round."""
        return (federation.round - 1) % self.hyper.refresh == 0

    def starts(self, server: S, federation: Federation) -> Tensor:
        """Where clients train from, [N, d]: their own models, at a refresh the mean of all."""
        if self.is_refresh(federation):
            return mean_model(server.models).expand_as(server.models)
        return server.models

    def shared(self, server: S) -> None:
        """There is no shared model."""

    def personalize(self, server: S, cohort: np.ndarray) -> Call:
        """The client's model, from the server."""
        return Call(personal_model, each={"w": rows(server.models, cohort)})

    def observe(self, server: S) -> dict[str, Any]:
        """The similarities S̄ of every stage, and the mean cosine of the updates of two clients."""
        seen = {}
        for stage, cosine in server.cosines.items():
            seen[f"similarity_{stage}"] = sngs(cosine, self.hyper.temperature)
            pairs = max(1, cosine.numel() - len(cosine))
            seen[f"cosine_{stage}"] = (cosine.sum() - cosine.diagonal().sum()) / pairs
        return seen


class Together(Similar[H, SPFLServer]):
    """SPFL that waits for everyone, on whatever is mixed."""

    family = "personal"
    server_keeps = "w_{g,i} of every client (N × d), a similarity matrix (N × N) per stage"

    def start(self, federation: Federation) -> SPFLServer:
        """Everyone has the initial model; all are alike."""
        return self.equal_models(federation, federation.initial())

    def round(self, server: SPFLServer, federation: Federation, cohort: np.ndarray) -> SPFLServer:
        """Local training from the clients' models, refreshed similarities when it is time, new models."""
        stages, starts = self.stages(federation), self.starts(server, federation)
        replies = federation.map(local_training, cohort, each={"w": starts[federation.tensor(cohort)]})
        clients, delta = replies.index, replies["delta"]
        pairs = (clients[:, None], clients[None, :])
        similar = server.cosines
        if self.is_refresh(federation):
            similar = cosines_by_stage(similar, delta, clients, stages)  # (3)
        weights = {
            name: mixing_weights(cosine[pairs], replies.n.double(), self.hyper)
            for name, cosine in similar.items()
        }
        mixed = self.mix(starts[clients], delta, weights, stages, federation.reducer)
        return replace(server, models=server.models.index_copy(0, clients, mixed), cosines=similar)

    def welcome(self, server: SPFLServer, federation: Federation) -> SPFLServer:
        """A newcomer gets the mean of the models."""
        return self.equal_models(federation, mean_model(server.models))


def moved(
    start: Tensor,
    delta: Tensor,
    weights: dict[str, Tensor],
    stages: list[Part],
    alpha: float,
    reducer: Reducer,
) -> Tensor:
    """w_{g,i} + α Σ_j ω_ij Δ_j, stage by stage (7)."""
    return torch.add(start, mixed_by_stage(delta, weights, stages, reducer), alpha=alpha)


@register
class SPFL(Together[SPFLHyper]):
    """Every client's model moves by everyone's updates, those of similar clients for more.

    w_{g,i} ← w_{g,i} + α Σ_j ω_ij Δ_j, stage by stage (7). Every Γ rounds all clients train from the plain
    mean of their models, and the cosines of those updates are the similarities until the next time.
    α = 1 and ω normalised over the clients that answered: with equal similarities this is FedAvg. The print
    (``as_printed``) has weights N times smaller and α = 0.01. Clients that do not take part keep their models
    and similarities; a pair that never took part in a refresh together has cosine 0. Evaluated: w_{g,i}.
    """

    name = "spfl"

    def mix(
        self, start: Tensor, delta: Tensor, weights: dict[str, Tensor], stages: list[Part], reducer: Reducer
    ) -> Tensor:
        """The models, moved by everyone's updates."""
        return moved(start, delta, weights, stages, self.hyper.alpha, reducer)
