"""Flower as the carrier of messages: its SuperLink inside the server, its Fleet connection at the nodes.

This is the one module that uses names outside Flower's public interface; where the installed version does
not have them, the error says which versions do. :class:`SuperLink` runs Flower's own application in a thread
and publishes of it what nodes need and nothing else: starting runs, registering keys and everything that a
server application may do cannot be reached from any port, as this process does them itself.
:class:`FleetLink` is a node's connection: it fetches requests and returns replies, and never loads the code
of an application. Nothing is sent to anybody else: telemetry and the search for updates are off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.errors import SartorError
from sartor.federation.flower import Failed
from sartor.federation.stock import TYPE, VERSIONS, from_content, to_content  # turns telemetry off first
from sartor.federation.wire import HEADER, LARGEST_HEADER, Parts

os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"

try:
    import httpx
    import uvicorn
    from flwr.app import Message, Metadata
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID, ErrorCode
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
        RegisterNodeFleetRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.node_pb2 import Node as FleetNode
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_pull_object_fn_protobuf,
        make_push_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents,
        pull_objects,
        push_objects,
    )
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as error:
    raise SartorError(
        f"real federations need Flower, {VERSIONS}: {error}; install it with `pip install 'sartor[flower]'`"
    ) from error

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

log = logging.getLogger(__name__)

LARGEST_REQUEST = 16 << 20
"""Bytes of one HTTP request; Flower cuts tensors into pieces of 5 MB."""
HEARTBEAT = 15.0
"""Seconds; a node from which nothing was heard for twice as long is gone."""
SPARE = 1 << 20
"""Bytes that a reply may have besides its tensors and its header."""
MOST_OBJECTS = 1000
"""Pieces that a reply may consist of, besides those its size asks for."""
NODE_PATHS = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "register-node",
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
)
REFUSED = (401, 403, 404, 412)
"""Answers of a server that knows what is asked of it and does not do it."""


# The server's side -----------------------------------------------------------------------------------------


@dataclass
class _Awaited:
    """A reply that is on its way: announced, once its pieces are known."""

    due: float
    node: int
    since: str
    """When the node had joined: one that has joined again since does not know of the request."""
    reply: str = ""
    pieces: tuple[str, ...] = ()


class SuperLink:
    """Flower's SuperLink in this process: a grid for the server, and an address for nodes.

    ``tls`` are the files of a certificate and its key. ``keys`` are the public keys (PEM) of the nodes that
    may join; None lets anybody in. ``database`` keeps messages in a file instead of memory.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: tuple[Path, Path] | None = None,
        keys: Sequence[bytes] | None = None,
        database: Path | None = None,
    ) -> None:
        _quiet()
        if database is not None:
            os.environ["FLWR_DATABASE"] = str(database)
        from flwr.superlink.main import create_app

        app = create_app()
        app.state.enable_supernode_auth = keys is not None
        self._state = app.state.linkstate_factory.state()
        for key in keys or ():
            self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
        self._run = self._start_run()
        self._awaited: dict[str, _Awaited] = {}
        self._socket = _bound(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                _FleetOnly(app),
                log_level="error",
                log_config=None,
                access_log=False,
                lifespan="on",
                ssl_certfile=None if tls is None else str(tls[0]),
                ssl_keyfile=None if tls is None else str(tls[1]),
                timeout_keep_alive=60,
                ws="none",
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
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
        self._socket.close()

    def nodes(self) -> set[int]:
        """The nodes from which something was heard of late."""
        return set(self._state.get_nodes(self._run))

    def send(self, node: int, parts: Parts, lifetime: float) -> str:
        """Put a message where the node fetches it."""
        since = self._joined(node)
        metadata = Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=node,
            reply_to_message_id="",
            group_id="",
            created_at=time.time(),
            ttl=lifetime + 60,
            message_type=TYPE,
        )
        message = make_message(metadata, to_content(parts))
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            tree, pieces = get_object_tree(message), get_all_nested_objects(message)
            session = self._state.start_session(self._run)
            stored, missing = self._state.store_message_and_object_tree(
                remove_content_from_message(message), tree, session
            )
            if not stored:
                raise Failed("gone", "the node is not registered any more")
            for name in missing:
                self._state.store_object(self._run, session, name, pieces[name].deflate())
        identity = str(message.metadata.message_id)
        self._awaited[identity] = _Awaited(time.monotonic() + lifetime, node, since)
        return identity

    def poll(self, message: str, most: int) -> Parts | None:
        """A node's reply, once all of it has arrived."""
        awaited = self._awaited[message]
        if not awaited.reply and not self._announced(message, awaited, most):
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
            if size > most + LARGEST_HEADER + SPARE:
                raise Failed("oversized", f"more than the {most} bytes that its reply has")
            contents[piece] = content
        try:
            reply = inflate_object_from_contents(awaited.reply, contents)
            if not isinstance(reply, Message):
                raise ValueError("no message")
            parts = from_content(reply.content)
        except Exception as error:  # whatever a hostile node has sent
            raise Failed("malformed", f"its reply cannot be read ({type(error).__name__})") from None
        if sum(len(part) for name, part in parts.items() if name != HEADER) > most:
            raise Failed("oversized", f"more than the {most} bytes that its reply has")
        return parts

    def _announced(self, message: str, awaited: _Awaited, most: int) -> bool:
        """Whether a reply has been announced; what it consists of is noted."""
        for reply in self._state.get_message_res(message_ids={message}, run_id=self._run):
            if reply.has_error():
                gone = reply.error.code == ErrorCode.NODE_UNAVAILABLE
                raise Failed("gone" if gone else "failed", str(reply.error.reason)[:200])
            awaited.reply = str(reply.metadata.message_id)
            try:
                tree = self._state.object_store.get_object_tree(awaited.reply)
                awaited.pieces = tuple(part.object_id for part in iterate_object_tree(tree))
            except Exception as error:  # whatever a hostile node has announced
                raise Failed("malformed", f"its reply is no tree ({type(error).__name__})") from None
            if len(awaited.pieces) > MOST_OBJECTS + most // 1000:
                raise Failed("oversized", f"a reply of {len(awaited.pieces)} pieces")
        return bool(awaited.reply)

    def _patience(self, awaited: _Awaited) -> None:
        """Wait on, unless the node was started anew and so has forgotten what it was asked or uploading."""
        if self._joined(awaited.node) != awaited.since:
            raise Failed("gone", "the node was started anew meanwhile")

    def _joined(self, node: int) -> str:
        found = self._state.get_node_info(node_ids=[node])
        return str(found[0].last_activated_at) if found else ""

    def forget(self, message: str) -> None:
        """Remove a message and its reply."""
        awaited = self._awaited.pop(message, None)
        if awaited is not None:
            self._state.delete_messages(message_ins_ids={message})
            for name in (message, awaited.reply):
                if name:
                    self._state.object_store.delete(name)

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

    def _keep_alive(self) -> None:
        while not self._closing.wait(10):
            self._state.acknowledge_task_heartbeat(self._task)


