"""Where a model's tensors lie in its vector, and named parts of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Named entries of the vector: a few slices, in the vector's order."""

    name: str
    slices: tuple[slice, ...]

    @property
    def size(self) -> int:
        """How many numbers the part has."""
        return sum(piece.stop - piece.start for piece in self.slices)

    def take(self, w: Tensor) -> Tensor:
        """The part of a vector, or of every row of a matrix."""
        return torch.cat([w[..., :0], *(w[..., piece] for piece in self.slices)], dim=-1)

    def put(self, w: Tensor, values: Tensor) -> Tensor:
        """A copy of the vector (or matrix) with this part replaced."""
        # Joined from pieces, as nothing can be written into a vector that stacked clients share.
        w = w.expand(*values.shape[:-1], w.shape[-1])
        pieces, end, offset = [], 0, 0
        for piece in self.slices:
            length = piece.stop - piece.start
            pieces += [w[..., end : piece.start], values[..., offset : offset + length]]
            end, offset = piece.stop, offset + length
        return torch.cat([*pieces, w[..., end:]], dim=-1)

    def mask(self, like: Tensor) -> Tensor:
        """A boolean vector that is true on this part."""
        mask = torch.zeros(like.shape[-1], dtype=torch.bool, device=like.device)
        for piece in self.slices:
            mask[piece] = True
        return mask


class Layout:
    """Where named tensors lie in a vector."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {key: value.shape for key, value in tensors.items()}
        self.sizes = [value.numel() for value in tensors.values()]
        self.size = sum(self.sizes)
        self.places, position = {}, 0
        for key, length in zip(self.shapes, self.sizes, strict=True):
            self.places[key] = slice(position, position + length)
            position += length

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of these tensors, on the CPU."""
        if not tensors:
            return torch.zeros(0)
        return torch.cat([tensors[key].detach().reshape(-1).cpu() for key in self.shapes])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors as views of a vector."""
        # One split whose backward is one concatenation; slices would each give a gradient of the whole
        # vector.
        pieces = vector.split_with_sizes(self.sizes) if self.sizes else ()
        return {
            key: piece.view(shape) for (key, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def below(key: str, path: str) -> bool:
    """Whether a name is a module's path or lies below it; the empty path is the whole module."""
    return not path or key == path or key.startswith(path + ".")


def gaps(slices: Iterable[slice], size: int) -> tuple[slice, ...]:
    """What lies between slices that are sorted and apart, from 0 to ``size``."""
    edges = [0, *(edge for piece in slices for edge in (piece.start, piece.stop)), size]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple(slice(start, stop) for start, stop in pairs if start < stop)


def merged(slices: list[slice]) -> tuple[slice, ...]:
    """Sorted slices with neighbours joined."""
    merged: list[slice] = []
    for piece in sorted(slices, key=lambda piece: piece.start):
        if merged and merged[-1].stop == piece.start:
            merged[-1] = slice(merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)
