"""What a run starts from: settings given in several ways, and a user's own data and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from sartor.data.clients import ClientData, from_clients, prepare
from sartor.data.settings import OWN_DATA
from sartor.data.sources import load_source
from sartor.errors import SettingError
from sartor.model.task import Task
from sartor.runs.experiment import Experiment, from_mapping, read_toml


@dataclass(frozen=True)
class Inputs:
    """What a run starts from: the experiment, and the data and model that stand in for what it names."""

    experiment: Experiment
    data: ClientData | None
    task: Task | None


def merge_settings(
    experiment: str | Path | Mapping[str, Any] | None,
    sections: Mapping[str, Mapping[str, Any]],
    *,
    algorithm: str | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    engine: str | Mapping[str, Any] | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """The settings given to :func:`run` in their several ways, as one mapping that is not yet checked."""
    given = _mapping(experiment)
    _put(given, "", algorithm=algorithm, rounds=rounds, seed=seed)
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            raise SettingError(
                f"{section}: give a section as a mapping, as in hyper={{'lr': 0.1}}, got {values!r}"
            )
        _put(given, section, **values)
    _put(given, "engine", **(engine if isinstance(engine, Mapping) else {"name": engine}))
    _put(given, "engine", device=device)
    return given


def prepare_inputs(
    given: Mapping[str, Any],
    *,
    data: str | Mapping[str, Any] | ClientData | None = None,
    model: str | nn.Module | Task | None = None,
    head: str | None = None,
    clients: int | None = None,
) -> Inputs:
    """The checked experiment of a mapping, with the data and the model where they are the user's own."""
    given = _mapping(given)
    own_data = None
    if isinstance(data, ClientData):
        own_data = data
    elif isinstance(data, Mapping):
        share = given.get("data", {}).get("validation", 0.0)
        own_data = from_clients(data, validation_fraction=share, seed=given.get("seed", 0))
    else:
        _put(given, "data", name=data)
    if own_data is not None and clients is not None and clients != own_data.clients:
        raise SettingError(f"clients: {clients}, but the data has {own_data.clients} clients; leave it out")
    _put(given, "data", clients=own_data.clients if own_data is not None else clients)
    own_task = None
    if isinstance(model, (nn.Module, Task)):
        _put(given, "model", name="custom")
    elif isinstance(model, str):
        _put(given, "model", name=model)
    elif model is not None:
        raise SettingError(f"model: give a name, an nn.Module or a Task, got {model!r}")
    resolved = from_mapping(given)
    if isinstance(model, Task):
        own_task = model
    elif isinstance(model, nn.Module):
        classes = _classes(resolved) if own_data is None else own_data.classes
        own_task = Task(model, classes=classes, head=head, name=type(model).__name__)
    if own_data is not None:
        own_data = prepare(own_data, features=resolved.features.settings)
        resolved = replace(resolved, data=replace(resolved.data, name=OWN_DATA, normalise=False))
    return Inputs(resolved, own_data, own_task)


def _classes(experiment: Experiment) -> int | None:
    """The classes of a named data set, for a user's own module on it."""
    return load_source(experiment.data.name, experiment.data.folder).classes


def _mapping(experiment: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if experiment is None:
        return {}
    mapping = read_toml(experiment) if isinstance(experiment, (str, Path)) else experiment
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}


def _put(mapping: dict[str, Any], section: str, **values: Any) -> None:
    """Set what is given; None means not given."""
    given = {key: value for key, value in values.items() if value is not None}
    if given:
        (mapping.setdefault(section, {}) if section else mapping).update(given)
