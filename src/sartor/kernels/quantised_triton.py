"""Codes of few bits for rows of numbers, and numbers of codes, as Triton kernels; see ``quantised.py``.

They give what the single operations give, to the bit: division rounds as it does there. This module needs
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
from sartor.kernels.shuffle_triton import word_at

NUMBERS = 1024
"""Numbers of one program."""


@triton.jit
def _divided(x, y):
    """x / y, rounded to the nearest; of single precision Triton has quicker ways as well."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    return x / y


@triton.jit(do_not_specialize=["size", "blocks"])
def _quantise(
    x,  # [lane, size]
    scale,  # [lane, blocks]
    keys,  # [lane]
    codes,  # [lane, bytes]
    size,
    blocks,
    block,
    most,
    programs,
    BITS: tl.constexpr,
    EACH: tl.constexpr,
    BYTES: tl.constexpr,
    SIGNS: tl.constexpr,
):
    """The codes of some of a row's numbers."""
    wait_turn()
    lane = (tl.program_id(0) // programs).to(tl.int64)
    byte = tl.program_id(0) % programs * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, EACH)[None, :]
    at = byte[:, None] * EACH + place
    value = tl.load(x + lane * size + at, mask=at < size, other=0.0)
    if SIGNS:
        code = (value >= 0).to(tl.int32)
    else:
        held = tl.load(scale + lane * blocks + at // block, mask=at < size, other=1.0)
        ratio = _divided(value * most, tl.where(held > 0, held, 1.0))
        low = tl.floor(ratio)
        quarter = (size + 3) // 4
        word = word_at(tl.load(keys + lane), (at % quarter).to(tl.int64))
        chance = ((word >> (at // quarter * 16).to(tl.uint64)) & 0xFFFF).to(tl.int32).to(value.dtype)
        level = low + ((chance + 0.5) * 0.0000152587890625 < ratio - low).to(value.dtype)  # times 2⁻¹⁶
        level = tl.minimum(tl.maximum(level, -most), most)
        code = (tl.where(ratio == ratio, level, 0.0) + most).to(tl.int32)
    code = tl.where(at < size, code, 0)
    whole = tl.sum(code << (place * BITS), 1)
    tl.store(codes + lane * tl.cdiv(size, EACH) + byte, whole.to(codes.dtype.element_ty), byte * EACH < size)


@triton.jit(do_not_specialize=["size", "blocks"])
def _restore(
    codes,  # [lane, bytes]
    scale,  # [lane, blocks]
    result,  # [lane, size]
    size,
    blocks,
    block,
    most,
    programs,
    BITS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNS: tl.constexpr,
):
    """Some of a row's numbers."""
    wait_turn()
    lane = (tl.program_id(0) // programs).to(tl.int64)
    at = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(codes + lane * tl.cdiv(size, EACH) + at // EACH, mask=at < size, other=0).to(tl.int32)
    code = (byte >> (at % EACH * BITS)) & ((1 << BITS) - 1)
    held = tl.load(scale + lane * blocks + at // block, mask=at < size, other=1.0)
    if SIGNS:
        value = tl.where(code > 0, held, -held)
    else:
        value = _divided((code.to(held.dtype) - most) * held, tl.zeros_like(held) + most)
    tl.store(result + lane * size + at, value, mask=at < size)


def quantised(x: Tensor, scale: Tensor, keys: Tensor, most: int, block: int, bits: int) -> Tensor:
    """See ``quantised.quantised``."""
    x, scale, keys, each = x.contiguous(), scale.contiguous(), keys.contiguous(), max(1, 8 // bits)
    (lanes, size), kind = x.shape, torch.int16 if bits == 16 else torch.uint8
    codes = torch.empty(lanes, triton.cdiv(size, each), dtype=kind, device=x.device)
    programs = triton.cdiv(size, NUMBERS)
    with torch.cuda.device_of(x):
        _quantise[(programs * lanes,)](
            x, scale, keys, codes, size, scale.shape[1], block, float(most), programs,
            bits, each, NUMBERS // each, most == 0, **EARLY,
        )  # fmt: skip
    return codes


def restored(codes: Tensor, scale: Tensor, size: int, most: int, block: int, bits: int) -> Tensor:
    """See ``quantised.restored``."""
    codes, scale, each = codes.contiguous(), scale.contiguous(), max(1, 8 // bits)
    lanes, programs = len(codes), triton.cdiv(size, NUMBERS)
    result = torch.empty(lanes, size, dtype=scale.dtype, device=scale.device)
    with torch.cuda.device_of(scale):
        _restore[(programs * lanes,)](
            codes, scale, result, size, scale.shape[1], block, float(most), programs,
            bits, each, NUMBERS, most == 0, **EARLY,
        )  # fmt: skip
    return result
