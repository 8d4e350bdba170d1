"""Flower as the carrier of messages: its SuperLink inside the server.

This module and ``flower_link.py``, a node's side, use names outside Flower's public interface; where the
installed version does not have them, the error says which versions do. :class:`SuperLink` answers nodes in a
thread, by Flower's own state and handlers, and publishes what nodes need and nothing else: starting runs,
registering keys and everything that a server application may do cannot be reached from any port, as this
process does them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sartor.errors import SartorError, SettingError
from sartor.files import locked
from sartor.remote.connections import Listener
from sartor.remote.flower_content import (  # turns telemetry off first
    REASON,
    TYPE,
    VERSIONS,
    from_content,
    quiet,
    to_content,
    unfit,
)
from sartor.remote.keys import fingerprint
from sartor.remote.limits import Limits
from sartor.remote.messages import HEADER, Parts, readable
from sartor.remote.requests import Failed

os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"

try:
    import uvicorn
    from flwr.app import Message, Metadata
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.constant import (
        NOOP_ACCOUNT_NAME,
        NOOP_FLWR_AID,
        SUPERLINK_NODE_ID,
        SYSTEM_TIME_TOLERANCE,
        TIMESTAMP_HEADER,
        TIMESTAMP_TOLERANCE,
        ErrorCode,
        Status,
    )
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
        RegisterNodeFleetRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        FLWR_IN_MEMORY_DB_NAME,
        NOOP_FEDERATION_ID,
        TaskType,
    )
    from flwr.supercore.date import now
    from flwr.supercore.error import FlowerError
    from flwr.supercore.error.catalog import API_ERROR_MAP
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.concurrency import run_in_threadpool
except ImportError as error:
    raise unfit(error) from error

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

LARGEST_PIECE = 16 << 20
"""Bytes of one HTTP request that brings a piece of a reply; Flower cuts tensors into pieces of 5 MB."""
LARGEST_REQUEST = 1 << 20
"""Bytes of any other HTTP request."""
SPARE = 1 << 16
"""Bytes that a reply may have besides its tensors."""
SPARE_PIECES = 64
"""Pieces that a reply may consist of, besides one for every megabyte."""
MOST_PIECES = 1 << 13
"""Pieces that a reply may consist of, however large it is: of 5 MB each, 40 GB."""
DEEPEST = 8
"""Pieces may consist of pieces so many times: those of a message do five times."""
CALLS = {
    "/v1/fleet/register-node": RegisterNodeFleetRequest,
    "/v1/fleet/activate-node": ActivateNodeRequest,
    "/v1/fleet/deactivate-node": DeactivateNodeRequest,
    "/v1/fleet/send-node-heartbeat": SendNodeHeartbeatRequest,
    "/v1/fleet/pull-messages": PullMessagesRequest,
    "/v1/fleet/push-messages": PushMessagesRequest,
    "/v1/fleet/pull-object": PullObjectRequest,
    "/v1/fleet/push-object": PushObjectRequest,
    "/v1/fleet/confirm-message-received": ConfirmMessageReceivedRequest,
}
"""What nodes may call, and what each of these calls brings."""
PROTOBUF = PROTOBUF_MEDIA_TYPE.encode()
STIRRING = frozenset(
    f"/v1/fleet/{call}" for call in ("activate-node", "deactivate-node", "push-messages", "push-object")
)
"""What the server waits for."""
BUSY = 429
"""The answer to a node that asks for too much at once."""
UNANNOUNCED = 0.5
"""Seconds between two looks for a reply that its node has not announced to this process."""
FAULTS = {
    ErrorCode.NODE_UNAVAILABLE: "gone",
    ErrorCode.MESSAGE_UNAVAILABLE: "late",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "late",
}
"""What Flower says of replies that there are none of: their nodes have left, or their time is over."""
MOST_CAUGHT = 100
"""So many refusals are remembered until somebody asks for them."""


@dataclass
class _Awaited:
    """A reply that is on its way: announced, once its pieces are known."""

    due: float
    node: int
    since: str
    """When the node had joined: one that has joined again since does not know of the request."""
    asked: frozenset[str]
    """The pieces of the request."""
    most: int
    """Bytes of tensors that the reply may have."""
    reply: str = ""
    pieces: tuple[str, ...] = ()
    tree: dict[str, set[str]] = field(default_factory=dict)
    """The pieces that the node has announced, each with those that it consists of."""
    arrived: dict[str, int] = field(default_factory=dict)
    """Bytes of the pieces that have come."""
    fault: Failed | None = None
    """What the node has tried to answer, and was refused at the door."""
    again: float = 0.0
    """When to look again for a reply that was not announced: that the node is gone, say."""

    @property
    def most_pieces(self) -> int:
        """Pieces that the reply may consist of."""
        return min(SPARE_PIECES + self.most // 1_000_000, MOST_PIECES)


class SuperLink:
    """Flower's SuperLink in this process: a grid for the server, and an address for nodes.

    ``tls`` are the files of a certificate and its key. ``keys`` are the public keys (PEM) of the nodes that
    may join; None lets anybody in. ``database`` keeps nodes and messages in a file instead of memory, where a
    later process finds them: one that has begun something else (``anew``) forgets the messages.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: tuple[Path, Path] | None = None,
        keys: Collection[bytes] | None = None,
        database: Path | None = None,
        anew: bool = True,
    ) -> None:
        quiet()
        self.lasting = database is not None
        self._lock = None if database is None else _locked(database)
        self._keys = None if keys is None else frozenset(keys)
        self._state, self._handlers = _state(database), _handlers()
        for key in keys or ():
            with contextlib.suppress(ValueError):  # it is known from an earlier process
                self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
        self._awaited: dict[str, _Awaited] = {}
        self._storing = threading.Lock()
        """Held while a message is compared with what is stored and stored itself."""
        self._earlier: dict[str, str] = {}
        """The notes of messages that an earlier process has sent."""
        self._task = 0
        self._run = (self._last_run(anew) if self.lasting else 0) or self._start_run()
        self._run_goes_on()
        self._caught: deque[tuple[int, Failed]] = deque(maxlen=MOST_CAUGHT)
        self._stirred = threading.Event()
        self._listener = Listener(_bound(host, port))
        self.port = int(self._listener.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                _Port(self._keys, self._listener, self._takes, self._answer, self._stirred),
                log_level="error",
                log_config=None,
                access_log=False,
                lifespan="off",
                ssl_certfile=None if tls is None else str(tls[0]),
                ssl_keyfile=None if tls is None else str(tls[1]),
                timeout_keep_alive=60,
                ws="none",
                http="h11",  # its headers are bounded
                loop="asyncio:SelectorEventLoop",  # it accepts connections by the listener's means
                proxy_headers=False,  # an address is where a connection comes from, whatever a request says
                callback_notify=self._listener.tidy,
                timeout_notify=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._closing = threading.Event()
        self._pulse = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> SuperLink:
        self._thread.start()
        self._pulse.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise SartorError("the server cannot listen; is the certificate the one of the key?")
            time.sleep(0.01)
        return self

    def __exit__(self, *reason: object) -> None:
        self._closing.set()
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._listener.close()
        if self._lock is not None:
            self._lock.close()

    def nodes(self) -> set[int]:
        """The nodes from which something was heard of late."""
        return set(self._state.get_nodes(self._run))

    def key(self, node: int) -> str:
        """The public key of a node, by which it is the same one for as long as it has it."""
        found = self._state.get_node_info(node_ids=[node])
        return fingerprint(bytes(found[0].public_key)) if found else ""

    def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
        """Put a message where the node fetches it; its group is nothing to Flower, and holds the note."""
        since = self._joined(node)
        metadata = Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=node,
            reply_to_message_id="",
            group_id=json.dumps([node, note]) if note else "",
            created_at=time.time(),
            ttl=lifetime + 60,
            message_type=TYPE,
        )
        message = make_message(metadata, to_content(parts))
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            tree, pieces = get_object_tree(message), get_all_nested_objects(message)
            identity = str(message.metadata.message_id)
            due = time.monotonic() + lifetime
            self._awaited[identity] = _Awaited(due, node, since, frozenset(pieces), most)
            session = self._state.start_session(self._run)
            with self._storing:
                self._disown(_tree_of(tree, sys.maxsize))
                stored, missing = self._state.store_message_and_object_tree(
                    remove_content_from_message(message), tree, session
                )
            if not stored:
                del self._awaited[identity]
                raise Failed("gone", "the node is not registered any more")
            for name in missing:
                self._state.store_object(self._run, session, name, pieces[name].deflate())
        return identity

    def poll(self, message: str) -> Parts | None:
        """A node's reply, once all of it has arrived."""
        awaited = self._awaited[message]
        if awaited.fault is not None:
            raise awaited.fault
        if not awaited.tree and time.monotonic() < awaited.again:
            return None
        awaited.again = time.monotonic() + UNANNOUNCED
        if not awaited.reply and not self._announced(message, awaited):
            self._patience(awaited)
            return None
        contents: dict[str, bytes] = {}
        size = 0
        for piece in awaited.pieces:
            content = self._state.get_object(self._run, piece)
            if content is None or (content == b"" and time.monotonic() > awaited.due):
                raise Failed("unfinished", "its reply was announced and never uploaded")
            if content == b"":
                self._patience(awaited)
                return None
            size += len(content)
            if size > awaited.most + SPARE:
                raise _oversized(awaited)
            contents[piece] = content
        try:
            reply = inflate_object_from_contents(awaited.reply, contents)
            if not isinstance(reply, Message):
                raise ValueError("no message")
            parts = from_content(reply.content)
        except Exception as error:  # whatever a hostile node has sent
            raise Failed("malformed", f"its reply cannot be read ({type(error).__name__})") from None
        if sum(len(part) for name, part in parts.items() if name != HEADER) > awaited.most:
            raise _oversized(awaited)
        return parts

    def _announced(self, message: str, awaited: _Awaited) -> bool:
        """Whether a reply has been announced; what it consists of is noted."""
        for reply in self._state.get_message_res(message_ids={message}, run_id=self._run):
            if not reply.has_error():
                awaited.reply = str(reply.metadata.message_id)
            elif reply.error.code in FAULTS and self._whole(awaited):
                awaited.reply = next(iter(awaited.tree))  # it has answered, and then left
            else:
                raise Failed(FAULTS.get(reply.error.code, "failed"), readable(reply.error.reason))
            try:
                tree = self._state.object_store.get_object_tree(awaited.reply)
                awaited.pieces = tuple(part.object_id for part in iterate_object_tree(tree))
            except Exception as error:  # whatever a hostile node has announced
                raise Failed("malformed", f"its reply is no tree ({type(error).__name__})") from None
            if len(awaited.pieces) > awaited.most_pieces:
                raise Failed("oversized", f"a reply of {len(awaited.pieces)} pieces")
        return bool(awaited.reply)

    def _whole(self, awaited: _Awaited) -> bool:
        """Whether all pieces of a reply that was announced are there."""
        return bool(awaited.tree) and all(self._state.get_object(self._run, name) for name in awaited.tree)

    def _patience(self, awaited: _Awaited) -> None:
        """Wait on, unless the node was started anew and so has forgotten what it was asked or uploading."""
        if self._joined(awaited.node) != awaited.since:
            raise Failed("gone", "the node was started anew meanwhile")

    def _joined(self, node: int) -> str:
        found = self._state.get_node_info(node_ids=[node])
        return str(found[0].last_activated_at) if found else ""

    def rest(self, seconds: float) -> None:
        """Wait until a node has joined, left or sent something, for so long at most."""
        if self._stirred.wait(seconds):
            self._stirred.clear()

    def forget(self, message: str) -> None:
        """Remove a message and its reply."""
        awaited = self._awaited.pop(message, None)
        if awaited is not None:
            self._state.delete_messages(message_ins_ids={message})
            for name in {message, awaited.reply, *list(awaited.tree)[:1]} - {""}:
                self._state.object_store.delete(name)

    def earlier(self) -> dict[str, tuple[int, str, bool]]:
        """Messages with a note that an earlier process has sent, to nodes that are there."""
        there, found = self.nodes(), {}
        for message, note in self._earlier.items():
            awaited = self._awaited[message]
            try:
                if awaited.node not in there:
                    raise Failed("gone", "the node is not back")
                answered = self._announced(message, awaited) and all(
                    self._state.get_object(self._run, piece) for piece in awaited.pieces
                )
                found[message] = (awaited.node, note, answered)
            except Failed:
                self.forget(message)
        self._earlier = {}
        return found

    def take_up(self, message: str, node: int, lifetime: float, most: int) -> None:
        """Wait for the reply to one of them."""
        awaited = self._awaited[message]
        awaited.due, awaited.since, awaited.most = time.monotonic() + lifetime, self._joined(node), most

    def caught(self) -> list[tuple[int, Failed]]:
        """Nodes that tried what the door refused since the last call, besides answers of their own."""
        return [self._caught.popleft() for _ in range(len(self._caught))]

    def _answer(
        self, path: str, headers: Mapping[bytes, bytes], body: bytes, heard: Callable[[bytes], object]
    ) -> bytes:
        """Flower's answer to a call of a node, which is ``heard`` of once it is known to be itself."""
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != PROTOBUF:
            raise _Denied(415, "not a call of Flower's")
        asked = CALLS[path]()
        try:
            asked.ParseFromString(body)
        except Exception:  # whatever a hostile node has sent
            raise _Denied(400, "not a call of Flower's") from None
        heard(self._authenticated(headers, asked))
        with self._storing if isinstance(asked, PushMessagesRequest) else contextlib.nullcontext():
            self._check(asked)
            more: dict[str, Any] = {}
            if isinstance(asked, RegisterNodeFleetRequest):
                more["enable_supernode_auth"] = self._keys is not None
            elif isinstance(asked, PullMessagesRequest | ConfirmMessageReceivedRequest):
                more["store"] = self._state.object_store
            answer = self._handlers[path](request=asked, state=self._state, **more)
        if isinstance(asked, ActivateNodeRequest):
            self._begins(answer.node_id)
        return bytes(answer.SerializeToString())

    def _begins(self, node: int) -> None:
        """A node is there anew: what was asked of it before is not for this process of it to fetch."""
        for message, held in tuple(self._awaited.items()):
            if held.node == node and not held.reply and not held.tree:
                held.fault = Failed("gone", "the node was started anew meanwhile")
                self._state.delete_messages(message_ins_ids={message})

    def _authenticated(self, headers: Mapping[bytes, bytes], asked: Any) -> bytes:
        """The key of the node that makes a call, which has signed it and calls for itself."""
        status = _signature_fault(headers, self._keys)
        if status == 403:
            raise _Denied(403, "its key is not among those of the server", {REASON: "key"})
        key = _claimed_key(headers)
        if isinstance(asked, RegisterNodeFleetRequest | ActivateNodeRequest):
            own = asked.public_key == key
        else:
            node = asked.node_id if isinstance(asked, DeactivateNodeRequest) else asked.node.node_id
            own = not status and self._state.get_node_id_by_public_key(key) == node
        if status or not own:
            raise _Denied(401, "not signed by the node that it is said to come from")
        return key

    def _check(self, asked: Any) -> None:
        """Let a node do what is its own to do.

        That the node is who it says does not mean that what it does is its own: a reply says itself whose it
        is, and whoever knows the identifier of a message could confirm or read it.
        """
        if isinstance(asked, PushMessagesRequest):
            for message in asked.messages_list:
                if message.metadata.src_node_id != asked.node.node_id:
                    self._catch(asked.node.node_id, "a reply", message.metadata.src_node_id)
            self._check_announcement(asked)
        elif isinstance(asked, PushObjectRequest):
            self._check_piece(asked)
        elif isinstance(asked, ConfirmMessageReceivedRequest):
            awaited = self._awaited.get(asked.message_object_id)
            if awaited is None:
                raise _Denied(404, "no such request")
            if awaited.node != asked.node.node_id:
                self._catch(asked.node.node_id, "a confirmation", awaited.node)
        elif isinstance(asked, PullObjectRequest):
            mine = [held for held in tuple(self._awaited.values()) if held.node == asked.node.node_id]
            if not any(asked.object_id in held.asked for held in mine):
                raise _Denied(404, "no such piece of a request to this node")

    def _check_announcement(self, asked: PushMessagesRequest) -> None:
        """Refuse a reply before anything is made of it: Flower follows its tree wherever that leads."""
        answered = asked.messages_list[0].metadata.reply_to_message_id if asked.messages_list else ""
        own = self._awaited.get(answered)
        own = own if own is not None and own.node == asked.node.node_id else None
        try:
            if len(asked.messages_list) != 1 or len(asked.message_object_trees) != 1:
                raise Failed("malformed", "it announces no reply, or several at once")
            if asked.message_object_trees[0].object_id != asked.messages_list[0].metadata.message_id:
                raise Failed("malformed", "its reply is not the one that it announces the pieces of")
            if own is not None and own.fault is not None:
                raise own.fault
            tree = _tree_of(asked.message_object_trees[0], MOST_PIECES if own is None else own.most_pieces)
            self._compare_tree(asked.message_object_trees[0])
        except Failed as error:
            self._fault(asked.node.node_id, own, error)
        if own is not None and not own.tree:
            own.tree = tree

    def _check_piece(self, asked: PushObjectRequest) -> None:
        """Refuse a piece of no reply of the node, or with which that is larger than was asked for."""
        node, size = asked.node.node_id, len(asked.object_content)
        mine = [held for held in tuple(self._awaited.values()) if held.node == node]
        mine = [held for held in mine if asked.object_id in held.tree]
        if not mine:
            raise _Denied(404, "no such piece of a reply that is waited for")
        for held in mine:
            held.arrived[asked.object_id] = size
            if sum(held.arrived.values()) > held.most + SPARE:
                self._fault(node, held, _oversized(held))

    def _takes(self, key: bytes, size: int, signed: Callable[[], bool]) -> bool:
        """Whether a piece of so many bytes from the node with this key may come: a reply may grow by so many.

        Where the node has one reply under way, and has signed this, that reply is none any more if not.
        """
        node = self._state.get_node_id_by_public_key(key)
        mine = [held for held in tuple(self._awaited.values()) if held.node == node and held.fault is None]
        room = [held.most - sum(tuple(held.arrived.values())) + 2 * SPARE for held in mine]
        takes = size <= max(room, default=0)
        if not takes and len(mine) == 1 and mine[0].tree and signed():
            mine[0].fault = _oversized(mine[0])
        return takes

    def _fault(self, node: int, awaited: _Awaited | None, error: Failed) -> NoReturn:
        """Refuse what a node tries; the reply that it belongs to is none any more."""
        if awaited is not None:
            awaited.fault = error
        else:
            self._caught.append((node, error))
        raise _Denied(403, str(error)) from None

    def _disown(self, tree: dict[str, set[str]]) -> None:
        """Forget replies of which a piece is said to be what one of a request of ours is not."""
        for awaited in tuple(self._awaited.values()):
            if any(tree.get(name, children) != children for name, children in awaited.tree.items()):
                awaited.fault = Failed("malformed", "a piece of its reply does not consist of what it says")
                self._state.object_store.delete(next(iter(awaited.tree)))
                awaited.tree = {}

    def _compare_tree(self, tree: Any) -> None:
        """Refuse a tree with a piece that is in the store and consists of others there.

        So whatever is in the store is no larger than what was announced, however pieces name each other.
        """
        store, level = self._state.object_store, [tree]
        while level:
            below: list[Any] = []
            for part in level:
                try:
                    known = store.get_object_tree(part.object_id)
                except NoObjectInStoreError:
                    below.extend(part.children)
                    continue
                if _tree_of(known) != _tree_of(part):
                    raise Failed("malformed", "a piece of its reply is known to consist of other pieces")
            level = below

    def _catch(self, node: int, what: str, victim: int) -> None:
        self._caught.append((node, Failed("forged", f"{what} in the name of node {victim}; refused")))
        raise _Denied(403, f"{what} in the name of another node")

    def _last_run(self, anew: bool) -> int:
        """The run of an earlier process, with the messages that have a note; 0 where there is none."""
        _revive(self._state)
        found = 0
        for run in self._state.get_run_info(statuses=[Status.RUNNING]):
            if anew or found:
                self._state.stop_run(run.run_id)
                continue
            found, self._task = int(run.run_id), int(run.primary_task_id)
            for message in self._state.get_message_ids_from_run_id(found):
                row = self._state.get_valid_message_ins(message)
                node, note = json.loads((row and row["group_id"]) or '[0, ""]')
                pieces = self._pieces(message)
                self._awaited[message] = _Awaited(0.0, int(node), "", pieces, sys.maxsize)
                if note and all(self._state.get_object(found, piece) for piece in pieces):
                    self._earlier[message] = str(note)
                else:  # nobody knows what it was, or its server had not stored all of it when it ended
                    self.forget(message)
        return found

    def _pieces(self, message: str) -> frozenset[str]:
        """The pieces of a request; none, where the node has fetched it already."""
        try:
            tree = self._state.object_store.get_object_tree(message)
        except NoObjectInStoreError:
            return frozenset()
        return frozenset(part.object_id for part in iterate_object_tree(tree))

    def _start_run(self) -> int:
        """A run of Flower that is under way, without an application: messages belong to one."""
        run = self._state.create_run(
            "", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        tasks = self._state.get_tasks(run_ids=[run])
        if not run or len(tasks) != 1:
            raise SartorError(f"this version of Flower does not start a run; install {VERSIONS}")
        self._task = tasks[0].task_id
        if self._state.claim_task(self._task) is None or not self._state.activate_task(self._task):
            raise SartorError(f"this version of Flower does not start a run; install {VERSIONS}")
        return int(run)

    def _run_goes_on(self) -> None:
        """Tell Flower so, which looks it up at every call; and have it count no bytes, as others here do."""
        look, going = self._state.get_run_status, self._state.get_run_status({self._run})
        self._state.get_run_status = lambda runs: going if runs == {self._run} else look(runs)
        self._state.store_traffic = lambda run, **sizes: None

    def _keep_alive(self) -> None:
        while not self._closing.wait(10):
            self._state.acknowledge_task_heartbeat(self._task)


def _oversized(awaited: _Awaited) -> Failed:
    return Failed("oversized", f"more than the {awaited.most} bytes that its reply has")


def _tree_of(tree: Any, most: int = MOST_PIECES) -> dict[str, set[str]]:
    """The pieces of a tree, each with those that it consists of; the tree's own comes first.

    A tree of too many is refused, and one that would grow where every mention of a piece is followed.
    """
    found: dict[str, set[str]] = {}
    level, count = [tree], 1
    for _ in range(DEEPEST):
        below: list[Any] = []
        for part in level:
            count += len(part.children)
            if count > most:
                raise Failed("oversized", f"a reply of more than {most} pieces")
            children = {child.object_id for child in part.children}
            if len(part.object_id) != 64:
                raise Failed("malformed", "a piece of its reply has no name")
            twice = len(children) < len(part.children)
            if twice or found.setdefault(part.object_id, children) != children:
                raise Failed("malformed", "a piece of its reply is named twice")
            below.extend(part.children)
        if not below:
            return found
        level = below
    raise Failed("malformed", f"pieces of its reply consist of others more than {DEEPEST} times")


def _state(database: Path | None) -> Any:
    """Flower's state, in a file or in memory."""
    name = FLWR_IN_MEMORY_DB_NAME if database is None else str(database)
    try:
        return LinkStateFactory(name, NoOpFederationManager(), ObjectStoreFactory(name)).state()
    except Exception as error:  # whatever is in the file
        if database is None:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(f"--store {database}: cannot be used: {reason}") from None


def _handlers() -> dict[str, Callable[..., Any]]:
    """What Flower does for each call of a node."""
    return {path: getattr(fleet_handlers, path.rpartition("/")[2].replace("-", "_")) for path in CALLS}


def _locked(database: Path) -> Any:
    """A lock on a file, which no two servers may share, and which nobody else may read."""
    try:
        lock = database.with_name(database.name + ".lock").open("w")
        os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise SettingError(f"--store {database}: cannot be used: {error.strerror or error}") from None
    if not locked(lock.fileno()):
        lock.close()
        raise SettingError(f"--store {database}: another server is using it")
    return lock


def _revive(state: Any) -> None:
    """Let runs go on whose process has ended, with all replies that it had not done with.

    Flower takes a run that is silent for a minute for failed, and hands out a reply once.
    """
    try:
        from flwr.supercore.state.schema.corestate_models import Task
        from flwr.supercore.state.schema.linkstate_models import MessageRes
        from sqlalchemy import update
    except ImportError as error:
        raise SartorError(f"--store needs Flower, {VERSIONS}: {error}") from error
    with state.session() as session:
        going = update(Task).where(Task.running_at.is_not(None), Task.finished_at.is_(None))
        session.execute(going.values(active_until=now() + datetime.timedelta(minutes=1)))
        session.execute(update(MessageRes).values(delivered_at=""))


class _Denied(Exception):
    """The answer to a call that is not answered."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers or {}


class _Port:
    """Lets through what nodes need, of a bounded size; everything else is not there.

    Where nodes have keys, nothing is read from a connection beyond its first headers unless one has signed
    them.
    """

    def __init__(
        self,
        keys: frozenset[bytes] | None,
        listener: Listener,
        takes: Callable[[bytes, int, Callable[[], bool]], bool],
        answer: Callable[..., bytes],
        stirred: threading.Event,
    ) -> None:
        self._keys, self._listener, self._limits = keys, listener, Limits()
        self._takes, self._answer, self._stirred = takes, answer, stirred

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in CALLS or scope["method"] != "POST":
            await _refuse(send, 404)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        most = LARGEST_PIECE if scope["path"].endswith("/push-object") else LARGEST_REQUEST
        if b"transfer-encoding" in headers or not length.isdigit() or int(length) > most:
            await _refuse(send, 413)
            return
        key = _claimed_key(headers)
        if self._keys is not None and not self._listener.knows(scope["client"], key):
            status = _signature_fault(headers, self._keys)
            if status:
                await _refuse(send, status, {REASON: "key"} if status == 403 else {})
                return
            self._listener.heard(scope["client"], key)
        if most == LARGEST_PIECE:

            def signed() -> bool:
                return not _signature_fault(headers, self._keys)

            if not await run_in_threadpool(self._takes, key, int(length), signed):
                await _refuse(send, 413)  # it is not waited for, and so it is not read
                return
        if self._keys is None:  # anybody may come, under any name
            await self._serve(scope, headers, receive, send)
            return
        if not self._limits.begin(key, int(length)):
            await _refuse(send, BUSY)
            return
        try:
            await self._serve(scope, headers, receive, send)
        finally:
            self._limits.end(key, int(length))

    async def _serve(self, scope: Any, headers: Mapping[bytes, bytes], receive: Any, send: Any) -> None:
        """Answer a call once all of it is there."""
        body, more = bytearray(), True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body += part.get("body", b"")
            more = part.get("more_body", False)
        loop, client = asyncio.get_running_loop(), scope["client"]

        def heard(key: bytes) -> None:
            loop.call_soon_threadsafe(self._listener.heard, client, key)

        try:
            answer = await run_in_threadpool(self._answer, scope["path"], headers, bytes(body), heard)
        except Exception as error:  # whatever a hostile node has sent
            await _deny(send, error)
            return
        pairs = [(b"content-type", PROTOBUF), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        await send({"type": "http.response.body", "body": answer})
        if scope["path"] in STIRRING:
            self._stirred.set()


def _claimed_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The public key of whoever says to have sent these headers; nothing where they have none."""
    try:
        return b64decode(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b""), validate=True)
    except ValueError:
        return b""


