"""The convolutions of many lanes as Triton kernels: every lane (client) has images and weights of its own.

A lane's result and its image's gradient are products on images whose channels lie last (``laid_triton.py``).
Here are those on images with their channels first: the weights' gradient, a sum over positions (sample, row,
column), which are neighbours in memory then; and the convolution of images of few channels that are pooled.
Both take images with a border of zeros, where no window reaches over it. No two programs add to one place, so
results are the same every time, and a lane's result does not depend on the other lanes.

This module needs Triton; ``convolution.py`` imports it when a convolution first runs on CUDA.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels import laid_triton
from sartor.kernels.convolution import Pair, room
from sartor.kernels.early_triton import EARLY, wait_turn
from sartor.kernels.laid import Tiles, sides_of, split
from sartor.kernels.laid_triton import biases, larger, precision, store
from sartor.kernels.moves_triton import add_up, along, border, lay


@triton.jit(do_not_specialize=["lanes", "zero"])
def _correlate(
    image,  # [lane, sample, CHANNELS, HEIGHT, WIDTH], with its border
    gradient,  # [lane, sample, OUT, OUT_HEIGHT, OUT_WIDTH]
    result,  # [split, lane, OUT, CHANNELS, KERNEL_HEIGHT, KERNEL_WIDTH]
    lanes,
    samples,
    share,  # tiles of positions per split
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
    RISEN: tl.constexpr,  # whether the rows of a window are the gradient's
    LINE: tl.constexpr,  # columns of a tile of positions
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """result[out, k] = Σ over a split's positions of gradient[out, position] · image[k at position].

    Here k = (channel, tap of the window), the order of the weights in memory. Positions are the result's.
    If RISEN, they are rows of the image with columns of the result, and the gradient is read as many rows
    higher as the tap lies down: the product is that of (out, down) and (channel, right), which are fewer in
    all if the channels are. A tile of positions is a piece of DEPTH / LINE rows of one sample, so that places
    in it differ from tile to tile by one number only.
    """
    wait_turn()
    TAPS: tl.constexpr = KERNEL_HEIGHT * KERNEL_WIDTH
    SIZE: tl.constexpr = CHANNELS * TAPS
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    PIXELS: tl.constexpr = HEIGHT * WIDTH
    RISES: tl.constexpr = KERNEL_HEIGHT if RISEN else 1
    DOWNS: tl.constexpr = 1 if RISEN else KERNEL_HEIGHT
    LEFT: tl.constexpr = OUT * RISES
    RIGHT: tl.constexpr = CHANNELS * DOWNS * KERNEL_WIDTH
    HIGH: tl.constexpr = HEIGHT if RISEN else OUT_HEIGHT
    ROW_BLOCKS: tl.constexpr = (LEFT + ROWS - 1) // ROWS
    COLUMN_BLOCKS: tl.constexpr = (RIGHT + COLUMNS - 1) // COLUMNS
    LINES: tl.constexpr = DEPTH // LINE
    PIECES: tl.constexpr = (OUT_WIDTH + LINE - 1) // LINE
    TILES: tl.constexpr = (HIGH + LINES - 1) // LINES * PIECES
    program = tl.program_id(0)
    row = program % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    k = program // ROW_BLOCKS % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    lane = (program // (ROW_BLOCKS * COLUMN_BLOCKS) % lanes).to(tl.int64)
    split = program // (ROW_BLOCKS * COLUMN_BLOCKS) // lanes
    image += lane * samples * (CHANNELS * PIXELS)
    gradient += lane * samples * (OUT * AREA)
    y = tl.arange(0, DEPTH) // LINE
    x = tl.arange(0, DEPTH) % LINE
    held = tl.minimum(k, RIGHT - 1)
    tap = held % (DOWNS * KERNEL_WIDTH)
    channel = held // (DOWNS * KERNEL_WIDTH)
    shift = channel * PIXELS + tap // KERNEL_WIDTH * WIDTH + tap % KERNEL_WIDTH
    pixel = along((y * (STEP_HEIGHT * WIDTH) + x * STEP_WIDTH)[:, None] + shift[None, :], zero)
    known = tl.minimum(row, LEFT - 1)
    rise = known % RISES
    given = (y * OUT_WIDTH + x)[:, None] + (known // RISES * AREA - rise * OUT_WIDTH)[None, :]
    if OUT_WIDTH % 2 != 0:
        given = along(given, zero)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, samples * TILES)):
        sample = tile // TILES
        top = tile % TILES // PIECES * LINES
        left = tile % PIECES * LINE
        there = ((y < HIGH - top) & (x < OUT_WIDTH - left))[:, None]
        begin = sample * (OUT * AREA) + top * OUT_WIDTH + left
        if OUT_WIDTH % 2 == 0:
            begin = tl.multiple_of(begin, 4 if OUT_WIDTH % 4 == 0 else 2)
        inside = there
        if RISEN:
            high = (y + top)[:, None] - rise[None, :]
            inside = (high >= 0) & (high < OUT_HEIGHT) & (x < OUT_WIDTH - left)[:, None]
        gradients = tl.load(gradient + begin + given, mask=inside, other=0.0)
        begin = sample * (CHANNELS * PIXELS) + top * (STEP_HEIGHT * WIDTH) + left * STEP_WIDTH
        pixels = tl.load(image + begin + pixel, mask=there, other=0.0)
        total = tl.dot(tl.trans(gradients), pixels, total, input_precision=PRECISION)
    result += (split * lanes + lane) * (OUT * SIZE)
    kept = (row < LEFT)[:, None] & (k < RIGHT)[None, :]
    if RISEN:
        place = (known // RISES * SIZE + rise * KERNEL_WIDTH)[:, None] + (channel * TAPS + tap)[None, :]
    else:  # the same, and seen to be one after the other: stored by fours
        place = row[:, None] * SIZE + k[None, :]
    tl.store(result + place, total, mask=kept)


@triton.jit(do_not_specialize=["bias_lane"])
def _direct(
    image,  # [lane, sample, CHANNELS, HEIGHT, WIDTH], with its border
    weight,  # [lane, CHANNELS, KERNEL_HEIGHT, KERNEL_WIDTH, SPACE]
    bias,  # [lane, OUT]
    bias_lane,  # from one lane to the next
    result,  # as in ``laid_triton.py``
    places,
    samples,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    SPACE: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,  # of the pooled image
    OUT_WIDTH: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STEP_HEIGHT: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    RELU: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The convolution and the maxima of its windows of 2 × 2, number by number.

    A thread has all four positions of a window: what it reads of the image serves several of them.
    """
    wait_turn()
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    COLUMN_BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row_blocks = tl.cdiv(samples * AREA, ROWS)
    program = tl.program_id(0)
    out = (program % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    where = (program // COLUMN_BLOCKS % row_blocks * ROWS + tl.arange(0, ROWS))[:, None]
    lane = (program // COLUMN_BLOCKS // row_blocks).to(tl.int64)
    window = tl.minimum(where, samples * AREA - 1)
    sample = window // AREA
    top = window % AREA // OUT_WIDTH * (2 * STEP_HEIGHT)
    left = window % AREA % OUT_WIDTH * (2 * STEP_WIDTH)
    image += lane * samples * (HEIGHT * WIDTH * CHANNELS)
    pixels = image + (sample * (HEIGHT * WIDTH * CHANNELS) + top * WIDTH + left)
    weights = weight + lane * (CHANNELS * KERNEL_HEIGHT * KERNEL_WIDTH * SPACE) + tl.minimum(out, SPACE - 1)
    if OUT % COLUMNS == 0 or SPACE % COLUMNS == 0:
        weights = weight + lane * (CHANNELS * KERNEL_HEIGHT * KERNEL_WIDTH * SPACE) + out
    upper_left = tl.zeros((ROWS, COLUMNS), tl.float32)
    if BIASED:
        upper_left += tl.load(bias + lane * bias_lane + out, mask=out < OUT, other=0.0)
    upper_right = upper_left
    lower_left = upper_left
    lower_right = upper_left
    for _ in range(CHANNELS):
        for down in tl.static_range(KERNEL_HEIGHT):
            for right in tl.static_range(KERNEL_WIDTH):
                here = pixels + (down * WIDTH + right)
                own = tl.load(weights + (down * KERNEL_WIDTH + right) * SPACE)
                upper_left += tl.load(here) * own
                upper_right += tl.load(here + STEP_WIDTH) * own
                lower_left += tl.load(here + STEP_HEIGHT * WIDTH) * own
                lower_right += tl.load(here + (STEP_HEIGHT * WIDTH + STEP_WIDTH)) * own
        pixels += HEIGHT * WIDTH
        weights += KERNEL_HEIGHT * KERNEL_WIDTH * SPACE
    total, which = larger(upper_left, upper_right, lower_left, lower_right)
    store(result, places, total, which, samples, lane, where, out, OUT, AREA, RELU, True, ROOM)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of every lane: ``x`` [L, B, C, H, W], ``weight`` [L, O, C, h, w], ``bias`` [L, O]."""
    images = lay(x, None, x.shape[:2])
    return laid_triton.convolve(images, weight, bias, stride, padding, False, False, True)[0]


def input_gradient(weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair) -> Tensor:
    """What ``gradient`` [L, B, O, h, w] of the result says about images of size ``image``."""
    given = lay(gradient, None, gradient.shape[:2])
    return laid_triton.input_gradient(weight, given, stride, padding, image, True)


def weight_gradient(x: Tensor, gradient: Tensor, stride: Pair, padding: Pair, kernel: Pair) -> Tensor:
    """What ``gradient`` [L, B, O, h, w] of the result says about weights of size ``kernel``."""
    bordered = border(x, None, x.shape[:2], 0, padding) if max(padding) > 0 else x
    parts = correlate(bordered, gradient, stride, kernel)
    return parts[0] if len(parts) == 1 else add_up(parts)


def correlate(
    x: Tensor,
    gradient: Tensor,
    stride: Pair,
    kernel: Pair,
    tiles: Tiles | None = None,
    risen: bool | None = None,
) -> Tensor:
    """See ``laid.first_weight_gradient``."""
    x, gradient = x.contiguous(), gradient.contiguous()
    lanes, samples, channels, height, width = x.shape
    out, *area = gradient.shape[2:]
    weight = (out, channels, *kernel)
    tiles, risen, line, share, parts = split(gradient.shape, weight, stride, tiles, risen)
    programs = tiles.over(*sides_of(weight, risen))
    result = x.new_empty(parts, lanes, *weight)
    with torch.cuda.device_of(x):
        _correlate[(programs * lanes * parts,)](
            x, gradient, result, lanes, samples, share, 0,
            channels, height, width, out, *area, *kernel, *stride, risen, line,
            precision(), tiles.rows, tiles.columns, tiles.depth,
            num_warps=tiles.warps, num_stages=tiles.stages, **EARLY,
        )  # fmt: skip
    return result


def direct(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    relu: bool,
    first: bool,
    tiles: Pair = (128, 8),
    warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """See ``laid.direct_conv``."""
    lanes, samples, channels, height, width = x.shape
    out, *kernel = weight.shape[1:2] + weight.shape[3:]
    size = [((n - k) // s + 1) // 2 for n, k, s in zip((height, width), kernel, stride, strict=True)]
    if weight.stride()[2:] != (kernel[0] * kernel[1], kernel[1], 1):
        weight = weight.contiguous()
    weights = lay(weight.flatten(2, 3)[:, None], None, (lanes, 1))
    last = 0 if first else room(out)
    result = x.new_empty(lanes, samples, *((out, *size) if first else (*size, last)))
    places = torch.empty_like(result, dtype=torch.uint8)
    programs = triton.cdiv(samples * size[0] * size[1], tiles[0]) * triton.cdiv(out, tiles[1])
    with torch.cuda.device_of(x):
        _direct[(programs * lanes,)](
            x.contiguous(), weights, *biases(bias, x), result, places, samples,
            channels, height, width, out, room(out), *size, *kernel, *stride,
            bias is not None, relu, last, *tiles, num_warps=warps, **EARLY,
        )  # fmt: skip
    return result, places
