"""Runs shown elsewhere while they go: TensorBoard, MLflow, Weights & Biases.

A run folder stays the truth. A tracker gets the same rows and may fail: then a warning says so, that tracker
is given up, and the run goes on. Which trackers a run has (``tracking.loggers``) is not part of what
identifies it, so a run with one is the same run as without.

=============  =============================================  ============================================
name           where it writes                                what decides that
=============  =============================================  ============================================
tensorboard    ``tensorboard/`` in the run folder             ``tensorboard --logdir runs`` shows all runs
mlflow         ``mlflow.db`` in the current folder (SQLite)   ``MLFLOW_TRACKING_URI``
wandb          the project ``sartor`` of your account         ``WANDB_PROJECT``, ``WANDB_MODE=offline``
=============  =============================================  ============================================

A run that is resumed goes on in the same place of its tracker.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sartor.errors import SettingError
from sartor.runs.experiment import Experiment, to_mapping, to_toml
from sartor.runs.observers import Observer
from sartor.runs.run import Run

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What a tracker does. Any of it may raise: the run does not end by it."""

    def start(self, experiment: Experiment, folder: Path) -> None:
        """The run begins, or goes on."""

    def round(self, row: Mapping[str, Any]) -> None:
        """A round is over; ``row`` is its line of ``rounds.jsonl``."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over, with its summary, or has stopped before its end, with None."""


def numbers(row: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """The single numbers in a nested mapping by their path; what is no finite number is left out.

    >>> numbers({"round": 3, "evaluation": {"shared_local": {"accuracy": 0.5, "loss": None}}})
    {'round': 3.0, 'evaluation/shared_local/accuracy': 0.5}
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found.update(numbers(value, f"{before}{key}/"))
            continue
        if hasattr(value, "numel") and value.numel() == 1:  # a tensor that a method lets be recorded
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{before}{key}"] = float(value)
    return found


def texts(mapping: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The settings of an experiment as ``section.key`` -> text."""
    found: dict[str, str] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found.update(texts(value, f"{before}{key}."))
        else:
            found[f"{before}{key}"] = str(value)
    return found


class TensorBoard:
    """Event files in the run folder."""

    def start(self, experiment: Experiment, folder: Path) -> None:
        """Open an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        settings = "".join(f"    {line}\n" for line in to_toml(experiment).splitlines())
        self._writer.add_text("experiment", settings, 0)

    def round(self, row: Mapping[str, Any]) -> None:
        """A point for every number."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file; its points are all there is."""
        self._writer.close()


class MLflow:
    """A run of an MLflow store, by default an SQLite file in the current folder."""

    def start(self, experiment: Experiment, folder: Path) -> None:
        """Make the run, or find the one of this folder, and log the settings."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves unless the user says so
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        # A whole path: MLflow keeps a store open by its address, also when the current folder is another.
        here = f"sqlite:///{Path('mlflow.db').resolve()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", here))
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "sartor")
        known = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if known is None else known.experiment_id
        path = str(folder.resolve()).replace("'", "")
        earlier = self._client.search_runs([place], f"tags.`sartor.folder` = '{path}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        made = self._client.create_run(place, run_name=folder.name, tags={"sartor.folder": path})
        self._run = made.info.run_id
        settings = texts(to_mapping(experiment))
        self._client.log_batch(
            self._run,
            params=[Param(key, value[:6000]) for key, value in settings.items()],
            tags=[RunTag("algorithm", experiment.algorithm)],
        )

    def round(self, row: Mapping[str, Any]) -> None:
        """A point for every number."""
        self._log(numbers(row), row["round"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log what the summary adds, and say how the run ended."""
        if summary is None:
            self._client.set_terminated(self._run, "KILLED")
            return
        bests = {key: summary[key] for key in ("best_by_validation", "best_on_test") if key in summary}
        self._log(numbers(bests), int(summary["rounds"]))
        self._client.set_tag(self._run, "model_sha256", str(summary.get("model_sha256")))
        self._client.set_terminated(self._run, "FINISHED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for begin in range(0, len(metrics), 1000):  # as many as one call takes
            self._client.log_batch(self._run, metrics=metrics[begin : begin + 1000])


class WandB:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` keeps it in the run folder."""

    def start(self, experiment: Experiment, folder: Path) -> None:
        """Open the run of this folder."""
        import wandb

        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "sartor"),
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=to_mapping(experiment),
        )

    def round(self, row: Mapping[str, Any]) -> None:
        """A point for every number."""
        self._run.log(numbers(row), step=int(row["round"]))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Put the summary there and close the run."""
        if summary is not None:
            self._run.summary.update(numbers(summary))
        self._run.finish(exit_code=0 if summary is not None else 1)


TRACKERS: dict[str, tuple[Callable[[], Tracker], tuple[str, ...], str]] = {
    "tensorboard": (TensorBoard, ("tensorboard",), "sartor[track]"),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy"), "sartor[track]"),
    "wandb": (WandB, ("wandb",), "sartor[wandb]"),
}
"""For every name the tracker, the modules it needs and what to install for them."""


def check(loggers: Sequence[str]) -> None:
    """Refuse a tracker whose package is not there, before anything has started."""
    for name in loggers:
        _, modules, extra = TRACKERS[name]
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            raise SettingError(
                f"tracking.loggers: {name} needs the package {missing[0]}, which is not installed; "
                f"pip install '{extra}', or leave {name} out"
            )


class Tracking(Observer):
    """The trackers of a run. One that fails is given up with a warning."""

    def __init__(self, loggers: Sequence[str], folder: Path | None) -> None:
        if loggers and folder is None:
            log.warning("tracking: a run that is not stored is not tracked; store it, or leave tracking out")
        self._folder = folder
        self._trackers = {} if folder is None else {name: TRACKERS[name][0]() for name in loggers}

    def start(self, run: Run) -> None:
        """Show the beginning."""
        if self._folder is not None:
            experiment, folder = run.experiment, self._folder
            self._all("the start of the run", lambda tracker: tracker.start(experiment, folder))

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """Show a round."""
        self._all("a round", lambda tracker: tracker.round(row))

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """Show the end."""
        self._all("the end of the run", lambda tracker: tracker.finish(summary))

    def _all(self, what: str, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._trackers[name]
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                log.warning("tracking: %s did not take %s and is given up: %s", name, what, reason)
