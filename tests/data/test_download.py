"""Fetching one published file."""

from __future__ import annotations

import hashlib
import socketserver
import sys
import threading
from pathlib import Path

import pytest

from sartor.data.download import fetch, user_cache

WHOLE = bytes(range(256)) * 600


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE[:999], "md5"),
        (b"HTTP/1.1 404 Gone\r\n\r\n", "404"),
        (b"nothing that a browser would know\r\n\r\n", "nothing that"),
    ],
    ids=["whole", "cut", "gone", "noise"],
)
def test_a_file_is_whole_or_not_there(tmp_path: Path, answer: bytes, complaint: str | None) -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        served = threading.Thread(target=server.handle_request)
        served.start()
        place = tmp_path / "file"
        arguments = (
            f"http://127.0.0.1:{server.server_address[1]}/",
            hashlib.md5(WHOLE).hexdigest(),
            place,
            "",
        )
        if complaint is None:
            fetch(*arguments)
            assert place.read_bytes() == WHOLE
        else:
            with pytest.raises(Exception, match=complaint):
                fetch(*arguments)
            assert list(tmp_path.iterdir()) == []
        served.join()


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "there/sartor"),
        ("linux", None, "home/.cache/sartor"),
        ("darwin", None, "home/Library/Caches/sartor"),
        ("win32", "LOCALAPPDATA", "there/sartor"),
    ],
)
def test_every_system_has_its_cache(
    platform: str, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "there")
    assert user_cache() == Path(expected)
