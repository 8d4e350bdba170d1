"""What methods share that look into the head: it must be one linear layer on the features."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.split_models.prototypes import feature_size
from sartor.errors import SartorError
from sartor.federation.federation import Federation


def linear_head(federation: Federation, method: str) -> tuple[int, int]:
    """Classes and features of a model whose head is one linear layer with biases; others are refused."""
    task = federation.task
    if task.classes is None:
        raise SartorError(f"{method}: needs data with classes; model {task.name} has none")
    size = feature_size(federation)
    if task.part("head").size != task.classes * (size + 1):
        raise SartorError(
            f"{method}: the head {task.head_path!r} of model {task.name} is not one linear layer with biases "
            f"from {size} features to {task.classes} classes; declare the last layer as the head"
        )
    return task.classes, size


def linear_layer(federation: Federation, stream: str, inputs: int, outputs: int) -> Tensor:
    """Weights [outputs, inputs] and biases as one vector, drawn as PyTorch draws a linear layer's."""
    w = federation.initial()
    draws = random.uniform(federation.stream(stream), outputs * (inputs + 1), w.device)
    layer: Tensor = (2 * draws - 1) / inputs**0.5
    return layer.to(w.dtype)


def affine(vector: Tensor, x: Tensor, outputs: int) -> Tensor:
    """A linear layer of weights, then biases, in one vector."""
    weight, bias = vector[:-outputs].view(outputs, -1), vector[-outputs:]
    return x @ weight.T + bias


def normalised(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A LayerNorm over the last axis, with PyTorch's ε."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + 1e-5) * scale + shift
