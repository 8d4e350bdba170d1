"""Settings: frozen dataclasses whose fields hold default, meaning, range and the paper's symbol in one place.

>>> @dataclass(frozen=True)
... class Hyper:
...     lr: float = setting(0.01, "local learning rate", symbol="η", low=0)
>>> build(Hyper, {"lr": 0.1}, "hyper")
Hyper(lr=0.1)
>>> build(Hyper, {"rl": 0.1}, "hyper")
Traceback (most recent call last):
    ...
sartor.errors.SettingError: hyper.rl: unknown key; did you mean hyper.lr?
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sartor.errors import SettingError

T = TypeVar("T")


@dataclass(frozen=True)
class Meaning:
    """What a field is for and which values it takes; the dataclass field itself holds type and default."""

    text: str
    symbol: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    words: tuple[str, ...] = ()
    """Texts that may stand in place of a number."""

    def allowed(self) -> str:
        """The range in words, for messages and help: ``at least 0, at most 1``."""
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        bounds = (
            ("above", self.above),
            ("at least", self.low),
            ("at most", self.high),
            ("below", self.below),
        )
        within = ", ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return " or ".join(part for part in (within, *self.words) if part)

    def accepts(self, value: Any) -> bool:
        """Whether a value of the right type lies in the range; a list does when all its entries do."""
        if isinstance(value, (list, tuple)):
            return all(self.accepts(entry) for entry in value)
        if self.choices is not None:
            return value in self.choices
        if self.words and isinstance(value, str):
            return value in self.words
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return not (
                (self.above is not None and not value > self.above)
                or (self.low is not None and not value >= self.low)
                or (self.high is not None and not value <= self.high)
                or (self.below is not None and not value < self.below)
            )
        return True


ANY = Meaning("")
"""Of a field that takes every value of its type."""


def setting(
    default: Any,
    text: str,
    *,
    symbol: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Iterable[Any] | None = None,
    words: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its meaning; ``low``, ``high`` include the bound, ``above``, ``below`` not.

    ``words`` may stand in place of a number.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Pull:
    ...     mu: float = setting(0.01, "pull towards the global model", symbol="μ", low=0)
    >>> Pull().mu, meaning(dataclasses.fields(Pull)[0]).symbol
    (0.01, 'μ')
    """
    chosen = None if choices is None else tuple(choices)
    meaning = Meaning(text, symbol, low, high, above, below, chosen, words)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"meaning": meaning})
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def meaning(field: dataclasses.Field[Any]) -> Meaning:
    """The meaning of a field, empty for a field declared without :func:`setting`."""
    return typing.cast(Meaning, field.metadata.get("meaning", ANY))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like ``word``, if any is like it at all."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(where: str, key: str, known: Iterable[str], what: str = "key") -> SettingError:
    """The error for an unknown key or name, with the nearest known one or the list of all."""
    prefix = f"{where}." if where and what == "key" else ""
    known = sorted(known)
    guess = nearest(key, known)
    hint = f"did you mean {prefix}{guess}?" if guess else "known: " + (", ".join(known) or "none")
    word = key if key.isprintable() and len(key) <= 80 else shown(key)
    place = f"{prefix}{word}" if what == "key" else f"{where} = {shown(key)}"
    return SettingError(f"{place}: unknown {what}; {hint}")


@functools.cache
def hints_of(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields; to work them out takes longer than to check values by them."""
    return types.MappingProxyType(typing.get_type_hints(cls))


@functools.cache
def fields_of(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that it is made with, by name."""
    fields = dataclasses.fields(typing.cast(Any, cls))
    return types.MappingProxyType({field.name: field for field in fields if field.init})


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from a mapping: all keys known, all values of their type and in range, or an error."""
    fields, hints = fields_of(typing.cast(Any, cls)), hints_of(typing.cast(Any, cls))
    check_defaults(typing.cast(Any, cls))
    checked = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown(where, key if isinstance(key, str) else shown(key), fields)
        place = f"{where}.{key}" if where else key
        checked[key] = check(value, hints[key], meaning(fields[key]), place)
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in checked:
            raise SettingError(f"{where}.{key}: missing; give {type_words(hints[key])}")
    try:
        return cls(**checked)
    except (TypeError, ValueError) as error:  # the class's own check of how its values fit together
        raise SettingError(f"{where}: {error}") from None


@functools.cache
def check_defaults(cls: type) -> None:
    """Refuse a default that could not be given: what is stored with it could not be read back.

    One that is None says that the value is not set.
    """
    hints = hints_of(cls)
    for key, field in fields_of(typing.cast(Any, cls)).items():
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if default is not dataclasses.MISSING and default is not None:
            check(default, hints[key], meaning(field), f"the default of {cls.__name__}.{key}")


def check(value: Any, hint: Any, meaning: Meaning, place: str) -> Any:
    """The value as its declared type; an error names the place, the type, the range and what was given."""
    try:
        value = _convert(value, hint)
        fits = meaning.accepts(value)
    except TypeError:
        bounds = f" ({meaning.allowed()})" if meaning.allowed() else ""
        raise SettingError(f"{place}: expected {type_words(hint)}{bounds}, got {shown(value)}") from None
    except RecursionError:
        raise SettingError(f"{place}: nested too deeply") from None
    if not fits:
        raise SettingError(f"{place}: must be {meaning.allowed()}, got {shown(value)}")
    return value


def _convert(value: Any, hint: Any) -> Any:
    """``value`` as the annotated type: exact, but for whole numbers standing for floats. Else a TypeError."""
    if hint is Any:
        return value
    origin = None if isinstance(hint, type) else typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            try:
                return _convert(value, option)
            except TypeError:
                continue
        raise TypeError
    if hint is types.NoneType:
        if value is None:
            return None
        raise TypeError
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise TypeError
        return origin(_convert(entry, typing.get_args(hint)[0]) for entry in value)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        entry = (typing.get_args(hint) or (str, Any))[1]
        return {_convert(key, str): _convert(value[key], entry) for key in value}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise TypeError from None
    if hint is float and isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError
        return float(value)  # numpy's kind of float is one too, but is not written like one
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError
    if hint is int and not -(2**63) <= value < 2**63:  # what TOML, numpy and torch can all hold
        raise TypeError
    if hint is str and not _is_text(value):
        raise TypeError
    return value


def _is_text(value: str) -> bool:
    """Whether a string can be stored as UTF-8; one from undecodable bytes of the command line cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A value for a message: its repr, cut short; values too large or too deep for one are named so."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def type_words(hint: Any) -> str:
    """A type in a user's words: ``a whole number``, ``a list or a text``."""
    names = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        Any: "any value",
    }
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = []
    for option in options:
        if option is not types.NoneType:
            is_list = typing.get_origin(option) in (list, tuple)
            words.append(names.get(option, "a list" if is_list else "a table"))
    return " or ".join(words)
