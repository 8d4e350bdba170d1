"""What ``[privacy]`` means for a run: what it refuses, the noise that follows, and where it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sartor.algorithms.base import Algorithm
from sartor.algorithms.cards import why_unprotected
from sartor.client.local import refuse
from sartor.engines import sharded as distributed
from sartor.errors import SettingError
from sartor.federation.reduction import MEAN
from sartor.federation.transforms import Transform
from sartor.model.task import Task
from sartor.privacy.account import batch_rates, batches_of, calibrated, exposures
from sartor.privacy.accounting import Step, Steps, epsilon
from sartor.privacy.settings import Privacy
from sartor.runs.experiment import Experiment


def refuse_unprotected(experiment: Experiment, algorithm: Algorithm[Any, Any]) -> None:
    """Refuse what has no guarantee, with the reason."""
    mode = experiment.privacy.mode
    if mode is None:
        return
    why = why_unprotected(type(algorithm), mode)
    if why is not None:
        raise SettingError(
            f"privacy.mode = {mode!r}: {algorithm.name} has no guarantee: {why}; take one of those that "
            f"`sartor algorithms --private {mode}` lists"
        )
    if experiment.models:
        raise SettingError(
            "privacy: clients with models of their own ([[models]]) are not covered; leave it out"
        )
    if experiment.privacy.secret and distributed.world() > 1:
        raise SettingError(
            "privacy.secret: several processes of a run must draw the same noise; set it to false"
        )
    if mode == "central":
        _refuse_comparison(experiment)
    if mode == "samples":
        why = "has gradients of single samples (privacy.mode = 'samples')"
        refuse(experiment.local, algorithm.name, why, "micro", "mixup")


def _refuse_comparison(experiment: Experiment) -> None:
    """Refuse what lets one reply decide on another: its noise hides what one client adds, not that."""
    if experiment.replies.largest_ratio:
        raise SettingError(
            "replies.largest_ratio: which replies are left out depends on others' replies, which noise does "
            "not hide; set it to 0 with privacy.mode = 'central', where privacy.clip bounds replies"
        )
    if experiment.aggregate.name != MEAN:
        raise SettingError(
            f"aggregate.name = {experiment.aggregate.name!r}: goes by each reply, and privacy.mode = "
            "'central' has sums alone; leave [aggregate] out, or take privacy.mode = 'local'"
        )
    for transform in experiment.transforms:
        if transform.place == "server" and type(transform).apply_all is not Transform.apply_all:
            raise SettingError(
                f"transforms: {type(transform).__name__.lower()} at the server makes a reply depend on "
                "others', which the noise of privacy.mode = 'central' does not hide; leave it out"
            )


def refuse_buffers(experiment: Experiment, task: Task) -> None:
    """Refuse float buffers that would leave a client, or let its samples see each other."""
    privacy, buffers = experiment.privacy, experiment.model.buffers
    if not privacy.on or not task.buffer_size:
        return
    if buffers == "average":
        raise SettingError(
            "model.buffers = 'average': BatchNorm's statistics leave the clients without noise; set it to "
            "'local' or 'freeze', or take a network without them"
        )
    if privacy.mode == "samples" and buffers != "freeze":
        raise SettingError(
            f"model.buffers = {buffers!r}: BatchNorm mixes the samples of a batch, so that no gradient is "
            "one sample's; set it to 'freeze', or take a network without it"
        )


def settled_privacy(experiment: Experiment, algorithm: Algorithm[Any, Any], counts: np.ndarray) -> Privacy:
    """The settings with the noise that follows from a budget, for all rounds of the experiment."""
    privacy = experiment.privacy
    if privacy.epsilon is None or privacy.calibrated is not None:
        return privacy
    exposed, neighbours = planned(experiment, algorithm, np.asarray(counts))
    noise = calibrated(privacy.epsilon, privacy.delta, exposed, neighbours)
    return replace(privacy, calibrated=noise)


def cost_of(experiment: Experiment, algorithm: Algorithm[Any, Any], counts: np.ndarray) -> dict[str, Any]:
    """What all rounds will have cost in the end, of a resolved experiment."""
    privacy = experiment.privacy
    exposed, neighbours = planned(experiment, algorithm, np.asarray(counts))
    spent = [epsilon(privacy.multiplier, privacy.delta, steps, neighbours) for steps in exposed]
    worst = max(spent, default=0.0)
    return {
        "mode": privacy.mode,
        "epsilon": worst if math.isfinite(worst) else None,
        "delta": privacy.delta,
        "noise": privacy.multiplier,
        "clip": privacy.clip,
        "neighbours": neighbours,
    }


def unbounded(privacy: Privacy) -> Privacy:
    """The same noise without a budget, for a round that is tried and told to nobody."""
    return (
        replace(privacy, epsilon=None, calibrated=None, noise=privacy.multiplier) if privacy.on else privacy
    )


def planned(
    experiment: Experiment, algorithm: Algorithm[Any, Any], counts: np.ndarray
) -> tuple[list[Steps], str]:
    """What all rounds will tell of those who are worst off, and who are neighbours."""
    rounds, cohort, exchanges = experiment.rounds, experiment.cohort, algorithm.exchanges()
    if experiment.privacy.mode == "central":
        step = Step(cohort.sampling, cohort.rate(len(counts)), exchanges)
        return [
            {step: rounds if exchanges else 0}
        ], "add-remove" if cohort.sampling == "poisson" else "replace"
    if experiment.privacy.mode == "local":
        return [{Step(): rounds * exchanges}], "replace"
    times = algorithm.gradients_a_step
    batches = rounds * batches_of(algorithm.gradients(experiment.local, counts), times)
    return exposures(batch_rates(counts, experiment.local.batch), batches, times), "replace"
