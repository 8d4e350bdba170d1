"""What a node can do at the server's door: no more than it is asked for, whatever time it believes it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

import httpx  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flower_hostile import announce, piece, uploaded  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: E402

from sartor.remote import flower, flower_link  # noqa: E402
from sartor.remote.flower import SuperLink  # noqa: E402
from sartor.remote.flower_content import to_content  # noqa: E402
from sartor.remote.flower_link import FleetLink, Lost, Refused  # noqa: E402
from sartor.remote.keys import make_keys, read_key, read_public_keys  # noqa: E402
from sartor.remote.limits import Limits  # noqa: E402
from sartor.remote.messages import decode, encode  # noqa: E402
from sartor.remote.requests import Failed  # noqa: E402


@pytest.fixture(params=["memory", "store"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SuperLink]:
    database = tmp_path / "messages.db" if request.param == "store" else None
    with SuperLink("127.0.0.1", 0, database=database) as link:
        yield link


@pytest.fixture
def plain() -> Iterator[SuperLink]:
    with SuperLink("127.0.0.1", 0) as link:
        yield link


def joined(link: SuperLink, key: Any = None) -> FleetLink:
    key = key or ec.generate_private_key(ec.SECP384R1())
    node = FleetLink(f"127.0.0.1:{link.port}", key, insecure=True)
    node.connect()
    return node


def held(link: SuperLink) -> int:
    """Bytes in the server's memory."""
    return sum(len(entry.content) for entry in link._state.object_store.store.values())


def test_a_reply_takes_no_more_memory_than_it_may(plain: SuperLink) -> None:
    """Whichever piece comes first, and however many there are of them."""
    node = joined(plain)
    small, large = 1_000, 6_000_000
    for most, sent in ((small, 3_000_000), (large, 3_000_000)):
        message = plain.send(node.known, encode({"n": most}), 30, most)
        request = node.receive()
        assert request is not None
        before = held(plain)
        found = uploaded(node, request, encode({"n": 2}, {"sent": {"w": torch.rand(sent)}}))
        assert found[0] == 200
        assert found[1:].count(413) >= 1  # not even read
        assert held(plain) - before <= most + flower.SPARE
        with pytest.raises(Failed, match=f"more than the {most} bytes") as raised:
            plain.poll(message)
        assert raised.value.kind == "oversized"
        plain.forget(message)
        assert len(plain._state.object_store) == 0
    message = plain.send(node.known, encode({"n": 1}), 30, 12_000_000)
    request = node.receive()
    assert request is not None
    assert set(uploaded(node, request, encode({"n": 2}, {"sent": {"w": torch.rand(3_000_000)}}))) == {200}
    parts = plain.poll(message)
    assert parts is not None
    assert decode(parts)[1]["sent"]["w"].shape == (3_000_000,)
    plain.forget(message)
    # What belongs to no reply that is waited for has no place either, nor have many that fit one by one.
    assert set(uploaded(node, request, encode({"n": 3}), announced=False)) == {413}
    message = plain.send(node.known, encode({"n": 4}), 30, 100)
    request = node.receive()
    assert request is not None
    assert set(uploaded(node, request, encode({"n": 3}), announced=False)) == {404}
    many = {f"g{place}": {"w": torch.rand(7_500)} for place in range(8)}  # 30 kB each
    assert 403 in uploaded(node, request, encode({"n": 5}, many))
    assert held(plain) <= 100 + flower.SPARE
    with pytest.raises(Failed, match="more than the 100 bytes") as raised:
        plain.poll(message)
    assert raised.value.kind == "oversized"
    plain.forget(message)
    assert len(plain._state.object_store) == 0
    node.close()


def test_a_node_cannot_spoil_the_next_request(link: SuperLink) -> None:
    """It announces that a piece of it, which it can guess, consists of others that nobody has."""
    hostile, honest = joined(link), joined(link)
    own = link.send(hostile.known, encode({"n": 1}), 30, 1_000)
    request = hostile.receive()
    assert request is not None
    model = encode({"n": 2}, {"shared": {"w": torch.arange(5_000.0)}})
    guessed = list(get_all_nested_objects(to_content(model)["sartor.tensors"]))
    announce(
        hostile, request, encode({"n": 3}), [piece("a", _named(name, piece("b"))) for name in guessed[:1]]
    )
    message = link.send(honest.known, model, 30, 1_000)
    got = honest.receive()
    assert got is not None
    assert torch.equal(decode(got.parts)[1]["shared"]["w"], torch.arange(5_000.0))
    honest.reply(got, encode({"n": 4}))
    parts = link.poll(message)
    assert parts is not None
    assert decode(parts)[0]["n"] == 4
    with pytest.raises(Failed, match="does not consist of what it says") as raised:
        link.poll(own)
    assert raised.value.kind == "malformed"
    with pytest.raises(httpx.HTTPStatusError, match="403"):  # it does not get a second try
        announce(hostile, request, encode({"n": 3}))
    for sent in (own, message):
        link.forget(sent)
    assert len(link._state.object_store) == 0
    for node in (hostile, honest):
        node.close()


