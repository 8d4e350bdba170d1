"""Texts as rows of whole numbers: a vocabulary of words or characters, hashed words, or a user's function.

Token 0 is padding and 1 what the vocabulary does not know; rows have one length, longer texts are cut.

>>> encoded(["To be, or not", "to be"], "words", length=4).tolist()
[[3, 2, 4, 6], [3, 2, 0, 0]]
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch

from sartor.data.readers import check_column
from sartor.errors import DataError, SettingError
from sartor.extensions import find_function, function_file
from sartor.nests import Nest

KINDS = ("words", "characters", "hashed")
OWN = "own"
"""How a function that has no name in a file is stored."""
PADDING, UNKNOWN, FIRST = 0, 1, 2
"""The token of padding, that of what is not known, and the first of the vocabulary."""
Tokenizer: TypeAlias = "Callable[[str], Any]"
"""From a text to its tokens: whole numbers from 1, texts, or arrays by name as Hugging Face's give them."""
_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """The words and signs of a text, in small letters.

    >>> words("It's 5 o'clock.")
    ['it', "'", 's', '5', 'o', "'", 'clock', '.']
    """
    return _WORD.findall(text.lower())


def encoded(
    texts: Sequence[str],
    tokens: str | Tokenizer = "words",
    *,
    length: int = 64,
    vocabulary: int = 10_000,
    where: str = "text",
) -> Nest:
    """Texts as rows of tokens, ``[texts, length]``; arrays by name where a function gives such.

    ``tokens`` is ``words`` or ``characters``, numbered by how often they occur, at most ``vocabulary`` of
    them; ``hashed`` for words that are numbered by their hash, the same wherever they occur; or a function,
    as such or as in ``mine.py:tokens``.
    """
    import pyarrow

    table = {"text": pyarrow.array(texts, pyarrow.string())}
    return TextColumn.learnt("text", table, tokens, length, vocabulary, None, where).samples(table, where)


@dataclass(frozen=True)
class TextColumn:
    """A column of texts, each a row of tokens; a way to read tables (:mod:`sartor.data.preprocessing`)."""

    kind: ClassVar[str] = "text"
    column: str
    tokens: str | Tokenizer
    length: int
    vocabulary: int
    known: tuple[str, ...] | None = None
    """What is numbered, in its order; None where the numbers are those of a function or of a hash."""

    @classmethod
    def learnt(
        cls,
        column: str,
        table: Mapping[str, Any],
        tokens: str | Tokenizer | TextColumn,
        length: int,
        vocabulary: int,
        chosen: Sequence[bool] | None,
        where: str,
    ) -> TextColumn:
        """With the vocabulary of some rows, or of all; or what was learnt from others, as it is."""
        if isinstance(tokens, TextColumn):
            return replace(tokens, column=column)
        reader = cls(column, tokens, length, vocabulary)
        found = reader._cut(table, where)
        if tokens == "hashed" or not isinstance(found[0], list) or not isinstance(found[0][0], str):
            return reader
        kept = found if chosen is None else [text for text, use in zip(found, chosen, strict=True) if use]
        return replace(reader, known=tuple(_frequent(kept, vocabulary)))

    @property
    def columns(self) -> Sequence[str]:
        """The one column."""
        return (self.column,)

    def samples(self, table: Mapping[str, Any], where: str) -> Nest:
        """Rows of tokens."""
        check_column(table, self.column, where)
        found = self._cut(table, where)
        if not found:
            return torch.zeros((0, self.length), dtype=torch.long)
        if isinstance(found[0], Mapping):
            return {
                name: torch.tensor([_row(each[name], self.length) for each in found]) for name in found[0]
            }
        if self.known is not None:
            place = {token: FIRST + rank for rank, token in enumerate(self.known)}
            found = [[place.get(token, UNKNOWN) for token in text] for text in found]
        elif self.tokens == "hashed":
            found = [[_hashed(token, self.vocabulary) for token in text] for text in found]
        return torch.tensor([_row(text, self.length) for text in found])

    def _cut(self, table: Mapping[str, Any], where: str) -> list[Any]:
        """The tokens of every text."""
        split, told = self._tokenizer(where), f"{where}: tokens"
        texts = table[self.column].to_pylist()
        return [_tokens_of(split, str(text), f"{where}: row {row}", told) for row, text in enumerate(texts)]

    def _tokenizer(self, where: str) -> Tokenizer:
        if not isinstance(self.tokens, str):
            return self.tokens
        if function_file(self.tokens) is not None:
            return find_function(self.tokens, "data.tokens")
        if self.tokens not in KINDS:
            raise SettingError(
                f"{where}: tokens = {self.tokens!r}: one of {', '.join(KINDS)}, or a function as in "
                "mine.py:tokens"
            )
        return list if self.tokens == "characters" else words

    def values(self, x: Nest, column: str) -> list[str] | None:
        """Texts are no groups."""
        return None

    def to_mapping(self) -> dict[str, Any]:
        """All of it as JSON; a function is stored by its name, where it has one."""
        tokens = self.tokens if isinstance(self.tokens, str) else OWN
        known = None if self.known is None else list(self.known)
        sizes = {"length": self.length, "vocabulary": self.vocabulary}
        return {"column": self.column, "tokens": tokens, **sizes, "known": known}

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> TextColumn:
        """What :meth:`to_mapping` gave."""
        if stored["tokens"] == OWN:
            raise DataError("its texts are cut by a function that was given in Python, which is not stored")
        known = stored["known"]
        sizes = stored["length"], stored["vocabulary"]
        return cls(stored["column"], stored["tokens"], *sizes, None if known is None else tuple(known))


def _frequent(texts: Iterable[Sequence[str]], most: int) -> list[str]:
    """The tokens that occur most often; of those that occur as often the first in the alphabet."""
    counts = Counter(token for text in texts for token in text)
    return sorted(counts, key=lambda token: (-counts[token], token))[: most - FIRST]


def _hashed(token: str, vocabulary: int) -> int:
    return FIRST + zlib.crc32(token.encode()) % (vocabulary - FIRST)


def _row(tokens: Sequence[int], length: int) -> list[int]:
    return [*tokens[:length], *[PADDING] * (length - len(tokens))]


def _tokens_of(split: Tokenizer, text: str, where: str, told: str) -> Any:
    """The tokens of one text: a list of texts or of whole numbers, or such lists by name."""
    try:
        found = split(text)
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"{where}: {told} fails: {type(error).__name__}: {error}") from error
    if hasattr(found, "keys"):
        named = {str(name): _numbers(found[name], f"{where}: {told}") for name in found}
        if not named or not next(iter(named.values())):
            raise DataError(f"{where}: the text has no token; leave the row out")
        return named
    if isinstance(found, (list, tuple)) and all(isinstance(token, str) for token in found):
        if not found:
            raise DataError(f"{where}: the text has no token; leave the row out")
        return list(found)
    numbers = _numbers(found, f"{where}: {told}")
    if not numbers:
        raise DataError(f"{where}: the text has no token; leave the row out")
    return numbers


def _numbers(found: Any, where: str) -> list[int]:
    given = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(given, (list, tuple)) or any(type(token) is not int or token < 0 for token in given):
        raise DataError(
            f"{where}: gives {found!r:.80}; expected a list of whole numbers from 0, or of texts, for a text"
        )
    return list(given)
