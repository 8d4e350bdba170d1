"""Convolutions of many sizes on CUDA, where a compiler may err for some of them only.

Operands are small whole numbers, of which every product and sum is exact.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sartor.kernels import laid
from sartor.kernels.device import Computing

pytestmark = pytest.mark.cuda
CHANNELS = (1, 3, 6, 8, 12, 16, 20, 32, 48, 64, 96)


def draw(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def same(ours: Tensor, theirs: Tensor, case: Any) -> None:
    assert torch.equal(ours.cpu(), theirs), case


@pytest.mark.parametrize("seed", range(60))
def test_a_convolution_of_any_size(seed: int) -> None:
    from sartor.kernels import convolution_triton, laid_triton

    pick = random.Random(seed)
    channels, out, size = pick.choice(CHANNELS), pick.choice(CHANNELS), pick.choice((7, 14, 24))
    batch, kernel = pick.choice((2, 20)), pick.choice((1, 3, 5))
    stride, padding = pick.choice((1, 1, 2)), pick.choice((0, kernel // 2))
    case = (batch, channels, size, out, kernel, stride, padding)
    x, weight = draw(2, batch, channels, size, size), draw(2, out, channels, kernel, kernel)
    bias = draw(2, out)
    images, window = laid.laid_images(x, None, x.shape[:2]), ((stride, stride), (padding, padding))
    for pool in (False, True):
        expected, _ = laid.laid_conv(images, weight, bias, *window, pool, pool, False)
        found, _ = laid_triton.convolve(images.cuda(), weight.cuda(), bias.cuda(), *window, pool, pool, False)
        same(found, expected, case)
    after = (size + 2 * padding - kernel) // stride + 1
    gradient = draw(2, batch, out, after, after)
    given = laid.laid_images(gradient, None, gradient.shape[:2])
    back = laid.laid_input_gradient(weight, given, *window, (size, size), False)
    found = laid_triton.input_gradient(weight.cuda(), given.cuda(), *window, (size, size), False)
    same(found, back, case)
    bordered = laid.first_images(x, None, x.shape[:2], 0, window[1])
    parts = laid.first_weight_gradient(bordered, gradient, window[0], (kernel, kernel))
    found = convolution_triton.correlate(bordered.cuda(), gradient.cuda(), window[0], (kernel, kernel))
    same(found.sum(0), parts.sum(0), case)


SHAPES = [(32, 64, 32, 14, 5, 2), (10, 64, 32, 12, 5, 0), (32, 32, 64, 14, 5, 2), (32, 64, 48, 8, 3, 1)]
"""Samples, channels of the result and of the image, its height and width, the window's, its padding."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_is_the_same_to_the_bit_however_many_lanes_there_are(shape: tuple[int, ...]) -> None:
    """Few lanes have other tiles; here numbers are any, and sums round."""
    from sartor.kernels import laid_triton

    batch, out, channels, size, kernel, padding = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, batch, channels, size, size, generator=generator)
    weight = torch.randn(10, out, channels, kernel, kernel, generator=generator).cuda()
    after = size + 2 * padding - kernel + 1
    gradient = torch.randn(10, batch, out, after, after, generator=generator)
    images, given = (laid.laid_images(value, None, value.shape[:2]).cuda() for value in (x, gradient))
    window = ((1, 1), (padding, padding))

    def both(lanes: int) -> list[Tensor]:
        pooled = after % 2 == 0
        own = (images[:lanes], weight[:lanes], None, *window, pooled, pooled, False)
        back = (weight[:lanes], given[:lanes], *window, (size, size), False)
        return [laid_triton.convolve(*own)[0], laid_triton.input_gradient(*back)]

    every = both(10)
    for lanes in range(1, 10):
        for one, other in zip(both(lanes), every, strict=True):
            assert torch.equal(one, other[:lanes]), lanes


@pytest.mark.parametrize("precision", ["full", "tf32"])
@pytest.mark.parametrize("rows", [10, 32, 100])
@pytest.mark.parametrize("along", [False, True])
def test_a_product_is_the_same_to_the_bit_however_many_lanes_there_are(
    rows: int, along: bool, precision: str
) -> None:
    from sartor.kernels import products_triton

    generator = torch.Generator().manual_seed(0)
    left = torch.randn(20, rows, 1000, generator=generator).cuda()
    right = torch.randn(20, 500, 1000, generator=generator).cuda()
    right = right.transpose(1, 2) if along else right.transpose(1, 2).contiguous()
    with Computing(precision):
        for terms in (256, 1000):
            every = products_triton.multiply(left, right, None, False, terms)
            for lanes in (1, 2, 3, 5, 8, 13):
                some = products_triton.multiply(left[:lanes], right[:lanes], None, False, terms)
                assert torch.equal(some, every[:, :lanes]), lanes
