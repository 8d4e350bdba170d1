"""kNN-Per (Marfoq et al. 2022): FedAvg's model, and beside it what a client remembers of its own samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import SEES_SAMPLES, Server, register
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.algorithms.split_models.prototypes import feature_size, one_hot
from sartor.client.local import Client
from sartor.errors import SartorError
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting

GRID = 11
"""Weights that a client tries where it finds its own: 0, 0.1, …, 1."""

QUESTIONS = 500
"""Samples by which it finds it, at most: each is compared with all that are remembered."""


@dataclass(frozen=True)
class KNNPerHyper(FedAvgHyper):
    """kNN-Per's hyper-parameters."""

    neighbours: int = setting(10, "nearest samples that are asked", symbol="k", low=1)
    scale: float = setting(1.0, "length scale of the kernel, in units of the feature's size", above=0)
    weight: float | None = setting(
        None, "weight of the neighbours; none: each client finds its own", symbol="λ_i", low=0, high=1
    )
    capacity: int = setting(0, "samples that a client remembers; 0: all of them", low=0)


class Memory:
    """Features, classes and the model's own answers for a client's training samples."""

    def __init__(self, client: Client, hyper: KNNPerHyper, w: Tensor, blank: Tensor) -> None:
        task, buffers, classes = client.task, client.buffers, client.task.classes or 0
        self.hyper = hyper

        def row(batch: Batch) -> Tensor:
            z = task.features(w, batch.x, buffers).flatten(1)
            p = task.outputs(w, batch.x, buffers).softmax(dim=1)
            return torch.cat([z, one_hot(batch, classes, z.dtype), p], dim=1)

        like = torch.cat([blank, w.new_zeros(2 * classes)])
        rows, self.real = client.gather(row, like, most=hyper.capacity, stream="memory")
        self.z, self.classes, self.p = torch.split(rows, [len(blank), classes, classes], dim=1)

    def votes(self, z: Tensor, apart: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Shares of the classes among the k nearest of samples with features z, and who has any neighbour.

        A neighbour counts exp(−‖z − z_s‖² / (scale · size)); all as near as the k-th are among them.
        ``apart`` marks pairs that are not to be neighbours.
        """
        squares = (z * z).sum(dim=1, keepdim=True) + (self.z * self.z).sum(dim=1) - 2 * z @ self.z.T
        allowed = self.real if apart is None else self.real & ~apart
        squares = torch.where(allowed, squares.clamp(min=0), torch.inf)
        count = min(self.hyper.neighbours, squares.shape[1])
        farthest = squares.topk(count, dim=1, largest=False).values[:, -1:]
        near = (squares <= farthest) & (squares < torch.inf)
        scores = torch.where(near, -squares / (self.hyper.scale * z.shape[1]), -torch.inf)
        some = near.any(dim=1)
        weights = torch.where(some[:, None], scores, 0.0).softmax(dim=1)
        return weights @ self.classes, some

    def mixed(self, p: Tensor, votes: Tensor, some: Tensor, weight: Tensor) -> Tensor:
        """log((1 − λ) p + λ votes), the model alone for whom nobody is near."""
        both = torch.where(some[:, None], (1 - weight) * p + weight * votes, p)
        return both.clamp(min=torch.finfo(p.dtype).tiny).log()

    def weight(self) -> Tensor:
        """λ_i: as it is set, or that under which the remembered samples are likeliest, each left out once."""
        grid = torch.linspace(0, 1, GRID, dtype=self.p.dtype, device=self.p.device)
        if self.hyper.weight is not None:
            return torch.full_like(grid[0], self.hyper.weight)
        asked = min(len(self.z), QUESTIONS)
        own = torch.eye(asked, len(self.z), dtype=torch.bool, device=self.z.device)
        votes, some = self.votes(self.z[:asked], own)
        p, classes = self.p[:asked], self.classes[:asked]
        logs = [(self.mixed(p, votes, some, weight) * classes).sum() for weight in grid]
        return grid.index_select(0, torch.stack(logs).argmax()[None])[0]


@personal
def remembering(client: Client, hyper: KNNPerHyper, w: Tensor, blank: Tensor) -> Reply:
    """Predict by the model and by the nearest of the client's training samples."""
    task, buffers = client.task, client.buffers
    memory = Memory(client, hyper, w, blank)
    weight = memory.weight()

    def predict(x: Tensor) -> Tensor:
        p = task.outputs(w, x, buffers).softmax(dim=1)
        return memory.mixed(p, *memory.votes(task.features(w, x, buffers).flatten(1)), weight)

    return Reply(w=predict, weight=weight)


@dataclass(frozen=True)
class KNNPerServer(Server):
    """The global model; ``blank`` has the size of its features."""

    blank: Tensor


@register
class KNNPer(FedAvg[KNNPerHyper]):
    """FedAvg, whose clients predict by the model and by the nearest of their own samples in its features.

    Variant: the authors' code. A neighbour counts exp(−‖z − z_s‖² / (scale · size of z)), and (1 − λ) p(x) +
    λ votes(x) is the prediction. Each client takes the λ of a grid under which its training samples are
    likeliest when each is predicted by the others; ``weight`` sets one for all. Training is FedAvg's and
    never sees the memory, which is made anew from the current model. Evaluated: that prediction (personal)
    and w (shared). A newcomer remembers its samples like everyone; without any it has w.
    """

    name = "knn-per"
    unprotected = (("samples", SEES_SAMPLES),)
    family = "personal"
    paper = "Marfoq et al. 2022"

    def start(self, federation: Federation) -> KNNPerServer:
        """The initial model; one without a declared head, or data without classes, is refused."""
        if federation.task.classes is None:
            raise SartorError(f"{self.name}: needs data with classes; model {federation.task.name} has none")
        w = federation.initial()
        return KNNPerServer(w, w.new_zeros(feature_size(federation)))

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The model with the client's memory."""
        assert isinstance(server, KNNPerServer)
        return Call(remembering, {"w": server.w, "blank": server.blank})
