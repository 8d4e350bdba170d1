"""A node's connection to Flower's SuperLink: it fetches requests and returns replies.

It never loads the code of an application. Beside ``flower.py`` this is the one module that uses names outside
Flower's public interface.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.errors import SartorError
from sartor.remote.flower_content import REASON, from_content, quiet, to_content, unfit
from sartor.remote.messages import Parts, readable

try:
    import httpx
    from flwr.app import Metadata
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
        RegisterNodeFleetRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectResponse, PushObjectResponse
    from flwr.proto.node_pb2 import Node as FleetNode
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
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
    from flwr.supercore.interceptors.http.utils import add_headers
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
    from flwr.supernode.fleet_http_client import FleetHttpClient
except ImportError as error:
    raise unfit(error) from error

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

log = logging.getLogger(__name__)

HEARTBEAT = 15.0
"""Seconds; a node from which nothing was heard for twice as long is gone."""
REFUSED = (401, 403, 404, 412, 413)
"""Answers of a server that knows what is asked of it and does not do it."""
APART = 30.0
"""Seconds by which the clocks of a node and the server may differ without being said to."""
NOTICED = 3.0
"""Seconds by which they must differ to be what a server refuses a signature for."""
MOST_APART = 3600.0
"""Seconds by which they may differ."""
RENEWED = 2.0
"""Seconds after which a node signs the time anew; a signature says nothing else, and is good for minutes."""


class Lost(Exception):
    """The server cannot be reached, or does not know this node any more."""


class Refused(SartorError):
    """The server does not let this node in, and will not."""


@dataclass(frozen=True)
class Request:
    """What a node has fetched."""

    message: Any
    parts: Parts


class _Signature:
    """Signs a node's requests with the time, by the server's clock.

    Servers take signatures of the last minutes; whose clock differs is told the time by any answer.
    """

    def __init__(self, key: EllipticCurvePrivateKey) -> None:
        self._key, self._public = key, b64encode(public_key_to_bytes(key.public_key())).decode()
        self._headers: dict[str, str] = {}
        self._signed = 0.0
        """The time that the headers say, which is signed."""
        self.ahead = self._found = 0.0
        """Seconds by which the server's clock is ahead of this machine's; 0 where they hardly differ."""

    def now(self) -> float:
        """The server's time."""
        return time.time() + self.ahead

    def intercept(self, context: Any, proceed: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Sign a request, and compare the clocks when it is answered."""
        now = self.now()
        if abs(now - self._signed) > RENEWED:
            stamp = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat()
            self._headers = {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: stamp,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self._key, stamp.encode())).decode(),
            }
            self._signed = now
        add_headers(context.request, self._headers)
        sent = time.time()
        response = proceed(context)
        self._compare(response.headers.get("date", ""), sent)
        return response

    def adopt(self, least: float = NOTICED) -> bool:
        """Go by the clock of the server, as far as its last answer told; whether that is another time."""
        differs = abs(self._found - self.ahead) > least
        self.ahead = self._found if differs else self.ahead
        return differs

    def _compare(self, told: str, sent: float) -> None:
        """A date is of whole seconds, and of some moment between question and answer."""
        try:
            date = parsedate_to_datetime(told).timestamp()
        except (ValueError, TypeError, OverflowError):
            return
        earliest, latest = date - time.time(), date + 1 - sent
        self._found = 0.0 if earliest <= 0 <= latest else (earliest + latest) / 2
        self.adopt(APART)


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
        quiet()
        self._address, self._key, self.known = address, public_key_to_bytes(key.public_key()), known
        self._signature = _Signature(key)
        try:
            self._client = FleetHttpClient.from_server_address(
                address,
                insecure,
                None if certificates is None else str(certificates),
                interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperNode"), self._signature],
            )
        except (OSError, ssl.SSLError) as error:
            raise SartorError(f"{certificates}: no certificate to check the server by: {error}") from None
        self._node: Any = None
        self._outgoing: Any = None
        """A reply that has not reached the server yet."""
        self._fetching = False
        """Whether the server may have handed out a request that has not arrived here."""
        self._closing = threading.Event()
        self._lost = threading.Event()
        self._pulse: threading.Thread | None = None

    @property
    def ahead(self) -> float:
        """Seconds by which the server's clock is ahead of this machine's; 0 where they hardly differ."""
        return self._signature.ahead

    def connect(self) -> bool:
        """Join, or join again; whether the server may believe that this node has been away.

        It is to believe that where something that it sent is lost, as it sends it again then.
        """
        if self._node is not None and not self._fetching and self._heard():
            self._lost.clear()
            return False
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
            raise Lost("the server does not let this node in yet; it believes it to be at work elsewhere")
        self._node, self.known = FleetNode(node_id=response.node_id), int(response.node_id)
        self._outgoing, self._fetching = None, False
        self._lost.clear()
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat, daemon=True)
            self._pulse.start()
        return True

    def receive(self) -> Request | None:
        """The next request, None where there is none."""
        if self._lost.is_set():
            raise Lost("the server does not know this node any more")
        if self._outgoing is not None:
            self._push()
        self._fetching = True
        response = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            self._fetching = False
            return None
        message = message_from_proto(response.messages_list[0])
        tree, run = response.message_object_trees[0], message.metadata.run_id
        fetch = make_pull_object_fn_protobuf(
            lambda request: self._call(self._client.PullObject, request, REFUSED) or PullObjectResponse(),
            self._node,
            run,
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
            self._fetching = False
            return None
        self._fetching = False
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=tree.object_id)
        with contextlib.suppress(Lost):  # the reply will notice
            self._call(self._client.ConfirmMessageReceived, confirm, REFUSED)
        inflated.metadata.__dict__["_message_id"] = message.metadata.message_id
        return Request(inflated, parts)

    def reply(self, request: Request, parts: Parts) -> None:
        """Return the reply to a request; where the server cannot be reached, once it can be again."""
        asked, now = request.message.metadata, self._signature.now()
        metadata = Metadata(
            run_id=asked.run_id,
            message_id="",
            src_node_id=asked.dst_node_id,
            dst_node_id=asked.src_node_id,
            reply_to_message_id=asked.message_id,
            group_id=asked.group_id,
            created_at=now,
            ttl=asked.created_at + asked.ttl - now,
            message_type=asked.message_type,
        )
        self._outgoing = make_message(metadata, to_content(parts))
        with no_object_id_recompute():
            self._outgoing.metadata.__dict__["_message_id"] = self._outgoing.object_id
        self._push()

    def _push(self) -> None:
        reply = self._outgoing
        with no_object_id_recompute():
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
                self._outgoing = None
                return  # the server does not wait for it any more
            put = make_push_object_fn_protobuf(
                lambda request: self._call(self._client.PushObject, request, REFUSED) or PushObjectResponse(),
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
        self._outgoing = None

    def close(self) -> None:
        """Leave."""
        self._closing.set()
        if self._node is not None:
            with contextlib.suppress(Lost, Refused):
                self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self.known), REFUSED)
        self._client.close()

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT / 3):
            try:
                if not self._heard():
                    self._lost.set()
            except (Lost, Refused):
                pass  # it is tried again, and requests notice too

    def _heard(self) -> bool:
        """Whether the server knows that this node is there."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
        response = self._call(self._client.SendNodeHeartbeat, request, REFUSED)
        return response is not None and bool(response.success)

    def _call(self, function: Callable[[Any], Any], request: Any, tolerated: Sequence[int] = ()) -> Any:
        """A call of the server; None for an answer of these kinds."""
        before = self.ahead
        try:
            return function(request)
        except httpx.HTTPStatusError as error:
            if REASON in error.response.headers:
                told = "the server does not know this node's key, which must be among its --nodes"
                raise Refused(f"{self._address}: {told}") from None
            status = error.response.status_code
            another_time = status == 401 and self._signature.adopt()
            if abs(self.ahead) > MOST_APART:
                told = f"{clocks_apart(self.ahead)}, which is too much; set it"
                raise Refused(f"{self._address}: {told}") from None
            if another_time or (status == 401 and self.ahead != before):
                return self._call(function, request, tolerated)  # by the server's clock
            if status in tolerated:
                return None
            raise Lost(f"the server answers {status} {readable(error.response.text, 200)}") from None
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            raise Lost(str(error) or type(error).__name__) from None


def clocks_apart(ahead: float) -> str:
    """How the clock of this machine differs from a server's that is ahead of it by these seconds."""
    return f"this machine's clock is {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the server's"
