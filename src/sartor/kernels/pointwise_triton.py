"""Programs that go through vectors number by number, each as a Triton kernel; see ``pointwise.py``.

This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import json
import linecache
import math
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from sartor.kernels.early_triton import EARLY, wait_turn

BLOCK = 1024
"""Numbers of one program."""

_LARGEST = 2**31 - 1
"""Places of a row are counted in 32 bits."""

_WRITTEN = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})",
    "neg": "-{0}",
    "sqrt": "tl.sqrt_rn({0})",
    "abs": "tl.abs({0})",
    "reciprocal": "tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), {0})",
    "maximum": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    "where": "tl.where({0} != 0, {1}, {2})",
}
"""What steps are in Triton's language; a last operand more is a factor of the one before it."""

_OPERANDS = {"neg": 1, "sqrt": 1, "abs": 1, "reciprocal": 1, "where": 3}


def _source(program: str, spread: Sequence[bool]) -> str:
    """The kernel: which inputs are ``spread`` over a row, and which have one number for each lane."""
    steps, given = json.loads(program)
    inputs, results = range(len(spread)), range(len(given))
    lines = []
    for number, wide in enumerate(spread):
        place = f"input_{number} + lane * ahead_{number}"
        lines.append(
            f"value_{number} = tl.load({place} + at, mask=some, other=0)"
            if wide
            else f"value_{number} = tl.full((BLOCK,), 0.0, tl.float32) + tl.load({place})"
        )
    for number, (name, *parts) in enumerate(steps, len(spread)):
        operands = [
            f"value_{part}" if isinstance(part, int) else f"tl.full((BLOCK,), {part!r}, tl.float32)"
            for part in parts
        ]
        if len(operands) > _OPERANDS.get(name, 2):
            factor = operands.pop()
            operands[-1] = f"{factor} * {operands[-1]}"
        lines.append(f"value_{number} = {_WRITTEN[name].format(*operands)}")
    for number, place in enumerate(given):
        lines.append(f"tl.store(result_{number} + lane * size + at, value_{place}, mask=some)")
    arguments = [
        *(f"result_{number}" for number in results),
        *(f"input_{number}" for number in inputs),
        *(f"ahead_{number}" for number in inputs),
    ]
    head = f"""\
def _pointwise({", ".join(arguments)}, blocks, size, BLOCK: tl.constexpr):
    wait_turn()
    block = tl.program_id(0) % blocks
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    some = at < size
"""
    return head + "".join(f"    {line}\n" for line in lines)


@cache
def _kernel(program: str, spread: tuple[bool, ...]):
    """The kernel of a program, whose source Triton finds where Python keeps lines of files.

    That is written here, of names and numbers alone: nothing of what anybody sends is in it.
    """
    source = _source(program, spread)
    name = f"<pointwise {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"tl": tl, "wait_turn": wait_turn, "__name__": __name__}
    exec(compile(source, name, "exec"), namespace)
    return triton.jit(namespace["_pointwise"], do_not_specialize=["blocks"])


def pointwise(inputs: Sequence[Tensor], program: str, into: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """See ``pointwise.computed``: a program reads all that it needs of its places before it writes there."""
    shape = torch.broadcast_shapes(*(value.shape for value in inputs))
    like = next(value for value in inputs if value.dtype == torch.float32)
    wanted = zip_longest(json.loads(program)[1], into)
    results = [like.new_empty(shape) if place is None else place for _, place in wanted]
    lanes, size = shape
    every = [value.expand(shape) for value in inputs]
    # Where rows follow one another they are as good as one.
    if math.prod(shape) <= _LARGEST and all(
        value.is_contiguous() or not any(value.stride()) for value in every
    ):
        lanes, size = 1, math.prod(shape)
        every = [value.reshape(1, -1) if any(value.stride()) else value for value in every]
    every = [value if value.stride(1) in (0, 1) else value.contiguous() for value in every]
    spread = tuple(value.stride(1) == 1 or size == 1 for value in every)
    blocks = triton.cdiv(size, BLOCK)
    with torch.cuda.device_of(like):
        _kernel(program, spread)[(blocks * lanes,)](
            *results, *every, *(value.stride(0) for value in every), blocks, size, BLOCK, **EARLY
        )
    return results
