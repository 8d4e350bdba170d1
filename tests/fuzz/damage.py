"""What files, texts and messages may turn into: bits turned over, pieces lost, doubled, moved or put in."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from sartor.errors import SartorError
from sartor.remote.requests import Failed

LONGEST = 20.0
"""Seconds that a case may take, also on a busy machine."""

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "put", "lose", "double", "cut", "replace"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 40),
        st.binary(max_size=8),
    ),
    max_size=4,
)


def edited(content: bytes, edits: list[tuple[str, float, int, bytes]]) -> bytes:
    """The content after some edits."""
    for kind, share, size, put in edits:
        place = int(share * len(content))
        before, piece, after = content[:place], content[place : place + size], content[place + size :]
        if kind == "flip" and piece:
            content = before + bytes([piece[0] ^ 1 << size % 8]) + piece[1:] + after
        elif kind == "put":
            content = before + put + piece + after
        elif kind == "lose":
            content = before + after
        elif kind == "double":
            content = before + piece + piece + after
        elif kind == "cut":
            content = before
        elif kind == "replace":
            content = before + put + after
    return content


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**62, 2**63 - 1, 10**18]),
    st.floats(allow_nan=True, allow_infinity=True),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.text(max_size=12), st.sampled_from(["fedavg", "yes", "auto"])
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def toml(value: Any) -> str:
    """A value as TOML writes it; None, which TOML has not, as an empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value or "")


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Anything may succeed or be refused, in one line and in time; nothing else may be raised."""
    began = time.monotonic()
    try:
        yield
    except (SartorError, Failed) as error:
        told = str(error)
    else:
        told = "."
    assert len(told.splitlines()) == 1
    assert told.isprintable()
    assert time.monotonic() - began < LONGEST
