"""What a run starts from: settings given in several ways, and a user's own data and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from torch import nn
from torch.utils.data import Dataset

from sartor.data.clients import ClientData, from_clients, prepare, relabel
from sartor.data.loaders import is_dataset, source_from_dataset
from sartor.data.named import named_by
from sartor.data.settings import COLUMN_KEYS, OWN_DATA, TEXT_KEYS, Data
from sartor.data.sources import Source
from sartor.errors import SettingError
from sartor.extensions import function_file
from sartor.model.networks import CUSTOM, Factory, ModelChoice, adapted, build_task, seeded
from sartor.model.objectives import OBJECTIVES, OWN, Loss, Objective, Own, chosen_objective, objective_of
from sartor.model.task import Task
from sartor.runs.experiment import (
    Experiment,
    Imports,
    anchored,
    from_mapping,
    import_given,
    import_named,
    read_experiment,
    to_mapping,
)
from sartor.runs.setup import divided, said_of_division
from sartor.settings import unknown

Model = nn.Module | Task | Callable[..., nn.Module | Task]
"""A model of a user's own: ready, or what builds it."""


class RunSettings(TypedDict, total=False):
    """What :func:`sartor.run`, ``compare`` and ``search`` take as keywords, all of it by name."""

    experiment: str | Path | Mapping[str, Any] | None
    """A TOML file or a mapping to start from."""
    imports: Imports | None
    """Files or modules of your own to import first."""
    data: str | Mapping[str, Any] | ClientData | Source | Dataset[Any] | None
    """A data set's name, a table or a folder, a function as in ``mine.py:load``, ``{client: (x, y)}`` or
    ClientData; or a Source or a torch data set, which ``partition`` divides."""
    model: str | Mapping[str, Any] | Model | None
    """A network's name or section, a function as in ``net.py:build``, a class or function that builds one
    (anew for every seed), a module, or a Task."""
    objective: str | Mapping[str, Any] | Objective | Loss | None
    """An objective's name or section, a function as in ``mine.py:loss``, an Objective, or a loss function."""
    head: str | None
    """The path of the module that is a personal head."""
    models: Sequence[Mapping[str, Any]] | None
    """Models of clients' own: a ``model`` (as above) or a network's settings, and who has it, each."""
    clients: int | None
    rounds: int | None
    seed: int | None
    engine: str | Mapping[str, Any] | None
    """An engine's name, or its section."""
    device: str | None
    columns: Mapping[str, Any]
    """What the columns of a table are, by name."""
    public: Mapping[str, Any]
    partition: Mapping[str, Any]
    features: Mapping[str, Any]
    local: Mapping[str, Any]
    cohort: Mapping[str, Any]
    availability: Mapping[str, Any]
    delay: Mapping[str, Any]
    replies: Mapping[str, Any]
    privacy: Mapping[str, Any]
    aggregate: str | Mapping[str, Any]
    """The name of a rule that stands in place of the mean, or its section."""
    attack: str | Mapping[str, Any]
    """The name of an attack on the run, or its section."""
    transforms: Sequence[str | Mapping[str, Any]]
    """What happens to messages on their way, in order: names, or mappings with a name each."""
    evaluate: Mapping[str, Any]
    stop: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    tracking: Mapping[str, Any]
    hyper: Mapping[str, Any]


@dataclass(frozen=True)
class Given:
    """What a user has given: settings as one mapping that is not yet checked, and data and model."""

    settings: dict[str, Any]
    data: Mapping[str, Any] | ClientData | Source | Dataset[Any] | None
    """The user's own, where it is not named in the settings."""
    model: Model | None
    head: str | None
    own: tuple[tuple[Model, str | None] | None, ...] = ()
    """Modules and their heads, for those of ``models`` that are the user's own."""
    objective: Objective | None = None
    """The user's own, where it is not named in the settings."""

    def inputs(self, settings: Mapping[str, Any] | None = None) -> Inputs:
        """The checked experiment, with the data and the model where they are the user's own.

        ``settings`` stand in place of those given.
        """
        chosen = _copied(self.settings if settings is None else settings)
        there = _clients_of(self.data)
        if there is not None:
            _put(chosen, "data", clients=max(1, there))  # nobody is refused where they are read
        experiment = from_mapping(chosen)
        if self.data is not None:
            _refuse_unused(experiment, self.data)
        objective = self.objective or chosen_objective(experiment.objective)
        own_data = self.data if isinstance(self.data, ClientData) else None
        if isinstance(self.data, Mapping):
            own_data = from_clients(
                self.data,
                validation_fraction=experiment.data.validation,
                seed=experiment.seed,
                targets=objective.targets,
                labels=experiment.data.labels,
            )
        elif isinstance(self.data, (Source, Dataset)):
            source = self.data
            if not isinstance(source, Source):
                source = source_from_dataset(source, targets=objective.targets)
            own_data, _ = divided(source, experiment)
        elif own_data is not None and experiment.data.labels is not None:
            own_data = relabel(own_data, experiment.data.labels)

        def task_of(model: Model | None, head: str | None, choice: ModelChoice) -> Task | Factory | None:
            if model is not None and not isinstance(model, (nn.Module, Task)):
                return Factory(model, head, objective, adapters=choice.adapters)
            made = seeded(lambda: adapted(model, choice.adapters, head), experiment.seed)
            if made is None or isinstance(made, Task):
                return made
            return Task(made, objective=objective, head=head, name=type(model).__name__)

        task = task_of(self.model, self.head, experiment.model)
        if task is None and self.objective is not None:
            task = _built(experiment, own_data, objective)
        own = tuple(
            None if given is None else task_of(*given, group.choice)
            for given, group in zip(self.own, experiment.models, strict=False)
        )
        if own_data is not None:
            own_data = prepare(own_data, features=experiment.features.settings)
            experiment = replace(experiment, data=replace(experiment.data, name=OWN_DATA))
        return Inputs(experiment, own_data, task, own if any(own) else ())


