"""Nodes get in however many connections strangers hold open, and nobody may take for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import PATIENCE
from sartor.remote import connections
from sartor.remote.connections import Listener

WAIT = 20.0


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Server:
    """An event loop in a thread that echoes what it gets."""

    def __init__(self, most: int | None = None) -> None:
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        bound.listen(2048)
        self.listener = Listener(bound, most)
        self.address = self.listener.getsockname()
        self.loop = asyncio.SelectorEventLoop()
        self.thread = threading.Thread(target=self.run)
        self.held: list[socket.socket] = []
        self.thread.start()

    def run(self) -> None:
        self.loop.run_until_complete(self.loop.create_server(Echo, sock=self.listener, backlog=2048))
        self.loop.run_forever()
        self.listener.close()
        self.loop.close()

    def tidy(self) -> None:
        asyncio.run_coroutine_threadsafe(self.listener.tidy(), self.loop).result(WAIT)

    def connect(self) -> socket.socket:
        self.held.append(socket.create_connection(self.address, WAIT))
        return self.held[-1]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT)
        for connection in self.held:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(most=20)
    yield server
    server.close()


def answers(connection: socket.socket) -> bool:
    """Whether the server still holds it."""
    try:
        connection.sendall(b"x")
        return connection.recv(1) == b"x"
    except ConnectionError:
        return False


def test_the_oldest_strangers_leave_for_others(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """From one address there are no more than half of all."""
    strangers = []
    for _ in range(25):
        strangers.append(server.connect())
        assert answers(strangers[-1])
    assert [answers(stranger) for stranger in strangers] == [False] * 15 + [True] * 10
    with caplog.at_level(logging.WARNING):
        server.tidy()
        server.tidy()
    assert [record.message for record in caplog.records] == [
        "too many connections: 15 were dropped for others, those of no node first"
    ]


def test_what_has_not_been_said_of_strangers_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """A server that ends before it looks again, or within a minute of what it said last."""
    server = Server(most=20)
    try:
        for count in (12, 3):
            assert all(answers(server.connect()) for _ in range(count))
            server.tidy()
        assert len(caplog.records) == 1
    finally:
        server.close()
    assert [record.message.split(":")[1].split()[0] for record in caplog.records] == ["2", "3"]


def test_nodes_stay_while_strangers_come(server: Server) -> None:
    nodes = []
    for _ in range(15):
        nodes.append(node := server.connect())
        assert answers(node)
        assert not server.listener.knows(node.getsockname())
        server.listener.heard(node.getsockname())  # more of them than there may be strangers
        assert server.listener.knows(node.getsockname())
    strangers = []
    for _ in range(30):
        strangers.append(server.connect())
        assert answers(strangers[-1])
    assert [answers(stranger) for stranger in strangers] == [False] * 25 + [True] * 5
    assert all(map(answers, nodes))


def test_of_too_many_nodes_the_one_heard_of_longest_ago_leaves(server: Server) -> None:
    """It connects again when it has something to say."""
    nodes = []
    for _ in range(20):
        nodes.append(server.connect())
        assert answers(nodes[-1])
        server.listener.heard(nodes[-1].getsockname())
    server.listener.heard(nodes[0].getsockname())
    late = server.connect()
    assert answers(late)
    assert [answers(node) for node in nodes[:3]] == [True, False, True]


def test_a_burst_is_taken_a_few_at_a_time(server: Server) -> None:
    """Those who leave are closed before others are accepted, so handles are never more than was said."""
    most = 0
    accept, left = server.listener.accept, server.listener.left
    count = 0

    def accepting() -> Any:
        nonlocal count, most
        found = accept()
        count += 1
        most = max(most, count)
        return found

    def leaving(connection: Any) -> None:
        nonlocal count
        count -= connection.fileno() != -1
        left(connection)

    server.listener.accept = accepting  # type: ignore[method-assign]
    server.listener.left = leaving  # type: ignore[method-assign]
    blocked = threading.Event()
    server.loop.call_soon_threadsafe(blocked.wait)
    strangers = [server.connect() for _ in range(100)]
    blocked.set()
    assert answers(strangers[-1])
    assert 10 <= most <= 20 + connections.LEAVING


@pytest.mark.parametrize("node", [False, True])
def test_nobody_may_take_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch, node: bool) -> None:
    """Whatever bytes a stranger sends; a node may take its time as long as something comes."""
    connection = server.connect()
    assert answers(connection)
    if node:
        server.listener.heard(connection.getsockname())
    server.tidy()
    assert answers(connection)
    monkeypatch.setattr(connections, "PATIENCE", 0.5)
    end = time.monotonic() + (1 if node else PATIENCE)
    while time.monotonic() < end and answers(connection):
        server.tidy()
    assert answers(connection) is node
    monkeypatch.setattr(connections, "LONGEST", 0.0)
    server.tidy()
    assert not answers(connection)


def test_who_sends_much_may_take_longer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.2)
    connection = server.connect()
    connection.sendall(b"x" * (10 * connections.SLOWEST))
    got = 0
    while got < 10 * connections.SLOWEST:
        got += len(connection.recv(1 << 16))
    time.sleep(0.5)
    server.tidy()
    assert answers(connection)


def test_the_number_of_connections_leaves_handles_for_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit in (256, 1024):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert limit // 4 <= connections._most_connections() <= limit * 7 // 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
        assert connections._most_connections() == connections.MOST_CONNECTIONS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_handles_a_stranger_leaves(server: Server, tmp_path: Path) -> None:
    """Others of this process may have taken more than was left for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [server.connect() for _ in range(8)]
    assert all(map(answers, strangers))
    late = socket.socket()
    server.held.append(late)
    late.settimeout(WAIT)
    highest = max(connection.fileno() for connection in server.held)
    files = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
        with contextlib.suppress(OSError):
            while True:
                files.append((tmp_path / "file").open("w"))
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "file").open("w")
        late.connect(server.address)
        assert answers(late)
        assert not answers(strangers[0])
        assert answers(strangers[7])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in files:
            file.close()
