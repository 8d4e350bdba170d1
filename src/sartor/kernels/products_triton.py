"""Matrix products of many lanes as a Triton kernel: every lane (client) has operands of its own.

A library's batched product gives each lane few programs, and takes batches of samples that were copied
together before. This one cuts a lane into as many programs as fill the device, and may read the rows of one
operand where they lie, by number. No two programs add to one place, so results are the same every time, and a
lane's result does not depend on the other lanes.

A product of float32 numbers runs on tensor cores, which take tf32 (10 bits of 23): both operands are cut into
two such parts each, and three of the four products of parts are added up, which leaves an error like that of
float32 itself. This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn
from sartor.kernels.gpu import choices
from sartor.kernels.products import tiles_of


@triton.jit
def _parts(numbers):
    """Numbers as sums of two that tf32 holds: the nearest one, and the nearest one to what is left.

    Tensor cores leave out the last 13 bits of what they are given: half of their range, added first, rounds.
    """
    high = ((numbers.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    low = ((numbers - high).to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    return high, low


@triton.jit(do_not_specialize=["lanes"])
def _multiply(
    left,  # [lane, ROWS, DEPTH], or [*, DEPTH] where its rows are numbered
    right,  # [lane, DEPTH, COLUMNS], or [*, COLUMNS] where its rows are numbered
    result,  # [split, lane, ROWS, COLUMNS]
    numbers,  # [lane, ROWS] or [lane, DEPTH]: the rows of an operand
    bias,  # [lane, COLUMNS]
    positive,  # [lane, ROWS, COLUMNS]
    before,  # like a result that is placed
    rates,  # [lane]
    alpha,
    lanes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,  # terms per split
    LEFT_LANE: tl.constexpr,  # from one lane, row and column of an operand to the next
    LEFT_ROW: tl.constexpr,
    LEFT_COLUMN: tl.constexpr,
    RIGHT_LANE: tl.constexpr,
    RIGHT_ROW: tl.constexpr,
    RIGHT_COLUMN: tl.constexpr,
    NUMBERED: tl.constexpr,  # which operand's rows are numbered: 0 (none), 1 (left), 2 (right)
    BIAS_LANE: tl.constexpr,  # from one lane to the next; 0: there is no bias
    MASKED: tl.constexpr,  # whether the result is 0 where ``positive`` is not that
    CLIPPED: tl.constexpr,  # whether it is 0 where it is negative
    PLACED: tl.constexpr,  # from one lane to the next of a result that lies in longer rows; 0: it does not
    STEPS: tl.constexpr,  # whether it is what was there before, less a rate times the product
    RATED: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """result[row, column] = Σ left[row, k] · right[k, column] over a split's terms k, in every lane.

    SHARE is a multiple of TILE_DEPTH or all of DEPTH, so that no tile reaches into the next split.
    """
    wait_turn()
    ROW_TILES: tl.constexpr = (ROWS + TILE_ROWS - 1) // TILE_ROWS
    COLUMN_TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    program = tl.program_id(0)
    row = program % ROW_TILES * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = program // ROW_TILES % COLUMN_TILES * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    lane = (program // (ROW_TILES * COLUMN_TILES) % lanes).to(tl.int64)
    split = program // (ROW_TILES * COLUMN_TILES) // lanes
    row_there = row < ROWS
    column_there = column < COLUMNS
    if NUMBERED == 1:
        number = tl.load(numbers + lane * ROWS + row, mask=row_there, other=0)
        left_at = (number * LEFT_ROW)[:, None]
    else:
        left += lane * LEFT_LANE
        left_at = (row * LEFT_ROW)[:, None]
    if NUMBERED == 2:
        numbers += lane * DEPTH
    else:
        right += lane * RIGHT_LANE
    right_at = (column * RIGHT_COLUMN)[None, :]
    at = (row * COLUMNS)[:, None] + column[None, :]
    there = row_there[:, None] & column_there[None, :]
    if STEPS:  # early, as the sum takes less time than memory
        start = tl.load(before + lane * PLACED + at, mask=there, other=0.0)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for begin in range(0, SHARE, TILE_DEPTH):
        k = split * SHARE + begin + tl.arange(0, TILE_DEPTH)
        left_there = row_there[:, None]
        right_there = column_there[None, :]
        if DEPTH % SHARE != 0 or SHARE % TILE_DEPTH != 0:
            left_there = left_there & (k < DEPTH)[None, :]
            right_there = right_there & (k < DEPTH)[:, None]
        place = k
        if NUMBERED == 2:
            place = tl.load(numbers + k, mask=k < DEPTH, other=0)
        lefts = tl.load(left + left_at + (k * LEFT_COLUMN)[None, :], mask=left_there, other=0.0)
        rights = tl.load(right + (place * RIGHT_ROW)[:, None] + right_at, mask=right_there, other=0.0)
        if PRECISION == "parts":
            left_high, left_low = _parts(lefts)
            right_high, right_low = _parts(rights)
            # A sum of its own, as tensor cores do not round what they add to a larger number.
            part = tl.dot(left_low, right_high, input_precision="tf32")
            part = tl.dot(left_high, right_low, part, input_precision="tf32")
            total += tl.dot(left_high, right_high, part, input_precision="tf32")
        else:
            total = tl.dot(lefts, rights, total, input_precision=PRECISION)
    if PLACED > 0:
        result += lane * PLACED
    else:
        result += (split * lanes + lane) * (ROWS * COLUMNS)
    if BIAS_LANE > 0:
        total += tl.load(bias + lane * BIAS_LANE + column, mask=column_there, other=0.0)[None, :]
    if MASKED:
        allowed = tl.load(positive + lane * (ROWS * COLUMNS) + at, mask=there, other=0.0)
        total = tl.where(allowed <= 0, 0.0, total)
    if CLIPPED:
        total = tl.where(total < 0, 0.0, total)
    if STEPS:
        rate = alpha
        if RATED:
            rate *= tl.load(rates + lane)
        total = start - rate * total
    tl.store(result + at, total, mask=there)


@triton.jit(do_not_specialize=["lanes", "size", "columns", "bias_lane"])
def _complete(
    parts,  # [part, lane, *, columns]
    bias,  # [lane, columns]
    positive,  # [lane, *, columns]
    result,  # the same
    lanes,
    size,  # numbers of a lane
    columns,
    bias_lane,  # from one lane to the next
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Parts of a product added up, and what follows."""
    wait_turn()
    blocks = tl.cdiv(size, BLOCK)
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    at = lane * size + place
    total = tl.load(parts + at, mask=there, other=0.0)
    for _ in tl.static_range(1, PARTS):
        at += lanes.to(tl.int64) * size
        total += tl.load(parts + at, mask=there, other=0.0)
    at = lane * size + place
    if BIASED:
        total += tl.load(bias + lane * bias_lane + place % columns, mask=there, other=0.0)
    if MASKED:
        total = tl.where(tl.load(positive + at, mask=there, other=0.0) <= 0, 0.0, total)
    if CLIPPED:
        total = tl.where(total < 0, 0.0, total)
    tl.store(result + at, total, mask=there)


