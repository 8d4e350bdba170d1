"""FedTGP (Zhang et al. 2024): prototypes that the server trains to keep the classes apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, register
from sartor.algorithms.references.separate import own_model
from sartor.algorithms.split_models.fedproto import FedProtoHyper, by_prototypes, local_training
from sartor.algorithms.split_models.prototypes import no_prototypes
from sartor.federation.exchange import Call
from sartor.federation.federation import Federation
from sartor.model.networks import seeded
from sartor.settings import setting

INITIAL = 1
"""The stream of initial weights that the server's network is drawn from; models have the first."""


@dataclass(frozen=True)
class FedTGPHyper(FedProtoHyper):
    """FedTGP's hyper-parameters."""

    margin: float = setting(100.0, "the largest margin between classes", symbol="τ", low=0)
    server_lr: float = setting(0.1, "learning rate of the prototypes at the server", low=0)
    server_steps: int = setting(100, "steps of the prototypes at the server in a round", symbol="S", low=0)


@dataclass(frozen=True)
class Trained:
    """The prototypes, which classes have one, and the network that makes them: a vector."""

    prototypes: Tensor
    known: Tensor
    network: Tensor


def initial_network(classes: int, features: int, seed: int) -> Tensor:
    """A vector for each class, and two dense layers that make a prototype of it, side by side."""
    layers = seeded(
        lambda: [
            nn.Embedding(classes, features),
            nn.Linear(features, features),
            nn.Linear(features, features),
        ],
        seed,
        INITIAL,
    )
    return torch.cat([value.detach().flatten() for layer in layers for value in layer.parameters()])


def generated(network: Tensor, classes: int, features: int) -> Tensor:
    """The prototypes that the network makes of the classes' vectors."""
    square = features * features
    parts = torch.split(network, [classes * features, square, features, square, features])
    vectors, first, second = (
        parts[0].view(classes, -1),
        parts[1].view(features, -1),
        parts[3].view(features, -1),
    )
    return F.relu(vectors @ first.T + parts[2]) @ second.T + parts[4]


def distances(left: Tensor, right: Tensor) -> Tensor:
    """‖left_i − right_j‖, from the differences themselves."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def separation(means: Tensor, here: Tensor) -> Tensor:
    """The largest of the classes' distances to the nearest other class, by the means over clients; else ∞."""
    centres = (means * here[..., None]).sum(dim=0) / here.sum(dim=0).clamp(min=1)[:, None]
    there = here.sum(dim=0) > 0
    apart = distances(centres, centres)
    pairs = there[:, None] & there & ~torch.eye(len(there), dtype=torch.bool, device=there.device)
    nearest = torch.where(pairs, apart, torch.inf).amin(dim=1)
    largest = torch.where(nearest.isfinite(), nearest, -torch.inf).amax()
    return torch.where(largest.isfinite(), largest, torch.inf)


@register
class FedTGP(Algorithm[FedTGPHyper, Trained]):
    """FedProto whose prototypes the server trains: close to the clients' class means, apart by a margin.

    The margin is the largest distance of a class to its nearest one, bounded by τ. Variant: the server's
    steps are on all class means of the round at once, each counted once; the clients' side is FedProto's.
    Evaluated as FedProto is, by the nearest prototype or by the client's own classifier.
    """

    name = "fedtgp"
    family = "personal"
    paper = "Zhang et al. 2024"
    server_keeps = "prototypes, the network that makes them"
    client_keeps = "its model"
    reduces = "nothing"
    traffic = "classes × features / classes × features"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    refuses = (("mixup", "compares features with those of a sample's class"),)
    buffers = "local"
    own_models = True

    def start(self, federation: Federation) -> Trained:
        """No prototypes yet; every client starts from the initial model of its group."""
        federation.declare(w_i=federation.initial_models())
        none = no_prototypes(federation, self.name)
        classes, features = none.prototypes.shape
        network = initial_network(classes, features, federation.seed).to(none.prototypes)
        return Trained(none.prototypes, none.known, network)

    def round(self, server: Trained, federation: Federation, cohort: np.ndarray) -> Trained:
        """Local training at the cohort, then the server's steps on the class means."""
        sent = {"prototypes": server.prototypes, "known": server.known}
        sums = federation.map(local_training, cohort, sent)["sums"]
        here = (sums[..., -1] > 0).to(sums.dtype)
        means = sums[..., :-1] / sums[..., -1:].clamp(min=1)
        network = self.steps(server.network, means, here)
        known = torch.maximum(server.known, here.amax(dim=0))
        return replace(server, prototypes=generated(network, *means.shape[1:]), known=known, network=network)

    def steps(self, network: Tensor, means: Tensor, here: Tensor) -> Tensor:
        """The server's descent: cross-entropy of −(distance), with the margin added to the own class's."""
        margin = separation(means, here).clamp(max=self.hyper.margin)
        own = torch.eye(means.shape[1], dtype=means.dtype, device=means.device)

        def loss(network: Tensor) -> Tensor:
            made = generated(network, *means.shape[1:])
            apart = distances(means.flatten(0, 1), made).view(*here.shape, -1)
            told = F.log_softmax(-(apart + margin * own), dim=-1)
            return -((told * own).sum(dim=-1) * here).sum() / here.sum()

        for _ in range(self.hyper.server_steps):
            with torch.enable_grad():
                live = network.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(loss(live), live)
            network = network - self.hyper.server_lr * gradient
        return network

    def shared(self, server: Trained) -> None:
        """There is no shared model."""

    def personalize(self, server: Trained, cohort: np.ndarray) -> Call:
        """The client's own model, predicting as the setting says."""
        if self.hyper.predict == "classifier":
            return Call(own_model)
        return Call(by_prototypes, {"prototypes": server.prototypes, "known": server.known})
