"""What a run gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sartor.errors import SartorError
from sartor.model.task import Task
from sartor.runs.participation import by_round


@dataclass(frozen=True)
class Result:
    """What a run gives back; the same lies in its run folder.

    >>> import sartor
    >>> result = sartor.run("separate", data="digits", clients=3, rounds=1, store=False)
    >>> result.summary["accuracy"]["personal_local"] > 0.2, len(result.rounds), len(result.personal)
    (True, 1, 3)
    """

    summary: dict[str, Any]
    """Settings, accuracies of the evaluation matrix, bytes, seconds, hash of the models."""
    rounds: list[dict[str, Any]]
    """One row per round."""
    clients: dict[str, list[Any]]
    """One row per client and evaluation, as columns.

    ``pandas.DataFrame(result.clients)`` takes it as it is.
    """
    task: Task
    w: Tensor | None
    """The shared model, where the method has one; one row per model where it has several."""
    personal: Tensor | list[Tensor | None] | None
    """The personal models, one row per client, where the method has them and they are stored.

    Where clients have models of their own they differ in length, and are a list.
    """
    buffers: Tensor | None
    """The float buffers that go with the shared model, for a model that has any."""
    personal_buffers: Tensor | list[Tensor | None] | None
    """The float buffers that go with the personal models, one row per client."""
    folder: Path | None
    personal_stored: bool = True
    """Whether what makes up the personal models is here, where the method has them."""

    @property
    def participants(self) -> dict[int, list[int]]:
        """Round -> the numbers of the clients whose answers it used."""
        return by_round(self.rounds)

    def state_dict(self, client: int | None = None, model: int | None = None) -> dict[str, Tensor]:
        """The shared model, or a client's personal one, to load into a module of your own.

        ``model`` says which where there are several shared ones; left out, the best on the pooled test data.
        """
        w, buffers, kind, task = self.w, self.buffers, "shared", self.task
        if w is not None and w.dim() == 2:
            w = w[self.summary["last"]["shared_pooled"]["best_model"] if model is None else model]
        if client is not None:
            kind, task = "personal", self.task.of_client(client)
            w = None if self.personal is None else self.personal[client]
            buffers = None if self.personal_buffers is None else self.personal_buffers[client]
        name = self.summary["algorithm"]
        if client is not None and not self.personal_stored:
            raise SartorError(f"{name}: the personal models {_why_not_here(self.summary)}")
        if w is None:
            raise SartorError(f"{name}: the run has no {kind} model to give")
        if buffers is None and task.buffer_size:
            raise SartorError(f"{name}: the float buffers of the model {_why_not_here(self.summary)}")
        return task.state_dict(w, buffers)


def _why_not_here(summary: Mapping[str, Any]) -> str:
    """Why a run did not store what is its clients' own."""
    if summary["engine"] == "flower":
        return (
            "stay at the nodes; evaluate.personal_models = 'yes' asks for them, and nodes that "
            "`sartor join --allow-personal-models` send them"
        )
    return "were not stored; evaluate.personal_models = 'yes' stores them"
