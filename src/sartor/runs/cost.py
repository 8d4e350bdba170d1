"""Cost before the run: what an experiment will take, measured on as many of its clients as is quick.

A round is played with a few of the clients, then with four times as many, and so on until all take part or
the next would take longer than a few seconds. It is played again until it becomes no quicker, as the first
ones compile, trace and capture. Where all took part the figures are measured; else they are drawn out from
the last two in proportion to the work, and so are rounds of many steps, of which a part is played where the
whole might take too long. On a GPU a round is hardly quicker for fewer clients, and each number of them is
captured anew: there the whole cohort takes part from the first, and in whole rounds.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sartor.client.local import Batches
from sartor.data.clients import ClientData
from sartor.errors import SartorError
from sartor.federation.exchange import NobodyAnswered
from sartor.model.groups import regrouped, tasks_of
from sartor.model.networks import Factory
from sartor.model.task import Task
from sartor.runs.cadence import Cadence
from sartor.runs.evaluation import evaluate
from sartor.runs.experiment import Experiment
from sartor.runs.protection import cost_of, unbounded
from sartor.runs.run import models_told, tensors_of
from sartor.runs.setup import Setup, open_federation, set_up

PATIENCE = 3.0
"""Seconds that one more measurement may take."""
QUICKER = 0.9
"""Of the time of the quickest before it: a round that takes less says that the next may take less still."""
CAPTURING = 15.0
"""Seconds that a GPU may take beyond that, until its steps are compiled and captured."""
STEADY = {"cpu": 2, "cuda": 8}
"""Rounds in a row that are no quicker than those before, after which none is expected to be: a GPU's steps
are captured when they have come a few times.
"""
AT_ONCE = 256
"""Clients of a federation whom a GPU evaluates in hardly more time than a few of them."""
MANY = 200
"""Steps of a client in a round beyond which a CPU takes about so many at first."""
AFFORDED = 30.0
"""Seconds of a round, drawn out from those, up to which it is played as it is: where steps are quick it takes
far less than that, as what a round takes besides was drawn out too.
"""
LONG = 5.0
"""Seconds of a round with its evaluation on a CPU that leave nothing of how its beginning is slower."""


@dataclass(frozen=True)
class _Measured:
    """What a round and an evaluation took with so many clients in the federation and in the cohort."""

    clients: int
    cohort: int
    steps: float
    """Steps of all clients of the cohort together."""
    round_seconds: float
    evaluation_seconds: float
    bytes_down: int
    bytes_up: int
    state_bytes: int
    """Of one client."""
    server_bytes: int


def estimate(
    experiment: Experiment,
    *,
    data: ClientData | None = None,
    task: Task | Factory | None = None,
    normalise: bool | None = None,
) -> dict[str, Any]:
    """Clients, parameters, steps, bytes, memory and time of an experiment; nothing is stored.

    What is given is as for :func:`~sartor.runs.setup.set_up`.
    """
    setup = set_up(experiment, data=data, task=task, normalise=normalise)
    experiment, data = setup.experiment, setup.data
    clients, size = data.clients, max(task.size for task in tasks_of(setup.task))
    cohort = experiment.cohort.size(clients)
    steps = _steps(experiment, data.train.count)
    if experiment.engine.device != "cpu":
        gc.collect()  # captured graphs of what was measured before hold the memory of a GPU
        torch.cuda.empty_cache()
    whole = float(steps.mean()) * cohort
    last, before = _measure(setup, cohort)
    rounds = experiment.rounds
    down = _drawn_out(last.bytes_down, last.cohort, cohort)
    up = _drawn_out(last.bytes_up, last.cohort, cohort)
    round_seconds = last.round_seconds * max(1.0, whole / max(last.steps, 1.0))
    evaluation_seconds = last.evaluation_seconds * clients / last.clients
    seconds = _seconds(experiment, round_seconds, evaluation_seconds)
    dtype_bytes = setup.task.dtype.itemsize
    return {
        "algorithm": experiment.algorithm,
        "data": data.name,
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        **models_told(setup.task),
        "engine": experiment.engine.name,
        "device": experiment.engine.device,
        "way": experiment.engine.way,
        "steps_per_client": {
            "least": int(steps.min()),
            "mean": float(steps.mean()),
            "most": int(steps.max()),
        },
        "bytes_per_round": {"down": down, "up": up},
        "bytes": {"down": down * rounds, "up": up * rounds},
        "memory": {
            "model": size * dtype_bytes,
            "cohort_models": size * dtype_bytes * cohort,
            "server": _server_bytes(last, before, clients),
            "client_states": last.state_bytes * clients,
            "data": data.nbytes,
        },
        "privacy": cost_of(experiment, setup.algorithm, data.train.count) if experiment.privacy.on else None,
        "seconds_per_round": round_seconds,
        "seconds_per_evaluation": evaluation_seconds,
        "seconds": seconds,
        "quadratic": setup.algorithm.quadratic,
        "measured_clients": last.clients,
    }


def _seconds(experiment: Experiment, training: float, evaluation: float) -> float:
    """What all rounds take, with those evaluations that there will be."""
    cadence = Cadence(experiment.evaluate.every, experiment.rounds)
    total = 0.0 if experiment.rounds else evaluation
    for round in range(1, experiment.rounds + 1):
        due = cadence.due(round)
        row: dict[str, Any] = {"seconds": training}
        cadence.note({**row, "evaluation": {}, "evaluation_seconds": evaluation} if due else row)
        total += training + (evaluation if due else 0.0)
    return total


def _steps(experiment: Experiment, counts: np.ndarray) -> np.ndarray:
    """The steps of every client, those to be expected where they are drawn."""
    local = experiment.local
    batches = Batches("train", local.batch, local.most_epochs, local.steps)
    law = local.law
    return np.asarray(batches.count(np.asarray(counts, dtype=np.int64), None if law is None else law.mean))


def _measure(setup: Setup, cohort: int) -> tuple[_Measured, _Measured | None]:
    """The measurement with the most clients and the one before it."""
    clients, on_gpu = setup.data.clients, setup.experiment.engine.device != "cpu"
    last: _Measured | None = None
    before: _Measured | None = None
    count, tried = max(cohort, AT_ONCE) if on_gpu else 2, _shortened(setup)
    while True:
        count = min(count, clients)
        share = cohort if on_gpu else max(1, round(cohort * count / clients))
        begin = time.perf_counter()
        try:
            last, before = _play(tried, count, share), last
        except SartorError:
            if count == clients:  # with fewer a method may have too few, with all of them it may not
                raise
        taken = time.perf_counter() - begin
        if count == clients or (before is not None and taken * 4 > PATIENCE):
            break
        count *= 4
    assert last is not None
    whole, part = (float(_steps(each.experiment, setup.data.train.count).sum()) for each in (setup, tried))
    if tried is not setup and last.round_seconds * whole / part <= AFFORDED:
        last = _play(setup, last.clients, last.cohort)
    return last, before


def _play(setup: Setup, count: int, share: int) -> _Measured:
    """The quickest of some rounds, and of evaluations, with some of the clients; the first ones warm up."""
    experiment, algorithm = setup.experiment, setup.algorithm
    chosen = _some(setup.data, count)
    data, task = setup.data.some(chosen), regrouped(setup.task, lambda of: of[chosen])
    tried = replace(experiment, privacy=unbounded(experiment.privacy))
    federation = open_federation(tried, task, data)
    server = algorithm.start(federation)
    cohort = np.arange(count - share, count)  # the largest: a round waits for them
    seconds = evaluating = math.inf
    device = experiment.engine.device
    patience = PATIENCE + (0.0 if device == "cpu" else CAPTURING)
    steady, start = 0, time.perf_counter()
    for round in itertools.count(1):
        begin, traffic = time.perf_counter(), replace(federation.traffic)
        federation.round = round
        with suppress(NobodyAnswered):
            server = algorithm.round(server, federation, cohort)
            federation.check()
        federation.engine.wait()
        took, after = time.perf_counter() - begin, replace(federation.traffic)
        with suppress(NobodyAnswered):
            server = algorithm.ready(server, federation)
        evaluate(algorithm, server, federation, experiment.evaluate)
        federation.engine.wait()
        steady = 0 if took < QUICKER * seconds else steady + 1
        seconds = min(seconds, took)
        evaluating = min(evaluating, time.perf_counter() - begin - took)
        if device == "cpu" and seconds + evaluating > LONG:
            break
        if round > 1 and (steady == STEADY[device] or time.perf_counter() - start > patience):
            break
    return _Measured(
        clients=count,
        cohort=share,
        steps=float(_steps(experiment, data.train.count[cohort]).sum()),
        round_seconds=seconds,
        evaluation_seconds=evaluating,
        bytes_down=after.down - traffic.down,
        bytes_up=after.up - traffic.up,
        state_bytes=federation.states.bytes_per_client,
        server_bytes=sum(int(value.nbytes) for _, value in tensors_of(server)) + federation.bytes_kept,
    )


def _shortened(setup: Setup) -> Setup:
    """With fewer steps in a round, where there are many and they take a CPU's time."""
    experiment, local = setup.experiment, setup.experiment.local
    most = int(_steps(experiment, setup.data.train.count).max(initial=0))
    if experiment.engine.device != "cpu" or isinstance(local.epochs, tuple) or local.law or most <= MANY:
        return setup
    epochs = max(1, local.epochs * MANY // most)
    fewer = replace(local, steps=MANY) if local.steps else replace(local, epochs=epochs)
    return replace(setup, experiment=replace(experiment, local=fewer))


def _some(data: ClientData, count: int) -> np.ndarray:
    """So many of the clients, evenly from the smallest to the largest."""
    by_size = np.argsort(data.train.count, kind="stable")
    return np.asarray(by_size[np.linspace(0, data.clients - 1, count).round().astype(np.int64)])


def _drawn_out(value: int, measured: int, wanted: int) -> int:
    return round(value * wanted / measured)


def _server_bytes(last: _Measured, before: _Measured | None, clients: int) -> int:
    """The size of the server's state with all clients: on the line through the last two measurements."""
    if before is None or last.clients == clients:
        return last.server_bytes
    slope = (last.server_bytes - before.server_bytes) / (last.clients - before.clients)
    return round(last.server_bytes + slope * (clients - last.clients))
