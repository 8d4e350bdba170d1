"""The convolutions of many lanes as Triton kernels: every lane (client) has images and weights of its own.

Each lane is a matrix product whose one operand, the unfolded image, is never stored: its entries are read
from the image when they are needed. Threads go along an image's positions (sample, row, column), because
those are neighbours in memory. No two programs add to one place, so results are the same every time, and
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
    """How a product is cut: ``rows`` × ``columns`` of the result per program, ``depth`` terms at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _along(at, zero, AXIS: tl.constexpr):
    """Tell the compiler to lay neighbouring threads along the axis of positions in a tile of places.

    The hint says that two neighbours lie side by side, which is not so at the end of a row. ``zero`` is a
    number that the compiler does not know: it leaves no place known to be even, so two are never read as one.
    """
    return tl.max_contiguous(at + zero, [1, 2] if AXIS == 1 else [2, 1])


@triton.jit(do_not_specialize=["zero"])
def _convolve(
    image,  # [lane, sample, CHANNELS, HEIGHT, WIDTH]
    weight,  # [lane, OUT, KERNEL_HEIGHT, KERNEL_WIDTH, CHANNELS]
    bias,  # [lane, OUT]
    result,  # [lane, sample, OUT, OUT_HEIGHT, OUT_WIDTH]
    positions,  # samples × OUT_HEIGHT × OUT_WIDTH
    zero,
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
    TURNED: tl.constexpr,  # whether the weights are turned round
    BORDERED: tl.constexpr,  # whether a window may reach over the image's border
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """result[out, position] = Σ_k weight[out, k] · image[k at position], k = (tap of the window, channel)."""
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
            # One tap for the whole tile: whether it lies inside the image depends on the position alone.
            channel = start % CHANNELS + tl.arange(0, DEPTH)
            down = start // CHANNELS // KERNEL_WIDTH
            right = start // CHANNELS % KERNEL_WIDTH
        else:
            channel = k % CHANNELS
            down = (k // CHANNELS // KERNEL_WIDTH)[:, None]
            right = (k // CHANNELS % KERNEL_WIDTH)[:, None]
        if TURNED:
            down = KERNEL_HEIGHT - 1 - down
            right = KERNEL_WIDTH - 1 - right
        y = top[None, :] + down
        x = left[None, :] + right
        inside = real[None, :]
        if BORDERED:
            inside = inside & (y >= 0) & (y < HEIGHT * SPREAD_HEIGHT) & (x >= 0) & (x < WIDTH * SPREAD_WIDTH)
        if SPREAD_HEIGHT * SPREAD_WIDTH == 1:
            at = (sample * (CHANNELS * PIXELS) + top * WIDTH + left)[None, :] + (down * WIDTH + right)
        else:
            inside = inside & (y % SPREAD_HEIGHT == 0) & (x % SPREAD_WIDTH == 0)
            at = (sample * (CHANNELS * PIXELS))[None, :] + y // SPREAD_HEIGHT * WIDTH + x // SPREAD_WIDTH
        kept = out[:, None] < OUT
        if SIZE % DEPTH != 0:
            inside = inside & (k < SIZE)[:, None]
            kept = kept & (k < SIZE)[None, :]
        at = _along(at + (channel * PIXELS)[:, None], zero, 1)
        pixels = tl.load(image + at, mask=inside, other=0.0)
        weights = tl.load(weight + out[:, None] * SIZE + k[None, :], mask=kept, other=0.0)
        total = tl.dot(weights, pixels, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + lane * OUT + out, mask=out < OUT, other=0.0)[:, None]
    result += lane * positions * OUT
    at = _along((sample * (OUT * AREA) + place)[None, :] + (out * AREA)[:, None], zero, 1)
    tl.store(result + at, total, mask=(out < OUT)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["zero"])
def _correlate(
    image,  # [lane, sample, CHANNELS, HEIGHT, WIDTH]
    gradient,  # [lane, sample, OUT, OUT_HEIGHT, OUT_WIDTH]
    result,  # [split, lane, OUT, CHANNELS, KERNEL_HEIGHT, KERNEL_WIDTH]
    lanes,
    positions,  # samples × OUT_HEIGHT × OUT_WIDTH
    share,  # positions per split
    zero,
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
    """result[out, k] = Σ over a split's positions of gradient[out, position] · image[k at position].

    Here k = (channel, tap of the window), the order of the weights in memory.
    """
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
    down = (k % TAPS // KERNEL_WIDTH)[None, :]
    right = (k % TAPS % KERNEL_WIDTH)[None, :]
    shift = (k // TAPS * PIXELS)[None, :] + down * WIDTH + right
    samples = positions // AREA
    image += lane * samples * (CHANNELS * PIXELS)
    gradient += lane * samples * (OUT * AREA)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, positions), DEPTH):
        position = start + tl.arange(0, DEPTH)
        real = (position < positions)[:, None]
        sample = position // AREA
        place = position % AREA
        top = place // OUT_WIDTH * STEP_HEIGHT - PAD_HEIGHT
        left = place % OUT_WIDTH * STEP_WIDTH - PAD_WIDTH
        at = (sample * (OUT * AREA) + place)[:, None] + (out * AREA)[None, :]
        if AREA % 4 != 0:
            at = _along(at, zero, 0)
        gradients = tl.load(gradient + at, mask=real & (out < OUT)[None, :], other=0.0)
        inside = real & (k < SIZE)[None, :]
        if BORDERED:
            y = top[:, None] + down
            x = left[:, None] + right
            inside = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        at = (sample * (CHANNELS * PIXELS) + top * WIDTH + left)[:, None] + shift
        pixels = tl.load(image + _along(at, zero, 0), mask=inside, other=0.0)
        total = tl.dot(tl.trans(gradients), pixels, total, input_precision=PRECISION)
    result += (split * lanes + lane) * (OUT * SIZE)
    kept = (out < OUT)[:, None] & (k < SIZE)[None, :]
    tl.store(result + out[:, None] * SIZE + k[None, :], total, mask=kept)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, tiles: Tiles | None = None
) -> Tensor:
    """The convolution of every lane: ``x`` [L, B, C, H, W], ``weight`` [L, O, C, h, w], ``bias`` [L, O]."""
    height, width = (
        (n + 2 * p - k) // s + 1
        for n, p, k, s in zip(x.shape[-2:], padding, weight.shape[-2:], stride, strict=True)
    )
    weight = weight.permute(0, 1, 3, 4, 2)
    return _launch(x, weight, bias, (height, width), stride, (1, 1), padding, False, tiles)


def input_gradient(
    weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair, tiles: Tiles | None = None
) -> Tensor:
    """What ``gradient`` [L, B, O, h, w] of the result says about images of size ``image``.

    That is a convolution again: of the gradient, its rows ``stride`` apart, with the weights turned round.
    """
    padding = (weight.shape[-2] - 1 - padding[0], weight.shape[-1] - 1 - padding[1])
    weight = weight.permute(0, 2, 3, 4, 1)
    return _launch(gradient, weight, None, image, (1, 1), stride, padding, True, tiles)


def weight_gradient(
    x: Tensor, gradient: Tensor, stride: Pair, padding: Pair, kernel: Pair, tiles: Tiles | None = None
) -> Tensor:
    """What ``gradient`` [L, B, O, h, w] of the result says about weights of size ``kernel``."""
    x, gradient = x.contiguous(), gradient.contiguous()
    lanes, samples, channels, height, width = x.shape
    out, *area = gradient.shape[2:]
    positions, size = samples * area[0] * area[1], channels * kernel[0] * kernel[1]
    tiles = tiles or _correlate_tiles(out, size)
    programs = triton.cdiv(out, tiles.rows) * triton.cdiv(size, tiles.columns)
    # Enough programs per lane to fill the device, and at least a thousand positions for each of them.
    splits = max(1, min(32, triton.cdiv(64, programs), positions // 1024))
    share = triton.cdiv(triton.cdiv(positions, splits), tiles.depth) * tiles.depth
    splits = triton.cdiv(positions, share)
    result = x.new_empty(splits, lanes, out, channels, *kernel)
    with torch.cuda.device_of(x):
        _correlate[(programs * lanes * splits,)](
            x, gradient, result, lanes, positions, share, 0,
            channels, height, width, out, *area, *kernel, *stride, *padding,
            max(padding) > 0, _precision(), tiles.rows, tiles.columns, tiles.depth,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return result[0] if splits == 1 else result.sum(0)


def _launch(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: Pair,
    step: Pair,
    spread: Pair,
    padding: Pair,
    turned: bool,
    tiles: Tiles | None,
) -> Tensor:
    image, weight = image.contiguous(), weight.contiguous()
    lanes, samples, channels, height, width = image.shape
    out, *kernel = weight.shape[1:4]
    positions = samples * size[0] * size[1]
    bordered = turned or max(padding) > 0
    tiles = tiles or _convolve_tiles(out, channels)
    programs = triton.cdiv(out, tiles.rows) * triton.cdiv(positions, tiles.columns)
    result = image.new_empty(lanes, samples, out, *size)
    with torch.cuda.device_of(image):
        _convolve[(programs * lanes,)](
            image, weight, image if bias is None else bias.contiguous(), result, positions, 0,
            channels, height, width, out, *size, *kernel, *step, *spread, *padding,
            turned, bordered, bias is not None, _precision(), tiles.rows, tiles.columns, tiles.depth,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return result


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _power(number: int, low: int, high: int) -> int:
    return min(high, max(low, triton.next_power_of_2(number)))


def _convolve_tiles(out: int, channels: int) -> Tiles:
    """Measured on an H200: deep tiles pay for many channels, and where few fill one with little padding."""
    many = channels % 32 == 0
    depth = 32 if many or 4 <= channels < 16 else 16
    return Tiles(_power(out, 16, 64), 128, depth, warps=4, stages=5 if many else 3)


def _correlate_tiles(out: int, size: int) -> Tiles:
    """Measured on an H200: few rows leave room for more programs with narrower columns."""
    rows = _power(out, 16, 64)
    narrow = rows == 16 and size > 128
    return Tiles(rows, 64 if narrow else _power(size, 16, 128), 32, warps=4, stages=4 if narrow else 3)
