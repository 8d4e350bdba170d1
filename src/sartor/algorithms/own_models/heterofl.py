"""HeteroFL (Diao et al. 2021): weak clients train a narrow slice of the global model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.own_models.slices import positions, widening
from sartor.client.local import Client
from sartor.errors import SettingError
from sartor.federation.exchange import Call, PerGroup, Replies, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class HeteroFLHyper(Hyper):
    """HeteroFL's hyper-parameters."""

    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)
    scaler: bool = setting(True, "whether units of narrow layers are scaled up by 1 / r in training")


H = TypeVar("H", bound=HeteroFLHyper)


@dataclass(frozen=True)
class Sliced:
    """The full model, and where the numbers of each group's slice lie in it."""

    w: Tensor
    slices: tuple[Tensor, ...]


def local_training(client: Client, hyper: HeteroFLHyper, w: Tensor) -> Reply:
    """K_i steps of the client's slice, its units scaled up; the change Δ_i goes back."""
    scale = widening(client.task, w) if hyper.scaler else None

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch) if scale is None else scale * client.grad(scale * y, batch)

    return Reply(delta=client.descend(w, direction, lr=hyper.lr) - w)


@personal
def own_slice(client: Client, hyper: HeteroFLHyper, w: Tensor) -> Reply:
    """The slice of the global model that a client of this width has, its units as large as in training."""
    scale = widening(client.task, w) if hyper.scaler else None
    return Reply(w=w if scale is None else scale * w)


def mean_of_holders(server: Sliced, replies: Replies) -> Tensor:
    """For every number of the full model, the mean change by n_i over those who have it; else 0."""
    total, lacking = torch.zeros_like(server.w), torch.zeros_like(server.w)
    held = torch.zeros_like(server.w, dtype=torch.bool)
    for group, part in replies.by_group.items():
        index, share = server.slices[group], part.n.sum() / replies.n.sum()
        total = total.index_add(0, index, share * part.mean("delta"))
        lacking = lacking + share * torch.ones_like(total).index_fill(0, index, 0)
        held = held.index_fill(0, index, True)
    # As 1 − those who lack it: exactly 1 where everyone has it.
    return torch.where(held, total / torch.where(held, 1 - lacking, 1), 0)


@register
class HeteroFL(Algorithm[H, Sliced]):
    """Every client trains as many units of each layer as it can; each number is averaged over who has it.

    ``[model]`` is the full model, ``[[models]]`` are narrower ones with the same parameters by name: the
    first units of every layer are theirs, and what is sent, counted and trained is the slice. Variant: the
    mean over the holders of a number is weighted by n_i, where the authors count each once, so that equal
    widths give FedAvg; no logits are masked; slices of models with float buffers are refused (the authors'
    BatchNorm keeps no statistics in training). Evaluated: the full model w (shared), and the client's slice
    of it, its units scaled as in training (personal); behind a normalisation, as the authors have it, the
    scale makes no difference.
    """

    name = "heterofl"
    sums_only = True
    family = "personal"
    paper = "Diao et al. 2021"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "slice / slice"
    own_models = True

    def start(self, federation: Federation) -> Sliced:
        """The initial full model, and what each group has of it."""
        if len(federation.tasks) > 1 and any(task.buffer_size for task in federation.tasks):
            raise SettingError(
                f"{self.name}: slices of models with float buffers (BatchNorm) cannot be averaged; take a "
                "model with GroupNorm or without normalisation"
            )
        return Sliced(federation.initial(), self.slices(federation, 0))

    def slices(self, federation: Federation, turn: int) -> tuple[Tensor, ...]:
        """Where each group's numbers lie in this round: those of the first units."""
        device = federation.initial().device
        return tuple(positions(task, federation.task, 0).to(device) for task in federation.tasks)

    def round(self, server: Sliced, federation: Federation, cohort: np.ndarray) -> Sliced:
        """Local training of slices, then the mean change of every number over those who have it."""
        server = replace(server, slices=self.slices(federation, federation.round - 1))
        sent = PerGroup(server.w[index] for index in server.slices)
        replies = federation.map(local_training, cohort, {"w": sent}, fold=["delta"])
        return replace(server, w=server.w + self.hyper.server_lr * mean_of_holders(server, replies))

    def personalize(self, server: Sliced, cohort: np.ndarray) -> Call | None:
        """The client's slice."""
        return Call(own_slice, {"w": PerGroup(server.w[index] for index in server.slices)})
