"""Images to and from where their channels lie last, as Triton kernels; ``laid.py`` says what they compute.

This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.laid import NOWHERE, Pair, room

_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit
def _spread(
    gradient,  # of the result: [lane, sample, OUT_HEIGHT, OUT_WIDTH, GIVEN_ROOM], or channels first
    places,  # the same with PLACES_ROOM
    result,  # [lane, sample, HEIGHT, WIDTH, ROOM]
    sums,  # [part, lane, CHANNELS]
    lanes,
    samples,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,  # rows and columns of a window: 1 or 2
    GIVEN_ROOM: tl.constexpr,  # 0: channels first
    PLACES_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Every position takes its window's gradient if it held the maximum; with sums over a part of them."""
    COLUMN_BLOCKS: tl.constexpr = (ROOM + COLUMNS - 1) // COLUMNS
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    program = tl.program_id(0)
    channel = program % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    lane = (program // COLUMN_BLOCKS % lanes).to(tl.int64)
    part = program // COLUMN_BLOCKS // lanes
    positions = samples * (HEIGHT * WIDTH)
    gradient += lane * samples * (AREA * (GIVEN_ROOM if GIVEN_ROOM else CHANNELS))
    places += lane * samples * (AREA * (PLACES_ROOM if PLACES_ROOM else CHANNELS))
    result += lane * positions * ROOM
    total = tl.zeros((COLUMNS,), tl.float32)
    for turn in range(TURNS):
        position = (part * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        sample = position // (HEIGHT * WIDTH)
        y = position % (HEIGHT * WIDTH) // WIDTH
        x = position % (HEIGHT * WIDTH) % WIDTH
        inside = (position < positions) & (y < OUT_HEIGHT * WINDOW) & (x < OUT_WIDTH * WINDOW)
        there = inside[:, None] & (channel < CHANNELS)[None, :]
        place = y // WINDOW * OUT_WIDTH + x // WINDOW
        last = (sample * AREA + place)[:, None]
        first = (sample * (AREA * CHANNELS) + place)[:, None] + (channel * AREA)[None, :]
        at = last * GIVEN_ROOM + channel[None, :] if GIVEN_ROOM else first
        given = tl.load(gradient + at, mask=there, other=0.0)
        at = last * PLACES_ROOM + channel[None, :] if PLACES_ROOM else first
        held = tl.load(places + at, mask=there, other=_NOWHERE)
        own = (y % WINDOW * WINDOW + x % WINDOW).to(tl.uint8)
        given = tl.where(held == own[:, None], given, 0.0)
        at = position[:, None] * ROOM + channel[None, :]
        tl.store(result + at, given, mask=(position < positions)[:, None] & (channel < ROOM)[None, :])
        total += tl.sum(given, 0)
    tl.store(sums + (part * lanes + lane) * CHANNELS + channel, total, mask=channel < CHANNELS)


@triton.jit
def _lay(
    data,  # [lane, row, CHANNELS, PIXELS], with these strides but the last, which is 1
    numbers,  # [row]: rows of the data
    result,  # [lane, row, PIXELS, ROOM]
    rows,
    lane_stride,
    row_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ROOM: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy images, all or those with these numbers, so that their channels lie last."""
    ROW_BLOCKS: tl.constexpr = (PIXELS + ROWS - 1) // ROWS
    COLUMN_BLOCKS: tl.constexpr = (ROOM + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    channel = (program % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    place = (program // COLUMN_BLOCKS % ROW_BLOCKS * ROWS + tl.arange(0, ROWS))[:, None]
    image = (program // (COLUMN_BLOCKS * ROW_BLOCKS)).to(tl.int64)
    row = tl.load(numbers + image) if NUMBERED else image % rows
    data += image // rows * lane_stride + row * row_stride
    there = place < PIXELS
    pixels = tl.load(data + (channel * channel_stride + place), mask=there & (channel < CHANNELS), other=0.0)
    result += image * (PIXELS * ROOM)
    tl.store(result + (place * ROOM + channel), pixels, mask=there & (channel < ROOM))


def lay(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    """Images [L, B, C, H, W], or those of [N, C, H, W] with these numbers; see ``laid.laid_images``."""
    if images.stride()[-2:] != (images.shape[-1], 1):
        images = images.contiguous()
    channels, height, width = images.shape[-3:]
    result = images.new_empty(*shape, height, width, room(channels))
    lane, row, channel, *_ = (0, *images.stride()) if numbers is not None else images.stride()
    columns = power(result.shape[-1], 4, 64)
    rows = power(height * width, 16, 2048 // columns)
    blocks = triton.cdiv(height * width, rows) * triton.cdiv(result.shape[-1], columns)
    with torch.cuda.device_of(images):
        _lay[(shape[0] * shape[1] * blocks,)](
            images, images if numbers is None else numbers.contiguous(), result,
            shape[1] if numbers is None else shape[0] * shape[1], lane, row, channel,
            channels, height * width, result.shape[-1], numbers is not None, rows, columns,
        )  # fmt: skip
    return result


def spread(
    gradient: Tensor, places: Tensor, channels: int, size: Pair, given_first: bool, places_first: bool
) -> tuple[Tensor, Tensor]:
    """See ``laid.laid_spread``."""
    gradient = gradient.contiguous()
    lanes, samples = gradient.shape[:2]
    area = gradient.shape[-2:] if given_first else gradient.shape[2:4]
    last = room(channels)
    result = gradient.new_empty(lanes, samples, *size, last)
    columns = power(last, 4, 64)
    rows = 4096 // columns
    positions = samples * size[0] * size[1]
    turns = power(positions // (32 * rows), 1, 8)
    parts = triton.cdiv(positions, rows * turns)
    sums = gradient.new_empty(parts, lanes, channels)
    with torch.cuda.device_of(gradient):
        _spread[(triton.cdiv(last, columns) * lanes * parts,)](
            gradient, places, result, sums, lanes, samples,
            channels, *size, *area, 1 if tuple(area) == tuple(size) else 2,
            0 if given_first else last, 0 if places_first else last, last, rows, columns, turns,
        )  # fmt: skip
    return result, sums


def power(number: int, low: int, high: int) -> int:
    """The power of two that is not below the number, within these."""
    return min(high, max(low, triton.next_power_of_2(number)))
