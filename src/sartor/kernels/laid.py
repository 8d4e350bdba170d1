"""Convolutions of lanes on images whose channels lie last, with ReLU and pooling in the same operation.

A traced step for a GPU holds these operations in place of those of ``convolution.py`` (``fused.py`` puts them
there): four channels of a position are one load, and images are stored once they are pooled. *Laid* images
are [L, B, H, W, room], with room for a multiple of four channels and zeros in what is left of it. On a CPU
the lanes are gone through one by one, which gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.kernels.convolution import Pair, _one_by_one, _Shape

NOWHERE = 4
"""The place of a maximum that ReLU cuts off: no gradient goes there."""


def room(channels: int) -> int:
    """Places for so many channels: fours, so that a load takes four of them."""
    return -(-channels // 4) * 4


def _products() -> Any:
    from sartor.kernels import laid_triton

    return laid_triton


def _moves() -> Any:
    from sartor.kernels import moves_triton

    return moves_triton


def _laid(images: Tensor) -> Tensor:
    """Images [L, B, C, H, W] as they are laid."""
    channels = images.shape[2]
    return F.pad(images.permute(0, 1, 3, 4, 2), (0, room(channels) - channels)).contiguous()


def _first(images: Tensor, channels: int) -> Tensor:
    """Laid images with their channels first again."""
    return images[..., :channels].permute(0, 1, 4, 2, 3).contiguous()


@torch.library.custom_op(
    "sartor::laid_images",
    mutates_args=(),
    schema="(Tensor images, Tensor? numbers, int[] shape) -> Tensor",
)
def laid_images(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    """Images [L, B, C, H, W], or those of [N, C, H, W] with these ``numbers`` for ``shape`` = L, B, laid."""
    if images.is_cuda:
        result: Tensor = _moves().lay(images, numbers, shape)
        return result
    return _laid(images if numbers is None else images[numbers].unflatten(0, shape))


@laid_images.register_fake
def _(images: Tensor, numbers: Tensor | None, shape: Pair) -> Tensor:
    channels, height, width = images.shape[-3:]
    return images.new_empty(*shape, height, width, room(channels))


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
        both: tuple[Tensor, Tensor] = _products().convolve(
            x, weight, bias, stride, padding, relu, pool, first
        )
        return both
    shape = _Shape(stride, padding, (x.shape[2], x.shape[3]), (weight.shape[-2], weight.shape[-1]))
    result = _one_by_one("result", _first(x, weight.shape[2]), weight, bias, shape)
    places = torch.zeros_like(result, dtype=torch.uint8)
    if pool:
        maxima, indices = F.max_pool2d(result.flatten(0, 1), 2, return_indices=True)
        width = result.shape[-1]
        indices = indices // width % 2 * 2 + indices % width % 2
        places = indices.unflatten(0, result.shape[:2]).to(torch.uint8)
        result = maxima.unflatten(0, result.shape[:2])
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
    height, width = (n // 2 for n in shape.result) if pool else shape.result
    out = weight.shape[1]
    size = (out, height, width) if first else (height, width, room(out))
    result = x.new_empty(*x.shape[:2], *size)
    places = result.new_empty(result.shape if relu or pool else (0,), dtype=torch.uint8)
    return result, places


@torch.library.custom_op(
    "sartor::laid_spread",
    mutates_args=(),
    schema="(Tensor gradient, Tensor places, int channels, int[] size, bool given_first, bool places_first) "
    "-> (Tensor, Tensor)",
)
def laid_spread(
    gradient: Tensor, places: Tensor, channels: int, size: Pair, given_first: bool, places_first: bool
) -> tuple[Tensor, Tensor]:
    """What the gradient of :func:`laid_conv`'s result says about the convolution alone, of this ``size``.

    It is laid; with it go sums over parts of the positions, [parts, L, C], which together are the bias's.
    """
    if gradient.is_cuda:
        both: tuple[Tensor, Tensor] = _moves().spread(
            gradient, places, channels, size, given_first, places_first
        )
        return both
    gradient = gradient if given_first else _first(gradient, channels)
    places = places if places_first else _first(places, channels)
    side = 1 if tuple(gradient.shape[-2:]) == tuple(size) else 2
    own = torch.arange(side * side, dtype=torch.uint8).view(side, 1, side)
    held = places[..., :, None, :, None] == own
    windows = torch.where(held, gradient[..., :, None, :, None], torch.zeros((), dtype=gradient.dtype))
    whole = windows.flatten(-4, -3).flatten(-2)
    whole = F.pad(whole, (0, size[1] - whole.shape[-1], 0, size[0] - whole.shape[-2]))
    return _laid(whole), whole.sum((1, 3, 4))[None]


@laid_spread.register_fake
def _(
    gradient: Tensor, places: Tensor, channels: int, size: Pair, given_first: bool, places_first: bool
) -> tuple[Tensor, Tensor]:
    lanes, samples = gradient.shape[:2]
    return gradient.new_empty(lanes, samples, *size, room(channels)), gradient.new_empty(1, lanes, channels)


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
        result: Tensor = _products().input_gradient(weight, gradient, stride, padding, image, first)
        return result
    shape = _Shape(stride, padding, image, (weight.shape[-2], weight.shape[-1]))
    whole = _one_by_one("image", weight, _first(gradient, weight.shape[1]), None, shape)
    return whole if first else _laid(whole)


@laid_input_gradient.register_fake
def _(weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair, first: bool) -> Tensor:
    channels = weight.shape[2]
    size = (channels, *image) if first else (*image, room(channels))
    return gradient.new_empty(*gradient.shape[:2], *size)


@torch.library.custom_op(
    "sartor::laid_weight_gradient",
    mutates_args=(),
    schema="(Tensor x, Tensor gradient, int channels, int out, int[] stride, int[] padding, int[] kernel) "
    "-> Tensor",
)
def laid_weight_gradient(
    x: Tensor, gradient: Tensor, channels: int, out: int, stride: Pair, padding: Pair, kernel: Pair
) -> Tensor:
    """The gradient for weights [L, out, channels, *kernel] from images and the result's gradient, laid."""
    if x.is_cuda:
        result: Tensor = _products().weight_gradient(x, gradient, channels, out, stride, padding, kernel)
        return result
    shape = _Shape(stride, padding, (x.shape[2], x.shape[3]), kernel)
    return _one_by_one("weight", _first(x, channels), _first(gradient, out), None, shape)


@laid_weight_gradient.register_fake
def _(
    x: Tensor, gradient: Tensor, channels: int, out: int, stride: Pair, padding: Pair, kernel: Pair
) -> Tensor:
    return x.new_empty(x.shape[0], out, channels, *kernel)
