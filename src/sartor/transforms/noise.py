"""Noise on a value, which stands after a clip; it is not accounted, as that of ``[privacy]`` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sartor.federation.protection import noise_like
from sartor.federation.transforms import Key, State, Transform, register_transform
from sartor.settings import setting


@register_transform("noise")
@dataclass(frozen=True)
class Noise(Transform):
    """A value and normal noise on each of its numbers."""

    deviation: float = setting(1.0, "the noise's standard deviation", symbol="σ", low=0)
    noises: ClassVar[bool] = True

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[Tensor, State]:
        """value + N(0, σ²)."""
        return value + noise_like(key, value, self.deviation), state

    def apply_all(self, key: Key, values: Tensor, state: State) -> tuple[Tensor, State]:
        """Noise of its own on every row."""
        return self.apply(key, values, state)
