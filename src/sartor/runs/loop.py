"""The only round loop: cohort → round → evaluate → tell the observers."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from sartor import random
from sartor.engines import sharded as distributed
from sartor.errors import SartorError
from sartor.federation.exchange import NobodyAnswered
from sartor.federation.settings import Cohort
from sartor.memory import Idle
from sartor.privacy.account import BudgetSpent
from sartor.runs.observers import Observer
from sartor.runs.participation import written
from sartor.runs.run import Run

log = logging.getLogger(__name__)


def go_through(run: Run, deciding: Observer, keeping: Observer) -> dict[str, Any]:
    """All rounds that are left, one after the other; the summary of the run comes back.

    Of every round those are told first who may stop the run, and then, of the complete row, those who keep
    what there is: a run ends with a round that was evaluated, whoever stopped it.
    """
    rounds, idle = run.experiment.rounds, Idle()
    run.look()
    distributed.together(lambda: _start(run, deciding, keeping))
    _agree(run)
    while run.round < rounds and not (run.stopped and run.round in run.evaluations):
        row = _play(run)
        if run.cadence.due(run.round):
            _evaluate(run, row, deciding, keeping)
        _tell(run, row, deciding, keeping)
        idle.give_back()
    if rounds == 0 and not run.rows:
        row = {"round": 0}
        _evaluate(run, row, deciding, keeping)
        _tell(run, row, deciding, keeping)
    run.wait()
    run.final = run.models()
    summary = run.summary()
    keeping.end(run, summary)
    deciding.end(run, summary)
    distributed.together(run.check)
    return summary


def draw_cohort(seed: int, round: int, clients: int, settings: Cohort) -> np.ndarray:
    """The clients of a round, sorted: a function of seed and round alone, so every method sees the same."""
    key = random.stream(seed, "cohort", round)
    if settings.sampling == "poisson":
        return np.flatnonzero(random.uniform(key, clients).numpy() < settings.rate(clients)).astype(np.int64)
    return np.asarray(random.choose(key, clients, settings.size(clients)), dtype=np.int64)


def _start(run: Run, deciding: Observer, keeping: Observer) -> None:
    """Those first who may refuse the run."""
    deciding.start(run)
    keeping.start(run)


def _play(run: Run) -> dict[str, Any]:
    """The next round, without its evaluation: its row."""
    experiment, federation = run.experiment, run.federation
    started, before = federation.engine.seconds(), replace(federation.traffic)
    federation.round, federation.answered = federation.round + 1, 0
    cohort = draw_cohort(experiment.seed, run.round, federation.clients, experiment.cohort)
    federation.drawn = cohort
    try:
        run.server = _next(run, cohort)
    except NobodyAnswered:
        federation.answered = 0
    except BudgetSpent as spent:
        federation.answered = 0
        run.stop(str(spent))
    except (LinAlgError, ValueError):
        federation.verify()  # it may be a reply that is not finite which a method cannot compute with
        raise
    if run.cadence.due(run.round):
        _make_ready(run)
    run.look()
    run.wait()
    heard = {} if federation.heard is None else {"took_part": written(federation.heard)}
    row = {
        "round": run.round,
        "cohort": len(cohort),
        "answered": federation.answered,
        **heard,
        "seconds": federation.engine.seconds() - started,
        "bytes_down": federation.traffic.down - before.down,
        "bytes_up": federation.traffic.up - before.up,
        **federation.notes,
        **({} if federation.protection is None else federation.protection.row()),
    }
    row.update(run.observe(run.cadence.due(run.round)))
    return row


def _next(run: Run, cohort: np.ndarray) -> Any:
    """The server's state after a round of the method, which is all that the method has learnt in it."""
    algorithm, own = run.algorithm, dict(vars(run.algorithm))
    server = algorithm.round(run.server, run.federation, cohort)
    run.federation.check()
    if type(server) is not type(run.server):
        found, wanted = type(server).__name__, type(run.server).__name__
        raise SartorError(f"{algorithm.name}: round() returned {found}, and not the server's next {wanted}")
    changed = [name for name, value in vars(algorithm).items() if own.get(name, value) is not value]
    if changed and run.round == 2:  # what the first round has made may be kept
        log.warning(
            "%s: round() changes self.%s, which no checkpoint holds, so that a run that is resumed begins it "
            "anew; what a method learns belongs to the server's state",
            *(algorithm.name, ", self.".join(changed)),
        )
    return server


def _make_ready(run: Run) -> None:
    """Let the method do what it does to its model at the end; who answers to that is not counted."""
    answered = run.federation.answered
    with suppress(NobodyAnswered):
        run.server = run.algorithm.ready(run.server, run.federation)
    run.federation.answered = answered


def _evaluate(run: Run, row: dict[str, Any], deciding: Observer, keeping: Observer) -> None:
    started = run.federation.engine.seconds()
    row["evaluation"] = run.evaluate()
    row["evaluation_seconds"] = run.federation.engine.seconds() - started
    keeping.evaluation(run, row["evaluation"])
    deciding.evaluation(run, row["evaluation"])


def _tell(run: Run, row: dict[str, Any], deciding: Observer, keeping: Observer) -> None:
    """A round is over; whoever wants to interrupt the run does so once it is kept."""
    run.rows.append(row)
    deciding.round(run, row)
    _agree(run)
    if run.stopped and "evaluation" not in row:
        _make_ready(run)
        run.look()
        row.update(run.observe(evaluated=True))
        _evaluate(run, row, deciding, keeping)
    run.cadence.note(row, agreed=False)
    keeping.round(run, row)
    distributed.together(run.check)


def _agree(run: Run) -> None:
    """Let all processes of the run know that one of them has stopped it."""
    run.stopped = distributed.first_said(run.stopped)
