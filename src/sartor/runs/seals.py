"""Seals: a checksum inside what it seals, so that a record tells by itself whether it is what was written.

A seal is the text ``crc32:`` and eight digits, the CRC-32 of everything with zeros in their place. It stands
where the format has room for a text: a key of a JSON object, the metadata of an Arrow stream or of a Parquet
file. Whoever reads the file with other tools finds one more entry there and nothing else changed.

>>> line = sealed(b'{"round": 1, "seal": "crc32:00000000"}')
>>> line
b'{"round": 1, "seal": "crc32:d051008c"}'
>>> is_whole(line), is_whole(line.replace(b"1", b"3", 1))
(True, False)
"""

from __future__ import annotations

import re
import zlib

KEY = "seal"
BLANK = "crc32:00000000"
"""What stands in the place of a seal before there is one."""

_SEAL = re.compile(rb"crc32:[0-9a-f]{8}")


def sealed(content: bytes, *, first: bool = False) -> bytes:
    """The content with its blank seal filled in: the last that stands in it, or the first."""
    place = content.find(BLANK.encode()) if first else content.rfind(BLANK.encode())
    if place < 0:
        raise ValueError("there is no blank seal to fill in")
    return content[:place] + _seal_of(content) + content[place + len(BLANK) :]


def is_whole(content: bytes, *, first: bool = False) -> bool:
    """Whether a sealed content is what was sealed."""
    found = list(_SEAL.finditer(content))
    if not found:
        return False
    place = found[0 if first else -1]
    return place.group() == _seal_of(content[: place.start()] + BLANK.encode() + content[place.end() :])


def _seal_of(content: bytes) -> bytes:
    return b"crc32:%08x" % zlib.crc32(content)
