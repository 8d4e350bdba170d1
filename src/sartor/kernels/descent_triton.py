"""Gradients of layers joined, or a step against them, as a Triton kernel; see ``descent.py``.

No two programs write to one place, so results are the same every time. This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.descent import Product
from sartor.kernels.early_triton import EARLY, wait_turn
from sartor.kernels.products_triton import Place, multiply

AT_ONCE = 8
"""Layers of one launch."""
BLOCK = 2048
"""Numbers of one program for a layer of one term."""
COLUMNS = 128
"""Numbers of one program for a layer of several."""


@triton.jit
def _whole(layer, w, result, block, size, rate, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """One program's numbers of a layer that is there as it is."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(layer + at, mask=at < size, other=0.0)
    if STEPS:
        total = tl.load(w + at, mask=at < size, other=0.0) - rate * total
    tl.store(result + at, total, mask=at < size)


@triton.jit
def _summed(
    layer, w, result, block, size, terms, ahead, rate, STEPS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program's numbers of a layer that is a sum."""
    at = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, terms, 16):
        term = begin + tl.arange(0, 16).to(tl.int64)
        some = (term < terms)[:, None] & (at < size)[None, :]
        more = tl.load(layer + (term * ahead)[:, None] + at[None, :], mask=some, other=0.0)
        total += tl.sum(more, 0)
    if STEPS:
        total = tl.load(w + at, mask=at < size, other=0.0) - rate * total
    tl.store(result + at, total, mask=at < size)


@triton.jit
def _layer(
    layer, w, result, layout, block, lane, rate, width, PLACE: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program's share of a layer, if this is a program for it."""
    first = tl.load(layout + 7 * PLACE)
    if (block >= first) & (block < tl.load(layout + 7 * PLACE + 1)):
        start = tl.load(layout + 7 * PLACE + 2)
        size = tl.load(layout + 7 * PLACE + 3)
        terms = tl.load(layout + 7 * PLACE + 4)
        layer += lane * tl.load(layout + 7 * PLACE + 5)
        ahead = tl.load(layout + 7 * PLACE + 6)
        place = lane * width + start
        if terms == 1:
            _whole(layer, w + place, result + place, block - first, size, rate, STEPS, BLOCK)
        else:
            _summed(layer, w + place, result + place, block - first, size, terms, ahead, rate, STEPS, COLUMNS)


@triton.jit(do_not_specialize=["blocks", "width"])
def _descend(
    w,  # [lane, width]
    result,  # the same
    rates,  # [lane]
    layout,  # of each layer: its first program, and behind its last; its start and size in the vector; its
    # terms; from one lane, and from one term, to the next
    alpha,
    blocks,
    width,
    layer_0, layer_1, layer_2, layer_3, layer_4, layer_5, layer_6, layer_7,  # [lane, term, number]
    LAYERS: tl.constexpr,  # how many there are
    STEPS: tl.constexpr,
    RATED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """result = w - rate · Σ terms at the places of some layers; Σ terms alone without STEPS."""
    wait_turn()
    block = tl.program_id(0) % blocks
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    rate = alpha
    if RATED:
        rate *= tl.load(rates + lane)
    _layer(layer_0, w, result, layout, block, lane, rate, width, 0, STEPS, BLOCK, COLUMNS)
    if LAYERS > 1:
        _layer(layer_1, w, result, layout, block, lane, rate, width, 1, STEPS, BLOCK, COLUMNS)
    if LAYERS > 2:
        _layer(layer_2, w, result, layout, block, lane, rate, width, 2, STEPS, BLOCK, COLUMNS)
    if LAYERS > 3:
        _layer(layer_3, w, result, layout, block, lane, rate, width, 3, STEPS, BLOCK, COLUMNS)
    if LAYERS > 4:
        _layer(layer_4, w, result, layout, block, lane, rate, width, 4, STEPS, BLOCK, COLUMNS)
    if LAYERS > 5:
        _layer(layer_5, w, result, layout, block, lane, rate, width, 5, STEPS, BLOCK, COLUMNS)
    if LAYERS > 6:
        _layer(layer_6, w, result, layout, block, lane, rate, width, 6, STEPS, BLOCK, COLUMNS)
    if LAYERS > 7:
        _layer(layer_7, w, result, layout, block, lane, rate, width, 7, STEPS, BLOCK, COLUMNS)


@lru_cache(maxsize=4096)
def _there(layout: tuple[int, ...], device: torch.device) -> Tensor:
    """A layout on the device: a graph that is captured cannot bring it there, and finds it."""
    return torch.tensor(layout, device=device)


def descended(
    w: Tensor | None,
    layers: Sequence[Tensor],
    made: Sequence[Product],
    alpha: float,
    rates: Tensor | None,
    into: Tensor | None = None,
) -> Tensor:
    """See ``descent.computed``: a program reads of ``w`` just what it writes to the result."""
    sizes = [layer.shape[2] for layer in layers]
    for product in made:
        sizes.insert(product.place, product.size)
    lanes, starts = made[0].lanes if made else len(layers[0]), [0, *itertools.accumulate(sizes)]
    result = into
    if result is None:
        result = (made[0].left if made else layers[0]).new_empty(lanes, starts[-1])
    place_products(
        result, w, [product._replace(place=starts[product.place]) for product in made], alpha, rates
    )
    taken = {product.place for product in made}
    others = [start for place, start in enumerate(starts[:-1]) if place not in taken]
    place_layers(result, w, layers, others, alpha, rates)
    return result


def place_products(
    result: Tensor, w: Tensor | None, made: Sequence[Product], alpha: float, rates: Tensor | None
) -> None:
    """Put products, or steps against them, where their places are: where they begin in the vector."""
    w, rates = (value if value is None else value.contiguous() for value in (w, rates))
    for left, right, numbers, of_right, start in made:
        goes = Place(result, start, w, alpha, rates)
        multiply(left, right, numbers, of_right, left.shape[-1], place=goes)


def place_layers(
    result: Tensor,
    w: Tensor | None,
    layers: Sequence[Tensor],
    starts: Sequence[int],
    alpha: float,
    rates: Tensor | None,
) -> None:
    """Put sums of layers' terms, or steps against them, where they begin in the vector."""
    layers = [layer if layer.stride(2) == 1 else layer.contiguous() for layer in layers]
    w, rates = (value if value is None else value.contiguous() for value in (w, rates))
    lanes, width = result.shape
    for begin in range(0, len(layers), AT_ONCE):
        some, blocks = layers[begin : begin + AT_ONCE], 0
        layout = [0] * (7 * AT_ONCE)
        for number, (layer, start) in enumerate(zip(some, starts[begin:], strict=False)):
            _, terms, size = layer.shape
            end = blocks + triton.cdiv(size, BLOCK if terms == 1 else COLUMNS)
            layout[7 * number : 7 * number + 7] = blocks, end, start, size, terms, *layer.stride()[:2]
            blocks = end
        others = [some[0]] * (AT_ONCE - len(some))
        with torch.cuda.device_of(result):
            _descend[(blocks * lanes,)](
                result if w is None else w, result, result if rates is None else rates,
                _there(tuple(layout), result.device), alpha, blocks, width, *some, *others,
                len(some), w is not None, rates is not None, BLOCK, COLUMNS, **EARLY,
            )  # fmt: skip
