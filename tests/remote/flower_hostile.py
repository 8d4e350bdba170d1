"""A node that joins a federation and then answers whatever it likes, another thing every round.

Or it says of itself what is not so, where it is given entries for its introduction. ``--rounds`` says what it
does in which round, the last thing ever after.
"""

from __future__ import annotations

import argparse
import contextlib
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
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from sartor.remote import flower_link
from sartor.remote.flower_link import FleetLink, Lost, Request
from sartor.remote.join import loader
from sartor.remote.keys import own_key, read_key
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


def joined(address: str, state: Path, key: Path | None = None) -> FleetLink:
    """A link to the server, once it is there, with this key or one in this new folder."""
    state.mkdir(parents=True, exist_ok=key is not None)
    own = own_key(state / "key.pem") if key is None else read_key(key)
    link = FleetLink(address, own, insecure=True)
    while not link.known:
        try:
            link.connect()
        except Lost:  # the server is not there yet
            time.sleep(0.1)
    return link


def received(link: FleetLink) -> Request | None:
    """The next request; a server that is gone is waited for."""
    try:
        return link.receive()
    except Lost:
        time.sleep(0.2)
    with contextlib.suppress(Lost):
        link.connect()
    return None


def main(words: Sequence[str]) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("address")
    options.add_argument("data", type=Path)
    options.add_argument("state", type=Path)
    options.add_argument("pretended", type=json.loads, nargs="?", default={})
    options.add_argument("--key", type=Path)
    options.add_argument("--rounds", type=lambda text: text.split(","), default=ROUNDS)
    given = options.parse_args(words)
    link, pretended = joined(given.address, given.state, given.key), given.pretended
    node = Node(loader(given.data, None, None, None), given.state / "runs")
    remembered: Parts = {}
    while not node.done and not node.refusal:
        request = received(link)
        if request is None:
            time.sleep(0.02)
            continue
        header = read_header(request.parts)
        honest = node.handle(request.parts)
        if header["kind"] == "hello" and pretended:
            told, groups = decode(honest)
            for name, values in groups.get("moments", {}).items():  # "mean" and "squares" of every leaf
                values += pretended.get(name.split()[0], 0)
            told |= {name: value for name, value in pretended.items() if name not in ("mean", "squares")}
            link.reply(request, encode(told, groups))
            continue
        if header["kind"] != "call":
            link.reply(request, honest)
            continue
        mode = given.rounds[min(header["round"], len(given.rounds)) - 1] if header["keeps"] else "bad"
        print(header["round"], mode, flush=True)
        if mode == "honest":
            remembered = honest
            link.reply(request, honest)
        elif mode == "silent":
            continue
        elif mode == "swollen":
            print(sorted(set(swollen(link, request))), flush=True)
        elif mode == "unfinished":
            announce(link, request, honest)
        elif mode in ("growing", "numerous"):
            try:
                announce(link, request, honest, growing(60) if mode == "growing" else numerous(9000))
            except httpx.HTTPStatusError as error:
                print(error.response.status_code, error.response.json()["detail"], flush=True)
        elif mode == "garbage":
            original = flower_link.to_content
            flower_link.to_content = lambda parts: RecordDict({"x": ConfigRecord({"y": 1})})
            link.reply(request, honest)
            flower_link.to_content = original
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
    reply = Message(flower_link.to_content(parts), reply_to=request.message)
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


def swollen(link: FleetLink, request: Request, number: int = 20, size: int = 15 << 20) -> list[int]:
    """A reply of many large pieces, one after the other: what the server makes of each of them."""
    pieces = [hashlib.sha256(chunk(place, size)).hexdigest() for place in range(number)]
    children = [ObjectTree(object_id=name) for name in pieces]
    found: list[int] = []
    try:
        announce(link, request, {"header": b"{}"}, children)
    except httpx.HTTPStatusError as error:
        found.append(error.response.status_code)
    for place, name in enumerate(pieces):
        sent = PushObjectRequest(
            node=link._node,
            run_id=request.message.metadata.run_id,
            object_id=name,
            object_content=chunk(place, size),
        )
        try:
            link._client.PushObject(sent)
            found.append(200)
        except httpx.HTTPStatusError as error:
            found.append(error.response.status_code)
        except httpx.HTTPError:  # the server takes its time, or has closed the connection
            found.append(0)
    return found


def chunk(place: int, size: int) -> bytes:
    """A large piece, another one for every place."""
    return ArrayChunk(memoryview(place.to_bytes(8, "little") * (size // 8))).deflate()


def uploaded(link: FleetLink, request: Request, parts: Parts, announced: bool = True) -> list[int]:
    """What the server makes of a reply: of its announcement, if any, and of its pieces, the largest first."""
    reply = Message(flower_link.to_content(parts), reply_to=request.message)
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
