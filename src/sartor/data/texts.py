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
from typing import Any, TypeAlias

import torch

from sartor.errors import DataError, SettingError
from sartor.extensions import find_function, function_file
from sartor.nests import Nest

KINDS = ("words", "characters", "hashed")
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
    learnt: Sequence[bool] | None = None,
    where: str = "text",
) -> Nest:
    """Texts as rows of tokens, ``[texts, length]``; arrays by name where a function gives such.

    ``tokens`` is ``words`` or ``characters``, numbered by how often they occur, at most ``vocabulary`` of
    them; ``hashed`` for words that are numbered by their hash, the same wherever they occur; or a function,
    as such or as in ``mine.py:tokens``. ``learnt`` says which texts the vocabulary is made of; left out, all.
    """
    told = f"{where}: tokens" if callable(tokens) else f"{where}: tokens = {tokens!r}"
    if isinstance(tokens, str) and function_file(tokens) is not None:
        tokens = find_function(tokens, "data.tokens")
    if isinstance(tokens, str) and tokens not in KINDS:
        raise SettingError(f"{told}: one of {', '.join(KINDS)}, or a function as in mine.py:tokens")
    split: Tokenizer = tokens if callable(tokens) else list if tokens == "characters" else words
    found = [_tokens_of(split, text, f"{where}: row {row}", told) for row, text in enumerate(texts)]
    if isinstance(found[0], Mapping):
        return {
            name: torch.tensor([_row(each[name], length) for each in found], dtype=torch.int64)
            for name in found[0]
        }
    if tokens == "hashed":
        numbered = [[_hashed(token, vocabulary) for token in text] for text in found]
    elif any(isinstance(token, str) for text in found for token in text):
        kept = found if learnt is None else [text for text, use in zip(found, learnt, strict=True) if use]
        place = {token: FIRST + rank for rank, token in enumerate(_frequent(kept, vocabulary))}
        numbered = [[place.get(token, UNKNOWN) for token in text] for text in found]
    else:
        numbered = found
    return torch.tensor([_row(text, length) for text in numbered], dtype=torch.int64)


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
