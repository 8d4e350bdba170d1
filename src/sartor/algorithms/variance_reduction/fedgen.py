"""FedGen (Zhu et al. 2021): a generator at the server makes features of all classes for every client."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import ASKS_EVERYONE, SEES_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.split_models.linear_heads import affine, linear_head, linear_layer
from sartor.algorithms.split_models.prototypes import class_counts
from sartor.client.local import Client
from sartor.federation.exchange import NobodyAnswered, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.model.optimizers import Memory, adam
from sartor.settings import setting

log = logging.getLogger(__name__)

ADAM = adam(0.9, 0.999, 1e-8, corrected=True)


@dataclass(frozen=True)
class FedGenHyper(Hyper):
    """FedGen's hyper-parameters."""

    alpha: float = setting(1.0, "weight of the generated features in the loss", symbol="α", low=0)
    virtual: int = setting(32, "features generated for a step, at clients and at the server", low=2)
    noise: int = setting(32, "size of the generator's noise", low=1)
    width: int = setting(256, "units of the generator's hidden layer", low=1)
    generator_lr: float = setting(0.005, "learning rate of the generator, by Adam", low=0)
    generator_steps: int = setting(50, "steps of the generator in a round", low=0)


@dataclass(frozen=True)
class FedGenServer(Server):
    """The model, the generator with its optimiser's memory, and the shares of the classes everywhere."""

    generator: Tensor
    slots: Memory
    shares: Tensor


def counts(client: Client, hyper: FedGenHyper, zero: Tensor) -> Reply:
    """How many samples of each class the client has."""
    return Reply(counts=class_counts(client, len(zero)))


def drawn(key: int | Tensor, hyper: FedGenHyper, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Labels drawn by the shares of the classes, and noise, of one generated batch."""
    places = random.uniform(random.fold(key, 0), hyper.virtual, shares.device).to(shares.dtype)
    labels = (places[:, None] >= shares.cumsum(dim=0)[:-1]).sum(dim=1)
    noise = random.uniform(random.fold(key, 1), hyper.virtual * hyper.noise, shares.device)
    return labels, noise.view(hyper.virtual, hyper.noise).to(shares.dtype)


def generated(generator: Tensor, hyper: FedGenHyper, labels: Tensor, noise: Tensor, classes: int) -> Tensor:
    """Features: a linear layer of noise and class, normalised over the batch, ReLU, and a linear layer."""
    width = hyper.width
    first = width * (hyper.noise + classes + 1)
    scale, shift = generator[first : first + 2 * width].view(2, width)
    last = generator[first + 2 * width :]
    hot = (labels[:, None] == torch.arange(classes, device=labels.device)).to(noise.dtype)
    h = affine(generator[:first], torch.cat([noise, hot], dim=1), width)
    centred = h - h.mean(dim=0)
    h = (centred * torch.rsqrt((centred * centred).mean(dim=0) + 1e-5) * scale + shift).relu()
    return affine(last, h, len(last) // (width + 1))


def local_training(client: Client, hyper: FedGenHyper, w: Tensor, generator: Tensor, shares: Tensor) -> Reply:
    """K_i steps on the batch's loss and α times the head's loss on a generated batch."""
    task, head, classes = client.task, client.task.part("head"), len(shares)
    stream = client.stream("generated")

    def direction(y: Tensor, batch: Batch, turn: Tensor) -> tuple[Tensor, Tensor]:
        labels, noise = drawn(random.fold(stream, turn), hyper, shares)
        z = generated(generator, hyper, labels, noise, classes)

        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(y, batch)
            loss = batch.mean(task.loss_function(run.outputs, batch.y))
            virtual = task.loss_function(affine(head.take(y), z, classes), labels).mean()
            return loss + hyper.alpha * virtual, run

        return client.differentiate(objective, y)[0], turn + 1

    y, _ = client.descend_with(w, direction, torch.zeros_like(client.n), lr=hyper.lr)
    return Reply(delta=y - w)


@register
class FedGen(Algorithm[FedGenHyper, FedGenServer]):
    """FedAvg whose clients also learn from features of all classes that a generator at the server makes.

    The generator learns that the mean of the clients' scores on what it makes for a class is that class; of
    linear heads these are the scores of the mean head. Variant: as PFLlib, without the authors' terms for
    diverse features and for the divergence from predictions. Clients weigh by their samples, not class by
    class. Labels are drawn by the shares of the classes at all clients, which send their counts at the start.
    The head must be one linear layer. Evaluated: w.
    """

    name = "fedgen"
    sums_only = True
    family = "global"
    paper = "Zhu et al. 2021"
    server_keeps = "w, generator, shares of the classes"
    client_keeps = "nothing"
    traffic = "1 + |generator| / 1 (once class counts up, by everyone)"
    unprotected = (("central", ASKS_EVERYONE), ("samples", SEES_SAMPLES))
    refuses = (("micro", "draws a generated batch for every batch"),)

    def start(self, federation: Federation) -> FedGenServer:
        """The initial model, a generator drawn by the seed, and everyone's counts of classes."""
        hyper, w = self.hyper, federation.initial()
        classes, size = linear_head(federation, self.name)
        norm = torch.cat([w.new_ones(hyper.width), w.new_zeros(hyper.width)])
        first = linear_layer(federation, "generator 1", hyper.noise + classes, hyper.width)
        generator = torch.cat([first, norm, linear_layer(federation, "generator 2", hyper.width, size)])
        found, everyone = w.new_ones(classes), np.arange(federation.clients)
        try:
            found = federation.map(counts, everyone, {"zero": w.new_zeros(classes)}).sum("counts")
        except NobodyAnswered:
            log.warning("%s: nobody told its classes at the start: all have the same share", self.name)
        return FedGenServer(w, generator, ADAM.init(generator), found / found.sum().clamp(min=1))

    def round(self, server: FedGenServer, federation: Federation, cohort: np.ndarray) -> FedGenServer:
        """Local training at the cohort, the weighted mean of the changes, then the generator's steps."""
        sent = {"w": server.w, "generator": server.generator, "shares": server.shares}
        replies = federation.map(local_training, cohort, sent, fold=["delta"])
        w = server.w + replies.mean("delta")
        head = federation.task.part("head").take(w)
        generator, slots = server.generator, server.slots
        key = random.fold(federation.stream("generator"), federation.round)
        for turn in range(self.hyper.generator_steps):
            gradient = self.gradient(federation, generator, head, random.fold(key, turn), server.shares)
            step, slots = ADAM.update(gradient, slots, generator)
            generator = generator - self.hyper.generator_lr * step
        return FedGenServer(w, generator, slots, server.shares)

    def gradient(
        self, federation: Federation, generator: Tensor, head: Tensor, key: int | Tensor, shares: Tensor
    ) -> Tensor:
        """Of the head's loss on a generated batch, for the generator."""
        classes = len(shares)
        labels, noise = drawn(key, self.hyper, shares)
        with torch.enable_grad():
            live = generator.detach().requires_grad_()
            scores = affine(head, generated(live, self.hyper, labels, noise, classes), classes)
            loss = federation.task.loss_function(scores, labels).mean()
            return torch.autograd.grad(loss, live)[0]
