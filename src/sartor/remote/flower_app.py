"""A federation on any Flower installation, through Flower's public interface alone.

``sartor flower-app`` writes an application that uses this: :class:`StockGrid` carries the server's messages,
:func:`answer` is what a node does with one. Flower starts a process for every message there, so a node reads
its data anew each time and finds what it was told in its folder; ``sartor serve`` and ``sartor join`` are
faster by far.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from sartor.errors import SartorError
from sartor.remote.messages import HEADER, Parts, readable
from sartor.remote.requests import Failed

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

VERSIONS = "flwr>=1.41,<1.43"

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
except ImportError as error:
    raise SartorError(
        f"real federations need Flower, {VERSIONS}: {error}; install it with `pip install 'sartor[flower]'`"
    ) from error

log = logging.getLogger(__name__)

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


class StockGrid:
    """A grid of ours on a grid of Flower's."""

    lasting = False

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._seen: set[int] = set()
        self._looked = 0.0
        self._next: dict[str, float] = {}

    def nodes(self) -> set[int]:
        """The nodes that are there, looked up once a second."""
        if time.monotonic() - self._looked > 1:
            self._seen, self._looked = set(self._grid.get_node_ids()), time.monotonic()
        return set(self._seen)

    def send(self, node: int, parts: Parts, lifetime: float, note: str = "") -> str:
        """Put a message on its way."""
        message = Message(to_content(parts), node, TYPE, ttl=lifetime + 60)
        sent = list(self._grid.push_messages([message]))
        if not sent or not sent[0]:
            raise Failed("gone", "the node is not registered any more")
        return str(sent[0])

    def poll(self, message: str, most: int) -> Parts | None:
        """The reply, asked for a few times a second."""
        if time.monotonic() < self._next.get(message, 0.0):
            return None
        self._next[message] = time.monotonic() + 0.2
        for reply in self._grid.pull_messages([message]):
            if reply.has_error():
                raise Failed("gone", readable(reply.error.reason))
            try:
                parts = from_content(reply.content)
            except Exception as error:  # whatever a hostile node has sent
                raise Failed("malformed", f"its reply cannot be read ({type(error).__name__})") from None
            if sum(len(part) for name, part in parts.items() if name != HEADER) > most:
                raise Failed("oversized", f"more than the {most} bytes that its reply has")
            return parts
        return None

    def forget(self, message: str) -> None:
        """Flower removes what was fetched; what was not goes when its time is over."""
        self._next.pop(message, None)

    def caught(self) -> list[tuple[int, Failed]]:
        """Nothing: who sends what is Flower's to look after."""
        return []

    def left(self) -> dict[str, tuple[int, str, bool]]:
        """Nothing: messages end with Flower's run."""
        return {}

    def take_up(self, message: str, node: int, lifetime: float) -> None:
        """There is nothing to take up."""


def answer(message: Message, context: Any) -> Message:
    """A node's reply to a message; ``--node-config 'data="..." state="..."'`` says where its data lie.

    ``import="mine.py,..."`` there names code of the node's own, which must be the server's.
    """
    from sartor.remote.deploy import loader
    from sartor.remote.node import Node
    from sartor.runs.experiment import import_given

    settings = context.node_config
    words = [word.strip() for word in str(settings.get("import", "")).split(",") if word.strip()]
    import_given(words)
    for key in ("data", "state"):
        if not settings.get(key):
            raise SartorError(f"flower-supernode --node-config: give {key}, the folder of this node's {key}")
    load = loader(
        Path(str(settings["data"])),
        settings.get("name"),
        settings.get("client-column"),
        settings.get("label-column"),
    )
    allowed = settings.get("allow-personal-models", False)
    if not isinstance(allowed, bool):
        raise SartorError(
            f"flower-supernode --node-config: allow-personal-models is true or false, got {allowed!r}"
        )
    node = Node(load, Path(str(settings["state"])), sends_personal=allowed)
    node.recall()
    reply = node.handle(from_content(message.content))
    if node.refusal:
        log.warning("this node cannot take part: %s", node.refusal)
    if node.failure:
        log.warning("the server ended: %s", node.failure)
    return Message(to_content(reply), reply_to=message)
