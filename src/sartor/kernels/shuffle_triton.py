"""The shuffle of every client's samples as a Triton kernel; ``random.py`` says what it computes.

Samples are put in order by counting for each how many come before it. That takes the square of their number,
and for up to some thousands of them far less time than a sort and what comes before it. This module needs
Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn

BLOCK = 16
AT_ONCE = 1024
"""Others that a place is compared with at once: for more it need not be compiled anew."""


@triton.jit
def word_at(key, place):
    """The word of a key's stream at a place; see ``random.words``."""
    word = (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _divided(number, by):
    """How often one whole number goes into another, neither above 4,096: exact, and in a few instructions.

    What rounding adds or takes away is far less than the half that lies between a quotient and the next.
    """
    return ((number.to(tl.float32) + 0.5) * (1.0 / by.to(tl.float32))).to(tl.int32)


@triton.jit
def _order(key, place, epoch):
    """Epoch and hash in one number, by which places are put in order; of two alike the first comes first."""
    return (epoch.to(tl.int64) << 43) | (word_at(key, place) >> 21).to(tl.int64)


@triton.jit(do_not_specialize=["places", "blocks", "clients", "rows", "width"])
def _shuffle(
    keys,
    sizes,
    start,  # where the samples of every client lie, by its number
    numbers,
    result,  # [rows, client, width]
    places,
    blocks,
    clients,
    rows,
    width,
    STARTED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find where a block of a client's places goes, and write down there which of them it is.

    How many places there are differs from cohort to cohort: it is compiled for a power of two of them, and
    for more than ``AT_ONCE`` but once.
    """
    wait_turn()
    client = tl.program_id(0) // blocks
    key = tl.load(keys + client)
    # A larger client has one epoch here all the same.
    size = tl.minimum(tl.maximum(tl.load(sizes + client), 1), places).to(tl.int32)
    mine = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    epoch = _divided(mine, size)
    own = _order(key, mine, epoch)
    rank = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, places, WIDTH):
        other = begin + tl.arange(0, WIDTH)
        before = tl.where(other < places, _order(key, other, _divided(other, size)), 0x7FFFFFFFFFFFFFFF)
        alike = (before[None, :] == own[:, None]) & (other[None, :] < mine[:, None])
        rank += tl.sum(((before[None, :] < own[:, None]) | alike).to(tl.int32), axis=1)
    sample = (mine - epoch * size).to(tl.int64)
    if STARTED:
        sample += tl.load(start + tl.load(numbers + client))
    row = _divided(rank, width)
    at = (row * clients + client).to(tl.int64) * width + (rank - row * width)
    tl.store(result + at, sample, mask=(mine < places) & (row < rows))


def shuffled(keys: Tensor, sizes: Tensor, places: int) -> Tensor:
    """See ``random.shuffled``."""
    return _launched(keys, sizes, keys, keys, places, 1, places, False)[0]


def in_batches(
    keys: Tensor, sizes: Tensor, places: int, start: Tensor, numbers: Tensor, rows: int, width: int
) -> Tensor:
    """See ``random.in_batches``."""
    return _launched(keys, sizes, start, numbers, places, rows, width, True)


def _launched(
    keys: Tensor,
    sizes: Tensor,
    start: Tensor,
    numbers: Tensor,
    places: int,
    rows: int,
    width: int,
    started: bool,
) -> Tensor:
    clients, blocks = len(keys), triton.cdiv(places, BLOCK)
    result = torch.empty(rows, clients, width, dtype=torch.int64, device=keys.device)
    # Every warp finds out the order of all places by itself, so there are as few as can hold them.
    size = min(AT_ONCE, triton.next_power_of_2(places))
    if clients:
        with torch.cuda.device_of(keys):
            _shuffle[(clients * blocks,)](
                keys.contiguous(), sizes.contiguous(), start.contiguous(), numbers.contiguous(), result,
                places, blocks, clients, rows, width, started, BLOCK, size,
                num_warps=max(1, size // 256), **EARLY,
            )  # fmt: skip
    return result