def _signature_fault(headers: Mapping[bytes, bytes], keys: frozenset[bytes] | None) -> int:
    """The status of an answer to headers that nobody who has one of the keys has signed of late; else 0.

    Without keys any will do.
    """
    names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
    try:
        key, signature, stamp = (headers[name.encode()] for name in names)
        public = b64decode(key, validate=True)
        if keys is not None and public not in keys:
            return 403
        age = (now() - datetime.datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
        recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        signed = _signed(public, stamp, signature)
    except (KeyError, ValueError, TypeError, OverflowError):  # TypeError: a key or a time of another kind
        return 401
    return 0 if recent and signed else 401


@functools.lru_cache(maxsize=4096)
def _signed(public: bytes, stamp: bytes, signature: bytes) -> bool:
    """Whether the owner of this key has signed a time; nodes come with the same signature for a while."""
    return bool(verify_signature(bytes_to_public_key(public), stamp, b64decode(signature, validate=True)))


async def _deny(send: Any, error: Exception) -> None:
    """Answer a call that failed: by what the door or Flower says of it, and by nothing else."""
    headers: Mapping[str, str] = {}
    told: Mapping[str, Any]
    if isinstance(error, _Denied):
        status, headers, told = error.status, error.headers, {"detail": str(error)}
    elif isinstance(error, FlowerError) and error.code in API_ERROR_MAP:
        known = API_ERROR_MAP[error.code]
        status, told = known.http_status_code, error.to_json(known.public_message)
    else:
        log.debug("a call of a node: %s: %s", type(error).__name__, error)
        status, told = 500, {"detail": "Internal server error."}
    await _refuse(send, status, {"content-type": "application/json", **headers}, json.dumps(told).encode())


async def _refuse(
    send: Any, status: int, headers: Mapping[str, str] | None = None, reason: bytes = b""
) -> None:
    """Answer without having read the request, or with a reason."""
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": reason})


def _bound(host: str, port: int) -> socket.socket:
    """A socket on this address and no other."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise SartorError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound
