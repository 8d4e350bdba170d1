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
from sartor.runs.card import card_of
from sartor.runs.experiment import Experiment
from sartor.runs.participation import by_round
from sartor.runs.predictor import Predictor, kind_of
from sartor.runs.record import SIGNATURE, RunFolder
from sartor.runs.signature import Signature
from sartor.settings import shown, unknown

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
    personal: PersonalModels | OwnModels | None
    """The personal models, one row per client, where the method has them and they are stored.

    A row is taken by the client's number or name: ``result.personal["Oslo"]``. Where clients have models of
    their own they differ in length, and are a list that is asked in the same way.
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
    experiment: Experiment | None = None
    """All settings."""
    signature: Signature | None = None
    """What the model takes and gives, and the preprocessing."""

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

    def predictor(self, client: int | str | None = None) -> Predictor:
        """The model of a client in use: with preprocessing, label names and a model card.

        It is the client's own where the method gives one, else the shared one, which it is without a client.
        """
        assert self.signature is not None
        assert self.experiment is not None
        place = None if client is None else number_of(client, self.names)
        personal = place is not None and self.summary["last"].get("personal_local") is not None
        task, w, buffers = self._vectors(place if personal else None, None)
        name = None if place is None else self.names[place]
        return Predictor(
            signature=self.signature,
            kind=kind_of(task),
            card=card_of(self.summary, self.clients, self.experiment, self.signature, name, personal),
            outputs=lambda x: task.outputs(w, x, buffers),
            module=lambda: task.module(w, buffers),
            arguments=task.arguments,
        )

    def predict(self, client: int | str | None, table: Any) -> dict[str, Any]:
        """What the model of a client says of new rows, as columns; see :meth:`predictor`.

        ``table`` is what the run was given: a mapping of columns, a data frame or an Arrow table with the
        columns of a run on a table, arrays otherwise. ``pandas.DataFrame(...)`` takes the result as it is.

        >>> import sartor, torch
        >>> x = torch.randn(40, 3)
        >>> data = {"Oslo": (x, ["ill", "well"] * 20), "Bergen": (-x, ["well", "ill"] * 20)}
        >>> result = sartor.run("separate", data=data, rounds=1, store=False)
        >>> list(result.predict("Oslo", torch.randn(2, 3)))
        ['prediction', 'probability_ill', 'probability_well']
        """
        return self.predictor(client).predict(table)

    def export(self, client: int | str | None, path: Path | str, format: str | None = None) -> Path:
        """Write the model of a client to one file that needs no Sartor: PyTorch's ``.pt2``, or ``.onnx``."""
        return self.predictor(client).save(Path(path), format)

    def _vectors(self, client: int | str | None, model: int | None) -> tuple[Task, Tensor, Tensor | None]:
        """A model and the float buffers that go with it, and the task that they are of."""
        w, buffers, kind, task = self.w, self.buffers, "shared", self.task
        if client is None and w is not None and w.dim() == 2:
            w = w[self._best() if model is None else model]
        if client is not None:
            place = number_of(client, self.names)
            kind, task = "personal", self.task.of_client(place)
            w = None if self.personal is None else self.personal[place]
            buffers = None if self.personal_buffers is None else self.personal_buffers[place]
        name = self.summary["algorithm"]
        if client is not None and not self.personal_stored:
            raise SartorError(f"{name}: the personal models {_why_not_here(self.summary)}")
        if (
            w is None
            and client is not None
            and (self.summary["last"] or {}).get("personal_local") is not None
        ):
            shared = "" if self.w is None else "; without a client the shared one is given"
            raise SartorError(
                f"{name}: a client's own model is more than the network's weights, and cannot be given"
                + shared
            )
        if w is None:
            raise SartorError(f"{name}: the run has no {kind} model to give")
        if client is not None and bool(w.isnan().all()):  # as those are marked that nobody has told
            who = shown(self.names[place])
            raise SartorError(f"{name}: the model of {who} is not here; its node was gone when it was asked")
        if buffers is None and task.buffer_size:
            raise SartorError(f"{name}: the float buffers of the model {_why_not_here(self.summary)}")
        return task, w, buffers

    def _best(self) -> int:
        """The best of several shared models on the pooled test data."""
        measured = (self.summary.get("last") or {}).get("shared_pooled")
        if measured is None:
            name = self.summary["algorithm"]
            raise SartorError(
                f"{name}: there are several shared models, not compared here; say which: model=0"
            )
        return int(measured["best_model"])


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


class OwnModels(list[Tensor | None]):
    """Models of different lengths, one per client, taken by a client's number or name."""

    def __init__(self, rows: Sequence[Tensor | None], names: Sequence[str]) -> None:
        super().__init__(rows)
        self.names = names

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(number_of(key, self.names) if isinstance(key, str) else key)


def rows_of_clients(
    tensors: Mapping[str, Tensor], name: str, task: Task
) -> Tensor | list[Tensor | None] | None:
    """What is stored of the clients' own, a row each; a list where they have models of their own."""
    groups = task.groups
    if groups is None:
        return tensors.get(name)
    rows: list[Tensor | None] = [None] * len(groups.of)
    for group in range(len(groups.tasks)):
        stored = tensors.get(f"{name}@{group}")
        members = groups.members(group).tolist()
        for number, row in zip(members, [] if stored is None else stored, strict=stored is not None):
            rows[number] = row
    return rows if any(row is not None for row in rows) else None


def personal_rows(
    tensors: Mapping[str, Tensor], task: Task, names: Sequence[str]
) -> PersonalModels | OwnModels | None:
    """The personal models, where they are stored."""
    rows = rows_of_clients(tensors, "personal", task)
    if rows is None:
        return None
    return PersonalModels.of(rows, names) if isinstance(rows, Tensor) else OwnModels(rows, names)


def read_result(path: Path | str, task: Task | None = None) -> Result:
    """The result of a finished run from its folder alone, without its data.

    ``task`` is the model where it was given in Python.
    """
    folder = RunFolder.open(path)
    if not folder.finished:
        raise SartorError(f"{folder.path}: the run has not finished; `sartor resume {folder.path}` first")
    experiment, summary, tensors = folder.experiment, folder.summary, folder.models
    signature = Signature.from_mapping(folder.signature, str(folder.path / SIGNATURE))
    task = signature.task(experiment) if task is None else task
    has_personal = summary["last"].get("personal_local") is not None
    return Result(
        summary=summary,
        rounds=folder.rounds,
        clients=folder.clients,
        task=task,
        w=None if summary["shared_model"] is None else tensors[summary["shared_model"]],
        personal=personal_rows(tensors, task, signature.names),
        buffers=tensors.get("buffers"),
        personal_buffers=rows_of_clients(tensors, "personal_buffers", task),
        folder=folder.path,
        personal_stored=not has_personal or any(name.startswith("personal") for name in tensors),
        names=signature.names,
        experiment=experiment,
        signature=signature,
    )


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
