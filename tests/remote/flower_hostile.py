"""A node that joins a federation and then answers whatever it likes, another thing every round.

Or it says of itself what is not so, where it is given entries for its introduction.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from sartor.remote import flower as flwr_adapter
from sartor.remote.flower import FleetLink, Lost, Request
from sartor.remote.join import loader
from sartor.remote.keys import own_key
from sartor.remote.messages import Parts, decode, encode, read_header
from sartor.remote.node import Node

ROUNDS = [
    "honest",
    "malformed",
    "lying",
    "oversized",
    "unfinished",
    "misshapen",
    "bad",
    "replayed",
    "garbage",
    "growing",
    "numerous",
]
"""What it does in round 1, 2, …"""


def joined(address: str, state: Path) -> FleetLink:
    """A link to the server, once it is there, with a key in this new folder."""
    state.mkdir(parents=True)
    link = FleetLink(address, own_key(state / "key.pem"), insecure=True)
    while not link.known:
        try:
            link.connect()
        except Lost:  # the server is not there yet
            time.sleep(0.1)
    return link


def main(words: Sequence[str]) -> None:
    address, data, state = words[0], Path(words[1]), Path(words[2])
    link = joined(address, state)
    node = Node(loader(data, None, None, None), state / "runs")
    pretended = json.loads(words[3]) if len(words) > 3 else {}
    remembered: Parts = {}
    while not node.done and not node.refusal:
        request = link.receive()
        if request is None:
            time.sleep(0.02)
            continue
        header = read_header(request.parts)
        honest = node.handle(request.parts)
        if header["kind"] == "hello" and pretended:
            told, groups = decode(honest)
            link.reply(request, encode({**told, **pretended}, groups))
            continue
        if header["kind"] != "call":
            link.reply(request, honest)
            continue
        mode = ROUNDS[header["round"] - 1] if header["keeps"] else "bad"
        print(header["round"], mode, flush=True)
        if mode == "honest":
            remembered = honest
            link.reply(request, honest)
        elif mode == "unfinished":
            announce(link, request, honest)
        elif mode in ("growing", "numerous"):
            try:
                announce(link, request, honest, growing(60) if mode == "growing" else numerous(9000))
            except httpx.HTTPStatusError as error:
                print(error.response.status_code, error.response.json()["detail"], flush=True)
        elif mode == "garbage":
            original = flwr_adapter.to_content
            flwr_adapter.to_content = lambda parts: RecordDict({"x": ConfigRecord({"y": 1})})
            link.reply(request, honest)
            flwr_adapter.to_content = original
        else:
            link.reply(request, changed(mode, honest, remembered))

    if node.refusal:
        print(f"refused: {node.refusal}", flush=True)


def changed(mode: str, honest: Parts, remembered: Parts) -> Parts:
    """A dishonest reply."""
    if mode == "replayed":
        return remembered
    if mode == "malformed":
        return {**honest, "header": b"\xff" + honest["header"]}
    header, groups = decode(honest)
    if mode == "lying":  # a header that claims 10^12 numbers
        text = encode({**header, "tensors": {"sent": [["w", "float32", [10**12]]]}})["header"]
        text = text.replace(b'"tensors": {}', b'"tensors": {"sent": [["w", "float32", [1000000000000]]]}')
        return {**honest, "header": text}
    if mode == "oversized":
        return encode(header, {"sent": {"w": torch.zeros(8_000_000)}})
    sent = groups["sent"]
    if mode == "misshapen":
        return encode(header, {"sent": {name: value[..., :-1] for name, value in sent.items()}})
    wrong = {name: value * torch.nan if value.is_floating_point() else value for name, value in sent.items()}
    return encode(header, {**groups, "sent": wrong})


def announce(
    link: FleetLink, request: Request, parts: Parts, children: Sequence[ObjectTree] | None = None
) -> None:
    """Tell of a reply that is never uploaded, and of pieces that it does not have where some are given."""
    reply = Message(flwr_adapter.to_content(parts), reply_to=request.message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    tree = get_object_tree(reply)
    link._client.PushMessages(
        PushMessagesRequest(
            node=link._node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[
                tree if children is None else ObjectTree(object_id=tree.object_id, children=children)
            ],
        )
    )


def uploaded(link: FleetLink, request: Request, parts: Parts, announced: bool = True) -> list[int]:
    """What the server makes of a reply: of its announcement, if wanted, and of its pieces, the largest first."""
    reply = Message(flwr_adapter.to_content(parts), reply_to=request.message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    found: list[int] = []

    def call(function: Any, asked: Any) -> Any:
        try:
            answer = function(asked)
        except httpx.HTTPStatusError as error:
            found.append(error.response.status_code)
            return None
        found.append(200)
        return answer

    session = ""
    if announced:
        asked = PushMessagesRequest(
            node=link._node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )
        answer = call(link._client.PushMessages, asked)
        session = "" if answer is None else answer.session_id
    contents = {name: held.deflate() for name, held in get_all_nested_objects(reply).items()}
    for name, content in sorted(contents.items(), key=lambda pair: -len(pair[1])):
        call(
            link._client.PushObject,
            PushObjectRequest(
                node=link._node,
                run_id=reply.metadata.run_id,
                object_id=name,
                object_content=content,
                session_id=session,
            ),
        )
    return found


def piece(name: Any, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=hashlib.sha256(str(name).encode()).hexdigest(), children=children)


def growing(deep: int) -> list[ObjectTree]:
    """Pieces that name each other twice: followed to their ends, 2 to the power of their number."""
    level = [piece(deep)]
    for place in range(deep):
        level = [piece(place, *level), piece(place)]
    return level


def numerous(number: int) -> list[ObjectTree]:
    return [piece(place) for place in range(number)]
