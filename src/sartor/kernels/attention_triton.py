"""Attention of many lanes as Triton kernels; ``attention.py`` says what they compute. Needs Triton.

A program holds all tokens of one head of a sample. The gradients compute the shares anew, which takes less
time than to fetch them.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn


@triton.jit
def _tile(start, rows, columns, row_step, column_step, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of a matrix's numbers, and which of them are there."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = start + row[:, None] * row_step + column[None, :] * column_step
    return at, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _shares(query, turned_key, scale, OTHERS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """softmax(query · key · scale), with nothing for columns that are not there."""
    scores = tl.dot(query, turned_key, input_precision=PRECISION) * scale
    scores = tl.where((tl.arange(0, COLUMNS) < OTHERS)[None, :], scores, float("-inf"))
    powers = tl.exp(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _attend(
    query,  # [sample, head, LENGTH, WIDTH]
    turned_key,  # [sample, head, WIDTH, OTHERS]
    value,  # [sample, head, OTHERS, DEPTH]
    result,  # [sample, head, LENGTH, DEPTH]
    heads,
    scale,
    query_sample, query_head, query_row, query_column,
    key_sample, key_head, key_row, key_column,
    value_sample, value_head, value_row, value_column,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHERS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
):  # fmt: skip
    """The attention of one head."""
    wait_turn()
    program = tl.program_id(0).to(tl.int64)
    sample, head = program // heads, program % heads
    start = sample * query_sample + head * query_head
    at, there = _tile(start, LENGTH, WIDTH, query_row, query_column, ROWS, INNER)
    queries = tl.load(query + at, mask=there, other=0.0)
    start = sample * key_sample + head * key_head
    at, there = _tile(start, WIDTH, OTHERS, key_row, key_column, INNER, COLUMNS)
    keys = tl.load(turned_key + at, mask=there, other=0.0)
    start = sample * value_sample + head * value_head
    at, there = _tile(start, OTHERS, DEPTH, value_row, value_column, COLUMNS, OUTER)
    values = tl.load(value + at, mask=there, other=0.0)
    shares = _shares(queries, keys, scale, OTHERS, COLUMNS, PRECISION)
    mixed = tl.dot(shares, values, input_precision=PRECISION)
    at, there = _tile(program * (LENGTH * DEPTH), LENGTH, DEPTH, DEPTH, 1, ROWS, OUTER)
    tl.store(result + at, mixed, mask=there)


@triton.jit
def _differentiate(
    gradient,  # [sample, head, LENGTH, DEPTH]
    query,  # [sample, head, LENGTH, WIDTH]
    turned_key,  # [sample, head, WIDTH, OTHERS]
    value,  # [sample, head, OTHERS, DEPTH]
    by_query,
    by_key,  # [sample, head, WIDTH, OTHERS]
    by_value,
    heads,
    scale,
    gradient_sample, gradient_head, gradient_row, gradient_column,
    query_sample, query_head, query_row, query_column,
    key_sample, key_head, key_row, key_column,
    value_sample, value_head, value_row, value_column,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHERS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
):  # fmt: skip
    """The gradients of one head."""
    wait_turn()
    program = tl.program_id(0).to(tl.int64)
    sample, head = program // heads, program % heads
    start = sample * query_sample + head * query_head
    at, there = _tile(start, LENGTH, WIDTH, query_row, query_column, ROWS, INNER)
    queries = tl.load(query + at, mask=there, other=0.0)
    start = sample * key_sample + head * key_head
    at, there = _tile(start, WIDTH, OTHERS, key_row, key_column, INNER, COLUMNS)
    keys = tl.load(turned_key + at, mask=there, other=0.0)
    start = sample * value_sample + head * value_head
    at, there = _tile(start, OTHERS, DEPTH, value_row, value_column, COLUMNS, OUTER)
    values = tl.load(value + at, mask=there, other=0.0)
    start = sample * gradient_sample + head * gradient_head
    at, there = _tile(start, LENGTH, DEPTH, gradient_row, gradient_column, ROWS, OUTER)
    given = tl.load(gradient + at, mask=there, other=0.0)
    shares = _shares(queries, keys, scale, OTHERS, COLUMNS, PRECISION)
    at, there = _tile(program * (OTHERS * DEPTH), OTHERS, DEPTH, DEPTH, 1, COLUMNS, OUTER)
    tl.store(by_value + at, tl.dot(tl.trans(shares), given, input_precision=PRECISION), mask=there)
    by_shares = tl.dot(given, tl.trans(values), input_precision=PRECISION)
    slopes = shares * (by_shares - tl.sum(shares * by_shares, 1)[:, None]) * scale
    at, there = _tile(program * (LENGTH * WIDTH), LENGTH, WIDTH, WIDTH, 1, ROWS, INNER)
    tl.store(by_query + at, tl.dot(slopes, tl.trans(keys), input_precision=PRECISION), mask=there)
    at, there = _tile(program * (WIDTH * OTHERS), WIDTH, OTHERS, OTHERS, 1, INNER, COLUMNS)
    tl.store(by_key + at, tl.dot(tl.trans(queries), slopes, input_precision=PRECISION), mask=there)


def attend(query: Tensor, turned_key: Tensor, value: Tensor, scale: float) -> Tensor:
    """See ``attention.stacked_attention``."""
    result = query.new_empty(*query.shape[:3], value.shape[3])
    strides = (*query.stride(), *turned_key.stride(), *value.stride())
    with torch.cuda.device_of(query):
        _attend[(query.shape[0] * query.shape[1],)](
            query, turned_key, value, result, query.shape[1], scale, *strides,
            *_sizes(query, value), num_warps=4, **EARLY,
        )  # fmt: skip
    return result


def gradients(
    gradient: Tensor, query: Tensor, turned_key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``attention.stacked_attention_gradient``."""
    by_query, by_key, by_value = (part.new_empty(part.shape) for part in (query, turned_key, value))
    strides = (*gradient.stride(), *query.stride(), *turned_key.stride(), *value.stride())
    with torch.cuda.device_of(query):
        _differentiate[(query.shape[0] * query.shape[1],)](
            gradient, query, turned_key, value, by_query, by_key, by_value, query.shape[1], scale, *strides,
            *_sizes(query, value), num_warps=4, **EARLY,
        )  # fmt: skip
    return by_query, by_key, by_value


def _sizes(query: Tensor, value: Tensor) -> tuple[int | str, ...]:
    """Tokens and numbers, the precision, and the tiles for them."""
    sizes = (query.shape[2], query.shape[3], value.shape[2], value.shape[3])
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
    return *sizes, precision, *(max(16, triton.next_power_of_2(size)) for size in sizes)
