"""What a model takes and gives: the form of samples and targets, the classes, and the preprocessing.

A run folder has it from the start (``signature.json``), and so does what a node keeps: with the experiment it
is enough to build the model again and to prepare new rows for it, without any of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sartor import nests
from sartor.data.clients import ClientData
from sartor.data.preprocessing import Preprocessing
from sartor.errors import SartorError, SettingError
from sartor.model.groups import assign, build_groups
from sartor.model.networks import build_task
from sartor.model.objectives import chosen_objective
from sartor.model.task import Task
from sartor.nests import Nest
from sartor.runs.experiment import Experiment, models_given

Form = Mapping[str, tuple[str, tuple[int, ...]]]
"""The leaves of a nest by path: the type of each, and its shape without the samples."""


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives."""

    x: Form
    """Of what the model takes, after the preprocessing."""
    y: Form
    classes: int | None
    labels: tuple[str, ...] | None
    """The names of the classes, where labels are texts."""
    names: Sequence[str]
    """The clients, by number."""
    preprocessing: Preprocessing

    @classmethod
    def of(cls, data: ClientData) -> Signature:
        """Of data as a model is trained on them."""
        train = data.train
        return cls(
            _form(train.x, "x"),
            _form(train.y, "y"),
            data.classes,
            data.labels,
            data.names,
            data.preprocessing,
        )

    def inputs(self, given: Any, where: str = "table") -> Nest:
        """What the model takes for new rows; what does not fit it is refused."""
        x = self.preprocessing.transform(given, where)
        found = _form(x, "x")
        if dict(found) != dict(self.x):
            raise SettingError(f"{where}: samples of {_words(found)}, the model takes {_words(self.x)}")
        return x

    def blank(self, count: int = 1) -> tuple[Nest, Nest]:
        """Samples and targets of zeros."""
        return _blank(self.x, "x", count), _blank(self.y, "y", count)

    def task(self, experiment: Experiment, of: Any = None, entries: Sequence[int] = ()) -> Task:
        """The model of an experiment for such samples, with those that clients have of their own.

        ``of`` and ``entries`` are as for :func:`~sartor.model.groups.build_groups`; left out, as the
        experiment deals its models to the clients.
        """
        if models_given(experiment):
            raise SartorError(
                "the model, or what it is trained for, was given in Python and is not stored; call predict "
                "or export of the result there, or name a function that builds it (model.path=net.py:build)"
            )
        (x, y), classes, seed = self.blank(2), self.classes, experiment.seed
        task = build_task(experiment.model, x, y, classes, seed, chosen_objective(experiment.objective))
        task = task.suited(x, y, classes)
        if not experiment.models:
            return task
        of = assign(experiment.models, self.names) if of is None else of
        return build_groups(task, experiment.models, of, x, y, classes, seed, entries=entries)

    def to_mapping(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "x": {path: [dtype, list(shape)] for path, (dtype, shape) in self.x.items()},
            "y": {path: [dtype, list(shape)] for path, (dtype, shape) in self.y.items()},
            "classes": self.classes,
            "labels": None if self.labels is None else list(self.labels),
            "names": list(self.names) if isinstance(self.names, tuple) else len(self.names),
            "preprocessing": self.preprocessing.to_mapping(),
        }

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any], where: str) -> Signature:
        """What :meth:`to_mapping` gave; ``where`` is the place that an error names."""
        try:
            names, labels = stored["names"], stored["labels"]
            return cls(
                {path: (dtype, tuple(shape)) for path, (dtype, shape) in stored["x"].items()},
                {path: (dtype, tuple(shape)) for path, (dtype, shape) in stored["y"].items()},
                stored["classes"],
                None if labels is None else tuple(labels),
                tuple(map(str, range(names))) if isinstance(names, int) else tuple(names),
                Preprocessing.from_mapping(stored["preprocessing"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SartorError(f"{where}: damaged, or of another version of Sartor ({error!r})") from None


def _form(nest: Nest, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        path: (str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape[1:]))
        for path, leaf in nests.paths(nest, name).items()
    }


def _blank(form: Form, name: str, count: int) -> Nest:
    leaves = {
        path: torch.zeros((count, *shape), dtype=getattr(torch, dtype))
        for path, (dtype, shape) in form.items()
    }
    return nests.built(leaves, name)


def _words(form: Form) -> str:
    """A form for a message."""
    found = {path: f"{list(shape)} {dtype}" for path, (dtype, shape) in form.items()}
    return found["x"] if list(found) == ["x"] else ", ".join(f"{path} {text}" for path, text in found.items())
