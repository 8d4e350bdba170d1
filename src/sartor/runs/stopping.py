"""Runs that end early: a metric is at its target or has long not become better, or a budget is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sartor.errors import SettingError
from sartor.runs.evaluation import cells_of, measured_in, measured_scores
from sartor.runs.metrics import Measured, more_is_better
from sartor.runs.observers import Observer
from sartor.runs.run import Run
from sartor.runs.settings import Stop


class EarlyStop(Observer):
    """Stops a run as ``[stop]`` says.

    It follows from the recorded evaluations alone, so a resumed run stops where it would have undisturbed.
    """

    metric, _more = "", True

    def start(self, run: Run) -> None:
        """Refuse a metric that the run does not have; what was recorded earlier may be enough to stop."""
        if run.experiment.stop.wanted:
            self.metric = chosen_metric(run)
            score = self.metric.partition(".")[2].removesuffix("_weighted")
            self._more = more_is_better(score, run.task.objective)
            self._judge(run)

    def evaluation(self, run: Run, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """See whether it is enough."""
        if self.metric:
            self._judge(run)

    def _judge(self, run: Run) -> None:
        every = run.cadence.every
        # A run that was extended has another evaluation at its former end, which it would not have had.
        values = {
            round: value_of(cells, self.metric)
            for round, cells in run.evaluations.items()
            if round > 0 and round % every == 0
        }
        reason = reason_to_stop(values, self.metric, run.experiment.stop, self._more)
        if reason is not None:
            run.stop(reason)


class WithinBudget(Observer):
    """Ends a run before a round would pass its budget."""

    def start(self, run: Run) -> None:
        """A run that is resumed for more rounds may have none left."""
        self._judge(run)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """See whether there is enough left for another."""
        self._judge(run)

    def _judge(self, run: Run) -> None:
        protection = run.federation.protection
        if protection is None or run.round >= run.experiment.rounds or protection.account.may_go_on():
            return
        budget, spent = run.experiment.privacy.epsilon, protection.account.spent
        run.stop(f"privacy.epsilon = {budget:g}: another round would pass it, {spent:.4g} are spent")


def reason_to_stop(
    values: Mapping[int, float | None], metric: str, settings: Stop, more: bool = True
) -> str | None:
    """Why to stop after evaluations with these values, by round, or None; one without a value does not count.

    ``more`` says whether more of the metric is better.

    >>> reason_to_stop({1: 0.5, 2: 0.75, 3: 0.7}, "shared_local.accuracy", Stop(target=0.75))
    'shared_local.accuracy is 0.75 in round 2, the target was 0.75'
    >>> reason_to_stop({1: 0.5, 2: 0.4, 3: 0.4, 4: 0.6}, "shared_local.loss", Stop(patience=2), False)
    'shared_local.loss was not better than 0.4 of round 2 for 2 evaluations'
    """
    sign = 1.0 if more else -1.0
    best, at, since = -math.inf, 0, 0
    for round, value in sorted(values.items()):
        if value is None or not math.isfinite(value):
            continue
        if settings.target is not None and sign * value >= sign * settings.target:
            return f"{metric} is {value:.4g} in round {round}, the target was {settings.target:g}"
        if sign * value > best:
            best, at, since = sign * value, round, 0
        else:
            since += 1
        if settings.patience and since >= settings.patience:
            evaluations = "1 evaluation" if since == 1 else f"{since} evaluations"
            return f"{metric} was not better than {sign * best:.4g} of round {at} for {evaluations}"
    return None


def value_of(cells: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    """The value of ``cell.score`` in the cells of an evaluation; None where it has none."""
    cell, _, score = metric.partition(".")
    value: float | None = cells.get(cell, {}).get(score)
    return value


def chosen_metric(run: Run) -> str:
    """The metric that the experiment names or, where it names none, the one that is looked at first."""
    cells = cells_of(run.algorithm, run.server, run.federation, run.experiment.evaluate)
    what, wanted = measured_in(run.federation, run.experiment.evaluate), run.experiment.stop.metric
    if wanted is None:
        order = ("personal_validation", "shared_validation", "personal_local", "shared_local")
        return f"{next(cell for cell in order if cell in cells)}.{measured_scores(what)[0]}"
    refuse_unmeasured(wanted, cells, what)
    return wanted


def refuse_unmeasured(wanted: str, cells: Sequence[str], what: Measured) -> None:
    """Refuse a ``stop.metric`` that is none of these cells' scores."""
    scores = measured_scores(what)
    cell, _, score = wanted.partition(".")
    if cell not in cells or score not in scores:
        raise SettingError(
            f"stop.metric = {wanted!r}: not measured in this run; name a cell ({', '.join(cells)}) and "
            f"its score ({', '.join(scores)}), as in {cells[0]}.{scores[0]}"
        )
