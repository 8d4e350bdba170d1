"""BatchNorm of many lanes as Triton kernels; ``batch_norm.py`` says what they compute. Needs Triton.

A program goes over all of a lane's numbers of one channel where it adds them up, and over whole rows, a
sample's numbers of one channel, where it does not. No two programs add to one place, so results are the same
every time, and a lane's do not depend on the other lanes.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn
from sartor.kernels.norms_triton import in_rows

BLOCK = 2048
"""Numbers that a program holds at once."""


@triton.jit
def _moments(
    x,  # [lane, sample, CHANNELS, PLACES]
    counted,  # [lane, sample]
    mean,  # [lane, CHANNELS]
    variance,
    samples,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks have a mean and a sum of squares around it each, which are joined one after the other."""
    wait_turn()
    lane = (tl.program_id(0) // CHANNELS).to(tl.int64)
    channel = tl.program_id(0) % CHANNELS
    x += (lane * samples * CHANNELS + channel) * PLACES
    size = tl.full((), 0.0, tl.float32)
    centre = tl.full((), 0.0, tl.float32)
    squares = tl.full((), 0.0, tl.float32)
    for first in range(0, samples * PLACES, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < samples * PLACES
        sample = place // PLACES
        real = tl.load(counted + lane * samples + sample, mask=there, other=0.0)
        values = tl.load(x + sample * (CHANNELS * PLACES) + place % PLACES, mask=there, other=0.0)
        more = tl.sum(real, 0)
        middle = tl.sum(values * real, 0) / tl.maximum(more, 1.0)
        apart = (values - middle) * real
        gap = middle - centre
        total = tl.maximum(size + more, 1.0)
        squares += tl.sum(apart * apart, 0) + gap * gap * size * more / total
        centre += gap * more / total
        size += more
    tl.store(mean + tl.program_id(0), centre)
    tl.store(variance + tl.program_id(0), squares / tl.maximum(size, 1.0))


@triton.jit
def _normalise(
    x,  # [lane, sample, CHANNELS, PLACES]
    weight,  # [lane, CHANNELS]
    bias,
    mean,
    variance,
    beside,  # like x, added to what is normalised
    result,  # like x
    weight_lane,  # from one lane's weights to the next's
    bias_lane,
    rows,  # lanes × samples × CHANNELS
    rows_of_lane,
    eps,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    ADDED: tl.constexpr,
    RECTIFIED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_PLACES: tl.constexpr,
):
    """Some rows by their channels' statistics and weights."""
    wait_turn()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    lane = (row // rows_of_lane).to(tl.int64)
    channel = row % CHANNELS
    middle = tl.load(mean + lane * CHANNELS + channel, mask=real, other=0.0)[:, None]
    spread = tl.load(variance + lane * CHANNELS + channel, mask=real, other=1.0)
    scale = (1.0 / tl.sqrt(spread + eps))[:, None]
    weights = tl.load(weight + lane * weight_lane + channel, mask=real, other=0.0)[:, None]
    biases = tl.load(bias + lane * bias_lane + channel, mask=real, other=0.0)[:, None]
    for first in range(0, PLACES, TILE_PLACES):
        place = first + tl.arange(0, TILE_PLACES)
        there = real[:, None] & (place < PLACES)[None, :]
        at = row.to(tl.int64)[:, None] * PLACES + place[None, :]
        value = (tl.load(x + at, mask=there, other=0.0) - middle) * scale * weights + biases
        if ADDED:
            value += tl.load(beside + at, mask=there, other=0.0)
        if RECTIFIED:
            value = tl.where(value <= 0.0, 0.0, value)
        tl.store(result + at, value, mask=there)


@triton.jit(do_not_specialize=["lanes"])
def _sums(
    gradient,  # like x
    x,  # [lane, sample, CHANNELS, PLACES]
    weight,  # [lane, CHANNELS]
    bias,
    mean,
    variance,
    sums,  # [2, lane, CHANNELS]
    weight_lane,  # from one lane's weights to the next's
    bias_lane,
    lanes,
    samples,
    eps,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    RECTIFIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of a channel's weight and bias."""
    wait_turn()
    program = tl.program_id(0)
    lane = (program // CHANNELS).to(tl.int64)
    channel = program % CHANNELS
    at_lane = (lane * samples * CHANNELS + channel) * PLACES
    weights = tl.load(weight + lane * weight_lane + channel)
    biases = tl.load(bias + lane * bias_lane + channel)
    middle = tl.load(mean + program)
    scale = 1.0 / tl.sqrt(tl.load(variance + program) + eps)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, samples * PLACES, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < samples * PLACES
        at = at_lane + place // PLACES * (CHANNELS * PLACES) + place % PLACES
        normal = (tl.load(x + at, mask=there, other=0.0) - middle) * scale
        given = tl.load(gradient + at, mask=there, other=0.0)
        if RECTIFIED:
            given = tl.where(normal * weights + biases <= 0.0, 0.0, given)
        of_weight += given * normal
        of_bias += given
    tl.store(sums + program, tl.sum(of_weight, 0))
    tl.store(sums + lanes * CHANNELS + program, tl.sum(of_bias, 0))


@triton.jit(do_not_specialize=["lanes"])
def _differentiate(
    gradient,  # like x
    x,  # [lane, sample, CHANNELS, PLACES]
    weight,  # [lane, CHANNELS]
    bias,
    counted,  # [lane, sample]
    mean,  # [lane, CHANNELS]
    variance,
    share,  # [lane]
    sums,  # [2, lane, CHANNELS]
    beside,  # like x, added to its gradient
    result,  # like x
    weight_lane,  # from one lane's weights to the next's
    bias_lane,
    lanes,
    rows,  # lanes × samples × CHANNELS
    rows_of_lane,
    eps,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    ADDED: tl.constexpr,
    RECTIFIED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_PLACES: tl.constexpr,
):
    """The gradient of some rows."""
    wait_turn()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    lane = (row // rows_of_lane).to(tl.int64)
    channel = row % CHANNELS
    whose = lane * CHANNELS + channel
    middle = tl.load(mean + whose, mask=real, other=0.0)[:, None]
    scale = (1.0 / tl.sqrt(tl.load(variance + whose, mask=real, other=1.0) + eps))[:, None]
    weights = tl.load(weight + lane * weight_lane + channel, mask=real, other=0.0)[:, None]
    biases = tl.load(bias + lane * bias_lane + channel, mask=real, other=0.0)[:, None]
    part = tl.load(counted + row // CHANNELS, mask=real, other=0.0) * tl.load(
        share + lane, mask=real, other=0.0
    )
    along = (part * tl.load(sums + whose, mask=real, other=0.0))[:, None]
    level = (part * tl.load(sums + lanes * CHANNELS + whose, mask=real, other=0.0))[:, None]
    for first in range(0, PLACES, TILE_PLACES):
        place = first + tl.arange(0, TILE_PLACES)
        there = real[:, None] & (place < PLACES)[None, :]
        at = row.to(tl.int64)[:, None] * PLACES + place[None, :]
        normal = (tl.load(x + at, mask=there, other=0.0) - middle) * scale
        given = tl.load(gradient + at, mask=there, other=0.0)
        if RECTIFIED:
            given = tl.where(normal * weights + biases <= 0.0, 0.0, given)
        before = (given - level - normal * along) * scale * weights
        if ADDED:
            before += tl.load(beside + at, mask=there, other=0.0)
        tl.store(result + at, before, mask=there)


def moments(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """See ``batch_norm.stacked_moments``."""
    x, counted = x.contiguous(), counted.contiguous()
    lanes, samples, channels, places = _sizes(x)
    mean, variance = x.new_empty(lanes, channels), x.new_empty(lanes, channels)
    with torch.cuda.device_of(x):
        _moments[(lanes * channels,)](
            x, counted, mean, variance, samples, channels, places, _block(samples * places),
            num_warps=4, **EARLY,
        )  # fmt: skip
    return mean, variance


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    beside: Tensor | None,
    eps: float,
    rectified: bool,
) -> Tensor:
    """See ``batch_norm.stacked_batch_norm``."""
    x, weight, bias = x.contiguous(), in_rows(weight), in_rows(bias)
    mean, variance = mean.contiguous(), variance.contiguous()
    added = x if beside is None else beside.contiguous()
    lanes, samples, channels, places = _sizes(x)
    result, rows, tile = torch.empty_like(x), lanes * samples * channels, _tile(places)
    with torch.cuda.device_of(x):
        _normalise[(triton.cdiv(rows, tile[0]),)](
            x, weight, bias, mean, variance, added, result, weight.stride(0), bias.stride(0),
            rows, samples * channels, eps, channels, places, beside is not None, rectified, *tile,
            num_warps=4, **EARLY,
        )  # fmt: skip
    return result


def gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    mean: Tensor,
    variance: Tensor,
    share: Tensor,
    eps: float,
    beside: Tensor | None,
    rectified: bool,
) -> tuple[Tensor, Tensor]:
    """See ``batch_norm.stacked_batch_norm_gradient``."""
    gradient, x, weight, bias = gradient.contiguous(), x.contiguous(), in_rows(weight), in_rows(bias)
    counted, mean, variance, share = (value.contiguous() for value in (counted, mean, variance, share))
    added = x if beside is None else beside.contiguous()
    lanes, samples, channels, places = _sizes(x)
    result, sums = torch.empty_like(x), x.new_empty(2, lanes, channels)
    rows, tile = lanes * samples * channels, _tile(places)
    with torch.cuda.device_of(x):
        _sums[(lanes * channels,)](
            gradient, x, weight, bias, mean, variance, sums, weight.stride(0), bias.stride(0),
            lanes, samples, eps, channels, places, rectified, _block(samples * places), num_warps=4, **EARLY,
        )  # fmt: skip
        _differentiate[(triton.cdiv(rows, tile[0]),)](
            gradient, x, weight, bias, counted, mean, variance, share, sums, added, result,
            weight.stride(0), bias.stride(0), lanes, rows, samples * channels, eps,
            channels, places, beside is not None, rectified, *tile, num_warps=4, **EARLY,
        )  # fmt: skip
    return result, sums


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    return *x.shape[:3], x.shape[3:].numel()


def _block(numbers: int) -> int:
    return min(BLOCK, triton.next_power_of_2(numbers))


def _tile(places: int) -> tuple[int, int]:
    """Rows and places that are held at once."""
    tile_places = min(BLOCK, triton.next_power_of_2(places))
    return BLOCK // tile_places, tile_places
