"""A stranger without a key: opens as many connections as it may and never finishes what it begins on them."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Callable, Sequence

BEGINNING = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n"
HALVES: dict[str, tuple[bytes, bytes]] = {
    "idle": (b"", b""),
    "headers": (BEGINNING, b"x-a: b\r\n"),
    "body": (BEGINNING + b"content-type: application/x-protobuf\r\ncontent-length: 1000000\r\n\r\n", b"\0"),
    "handshake": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0"),
}
"""What it sends at first, and then again and again, a byte at a time."""
AGAIN = 50
"""Connections that it opens at a time in the place of those that the server has closed."""


def limited(handles: int, words: Sequence[str]) -> None:
    """``sartor`` with this many file handles."""
    from sartor.commands.base import app

    resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles))
    app(list(words), prog_name="sartor", standalone_mode=True)


def main(words: Sequence[str]) -> None:
    if words[0] == "limited":
        limited(int(words[1]), words[2:])
        return
    host, port, number = words[0], int(words[1]), int(words[2])
    kinds = [HALVES[kind] for kind in words[3:]]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: dict[socket.socket, tuple[bytes, int]] = {}
    readable = selectors.DefaultSelector()
    opened = 0
    while True:
        most = opened + AGAIN if opened >= number else number
        while len(held) < number and opened < most:
            try:
                connection = socket.create_connection((host, port), 60)
            except ConnectionError:  # the server has ended
                print(f"opened {opened} in all", flush=True)
                return
            connection.setblocking(False)
            first, more = kinds[opened % len(kinds)]
            opened += 1
            if opened == number:
                print(f"opened {opened}", flush=True)
            with contextlib.suppress(OSError):
                connection.send(first)
            held[connection] = (more, 0)
            readable.register(connection, selectors.EVENT_READ)
        for key, _ in readable.select(0.2):  # the server has closed it, or says something
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if not _lives(lambda connection=connection: connection.recv(4096)):  # type: ignore[misc]
                readable.unregister(connection)
                del held[connection]
                connection.close()
        for connection, (more, place) in list(held.items()):
            if more:
                with contextlib.suppress(OSError):
                    connection.send(more[place % len(more) :][:1])
                held[connection] = (more, place + 1)
        time.sleep(0.2)


def _lives(receive: Callable[[], bytes]) -> bool:
    try:
        return receive() != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
