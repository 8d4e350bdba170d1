"""Messages as Flower's content, through Flower's public interface alone; imported before any of Flower.

Nothing is sent to anybody else: telemetry and the search for updates are off.
"""

from __future__ import annotations

import os

from sartor.errors import SartorError
from sartor.remote.messages import HEADER, Parts

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

VERSIONS = "flwr>=1.41,<1.43"

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
except ImportError as error:
    raise SartorError(
        f"real federations need Flower, {VERSIONS}: {error}; install it with `pip install 'sartor[flower]'`"
    ) from error

TYPE = "query.call"
RECORD = "sartor"


def to_content(parts: Parts) -> RecordDict:
    """Parts as the content of a Flower message: the header as a setting, tensors as arrays of bytes."""
    arrays = {
        group: Array(dtype="uint8", shape=(len(part),), stype="bytes", data=part)
        for group, part in parts.items()
        if group != HEADER
    }
    return RecordDict(
        {RECORD: ConfigRecord({HEADER: parts[HEADER]}), f"{RECORD}.tensors": ArrayRecord(arrays)}
    )


def from_content(content: RecordDict) -> Parts:
    """The parts that :func:`to_content` packed; anything else is a ValueError."""
    settings, arrays = content.get(RECORD), content.get(f"{RECORD}.tensors")
    if not isinstance(settings, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise ValueError("not a message of sartor")
    header = settings.get(HEADER)
    if not isinstance(header, bytes):
        raise ValueError("no header")
    return {HEADER: header, **{str(group): bytes(array.data) for group, array in arrays.items()}}


def message_to(node: int, parts: Parts, lifetime: float) -> Message:
    """A request to a node, for so many seconds."""
    return Message(to_content(parts), node, TYPE, ttl=lifetime)


def reply_to(message: Message, parts: Parts) -> Message:
    """The reply to a request."""
    return Message(to_content(parts), reply_to=message)
