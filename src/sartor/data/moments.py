"""How samples lie, in numbers that add up: what normalising needs, and nobody's samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sartor import nests
from sartor.nests import Nest

CACHED = 1 << 19
"""Numbers at a time, which a processor's cache holds in double precision."""


@dataclass(frozen=True)
class Moments:
    """How samples lie in each channel, or in each column of flat ones: in double precision, one number each.

    Those of parts add up to those of the whole, so nobody needs to see all samples.
    """

    number: int
    mean: torch.Tensor
    squares: torch.Tensor
    """Squared distances from the mean, added up."""

    @classmethod
    def of(cls, x: torch.Tensor) -> Moments:
        """The moments of some samples."""
        x = x.unsqueeze(1) if x.ndim == 1 else x
        flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
        number = flat.shape[0] * flat.shape[2]
        chunks = torch.split(flat, max(1, CACHED // max(1, flat[0:1].numel())))
        nothing = torch.zeros(flat.shape[1], dtype=torch.float64)
        mean = sum((chunk.double().sum(dim=(0, 2)) for chunk in chunks), nothing) / max(number, 1)
        centred = ((chunk.double() - mean[:, None]).square_().sum(dim=(0, 2)) for chunk in chunks)
        return cls(number, mean, sum(centred, nothing))

    def __add__(self, other: Moments) -> Moments:
        number = self.number + other.number
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.number / max(number, 1))
        between = apart.square() * (self.number * other.number / max(number, 1))
        return Moments(number, mean, self.squares + other.squares + between)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """Samples shifted and scaled to mean 0 and deviation 1, in float32, or in float64 where they are."""
        deviation = (self.squares / self.number).sqrt()
        # A constant channel has a deviation of rounding size at most; dividing by it would blow up noise.
        deviation = torch.where(deviation > 1e-7 * (1 + self.mean.abs()), deviation, 1.0)
        shape = (-1, *[1] * (x.ndim - 2))
        x = x if x.dtype == torch.float64 else x.float()
        return (x - self.mean.to(x.dtype).view(shape)).div_(deviation.to(x.dtype).view(shape))


def moments_of(x: Nest) -> dict[str, Moments]:
    """The moments of every leaf, by its path."""
    return {path: Moments.of(leaf) for path, leaf in nests.paths(x, "x").items()}
