"""How many connections a server holds, of whom, and for how long.

A :class:`Listener` is a listening socket for an event loop of :mod:`asyncio`. A connection is a stranger's
until a request on it is known to come from a node. Strangers have little time, are not many from one address,
and are dropped, the oldest first, where somebody else needs the place: so nodes get in however many
connections others hold open, and handles are left for the server's own files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections import Counter
from typing import Any

try:
    import resource
except ImportError:  # no Unix
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 1024
"""However many handles there are."""
FEWEST_CONNECTIONS = 16
"""However few handles there are."""
RESERVE = 128
"""Handles for the server's own files, where there are many; a quarter of them where there are few."""
LEAVING = 16
"""Connections that may still be closing when others come."""
PATIENCE = 30.0
"""Seconds that a stranger has to finish a handshake and a request, besides those that its bytes take."""
SLOWEST = 32_000
"""Bytes a second."""
LONGEST = 600.0
"""Seconds that a stranger has at most, and after which a node's connection is closed if nothing came."""
REMIND = 60.0
"""Seconds between two lines in the log about strangers."""

Address = tuple[str, int]


class Connection(socket.socket):
    """A connection that tells its listener when it is closed, and knows what has arrived on it."""

    def __init__(self, listener: Listener, accepted: socket.socket, address: Address) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._listener, self.address = listener, address
        self.since = self.heard = time.monotonic()
        self.received = 0
        self.key = b""
        """Of the node that was heard on it last."""

    def recv(self, *arguments: Any) -> bytes:
        """Receive, and count."""
        data = super().recv(*arguments)
        self._count(len(data))
        return data

    def recv_into(self, *arguments: Any) -> int:
        """Receive, and count."""
        size = super().recv_into(*arguments)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        self.received += size
        self.heard = time.monotonic()

    def drop(self) -> None:
        """End it; whoever reads from it or writes to it notices, and closes it."""
        with contextlib.suppress(OSError):  # it has ended
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._listener.left(self)
        super().close()


class Listener(socket.socket):
    """A listening socket that holds ``most`` connections, by default as many as there are handles for."""

    def __init__(self, bound: socket.socket, most: int | None = None) -> None:
        super().__init__(bound.family, bound.type, bound.proto, bound.detach())
        self.most = _most_connections() if most is None else most
        self._open: dict[Address, Connection] = {}
        self._strangers: dict[Connection, None] = {}
        """In the order in which they came."""
        self._nodes: dict[Connection, None] = {}
        """In the order in which they were heard of last."""
        self._leaving: dict[Connection, float] = {}
        """Those that were dropped and are not closed yet, and when."""
        self._of: Counter[str] = Counter()
        """Strangers by address."""
        self._crowded, self._told = 0, -REMIND

    def accept(self) -> tuple[Connection, Any]:
        """A connection of somebody; who has been here for longest without being a node leaves for it."""
        while True:
            held = len(self._strangers) + len(self._nodes)
            full = held + len(self._leaving) >= self.most + LEAVING
            if full and any(time.monotonic() - when < 1 for when in self._leaving.values()):
                raise BlockingIOError  # those leave first; the loop asks again
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room():
                    raise BlockingIOError from None
                raise
            if full:
                accepted.close()
                continue
            if self._of[address[0]] >= max(self.most // 2, 1):
                self._crowd(next(old for old in self._strangers if old.address[0] == address[0]))
            elif held >= self.most:
                self._make_room()
            connection = Connection(self, accepted, address[:2])
            self._open[connection.address] = connection
            self._strangers[connection] = None
            self._of[address[0]] += 1
            return connection, address

    def knows(self, address: Any, key: bytes = b"") -> bool:
        """Whether the last request on the connection from there was one of the node with this key."""
        connection = self._open.get(tuple(address or ()))
        return connection is not None and connection in self._nodes and connection.key == key

    def heard(self, address: Any, key: bytes = b"") -> None:
        """A request on the connection from there is one of the node with this key."""
        connection = self._open.get(tuple(address or ()))
        if connection is not None and connection not in self._leaving:
            self._forget(connection)
            self._nodes[connection] = None
            connection.key = key

    def left(self, connection: Connection) -> None:
        """A connection is closed."""
        self._forget(connection)
        self._leaving.pop(connection, None)
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]

    async def tidy(self) -> None:
        """Drop those whose time is over; to be called about once a second."""
        now = time.monotonic()
        for stranger in list(self._strangers):
            if now > stranger.since + min(PATIENCE + stranger.received / SLOWEST, LONGEST):
                self._drop(stranger)
        for node in list(self._nodes):
            if now > node.heard + LONGEST:
                self._drop(node)
        if now > self._told + REMIND:
            self._tell()

    def close(self) -> None:
        """Listen no more, do not wait for strangers, and say what has not been said of them."""
        super().close()
        for stranger in list(self._strangers):
            stranger.drop()
        self._tell()

    def _tell(self) -> None:
        if self._crowded:
            log.warning(
                "too many connections: %d were dropped for others, those of no node first", self._crowded
            )
            self._crowded, self._told = 0, time.monotonic()

    def _make_room(self) -> bool:
        """Drop the oldest stranger, or else the node that was heard of longest ago."""
        for held in (self._strangers, self._nodes):
            if held:
                self._crowd(next(iter(held)))
                return True
        return False

    def _crowd(self, connection: Connection) -> None:
        """Drop a connection for want of places."""
        self._crowded += 1
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._forget(connection)
        self._leaving[connection] = time.monotonic()
        connection.drop()

    def _forget(self, connection: Connection) -> None:
        if connection in self._strangers:
            del self._strangers[connection]
            self._of[connection.address[0]] -= 1
            if not self._of[connection.address[0]]:
                del self._of[connection.address[0]]
        self._nodes.pop(connection, None)


def _most_connections() -> int:
    """So many that enough handles are left for everything else that this process opens."""
    limit = 512  # what select takes on Windows
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = MOST_CONNECTIONS * 2 if limit == resource.RLIM_INFINITY else limit
    try:
        taken = len(os.listdir("/dev/fd"))
    except OSError:
        taken = 0
    left = limit - taken - min(RESERVE, limit // 4) - LEAVING
    return max(FEWEST_CONNECTIONS, min(MOST_CONNECTIONS, left))
