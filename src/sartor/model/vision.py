"""Networks for images: residual networks and a small vision transformer, by name.

Normalisation is over groups of channels (GroupNorm) unless BatchNorm is asked for: statistics of a batch say
as much about whose batch it is as about the task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.errors import SettingError
from sartor.model.attention import Block
from sartor.settings import setting

Shape = tuple[int, ...]
GROUPS = 8
"""Groups of channels that GroupNorm normalises."""


@dataclass(frozen=True)
class ResNet8:
    """ResNet-8: a 3×3 convolution, three residual blocks of 16, 32 and 64 channels, average pooling."""

    norm: str = setting("group", "normalisation layers", choices=("group", "batch"))
    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images of this shape."""
        return _ResNet(_channels("resnet8", shape), classes, self.norm, (16, 32, 64), 1)


@dataclass(frozen=True)
class ResNet20:
    """ResNet-20 of He et al. for CIFAR: three stages of three residual blocks, 16, 32 and 64 channels."""

    norm: str = setting("group", "normalisation layers", choices=("group", "batch"))
    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images of this shape."""
        return _ResNet(_channels("resnet20", shape), classes, self.norm, (16, 32, 64), 3)


@dataclass(frozen=True)
class ResNet18:
    """ResNet-18 for small images: a 3×3 convolution, four stages of two blocks, 64 to 512 channels."""

    norm: str = setting("group", "normalisation layers", choices=("group", "batch"))
    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images of this shape."""
        return _ResNet(_channels("resnet18", shape), classes, self.norm, (64, 128, 256, 512), 2)


@dataclass(frozen=True)
class ViT:
    """A small vision transformer: square patches, learnt places, the mean of the last layer's tokens."""

    patch: int = setting(4, "pixels along the side of a patch", low=1)
    width: int = setting(64, "numbers of a token", low=1)
    depth: int = setting(4, "transformer blocks", low=1)
    heads: int = setting(4, "heads of attention", low=1)
    dropout: float = setting(0.0, "share of activations that are dropped", low=0, below=1)
    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images whose sides are whole numbers of patches."""
        _channels("vit", shape)
        if shape[1] % self.patch or shape[2] % self.patch:
            raise SettingError(
                f"model.patch = {self.patch}: images of {shape[1]}×{shape[2]} are not whole patches; take "
                "one that divides both sides"
            )
        return _ViT(shape, classes, self)


def _channels(name: str, shape: Shape) -> int:
    if len(shape) != 3:
        raise SettingError(
            f"model.name = {name!r}: needs images [channels, height, width], the data has {list(shape)}"
        )
    return shape[0]


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels) if kind == "group" else nn.BatchNorm2d(channels)


class _Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut, a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential()
            self.shortcut.add_module("convolution", nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.add_module("norm", _norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.convolution1(x)))
        return F.relu(self.norm2(self.convolution2(y)) + self.shortcut(x))


class _ResNet(nn.Module):
    """Stages of ``depth`` residual blocks; every stage but the first halves the image."""

    def __init__(self, channels: int, classes: int, norm: str, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = _norm(norm, widths[0])
        self.blocks: list[str] = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for place in range(depth):
                self.blocks.append(f"block{len(self.blocks) + 1}")
                stride = 2 if stage and not place else 1
                self.add_module(self.blocks[-1], _Residual(before, width, stride, norm))
                before = width
        self.output = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.convolution(x)))
        for block in self.blocks:
            y = getattr(self, block)(y)
        scores: Tensor = self.output(y.mean(dim=(2, 3)))
        return scores


class _ViT(nn.Module):
    def __init__(self, shape: Shape, classes: int, settings: ViT) -> None:
        super().__init__()
        self.patch = settings.patch
        places = (shape[1] // settings.patch) * (shape[2] // settings.patch)
        self.patches = nn.Linear(shape[0] * settings.patch**2, settings.width)
        self.places = nn.Parameter(torch.randn(places, settings.width) * 0.02)
        blocks = [Block(settings.width, settings.heads, settings.dropout) for _ in range(settings.depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.output = nn.Linear(settings.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        side = self.patch
        cut = x.reshape(n, channels, height // side, side, width // side, side)
        tokens = cut.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * side * side)
        y = self.patches(tokens) + self.places
        for block in self.blocks:
            y = block(y)
        scores: Tensor = self.output(self.norm(y).mean(1))
        return scores
