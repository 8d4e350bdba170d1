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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
