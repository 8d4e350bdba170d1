"""CCVR (Luo et al. 2021): FedAvg whose head is fitted anew to features drawn from the classes' Gaussians."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import ASKS_EVERYONE, SEES_SAMPLES, Server, register
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.algorithms.split_models.prototypes import class_sums, feature_size, one_hot, with_count
from sartor.client.local import Client
from sartor.errors import SartorError
from sartor.federation.exchange import Replies, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting

RESOLUTION = 1e-10
"""Variances below this share of a class's largest are rounding, and count as none."""


@dataclass(frozen=True)
class CCVRHyper(FedAvgHyper):
    """CCVR's hyper-parameters."""

    samples: int = setting(200, "virtual features of each class", symbol="M_c", low=1)
    calibration_steps: int = setting(100, "steps of the head on all virtual features", low=0)
    calibration_lr: float | None = setting(None, "learning rate of these steps; none: that of `lr`", low=0)


@dataclass(frozen=True)
class CCVRServer(Server):
    """The global model that is trained, and the one with the calibrated head."""

    calibrated: Tensor
    blank: Tensor


def class_moments(client: Client, hyper: CCVRHyper, w: Tensor, blank: Tensor) -> Reply:
    """For every class of the client's features: how many, their mean, and their scatter about it."""
    sums = class_sums(client, w, blank, with_count)
    means = sums[:, :-1] / sums[:, -1:].clamp(min=1)

    def scatter(batch: Batch) -> Tensor:
        z = client.task.features(w, batch.x, client.buffers).flatten(1)
        hot = one_hot(batch, len(blank), z.dtype)
        centred = z - means[batch.y]
        return torch.einsum("sc,si,sj->cij", hot, centred, centred)

    like = means[:, :, None] * means[:, None]
    return Reply(count=sums[:, -1], mean=means, scatter=client.sum(scatter, like))


def gaussians(replies: Replies) -> tuple[Tensor, Tensor, Tensor]:
    """How many samples each class has, its mean and its covariance over all clients, in float64."""
    counts, means = replies["count"].double()[:, :, None], replies["mean"].double()
    total = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / total.clamp(min=1)
    apart = means - mean
    between = torch.einsum("kc,kci,kcj->cij", counts[:, :, 0], apart, apart)
    scatter = replies.sum("scatter").double() + between
    return total[:, 0], mean, scatter / (total[:, :, None] - 1).clamp(min=1)


def virtual_features(mean: Tensor, covariance: Tensor, count: int, key: int | Tensor) -> Tensor:
    """``count`` features of each class drawn from its Gaussian, [classes, count, features]."""
    classes, size = mean.shape
    values, vectors = torch.linalg.eigh(covariance)
    values = torch.where(values > RESOLUTION * values.amax(dim=1, keepdim=True), values, 0.0)
    # The symmetric root: what is drawn depends neither on signs of eigenvectors nor on their order.
    root: Tensor = (vectors * values.sqrt()[:, None]) @ vectors.transpose(1, 2)
    draws = random.normal(key, classes * count * size, mean.device).view(classes, count, size)
    return mean[:, None] + draws @ root


@register
class CCVR(FedAvg[CCVRHyper]):
    """FedAvg, and for use a head fitted to features drawn from the classes' means and covariances.

    Before each evaluation all clients that are there send count, mean and covariance of the features of each
    of their classes; the server draws M_c features of each class from its Gaussian and takes full gradient
    steps of the head on them. Training never sees the calibrated head. Variant: the paper's mean and
    covariance over all clients, with means subtracted before products are added; drawn features are used as
    they are. A class that nobody has draws none. Evaluated: the global model with the calibrated head
    (shared).
    """

    name = "ccvr"
    paper = "Luo et al. 2021"
    server_keeps = "w, the calibrated model"
    traffic = "1 / 1 (before an evaluation, by everyone, once more w down and class covariances up)"
    unprotected = (("central", ASKS_EVERYONE), ("samples", SEES_SAMPLES))

    def start(self, federation: Federation) -> CCVRServer:
        """The initial model; one without a declared head, or data without classes, is refused."""
        classes = federation.task.classes
        if classes is None:
            raise SartorError(f"{self.name}: needs data with classes; model {federation.task.name} has none")
        w = federation.initial()
        return CCVRServer(w, w, w.new_zeros(classes, feature_size(federation) + 1))

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """FedAvg's; its model is calibrated when it is evaluated."""
        moved = super().round(server, federation, cohort)
        assert isinstance(moved, CCVRServer)
        return replace(moved, calibrated=moved.w)

    def ready(self, server: Server, federation: Federation) -> Server:
        """Ask everyone for the Gaussians of the classes, and fit the head to what they draw."""
        assert isinstance(server, CCVRServer)
        sent = {"w": server.w, "blank": server.blank}
        replies = federation.map(class_moments, np.arange(federation.clients), sent, fold=["scatter"])
        counts, mean, covariance = gaussians(replies)
        held = counts > 0
        if not held.any():
            return server
        key = random.fold(federation.stream("virtual"), federation.round)
        drawn = virtual_features(mean, covariance, self.hyper.samples, key)[held].to(server.w.dtype)
        labels = torch.nonzero(held).repeat_interleave(self.hyper.samples, dim=0)[:, 0]
        return replace(server, calibrated=self.fitted(server.w, federation, drawn.flatten(0, 1), labels))

    def fitted(self, w: Tensor, federation: Federation, z: Tensor, labels: Tensor) -> Tensor:
        """The model whose head has taken its steps on these features."""
        task, hyper = federation.task, self.hyper
        head, statistics = task.part("head"), federation.mean_buffers
        rate = hyper.lr if hyper.calibration_lr is None else hyper.calibration_lr
        x, h = federation.blank_sample(), head.take(w)

        def drawn(features: Tensor) -> Tensor:
            return z.view(len(z), *features.shape[1:])

        for _ in range(hyper.calibration_steps):
            with torch.enable_grad():
                live = h.detach().requires_grad_()
                outputs = task.outputs(head.put(w, live), x, statistics, change=drawn)
                (gradient,) = torch.autograd.grad(task.loss_function(outputs, labels).mean(), live)
            h = h - rate * gradient
        return head.put(w, h)

    def shared(self, server: Server) -> Tensor:
        """The model with the calibrated head."""
        assert isinstance(server, CCVRServer)
        return server.calibrated
