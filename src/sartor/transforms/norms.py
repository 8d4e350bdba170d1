"""Transforms of a value's length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sartor.federation.transforms import Key, State, Transform, register_transform
from sartor.settings import setting


@register_transform("clip")
@dataclass(frozen=True)
class Clip(Transform):
    """A value with a norm above a bound is scaled down to it."""

    norm: float = setting(1.0, "the largest norm", above=0)
    clips: ClassVar[bool] = True
    draws: ClassVar[bool] = False

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[Tensor, State]:
        """min(1, norm / ‖value‖) · value."""
        found = torch.linalg.vector_norm(value)
        return torch.where(found > self.norm, value * (self.norm / found), value), state


@register_transform("scale")
@dataclass(frozen=True)
class Scale(Transform):
    """A value times a factor."""

    factor: float = setting(1.0, "the factor")
    draws: ClassVar[bool] = False

    @property
    def shortens(self) -> bool:
        """Where the factor is no larger than 1."""
        return abs(self.factor) <= 1

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[Tensor, State]:
        """factor · value."""
        return value * self.factor, state
