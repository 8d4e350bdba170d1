"""Networks of users' own that the benches train beside the library's: plain PyTorch, nothing made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def plain_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and two dense layers."""
    side = shape[1] // 4
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def unpadded_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """PFLlib's network: McMahan's with convolutions that are not padded, 582,026 weights for MNIST."""
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side * side, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a clipped line, as networks of few bits have it."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        passed: Tensor = gradient * (x.abs() < 1)
        return passed


class Signs(nn.Module):
    """A layer of :class:`Sign`, which has no rule for many clients at once: such a model is not stackable."""

    def forward(self, x: Tensor) -> Tensor:
        signs: Tensor = Sign.apply(x)  # type: ignore[no-untyped-call]
        return signs


def cnn_of_signs(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The plain network with signs in place of ReLU behind its first dense layer."""
    layers = list(plain_cnn(shape, classes).children())
    return nn.Sequential(*layers[:-2], Signs(), layers[-1])


class Residual(nn.Module):
    """Two convolutions around which the input goes by itself."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            norm(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            norm(outside),
        )
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.past = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.past(x))


def resnet18(shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """ResNet-18 for small images: 11 million weights."""
    layers: list[nn.Module] = [nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False), norm(64), nn.ReLU()]
    inside = 64
    for outside in (64, 128, 256, 512):
        for place in range(2):
            layers.append(Residual(inside, outside, 2 if place == 0 and outside > 64 else 1, norm))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Block(nn.Module):
    """Attention and a dense part, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.dense(x)
        return result


class ViT(nn.Module):
    """A vision transformer whose tokens are squares of an image."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, width: int = 192, depth: int = 6, patch: int = 4
    ) -> None:
        super().__init__()
        self.cut = nn.Conv2d(shape[0], width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn((shape[1] // patch) * (shape[2] // patch), width))
        self.blocks = nn.Sequential(*(Block(width, 3) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.cut(x).flatten(2).transpose(1, 2) + self.place
        result: Tensor = self.head(self.blocks(tokens).mean(1))
        return result


OWN: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "own cnn": plain_cnn,
    "cnn of signs": cnn_of_signs,
    "unpadded cnn": unpadded_cnn,
    "resnet18-gn": lambda shape, classes: resnet18(shape, classes, lambda width: nn.GroupNorm(32, width)),
    "resnet18-bn": lambda shape, classes: resnet18(shape, classes, nn.BatchNorm2d),
    "vit": ViT,
}
