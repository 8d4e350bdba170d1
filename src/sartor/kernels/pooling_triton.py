"""The gradient of max pooling as a Triton kernel; ``pooling.py`` says what it computes. Needs Triton."""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn

BLOCK = 1024


@triton.jit
def _spread(
    gradient,  # [plane, OUT_HEIGHT, OUT_WIDTH]
    indices,  # the same: the place of each maximum in its plane of the image
    result,  # [plane, HEIGHT, WIDTH]
    total,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every place of the image takes its window's gradient if it held the maximum."""
    wait_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = at % (HEIGHT * WIDTH)
    y = place // WIDTH // KERNEL_HEIGHT
    x = place % WIDTH // KERNEL_WIDTH
    inside = (at < total) & (y < OUT_HEIGHT) & (x < OUT_WIDTH)
    window = at // (HEIGHT * WIDTH) * (OUT_HEIGHT * OUT_WIDTH) + y * OUT_WIDTH + x
    held = tl.load(indices + window, mask=inside, other=-1)
    given = tl.load(gradient + window, mask=inside, other=0.0)
    tl.store(result + at, tl.where(held == place, given, 0.0), mask=at < total)


def spread(gradient: Tensor, indices: Tensor, image: list[int], kernel: list[int]) -> Tensor:
    """See ``pooling.pool_gradient``."""
    result = gradient.new_empty(*gradient.shape[:2], *image)
    if result.numel():
        with torch.cuda.device_of(gradient):
            _spread[(triton.cdiv(result.numel(), BLOCK),)](
                gradient.contiguous(), indices.contiguous(), result, result.numel(),
                *image, *gradient.shape[2:], *kernel, BLOCK, **EARLY,
            )  # fmt: skip
    return result
