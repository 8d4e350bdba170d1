"""What stands in the middle of every column's weighted numbers, as a Triton kernel; see ``robust/orders.py``.

A number's place among the others of its column is found by counting the weight that comes before it: all of
them are read once and none is moved. That takes the square of the rows, of which there are few, and no host
has to know the weights. This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn

NUMBERS = 2048
"""Numbers of one program, of all rows."""
EPSILON = tl.constexpr(1e-6)
"""Weights that add up to a half within this are taken to do so exactly."""


@triton.jit(do_not_specialize=["n", "size"])
def _order(
    rows,  # [n, size], each ``ahead`` of the one before
    weights,  # [n], which add up to 1; one of weight 0 is not there
    result,  # [size]
    n,
    size,
    ahead,
    low_edge,
    high_edge,
    near,
    KIND: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The median of a block of columns, the mean between two edges of the weight, or that near the median."""
    wait_turn()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = tl.arange(0, N)
    share = tl.load(weights + own, mask=own < n, other=0.0)
    there = (share > 0)[:, None] & (at < size)[None, :]
    x = tl.load(rows + own.to(tl.int64)[:, None] * ahead + at[None, :], mask=there, other=0.0)
    before = tl.zeros((N, BLOCK), tl.float32)
    up_to = tl.zeros((N, BLOCK), tl.float32)
    row = rows + at
    for other in range(n):
        y = tl.load(row, mask=at < size, other=0.0)[None, :]
        row += ahead
        weight = tl.load(weights + other)
        first = (y < x) | ((y == x) & (other < own)[:, None])
        if KIND == "trimmed":
            before += tl.where(first, weight, 0.0)
        up_to += tl.where(first | (other == own)[:, None], weight, 0.0)
    low = tl.min(tl.where(there & (up_to >= 0.5 - EPSILON), x, float("inf")), 0)
    high = tl.min(tl.where(there & (up_to > 0.5 + EPSILON), x, float("inf")), 0)
    found = high - (high - low) * 0.5
    if KIND == "trimmed":
        kept = tl.minimum(tl.maximum(up_to, low_edge), high_edge)
        kept -= tl.minimum(tl.maximum(before, low_edge), high_edge)
        inside = tl.where(there & (kept > 0), kept * (x - low[None, :]), 0.0)
        found = low + tl.sum(inside, 0) / (high_edge - low_edge)
    if KIND == "near":
        apart = tl.where(there, tl.abs(x - found[None, :]), float("inf"))
        nearer = tl.zeros((N, BLOCK), tl.int32)
        row = rows + at
        for other in range(n):
            y = tl.load(row, mask=at < size, other=0.0)
            row += ahead
            far = tl.where(tl.load(weights + other) > 0, tl.abs(y - found), float("inf"))[None, :]
            nearer += ((far < apart) | ((far == apart) & (other < own)[:, None])).to(tl.int32)
        inside = tl.where(there & (nearer < near), x - found[None, :], 0.0)
        found += tl.sum(inside, 0) / near
    tl.store(result + at, found, mask=at < size)


def _made(rows: Tensor, weights: Tensor, kind: str, edges: tuple[float, float], near: int) -> Tensor:
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (n, size), result = rows.shape, rows.new_empty(rows.shape[1])
    width = max(2, triton.next_power_of_2(n))
    block = NUMBERS // width
    with torch.cuda.device_of(rows):
        _order[(triton.cdiv(size, block),)](
            rows, weights.float().contiguous(), result, n, size, rows.stride(0), *edges, near,
            kind, width, block, **EARLY,
        )  # fmt: skip
    return result


def median(rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted median of every column."""
    return _made(rows, weights, "median", (0.0, 1.0), 1)


def trimmed_mean(rows: Tensor, weights: Tensor, share: float) -> Tensor:
    """The weighted mean of every column without ``share`` of the weight at either end."""
    return _made(rows, weights, "trimmed", (share, 1 - share), 1)


def mean_near_median(rows: Tensor, weights: Tensor, near: int) -> Tensor:
    """The plain mean of so many numbers of every column, those nearest to its median."""
    return _made(rows, weights, "near", (0.0, 1.0), near)
