"""The norms of many lanes as Triton kernels; ``norms.py`` says what they compute. Needs Triton.

A row is read once and held while its mean, its variance and what follows are computed. The gradients of
weights are sums over many rows: a program adds up those of some rows, and the programs' sums are added in
turn. No two programs add to one place, so results are the same every time, and a lane's do not depend on the
other lanes.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn

HELD = 2048
"""Numbers that a program holds at once, unless a row has more."""

SUMMED = 8192
"""Numbers that a program adds up for the gradients of weights, unless a row has more."""


@triton.jit
def _row_normal(values, there, SIZE: tl.constexpr, eps):
    """Rows [row, channel, place] normalised, and by how much they were divided [row, 1, 1]."""
    mean = tl.sum(tl.sum(values, 2), 1) / SIZE
    centred = tl.where(there, values - mean[:, None, None], 0.0)
    variance = tl.sum(tl.sum(centred * centred, 2), 1) / SIZE
    scale = (1.0 / tl.sqrt(variance + eps))[:, None, None]
    return centred * scale, scale


@triton.jit
def _normalise(
    x,  # [lane, sample, GROUPS, CHANNELS, PLACES]
    weight,  # [lane, GROUPS, CHANNELS]
    bias,
    beside,  # like x, added to what is normalised
    result,  # like x
    weight_lane,  # from one lane's weights to the next's
    bias_lane,
    rows,  # lanes × samples × GROUPS
    rows_of_lane,
    eps,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    ADDED: tl.constexpr,
    RECTIFIED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    TILE_PLACES: tl.constexpr,
):
    """Some rows normalised, times their channels' weights, plus their biases."""
    wait_turn()
    SIZE: tl.constexpr = CHANNELS * PLACES
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, TILE_CHANNELS)
    place = tl.arange(0, TILE_PLACES)
    real = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    there = real[:, :, None] & (place < PLACES)[None, None, :]
    at = row.to(tl.int64)[:, None, None] * SIZE + (channel * PLACES)[None, :, None] + place[None, None, :]
    normal, _ = _row_normal(tl.load(x + at, mask=there, other=0.0), there, SIZE, eps)
    lane = (row // rows_of_lane).to(tl.int64)[:, None]
    within = (row % GROUPS * CHANNELS)[:, None] + channel[None, :]
    weights = tl.load(weight + lane * weight_lane + within, mask=real, other=0.0)[:, :, None]
    biases = tl.load(bias + lane * bias_lane + within, mask=real, other=0.0)[:, :, None]
    value = normal * weights + biases
    if ADDED:
        value += tl.load(beside + at, mask=there, other=0.0)
    if RECTIFIED:
        value = tl.where(value <= 0.0, 0.0, value)
    tl.store(result + at, value, mask=there)


@triton.jit(do_not_specialize=["lanes"])
def _differentiate(
    gradient,  # like x
    x,  # [lane, sample, GROUPS, CHANNELS, PLACES]
    weight,  # [lane, GROUPS, CHANNELS]
    bias,
    beside,  # like x, added to its gradient
    result,  # like x
    sums,  # [2, part, lane, GROUPS, CHANNELS]
    weight_lane,  # from one lane's weights to the next's
    bias_lane,
    lanes,
    samples,
    parts,
    share,  # samples per part
    eps,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    ADDED: tl.constexpr,
    RECTIFIED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    TILE_PLACES: tl.constexpr,
):
    """The gradient for the rows of one group in some samples of a lane, and their sums for its weights."""
    wait_turn()
    SIZE: tl.constexpr = CHANNELS * PLACES
    program = tl.program_id(0)
    group = program % GROUPS
    part = program // GROUPS % parts
    lane = program // GROUPS // parts
    channel = tl.arange(0, TILE_CHANNELS)
    place = tl.arange(0, TILE_PLACES)
    inside = (channel < CHANNELS)[None, :, None] & (place < PLACES)[None, None, :]
    within = (channel * PLACES)[None, :, None] + place[None, None, :]
    own = group * CHANNELS + channel
    weights = tl.load(weight + lane.to(tl.int64) * weight_lane + own, mask=channel < CHANNELS, other=0.0)
    biases = tl.load(bias + lane.to(tl.int64) * bias_lane + own, mask=channel < CHANNELS, other=0.0)
    weights = weights[None, :, None]
    biases = biases[None, :, None]
    of_weights = tl.zeros((ROWS, TILE_CHANNELS), tl.float32)
    of_biases = tl.zeros((ROWS, TILE_CHANNELS), tl.float32)
    end = tl.minimum((part + 1) * share, samples)
    for first in range(part * share, end, ROWS):
        sample = first + tl.arange(0, ROWS)
        there = (sample < end)[:, None, None] & inside
        row = (lane.to(tl.int64) * samples + sample) * GROUPS + group
        at = row[:, None, None] * SIZE + within
        values = tl.load(x + at, mask=there, other=0.0)
        given = tl.load(gradient + at, mask=there, other=0.0)
        normal, scale = _row_normal(values, there, SIZE, eps)
        if RECTIFIED:
            given = tl.where(normal * weights + biases <= 0.0, 0.0, given)
        of_weights += tl.sum(given * normal, 2)
        of_biases += tl.sum(given, 2)
        given = given * weights
        mean = tl.sum(tl.sum(given, 2), 1) / SIZE
        along = tl.sum(tl.sum(given * normal, 2), 1) / SIZE
        before = scale * (given - mean[:, None, None] - normal * along[:, None, None])
        if ADDED:
            before += tl.load(beside + at, mask=there, other=0.0)
        tl.store(result + at, before, mask=there)
    sums += (part * lanes + lane) * (GROUPS * CHANNELS) + own
    tl.store(sums, tl.sum(of_weights, 0), mask=channel < CHANNELS)
    tl.store(sums + parts * (lanes * GROUPS * CHANNELS), tl.sum(of_biases, 0), mask=channel < CHANNELS)


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    beside: Tensor | None,
    groups: int,
    places: int,
    eps: float,
    rectified: bool,
) -> Tensor:
    """See ``norms.stacked_norm``."""
    x, weight, bias = x.contiguous(), in_rows(weight), in_rows(bias)
    added = x if beside is None else beside.contiguous()
    lanes, channels = weight.shape
    samples = x.numel() // (lanes * channels * places)
    tile, warps = _tile(channels // groups, places)
    rows, result = lanes * samples * groups, torch.empty_like(x)
    with torch.cuda.device_of(x):
        _normalise[(triton.cdiv(rows, tile[0]),)](
            x, weight, bias, added, result, weight.stride(0), bias.stride(0), rows, samples * groups, eps,
            groups, channels // groups, places, beside is not None, rectified, *tile,
            num_warps=warps, **EARLY,
        )  # fmt: skip
    return result


def gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    beside: Tensor | None,
    groups: int,
    places: int,
    eps: float,
    rectified: bool,
) -> tuple[Tensor, Tensor]:
    """See ``norms.stacked_norm_gradient``."""
    gradient, x = gradient.contiguous(), x.contiguous()
    weight, bias = in_rows(weight), in_rows(bias)
    added = x if beside is None else beside.contiguous()
    lanes, channels = weight.shape
    samples = x.numel() // (lanes * channels * places)
    tile, warps = _tile(channels // groups, places)
    share = max(1, SUMMED // (tile[0] * tile[1] * tile[2])) * tile[0]
    parts = triton.cdiv(samples, share)
    result, sums = torch.empty_like(x), x.new_empty(2, parts, lanes, channels)
    with torch.cuda.device_of(x):
        _differentiate[(lanes * parts * groups,)](
            gradient, x, weight, bias, added, result, sums, weight.stride(0), bias.stride(0),
            lanes, samples, parts, share, eps,
            groups, channels // groups, places, beside is not None, rectified, *tile,
            num_warps=warps, **EARLY,
        )  # fmt: skip
    return result, sums[:, 0] if parts == 1 else sums.sum(1)


def in_rows(weights: Tensor) -> Tensor:
    """Weights [lane, channel] whose channels lie side by side, wherever the lanes are."""
    return weights if weights.stride(1) == 1 else weights.contiguous()


def _tile(channels: int, places: int) -> tuple[tuple[int, int, int], int]:
    """Rows, channels and places that are held at once, and the warps that hold them."""
    tile_channels, tile_places = triton.next_power_of_2(channels), triton.next_power_of_2(places)
    size = tile_channels * tile_places
    rows = max(1, HELD // size)
    return (rows, tile_channels, tile_places), 4 if size <= 2048 else 8 if size <= 8192 else 16
