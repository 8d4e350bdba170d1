"""Some of a value's numbers, the rest later: top-k and random-k with error feedback.

``top-k`` (Aji and Heafield 2017; Stich et al. 2018) sends the largest, ``random-k`` some that are drawn. What
arrives of d numbers x where k are sent, C(x), has ‖x − C(x)‖² ≤ (1 − k/d) ‖x‖², in expectation where they
are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sartor import random
from sartor.federation.transforms import Key, State, register_transform
from sartor.settings import setting
from sartor.transforms.compression import WithFeedback, as_word, packed, unpacked


@dataclass(frozen=True)
class Sparse(WithFeedback):
    """A share of a value's numbers, one at least."""

    share: float = setting(0.01, "share of the numbers that is sent, at least one", above=0, high=1)

    def count(self, size: int) -> int:
        """k of so many numbers."""
        return max(1, int(self.share * size + 0.5))


@register_transform("top-k")
@dataclass(frozen=True)
class TopK(Sparse):
    """The numbers with the largest absolute values, and where they stand."""

    parts = ("values", "places")
    draws = False

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[dict[str, Tensor], State]:
        """The k largest of value + what was left out, in their order."""
        wanted = self.wanted(value, state)
        size, count = wanted.numel(), self.count(wanted.numel())
        places = torch.topk(wanted.abs(), count, sorted=False).indices.sort().values
        values = wanted.gather(0, places).to(value.dtype)
        left = self.left(state, wanted, lambda: filled(places, values.to(wanted.dtype), wanted), value)
        return {"values": values, "places": told_places(places, size)}, left

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Zero where nothing was sent."""
        size, values = like.numel(), parts["values"]
        if as_mask(values.shape[0], size):
            there = unpacked(parts["places"], 1, size)
            rank = (there.cumsum(0) - 1).clamp(min=0, max=values.shape[0] - 1)
            return torch.where(there > 0, values.gather(0, rank), 0).view(like.shape)
        places = parts["places"].long() & (0xFFFF if size <= 1 << 16 else 0x7FFFFFFF)
        return filled(places.clamp(max=size - 1), values, like)


@register_transform("random-k")
@dataclass(frozen=True)
class RandomK(Sparse):
    """Numbers that are drawn; which ones follows from a word that is sent along.

    Without feedback they are sent times d/k, so that the expectation is the value.
    """

    parts = ("values", "seed")

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[dict[str, Tensor], State]:
        """k of value + what was left out."""
        wanted = self.wanted(value, state)
        size, count = wanted.numel(), self.count(wanted.numel())
        seed = as_word(key, value.device)
        places = drawn_places(seed, size, count)
        values = wanted.gather(0, places)
        sent = values.to(value.dtype).to(wanted.dtype)
        left = self.left(state, wanted, lambda: filled(places, sent, wanted), value)
        values = values if self.feedback else values * (size / count)
        return {"values": values.to(value.dtype), "seed": seed}, left

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Zero where nothing was sent."""
        places = drawn_places(parts["seed"], like.numel(), parts["values"].shape[0])
        return filled(places, parts["values"], like)


def filled(places: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Values at their places, and zeros elsewhere."""
    return torch.zeros_like(like).flatten().scatter(0, places, values).view(like.shape)


def drawn_places(seed: Tensor, size: int, count: int) -> Tensor:
    """So many different places below a size: one of each of as many even stretches, which begin anywhere.

    So every place is as likely as another, for no more words than are drawn.
    """
    edges = torch.arange(count + 1, device=seed.device) * size // count
    words = random.words(seed, torch.arange(count + 1, device=seed.device))
    return (edges[:-1] + words[1:] % edges.diff() + words[0] % size) % size


def as_mask(count: int, size: int) -> bool:
    """Whether a bit for every place is shorter than the places of those that are sent."""
    return size <= count * (16 if size <= 1 << 16 else 32)


def told_places(places: Tensor, size: int) -> Tensor:
    """Where the numbers stand: a bit for every place, or a whole number of two or four bytes for each."""
    if as_mask(places.shape[0], size):
        there = torch.zeros(size, dtype=torch.uint8, device=places.device)
        return packed(there.scatter(0, places, torch.ones_like(places, dtype=torch.uint8)), 1)
    return places.to(torch.int16 if size <= 1 << 16 else torch.int32)
