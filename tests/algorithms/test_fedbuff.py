"""FedBuff at constant concurrency: whoever has finished is replaced at once."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch

from helpers import federation_of, method, quadratics
from sartor.federation import Federation
from sartor.federation.clock import Conditions, LogNormal, World

CLIENTS = 20


def federation() -> Federation:
    centres = torch.linspace(-1, 1, CLIENTS, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()
    task, data = quadratics(centres, torch.ones_like(centres), (1,) * CLIENTS)
    conditions = Conditions(delay=LogNormal(within=0.0))
    return federation_of("loop", task, data, local={"batch": 1, "steps": 1}, conditions=conditions)


def rounds(
    found: Federation, count: int, cohorts: list[np.ndarray], **hyper: float
) -> list[list[list[float]]]:
    """The arrivals of every round."""
    algorithm = method("fedbuff", found, lr=0.1, **hyper)
    server, arrivals = algorithm.start(found), []
    for round in range(1, count + 1):
        found.round = round
        server = algorithm.round(server, found, cohorts[(round - 1) % len(cohorts)])
        arrivals.append(found.notes["arrivals"])
    return arrivals


def test_steps_take_the_time_of_clients_that_never_wait() -> None:
    """The arrivals are those of clients that begin again as soon as they are done, and nothing else."""
    found = federation()
    steps, buffer = 50, 10
    arrivals = [entry for row in rounds(found, steps, [np.arange(CLIENTS)], buffer=buffer) for entry in row]
    world = World(found.seed, found.names, np.ones(CLIENTS), 0)
    durations = LogNormal(within=0.0).durations(world, 1, np.arange(CLIENTS))
    heap = [(duration, client) for client, duration in enumerate(durations.tolist())]
    heapq.heapify(heap)
    for entry in arrivals:
        finish, client = heap[0]
        assert entry[0] == client
        assert entry[2] == pytest.approx(finish, rel=1e-12)
        heapq.heapreplace(heap, (finish + float(durations[client]), client))
    assert len(arrivals) == steps * buffer
    assert found.now == pytest.approx(arrivals[-1][2])


def test_as_many_are_at_work_at_any_time() -> None:
    """Cohorts of six of twenty change every round; six are at work whenever a client starts."""
    found = federation()
    cohorts = [np.arange(first, first + 6) for first in (0, 4, 9, 14)]
    spans = [entry[1:3] for row in rounds(found, 30, cohorts, buffer=4) for entry in row]
    horizon = spans[-40][1]
    for begin, _ in spans:
        if begin < horizon:
            assert sum(start <= begin < end for start, end in spans) == 6
    found = federation()
    spans = [entry[1:3] for row in rounds(found, 30, cohorts, buffer=4, concurrency=3) for entry in row]
    assert max(sum(start <= begin < end for start, end in spans) for begin, _ in spans) == 3


def test_what_many_jobs_were_sent_lies_in_a_snapshot_once() -> None:
    found = federation()
    rounds(found, 3, [np.arange(CLIENTS)], buffer=8)
    saved = found.snapshot()
    versions = {job.round for job in found.queue}
    assert sum(name.startswith("call.") for name in saved) == len(versions)
