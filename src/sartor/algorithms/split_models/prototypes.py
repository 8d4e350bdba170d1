"""Prototypes, the mean features of the classes, and counts of classes: what methods share that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sartor import nests
from sartor.client.local import Client
from sartor.errors import SartorError, SettingError
from sartor.federation.exchange import Replies
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.nests import Nest


@dataclass(frozen=True)
class Prototypes:
    """The mean features of every class, and which classes have one."""

    prototypes: Tensor
    known: Tensor


def need_classes(federation: Federation, method: str) -> int:
    """How many classes there are; data without any is refused."""
    classes = federation.task.classes
    if classes is None:
        raise SartorError(f"{method}: needs data with classes; model {federation.task.name} has none")
    return classes


def no_prototypes(federation: Federation, method: str) -> Prototypes:
    """The start; a model without a declared head, or data without classes, is refused."""
    classes = need_classes(federation, method)
    w = federation.initial()
    return Prototypes(w.new_zeros(classes, feature_size(federation)), w.new_zeros(classes))


def feature_size(federation: Federation) -> int:
    """How many numbers the head of the model is given for a sample; as many in every group of clients."""
    x = federation.blank_sample()
    sizes = {width(task, x): task.name for task in federation.tasks}
    if len(sizes) > 1:
        found = ", ".join(f"{name} {size}" for size, name in sizes.items())
        raise SettingError(f"models: prototypes need features of one size at all clients, there are {found}")
    return next(iter(sizes))


def width(task: Task, x: Nest) -> int:
    """How many numbers the head of a model is given for a sample such as ``x``."""
    device = nests.leaves(x)[0].device
    return task.features(task.initial(device), x).flatten(1).shape[1]


def one_hot(batch: Batch, classes: int, dtype: torch.dtype) -> Tensor:
    """A row for every sample with 1 at its class; padding has none."""
    hot: Tensor = (batch.y[:, None] == torch.arange(classes, device=batch.y.device)).to(dtype)
    return hot if batch.weight is None else hot * batch.weight[:, None].to(dtype)


def class_counts(client: Client, classes: int) -> Tensor:
    """n_i^j: how many training samples of each class the client has."""
    dtype = client.task.dtype
    like = client.n.new_zeros(classes, dtype=dtype)
    return client.sum(lambda batch: one_hot(batch, classes, dtype).sum(dim=0), like)


def class_sums(client: Client, w: Tensor, like: Tensor, columns: Callable[[Tensor], Tensor]) -> Tensor:
    """Sums over the training samples of each class of some columns made of their features."""

    def add(batch: Batch) -> Tensor:
        z = client.task.features(w, batch.x, client.buffers).flatten(1)
        return one_hot(batch, len(like), z.dtype).T @ columns(z)

    return client.sum(add, like)


def with_count(z: Tensor) -> Tensor:
    """The features and a 1: summed, they give the class's sum and how many there are."""
    return torch.cat([z, torch.ones_like(z[:, :1])], dim=1)


def distance(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean squared difference between features and their class's prototype; 0 where it has none."""
    return known[y] * ((z.flatten(1) - prototypes[y]) ** 2).mean(dim=1)


def _sums_by_class(replies: Replies) -> Tensor:
    """Σ n_ij C_i^j and Σ n_ij, where the experiment's rule makes each class's mean of those who hold it."""
    sums = replies["sums"]
    counts = sums[..., -1].clamp(min=0)  # an attacker's may be anything
    means = sums[..., :-1] / counts.clamp(min=1)[..., None]
    by_class = [
        replace(replies, values={"sums": means[:, label]}).sum("sums", counts[:, label])
        for label in range(sums.shape[1])
    ]
    return torch.cat([torch.stack(by_class), counts.sum(dim=0)[:, None]], dim=1)


def merged(server: Prototypes, replies: Replies) -> Prototypes:
    """C^j = Σ n_ij C_i^j / Σ n_ij over the clients that hold j; a class nobody holds keeps its prototype."""
    sums = replies.sum("sums") if replies.reducer.rule is None else _sums_by_class(replies)
    counts = sums[:, -1:]  # FedProto's step 3
    means = torch.where(counts > 0, sums[:, :-1] / counts.clamp(min=1), server.prototypes)
    return Prototypes(means, torch.where(counts[:, 0] > 0, 1, server.known))
