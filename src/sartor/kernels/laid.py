"""Convolutions of lanes on images whose channels lie last, with ReLU and pooling in the same operation.

A traced step for a GPU holds these operations in place of those of ``convolution.py`` (``fused.py`` puts them
there): four channels of a position are one load, and images are stored once they are pooled. *Laid* images
are [L, B, H, W, room], with room for a multiple of four channels and zeros in what is left of it. On a CPU
the lanes are gone through one by one, which gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.kernels.convolution import Pair, _one_by_one, _Shape, _shape, room
from sartor.kernels.gpu import FEW_PROGRAMS

NOWHERE = 4
"""The place of a maximum that ReLU cuts off: no gradient goes there."""


def power(number: int, low: int, high: int) -> int:
    """The power of two that is not below the number, within these."""
    return min(high, max(low, 1 << max(number - 1, 0).bit_length()))


class Parts(NamedTuple):
    """How positions are gone through: ``rows``, with ``columns`` channels, at a time; ``turns`` in a part."""

    rows: int
    columns: int
    turns: int
    parts: int


def parts_of(positions: int, channels: int) -> Parts:
    """The way to go through so many positions of a lane."""
    wide = power(room(channels), 4, 64)
    part = 2048 // wide * power(positions * wide // 2**16, 1, 8)
    columns = min(16, wide)  # more programs, with less to do one after the other, for as many parts
    rows = min(part, 2048 // columns)
    return Parts(rows, columns, part // rows, -(-positions // part))


def _in_parts(whole: Tensor, parts: int) -> Tensor:
    """A sum as that of so many parts."""
    return torch.cat([whole[None], whole.new_zeros(parts - 1, *whole.shape)])


def _laid(images: Tensor) -> Tensor:
    """Images [L, B, C, H, W] as they are laid."""
    channels = images.shape[2]
    return F.pad(images.permute(0, 1, 3, 4, 2), (0, room(channels) - channels)).contiguous()


def _first(images: Tensor, channels: int) -> Tensor:
    """Laid images with their channels first again."""
    return images[..., :channels].permute(0, 1, 4, 2, 3).contiguous()


def _picked(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    return images if numbers is None else images[numbers].view(*shape, *images.shape[1:])


@torch.library.custom_op(
    "sartor::laid_images",
    mutates_args=(),
    schema="(Tensor images, Tensor? numbers, int[] shape) -> Tensor",
)
def laid_images(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    """Images [L, B, C, H, W], or those of [N, C, H, W] with these ``numbers`` for ``shape`` = L, B, laid."""
    if images.is_cuda:
        from sartor.kernels import moves_triton

        result: Tensor = moves_triton.lay(images, numbers, shape)
        return result
    return _laid(_picked(images, numbers, shape))


@laid_images.register_fake
def _(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    channels, height, width = images.shape[-3:]
    return images.new_empty(*shape, height, width, room(channels))


@torch.library.custom_op(
    "sartor::first_images",
    mutates_args=(),
    schema="(Tensor images, Tensor? numbers, int[] shape, int channels, int[] border) -> Tensor",
)
def first_images(images: Tensor, numbers: Tensor | None, shape: Pair, channels: int, border: Pair) -> Tensor:
    """Images with their channels first and a border of zeros: laid ones of so many ``channels``, or, if that
    is 0, such as :func:`laid_images` takes.
    """
    if images.is_cuda:
        from sartor.kernels import moves_triton

        result: Tensor = moves_triton.border(images, numbers, shape, channels, border)
        return result
    whole = _first(images, channels) if channels else _picked(images, numbers, shape)
    return F.pad(whole, (border[1], border[1], border[0], border[0]))


@first_images.register_fake
def _(images: Tensor, numbers: Tensor | None, shape: Pair, channels: int, border: Pair) -> Tensor:
    height, width = images.shape[-3:-1] if channels else images.shape[-2:]
    size = (channels or images.shape[-3], height + 2 * border[0], width + 2 * border[1])
    return images.new_empty(*shape, *size)


@torch.library.custom_op(
    "sartor::laid_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, bool relu, bool pool, "
    "bool first) -> (Tensor, Tensor)",
)
def laid_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    pool: bool,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """The convolution of laid images, then ReLU, then the maxima of windows of 2 × 2; and their places.

    A place is a byte: 0 to 3 in the window, row by row, or ``NOWHERE``. The result is laid, or has its
    channels ``first``; the places are like it, and there are none of a convolution alone.
    """
    if x.is_cuda:
        from sartor.kernels import laid_triton

        steps = (relu, pool, first)
        both: tuple[Tensor, Tensor] = laid_triton.convolve(x, weight, bias, stride, padding, *steps)
        return both
    return _convolved(_first(x, weight.shape[2]), weight, bias, stride, padding, relu, pool, first)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    pool: bool,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """A convolution and what follows by PyTorch, from images with their channels first."""
    result = _one_by_one("result", x, weight, bias, _shape(x, weight, stride, padding))
    places = torch.zeros_like(result, dtype=torch.uint8)
    if pool:
        maxima, indices = F.max_pool2d(result.flatten(0, 1), 2, return_indices=True)
        width = result.shape[-1]
        indices = indices // width % 2 * 2 + indices % width % 2
        places = indices.view(*result.shape[:2], *maxima.shape[1:]).to(torch.uint8)
        result = maxima.view(*result.shape[:2], *maxima.shape[1:])
    if relu:
        places = places.masked_fill(result <= 0, NOWHERE)
        result = result.relu()
    if not relu and not pool:
        places = places.new_empty(0)
    elif not first:
        places = _laid(places)
    return result if first else _laid(result), places


@laid_conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    pool: bool,
    first: bool,
) -> tuple[Tensor, Tensor]:
    shape = _Shape(stride, padding, (x.shape[2], x.shape[3]), (weight.shape[-2], weight.shape[-1]))
    return _rooms(x, weight.shape[1], shape.result, relu, pool, first)


def _rooms(x: Tensor, out: int, size: Pair, relu: bool, pool: bool, first: bool) -> tuple[Tensor, Tensor]:
    height, width = (size[0] // 2, size[1] // 2) if pool else size
    result = x.new_empty(*x.shape[:2], *((out, height, width) if first else (height, width, room(out))))
    return result, result.new_empty(result.shape if relu or pool else (0,), dtype=torch.uint8)


@torch.library.custom_op(
    "sartor::direct_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int[] stride, bool relu, bool first) -> (Tensor, Tensor)",
)
def direct_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, relu: bool, first: bool
) -> tuple[Tensor, Tensor]:
    """:func:`laid_conv` with pooling for images that have few channels, first, and their border."""
    if x.is_cuda:
        from sartor.kernels import convolution_triton

        both: tuple[Tensor, Tensor] = convolution_triton.direct(x, weight, bias, stride, relu, first)
        return both
    return _convolved(x, weight, bias, stride, (0, 0), relu, True, first)


@direct_conv.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, relu: bool, first: bool
) -> tuple[Tensor, Tensor]:
    return _rooms(x, weight.shape[1], _shape(x, weight, stride, (0, 0)).result, relu, True, first)


@torch.library.custom_op(
    "sartor::spread_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor places, int channels, int[] size, bool given_first, bool places_first, "
    "bool laid, bool first) -> (Tensor, Tensor, Tensor)",
)
def spread_gradient(
    gradient: Tensor,
    places: Tensor,
    channels: int,
    size: Pair,
    given_first: bool,
    places_first: bool,
    laid: bool,
    first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the gradient of :func:`laid_conv`'s result says about the convolution alone, of this ``size``.

    It comes ``laid``, or with its channels ``first``, or both; what is not wanted is empty. With it go sums
    over parts of the positions, [parts, L, C], which together are the bias's gradient.
    """
    if gradient.is_cuda:
        from sartor.kernels import moves_triton

        lie = (given_first, places_first, laid, first)
        all_of: tuple[Tensor, Tensor, Tensor] = moves_triton.spread(gradient, places, channels, size, *lie)
        return all_of
    gradient = gradient if given_first else _first(gradient, channels)
    places = places if places_first else _first(places, channels)
    side = 1 if tuple(gradient.shape[-2:]) == tuple(size) else 2
    own = torch.arange(side * side, dtype=torch.uint8).view(side, 1, side)
    held = places[..., :, None, :, None] == own
    windows = torch.where(held, gradient[..., :, None, :, None], torch.zeros((), dtype=gradient.dtype))
    whole = windows.flatten(-4, -3).flatten(-2)
    whole = F.pad(whole, (0, size[1] - whole.shape[-1], 0, size[0] - whole.shape[-2]))
    nothing = whole.new_empty(0)
    sums = _in_parts(whole.sum((1, 3, 4)), parts_of(whole[0, :, 0].numel(), channels).parts)
    return _laid(whole) if laid else nothing, whole if first else nothing, sums


