"""What compressors share: when they are worth it, what is left out and sent later, bits in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sartor.federation.transforms import Key, State, Transform
from sartor.settings import setting

LEFT = "left"
"""The state that holds what was not sent."""


@dataclass(frozen=True)
class Compressor(Transform):
    """A transform that sends less; a value that would not become smaller is sent as it is."""

    def concerns(self, name: str, value: Tensor) -> bool:
        """Whether it is for this quantity, and makes it smaller."""
        if not super().concerns(name, value) or not value.numel():
            return False
        return _bytes_sent(self, value.shape, value.dtype) < value.numel() * value.dtype.itemsize


@dataclass(frozen=True)
class WithFeedback(Compressor):
    """A compressor that adds what it left out of a value to the next one, if it is to."""

    feedback: bool = setting(True, "whether what is left out is added to the next value (error feedback)")

    @property
    def stateful(self) -> bool:
        """With feedback what was left out is kept."""
        return self.feedback

    @property
    def adds_up(self) -> bool:
        """With feedback it is for changes alone."""
        return self.feedback

    def init(self, like: Tensor) -> State:
        """Nothing is left out yet."""
        return {LEFT: torch.zeros_like(like, dtype=wide(like.dtype))} if self.feedback else {}

    def alone(self, like: Tensor) -> State:
        """Nothing is left out that would be added later."""
        return replace(self, feedback=False).init(like)

    def wanted(self, value: Tensor, state: State) -> Tensor:
        """The value as a vector, with what was left out before."""
        value = value.to(wide(value.dtype))
        return (value + state[LEFT] if LEFT in state else value).flatten()

    def left(self, state: State, wanted: Tensor, sent: Callable[[], Tensor], like: Tensor) -> State:
        """What is kept where this is sent of what was wanted, if anything is."""
        return {LEFT: (wanted - sent()).view(like.shape)} if LEFT in state else {}


@lru_cache(maxsize=1024)
def _bytes_sent(compressor: Compressor, shape: torch.Size, dtype: torch.dtype) -> int:
    """What a value of this shape is sent as, in bytes; found by sending zeros."""
    zeros = torch.zeros(shape, dtype=dtype)
    parts, _ = compressor.apply(0, zeros, compressor.init(zeros))
    return sum(int(part.nbytes) for part in parts.values())


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate in: at least single precision."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def as_word(key: Key, device: torch.device) -> Tensor:
    """A key as a tensor, which may be sent."""
    return key if isinstance(key, Tensor) else torch.full((), key, dtype=torch.int64, device=device)


def bits_for(codes: int) -> int:
    """The bits that each of so many different codes takes: one of 1, 2, 4, 8 and 16.

    >>> [bits_for(count) for count in (2, 3, 15, 255, 256, 257)]
    [1, 2, 4, 8, 8, 16]
    """
    return next(bits for bits in (1, 2, 4, 8, 16) if codes <= 1 << bits)


def packed(codes: Tensor, bits: int) -> Tensor:
    """A vector of codes of so many bits each as bytes; of 16 bits as whole numbers of two bytes.

    >>> packed(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    if bits == 16:
        return codes.to(torch.int16)
    each = 8 // bits
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[0] % each)).view(-1, each)
    found = codes[:, 0]
    for place in range(1, each):
        found = found | (codes[:, place] << bits * place)
    return found


def unpacked(held: Tensor, bits: int, count: int) -> Tensor:
    """The first so many codes that were packed, as whole numbers.

    >>> unpacked(packed(torch.tensor([1, 2, 3]), 4), 4, 3)
    tensor([1, 2, 3], dtype=torch.int32)
    """
    if bits == 16:
        return held.to(torch.int32) & 0xFFFF
    mask = (1 << bits) - 1
    codes = torch.stack([(held >> bits * place) & mask for place in range(8 // bits)], dim=1)
    return codes.flatten()[:count].to(torch.int32)