def _named(name: str, *children: Any) -> Any:
    made = piece("x", *children)
    made.object_id = name
    return made


def test_an_answer_counts_although_its_node_has_left(link: SuperLink) -> None:
    """A node that refuses a greeting says why and goes: the server's log has the reason."""
    node = joined(link)
    message = link.send(node.known, encode({"n": 1}), 30, 1_000)
    request = node.receive()
    assert request is not None
    node.reply(request, encode({"error": "not with me"}))
    node.close()
    assert link.nodes() == set()
    parts = link.poll(message)
    assert parts is not None
    assert decode(parts)[0]["error"] == "not with me"


def test_a_request_that_a_server_was_killed_over_is_none(tmp_path: Path) -> None:
    """Its pieces are stored one by one; whoever fetched it would wait for those that nobody has."""
    store = {"database": tmp_path / "messages.db"}
    with SuperLink("127.0.0.1", 0, **store) as first:
        node = joined(first)
        whole = first.send(node.known, encode({"n": 1}), 30, 0, "whole")
        stored = first._state.store_object

        def killed(run: int, session: str, name: str, content: bytes) -> bool:
            first._state.store_object = interrupted
            return bool(stored(run, session, name, content))

        def interrupted(*given: Any) -> None:
            raise KeyboardInterrupt

        first._state.store_object = killed
        with pytest.raises(KeyboardInterrupt):
            first.send(node.known, encode({"n": 2}), 30, 0, "half")
    with SuperLink("127.0.0.1", first.port, **store, anew=False) as second:
        node.connect()
        assert second.earlier() == {whole: (node.known, "whole", False)}
        request = node.receive()
        assert request is not None
        assert decode(request.parts)[0]["n"] == 1
        assert node.receive() is None
        node.close()


# Clocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [-400.0, 10.0, 400.0])
def test_clocks_may_differ_by_minutes(
    plain: SuperLink, monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    real = time.time
    key = ec.generate_private_key(ec.SECP384R1())
    node = FleetLink(f"127.0.0.1:{plain.port}", key, insecure=True)
    _shift(monkeypatch, apart)
    node.connect()
    assert node.ahead == pytest.approx(-apart, abs=3.0)
    word = "ahead of" if apart > 0 else "behind"
    assert f"s {word} the server's" in flower_link.clocks_apart(node.ahead)
    monkeypatch.setattr(flower_link.time, "time", real)  # the server's is right
    message = plain.send(node.known, encode({"n": 1}), 5, 1_000)
    _shift(monkeypatch, apart)
    request = node.receive()
    assert request is not None
    node.reply(request, encode({"n": 2}))
    monkeypatch.setattr(flower_link.time, "time", real)
    parts = plain.poll(message)
    assert parts is not None
    assert decode(parts)[0]["n"] == 2
    _shift(monkeypatch, apart)
    node.close()


def test_a_clock_that_is_hours_off_is_named(plain: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FleetLink(f"127.0.0.1:{plain.port}", ec.generate_private_key(ec.SECP384R1()), insecure=True)
    _shift(monkeypatch, -8_000.0)
    with pytest.raises(
        Refused, match=r"this machine's clock is (79|80)\d\d s behind the server's, .* set it"
    ):
        node.connect()


def _shift(monkeypatch: pytest.MonkeyPatch, apart: float) -> None:
    """Let a node's clock differ: what it takes the time from, not what Flower's server does."""
    monkeypatch.setattr(flower_link, "time", _Shifted(apart))


class _Shifted:
    """The module of the time, on a machine whose clock differs."""

    def __init__(self, apart: float) -> None:
        self._apart = apart

    def time(self) -> float:
        return time.time() + self._apart

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


# Limits ----------------------------------------------------------------------------------------------------


def test_a_key_that_asks_too_often_waits_and_the_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "Limits", lambda: Limits(rate=0.001, burst=12.0))
    make_keys(tmp_path, ["127.0.0.1"], ["a", "b"])
    keys = read_public_keys(tmp_path / "nodes.pub")
    with SuperLink("127.0.0.1", 0, keys=keys) as link:
        busy, other = (joined(link, read_key(tmp_path / f"{name}.key")) for name in "ab")
        with pytest.raises(Lost, match="429"):
            all(busy.receive() is None for _ in range(20))
        for _ in range(5):
            assert other.receive() is None
        busy.close()
        other.close()
