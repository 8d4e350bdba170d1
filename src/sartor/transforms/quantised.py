"""Few bits for every number: QSGD, 8 and 4 bits with a scale for each block, signs with a majority vote.

A number between two levels is rounded to one of them by chance, so that its expectation is the number.
``qsgd`` (Alistarh et al. 2017) has levels of the value's norm; its codes have a fixed width here, where the
paper's are of variable length. ``int8`` and ``int4`` have levels of the largest number of a block. ``sign``
(Bernstein et al. 2018, with the feedback of Karimireddy et al. 2019) has one bit for a number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from sartor import random
from sartor.federation.transforms import PLACES, Key, State, Transform, register_transform
from sartor.kernels.quantised import by_kernel, quantised, restored
from sartor.settings import setting
from sartor.transforms.compression import (
    Compressor,
    WithFeedback,
    as_word,
    bits_for,
    packed,
    unpacked,
    wide,
)


def rounded(ratio: Tensor, key: Key) -> Tensor:
    """Whole numbers whose expectations these are: the next above with the probability of what is over.

    A word gives the chances of four numbers, of 16 bits each, as words are what takes time; so expectations
    are within 2⁻¹⁷ of a level, about what single precision has.
    """
    count, low = ratio.numel(), ratio.floor()
    words = random.words(key, torch.arange(-(-count // 4), device=ratio.device))
    chances = torch.cat([((words >> shift) & 0xFFFF).to(ratio.dtype) for shift in (0, 16, 32, 48)])
    return low + ((chances[:count] + 0.5) * 2.0**-16 < ratio - low).to(low.dtype)


@dataclass(frozen=True)
class Quantised(Compressor):
    """Whole multiples, from −levels to levels, of a scale."""

    parts = ("codes", "scale")
    sealed = ("scale",)

    @property
    @abstractmethod
    def most(self) -> int:
        """The largest multiple."""

    @abstractmethod
    def scale(self, x: Tensor) -> Tensor:
        """What the largest multiple stands for, of each block; not finite where a number is not."""

    def spread(self, scale: Tensor, size: int) -> Tensor:
        """The scale of each of so many numbers."""
        return scale

    def sharing(self, size: int) -> int:
        """How many of so many numbers share a scale."""
        return size

    @property
    def bits(self) -> int:
        """Those of a code."""
        return bits_for(2 * self.most + 1)

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[dict[str, Tensor], State]:
        """Numbers over their scale, rounded by chance."""
        x = value.flatten().to(wide(value.dtype))
        scale = self.scale(x)
        if by_kernel(x):
            word, rows = as_word(key, x.device).view(1), (x[None], scale.view(1, -1))
            codes = quantised(*rows, word, self.most, self.sharing(x.shape[0]), self.bits)[0]
            return {"codes": codes, "scale": scale}, state
        ratio = x * self.most / self.spread(torch.where(scale > 0, scale, 1), x.shape[0])
        codes = rounded(ratio, key).clamp(-self.most, self.most).nan_to_num(0) + self.most
        return {"codes": packed(codes.to(torch.int32), self.bits), "scale": scale}, state

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The multiples of the scale."""
        size, scale = like.numel(), parts["scale"]
        if by_kernel(scale):
            rows = parts["codes"][None], scale.view(1, -1)
            values: Tensor = restored(*rows, size, self.most, self.sharing(size), self.bits)
        else:
            codes = unpacked(parts["codes"], self.bits, size) - self.most
            values = codes.to(scale.dtype) * self.spread(scale, size) / self.most
        return values.to(like.dtype).view(like.shape)


@register_transform("qsgd")
@dataclass(frozen=True)
class QSGD(Quantised):
    """Levels of a value's norm, rounded by chance; 1, 7 or 127 of them fill 2, 4 or 8 bits."""

    levels: int = setting(7, "levels above zero, and as many below", symbol="s", low=1, high=32767)

    @property
    def most(self) -> int:
        """s."""
        return self.levels

    def scale(self, x: Tensor) -> Tensor:
        """‖x‖."""
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm


@dataclass(frozen=True)
class Blocks(Quantised):
    """A scale for each block of numbers."""

    block: int = setting(1024, "numbers that share a scale", low=1)

    def scale(self, x: Tensor) -> Tensor:
        """The largest absolute value of each block."""
        return pad(x.abs(), (0, -x.shape[0] % self.block)).view(-1, self.block).amax(dim=1)

    def sharing(self, size: int) -> int:
        """Those of a block."""
        return self.block

    def spread(self, scale: Tensor, size: int) -> Tensor:
        """The scale of each number's block."""
        return scale[:, None].expand(-1, self.block).flatten()[:size]


@register_transform("int8")
@dataclass(frozen=True)
class Int8(Blocks):
    """A byte for every number, rounded by chance to 127 levels of the largest of its block."""

    most = 127


@register_transform("int4")
@dataclass(frozen=True)
class Int4(Blocks):
    """Half a byte for every number, rounded by chance to 7 levels of the largest of its block."""

    most = 7


@register_transform("sign")
@dataclass(frozen=True)
class Sign(WithFeedback):
    """A bit for every number, and the mean of the absolute values."""

    parts = ("signs", "scale")
    sealed = ("scale",)
    draws = False

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[dict[str, Tensor], State]:
        """Signs of value + what was left out; zero counts as positive."""
        wanted = self.wanted(value, state)
        scale, positive = wanted.abs().mean(), wanted >= 0
        left = self.left(state, wanted, lambda: torch.where(positive, scale, -scale), value)
        if by_kernel(wanted):
            rows, unused = (wanted[None], scale.view(1, 1)), as_word(0, wanted.device).view(1)
            signs = quantised(*rows, unused, 0, wanted.shape[0], 1)[0]
        else:
            signs = packed(positive, 1)
        return {"signs": signs, "scale": scale}, left

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """±scale."""
        size, scale = like.numel(), parts["scale"]
        if by_kernel(scale):
            values: Tensor = restored(parts["signs"][None], scale.view(1, 1), size, 0, size, 1)
        else:
            values = torch.where(unpacked(parts["signs"], 1, size) > 0, scale, -scale)
        return values.to(like.dtype).view(like.shape)


@register_transform("majority")
@dataclass(frozen=True)
class Majority(Transform):
    """The sign that most clients sent, for every number, times the mean of their scales.

    Every reply becomes this one, so whatever weights a method has, its mean is the vote. A tie is zero.
    """

    place: str = setting("server", "where it is applied", choices=PLACES[2:])
    draws: ClassVar[bool] = False

    def apply_all(self, key: Key, values: Tensor, state: State) -> tuple[Tensor, State]:
        """sign(Σ_i sign(x_i)) · mean_i(mean |x_i|)."""
        scale = values.abs().mean()
        vote = values.sign().sum(dim=0).sign()
        return (vote * scale).expand_as(values), state
