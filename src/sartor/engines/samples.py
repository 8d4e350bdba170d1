"""The clients' samples where clients train: all of them on the device, or those that are asked just now."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.data.clients import LazySplit, Split
from sartor.kernels.device import to_device
from sartor.model.batch import Batch
from sartor.nests import Nest

MOST_LAID_OUT = 1 << 27
"""Bytes of samples that are copied so that clients' samples lie one after the other."""
MOST_ASKED = 1024
"""Cohorts that are remembered, to know those that come again."""


class Weighted(NamedTuple):
    """Targets, and how much their samples count."""

    y: Nest
    weight: Tensor


def batch_of(x: Nest, y: Nest, weight: Tensor | None, key: Tensor | int) -> Batch:
    """A batch of samples whose targets may be :class:`Weighted`."""
    return Batch(x, y.y, weight, key, y.weight) if isinstance(y, Weighted) else Batch(x, y, weight, key)


class Samples:
    """One split on the device, with every client's place in it on host and device."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.x, self.y = nests.mapped(lambda leaf: leaf.to(device), (split.x, split.y))
        self.weight = None if split.weight is None else split.weight.to(device)
        self.counts = np.array(split.count, dtype=np.int64)
        self.starts = np.array(split.start, dtype=np.int64)
        self.start, self.count = (torch.from_numpy(of).to(device) for of in (self.starts, self.counts))
        self._asked: set[int] = set()
        self._laid_out: dict[tuple[int, bytes], tuple[Nest, Nest]] = {}

    def common(self, numbers: np.ndarray) -> bool:
        """Whether several clients have the very same samples, as of the pooled test data."""
        starts, counts = self.starts[numbers], self.counts[numbers]
        return len(numbers) > 1 and bool((starts == starts[0]).all() and (counts == counts[0]).all())

    def in_a_row(self, numbers: np.ndarray, each: int) -> int | None:
        """Where the samples of these clients begin, if they have so many each, one client after the other."""
        first = int(self.starts[numbers[0]])
        there = self.starts[numbers] == first + each * np.arange(len(numbers))
        return first if (there & (self.counts[numbers] == each)).all() else None

    def laid_out(self, numbers: np.ndarray, width: int) -> tuple[Nest, Nest] | None:
        """Samples and targets of these clients one after the other, ``width`` rows for each, if there are.

        Behind a client's last sample stands its first again, which counts nowhere. Whoever is asked a second
        time, as in every evaluation, is laid out by a copy that is kept, unless it is large.
        """
        first, rows = self.in_a_row(numbers, width), len(numbers) * width
        if first is not None:
            return _both(nests.rows((self.x, self.targets), slice(first, first + rows)))
        key = (width, numbers.tobytes())
        if key in self._laid_out:
            return self._laid_out[key]
        size = rows * sum(leaf[:1].nbytes for leaf in nests.leaves(self.x))
        if hash(key) not in self._asked or size > MOST_LAID_OUT:
            self._asked = {*self._asked, hash(key)} if len(self._asked) < MOST_ASKED else {hash(key)}
            return None
        place, counts = np.arange(width), self.counts[numbers, None]
        index = np.where(counts > 0, self.starts[numbers, None] + np.where(place < counts, place, 0), 0)
        there = to_device(index.reshape(-1), self.start.device)
        self._laid_out = {key: _both(nests.rows((self.x, self.targets), there))}
        return self._laid_out[key]

    @property
    def targets(self) -> Nest:
        """The targets, with their weights where there are any."""
        return self.y if self.weight is None else Weighted(self.y, self.weight)

    @property
    def fetched(self) -> int:
        """How many numbers are brought for a client at most."""
        return 0

    def bring(self, numbers: np.ndarray) -> bool:
        """Have the samples of these clients in ``x`` and ``y``; whether those are other tensors now."""
        return False

    def of(self, number: int) -> tuple[Nest, Nest, Tensor]:
        """Nests that hold the samples of one client, and every client's place in them."""
        return self.x, self.targets, self.start


class LazySamples(Samples):
    """A window on a split whose samples are fetched: ``x`` and ``y`` hold those of the clients asked last.

    The window only grows, so that what was captured for its tensors serves for many cohorts.
    """

    def __init__(self, split: LazySplit, device: torch.device) -> None:
        super().__init__(split, device)
        self.x, self.y = nests.mapped(torch.clone, (self.x, self.y))
        self._split = split
        self._held: np.ndarray | None = None

    def common(self, numbers: np.ndarray) -> bool:
        """Every client's samples are fetched for itself."""
        return False

    def in_a_row(self, numbers: np.ndarray, each: int) -> int | None:
        """Where they lie changes from cohort to cohort."""
        return None

    def laid_out(self, numbers: np.ndarray, width: int) -> tuple[Nest, Nest] | None:
        """They are fetched anew for every cohort."""
        return None

    @property
    def fetched(self) -> int:
        """How many numbers are brought for a client at most."""
        return int(self.counts.max()) * sum(leaf[:1].numel() for leaf in nests.leaves(self.x))

    def bring(self, numbers: np.ndarray) -> bool:
        """Fetch the samples of these clients into the window, in place of those that it held."""
        numbers = np.unique(numbers)
        if self._held is not None and np.array_equal(numbers, self._held):
            return False
        counts = self.counts[numbers]
        total = int(counts.sum())
        grown = total > nests.length(self.y)
        if grown:
            # Zeros, as what lies behind the last sample may be read, though its weight is 0.
            capacity = 1 << (total - 1).bit_length()
            self.x, self.y = nests.mapped(
                lambda leaf: leaf.new_zeros((capacity, *leaf.shape[1:])), (self.x, self.y)
            )
        if total:
            fetched = nests.joined([self._split.of(number) for number in numbers.tolist()])
            for window, part in zip(nests.leaves((self.x, self.y)), nests.leaves(fetched), strict=True):
                window[:total] = to_device(part.numpy(), window.device)
        self.starts[numbers] = np.cumsum(counts) - counts
        self.start[to_device(numbers, self.start.device)] = to_device(self.starts[numbers], self.start.device)
        self._held = numbers
        return grown

    def of(self, number: int) -> tuple[Nest, Nest, Tensor]:
        """One client's samples by themselves: several threads may ask at once."""
        x, y = nests.mapped(lambda leaf: leaf.to(self.start.device), self._split.of(number))
        images = isinstance(x, Tensor) and x.dim() == 4
        if images and self.x.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y, self.start.new_zeros(1).expand(len(self.start))


def _both(pair: Nest) -> tuple[Nest, Nest]:
    x, targets = pair
    return x, targets


def samples_of(split: Split, device: torch.device) -> Samples:
    """A split's samples for a device."""
    return LazySamples(split, device) if isinstance(split, LazySplit) else Samples(split, device)
