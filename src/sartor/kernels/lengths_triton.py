"""The lengths of short rows as a Triton kernel; ``lengths.py`` says what it is for. Needs Triton.

PyTorch reads a few rows of some thousand numbers in three times as long as one program for each.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn

BLOCK = 8192
"""Numbers that a program reads at once."""


@triton.jit(do_not_specialize=["size"])
def _lengths(rows, result, size, ahead, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The norm of one row; each begins ``ahead`` of the one before.

    Its parts are not waited for one after the other.
    """
    wait_turn()
    row = tl.program_id(0).to(tl.int64)
    rows += row * ahead
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = part * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(rows + at, mask=at < size, other=0.0)
        total += value * value
    tl.store(result + row, tl.sqrt_rn(tl.sum(total, 0)))


def lengths(rows: Tensor) -> Tensor:
    """See ``lengths.lengths``."""
    count, size = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    result = torch.empty(count, dtype=rows.dtype, device=rows.device)
    block = min(BLOCK, triton.next_power_of_2(size))
    if count:
        with torch.cuda.device_of(rows):
            _lengths[(count,)](
                rows, result, size, rows.stride(0), triton.cdiv(size, block), block,
                num_warps=max(1, min(16, block // 128)), **EARLY,
            )  # fmt: skip
    return result
