"""What travels between a server and its nodes: a JSON header and tensors, as bytes.

A message is a few named *parts*: the header, and one part for every group of tensors that belong together, so
that what all nodes are sent alike is the same bytes for all of them. The header says which tensors a part
holds; it is compared with what is expected, and with the size of the part, before a tensor is made. Nothing
that arrives is ever executed.

>>> parts = encode({"round": 3}, {"shared": {"w": torch.ones(2)}})
>>> sorted(parts), len(parts["shared"])
(['header', 'shared'], 8)
>>> header, groups = decode(parts)
>>> header["round"], groups["shared"]["w"].tolist()
(3, [1.0, 1.0])
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sartor.errors import SartorError
from sartor.runs.record import bytes_of

Parts = dict[str, bytes]
Spec = tuple[str, tuple[int, ...]]
"""The type and the shape of a tensor."""
Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors that belong together."""
Expected = Mapping[str, Mapping[str, Spec]]
Message = tuple[dict[str, Any], dict[str, dict[str, Tensor]]]
"""A header and groups of tensors."""

HEADER = "header"
LARGEST_HEADER = 16 << 20
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
}


class BadMessage(SartorError):
    """A message that is not what was expected; ``kind`` names the fault for counters."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@functools.cache
def version() -> str:
    """The version of the package: server and nodes must have the same."""
    return importlib.metadata.version("sartor")


def spec_of(tensor: Tensor) -> Spec:
    """A tensor's type and shape."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SartorError(f"tensors of {name} cannot travel; those of {', '.join(DTYPES)} can")
    return name, tuple(tensor.shape)


def size_of(spec: Spec) -> int:
    """The bytes of a tensor."""
    return math.prod(spec[1]) * DTYPES[spec[0]].itemsize


def encode(header: Mapping[str, Any], groups: Groups | None = None) -> Parts:
    """A message as bytes."""
    parts: Parts = {}
    tensors: dict[str, list[list[Any]]] = {}
    for group, values in (groups or {}).items():
        if values:
            tensors[group] = [[name, *spec_of(value)] for name, value in values.items()]
            parts[group] = b"".join(map(bytes_of, values.values()))
    parts[HEADER] = json.dumps({**header, "tensors": tensors}, allow_nan=False).encode()
    return parts


def decode(parts: Mapping[str, bytes], expected: Expected | None = None) -> Message:
    """The header and the tensors of a message, which must be those ``expected`` where that is given.

    A header that tells of an error, under that key, need not have them.
    """
    header = read_header(parts)
    specs = _specs(header, parts)
    if expected is not None and "error" not in header:
        _compare(specs, expected)
    return header, {group: _tensors(parts[group], held) for group, held in specs.items()}


def read_header(parts: Mapping[str, bytes]) -> dict[str, Any]:
    """The header alone."""
    text = parts.get(HEADER)
    if not isinstance(text, bytes):
        raise BadMessage("malformed", "it has no header")
    if len(text) > LARGEST_HEADER:
        raise BadMessage("oversized", f"its header has {len(text)} bytes")
    try:
        header = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise BadMessage("malformed", "its header is not JSON") from None
    if not isinstance(header, dict):
        raise BadMessage("malformed", "its header is not a table")
    return header


def readable(told: Any, most: int = 500) -> str:
    """What somebody else has written, for a line of a log."""
    if not isinstance(told, str):
        return reprlib.repr(told)
    return "".join(sign if sign.isprintable() else " " for sign in told[:most])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _specs(header: Mapping[str, Any], parts: Mapping[str, bytes]) -> dict[str, dict[str, Spec]]:
    """What the header says that the parts hold; each part has the size of that, and no part is left over."""
    told = header.get("tensors")
    if not isinstance(told, dict) or set(told) != set(parts) - {HEADER}:
        raise BadMessage("malformed", "its header does not name its tensors")
    specs: dict[str, dict[str, Spec]] = {}
    for group, entries in told.items():
        specs[group] = {}
        for entry in entries if isinstance(entries, list) else [None]:
            if not (isinstance(entry, list) and len(entry) == 3 and _is_spec(*entry)):
                raise BadMessage("malformed", f"{readable(group, 50)}: no description of a tensor")
            specs[group][entry[0]] = (entry[1], tuple(entry[2]))
        claimed, size = sum(map(size_of, specs[group].values())), len(parts[group])
        if claimed != size:
            told_of = f"tensors of {claimed} bytes announced, {size} arrived"
            raise BadMessage("malformed", f"{readable(group, 50)}: {told_of}")
    return specs


def _is_spec(name: Any, dtype: Any, shape: Any) -> bool:
    if not (isinstance(name, str) and isinstance(dtype, str) and dtype in DTYPES):
        return False
    if not (isinstance(shape, list) and len(shape) <= 16):
        return False
    if not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        return False
    return bool(
        math.prod(max(size, 1) for size in shape) < 2**48
    )  # of an empty tensor too, whose strides count


def _compare(specs: Expected, expected: Expected) -> None:
    wanted = {group: dict(held) for group, held in expected.items() if held}
    for group in {*wanted, *specs}:
        mine, theirs = wanted.get(group, {}), specs.get(group, {})
        for name in {*mine, *theirs}:
            if mine.get(name) != theirs.get(name):
                words = [_words(mine.get(name)), _words(theirs.get(name))]
                raise BadMessage(
                    "misshapen", f"{readable(name, 100)!r}: expected {words[0]}, it is {words[1]}"
                )


def _words(spec: Spec | None) -> str:
    return "nothing" if spec is None else f"{spec[0]} {list(spec[1])}"


def _tensors(data: bytes, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """Each tensor in memory of its own, aligned as PyTorch aligns it."""
    tensors, begin = {}, 0
    for name, spec in specs.items():
        end = begin + size_of(spec)
        tensor = tensors[name] = torch.empty(spec[1], dtype=DTYPES[spec[0]])
        if tensor.numel():
            raw = tensor.view(-1).view(torch.uint8).numpy()
            raw[:] = np.frombuffer(data, np.uint8, end - begin, begin)
        begin = end
    return tensors
