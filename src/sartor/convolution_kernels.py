"""The convolutions of many lanes as Triton kernels: every lane (client) has images and weights of its own.

Each lane is a matrix product whose one operand, the unfolded image, is never stored: its entries are read from the image
when they are needed. An image's position (sample, row, column) is always the last axis of a tile, because neighbouring
positions are neighbours in memory. No kernel adds from two programs to one place, so results are the same every time, and
a lane's result does not depend on the other lanes.

This module needs Triton; ``convolution.py`` imports it when a convolution first runs on CUDA.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]


class Tiles(NamedTuple):
    """How a kernel cuts its product: ``rows`` × ``columns`` of the result per program, ``depth`` summed at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _convolve(
    image,  # [lane, sample, CHANNELS, HEIGHT, WIDTH]
    weight,  # [lane, OUT, KERNEL_HEIGHT, KERNEL_WIDTH, CHANNELS]
    bias,  # [lane, OUT]
    result,  # [lane, sample, OUT, OUT_HEIGHT, OUT_WIDTH]
    positions,  # samples × OUT_HEIGHT × OUT_WIDTH
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STEP_HEIGHT: tl.constexpr,  # rows of the image from one output row to the next
    STEP_WIDTH: tl.constexpr,
    SPREAD_HEIGHT: tl.constexpr,  # the image is read as if SPREAD - 1 rows of zeros followed each of its rows
    SPREAD_WIDTH: tl.constexpr,
    PAD_HEIGHT: tl.constexpr,
    PAD_WIDTH: tl.constexpr,
    BORDERED: tl.constexpr,  # whether a window may reach over the image's border
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """result[out, position] = Σ_k weight[out, k] · image[k at position], with k = (tap of the window, channel)."""
    SIZE: tl.constexpr = KERNEL_HEIGHT * KERNEL_WIDTH * CHANNELS
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    PIXELS: tl.constexpr = HEIGHT * WIDTH
    ROW_BLOCKS: tl.constexpr = (OUT + ROWS - 1) // ROWS
    column_blocks = tl.cdiv(positions, COLUMNS)
    program = tl.program_id(0)
    out = program % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    position = program // ROW_BLOCKS % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    lane = (program // ROW_BLOCKS // column_blocks).to(tl.int64)
    real = position < positions
    sample = position // AREA
    place = position % AREA
    top = place // OUT_WIDTH * STEP_HEIGHT - PAD_HEIGHT
    left = place % OUT_WIDTH * STEP_WIDTH - PAD_WIDTH
    image += lane * (positions // AREA) * (CHANNELS * PIXELS)
    weight += lane * (OUT * SIZE)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIZE, DEPTH):
        k = start + tl.arange(0, DEPTH)
        if CHANNELS % DEPTH == 0:
            # One tap for all of this tile: whether it is inside the image is a question of the position alone.
            tap = start // CHANNELS + tl.zeros((1,), tl.int32)
            channel = start % CHANNELS + tl.arange(0, DEPTH)
        else:
            tap = k // CHANNELS
            channel = k % CHANNELS
        down = (tap // KERNEL_WIDTH)[:, None]
        right = (tap % KERNEL_WIDTH)[:, None]
        if SPREAD_HEIGHT * SPREAD_WIDTH == 1:
            at = (sample * (CHANNELS * PIXELS) + top * WIDTH + left)[None, :] + (down * WIDTH + right)
        else:
            y = (top[None, :] + down) // SPREAD_HEIGHT
            x = (left[None, :] + right) // SPREAD_WIDTH
            at = (sample * (CHANNELS * PIXELS))[None, :] + y * WIDTH + x
        inside = real[None, :]
        if BORDERED:
            y = top[None, :] + down
            x = left[None, :] + right
            inside = inside & (y >= 0) & (y < HEIGHT * SPREAD_HEIGHT) & (x >= 0) & (x < WIDTH * SPREAD_WIDTH)
            if SPREAD_HEIGHT > 1:
                inside = inside & (y % SPREAD_HEIGHT == 0)
            if SPREAD_WIDTH > 1:
                inside = inside & (x % SPREAD_WIDTH == 0)
        kept = out[:, None] < OUT
        if SIZE % DEPTH != 0:
            inside = inside & (k < SIZE)[:, None]
            kept = kept & (k < SIZE)[None, :]
        at = at + (channel * PIXELS)[:, None]
        pixels = tl.load(image + at, mask=inside & (k >= 0)[:, None], other=0.0)
        weights = tl.load(weight + out[:, None] * SIZE + k[None, :], mask=kept, other=0.0)
        total = tl.dot(weights, pixels, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + lane * OUT + out, mask=out < OUT, other=0.0)[:, None]
    result += lane * positions * OUT
    at = (sample * (OUT * AREA) + place)[None, :] + (out * AREA)[:, None]
    tl.store(result + at, total, mask=(out < OUT)[:, None] & real[None, :])


@triton.jit
def _correlate(
    image,  # [lane, sample, CHANNELS, HEIGHT, WIDTH]
    gradient,  # [lane, sample, OUT, OUT_HEIGHT, OUT_WIDTH]
    result,  # [split, lane, OUT, CHANNELS, KERNEL_HEIGHT, KERNEL_WIDTH]
    lanes,
    positions,  # samples × OUT_HEIGHT × OUT_WIDTH
    share,  # positions per split
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STEP_HEIGHT: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    PAD_HEIGHT: tl.constexpr,
    PAD_WIDTH: tl.constexpr,
    BORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """result[out, k] = Σ over a split's positions of gradient[out, position] · image[k at position], k = (channel, tap)."""
    SIZE: tl.constexpr = CHANNELS * KERNEL_HEIGHT * KERNEL_WIDTH
    TAPS: tl.constexpr = KERNEL_HEIGHT * KERNEL_WIDTH
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    PIXELS: tl.constexpr = HEIGHT * WIDTH
    ROW_BLOCKS: tl.constexpr = (OUT + ROWS - 1) // ROWS
    COLUMN_BLOCKS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    out = program % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    k = program // ROW_BLOCKS % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    lane = (program // (ROW_BLOCKS * COLUMN_BLOCKS) % lanes).to(tl.int64)
    split = program // (ROW_BLOCKS * COLUMN_BLOCKS) // lanes
    down = (k % TAPS // KERNEL_WIDTH)[:, None]
    right = (k % TAPS % KERNEL_WIDTH)[:, None]
    shift = (k // TAPS * PIXELS)[:, None] + down * WIDTH + right
    samples = positions // AREA
    image += lane * samples * (CHANNELS * PIXELS)
    gradient += lane * samples * (OUT * AREA)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, positions), DEPTH):
        position = start + tl.arange(0, DEPTH)
        real = (position < positions)[None, :]
        sample = position // AREA
        place = position % AREA
        top = place // OUT_WIDTH * STEP_HEIGHT - PAD_HEIGHT
        left = place % OUT_WIDTH * STEP_WIDTH - PAD_WIDTH
        at = (sample * (OUT * AREA) + place)[None, :] + (out * AREA)[:, None]
        gradients = tl.load(gradient + at, mask=(out < OUT)[:, None] & real, other=0.0)
        inside = (k < SIZE)[:, None] & real
        if BORDERED:
            y = top[None, :] + down
            x = left[None, :] + right
            inside = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        at = (sample * (CHANNELS * PIXELS) + top * WIDTH + left)[None, :] + shift
        pixels = tl.load(image + at, mask=inside, other=0.0)
        total = tl.dot(gradients, tl.trans(pixels), total, input_precision=PRECISION)
    result += (split * lanes + lane) * (OUT * SIZE)
    kept = (out < OUT)[:, None] & (k < SIZE)[None, :]
    tl.store(result + out[:, None] * SIZE + k[None, :], total, mask=kept)
