"""pFedHN (Shamsian et al. 2021): a hypernetwork at the server makes every client's model of its embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.references.fedavg import local_training
from sartor.algorithms.server.tables import rows
from sartor.algorithms.server.weights import weights_of
from sartor.client.local import Client
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.settings import setting

Network = dict[str, Tensor]
"""The hypernetwork: ``embeddings``, layers ``weight.0``, ``bias.0``, … and the last, ``weight``, ``bias``."""


@dataclass(frozen=True)
class PFedHNHyper(Hyper):
    """pFedHN's hyper-parameters."""

    server_lr: float = setting(0.01, "learning rate of the hypernetwork", symbol="α", low=0)
    momentum: float = setting(0.9, "momentum of its steps", low=0, below=1)
    decay: float = setting(1e-3, "weight decay of its steps", low=0)
    clip: float = setting(50.0, "the largest norm of its gradient; 0: any", low=0)
    embedding: int = setting(0, "size of a client's embedding; 0: 1 + N / 4", low=0)
    width: int = setting(100, "units of a hidden layer", low=1)
    hidden: int = setting(3, "hidden layers after the first", low=0)
    start: str = setting(
        "model",
        "what it makes at first: the initial model for everyone, or what a drawn last layer gives",
        choices=("model", "drawn"),
    )


@dataclass(frozen=True)
class PFedHNServer:
    """The hypernetwork, and the momentum of its steps."""

    network: Network
    momentum: Network


def models_of(network: Network, embeddings: Tensor) -> Tensor:
    """θ_i = h(v_i; φ): one row per embedding."""
    h, layer = embeddings, 0
    while f"weight.{layer}" in network:
        h = h @ network[f"weight.{layer}"].T + network[f"bias.{layer}"]
        h, layer = h.relu() if f"weight.{layer + 1}" in network else h, layer + 1
    return h @ network["weight"].T + network["bias"]


def gradient_of(network: Network, clients: Tensor, wanted: Tensor) -> Network:
    """(∂θ/∂φ)ᵀ ``wanted``, added up over the rows of the clients."""
    with torch.enable_grad():
        live = {name: value.detach().requires_grad_() for name, value in network.items()}
        theta = models_of(live, live["embeddings"][clients])
        gradients = torch.autograd.grad(theta, list(live.values()), grad_outputs=wanted)
    return dict(zip(live, gradients, strict=True))


@personal
def made_model(client: Client, hyper: PFedHNHyper, w: Tensor) -> Reply:
    """The model that the hypernetwork makes for the client."""
    return Reply(w=w)


@register
class PFedHN(Algorithm[PFedHNHyper, PFedHNServer]):
    """The server learns a network that makes a whole model for each client from what it knows of it.

    φ ← φ − α (∂θ_i/∂φ)ᵀ (θ_i − θ̃_i), where θ̃_i is what the client makes of θ_i by its local steps; the
    embedding v_i is part of φ. Variant: the paper has one client in a round; with several their gradients
    are averaged, all alike. One linear layer makes all of the model, which is the authors' layer for each
    tensor. It starts at the initial model for everyone (``start``: the authors draw it). BatchNorm
    statistics stay with the client. Evaluated: θ_i after the server's step; a newcomer has what the mean
    embedding gives.
    """

    name = "pfedhn"
    family = "personal"
    paper = "Shamsian et al. 2021"
    server_keeps = "hypernetwork, an embedding of every client"
    client_keeps = "nothing"
    reduces = "rows"
    traffic = "1 / 1"
    buffers = "local"

    def start(self, federation: Federation) -> PFedHNServer:
        """Embeddings and layers drawn by the seed, as PyTorch draws them."""
        hyper, w = self.hyper, federation.initial()
        size = hyper.embedding or 1 + federation.clients // 4
        key = federation.stream("hypernetwork")

        def layer(place: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
            draws = random.uniform(random.fold(key, place), outputs * (inputs + 1), w.device)
            drawn = ((2 * draws - 1) / inputs**0.5).to(w.dtype)
            return drawn[:-outputs].view(outputs, inputs), drawn[-outputs:]

        draws = random.normal(random.fold(key, -1), federation.clients * size, w.device)
        network = {"embeddings": draws.view(federation.clients, size).to(w.dtype)}
        for place in range(hyper.hidden + 1):
            inputs = hyper.width if place else size
            network[f"weight.{place}"], network[f"bias.{place}"] = layer(place, inputs, hyper.width)
        if hyper.start == "model":  # the last layer is most of it, and is not drawn for nothing
            weight, bias = w.new_zeros(len(w), hyper.width), w
        else:
            weight, bias = layer(hyper.hidden + 1, hyper.width, len(w))
        network |= {"weight": weight, "bias": bias}
        return PFedHNServer(network, {name: torch.zeros_like(value) for name, value in network.items()})

    def round(self, server: PFedHNServer, federation: Federation, cohort: np.ndarray) -> PFedHNServer:
        """Make models for the cohort, have them trained, and take a step of the hypernetwork."""
        network, hyper = server.network, self.hyper
        theta = models_of(network, rows(network["embeddings"], cohort))
        replies = federation.map(local_training, cohort, each={"w": theta})
        if not replies.counts.any():
            return server
        share = weights_of(replies, False, replies.trusted("delta"))[:, None]
        gradient = gradient_of(network, replies.index, -share * replies["delta"])
        if hyper.clip:
            norm = torch.stack([value.norm() for value in gradient.values()]).norm()
            factor = (hyper.clip / (norm + 1e-6)).clamp(max=1)
            gradient = {name: factor * value for name, value in gradient.items()}
        momentum = {
            name: hyper.momentum * server.momentum[name] + value + hyper.decay * network[name]
            for name, value in gradient.items()
        }
        moved = {name: value - hyper.server_lr * momentum[name] for name, value in network.items()}
        return replace(server, network=moved, momentum=momentum)

    def shared(self, server: PFedHNServer) -> None:
        """There is no shared model."""

    def personalize(self, server: PFedHNServer, cohort: np.ndarray) -> Call:
        """What the hypernetwork makes for these clients."""
        return Call(
            made_model, each={"w": models_of(server.network, rows(server.network["embeddings"], cohort))}
        )

    def welcome(self, server: PFedHNServer, federation: Federation) -> PFedHNServer:
        """Newcomers have the mean embedding."""
        mean = server.network["embeddings"].mean(dim=0)
        network = {**server.network, "embeddings": mean.expand(federation.clients, -1).clone()}
        return replace(server, network=network)