@spread_gradient.register_fake
def _(
    gradient: Tensor,
    places: Tensor,
    channels: int,
    size: Pair,
    given_first: bool,
    places_first: bool,
    laid: bool,
    first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    lanes, samples = gradient.shape[:2]
    return (
        gradient.new_empty((lanes, samples, *size, room(channels)) if laid else (0,)),
        gradient.new_empty((lanes, samples, channels, *size) if first else (0,)),
        gradient.new_empty(parts_of(samples * size[0] * size[1], channels).parts, lanes, channels),
    )


@torch.library.custom_op("sartor::add_up", mutates_args=(), schema="(Tensor parts) -> Tensor")
def add_up(parts: Tensor) -> Tensor:
    """The sum over the first axis; a number's does not depend on how many others there are."""
    if parts.is_cuda:
        from sartor.kernels import moves_triton

        result: Tensor = moves_triton.add_up(parts)
        return result
    return parts.sum(0)


@add_up.register_fake
def _(parts: Tensor) -> Tensor:
    return parts.new_empty(parts.shape[1:])


@torch.library.custom_op(
    "sartor::laid_input_gradient",
    mutates_args=(),
    schema="(Tensor weight, Tensor gradient, int[] stride, int[] padding, int[] image, bool first) -> Tensor",
)
def laid_input_gradient(
    weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair, first: bool
) -> Tensor:
    """The gradient for images of size ``image`` from the laid one for the result; laid, or channels first."""
    if gradient.is_cuda:
        from sartor.kernels import laid_triton

        result: Tensor = laid_triton.input_gradient(weight, gradient, stride, padding, image, first)
        return result
    shape = _Shape(stride, padding, image, (weight.shape[-2], weight.shape[-1]))
    whole = _one_by_one("image", weight, _first(gradient, weight.shape[1]), None, shape)
    return whole if first else _laid(whole)


@laid_input_gradient.register_fake
def _(weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair, first: bool) -> Tensor:
    channels = weight.shape[2]
    size = (channels, *image) if first else (*image, room(channels))
    return gradient.new_empty(*gradient.shape[:2], *size)


class Tiles(NamedTuple):
    """How a product is cut: ``rows`` × ``columns`` of the result per program, ``depth`` terms at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def over(self, rows: int, columns: int) -> int:
        """How many there are of a product of this size."""
        return -(-rows // self.rows) * -(-columns // self.columns)


def convolve_tiles(out: int, channels: int, positions: int, lanes: int) -> Tiles:
    """Measured on an H200: few positions leave room for more programs with fewer of them.

    A lane's sums have the same terms in the same order with all of these. 64 × 16 by four warps is a shape
    that Triton compiles wrongly.
    """
    columns = power(out, 16, 128)
    programs = -(-positions // 128) * -(-out // columns) * lanes
    if positions < 2048 or (columns == 32 and programs < 450):
        deep = columns == 32 and channels % 64 == 0 and programs <= FEW_PROGRAMS
        warps, stages = 2 if columns == 16 else 4, 3 if columns == 128 else 4
        return Tiles(64, columns, 64 if deep else 32, warps, stages)
    if columns == channels == 16:  # all terms of a tile are of one place in the window
        return Tiles(256, columns, 16, warps=4, stages=3)
    warps = 8 if columns == 64 and programs >= 2 * FEW_PROGRAMS else 4
    return Tiles(128, columns, 32, warps, stages={16: 2, 32: 4}.get(columns, 3))


def abreast(channels: int, width: int) -> int:
    """How many neighbouring positions of an image fill a tile's columns, of which there are 16 at least.

    >>> abreast(6, 14), abreast(6, 13), abreast(3, 32), abreast(16, 32)
    (2, 1, 4, 1)
    """
    side = max(1, 16 // room(channels))
    return math.gcd(side, width)


class Split(NamedTuple):
    """How a weights' gradient is cut: tiles, whether a window's rows are the gradient's (``_correlate``),
    columns of an image's row in a tile, tiles per part, and parts.
    """

    tiles: Tiles
    risen: bool
    line: int
    share: int
    parts: int


def split(
    gradient: torch.Size,
    weight: Sequence[int],
    stride: Pair,
    tiles: Tiles | None = None,
    risen: bool | None = None,
) -> Split:
    """The way to add up weights [O, C, h, w] from a gradient [L, B, O, h, w], however many lanes there are.

    There are enough programs per lane to fill the device, and at least a thousand positions for each of them;
    half as many where all weights are a tile or two, and other lanes are needed to fill it.
    """
    height = gradient[3]
    if risen is None:
        plain, other = (_loaded(*sides_of(weight, way)) for way in (False, True))
        risen = stride[0] == 1 and 2 * other * (height + weight[2] - 1) < plain * height
    sides = sides_of(weight, risen)
    tiles = tiles or _correlate_tiles(*sides)
    line = power(gradient[4], 1, tiles.depth)
    high = height + weight[2] - 1 if risen else height
    pieces = gradient[1] * -(-high // (tiles.depth // line)) * -(-gradient[4] // line)
    programs = tiles.over(*sides)
    most, least = (64, 512) if programs <= 2 else (-(-64 // programs), 1024)
    share = -(-pieces // max(1, min(most, pieces * tiles.depth // least)))
    return Split(tiles, risen, line, share, -(-pieces // share))


def sides_of(weight: Sequence[int], risen: bool) -> Pair:
    """Rows and columns of the product that weights [O, C, h, w] are."""
    out, channels, high, wide = weight
    return (out * high, channels * wide) if risen else (out, channels * high * wide)


def _loaded(rows: int, columns: int) -> int:
    """What is loaded for a position: an image's numbers one by one, a gradient's by fours.

    On an H200 it must be less than half for a window's rows to go to the gradient, which is read from further
    away then: the first layer of LeNet takes 99 instead of 239 µs, all others tried (ratios 0.75 to 1.5 of
    what is loaded) take longer.
    """
    tiles = _correlate_tiles(rows, columns)
    return tiles.over(rows, columns) * (tiles.columns + tiles.rows // 4)


def _correlate_tiles(rows: int, columns: int) -> Tiles:
    """The tiles for which the least is loaded, by which an H200 takes its time.

    An image's numbers are loaded one by one, once for every tile of rows; a gradient's by fours, once for
    every tile of columns. Where one tile would be all, two are.
    """
    high = power(rows, 16, 128)
    widths = (32, 64, 128) if high == 16 else (16, 32, 64, 128)
    wide = min(widths, key=lambda width: -(-columns // width) * (width + high // 4))
    if rows <= high and columns <= wide and min(high, wide) > 16:
        high //= 2
    warps = power(high * wide // 512, 1, 4) if high * wide < 128 * 128 else 8
    return Tiles(high, wide, 32, warps, stages=3)


@torch.library.custom_op(
    "sartor::first_weight_gradient",
    mutates_args=(),
    schema="(Tensor x, Tensor gradient, int[] stride, int[] kernel) -> Tensor",
)
def first_weight_gradient(x: Tensor, gradient: Tensor, stride: Pair, kernel: Pair) -> Tensor:
    """The gradient for weights of size ``kernel`` from images with their border and the result's gradient.

    Both have their channels first. It comes in parts, [parts, L, O, C, *kernel], that are to be added up.
    """
    if x.is_cuda:
        from sartor.kernels import convolution_triton

        result: Tensor = convolution_triton.correlate(x, gradient, stride, kernel)
        return result
    shape = _Shape(stride, (0, 0), (x.shape[-2], x.shape[-1]), kernel)
    whole = _one_by_one("weight", x, gradient, None, shape)
    return _in_parts(whole, split(gradient.shape, whole.shape[1:], stride).parts)


@first_weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, stride: Pair, kernel: Pair) -> Tensor:
    weight = (gradient.shape[2], x.shape[2], *kernel)
    return x.new_empty(split(gradient.shape, weight, stride).parts, x.shape[0], *weight)