@dataclass(frozen=True)
class Inputs:
    """What a run starts from: the experiment, and the data and model that stand in for what it names."""

    experiment: Experiment
    data: ClientData | None
    task: Task | Factory | None
    own: tuple[Task | Factory | None, ...] = ()
    """Those of ``[[models]]`` that are the user's own."""


def gather(keywords: RunSettings, algorithm: str | None = None) -> Given:
    """What was given in its several ways; code that is named is imported."""
    known: dict[str, Any] = dict(keywords)
    start, data, model, head = (known.pop(key, None) for key in ("experiment", "data", "model", "head"))
    objective = known.pop("objective", None)
    clients, engine, device = (known.pop(key, None) for key in ("clients", "engine", "device"))
    imports, models = known.pop("imports", None), known.pop("models", None)
    transforms = known.pop("transforms", None)
    given = read_experiment(start) if isinstance(start, (str, Path)) else _copied(start or {})
    _put(given, "", algorithm=algorithm, rounds=known.pop("rounds", None), seed=known.pop("seed", None))
    if imports is not None:
        given["imports"] = [*given.get("imports", ()), *import_given(imports)]
    if transforms is not None:
        several = isinstance(transforms, (list, tuple))  # else it is refused when it is checked
        given["transforms"] = [*map(_named, transforms)] if several else transforms
    there = _clients_of(data)
    made = isinstance(data, (ClientData, Mapping, Source)) or is_dataset(data)
    named = None if made else named_by(data)
    if isinstance(start, (str, Path)) and data is not None and named != "path":
        _leave_out_others(given, divided=there is not None)
    for section in {"aggregate", "attack"} & known.keys():
        known[section] = _named(known[section])
    for section, values in known.items():
        if not isinstance(values, Mapping):
            if section not in RunSettings.__annotations__:
                raise unknown("", section, RunSettings.__annotations__)
            raise SettingError(
                f"{section}: give a section as a mapping, as in hyper={{'lr': 0.1}}, got {values!r}"
            )
        _put(given, section, **values)
    _put(given, "engine", **_named(engine))
    _put(given, "engine", device=device)
    table = given.get("data")
    stated = table if isinstance(table, Mapping) else {}
    if there is not None:
        key, said, usual = "clients", clients, there
        if clients is None:
            key, said, usual = "data.clients", stated.get("clients"), Data.clients
        if said not in (None, there, usual):
            raise SettingError(f"{key}: {said}, but the data has {there} clients; leave it out")
        clients = there
    if named is None:
        # They are normalised where that is said; else they are as whoever gives them wants them.
        _put(given, "data", name=OWN_DATA, normalise=stated.get("normalise", False))
    else:
        if data is not None and named == "name" and stated.get("path") is not None:
            raise SettingError(f"data.path: {stated['path']!r}, but data is {data!r}; leave one of them out")
        _put(given, "data", **{named: data})
        data = None
    _put(given, "data", clients=clients)
    if isinstance(model, Task) or callable(model):
        _put(given, "model", name=CUSTOM)
    elif isinstance(model, str):
        _put(given, "model", **{"name" if function_file(model) is None else "path": model}, head=head)
        model = None
    elif isinstance(model, Mapping):
        _put(given, "model", **model)
        _put(given, "model", head=head)
        model = None
    elif model is not None:
        raise SettingError(f"model: give a name, an nn.Module, what builds one, or a Task, got {model!r}")
    else:
        _put(given, "model", head=head)
    if isinstance(model, Task):
        if objective is not None or given.get("objective"):
            raise SettingError("objective: a Task has one; give it there: Task(module, objective=...)")
        objective = model.objective
    own_objective = _put_objective(given, objective)
    own: tuple[tuple[Model, str | None] | None, ...] = ()
    if models is not None:
        given["models"], own = _own_models(models)
    given = anchored(given, Path.cwd())
    import_named(given)
    return Given(given, data, model, head, own, own_objective)


