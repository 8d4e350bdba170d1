"""The shuffle of every client's samples as a Triton kernel; ``random.py`` says what it computes.

Samples are put in order by counting for each how many come before it. That takes the square of their number,
and for a few hundred of them far less time than the steps of a sort. This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16


@triton.jit
def word_at(key, place):
    """The word of a key's stream at a place; see ``random.words``."""
    word = (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _sort_key(key, place, size):
    """Epoch and hash of a client's place in one number."""
    return ((place // size) << 43) | (word_at(key, place) >> 21).to(tl.int64)


@triton.jit(do_not_specialize=["places", "blocks"])
def _shuffle(keys, sizes, result, places, blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Find where a block of a client's places goes, and write down there which of them it is.

    How many places there are differs from cohort to cohort: it is compiled for a power of two of them.
    """
    client = (tl.program_id(0) // blocks).to(tl.int64)
    key = tl.load(keys + client)
    size = tl.maximum(tl.load(sizes + client), 1)
    mine = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    other = tl.arange(0, WIDTH).to(tl.int64)
    my_key = _sort_key(key, mine, size)[:, None]
    other_key = _sort_key(key, other, size)[None, :]
    first = (other_key < my_key) | ((other_key == my_key) & (other[None, :] < mine[:, None]))
    rank = tl.sum((first & (other < places)[None, :]).to(tl.int32), axis=1)
    tl.store(result + client * places + rank, mine - rank // size * size, mask=mine < places)


def shuffled(keys: Tensor, sizes: Tensor, places: int) -> Tensor:
    """See ``random.shuffled``."""
    result = torch.empty(len(keys), places, dtype=torch.int64, device=keys.device)
    blocks = triton.cdiv(places, BLOCK)
    if len(keys):
        with torch.cuda.device_of(keys):
            _shuffle[(len(keys) * blocks,)](
                keys.contiguous(), sizes.contiguous(), result,
                places, blocks, BLOCK, triton.next_power_of_2(places),
            )  # fmt: skip
    return result
