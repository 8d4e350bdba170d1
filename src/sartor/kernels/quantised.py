"""Rows of numbers as codes of few bits and back, an operation each; ``transforms/quantised.py`` says which.

A number is divided by its scale, rounded by chance and put into its place of a byte, which takes thirty
operations one by one, each over all numbers. The kernels are in ``quantised_triton.py``; where there are
none, transforms do without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sartor.kernels.gpu import HAS_TRITON


def by_kernel(x: Tensor) -> bool:
    """Whether there are kernels for such numbers."""
    return x.is_cuda and HAS_TRITON and x.dtype in (torch.float32, torch.float64)


@torch.library.custom_op("sartor::quantised", mutates_args=())
def quantised(x: Tensor, scale: Tensor, keys: Tensor, most: int, block: int, bits: int) -> Tensor:
    """Codes of so many ``bits`` for rows ``x`` [L, size], in bytes: the multiple of the scale, plus ``most``.

    A scale [L, blocks] is for ``block`` numbers and stands for ``most``; a row's chances are drawn by its key
    [L]. With ``most`` 0 a code is 1 where the number is not negative.
    """
    from sartor.kernels import quantised_triton

    result: Tensor = quantised_triton.quantised(x, scale, keys, most, block, bits)
    return result


@torch.library.custom_op("sartor::restored", mutates_args=())
def restored(codes: Tensor, scale: Tensor, size: int, most: int, block: int, bits: int) -> Tensor:
    """The numbers [L, size] of which these are the codes; with ``most`` 0 the scale with a sign."""
    from sartor.kernels import quantised_triton

    if codes.shape[1] != -(-size * min(bits, 8) // 8) or scale.shape[1] != -(-size // block):
        raise ValueError(f"no codes and scales of {size} numbers: {list(codes.shape)}, {list(scale.shape)}")
    result: Tensor = quantised_triton.restored(codes, scale, size, most, block, bits)
    return result


@quantised.register_fake
def _(x: Tensor, scale: Tensor, keys: Tensor, most: int, block: int, bits: int) -> Tensor:
    kind = torch.int16 if bits == 16 else torch.uint8
    return x.new_empty(len(x), -(-x.shape[1] * min(bits, 8) // 8), dtype=kind)


@restored.register_fake
def _(codes: Tensor, scale: Tensor, size: int, most: int, block: int, bits: int) -> Tensor:
    return scale.new_empty(len(codes), size)


def _rows(count: int, value: Tensor, axis: int | None) -> Tensor:
    """The rows of all that are mapped over, below each other."""
    moved = value.expand(count, *value.shape) if axis is None else value.movedim(axis, 0)
    return moved.flatten(0, 1)


@quantised.register_vmap
def _(info: Any, axes: Any, x: Tensor, scale: Tensor, keys: Tensor, *rest: int) -> tuple[Tensor, int]:
    given = [_rows(info.batch_size, *pair) for pair in zip((x, scale, keys), axes[:3], strict=True)]
    return quantised(*given, *rest).unflatten(0, (info.batch_size, -1)), 0


@restored.register_vmap
def _(info: Any, axes: Any, codes: Tensor, scale: Tensor, *rest: int) -> tuple[Tensor, int]:
    given = [_rows(info.batch_size, *pair) for pair in zip((codes, scale), axes[:2], strict=True)]
    return restored(*given, *rest).unflatten(0, (info.batch_size, -1)), 0
