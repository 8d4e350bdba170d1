"""Several seeds of one experiment in one batch: whether that is worth while, and doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from sartor import nests
from sartor.algorithms import registered
from sartor.client.local import Batches
from sartor.data.clients import ClientData, LazySplit
from sartor.engines.lockstep import Maker, in_lockstep
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.kernels.device import free_bytes
from sartor.model.task import Task
from sartor.runs.execute import execute_setup, interruptions
from sartor.runs.experiment import Experiment
from sartor.runs.observers import Kept, Observer
from sartor.runs.result import Result
from sartor.runs.setup import Setup, federation_settings

TOGETHER_NUMBERS = 4_000_000
"""Seeds run together on a CPU while the models and batches of all their clients have so many numbers at most.

Measured for FedAvg and Ditto (``bench/seeds.py``): 1.3 to 3 times faster up to 2.7 million, between 1.3 and
0.9 at 13 million, slower beyond.
"""

TOGETHER_MEMORY = 0.25
"""Seeds are run together where all their samples take at most this share of the free memory."""


def may_share(experiment: Experiment) -> bool:
    """Whether seeds of an experiment can be run in one batch at all, as far as is known before its data.

    Runs of the loop engine take nothing from each other, nor do those whose clients have models of their own;
    asynchronous methods are at another event in every seed, and trackers show one run at a time.
    """
    asynchronous = registered()[experiment.algorithm].family == "asynchronous"
    alike = not experiment.models and not experiment.public.wanted and experiment.engine.name != "loop"
    return alike and not asynchronous and not experiment.tracking.loggers


def seeds_at_once(setup: Setup, wanted: str) -> int:
    """How many seeds of an experiment to run in one batch at most, as the first of them has it.

    ``wanted`` is ``no``, ``yes`` (as many as can share an engine) or ``auto``, which runs as many as were
    measured to be faster together: on a CPU up to ``TOGETHER_NUMBERS`` numbers.
    """
    experiment, data = setup.experiment, setup.data
    engine = experiment.engine
    if wanted == "no" or engine.name != "stacked" or not may_share(experiment):
        return 1
    if isinstance(data.train, LazySplit):  # there may be more than anyone can hold
        return 1
    room = int(TOGETHER_MEMORY * free_bytes(torch.device(engine.device))) // max(1, data.nbytes)
    if wanted == "auto" and engine.device != "cpu":
        return 1
    if wanted == "auto":
        clients = experiment.cohort.size(data.clients)
        if experiment.evaluate.every:
            clients = max(clients, experiment.evaluate.clients or data.clients)
        width = Batches("train", experiment.local.batch).width(int(data.train.count.max()))
        numbers = sum(leaf[:1].numel() for leaf in nests.leaves(data.train.x))
        client = setup.task.size + width * numbers
        room = min(room, TOGETHER_NUMBERS // (clients * client))
    return max(1, room)


def execute_together(
    setups: Sequence[Setup],
    outs: Sequence[Path],
    *,
    progress: bool | Observer = False,
    kept: Kept = Kept.ALL,
) -> list[Result | SartorError]:
    """Run several seeds of one experiment in one batch: what each gives, or how it failed.

    Each has its own run folder; its seconds are an even share of the time that all of them took.
    """

    def one(setup: Setup, out: Path, interrupted: Callable[[], bool], maker: Maker) -> Result:
        def opened(experiment: Experiment, task: Task, data: ClientData) -> Federation:
            settings = federation_settings(experiment)
            return Federation(task, maker(task, data, settings), settings)

        shown = progress if setup is setups[0] else False  # one bar for all: they are in the same round
        return execute_setup(
            setup, out=out, progress=shown, opened=opened, interrupted=interrupted, kept=kept
        )

    outcomes: list[Result | SartorError] = []
    try:
        with interruptions(True) as interrupted:
            runs = [partial(one, setup, out, interrupted) for setup, out in zip(setups, outs, strict=True)]
            for outcome in in_lockstep(runs):
                if isinstance(outcome, BaseException) and not isinstance(outcome, SartorError):
                    raise outcome
                outcomes.append(outcome)
    except KeyboardInterrupt:
        again = f"the same command goes on with the {len(setups)} runs under way"
        raise KeyboardInterrupt(f"stopped; {again}") from None
    return outcomes
