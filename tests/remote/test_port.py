"""What the server's port makes of a call: who has signed it, whose it is, and what its answer tells."""

from __future__ import annotations

import datetime
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from sartor.remote import flower, flower_link
from sartor.remote.flower import SuperLink
from sartor.remote.flower_content import RECORD, SMALL, TENSORS, from_content, to_content
from sartor.remote.flower_link import FleetLink, Lost
from sartor.remote.messages import encode
from sartor.remote.requests import Failed


@pytest.fixture(scope="module")
def link() -> Iterator[SuperLink]:
    with SuperLink("127.0.0.1", 0) as link:
        yield link


def key() -> Any:
    return ec.generate_private_key(ec.SECP384R1())


def signed(own: Any, public: Any = None) -> dict[str, str]:
    """Headers of a call by whoever has one key, with another one in its place where that is given."""
    stamp = datetime.datetime.now(datetime.UTC).isoformat()
    name = public_key_to_bytes((public or own).public_key())
    return {
        "content-type": "application/protobuf",
        "flwr-public-key": b64encode(name).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": b64encode(sign_message(own, stamp.encode())).decode(),
    }


def test_a_call_is_answered_to_whoever_has_signed_it_for_itself(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FleetLink(f"127.0.0.1:{link.port}", key(), insecure=True)
    node.connect()
    own, other = node._signature._key, key()
    public = public_key_to_bytes(own.public_key())
    pull = PullMessagesRequest(node=Node(node_id=node.known))

    def status(call: str, asked: Any, headers: dict[str, str], method: str = "POST") -> int:
        body = asked if isinstance(asked, bytes) else asked.SerializeToString()
        address = f"http://127.0.0.1:{link.port}/v1/fleet/{call}"
        return httpx.request(method, address, content=body, headers=headers).status_code

    assert status("pull-messages", pull, signed(own)) == 200
    assert status("pull-messages", pull, signed(own), "PUT") == 404
    assert status("pull-messages", pull, signed(own) | {"content-type": "text/plain"}) == 415
    assert status("pull-messages", b"\xff\xff\xff", signed(own)) == 400
    assert status("pull-messages", pull, {"content-type": "application/protobuf"}) == 401
    assert status("pull-messages", pull, signed(other, own)) == 401
    assert status("pull-messages", pull, signed(other)) == 401  # it is nobody yet
    for call, asked in (
        ("activate-node", ActivateNodeRequest(public_key=public, heartbeat_interval=30)),
        ("register-node", RegisterNodeFleetRequest(public_key=public)),
        ("deactivate-node", DeactivateNodeRequest(node_id=node.known)),
    ):
        assert status(call, asked, signed(other)) == 401, call
    assert status("register-node", RegisterNodeFleetRequest(public_key=public), signed(own)) == 412  # again
    path = "/v1/fleet/pull-messages"

    def failing(**given: Any) -> None:
        raise RuntimeError("what nobody outside need know")

    monkeypatch.setitem(link._handlers, path, failing)
    answer = httpx.post(
        f"http://127.0.0.1:{link.port}{path}", content=pull.SerializeToString(), headers=signed(own)
    )
    assert (answer.status_code, answer.json()) == (500, {"detail": "Internal server error."})
    node.close()


def test_a_signature_serves_for_a_while_and_no_longer(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node signs the time anew when it is another one; a server that knows a signature looks at its age."""
    made: list[bytes] = []

    def counted(own: Any, stamp: bytes) -> bytes:
        made.append(stamp)
        return sign_message(own, stamp)

    monkeypatch.setattr(flower_link, "sign_message", counted)
    node = FleetLink(f"127.0.0.1:{link.port}", key(), insecure=True)
    node.connect()
    assert [node.receive() for _ in range(5)] == [None] * 5
    assert len(made) <= 2  # the machine may be slow
    monkeypatch.setattr(flower_link, "RENEWED", -1.0)
    before = len(made)
    assert [node.receive() for _ in range(5)] == [None] * 5
    assert len(made) == before + 5
    node.close()

    headers = {name.encode(): value.encode() for name, value in signed(key()).items()}
    assert flower._signature_fault(headers, None) == 0
    assert flower._signature_fault(headers, frozenset()) == 403
    now = flower.now()
    for apart, fault in ((-4, 0), (-6, 401), (304, 0), (306, 401), (0, 0)):
        monkeypatch.setattr(flower, "now", lambda apart=apart: now + datetime.timedelta(seconds=apart))
        assert flower._signature_fault(headers, None) == fault, apart
    headers[b"flwr-timestamp"] = now.isoformat().encode()  # another time than was signed
    assert flower._signature_fault(headers, None) == 401


def test_no_other_run_than_the_servers_own_goes_on(link: SuperLink) -> None:
    """Flower looks up whether a run does; of its own the server knows."""
    assert link._state.get_run_status({link._run})[link._run].status == "running"
    assert link._state.get_run_status({link._run + 1}) == {}
    node = FleetLink(f"127.0.0.1:{link.port}", key(), insecure=True)
    node.connect()
    message = link.send(node.known, encode({"n": 1}), 30, 0)
    request = node.receive()
    assert request is not None
    request.message.metadata.__dict__["_run_id"] = link._run + 1
    with pytest.raises(Lost, match="500"):
        node.reply(request, encode({"n": 2}))
    assert link.poll(message) is None
    node.close()


def test_what_nobody_has_announced_is_not_looked_for_again_and_again(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever arrives has the server look at all that it waits for, at most of it in vain."""
    looked: list[str] = []
    look = link._state.get_message_res

    def counted(*, message_ids: set[str], run_id: int) -> Any:
        looked.extend(message_ids)
        return look(message_ids=message_ids, run_id=run_id)

    monkeypatch.setattr(link._state, "get_message_res", counted)
    monkeypatch.setattr(flower, "UNANNOUNCED", 1000.0)
    nodes = [FleetLink(f"127.0.0.1:{link.port}", key(), insecure=True) for _ in range(2)]
    for node in nodes:
        node.connect()
    messages = [link.send(node.known, encode({"n": 1}), 30, 0) for node in nodes]
    assert [link.poll(message) for message in messages * 5] == [None] * 10
    assert sorted(looked) == sorted(messages)
    request = nodes[0].receive()
    assert request is not None
    nodes[0].reply(request, encode({"n": 2}))
    assert link.poll(messages[0]) is not None  # at once, as it was announced
    assert link.poll(messages[1]) is None
    assert looked.count(messages[1]) == 1
    monkeypatch.setattr(flower, "UNANNOUNCED", 0.0)
    link._awaited[messages[1]].again = 0.0
    nodes[1].close()
    with pytest.raises(Failed) as raised:  # nobody announces that
        link.poll(messages[1])
    assert raised.value.kind == "gone"
    nodes[0].close()


def test_small_parts_travel_together_and_large_ones_by_themselves() -> None:
    small = {"header": b"{}", "a": b"x" * SMALL, "b": b""}
    assert from_content(to_content(small)) == small
    assert set(to_content(small)) == {RECORD}
    assert len(get_all_nested_objects(to_content(small))) == 2
    mixed = {"header": b"h" * (SMALL + 1), "a": b"y" * (SMALL + 1), "b": b"z"}
    assert from_content(to_content(mixed)) == mixed
    assert set(to_content(mixed)[TENSORS]) == {"a"}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {RECORD: ArrayRecord()},
        {RECORD: ConfigRecord({"a": b""})},
        {RECORD: ConfigRecord({"header": "text"})},
        {RECORD: ConfigRecord({"header": b"", "a": 1})},
        {RECORD: ConfigRecord({"header": b""}), TENSORS: ConfigRecord()},
    ],
)
def test_what_is_no_message_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="message"):
        from_content(RecordDict(content))


