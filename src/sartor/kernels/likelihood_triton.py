"""The gradient of log-likelihoods as a Triton kernel; see ``likelihood.py``. Needs Triton."""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=["numbers", "real"])
def _pull(
    parts,  # [part, lane, SAMPLES, CLASSES]
    bias,  # [lane, CLASSES]
    targets,  # [lane, SAMPLES], or a row of them where they are numbered
    numbers,  # [lane, SAMPLES]
    each,  # [lane, SAMPLES]
    real,  # [lane]
    result,  # [lane, SAMPLES, CLASSES]
    even,
    lanes,
    SAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS_LANE: tl.constexpr,  # from one lane to the next
    BIASED: tl.constexpr,
    NUMBERED: tl.constexpr,
    SHARES: tl.constexpr,  # 0: even ones, 1: each its own, 2: those of the real samples
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """result[sample, class] = share · (1[class is its own] - softmax(scores)[class])."""
    wait_turn()
    TILES: tl.constexpr = (SAMPLES + ROWS - 1) // ROWS
    lane = (tl.program_id(0) // TILES).to(tl.int64)
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    row_there = row < SAMPLES
    column_there = column < CLASSES
    there = row_there[:, None] & column_there[None, :]
    at = lane * (SAMPLES * CLASSES) + (row * CLASSES)[:, None] + column[None, :]
    scores = tl.load(parts + at, mask=there, other=0.0)
    for part in range(1, PARTS):
        scores += tl.load(parts + part * lanes * (SAMPLES * CLASSES) + at, mask=there, other=0.0)
    if BIASED:
        scores += tl.load(bias + lane * BIAS_LANE + column, mask=column_there, other=0.0)[None, :]
    scores = tl.where(column_there[None, :], scores, float("-inf"))
    scores -= tl.max(scores, 1)[:, None]
    likelihood = scores - tl.log(tl.sum(tl.exp(scores), 1))[:, None]
    place = lane * SAMPLES + row
    share = tl.zeros((ROWS,), tl.float32) + even
    if SHARES == 1:
        share = tl.load(each + place, mask=row_there, other=0.0)
    if SHARES == 2:
        count = tl.load(real + lane)
        share = -(tl.div_rn(1.0, count.to(tl.float32)) * (row < count).to(tl.float32))
    if NUMBERED:
        place = tl.load(numbers + place, mask=row_there, other=0)
    mine = tl.load(targets + place, mask=row_there, other=0)
    given = tl.where(mine[:, None] == column[None, :], share[:, None], 0.0)
    tl.store(result + at, given - tl.exp(likelihood) * share[:, None], mask=there)


def pulled(
    parts: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    numbers: Tensor | None,
    each: Tensor | None,
    even: float,
    real: Tensor | None,
) -> Tensor:
    """See ``likelihood.likelihood_gradient``."""
    parts = parts.contiguous()
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    many, lanes, samples, classes = parts.shape
    result = parts.new_empty(parts.shape[1:])
    columns = triton.next_power_of_2(classes)
    rows = max(1, min(16, 2048 // columns))
    shares = 2 if real is not None else int(each is not None)
    given = (value if value is None else value.contiguous() for value in (targets, numbers, each, real))
    if result.numel():
        with torch.cuda.device_of(parts):
            _pull[(triton.cdiv(samples, rows) * lanes,)](
                parts, parts if bias is None else bias,
                *(result if value is None else value for value in given), result, even, lanes,
                samples, classes, many, 0 if bias is None else bias.stride(0), bias is not None,
                numbers is not None, shares, rows, columns, num_warps=1, **EARLY,
            )  # fmt: skip
    return result
