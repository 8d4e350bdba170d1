"""A federation on any Flower installation, through Flower's public interface alone.

``sartor flower-app`` writes an application (:func:`write_app`): in it :class:`StockGrid` carries the server's
messages, :func:`answer` is what a node does with one. Flower starts a process for every message there, so a
node reads its data anew each time and finds what it was told in its folder; ``sartor serve`` and ``sartor
join`` are faster by far. Writing an application takes no Flower.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.errors import SartorError, SettingError
from sartor.extensions import is_file
from sartor.files import write
from sartor.remote.messages import HEADER, Parts, readable
from sartor.remote.requests import Failed
from sartor.remote.serve import require_deployable
from sartor.runs.experiment import Experiment, code_of, portable, toml_text

if TYPE_CHECKING:
    from flwr.app import Message

log = logging.getLogger(__name__)

PROJECT = """[project]
name = "sartor-federation"
version = "1.0.0"
description = "An experiment of sartor on Flower"
license = "Apache-2.0"
dependencies = ["sartor[flower]"]

[tool.flwr.app]
publisher = "sartor"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
out = ""
min-nodes = 0
deadline = 600.0
quorum = 1
"""

SERVER_APP = '''"""The server: runs the experiment beside this file."""

from pathlib import Path

from flwr.serverapp import ServerApp

from sartor.remote.flower_app import StockGrid
from sartor.remote.serve import Service, serve_on
from sartor.runs.experiment import load

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the rounds; the run folder is run_config "out", or a new one in runs/."""
    settings = context.run_config
    service = Service(
        min_nodes=int(settings["min-nodes"]),
        deadline=float(settings["deadline"]),
        quorum=int(settings["quorum"]),
    )
    out = Path(str(settings["out"])) if settings["out"] else None
    serve_on(StockGrid(grid), load(Path(__file__).with_name("experiment.toml")), service, out=out)
'''

CLIENT_APP = '''"""A node: its data and its states lie where --node-config says."""

from flwr.clientapp import ClientApp

from sartor.remote.flower_app import answer

app = ClientApp()


@app.query("call")
def call(message, context):
    """Answer a request of the server."""
    return answer(message, context)
'''


def write_app(folder: Path, experiment: Experiment) -> list[Path]:
    """An application of Flower's that runs the experiment; nothing that exists is written over."""
    require_deployable(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "pyproject.toml": PROJECT,
        "server_app.py": SERVER_APP,
        "client_app.py": CLIENT_APP,
        "experiment.toml": toml_text(portable(experiment)),
    }
    for code in code_of(experiment):
        if code.name in files:
            raise SettingError(f"{code.source}: the application has a {code.name} of its own; rename yours")
        if is_file(code.source):
            files[code.name] = Path(code.source).read_text(encoding="utf-8")
    for name in files:
        if (folder / name).exists():
            raise SettingError(f"{folder / name}: exists already; give another folder")
    for name, text in files.items():
        write(folder / name, text.encode())
    return [folder / name for name in files]


class StockGrid:
    """A grid of ours on a grid of Flower's."""

    lasting = False

    def __init__(self, grid: Any) -> None:
        from sartor.remote import flower_content

        self._grid, self._flower = grid, flower_content
        self._seen: set[int] = set()
        self._looked = 0.0
        self._next: dict[str, float] = {}
        self._most: dict[str, int] = {}

    def nodes(self) -> set[int]:
        """The nodes that are there, looked up once a second."""
        if time.monotonic() - self._looked > 1:
            self._seen, self._looked = set(self._grid.get_node_ids()), time.monotonic()
        return set(self._seen)

    def key(self, node: int) -> str:
        """Nothing: who a node is, is Flower's to look after."""
        return ""

    def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
        """Put a message on its way."""
        message = self._flower.message_to(node, parts, lifetime + 60)
        sent = list(self._grid.push_messages([message]))
        if not sent or not sent[0]:
            raise Failed("gone", "the node is not registered any more")
        self._most[str(sent[0])] = most
        return str(sent[0])

    def poll(self, message: str) -> Parts | None:
        """The reply, asked for a few times a second."""
        if time.monotonic() < self._next.get(message, 0.0):
            return None
        self._next[message] = time.monotonic() + 0.2
        for reply in self._grid.pull_messages([message]):
            if reply.has_error():
                raise Failed("gone", readable(reply.error.reason))
            try:
                parts = self._flower.from_content(reply.content)
            except Exception as error:  # whatever a hostile node has sent
                raise Failed("malformed", f"its reply cannot be read ({type(error).__name__})") from None
            if sum(len(part) for name, part in parts.items() if name != HEADER) > self._most[message]:
                raise Failed("oversized", f"more than the {self._most[message]} bytes that its reply has")
            return parts
        return None

    def rest(self, seconds: float) -> None:
        """Nothing says when something arrives."""
        time.sleep(seconds)

    def forget(self, message: str) -> None:
        """Flower removes what was fetched; what was not goes when its time is over."""
        self._next.pop(message, None)
        self._most.pop(message, None)

    def caught(self) -> list[tuple[int, Failed]]:
        """Nothing: who sends what is Flower's to look after."""
        return []

    def earlier(self) -> dict[str, tuple[int, str, bool]]:
        """Nothing: messages end with Flower's run."""
        return {}

    def take_up(self, message: str, node: int, lifetime: float, most: int) -> None:
        """There is nothing to take up."""


def answer(message: Message, context: Any) -> Message:
    """A node's reply to a message; ``--node-config 'data="..." state="..."'`` says where its data lie.

    ``import="mine.py,..."`` there names code of the node's own, which must be the server's; ``policy`` is a
    file that says what the node agrees to.
    """
    from sartor.remote.audit import Audit
    from sartor.remote.flower_content import from_content, reply_to
    from sartor.remote.join import loader
    from sartor.remote.node import Node
    from sartor.remote.policy import node_policy
    from sartor.runs.experiment import import_given

    settings = context.node_config
    words = [word.strip() for word in str(settings.get("import", "")).split(",") if word.strip()]
    import_given(words)
    for key in ("data", "state"):
        if not settings.get(key):
            raise SartorError(f"flower-supernode --node-config: give {key}, the folder of this node's {key}")
    load = loader(
        Path(str(settings["data"])),
        settings.get("name"),
        settings.get("client-column"),
        settings.get("label-column"),
    )
    policy = node_policy(settings.get("policy"), settings.get("allow-personal-models", False))
    state = Path(str(settings["state"]))
    node = Node(load, state, policy=policy, audit=Audit(state))
    node.recall()
    reply = node.handle(from_content(message.content))
    if node.refusal:
        log.warning("this node cannot take part: %s", node.refusal)
    if node.failure:
        log.warning("the server ended: %s", node.failure)
    return reply_to(message, reply)
