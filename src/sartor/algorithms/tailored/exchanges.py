"""What clients do in the three exchanges of A-FSVRG, which MA-FSVRG and GA-FSVRG share.

Equation numbers are those of "Tailored Federated Learning With Adaptive Central Acceleration on Diversified
Global Models". The server's models are the rows of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.algorithms.base import Hyper
from sartor.algorithms.mixing.ifca import losses
from sartor.algorithms.variance_reduction.fsvrg import anchored_descent
from sartor.client.local import Client
from sartor.federation.exchange import Reply, changes
from sartor.model.batch import Batch, Pass


def gradients(client: Client, w: Tensor) -> Tensor:
    """∇f_i of every row of w, in one pass over the samples."""

    def rows(batch: Batch) -> Tensor:
        return torch.stack([client.grad(w_c, batch, track=False) for w_c in w])

    return client.mean(rows, like=w)


def survey(client: Client, hyper: Hyper, w: Tensor) -> Reply:
    """Exchange 1: the full gradient and the loss of every model at this client."""
    if client.task.buffer_size or client.task.draws:  # the model is another one when it is trained
        return Reply(gradient=gradients(client, w), loss=losses(client, w))

    def rows(batch: Batch) -> Tensor:
        return torch.stack([_gradient_and_loss(client, w_c, batch) for w_c in w])

    both = client.mean(rows, like=torch.cat([w, w[:, :1]], dim=1))
    return Reply(gradient=both[:, :-1], loss=both[:, -1])


def _gradient_and_loss(client: Client, w: Tensor, batch: Batch) -> Tensor:
    """Both of one pass, the loss behind the gradient."""

    def objective(w: Tensor) -> tuple[Tensor, Pass]:
        run = client.forward(w, batch)
        return batch.mean(client.task.loss_function(run.outputs, batch.y)), run

    gradient, run = client.differentiate(objective, w)
    loss = batch.mean(client.task.loss_function(run.outputs, batch.y))
    return torch.cat([gradient, loss[None]])


@changes(trained="w")
def trained_model(client: Client, hyper: Hyper, w: Tensor, g: Tensor, scale: Tensor | float = 1.0) -> Reply:
    """Exchange 2: K steps from the chosen model, with its anchor g: w_{i,K}."""
    rate = hyper.lr / client.n.clamp(min=1).to(w.dtype)  # α_i = α_l / n_i
    return Reply(trained=anchored_descent(client, w, g, scale, rate))  # (20)-(24)


@changes(trained="w")
def scaled_model(client: Client, hyper: Hyper, w: Tensor, g: Tensor, s_k: Tensor) -> Reply:
    """The same, with Λ_i."""
    return trained_model(client, hyper, w, g, client.task.by_feature(s_k))  # (21)


def gradients_at(client: Client, hyper: Hyper, w: Tensor) -> Reply:
    """Exchange 3: the full gradient of every model."""
    return Reply(gradient=gradients(client, w))
