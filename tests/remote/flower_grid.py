"""A federation of nodes in one process: real nodes and real messages as bytes, but no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.data.clients import ClientData, Split
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task
from sartor.remote.admission import Admission, assemble
from sartor.remote.messages import Parts, read_header
from sartor.remote.node import Node
from sartor.remote.policy import Policy
from sartor.remote.requests import Failed, Requests
from sartor.remote.server import RemoteEngine
from sartor.runs.experiment import from_mapping

Change = Callable[[int, Parts], "Parts | None"]


class HereGrid:
    """Hands messages to nodes in this process. ``change`` may alter a node's replies, or lose them (None).

    Work is answered in the order in which it was sent.
    """

    lasting = False

    def __init__(self, nodes: dict[int, Node], change: Change | None = None) -> None:
        self.at, self.gone = nodes, set[int]()
        self.change = change or (lambda node, parts: parts)
        self.requests: dict[str, tuple[int, Parts]] = {}
        self.replies: dict[str, Parts | None] = {}
        self.sent: list[tuple[int, Parts]] = []
        self.number = 0
        self.most: dict[str, int] = {}

    def nodes(self) -> set[int]:
        return set(self.at) - self.gone

    def key(self, node: int) -> str:
        return f"key {node}"

    def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
        self.number += 1
        message = str(self.number)
        self.most[message] = most
        self.requests[message] = (node, carried(parts))
        self.sent.append((node, parts))
        return message

    def poll(self, message: str) -> Parts | None:
        node, parts = self.requests[message]
        if node in self.gone:
            raise Failed("gone", "the node is offline")
        if work(parts) and any(work(other) for _, other in before(self.requests, message)):
            return None
        if message not in self.replies:
            reply = self.change(node, carried(self.at[node].handle(parts)))
            self.replies[message] = reply
        reply = self.replies[message]
        tensors = [part for name, part in (reply or {}).items() if name != "header"]
        if sum(map(len, tensors)) > self.most[message]:
            raise Failed("oversized", "too large")
        return reply

    def kept(self, name: str) -> Tensor:
        """A state of all clients, from their nodes, who are told first what counts."""
        rows = {number: row for node in self.at.values() for number, row in node.states(name).items()}
        return torch.stack([rows[number] for number in sorted(rows)])

    def rest(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.005))

    def forget(self, message: str) -> None:
        self.requests.pop(message, None)
        self.replies.pop(message, None)

    def caught(self) -> list[tuple[int, Failed]]:
        return []

    def earlier(self) -> dict[str, tuple[int, str, bool]]:
        return {}

    def take_up(self, message: str, node: int, lifetime: float, most: int) -> None:
        raise AssertionError("there is nothing to take up")


def work(parts: Parts) -> bool:
    """Whether a request is of a round, and not of its evaluation."""
    return bool(read_header(parts).get("keeps"))


def before(requests: dict[str, tuple[int, Parts]], message: str) -> list[tuple[int, Parts]]:
    """The requests that were sent before this one and are not answered yet."""
    return [request for other, request in requests.items() if int(other) < int(message)]


def carried(parts: Parts) -> Parts:
    """Parts as they are after a journey: other objects of the same bytes."""
    return {name: bytes(bytearray(part)) for name, part in parts.items()}


def part_of(data: ClientData, numbers: Sequence[int]) -> ClientData:
    """Some clients' data alone."""

    def some(split: Split) -> Split:
        rows = np.concatenate([np.arange(split.start[n], split.start[n] + split.count[n]) for n in numbers])
        count = split.count[list(numbers)]
        return Split(split.x[rows], split.y[rows], np.cumsum(count) - count, count)

    names = tuple(data.names[number] for number in numbers)
    test = some(data.test)
    return ClientData(
        names,
        some(data.train),
        test,
        None if data.validation is None else some(data.validation),
        test.x,
        test.y,
        data.classes,
        f"{data.hash} {numbers}",
        data.name,
        data.labels,
    )


def experiment_of(name: str, **tables: Any) -> Any:
    """An experiment on data that is not normalised, by the loop engine."""
    return from_mapping(
        {"algorithm": name, "data": {"normalise": False}, "engine": {"name": "loop"}, **tables}
    )


def nodes_of(
    data: ClientData,
    task: Task,
    blocks: Sequence[Sequence[int]],
    folder: Path | None = None,
    sends_personal: bool = False,
) -> dict[int, Node]:
    """Nodes, each with some of the clients."""

    def loads(block: Sequence[int]) -> Callable[[Any], ClientData]:
        own = part_of(data, block)
        return lambda experiment: own

    return {
        place: Node(
            loads(block),
            None if folder is None else folder / str(place),
            task=task,
            policy=Policy(personal_models=sends_personal),
        )
        for place, block in enumerate(blocks, 1)
    }


def federation_on(
    grid: HereGrid,
    experiment: Any,
    task: Task,
    *,
    quorum: int = 1,
    deadline: float = 5.0,
    unit: float = 1.0,
    **settings: Any,
) -> Federation:
    """A federation of the nodes of a grid, who are greeted first."""
    admission = Admission(Requests(grid, 5.0), experiment)
    met = {node: admission.greet(node) for node in sorted(grid.nodes())}
    made = FederationSettings(
        **{
            "local": experiment.local,
            "seed": experiment.seed,
            "method": experiment.algorithm,
            "conditions": Conditions(on_bad_reply="drop"),
            "fetches_personal": experiment.evaluate.personal_models == "yes",
            **settings,
        }
    )
    engine = RemoteEngine(
        grid, met, experiment, task, assemble(met), made, quorum=quorum, deadline=deadline, unit=unit
    )
    return Federation(task, engine, made)
