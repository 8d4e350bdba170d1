"""The form of a request: what its header must hold before a node does anything with it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from sartor.remote.messages import BadMessage

Check = Callable[[Any], bool]


def whole(value: Any) -> bool:
    """A whole number that tensors can hold."""
    return type(value) is int and -(2**63) <= value < 2**63


def wholes(value: Any) -> bool:
    """A list of whole numbers."""
    return isinstance(value, list) and all(map(whole, value))


def text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def texts(value: Any) -> bool:
    """A list of texts."""
    return isinstance(value, list) and all(map(text, value))


def table(value: Any) -> bool:
    """A table."""
    return isinstance(value, dict)


def _settled(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, list) and len(entry) == 2 and whole(entry[0]) and wholes(entry[1])
        for entry in value
    )


def _shapes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, list) and len(entry) == 3 and text(entry[0]) and wholes(entry[1]) and text(entry[2])
        for entry in value
    )


def _transformed(value: Any) -> bool:
    return table(value) and _shapes(value.get("shapes")) and texts(value.get("states"))


def _wholes_by_name(value: Any) -> bool:
    return table(value) and all(map(whole, value.values()))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


SETTLING: dict[str, Check] = {"run": text, "settled": _settled, "floor": whole}
FORMS: dict[str, dict[str, Check]] = {
    "hello": {"experiment": table},
    "open": {
        **SETTLING,
        "clients": whole,
        "numbers": wholes,
        "classes": _or_none(whole),
        "labels": _or_none(texts),
        "at": whole,
        "without": wholes,
        "keep": wholes,
        "kept": wholes,
    },
    "call": {
        **SETTLING,
        "exchange": whole,
        "function": text,
        "algorithm": text,
        "hyper": table,
        "round": whole,
        "numbers": wholes,
        "rounds": lambda value: whole(value) or wholes(value),
        "keeps": lambda value: isinstance(value, bool),
    },
    "end": SETTLING,
    "fail": {"reason": text},
    "refuse": {"reason": text},
}
"""By kind of request the entries that it has."""
PERHAPS: dict[str, Check] = {
    "code": table,
    "public": _or_none(text),
    "number": _wholes_by_name,
    "groups": wholes,
    "entries": wholes,
    "transformed": _or_none(_transformed),
    "columns": table,
    "frozen": lambda value: isinstance(value, list) and all(map(_or_none(text), value)),
}
"""Entries that it may have."""


def check_form(header: Mapping[str, Any]) -> str:
    """The kind of a request whose header has its form; another one is a :class:`BadMessage`."""
    kind = header.get("kind")
    form = FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        raise BadMessage("malformed", f"no such request: {reprlib.repr(kind)}")
    for key, check in form.items():
        if key not in header or not check(header[key]):
            raise BadMessage("malformed", f"{kind}: {key} is {reprlib.repr(header.get(key))}")
    for key, check in PERHAPS.items():
        if key in header and not check(header[key]):
            raise BadMessage("malformed", f"{kind}: {key} is {reprlib.repr(header[key])}")
    return str(kind)