def test_no_tensor_takes_the_place_of_the_header() -> None:
    array = Array(dtype="uint8", shape=(1,), stype="bytes", data=b"x")
    arrays = ArrayRecord({"header": array, "a": array})
    parts = from_content(RecordDict({RECORD: ConfigRecord({"header": b"{}"}), TENSORS: arrays}))
    assert parts == {"header": b"{}", "a": b"x"}


def test_a_node_that_is_started_anew_gets_nothing_of_what_it_was_asked_before(link: SuperLink) -> None:
    """As that it is refused: those who have left at once never fetch it."""
    own = key()
    before = FleetLink(f"127.0.0.1:{link.port}", own, insecure=True)
    before.connect()
    message = link.send(before.known, encode({"n": 1}), 30, 0)
    before.close()
    after = FleetLink(f"127.0.0.1:{link.port}", own, insecure=True)
    after.connect()
    assert after.known == before.known
    assert after.receive() is None
    with pytest.raises(Failed, match="started anew") as raised:
        link.poll(message)
    assert raised.value.kind == "gone"
    link.forget(message)
    again = link.send(after.known, encode({"n": 2}), 30, 0)
    request = after.receive()
    assert request is not None
    after.reply(request, encode({"n": 3}))
    assert link.poll(again) is not None
    after.close()
