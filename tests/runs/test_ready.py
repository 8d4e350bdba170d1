"""What a method does before it is evaluated: when it is asked to, and that what it asks clients counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import sartor
from sartor.algorithms import Hyper, Server, registered
from sartor.algorithms.base import Algorithm, register
from sartor.algorithms.references.fedavg import local_training
from sartor.federation.exchange import NobodyAnswered, Reply
from sartor.federation.federation import Federation


@dataclass(frozen=True)
class CountingServer(Server):
    rounds: tuple[int, ...] = ()


def size(client: Any, hyper: Any, w: Tensor) -> Reply:
    return Reply(n=client.n)


@pytest.fixture
def counting() -> Iterator[list[tuple[int, ...]]]:
    """A method that notes in which rounds it was made ready."""
    seen: list[tuple[int, ...]] = []

    @register
    class Counting(Algorithm[Hyper, CountingServer]):
        """FedAvg that counts."""

        name, family, paper = "counting", "global", "none"
        server_keeps, client_keeps, traffic = "w", "nothing", "1 / 1"

        def start(self, federation: Federation) -> CountingServer:
            return CountingServer(federation.initial())

        def round(self, server: CountingServer, federation: Federation, cohort: np.ndarray) -> CountingServer:
            replies = federation.map(local_training, cohort, {"w": server.w})
            return replace(server, w=server.w + replies.mean("delta"))

        def ready(self, server: CountingServer, federation: Federation) -> CountingServer:
            federation.map(size, np.arange(federation.clients), {"w": server.w})
            seen.append((*server.rounds, federation.round))
            if federation.round == 2:
                raise NobodyAnswered
            return replace(server, rounds=(*server.rounds, federation.round))

    yield seen
    registered().remove("counting")


def test_it_is_asked_in_rounds_that_are_evaluated(counting: list[tuple[int, ...]]) -> None:
    run = sartor.run("counting", clients=4, rounds=5, engine="loop", store=False, evaluate={"every": 2})
    # Nobody answered in round 2: the server stays as it was, and the round counts all the same.
    assert counting == [(2,), (4,), (4, 5)]
    up = [row["bytes_up"] for row in run.rounds]
    assert up[0] == up[2]
    assert up[1] == up[3] == up[4] == up[0] + 4 * 8
    assert [row["answered"] for row in run.rounds] == [4] * 5


def test_a_run_that_is_stopped_is_made_ready_too(counting: list[tuple[int, ...]]) -> None:
    class Stop(sartor.Observer):
        def round(self, run: Any, row: dict[str, Any]) -> None:
            if run.round == 3:
                run.stop("enough")

    run = sartor.run(
        "counting", clients=4, rounds=9, engine="loop", store=False, evaluate={"every": 0}, observers=[Stop()]
    )
    assert counting == [(3,)]
    assert len(run.rounds) == 3
