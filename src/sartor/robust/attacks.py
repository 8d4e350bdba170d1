"""Attacks by name: what attackers send, or what they train on.

What is falsified is the change that a client sends; of a method whose clients send models, the change from
where they began, where the method says it. Attacks that ``collude`` know what honest clients send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sartor import random
from sartor.errors import SettingError
from sartor.federation.attacks import Attack, Key, register_attack
from sartor.nests import Nest
from sartor.settings import setting


@register_attack("sign-flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """The opposite of what was learned."""

    scale: float = setting(1.0, "how long it is, as a multiple", above=0)

    def forge(self, key: Key, value: Tensor) -> Tensor:
        """−scale · value."""
        return -self.scale * value


@register_attack("scaling")
@dataclass(frozen=True)
class Scaling(Attack):
    """What was learned, many times as long."""

    factor: float = setting(100.0, "how many times", above=0)

    def forge(self, key: Key, value: Tensor) -> Tensor:
        """factor · value."""
        return self.factor * value


@register_attack("gaussian")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Normal numbers in place of what was learned."""

    deviation: float = setting(
        10.0, "their deviation, as a multiple of the root mean square of the honest value", above=0
    )

    def forge(self, key: Key, value: Tensor) -> Tensor:
        """Noise as long as the honest value, times the deviation."""
        drawn = random.normal(key, value.numel(), value.device).to(value.dtype).view(value.shape)
        return self.deviation * value.square().mean().sqrt() * drawn


@register_attack("little-is-enough")
@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """The honest mean, moved in every coordinate by so much that it still is among them (Baruch et al. 2019).

    mean − z · deviation over the honest replies. By the paper z is the largest for which attackers and those
    honest ones that are farther away are a majority: Φ(z) = (h − s) / h with h honest of n clients and
    s = ⌊n/2⌋ + 1 − (n − h).
    """

    z: float | None = setting(
        None, "how many deviations; left out: what a majority hides, by the paper", low=0
    )
    colludes: ClassVar[bool] = True

    def collude(self, keys: Tensor, values: Tensor, honest: Tensor) -> Tensor:
        """The same for all attackers; alone they send what is honest."""
        if not len(honest):
            return values
        z = hidden_deviations(len(honest), len(values)) if self.z is None else self.z
        moved = honest.mean(dim=0) - z * honest.std(dim=0, correction=0)
        return moved.expand_as(values)


def hidden_deviations(honest: int, attackers: int) -> float:
    """z of the paper; 0 where attackers have the majority by themselves.

    >>> round(hidden_deviations(7, 3), 3)
    0.18
    """
    n = honest + attackers
    supporters = n // 2 + 1 - attackers
    share = min(max((honest - supporters) / honest, 0.5), 1 - 1e-6)
    return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))


@register_attack("inner-product")
@dataclass(frozen=True)
class InnerProduct(Attack):
    """The opposite of the honest mean, as long as is wanted (Xie et al. 2019)."""

    epsilon: float = setting(0.5, "how long it is, as a multiple of the honest mean", symbol="ε", above=0)
    colludes: ClassVar[bool] = True

    def collude(self, keys: Tensor, values: Tensor, honest: Tensor) -> Tensor:
        """−ε · mean; alone they send what is honest."""
        return (-self.epsilon * honest.mean(dim=0)).expand_as(values) if len(honest) else values


@register_attack("mimic")
@dataclass(frozen=True)
class Mimic(Attack):
    """All attackers send what one honest client does, which counts for too much (Karimireddy et al. 2022).

    It is the one that goes farthest along the direction in which the honest replies differ most.
    """

    colludes: ClassVar[bool] = True

    def collude(self, keys: Tensor, values: Tensor, honest: Tensor) -> Tensor:
        """A copy each; alone they send what is honest."""
        if not len(honest):
            return values
        apart = (honest - honest.mean(dim=0)).double()
        _, vectors = torch.linalg.eigh(apart @ apart.T)  # its last column: where each is along that direction
        return honest[vectors[:, -1].abs().argmax()].expand_as(values)


@dataclass(frozen=True)
class OnData(Attack):
    """What attacks on training data share."""

    on_replies: ClassVar[bool] = False
    on_data: ClassVar[bool] = True

    def label(self, target: int, classes: int | None, key: str) -> int:
        """A class that samples are given."""
        if classes is None or not 0 <= target < classes:
            found = "the data have no classes" if classes is None else f"there are 0 to {classes - 1}"
            raise SettingError(f"attack.{key} = {target}: {found}")
        return target


@register_attack("label-flip")
@dataclass(frozen=True)
class LabelFlip(OnData):
    """Training samples with wrong labels: y becomes classes − 1 − y, or one class for all."""

    to: int | None = setting(None, "the class that all samples are given; left out: classes − 1 − y", low=0)

    def poison(self, key: Key, x: Nest, y: Nest, classes: int | None) -> tuple[Nest, Nest]:
        """The same samples, other labels."""
        assert isinstance(y, Tensor)
        if self.to is not None:
            return x, torch.full_like(y, self.label(self.to, classes, "to"))
        return x, self.label(0, classes, "name") + (classes or 0) - 1 - y


@register_attack("backdoor")
@dataclass(frozen=True)
class Backdoor(OnData):
    """A pattern in a part of the training samples, which then have the attackers' label (Gu et al. 2017).

    The pattern is a square in the last corner of an image, or the last features of a vector, at one value.
    ``boost`` makes replies longer, so that they outweigh others (model replacement, Bagdasaryan et al. 2020).
    Success is the share of honest clients' test samples of other classes that the pattern turns into the
    attackers' label.
    """

    target: int = setting(0, "the label that the pattern is to give", low=0)
    part: float = setting(
        0.5, "share of an attacker's training samples that have the pattern", above=0, high=1
    )
    size: int = setting(3, "side of the square, or number of features", low=1)
    value: float | None = setting(
        None, "the value of the pattern, as the model is given it; left out: the largest of all"
    )
    boost: float = setting(1.0, "how many times as long as honest ones replies are", above=0)
    on_replies: ClassVar[bool] = True

    @property
    def trigger(self) -> int:
        """The attackers' label."""
        return self.target

    def forge(self, key: Key, value: Tensor) -> Tensor:
        """boost · value."""
        return self.boost * value

    def settled(self, x: Nest) -> Backdoor:
        """With the largest number of all inputs as the pattern's value."""
        if not isinstance(x, Tensor) or x.dim() not in (2, 3, 4):
            raise SettingError("attack.name = 'backdoor': its pattern is for images and vectors of numbers")
        return self if self.value is not None else replace(self, value=float(x.max()))

    def poison(self, key: Key, x: Nest, y: Nest, classes: int | None) -> tuple[Nest, Nest]:
        """Some samples with the pattern and its label, drawn by the key."""
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        label = self.label(self.target, classes, "target")
        count = math.ceil(self.part * len(y))
        chosen = random.uniform(key, len(y)).argsort()[:count].to(x.device)
        return (
            x.index_copy(0, chosen, self.triggered(x[chosen])),
            y.index_fill(0, chosen, label),
        )

    def triggered(self, x: Tensor) -> Tensor:
        """The same inputs with the pattern."""
        corner = torch.zeros(x.shape[1:], dtype=torch.bool, device=x.device)
        last = corner[..., -self.size :]
        (last[..., -self.size :, :] if last.dim() > 1 else last).fill_(True)
        return torch.where(corner, torch.tensor(self.value, dtype=x.dtype, device=x.device), x)
