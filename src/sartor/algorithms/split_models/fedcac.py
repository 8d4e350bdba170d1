"""FedCAC (Wu et al. 2023): critical entries of the model are shared with clients that have the same ones."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Call, NobodyAnswered, Reply, changes, personal
from sartor.federation.federation import Federation
from sartor.model.task import Task
from sartor.settings import setting


@dataclass(frozen=True)
class FedCACHyper(Hyper):
    """FedCAC's hyper-parameters."""

    tau: float = setting(0.5, "share of each tensor's entries that are critical", symbol="τ", low=0, high=1)
    beta: float = setting(100.0, "rounds until nobody shares critical entries any more", symbol="β", above=0)


@dataclass(frozen=True)
class FedCACServer(Server):
    """The global model and, for plots, the last round's overlaps and partners."""

    overlap: Tensor
    partners: Tensor


def critical(task: Task, start: Tensor, end: Tensor, share: float) -> Tensor:
    """Which entries of each tensor are critical: the share with the largest |change| · |value|.

    Exactly so many, the first ones among equals.
    """
    sensitivity = (end - start).abs() * end.abs()  # step 1
    masks = []
    for place in task.places.values():
        values = sensitivity[place]
        order = torch.sort(values, descending=True, stable=True).indices
        chosen = order[: int(share * len(values) + 0.5)]
        masks.append(torch.zeros_like(values).scatter(0, chosen, torch.ones_like(values)))
    return torch.cat(masks) > 0


def partners(masks: Tensor, progress: float) -> tuple[Tensor, Tensor]:
    """Who shares critical entries with whom, and how many of them each pair has in common.

    ``progress`` is t / β. All masks have equally many entries k, so O_ij = 1 − ‖M_i − M_j‖₁ / 2k is the
    common number over k, and the threshold is put on whole numbers, where equal overlaps are equal.
    """
    common = masks.double() @ masks.double().T
    clients = len(masks)
    alone = torch.eye(clients, dtype=torch.bool, device=masks.device)
    if clients == 1 or progress > 1:
        return alone, common
    others = common[~alone]
    threshold = others.max() - (1 - progress) * (others.max() - others.mean())  # step 2
    return alone | (common >= threshold), common  # step 3


@personal
def own_model(client: Client, hyper: FedCACHyper, w: Tensor, own: Tensor, mask: Tensor) -> Reply:
    """The global model with the client's critical entries."""
    return Reply(w=torch.where(mask, own, w))  # step 4


@changes(y="w")
def local_training(client: Client, hyper: FedCACHyper, w: Tensor, own: Tensor, mask: Tensor) -> Reply:
    """K_i steps from the global model with the own critical entries; model and critical entries go back."""
    start = torch.where(mask, own, w)  # step 4
    y = client.descend(start, lr=hyper.lr)
    moved = client.steps() > 0  # a client without samples keeps what it had
    mask = torch.where(moved, critical(client.task, start, y, hyper.tau), mask)
    return Reply(y=y, mask=mask).keep(own=torch.where(moved, y, own), mask=mask)


def receive(client: Client, hyper: FedCACHyper, customised: Tensor) -> Reply:
    """Keep the mean of the partners' models."""
    return Reply().keep(own=customised)


@register
class FedCAC(Algorithm[FedCACHyper, FedCACServer]):
    """Entries that training hardly moves are averaged over all, critical ones over clients that share them.

    Variant: the authors' code with an exact share of critical entries per tensor; t counts rounds from 1, and
    after β rounds nobody shares critical entries. Means are plain, over clients with samples. Partial
    participation is ours: overlaps are among those who answered, and a client keeps its critical entries
    while the others follow the global model. BatchNorm statistics stay with the client. Evaluated: the global
    model after aggregation with the client's critical entries (personal), and the global model (shared). A
    newcomer has no critical entries: its model is the global one. Traffic: w, then the partners' mean, down;
    the model and one byte per entry up.
    """

    name = "fedcac"
    family = "personal"
    paper = "Wu et al. 2023"
    server_keeps = "w"
    client_keeps = "its critical entries"
    traffic = "2 / 1 + a mask, in two exchanges"
    unprotected = (("local", "its clients send which parameters are critical, which are no numbers"),)
    buffers = "local"
    quadratic = True

    def start(self, federation: Federation) -> FedCACServer:
        """The initial model; nothing is critical yet."""
        w = federation.initial()
        federation.declare(own=w, mask=torch.zeros_like(w, dtype=torch.bool))
        return FedCACServer(w, w.new_zeros(()), w.new_zeros(()))

    def round(self, server: FedCACServer, federation: Federation, cohort: np.ndarray) -> FedCACServer:
        """Local training at the cohort, the mean for all, and for each the mean over its partners."""
        replies = federation.map(local_training, cohort, {"w": server.w})
        if not replies.counts.any():
            return server
        # As changes of w, so that with nothing critical the step is FedAvg's to the bit.
        changes = replace(replies, values={"delta": replies["y"] - server.w})
        w = server.w + changes.mean("delta", weights=(replies.n > 0).to(server.w.dtype))  # step 2
        here = np.flatnonzero(replies.counts)
        together, common = partners(replies["mask"][here], federation.round / self.hyper.beta)
        mix = together.to(w.dtype) / together.sum(dim=1, keepdim=True)
        with suppress(NobodyAnswered):  # whoever the means do not reach stays with its own model
            each = {"customised": federation.reducer.sums("y", replies["y"][here], mix)}
            federation.map(receive, replies.clients[here], each=each)
        pairs = max(len(here) * (len(here) - 1), 1)
        size = common.diagonal().mean().clamp(min=1)
        overlap = (common.sum() - common.diagonal().sum()) / pairs / size
        return FedCACServer(w, overlap.to(w.dtype), together.sum(dim=1).to(w.dtype).mean() - 1)

    def personalize(self, server: FedCACServer, cohort: np.ndarray) -> Call:
        """The global model with the client's critical entries."""
        return Call(own_model, {"w": server.w})

    def observe(self, server: FedCACServer) -> dict[str, Any]:
        """The mean overlap of two clients' critical entries, and how many partners a client has."""
        return {"overlap": server.overlap, "partners": server.partners}