def completed(
    left: Tensor,
    right: Tensor,
    numbers: Tensor | None,
    of_right: bool,
    terms: int,
    bias: Tensor | None,
    positive: Tensor | None,
    clipped: bool,
) -> Tensor:
    """The product and what follows; see ``products.completed_product``."""
    if bias is not None and (bias.stride(1) != 1 or bias.stride(0) == 0):
        bias = bias.contiguous()
    positive = None if positive is None else positive.contiguous()
    if left.shape[-1] <= terms:
        return multiply(left, right, numbers, of_right, terms, bias, positive, clipped)[0]
    parts = multiply(left, right, numbers, of_right, terms)
    many, lanes, rows, columns = parts.shape
    result = parts.new_empty(lanes, rows, columns)
    size = rows * columns
    block = 256 if size * lanes < 2**18 else 1024
    with torch.cuda.device_of(left):
        _complete[(triton.cdiv(size, block) * lanes,)](
            parts, parts if bias is None else bias, parts if positive is None else positive, result, lanes,
            size, columns, 0 if bias is None else bias.stride(0),
            many, bias is not None, positive is not None, clipped, block, **EARLY,
        )  # fmt: skip
    return result


class Place(NamedTuple):
    """Where a product [L, M, N] goes: into rows, from a number on, which may be a step from others there."""

    rows: Tensor
    start: int
    before: Tensor | None
    alpha: float
    rates: Tensor | None


def multiply(
    left: Tensor,
    right: Tensor,
    numbers: Tensor | None,
    of_right: bool,
    terms: int,
    bias: Tensor | None = None,
    positive: Tensor | None = None,
    clipped: bool = False,
    place: Place | None = None,
) -> Tensor:
    """The product of every lane in parts of ``terms`` terms; see ``products.stacked_product``.

    What follows it, and a place for it, are for a single part.
    """
    left_strides, right_strides, numbered = left.stride(), right.stride(), 0
    lanes, rows = left.shape[:2]
    if numbers is not None:
        numbers = numbers.contiguous()
        if of_right:
            right_strides, numbered = (0, *right_strides), 2
        else:
            left_strides, numbered = (0, *left_strides), 1
            lanes, rows = numbers.shape
    depth, columns = left.shape[-1], right.shape[-1]
    parts = triton.cdiv(depth, terms)
    before, alpha, rates, ahead = None, 0.0, None, 0
    if place is None:
        result = left.new_empty(parts, lanes, rows, columns)
    else:
        whole, start, before, alpha, rates = place
        result, ahead = whole[:, start:], whole.stride(0)
        before = None if before is None else before[:, start:]
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "parts"
    along = right_strides[-2] == 1
    for tiles in choices(partial(tiles_of, rows, columns, depth, along, parts), lanes):
        programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
        with torch.cuda.device_of(left):
            _multiply[(programs * lanes * parts,)](
                left, right, result, left if numbers is None else numbers,
                left if bias is None else bias, left if positive is None else positive,
                left if before is None else before, left if rates is None else rates, alpha, lanes,
                rows, columns, depth, terms, *left_strides, *right_strides, numbered,
                0 if bias is None else bias.stride(0), positive is not None, clipped,
                ahead, before is not None, rates is not None, precision,
                tiles.rows, tiles.columns, tiles.depth,
                num_warps=tiles.warps, num_stages=tiles.stages, **EARLY,
            )  # fmt: skip
    return result
