"""Keyed randomness: every draw is a pure function of (seed, purpose, round, client, index).

A stream is named by a 64-bit key, folded from its arguments, and its i-th word is a hash of (key, i): the
finaliser of SplitMix64, written in wrapping 64-bit integer arithmetic that gives the same integers on every
device. There is no state, so results depend neither on the order of the draws nor on the engine, the
chunking or an interruption.

>>> key = stream(0, "cohort", 3)
>>> bool((uniform(key, 5) == uniform(key, 5)).all())
True
"""

from __future__ import annotations

import hashlib
import math
from functools import cache, lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from sartor.kernels.gpu import HAS_TRITON

Word: TypeAlias = Any
"""A 64-bit word: a Python integer, or a tensor or an array of them. All wrap in the same way."""

_GOLDEN = 0x9E3779B97F4A7C15

FEW = 4096
"""Up to so many samples of a client are shuffled by counting on a GPU, instead of sorting."""


def seed_torch(seed: int) -> None:
    """Set PyTorch's own generator, which the networks' layers draw from.

    ``torch.manual_seed`` also notes the call, with a stack trace, for any accelerator that is not there yet.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _signed(value: int) -> int:
    """A Python integer wrapped to a signed 64-bit word, as tensor arithmetic wraps it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _wrap(value: Word) -> Word:
    return _signed(value) if isinstance(value, int) else value


def _shift(value: Word, places: int) -> Word:
    """A logical right shift.

    Torch shifts signed words arithmetically, so the sign's copies are masked away.
    """
    return (value >> places) & ((1 << (64 - places)) - 1)


def _mix(word: Word) -> Word:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    word = _wrap((word ^ _shift(word, 30)) * _signed(0xBF58476D1CE4E5B9))
    word = _wrap((word ^ _shift(word, 27)) * _signed(0x94D049BB133111EB))
    return word ^ _shift(word, 31)


def fold(key: int | Tensor, value: int | Tensor) -> int | Tensor:
    """The key of a sub-stream: ``value`` is a round, a client or an epoch, an integer or a tensor of them."""
    folded: int | Tensor = _mix(key ^ _mix(_wrap(value + _signed(_GOLDEN))))
    return folded


@cache
def _purpose(name: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def stream(seed: int | Tensor, purpose: str, *values: int | Tensor) -> int | Tensor:
    """The key of the stream (seed, purpose, values...).

    Tensors of seeds or values give a tensor of keys, one per entry.
    """
    key: int | Tensor = fold(fold(0, _wrap(seed)), _purpose(purpose))
    for value in values:
        key = fold(key, value)
    return key


@lru_cache(64)
def _first(seed: int, purpose: str) -> int | Tensor:
    return stream(seed, purpose)


def keys(seed: int | np.ndarray, purpose: str, rounds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """What :func:`stream` gives for clients in their rounds, on the host: a key each.

    Rounds in a column give a row for each.

    >>> found = keys(0, "batch", np.array([3, 3]), np.array([0, 7]))
    >>> found.tolist() == [stream(0, "batch", 3, 0), stream(0, "batch", 3, 7)]
    True
    """
    same = bool((rounds == rounds.flat[0]).all())  # as a rule, and one number is folded faster than many
    first: Word = _first(seed, purpose) if isinstance(seed, int) else stream(cast(Any, seed), purpose)
    folded: Word = fold(first, cast(Any, int(rounds.flat[0]) if same else rounds))
    return np.asarray(fold(folded, cast(Any, numbers)))


def words(key: int | Tensor, index: Tensor) -> Tensor:
    """The words of a stream at the given indices, 64 random bits each.

    ``key`` broadcasts against ``index``.
    """
    mixed: Tensor = _mix((index + 1) * _signed(_GOLDEN) + key)
    return mixed


def _index(count: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


def uniform(key: int | Tensor, count: int, device: torch.device | str | None = None) -> Tensor:
    """Numbers in [0, 1) with 53 random bits, in float64."""
    high: Tensor = _shift(words(key, _index(count, device)), 11)
    return high.to(torch.float64) * 2.0**-53


def normal(key: int | Tensor, count: int, device: torch.device | str | None = None) -> Tensor:
    """Standard normal numbers (Box-Muller on two words each), in float64."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(key, 0), count, device)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 1), count, device))


def integer(key: int | Tensor) -> int:
    """One non-negative 63-bit integer, to seed what only takes a seed."""
    return int(words(key, _index(1, None))[0]) & ((1 << 63) - 1)


def choose(key: int | Tensor, population: int, count: int) -> list[int]:
    """``count`` different numbers below ``population``, sorted; each subset is equally likely (Floyd).

    The cost depends on ``count`` alone, so that a cohort of a hundred out of a million clients costs a
    hundred draws.
    """
    if count >= population:
        return list(range(population))
    draws = _shift(words(key, _index(count, None)), 1).tolist()
    chosen: set[int] = set()
    for top, draw in zip(range(population - count, population), draws, strict=True):
        pick = draw % (top + 1)
        chosen.add(top if pick in chosen else pick)
    return sorted(chosen)


def shuffled(keys: Tensor, sizes: Tensor, places: Tensor) -> Tensor:
    """Endless epochs of every client's samples, shuffled anew in each: ``[clients, places]`` sample numbers.

    Row i holds a permutation of ``range(sizes[i])``, then another, and so on. Epoch and hash form one sort
    key, so one stable sort serves all clients and epochs. ``places`` counts 0, 1, 2, …; entries past the
    last whole epoch that fits have no meaning.
    """
    if keys.is_cuda and places.numel() <= FEW and HAS_TRITON:  # quicker to count than to sort
        from sartor.kernels import shuffle_triton

        found: Tensor = shuffle_triton.shuffled(keys, sizes, places.numel())
        return found
    place = places[None, :]
    size = sizes[:, None].clamp(min=1)
    epoch = place // size
    order = (epoch << 43) | _shift(words(keys[:, None], place), 21)
    rank = torch.argsort(order, dim=1, stable=True)
    return rank - epoch * size  # the j-th place of an epoch holds one of that epoch's places


def in_batches(
    keys: Tensor, sizes: Tensor, places: Tensor, start: Tensor, numbers: Tensor, batches: int, width: int
) -> Tensor:
    """What :func:`shuffled` gives, from each client's start on: [batches, clients, width].

    ``start`` is that of all clients and ``numbers`` says which these are.
    """
    if keys.is_cuda and places.numel() <= FEW and HAS_TRITON:
        from sartor.kernels import shuffle_triton

        found: Tensor = shuffle_triton.in_batches(keys, sizes, places.numel(), start, numbers, batches, width)
        return found
    return batched(start[numbers, None] + shuffled(keys, sizes, places), batches, width)


def batched(order: Tensor, batches: int, width: int) -> Tensor:
    """Of every client's order, [clients, places], so many batches one after the other."""
    first = order[:, : batches * width]
    return first.reshape(len(order), batches, width).transpose(0, 1).contiguous()
