"""Requests to nodes and their replies, one by one.

How messages travel is the business of a :class:`Grid`. :class:`Requests` puts a secret into every request,
which its reply must bring back, and takes of a reply only what the request has asked for. Whatever else comes
is a :class:`Failed` of its sender.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sartor.remote.messages import (
    BadMessage,
    Expected,
    Groups,
    Message,
    Parts,
    decode,
    encode,
    read_header,
    readable,
    size_of,
    version,
)

PAUSE = 0.1
"""Seconds between two looks for replies, unless something arrives."""
PARTING = 10.0
"""Seconds that nodes have to hear that the server ends."""
MOST_UNKNOWN = 12 << 20
"""Bytes of a reply of which the server does not know beforehand what it holds: an introduction."""
GRACE = 0.25
"""Seconds after its deadline until a request is given up: whoever carries it may know more of why."""
MOST_FORGED = 3
"""Replies without the secret after which a node is not asked once more."""


class Failed(Exception):
    """A node gave no reply that can be used; ``kind`` names the fault for counters."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Grid(Protocol):
    """Carries messages to nodes and their replies back.

    One that is ``lasting`` keeps messages beyond the end of the server's process, each with a note.
    """

    lasting: bool

    def nodes(self) -> set[int]:
        """The nodes that are there."""

    def key(self, node: int) -> str:
        """What a node is known by for as long as it has its key; nothing where that is not known."""

    def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
        """Put a message on its way; what the reply can be asked for by.

        A reply with more than ``most`` bytes of tensors is refused unseen.
        """

    def poll(self, message: str) -> Parts | None:
        """The reply, None where it is not there yet; :class:`Failed` where there will be none."""

    def rest(self, seconds: float) -> None:
        """Wait until something has arrived, for so long at most."""

    def forget(self, message: str) -> None:
        """The reply is not wanted any more."""

    def caught(self) -> list[tuple[int, Failed]]:
        """What nodes have tried since the last call and were refused, besides their replies."""

    def earlier(self) -> dict[str, tuple[int, str, bool]]:
        """Messages that an earlier process of the server has sent: node, note, and whether it has replied."""

    def take_up(self, message: str, node: int, lifetime: float, most: int) -> None:
        """Wait for the reply to a message that an earlier process of the server has sent."""


@dataclass(frozen=True)
class EarlierRequest:
    """A request that an earlier process of the server has sent, with what it noted of it."""

    message: str
    node: int
    answered: bool
    process: str
    """The node's process that was asked: another one does not know of it."""
    digest: str
    """Of what was asked."""
    nonce: str
    exchange: int
    client: int
    """One of the clients that were asked."""


@dataclass
class Request:
    """A request under way."""

    node: int
    header: Mapping[str, Any]
    groups: Groups | None
    expected: Expected | None
    """The tensors of the reply; None where they are not known beforehand."""
    due: float
    message: str = ""
    note: dict[str, Any] = field(default_factory=dict)
    """What a later process of the server must know to wait for the reply."""
    forged: int = 0
    """Replies to it that did not bring its secret back."""
    exchange: int = 0
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    settled: tuple[int, ...] = ()
    declared: tuple[str, ...] = ()


class Requests:
    """Requests to nodes and their replies; each request has a secret that its reply must bring back."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self._caught: list[tuple[int, Failed]] = []

    def send(
        self,
        node: int,
        header: Mapping[str, Any],
        groups: Groups | None = None,
        expected: Expected | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> Request:
        """Send a request to a node; one with a note can be taken up by a later process of the server."""
        told = {**header, "nonce": secrets.token_hex(16), "version": version()}
        request = Request(node, told, groups, expected, time.monotonic() + self.deadline)
        if note is not None and self.grid.lasting:
            request.note = {**note, "nonce": told["nonce"]}
        self._carry(request)
        return request

    def earlier(self) -> list[EarlierRequest]:
        """The requests that an earlier process of the server has sent, as far as they have a note."""
        found = []
        for message, (node, note, answered) in self.grid.earlier().items():
            try:
                found.append(
                    EarlierRequest(message=message, node=node, answered=answered, **json.loads(note))
                )
            except (ValueError, TypeError):
                self.grid.forget(message)
        return found

    def take_up(
        self, earlier: EarlierRequest, header: Mapping[str, Any], groups: Groups | None, expected: Expected
    ) -> Request:
        """Wait for the reply to a request of before, which asked the same."""
        told = {**header, "nonce": earlier.nonce, "exchange": earlier.exchange, "version": version()}
        request = Request(
            earlier.node, told, groups, expected, time.monotonic() + self.deadline, earlier.message
        )
        self.grid.take_up(earlier.message, earlier.node, self.deadline, _bytes_of(expected))
        return request

    def look(self, request: Request) -> Message | None:
        """The reply, None where it is not there yet; :class:`Failed` where none can be used."""
        try:
            parts = self.grid.poll(request.message)
            if parts is None:
                if time.monotonic() > request.due + GRACE:
                    raise Failed("late", f"no reply within {self.deadline:g} s")
                return None
            genuine = read_header(parts).get("nonce") == request.header["nonce"]
            header, groups = decode(parts, request.expected) if genuine else ({}, {})
        except BadMessage as error:
            self.grid.forget(request.message)
            raise Failed(error.kind, str(error)) from None
        except Failed:
            self.grid.forget(request.message)
            raise
        self.grid.forget(request.message)
        if not genuine:
            self._ask_again(request)
            return None
        if "error" in header:
            kind = next((kind for kind in ("closed", "forgotten") if header.get(kind)), "failed")
            raise Failed(kind, readable(header["error"]))
        return header, groups

    def wait(self, request: Request) -> Message:
        """Wait for the reply."""
        while (answer := self.look(request)) is None:
            self.grid.rest(PAUSE)
        return answer

    def deliver(self, requests: list[Request], patience: float) -> None:
        """Wait until all have answered, for so long at most; what they answer does not matter."""
        end = time.monotonic() + patience
        while requests and time.monotonic() < end:
            for request in list(requests):
                try:
                    if self.look(request) is not None:
                        requests.remove(request)
                except Failed:
                    requests.remove(request)
            if requests:
                self.grid.rest(PAUSE)
        for request in requests:
            self.grid.forget(request.message)

    def caught(self) -> list[tuple[int, Failed]]:
        """What nodes have tried since the last call and what came of it to nothing."""
        caught, self._caught = [*self._caught, *self.grid.caught()], []
        return caught

    def _ask_again(self, request: Request) -> None:
        """Somebody answered who does not know the secret, and the reply of who does has no place any more.

        Whoever is asked the same twice answers the same.
        """
        error = Failed("forged", "a reply does not bring back the secret of the request it answers")
        request.forged += 1
        if request.forged > MOST_FORGED:
            raise error
        self._caught.append((request.node, error))
        self._carry(request)

    def _carry(self, request: Request) -> None:
        remaining = max(request.due - time.monotonic(), 0.0)
        note = json.dumps(request.note) if request.note else ""
        parts, most = encode(request.header, request.groups), _bytes_of(request.expected)
        request.message = self.grid.send(request.node, parts, remaining, most, note)


def _bytes_of(expected: Expected | None) -> int:
    """The size of a reply's tensors; of one whose tensors are not known, the most that is taken."""
    if expected is None:
        return MOST_UNKNOWN
    return sum(size_of(spec) for held in expected.values() for spec in held.values())
