"""The convolutions of many lanes as Triton kernels: every lane (client) has images and weights of its own.

Each lane is a matrix product whose one operand, the unfolded image, is never stored: its entries are read
from the image when they are needed. Images have their channels last here, so that those of a position lie
side by side, four to a load; ``room`` says how many places there are for them, with zeros in what is left.
No two programs add to one place, so results are the same every time, and a lane's result does not depend on
the other lanes.

A convolution may go on to ReLU and to pooling by the maximum of windows of 2 × 2: what it gives then is the
pooled image and a byte for each of its numbers, the place of the maximum in its window or ``NOWHERE``.

This module needs Triton; ``convolution.py`` imports it when a convolution first runs on CUDA.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.convolution import Pair, room
from sartor.kernels.early_triton import EARLY, wait_turn
from sartor.kernels.gpu import choices
from sartor.kernels.laid import NOWHERE, Tiles, abreast, convolve_tiles
from sartor.kernels.moves_triton import lay

_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit
def _two(value, place, other, other_place):
    """The larger of two numbers with its place: the first of equal ones, and what is no number wins."""
    takes = (other > value) | (other != other)
    return tl.where(takes, other, value), tl.where(takes, other_place, place)


@triton.jit
def larger(upper_left, upper_right, lower_left, lower_right):
    """The largest number of each window, and its place."""
    total, which = _two(upper_left, 0, upper_right, 1)
    total, which = _two(total, which, lower_left, 2)
    return _two(total, which, lower_right, 3)


@triton.jit
def store(
    result,  # [lane, sample, position, ROOM], or [lane, sample, OUT, position]
    places,
    total,  # [position of all samples, out]
    which,
    samples,
    lane,
    where,
    out,
    OUT: tl.constexpr,
    AREA: tl.constexpr,
    RELU: tl.constexpr,
    MARKED: tl.constexpr,  # whether the places are stored
    ROOM: tl.constexpr,  # 0: the result has its channels first
):
    """Store a tile of the result of a lane, after ReLU, with the places of maxima."""
    if RELU:
        cut = total <= 0
        total = tl.where(cut, 0.0, total)
        which = tl.where(cut, _NOWHERE, which)
    there = where < samples * AREA
    if ROOM:
        if ROOM != OUT:
            total = tl.where(out < OUT, total, 0.0)
        at = where * ROOM + out
        there = there & (out < ROOM)
        begin = lane * samples * (AREA * ROOM)
    else:
        at = where // AREA * (OUT * AREA) + where % AREA + out * AREA
        there = there & (out < OUT)
        begin = lane * samples * (AREA * OUT)
    tl.store(result + begin + at, total, mask=there)
    if MARKED:
        tl.store(places + begin + at, which.to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["bias_lane"])
def _convolve(
    image,  # [lane, sample, HEIGHT, WIDTH, CHANNELS]
    weight,  # [lane, OUT, KERNEL_HEIGHT, KERNEL_WIDTH, CHANNELS]
    bias,  # [lane, OUT]
    bias_lane,  # from one lane to the next
    result,  # [lane, sample, OUT_HEIGHT, OUT_WIDTH, ROOM], or [lane, sample, OUT, OUT_HEIGHT, OUT_WIDTH]
    places,  # the same, of a pooled result
    samples,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,  # of what is stored: the pooled image
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
    RELU: tl.constexpr,
    POOLED: tl.constexpr,
    ROOM: tl.constexpr,  # 0: the result has its channels first
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """result[position, out] = Σ_k image[k at position] · weight[out, k], k = (tap of the window, channel).

    Positions are those of the samples in order; where they are pooled, those of a window follow each other.
    """
    wait_turn()
    SIZE: tl.constexpr = KERNEL_HEIGHT * KERNEL_WIDTH * CHANNELS
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    WINDOW: tl.constexpr = 4 if POOLED else 1
    COLUMN_BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    positions = samples * AREA * WINDOW
    row_blocks = tl.cdiv(positions, ROWS)
    program = tl.program_id(0)
    out = program % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    first = program // COLUMN_BLOCKS % row_blocks * ROWS
    position = tl.minimum(first + tl.arange(0, ROWS), positions - 1)
    lane = (program // COLUMN_BLOCKS // row_blocks).to(tl.int64)
    sample = position // (AREA * WINDOW)
    place = position // WINDOW % AREA
    if POOLED:
        top = (place // OUT_WIDTH * 2 + position % 4 // 2) * STEP_HEIGHT - PAD_HEIGHT
        left = (place % OUT_WIDTH * 2 + position % 2) * STEP_WIDTH - PAD_WIDTH
    else:
        top = place // OUT_WIDTH * STEP_HEIGHT - PAD_HEIGHT
        left = place % OUT_WIDTH * STEP_WIDTH - PAD_WIDTH
    image += lane * samples * (HEIGHT * WIDTH * CHANNELS)
    weight += lane * (OUT * SIZE)
    row = tl.minimum(out, OUT - 1) * SIZE
    begin = (sample * (HEIGHT * WIDTH) + top * WIDTH + left) * CHANNELS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIZE, DEPTH):
        k = start + tl.arange(0, DEPTH)
        if CHANNELS % DEPTH == 0:
            # One tap for the whole tile: whether it lies inside the image depends on the position alone.
            tap = start // CHANNELS
            channel = tl.multiple_of(start % CHANNELS, 4) + tl.arange(0, DEPTH)
        else:
            tap = (k // CHANNELS)[None, :]
            channel = k % CHANNELS
        down = tap // KERNEL_WIDTH
        right = tap % KERNEL_WIDTH
        if TURNED:
            down = KERNEL_HEIGHT - 1 - down
            right = KERNEL_WIDTH - 1 - right
        y = top[:, None] + down
        x = left[:, None] + right
        if SPREAD_HEIGHT * SPREAD_WIDTH == 1:
            at = begin[:, None] + (channel[None, :] + (down * WIDTH + right) * CHANNELS)
        else:
            at = (sample * (HEIGHT * WIDTH))[:, None] + y // SPREAD_HEIGHT * WIDTH + x // SPREAD_WIDTH
            at = at * CHANNELS + channel[None, :]
        inside = (k < SIZE)[None, :]
        if BORDERED:
            inside = inside & (y >= 0) & (y < HEIGHT * SPREAD_HEIGHT) & (x >= 0) & (x < WIDTH * SPREAD_WIDTH)
            inside = inside & (y % SPREAD_HEIGHT == 0) & (x % SPREAD_WIDTH == 0)
        if BORDERED or SIZE % DEPTH != 0:
            pixels = tl.load(image + at, mask=inside, other=0.0)
        else:
            pixels = tl.load(image + at)
        if SIZE % DEPTH != 0:
            weights = tl.load(weight + (row[:, None] + k[None, :]), mask=(k < SIZE)[None, :], other=0.0)
        else:
            weights = tl.load(weight + (row[:, None] + k[None, :]))
        total = tl.dot(pixels, tl.trans(weights), total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + lane * bias_lane + out, mask=out < OUT, other=0.0)[None, :]
    where = first // WINDOW + tl.arange(0, ROWS // WINDOW)
    which = tl.zeros((ROWS, COLUMNS), tl.int32)
    if POOLED:
        grid = tl.permute(tl.reshape(total, (ROWS // 4, 2, 2, COLUMNS)), (0, 3, 1, 2))
        left_side, right_side = tl.split(grid)
        upper_left, lower_left = tl.split(left_side)
        upper_right, lower_right = tl.split(right_side)
        total, which = larger(upper_left, upper_right, lower_left, lower_right)
    marked: tl.constexpr = POOLED or RELU
    store(
        result, places, total, which, samples, lane, where[:, None], out[None, :],
        OUT, AREA, RELU, marked, ROOM,
    )  # fmt: skip


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    pool: bool,
    first: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``laid.laid_conv``."""
    height, width = (
        ((n + 2 * p - k) // s + 1) // (2 if pool else 1)
        for n, p, k, s in zip(x.shape[2:4], padding, weight.shape[-2:], stride, strict=True)
    )
    steps = (stride, (1, 1), padding)
    weight = lay(weight, None, weight.shape[:2])
    return _launch(x, weight, bias, (height, width), *steps, False, relu, pool, first, weight.shape[1], tiles)


def input_gradient(
    weight: Tensor,
    gradient: Tensor,
    stride: Pair,
    padding: Pair,
    image: Pair,
    first: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """See ``laid.laid_input_gradient``.

    That is a convolution again: of the gradient, its rows ``stride`` apart, with the weights turned round.
    """
    padding = (weight.shape[-2] - 1 - padding[0], weight.shape[-1] - 1 - padding[1])
    weight = weight.transpose(1, 2)
    side = 1 if first or tuple(stride) != (1, 1) else abreast(weight.shape[1], image[1])
    if side > 1:
        weight, size, step = _abreast(weight, side), (image[0], image[1] // side), (1, side)
    else:
        weight, size, step = lay(weight, None, weight.shape[:2]), image, (1, 1)
    steps = (step, stride, padding, True, False, False)
    result, _ = _launch(gradient, weight, None, size, *steps, first, weight.shape[1], tiles)
    return result.view(*result.shape[:2], *image, -1) if side > 1 else result


def _abreast(weight: Tensor, side: int) -> Tensor:
    """Weights [L, O, C, h, w] that give ``side`` neighbouring positions of few channels at once, laid.

    What the window of any of them takes is read once, where most of the time goes: the gradient for LeNet's
    second layer is that of pairs with windows of 5 × 6.
    """
    lanes, out, channels, height, width = weight.shape
    wide = weight.new_zeros(lanes, side, room(out), height, width + side - 1, room(channels))
    for place in range(side):
        begin = side - 1 - place  # as they are turned round
        wide[:, place, :out, :, begin : begin + width, :channels] = weight.permute(0, 1, 3, 4, 2)
    return wide.flatten(1, 2)


def _launch(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: Pair,
    step: Pair,
    spread: Pair,
    padding: Pair,
    turned: bool,
    relu: bool,
    pool: bool,
    first: bool,
    out: int,
    tiles: Tiles | None,
) -> tuple[Tensor, Tensor]:
    lanes, samples, height, width, channels = image.shape
    kernel = weight.shape[2:4]
    last = 0 if first else room(out)
    shape = (out, *size) if first else (*size, last)
    result = image.new_empty(lanes, samples, *shape)
    places = result.new_empty(result.shape if relu or pool else (0,), dtype=torch.uint8)
    positions = samples * size[0] * size[1] * (4 if pool else 1)
    chosen = [tiles] if tiles else choices(partial(convolve_tiles, out, channels, positions), lanes)
    for rows, columns, depth, warps, stages in chosen:
        programs = triton.cdiv(out, columns) * triton.cdiv(positions, rows)
        with torch.cuda.device_of(image):
            _convolve[(programs * lanes,)](
                image, weight, *biases(bias, image), result, places, samples,
                channels, height, width, out, *size, *kernel, *step, *spread, *padding,
                turned, turned or max(padding) > 0, bias is not None, relu, pool, last,
                precision(), rows, columns, depth, num_warps=warps, num_stages=stages, **EARLY,
            )  # fmt: skip
    return result, places


def precision() -> str:
    """How many digits products have."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def biases(bias: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """A layer's bias, whose numbers lie one after the other, and how far apart lanes are."""
    if bias is None:
        return other, 0
    bias = bias if bias.stride(1) == 1 else bias.contiguous()
    return bias, bias.stride(0)
