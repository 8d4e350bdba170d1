"""Messages as Flower's content, through Flower's public interface alone; imported before any of Flower.

Nothing is sent to anybody else: telemetry and the search for updates are off.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sartor.errors import SartorError
from sartor.remote.messages import HEADER, Parts

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

VERSIONS = "flwr>=1.41,<1.43"


def unfit(error: ImportError) -> SartorError:
    """What is said where Flower is not there, or has other names than those of these versions."""
    return SartorError(
        f"real federations need Flower, {VERSIONS}: {error}; install it with `pip install 'sartor[flower]'`"
    )


try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
except ImportError as error:
    raise unfit(error) from error

TYPE = "query.call"
RECORD = "sartor"
TENSORS = f"{RECORD}.tensors"
SMALL = 1 << 14
"""Bytes of a part that is not worth a call of its own."""
REASON = "sartor-refused"
"""The header of an answer that will be the same however often it is asked for."""


def to_content(parts: Parts) -> RecordDict:
    """Parts as the content of a Flower message: large ones as arrays of bytes, others as settings.

    Every record and every array travels as pieces of its own, each with a call; a setting goes with the rest.
    """
    large = [group for group, part in parts.items() if group != HEADER and len(part) > SMALL]
    records: dict[str, Any] = {
        RECORD: ConfigRecord({group: part for group, part in parts.items() if group not in large})
    }
    if large:
        arrays = {
            group: Array(dtype="uint8", shape=(len(parts[group]),), stype="bytes", data=parts[group])
            for group in large
        }
        records[TENSORS] = ArrayRecord(arrays)
    return RecordDict(records)


def from_content(content: RecordDict) -> Parts:
    """The parts that :func:`to_content` packed; anything else is a ValueError."""
    settings, arrays = content.get(RECORD), content.get(TENSORS, ArrayRecord())
    if not isinstance(settings, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise ValueError("not a message of sartor")
    parts = {str(group): part for group, part in settings.items() if isinstance(part, bytes)}
    if HEADER not in parts or len(parts) < len(settings):
        raise ValueError("no header, or what is no part of a message")
    return {**parts, **{str(group): bytes(array.data) for group, array in arrays.items() if group != HEADER}}


def message_to(node: int, parts: Parts, lifetime: float) -> Message:
    """A request to a node, for so many seconds."""
    return Message(to_content(parts), node, TYPE, ttl=lifetime)


def reply_to(message: Message, parts: Parts) -> Message:
    """The reply to a request."""
    return Message(to_content(parts), reply_to=message)


def quiet() -> None:
    """Flower's own lines are for its developers; what matters is told by this package."""
    for name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "httpcore", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL if name == "flwr" else logging.ERROR)