def gather_again(
    experiment: Experiment,
    data: Any = None,
    model: Any = None,
    head: str | None = None,
    objective: Any = None,
    models: Any = None,
) -> Inputs:
    """What was given in Python for a run that goes on, made as it was when the run began."""
    for key, value in (("data", data), ("model", model), ("objective", objective)):
        if isinstance(value, (str, Path)) or (key != "data" and isinstance(value, Mapping)):
            raise SettingError(f"{key} = {value!r}: the run names it, and goes on with it; leave it out")
    choice = experiment.model
    if model is not None and (choice.name != CUSTOM or choice.path is not None):
        named = choice.path or choice.name
        raise SettingError(f"model: the run was started with {named!r}, and goes on with it; leave it out")
    if isinstance(data, ClientData | None) and model is None and objective is None and models is None:
        if data is not None and data.preprocessing.features is None:
            data = prepare(data, features=experiment.features.settings)
        return Inputs(experiment, data, None)
    made = None if objective is None else objective_of(objective)
    if isinstance(model, Task):
        made = model.objective
    own = () if models is None else _own_models(models)[1]
    return Given(to_mapping(experiment), data, model, head, own, made).inputs()


def _named(section: Any) -> Any:
    """A section, of which the name alone may have been given."""
    return section if isinstance(section, Mapping) else {"name": section}


def _clients_of(data: Any) -> int | None:
    """How many clients data have that are divided among them already."""
    if isinstance(data, ClientData):
        return data.clients
    return len(data) if isinstance(data, Mapping) else None


def _leave_out_others(given: dict[str, Any], divided: bool) -> None:
    """Leave out of a file what it says of data in place of which others are given."""
    given.pop("columns", None)
    if divided:
        given.pop("partition", None)
    table = given.get("data")
    for key in ("path", *COLUMN_KEYS, *TEXT_KEYS, *(("clients",) if divided else ())):
        if isinstance(table, dict):
            table.pop(key, None)


def _refuse_unused(experiment: Experiment, data: Any) -> None:
    """Refuse settings that would say nothing of data that are given in Python."""
    said = [f"data.{key}" for key in ("path", *COLUMN_KEYS) if getattr(experiment.data, key) is not None]
    known = data.columns if isinstance(data, ClientData) else None
    if experiment.columns and experiment.columns != known:
        said.append("columns")
    if said:
        raise SettingError(f"{', '.join(said)}: for data that are read, and yours are given; leave it out")
    there = _clients_of(data)
    said = said_of_division(experiment, there) if there else []
    if said:
        raise SettingError(
            f"{', '.join(said)}: the samples are divided among {there} clients already; leave it out"
        )
    if isinstance(data, ClientData) and data.validation is None and experiment.data.validation:
        raise SettingError(
            "data.validation: the ClientData given has no validation samples; leave it out, or make it with "
            f"them, as in from_clients(..., validation_fraction={experiment.data.validation:g})"
        )


def _own_models(models: Any) -> tuple[Any, tuple[tuple[Model, str | None] | None, ...]]:
    """The entries of ``models`` as settings, and the modules that stand in for some of them."""
    if not isinstance(models, Sequence) or not all(isinstance(entry, Mapping) for entry in models):
        return models, ()  # refused when it is checked
    settings, own = [], []
    for entry in map(dict, models):
        model, module = entry.pop("model", None), None
        if isinstance(model, str):
            entry["name" if function_file(model) is None else "path"] = model
        elif isinstance(model, Task) or callable(model):
            entry["name"], module = CUSTOM, (model, entry.pop("head", None))
        elif model is not None:
            raise SettingError(
                f"models: give a name, an nn.Module, what builds one, or a Task as model, got {model!r}"
            )
        settings.append(entry)
        own.append(module)
    return settings, tuple(own)


def _put_objective(given: dict[str, Any], objective: Any) -> Objective | None:
    """Note an objective in the settings; one that they cannot make is handed back."""
    if objective is None or isinstance(objective, Mapping):
        _put(given, "objective", **(objective or {}))
        return None
    if isinstance(objective, str):
        _put(given, "objective", **{"name" if function_file(objective) is None else "path": objective})
        return None
    made = objective_of(objective)
    if OBJECTIVES.get(made.name) is type(made) and not isinstance(made, Own):
        _put(given, "objective", name=made.name, **vars(made))
        return None
    _put(given, "objective", name=OWN)
    return made


def _built(experiment: Experiment, data: ClientData | None, objective: Objective) -> Task:
    """The task of a model that is named and an objective that is not."""
    if data is None:
        raise SettingError("objective: with an own one give the model or the data as Python objects too")
    x, y = data.train.x, data.train.y
    return build_task(experiment.model, x, y, data.classes, experiment.seed, objective)


def _copied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}


def _put(mapping: dict[str, Any], section: str, **values: Any) -> None:
    """Set what is given; None means not given."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        return
    table = mapping.setdefault(section, {}) if section else mapping
    if isinstance(table, dict):  # else it is refused when it is checked
        table.update(given)
