"""Two nodes: one whose secrets leak, and one that hears of them and meddles with its messages.

Both do their own work honestly. The first writes down the identifier of every request that it gets, once when
it has fetched it and once when it has answered, and goes on when the second has done its worst. No node could
know these identifiers otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from flower_hostile import joined
from flwr.app import Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.node_pb2 import Node as FleetNode
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from sartor.remote.flower_content import TYPE, to_content
from sartor.remote.flower_link import FleetLink
from sartor.remote.join import loader
from sartor.remote.messages import encode, version
from sartor.remote.node import Node

Attack = tuple[str, Callable[[], Any]]


def main(words: Sequence[str]) -> None:
    role, address, data, state, leak = words[0], words[1], Path(words[2]), Path(words[3]), Path(words[4])
    link = joined(address, state)
    print(f"joined as node {link.known}", flush=True)
    {"victim": victim, "forger": forger}[role](
        link, Node(loader(data, None, None, None), state / "runs"), leak
    )


def victim(link: FleetLink, node: Node, leak: Path) -> None:
    told = 0
    while not node.done:
        request = link.receive()
        if request is None:
            time.sleep(0.02)
            continue
        metadata = request.message.metadata
        for moment in ("fetched", "answered"):
            if moment == "answered":
                link.reply(request, node.handle(request.parts))
            told += 1
            entry = [moment, metadata.message_id, metadata.run_id, link.known, metadata.ttl]
            with leak.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            while not leak.with_suffix(f".{told}").exists() and not leak.with_suffix(".end").exists():
                time.sleep(0.005)


def forger(link: FleetLink, node: Node, leak: Path) -> None:
    done = 0
    while not node.done:
        request = link.receive()
        if request is not None:
            link.reply(request, node.handle(request.parts))
        for line in leak.read_text().splitlines()[done:] if leak.exists() else ():
            moment, *known = json.loads(line)
            for name, attack in attacks(link, *known):
                print(moment, name, outcome(attack), sep="|", flush=True)
            done += 1
            leak.with_suffix(f".{done}").touch()
        time.sleep(0.005)
    leak.with_suffix(".end").touch()


def outcome(attack: Callable[[], Any]) -> str:
    """What the server made of it: a status, or how many pieces it would take and give."""
    try:
        answer = attack()
    except httpx.HTTPStatusError as error:
        return str(error.response.status_code)
    taken = len(getattr(answer, "objects_to_push", ())) + len(getattr(answer, "object_content", b""))
    return f"200 {taken + len(getattr(answer, 'messages_list', ()))}"


def attacks(link: FleetLink, message: str, run: int, victim: int, ttl: float) -> Iterator[Attack]:
    client, me, other = link._client, link._node, FleetNode(node_id=victim)

    def push(by: Any, source: int, target: int, answered: str, parts: Any) -> Any:
        metadata = Metadata(
            run_id=run,
            message_id="",
            src_node_id=source,
            dst_node_id=target,
            reply_to_message_id=answered,
            group_id="",
            created_at=time.time(),
            ttl=ttl / 2,
            message_type=TYPE,
        )
        sent: Message = make_message(metadata, to_content(parts))
        sent.metadata.__dict__["_message_id"] = sent.object_id
        return client.PushMessages(
            PushMessagesRequest(
                node=by,
                messages_list=[message_to_proto(remove_content_from_message(sent))],
                message_object_trees=[get_object_tree(sent)],
            )
        )

    reply = encode({"nonce": "0" * 32, "error": "I give up"})
    order = encode({"kind": "refuse", "reason": "go home", "nonce": "0" * 32, "version": version()})
    yield "a reply in its name", lambda: push(me, victim, SUPERLINK_NODE_ID, message, reply)
    yield "a reply in my name", lambda: push(me, link.known, SUPERLINK_NODE_ID, message, reply)
    yield "a reply as if I were it", lambda: push(other, victim, SUPERLINK_NODE_ID, message, reply)
    yield "an order in the server's name", lambda: push(me, SUPERLINK_NODE_ID, victim, "", order)
    yield "an order in my name", lambda: push(me, link.known, victim, "", order)
    yield "read it", lambda: client.PullObject(PullObjectRequest(node=me, run_id=run, object_id=message))
    yield "fetch it", lambda: client.PullMessages(PullMessagesRequest(node=other))
    confirmation = ConfirmMessageReceivedRequest(node=me, run_id=run, message_object_id=message)
    yield "confirm it", lambda: client.ConfirmMessageReceived(confirmation)
