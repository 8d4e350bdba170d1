"""The settings of a run itself: when it is evaluated, stopped, saved, and where it is shown."""

from __future__ import annotations

from dataclasses import dataclass

from sartor.settings import setting


@dataclass(frozen=True)
class Evaluate:
    """When and on what the models are evaluated."""

    every: int = setting(1, "rounds between evaluations; 0: only at the end", low=0)
    personal_pooled: str = setting(
        "auto",
        "whether personal models are also evaluated on the pooled test data",
        choices=("auto", "yes", "no"),
    )
    personal_models: str = setting(
        "auto",
        "whether personal models are stored with the run; auto: where they lie here and are not too many",
        choices=("auto", "yes", "no"),
    )
    clients: int = setting(
        0, "clients that are evaluated, the same ones every time, drawn by the seed; 0: all", low=0
    )
    batch: int = setting(500, "samples per evaluation step", low=1)
    metrics: tuple[str, ...] = setting(
        (), "what is measured besides the loss, as in roc_auc; left out: what the objective has by default"
    )
    outputs: str = setting(
        "auto",
        "whether what the final models say of every test and validation sample is stored with a simulated "
        "run, for intervals and curves of each client; auto: where it is not too much",
        choices=("auto", "yes", "no"),
    )
    by: str | None = setting(
        None, "column of an own table, or leaf of the samples, by whose values results are shown apart"
    )
    headline: str | None = setting(
        None,
        "the metric that is shown, compared, searched for and plotted; left out: the objective's, of classes "
        "the accuracy, or the balanced accuracy where one class has over 60 % of the training samples",
    )


@dataclass(frozen=True)
class Stop:
    """When a run ends before its last round."""

    patience: int = setting(
        0, "evaluations without a better value after which the run ends; 0: it does not end by that", low=0
    )
    metric: str | None = setting(
        None,
        "what is watched, as in personal_local.loss; left out: the headline, of "
        "the personal models where there are any, on validation data where there are any, else on test data",
    )
    target: float | None = setting(None, "the value of the metric at which the run ends")

    @property
    def wanted(self) -> bool:
        """Whether anything is watched at all."""
        return self.patience > 0 or self.target is not None


@dataclass(frozen=True)
class Checkpoints:
    """How often the state of a run is stored, to continue from after an interruption."""

    every: int = setting(0, "rounds between checkpoints; 0: as often as takes little of the time", low=0)


@dataclass(frozen=True)
class Tracking:
    """Where a run is shown besides its folder; it is no part of what identifies a run."""

    loggers: tuple[str, ...] = setting(
        (), "where the run is shown while it goes", choices=("tensorboard", "mlflow", "wandb")
    )
