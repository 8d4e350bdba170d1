"""Gradients of layers joined, or a step against them, as a Triton kernel; see ``descent.py``.

No two programs write to one place, so results are the same every time. This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.descent import Product
from sartor.kernels.products_triton import Place, multiply

AT_ONCE = 8
"""Layers of one launch."""
BLOCK = 2048
"""Numbers of one program, or terms of such."""


@triton.jit
def _layer(
    layer,
    w,
    result,
    block,
    lane,
    lanes,
    rate,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    PLACE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program's share of a layer, if this is a program for it."""
    FIRST: tl.constexpr = LAYOUT[7 * PLACE]  # the layer's programs, and its place in the vector
    BLOCKS: tl.constexpr = LAYOUT[7 * PLACE + 1]
    START: tl.constexpr = LAYOUT[7 * PLACE + 2]
    SIZE: tl.constexpr = LAYOUT[7 * PLACE + 3]
    TERMS: tl.constexpr = LAYOUT[7 * PLACE + 4]
    LANE: tl.constexpr = LAYOUT[7 * PLACE + 5]  # from one lane and term to the next
    TERM: tl.constexpr = LAYOUT[7 * PLACE + 6]  # 0: terms have all lanes each
    if (block >= FIRST) & (block < FIRST + BLOCKS):
        layer += lane * LANE
        if TERMS == 1:
            at = (block - FIRST) * 2048 + tl.arange(0, 2048)
            there = at < SIZE
            total = tl.load(layer + at, mask=there, other=0.0)
        else:
            at = (block - FIRST) * 128 + tl.arange(0, 128)
            ahead = TERM
            if TERM == 0:
                ahead = lanes * LANE
            there = at < SIZE
            total = tl.zeros((128,), tl.float32)
            for begin in range(0, TERMS, 16):
                term = (begin + tl.arange(0, 16)).to(tl.int64)
                some = (term < TERMS)[:, None] & there[None, :]
                total += tl.sum(
                    tl.load(layer + (term * ahead)[:, None] + at[None, :], mask=some, other=0.0), 0
                )
        place = lane * WIDTH + START + at
        if STEPS:
            total = tl.load(w + place, mask=there, other=0.0) - rate * total
        tl.store(result + place, total, mask=there)


@triton.jit(do_not_specialize=["lanes"])
def _descend(
    w,  # [lane, WIDTH]
    result,  # the same
    rates,  # [lane]
    alpha,
    blocks,
    lanes,
    layer_0, layer_1, layer_2, layer_3, layer_4, layer_5, layer_6, layer_7,  # [lane, term, number]
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    LAYERS: tl.constexpr,
    STEPS: tl.constexpr,
    RATED: tl.constexpr,
):  # fmt: skip
    """result = w - rate · Σ terms at the places of some layers; Σ terms alone without STEPS."""
    block = tl.program_id(0) % blocks
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    rate = alpha
    if RATED:
        rate *= tl.load(rates + lane)
    _layer(layer_0, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 0, STEPS)
    if LAYERS > 1:
        _layer(layer_1, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 1, STEPS)
    if LAYERS > 2:
        _layer(layer_2, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 2, STEPS)
    if LAYERS > 3:
        _layer(layer_3, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 3, STEPS)
    if LAYERS > 4:
        _layer(layer_4, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 4, STEPS)
    if LAYERS > 5:
        _layer(layer_5, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 5, STEPS)
    if LAYERS > 6:
        _layer(layer_6, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 6, STEPS)
    if LAYERS > 7:
        _layer(layer_7, w, result, block, lane, lanes, rate, WIDTH, LAYOUT, 7, STEPS)


def descended(
    w: Tensor | None, layers: Sequence[Tensor], made: Sequence[Product], alpha: float, rates: Tensor | None
) -> Tensor:
    """See ``descent.descended``."""
    layers = [layer if layer.stride(2) == 1 else layer.contiguous() for layer in layers]
    w, rates = (value if value is None else value.contiguous() for value in (w, rates))
    sizes = [layer.shape[2] for layer in layers]
    for product in made:
        sizes.insert(product.place, product.size)
    lanes, starts = made[0].lanes if made else len(layers[0]), [0, *itertools.accumulate(sizes)]
    result = (made[0].left if made else layers[0]).new_empty(lanes, starts[-1])
    for left, right, numbers, of_right, place in made:
        goes = Place(result, starts[place], w, alpha, rates)
        multiply(left, right, numbers, of_right, left.shape[-1], place=goes)
    there = [place for place in range(len(sizes)) if all(place != product.place for product in made)]
    for begin in range(0, len(layers), AT_ONCE):
        some = layers[begin : begin + AT_ONCE]
        layout, blocks = [], 0
        for layer, place in zip(some, there[begin:], strict=False):
            _, terms, size = layer.shape
            own = triton.cdiv(size, BLOCK if terms == 1 else 128)
            ahead = 0 if terms == 1 or layer.stride(1) == lanes * layer.stride(0) else layer.stride(1)
            layout += [blocks, own, starts[place], size, terms, layer.stride(0), ahead]
            blocks += own
        others = [some[0]] * (AT_ONCE - len(some))
        with torch.cuda.device_of(result):
            _descend[(blocks * lanes,)](
                result if w is None else w, result, result if rates is None else rates, alpha, blocks, lanes,
                *some, *others, starts[-1], tuple(layout), len(some), w is not None, rates is not None,
            )  # fmt: skip
    return result
