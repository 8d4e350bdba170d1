"""Optimizers as pairs of pure functions on vectors, for clients and servers alike.

``init(w)`` is what an optimizer remembers before its first step; ``update(g, memory, w)`` turns a direction
into a step and gives what it remembers next. Nothing is changed in place and no value is read, so a pair
works under ``vmap`` as well. :func:`chain` puts pairs one after the other. Whoever uses them takes the step,
along it or against it.

>>> pair = chain(momentum(0.5), scale(2.0))
>>> w, g = torch.zeros(1), torch.ones(1)
>>> step, memory = pair.update(g, pair.init(w), w)
>>> pair.update(g, memory, w)
(tensor([3.]), {'m': tensor([1.5000])})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Memory = dict[str, Tensor]


class Optimizer(NamedTuple):
    """What is remembered at first; a step, and what is remembered next."""

    init: Callable[[Tensor], Memory]
    update: Callable[[Tensor, Memory, Tensor], tuple[Tensor, Memory]]


def chain(*parts: Optimizer) -> Optimizer:
    """One after the other, each on what the one before it gives; of none: the direction as it is."""

    def init(w: Tensor) -> Memory:
        memory: Memory = {}
        for part in parts:
            own = part.init(w)
            assert not memory.keys() & own.keys(), f"two optimizers of a chain remember {sorted(own)}"
            memory |= own
        return memory

    def update(g: Tensor, memory: Memory, w: Tensor) -> tuple[Tensor, Memory]:
        after: Memory = {}
        for part in parts:
            g, own = part.update(g, memory, w)
            after |= own
        return g, after

    return Optimizer(init, update)


def scale(factor: float) -> Optimizer:
    """c g."""
    return Optimizer(lambda w: {}, lambda g, memory, w: (factor * g, {}))


def decay(factor: float) -> Optimizer:
    """g + c w: weight decay, for a gradient g and a positive c."""
    return Optimizer(lambda w: {}, lambda g, memory, w: (g + factor * w, {}))


def clip(most: float, apart: tuple[int, ...] = ()) -> Optimizer:
    """min(1, c / ‖g‖) g; of vectors that lie one behind the other, with these lengths, each by itself."""

    def cut(g: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(g)
        return g * (most / norm.clamp(min=most))

    def update(g: Tensor, memory: Memory, w: Tensor) -> tuple[Tensor, Memory]:
        return (torch.cat([cut(part) for part in torch.split(g, list(apart))]) if apart else cut(g)), {}

    return Optimizer(lambda w: {}, update)


def momentum(beta: float, *, nesterov: bool = False, unit: float = 1.0) -> Optimizer:
    """m ← β m + g, with g in this unit; the step is m, with Nesterov g + β m."""

    def update(g: Tensor, memory: Memory, w: Tensor) -> tuple[Tensor, Memory]:
        g = g if unit == 1.0 else g / unit
        m = beta * memory["m"] + g
        return (g + beta * m if nesterov else m), {"m": m}

    return Optimizer(lambda w: {"m": torch.zeros_like(w)}, update)


def adagrad(
    beta1: float, epsilon: float, *, start: float = 0.0, inside: bool = False, rate: float = 1.0
) -> Optimizer:
    """m ← β1 m + (1 − β1) g, v ← v + g² from ``start``; the step is rate · m / (√v + ε).

    ``inside`` has ε under the root: √(v + ε).
    """
    return _adaptive(beta1, lambda v, g: v + g * g, epsilon, start, inside, rate)


def adam(
    beta1: float,
    beta2: float,
    epsilon: float,
    *,
    start: float = 0.0,
    inside: bool = False,
    rate: float = 1.0,
    corrected: bool = False,
    sign: int = 1,
    square_first: bool = False,
) -> Optimizer:
    """As Adagrad, with v ← β2 v + (1 − β2) g².

    ``corrected`` divides m by 1 − β1^t and v by 1 − β2^t. ``sign`` −1 subtracts g². ``square_first`` rounds
    g² before its factor; else (1 − β2) g is rounded and then multiplied by g.
    """
    share = sign * (1 - beta2)

    def second(v: Tensor, g: Tensor) -> Tensor:
        return beta2 * v + (share * (g * g) if square_first else share * g * g)

    return _adaptive(beta1, second, epsilon, start, inside, rate, beta2 if corrected else None)


def yogi(
    beta1: float, beta2: float, epsilon: float, *, start: float = 0.0, inside: bool = False, rate: float = 1.0
) -> Optimizer:
    """As Adagrad, with v ← v − (1 − β2) g² sign(v − g²): v moves towards g² by a bounded amount."""

    def second(v: Tensor, g: Tensor) -> Tensor:
        square = g * g
        return v - (1 - beta2) * square * torch.sign(v - square)

    return _adaptive(beta1, second, epsilon, start, inside, rate)


def _adaptive(
    beta1: float,
    second: Callable[[Tensor, Tensor], Tensor],
    epsilon: float,
    start: float,
    inside: bool,
    rate: float,
    corrected: float | None = None,
) -> Optimizer:
    """What the three have in common; ``corrected`` is β2 where biases are corrected."""

    def init(w: Tensor) -> Memory:
        memory = {"m": torch.zeros_like(w), "v": torch.full_like(w, start)}
        return memory if corrected is None else {**memory, "t": w.new_zeros(())}

    def update(g: Tensor, memory: Memory, w: Tensor) -> tuple[Tensor, Memory]:
        m = beta1 * memory["m"] + (1 - beta1) * g
        v = second(memory["v"], g)
        after, first, spread = {"m": m, "v": v}, m, v
        if corrected is not None:
            after["t"] = memory["t"] + 1
            # The powers are taken in float64: 1 - 0.999^t loses half its digits in float32.
            t = after["t"].double()
            first, spread = m / (1 - beta1**t).to(g.dtype), v / (1 - corrected**t).to(g.dtype)
        root = (spread + epsilon).sqrt() if inside else spread.sqrt() + epsilon
        return (first if rate == 1.0 else rate * first) / root, after

    return Optimizer(init, update)
