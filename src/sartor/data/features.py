"""Features computed before training: none, another scale, or histograms of oriented gradients of images.

A feature is a frozen dataclass of its parameters that is called with samples, one of images with
``[n, channels, height, width]``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from sartor.errors import DataError
from sartor.settings import setting

CHUNK = 1024
"""Images worked on at once, so that the working memory stays small."""


class Feature(Protocol):
    """Something computed from samples."""

    name: ClassVar[str]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The features of each sample."""
        ...


@dataclass(frozen=True)
class NoFeature:
    """The samples as they are."""

    name: ClassVar[str] = "none"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The same samples."""
        return x


@dataclass(frozen=True)
class Scale:
    """The samples on a scale that is given, whatever the data are: pixels of 0..1 become -1..1 by default.

    >>> Scale()(torch.tensor([0.0, 0.25, 1.0])).tolist()
    [-1.0, -0.5, 1.0]
    """

    name: ClassVar[str] = "scale"
    centre: float = setting(0.5, "the number that becomes 0")
    width: float = setting(0.5, "the distance from it that becomes 1", above=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Their distances from the centre."""
        return (x - self.centre) / self.width


@dataclass(frozen=True)
class Hog:
    """Histograms of oriented gradients over overlapping square blocks, for linear models on images.

    The gradient at a pixel is half the difference of its neighbours, at the border the one-sided
    difference; of a colour image the channel with the largest gradient counts. Its angle in 0..2π (x to the
    right, y down) chooses one of ``bins`` equal bins, to which its magnitude is added. Blocks are in
    reading order, bins within a block. A 28 x 28 image gives 8 x 8 blocks of 9 bins: 576 features.

    >>> Hog()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 576])
    """

    name: ClassVar[str] = "hog"
    block: int = setting(7, "side of a block in pixels", low=1)
    stride: int = setting(3, "pixels from a block to the next", low=1)
    bins: int = setting(9, "bins over the full circle", low=1)
    norm: str = setting(
        "block", "scale each block to unit length, or leave the sums", choices=("block", "none")
    )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The features ``[n, blocks * bins]`` of images ``[n, channels, height, width]``."""
        if x.ndim != 4 or min(x.shape[2:]) < max(2, self.block):
            raise DataError(
                f"hog: needs images [n, channels, height, width] of at least {max(2, self.block)} pixels "
                f"a side, got {list(x.shape)}"
            )
        down, across = ((side - self.block) // self.stride + 1 for side in x.shape[2:])
        features = torch.empty((len(x), down * across * self.bins), dtype=torch.float32)
        for start in range(0, len(x), CHUNK):
            features[start : start + CHUNK] = self._chunk(x[start : start + CHUNK].float())
        return features

    def _chunk(self, x: torch.Tensor) -> torch.Tensor:
        down, right = torch.gradient(x, dim=(2, 3))
        parts = (torch.split(part, 1, dim=1) for part in (down, right, torch.hypot(right, down)))
        down, right, magnitude = functools.reduce(_stronger, zip(*parts, strict=True))
        turn = torch.atan2(down, right) / (2 * math.pi)
        # An angle just below 0 may round up to a full turn, which is bin 0 again.
        bin_ = (torch.floor((turn % 1.0) * self.bins).long()) % self.bins
        spread = torch.zeros((len(x), self.bins, *x.shape[2:])).scatter_(1, bin_, magnitude)
        sums = torch.nn.functional.avg_pool2d(spread, self.block, self.stride, divisor_override=1)
        blocks = sums.permute(0, 2, 3, 1)
        if self.norm == "block":
            # A block without gradients stays zero.
            blocks = blocks / blocks.norm(dim=3, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return blocks.flatten(1)


Gradient = tuple[torch.Tensor, ...]
"""Down and to the right, and its length."""


def _stronger(one: Gradient, other: Gradient) -> Gradient:
    """The longer of two channels' gradients at every pixel, the first where both are as long."""
    longer = other[-1] > one[-1]
    return tuple(torch.where(longer, theirs, ours) for ours, theirs in zip(one, other, strict=True))


FEATURES: dict[str, type[Feature]] = {feature.name: feature for feature in (NoFeature, Scale, Hog)}
"""The features by name."""