class _FleetOnly:
    """Lets through what nodes need, of a bounded size; everything else is not there."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] not in NODE_PATHS:
            await _refuse(send, 404)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if not length.isdigit() or int(length) > LARGEST_REQUEST:
            await _refuse(send, 413)
            return
        await self._app(scope, receive, send)


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


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


# A node's side ---------------------------------------------------------------------------------------------


class Lost(Exception):
    """The server cannot be reached, or does not know this node any more."""


@dataclass(frozen=True)
class Request:
    """What a node has fetched."""

    message: Any
    parts: Parts


class FleetLink:
    """A node's connection to the server. ``known`` is the number that the server gave it last time."""

    def __init__(
        self,
        address: str,
        key: EllipticCurvePrivateKey,
        *,
        certificates: Path | None = None,
        insecure: bool = False,
        known: int = 0,
    ) -> None:
        _quiet()
        self._key, self.known = public_key_to_bytes(key.public_key()), known
        try:
            self._client = FleetHttpClient.from_server_address(
                address,
                insecure,
                None if certificates is None else str(certificates),
                interceptors=[
                    RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                    NodeAuthHttpInterceptor(key, key.public_key()),
                ],
            )
        except (OSError, ssl.SSLError) as error:
            raise SartorError(f"{certificates}: no certificate to check the server by: {error}") from None
        self._node: Any = None
        self._closing = threading.Event()
        self._lost = threading.Event()
        self._pulse: threading.Thread | None = None

    def connect(self) -> int:
        """Join, or join again; the number that the server knows this node by."""
        self._call(self._client.RegisterNode, RegisterNodeFleetRequest(public_key=self._key), REFUSED)
        activate = ActivateNodeRequest(public_key=self._key, heartbeat_interval=HEARTBEAT)
        response = self._call(self._client.ActivateNode, activate, REFUSED)
        if response is None and self.known:
            # The server believes that this node, which was started anew, is still at work: it is told that
            # it is not, and notices by this that what it asked last is lost.
            self._call(
                self._client.DeactivateNode,
                DeactivateNodeRequest(node_id=self.known),
                REFUSED,
            )
            time.sleep(0.5)
            response = self._call(self._client.ActivateNode, activate, REFUSED)
        if response is None:
            raise Lost("the server does not let this node in (yet): is its key among the server's?")
        self._node, self.known = FleetNode(node_id=response.node_id), int(response.node_id)
        self._lost.clear()
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat, daemon=True)
            self._pulse.start()
        return self.known

    def receive(self) -> Request | None:
        """The next request, None where there is none."""
        if self._lost.is_set():
            raise Lost("the server does not know this node any more")
        response = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        message = message_from_proto(response.messages_list[0])
        tree, run = response.message_object_trees[0], message.metadata.run_id
        fetch = make_pull_object_fn_protobuf(
            lambda request: self._call(self._client.PullObject, request), self._node, run
        )
        try:
            contents = pull_objects(
                [part.object_id for part in iterate_object_tree(tree)], fetch, max_time=60
            )
            inflated: Any = inflate_object_from_contents(tree.object_id, contents)
            parts = from_content(inflated.content)
        except Lost:
            raise
        except Exception as error:
            log.warning("a request could not be read: %s", error)
            return None
        self._call(
            self._client.ConfirmMessageReceived,
            ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=tree.object_id),
            REFUSED,
        )
        inflated.metadata.__dict__["_message_id"] = message.metadata.message_id
        return Request(inflated, parts)

    def reply(self, request: Request, parts: Parts) -> None:
        """Return the reply to a request."""
        reply = Message(to_content(parts), reply_to=request.message)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, pieces = get_object_tree(reply), get_all_nested_objects(reply)
            response = self._call(
                self._client.PushMessages,
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[tree],
                ),
                REFUSED,
            )
            if response is None:
                return  # the server does not wait for it any more
            put = make_push_object_fn_protobuf(
                lambda request: self._call(self._client.PushObject, request),
                self._node,
                reply.metadata.run_id,
                response.session_id,
            )
            try:
                push_objects(pieces, put, object_ids_to_push=set(response.objects_to_push))
            except Lost:
                raise
            except Exception as error:
                log.warning("a reply could not be returned: %s", error)

    def close(self) -> None:
        """Leave."""
        self._closing.set()
        if self._node is not None:
            with contextlib.suppress(Lost):
                self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self.known), REFUSED)
        self._client.close()

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT / 3):
            try:
                request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
                if not self._call(self._client.SendNodeHeartbeat, request).success:
                    self._lost.set()
            except Lost:
                pass  # it is tried again, and requests notice too

    def _call(self, function: Callable[[Any], Any], request: Any, tolerated: Sequence[int] = ()) -> Any:
        """A call of the server; None for an answer of these kinds."""
        try:
            return function(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in tolerated:
                return None
            raise Lost(
                f"the server answers {error.response.status_code} {error.response.text[:200]}"
            ) from None
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            raise Lost(str(error) or type(error).__name__) from None


def _quiet() -> None:
    """Flower's own lines are for its developers; what matters is told by this package."""
    for name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "httpcore", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL if name == "flwr" else logging.ERROR)
