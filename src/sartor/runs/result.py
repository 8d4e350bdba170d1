"""What a run gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sartor.errors import SartorError, SettingError
from sartor.model.task import Task
from sartor.runs.participation import by_round
from sartor.settings import unknown

MOST_NAMES = 10_000
"""Clients among whose names a near one is looked for."""


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
    personal: PersonalModels | list[Tensor | None] | None
    """The personal models, one row per client, where the method has them and they are stored.

    A row is taken by the client's number or name: ``result.personal["Oslo"]``. Where clients have models of
    their own they differ in length, and are a list.
    """
    buffers: Tensor | None
    """The float buffers that go with the shared model, for a model that has any."""
    personal_buffers: Tensor | list[Tensor | None] | None
    """The float buffers that go with the personal models, one row per client."""
    folder: Path | None
    personal_stored: bool = True
    """Whether what makes up the personal models is here, where the method has them."""
    names: Sequence[str] = ()
    """The clients, by number."""

    @property
    def participants(self) -> dict[int, list[int]]:
        """Round -> the numbers of the clients whose answers it used."""
        return by_round(self.rounds)

    def state_dict(self, client: int | str | None = None, model: int | None = None) -> dict[str, Tensor]:
        """The shared model, or the personal one of a client by number or name, to load into your own module.

        ``model`` says which where there are several shared ones; left out, the best on the pooled test data.
        """
        task, w, buffers = self._vectors(client, model)
        return task.state_dict(w, buffers)

    def model(self, client: int | str | None = None, model: int | None = None) -> nn.Module:
        """The same as :meth:`state_dict`, as a module like the one that was trained, in evaluation mode.

        >>> import sartor, torch
        >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
        >>> data = {"Oslo": (x, y), "Bergen": (-x, y)}
        >>> result = sartor.run("separate", data=data, rounds=1, store=False)
        >>> result.model(client="Oslo")(x).shape
        torch.Size([40, 2])
        """
        task, w, buffers = self._vectors(client, model)
        return task.module(w, buffers)

    def _vectors(self, client: int | str | None, model: int | None) -> tuple[Task, Tensor, Tensor | None]:
        """A model and the float buffers that go with it, and the task that they are of."""
        w, buffers, kind, task = self.w, self.buffers, "shared", self.task
        if w is not None and w.dim() == 2:
            w = w[self.summary["last"]["shared_pooled"]["best_model"] if model is None else model]
        if client is not None:
            place = number_of(client, self.names)
            kind, task = "personal", self.task.of_client(place)
            w = None if self.personal is None else self.personal[place]
            buffers = None if self.personal_buffers is None else self.personal_buffers[place]
        name = self.summary["algorithm"]
        if client is not None and not self.personal_stored:
            raise SartorError(f"{name}: the personal models {_why_not_here(self.summary)}")
        if w is None:
            raise SartorError(f"{name}: the run has no {kind} model to give")
        if buffers is None and task.buffer_size:
            raise SartorError(f"{name}: the float buffers of the model {_why_not_here(self.summary)}")
        return task, w, buffers


class PersonalModels(Tensor):
    """Models, one row per client: a tensor whose rows are taken by a client's number or name."""

    # What is computed with it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    names: Sequence[str] = ()

    @staticmethod
    def of(rows: Tensor, names: Sequence[str]) -> PersonalModels:
        """The rows of these clients."""
        made = rows.as_subclass(PersonalModels)
        made.names = names
        return made

    def __getitem__(self, key: Any) -> Tensor:
        return super().__getitem__(number_of(key, self.names) if isinstance(key, str) else key)


def number_of(client: int | str, names: Sequence[str]) -> int:
    """A client's number, by number or name; the error for one that is not there has near names."""
    if isinstance(client, str):
        if client in names:
            return names.index(client)
        raise unknown("client", client, names[:MOST_NAMES], what="name")
    if not -len(names) <= client < len(names):
        raise SettingError(f"client = {client}: there are {len(names)} clients, numbered from 0")
    return client


def _why_not_here(summary: Mapping[str, Any]) -> str:
    """Why a run did not store what is its clients' own."""
    if summary["engine"] == "flower":
        return (
            "stay at the nodes; evaluate.personal_models = 'yes' asks for them, and nodes that "
            "`sartor join --allow-personal-models` send them"
        )
    return "were not stored; evaluate.personal_models = 'yes' stores them"
