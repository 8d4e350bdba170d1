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

from sartor.kernels.convolution import Pair, room
from sartor.kernels.early_triton import EARLY, wait_turn
from sartor.kernels.laid import NOWHERE, parts_of, power

_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit
def along(at, zero):
    """Tell the compiler to lay neighbouring threads along the positions, the first axis of a tile of places.

    The hint says that two neighbours lie side by side, which is not so everywhere. ``zero`` is a number that
    the compiler does not know: it leaves no place known to be even, so two are never read as one.
    """
    return tl.max_contiguous(at + zero, [2, 1])


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["numbers"])
def _move(
    data,  # [lane, row, CHANNELS, HEIGHT, WIDTH] with these strides but the last two; or LAST, as a result is
    numbers,  # [row]: rows of the data
    result,  # [lane, row, HEIGHT, WIDTH, ROOM], or [lane, row, CHANNELS, HEIGHT + borders, WIDTH + borders]
    rows,
    lane_stride,
    row_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BORDER_HEIGHT: tl.constexpr,
    BORDER_WIDTH: tl.constexpr,
    LAST: tl.constexpr,  # of data laid: their room
    ROOM: tl.constexpr,  # of a result laid: its room, else 0
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy images, all or those with these numbers: laid, or channels first with a border of zeros."""
    wait_turn()
    WIDE: tl.constexpr = WIDTH + 2 * BORDER_WIDTH
    PIXELS: tl.constexpr = (HEIGHT + 2 * BORDER_HEIGHT) * WIDE
    SPACE: tl.constexpr = ROOM if ROOM else CHANNELS
    ROW_BLOCKS: tl.constexpr = (PIXELS + ROWS - 1) // ROWS
    COLUMN_BLOCKS: tl.constexpr = (SPACE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    channel = (program % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    place = (program // COLUMN_BLOCKS % ROW_BLOCKS * ROWS + tl.arange(0, ROWS))[:, None]
    image = (program // (COLUMN_BLOCKS * ROW_BLOCKS)).to(tl.int64)
    row = tl.load(numbers + image) if NUMBERED else image % rows
    data += image // rows * lane_stride + row * row_stride
    there = (place < PIXELS) & (channel < CHANNELS)
    pixel = place
    if BORDER_HEIGHT + BORDER_WIDTH > 0:
        y = place // WIDE - BORDER_HEIGHT
        x = place % WIDE - BORDER_WIDTH
        there = there & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        pixel = y * WIDTH + x
    at = pixel * LAST + channel if LAST else channel * channel_stride + pixel
    pixels = tl.load(data + at, mask=there, other=0.0)
    result += image * (PIXELS * SPACE)
    at = place * ROOM + channel if ROOM else channel * PIXELS + place
    tl.store(result + at, pixels, mask=(place < PIXELS) & (channel < SPACE))


def lay(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    """See ``laid.laid_images``."""
    return _moved(images, numbers, shape, (0, 0), 0, room(images.shape[-3]))


def border(images: Tensor, numbers: Tensor | None, shape: Pair, channels: int, border: Pair) -> Tensor:
    """See ``laid.first_images``."""
    return _moved(images, numbers, shape, border, channels, 0)


def _moved(
    images: Tensor, numbers: Tensor | None, shape: Pair, border: Pair, channels: int, space: int
) -> Tensor:
    """Images moved: laid ones that have so many ``channels``, or others if that is 0, to laid ones with this
    ``space``, or to others if that is 0.
    """
    if channels:
        images = images.contiguous()
        height, width, last = images.shape[-3:]
        channel = 0
        lane, row, *_ = images.stride()
    else:
        if images.stride()[-2:] != (images.shape[-1], 1):
            images = images.contiguous()
        channels, height, width = images.shape[-3:]
        last = 0
        lane, row, channel, *_ = (0, *images.stride()) if numbers is not None else images.stride()
    pixels = (height + 2 * border[0]) * (width + 2 * border[1])
    size = (height, width, space) if space else (channels, height + 2 * border[0], width + 2 * border[1])
    result = images.new_empty(*shape, *size)
    columns = power(space or channels, 1, 64)
    rows = power(pixels, 16, 2048 // columns)
    blocks = triton.cdiv(pixels, rows) * triton.cdiv(space or channels, columns)
    count = shape[0] * shape[1]
    with torch.cuda.device_of(images):
        _move[(count * blocks,)](
            images, images if numbers is None else numbers.contiguous(), result,
            shape[1] if numbers is None else count, lane, row, channel,
            channels, height, width, *border, last, space, numbers is not None, rows, columns, **EARLY,
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["lanes", "zero"])
def _spread(
    gradient,  # of the result: [lane, sample, OUT_HEIGHT, OUT_WIDTH, GIVEN_ROOM], or channels first
    places,  # the same with PLACES_ROOM
    laid,  # [lane, sample, HEIGHT, WIDTH, ROOM]
    first,  # [lane, sample, CHANNELS, HEIGHT, WIDTH]
    sums,  # [part, lane, CHANNELS]
    lanes,
    samples,
    zero,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,  # rows and columns of a window: 1 or 2
    GIVEN_ROOM: tl.constexpr,  # 0: channels first
    PLACES_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
    LAID: tl.constexpr,  # which results are wanted
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Every position takes its window's gradient if it held the maximum; with sums over a part of them."""
    wait_turn()
    COLUMN_BLOCKS: tl.constexpr = (ROOM + COLUMNS - 1) // COLUMNS
    AREA: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    PIXELS: tl.constexpr = HEIGHT * WIDTH
    program = tl.program_id(0)
    channel = (program % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    lane = (program // COLUMN_BLOCKS % lanes).to(tl.int64)
    part = program // COLUMN_BLOCKS // lanes
    positions = samples * PIXELS
    gradient += lane * samples * (AREA * (GIVEN_ROOM if GIVEN_ROOM else CHANNELS))
    places += lane * samples * (AREA * (PLACES_ROOM if PLACES_ROOM else CHANNELS))
    laid += lane * positions * ROOM
    first += lane * positions * CHANNELS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in range(TURNS):
        position = ((part * TURNS + turn) * ROWS + tl.arange(0, ROWS))[:, None]
        sample = position // PIXELS
        pixel = position % PIXELS
        y = pixel // WIDTH
        x = pixel % WIDTH
        real = position < positions
        there = real & (y < OUT_HEIGHT * WINDOW) & (x < OUT_WIDTH * WINDOW) & (channel < CHANNELS)
        place = y // WINDOW * OUT_WIDTH + x // WINDOW
        at_last = sample * AREA + place
        at_first = along(sample * (AREA * CHANNELS) + place + channel * AREA, zero)
        at = at_last * GIVEN_ROOM + channel if GIVEN_ROOM else at_first
        given = tl.load(gradient + at, mask=there, other=0.0)
        at = at_last * PLACES_ROOM + channel if PLACES_ROOM else at_first
        held = tl.load(places + at, mask=there, other=_NOWHERE)
        given = tl.where(held == (y % WINDOW * WINDOW + x % WINDOW).to(tl.uint8), given, 0.0)
        if LAID:
            tl.store(laid + (position * ROOM + channel), given, mask=real & (channel < ROOM))
        if FIRST:
            at = sample * (CHANNELS * PIXELS) + pixel + channel * PIXELS
            tl.store(first + at, given, mask=real & (channel < CHANNELS))
        total += given
    own = tl.sum(total, 0)[None, :]
    tl.store(sums + (part * lanes + lane) * CHANNELS + channel, own, mask=channel < CHANNELS)


def spread(
    gradient: Tensor,
    places: Tensor,
    channels: int,
    size: Pair,
    given_first: bool,
    places_first: bool,
    laid: bool,
    first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``laid.spread_gradient``."""
    gradient = gradient.contiguous()
    lanes, samples = gradient.shape[:2]
    area = gradient.shape[-2:] if given_first else gradient.shape[2:4]
    last = room(channels)
    results = (
        gradient.new_empty((lanes, samples, *size, last) if laid else 0),
        gradient.new_empty((lanes, samples, channels, *size) if first else 0),
    )
    rows, columns, turns, parts = parts_of(samples * size[0] * size[1], channels)
    sums = gradient.new_empty(parts, lanes, channels)
    with torch.cuda.device_of(gradient):
        _spread[(triton.cdiv(last, columns) * lanes * parts,)](
            gradient, places, *results, sums, lanes, samples, 0,
            channels, *size, *area, 1 if tuple(area) == tuple(size) else 2,
            0 if given_first else last, 0 if places_first else last, last, laid, first, rows, columns, turns,
            **EARLY,
        )  # fmt: skip
    return *results, sums


@triton.jit(do_not_specialize=["count"])
def _add_up(parts, result, count, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """result[number] = Σ parts[part, number], in the same order however many numbers there are."""
    wait_turn()
    number = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, count, ROWS):
        part = (begin + tl.arange(0, ROWS))[:, None]
        there = (part < count) & (number < size)
        total += tl.load(parts + part.to(tl.int64) * size + number, mask=there, other=0.0)
    own = tl.sum(total, 0)[None, :]
    tl.store(result + number, own, mask=number < size)


def add_up(parts: Tensor) -> Tensor:
    """See ``laid.add_up``."""
    if len(parts) == 1:
        return parts[0].clone()
    result = parts.new_empty(parts.shape[1:])
    rows = power(len(parts), 2, 16)
    columns = 1024 // rows
    with torch.cuda.device_of(parts):
        _add_up[(triton.cdiv(result.numel(), columns),)](
            parts.contiguous(), result, len(parts), result.numel(), rows, columns, **EARLY
        )
    return result
