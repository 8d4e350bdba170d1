"""An experiment: everything a run depends on, as frozen dataclasses that are checked before anything starts.

It is written as TOML, one table per concern, and every key has a default, so an empty file is an experiment
too. ``partition``, ``features`` and ``model`` are chosen by name and take the settings of what they name;
``hyper`` takes those of the algorithm.

>>> experiment = from_mapping({"rounds": 5, "data": {"clients": 4}})
>>> experiment.data.clients, experiment.local.batch
(4, 32)
>>> from_mapping({"data": {"clinets": 4}})
Traceback (most recent call last):
    ...
sartor.errors.SettingError: data.clinets: unknown key; did you mean data.clients?
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sartor.robust  # noqa: F401  # registers its rules
from sartor.algorithms import registered
from sartor.client.augment import AUGMENTATIONS, Augmentation, written
from sartor.client.settings import Local
from sartor.data.features import FEATURES
from sartor.data.partitions import PARTITIONS
from sartor.data.schema import Column, columns_mapping, read_columns
from sartor.data.settings import (
    COLUMN_KEYS,
    OWN_DATA,
    Data,
    Expect,
    FeaturesChoice,
    PartitionChoice,
    Public,
)
from sartor.data.sources import SOURCES
from sartor.engines.settings import Engine
from sartor.errors import SettingError
from sartor.extensions import Code, code_name, function_file, import_code, imported, installed_code, is_file
from sartor.federation.attacks import ATTACKS, Attack, AttackChoice
from sartor.federation.clock import AVAILABILITY, DELAYS
from sartor.federation.reduction import AGGREGATES
from sartor.federation.settings import AggregateChoice, AvailabilityChoice, Cohort, DelayChoice, Replies
from sartor.federation.transforms import Transforms
from sartor.model.groups import ModelGroup
from sartor.model.networks import CUSTOM, MODELS, ModelChoice
from sartor.model.objectives import OBJECTIVES, OWN, ObjectiveChoice
from sartor.privacy.settings import Privacy
from sartor.runs.settings import Checkpoints, Evaluate, Stop, Tracking
from sartor.settings import ANY, build, check, fields_of, meaning, setting, shown, type_words, unknown
from sartor.transforms import TRANSFORMS

Imports = str | Path | Sequence[str | Path]
"""Files or modules of a user's own, one or several."""
LARGEST_FILE = 16 << 20
"""Bytes of an experiment's file, at most."""
BESIDE = ("compare", "search")
"""Tables that may stand in an experiment's file for the commands of these names; a run has none of them."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole experiment, checked. Made by :func:`load` or :func:`from_mapping`, never changed.

    >>> experiment = from_mapping({"algorithm": "fedprox", "rounds": 5, "hyper": {"mu": 0.1}})
    >>> experiment.rounds, experiment.data.name, experiment.hyper.mu
    (5, 'digits', 0.1)
    """

    algorithm: str = setting("fedavg", "the algorithm; `sartor algorithms` lists them")
    rounds: int = setting(30, "number of rounds", low=0)
    seed: int = setting(0, "the one seed everything random follows from", low=0, high=2**63 - 1)
    imports: tuple[str, ...] = setting((), "files or modules of your own to import first, as in mine.py")
    data: Data
    public: Public
    expect: Expect
    partition: PartitionChoice
    features: FeaturesChoice
    model: ModelChoice
    objective: ObjectiveChoice
    local: Local
    cohort: Cohort
    availability: AvailabilityChoice
    delay: DelayChoice
    replies: Replies
    privacy: Privacy
    aggregate: AggregateChoice
    attack: AttackChoice
    evaluate: Evaluate
    stop: Stop
    checkpoint: Checkpoints
    engine: Engine
    tracking: Tracking
    transforms: tuple[Any, ...] = ()
    """What happens to messages on their way, in order; ``[[transforms]]`` with a name each."""
    models: tuple[ModelGroup, ...] = ()
    """What clients have that have models of their own; ``[[models]]`` with who has it each."""
    columns: tuple[Column, ...] = ()
    """What the columns of an own table are, by name; ``[columns]`` with a line for each."""
    hyper: Any

    def __post_init__(self) -> None:
        """Settings that are right one by one but not together."""
        for key in COLUMN_KEYS:
            if getattr(self.data, key) is not None and self.columns:
                raise SettingError(f"data.{key}: [columns] says what the columns are; leave it out")
            if getattr(self.data, key) is not None and self.data.path is None and self.data.name != OWN_DATA:
                raise SettingError(f"data.{key}: only for own data; give data.path too")
        if self.columns and self.data.normalise:
            raise SettingError("data.normalise: [columns] says how each is scaled; leave it out")
        if self.columns and self.features.name != "none":
            raise SettingError("features.name: [columns] says what features are; leave it out")
        for key in ("low", "high"):
            if self.columns and getattr(self.expect, key) is not None:
                raise SettingError(f"expect.{key}: [columns] has {key} for each; leave it out")
        if self.data.path is None and self.cohort.count > self.data.clients:
            most = f"at most data.clients = {self.data.clients}"
            raise SettingError(f"cohort.count: must be {most}, got {self.cohort.count}")
        _check_choice(self.model, "model")
        if self.objective.path is not None and function_file(self.objective.path) is None:
            raise SettingError(
                f"objective.path = {shown(self.objective.path)}: expected a function or class in a file, as "
                "in mine.py:loss"
            )
        if self.stop.wanted and self.evaluate.every == 0:
            raise SettingError(
                "stop: with evaluate.every = 0 only the last round is evaluated; give evaluate.every too"
            )
        if self.stop.metric is not None and not self.stop.wanted:
            raise SettingError("stop.metric: watched for nothing; give stop.patience or stop.target too")


def _check_choice(model: ModelChoice, where: str) -> None:
    """Whether a network of a user's own is named as one."""
    if model.head is not None and model.path is None:
        raise SettingError(f"{where}.head: only for an own network; give {where}.path too")
    if model.path is not None and function_file(model.path) is None:
        raise SettingError(
            f"{where}.path = {shown(model.path)}: expected a function in a file, as in net.py:build"
        )


def models_given(experiment: Experiment) -> bool:
    """Whether a model, or what it is trained for, was given in Python: the experiment cannot make it."""
    choices = [experiment.model, *(entry.choice for entry in experiment.models)]
    own = experiment.objective.name == OWN and experiment.objective.path is None
    return own or any(choice.name == CUSTOM and choice.path is None for choice in choices)


@dataclass(frozen=True)
class Setting:
    """One row of the list of all settings."""

    key: str
    type: str
    default: Any
    range: str
    meaning: str
    symbol: str = ""
    only_for: str = ""  # the choice that has this setting, e.g. "partition.name = dirichlet"


_TOP = ("algorithm", "rounds", "seed", "imports")
_SECTIONS: dict[str, type] = {
    "data": Data,
    "public": Public,
    "expect": Expect,
    "partition": PartitionChoice,
    "features": FeaturesChoice,
    "model": ModelChoice,
    "objective": ObjectiveChoice,
    "local": Local,
    "cohort": Cohort,
    "availability": AvailabilityChoice,
    "delay": DelayChoice,
    "replies": Replies,
    "privacy": Privacy,
    "aggregate": AggregateChoice,
    "attack": AttackChoice,
    "evaluate": Evaluate,
    "stop": Stop,
    "checkpoint": Checkpoints,
    "engine": Engine,
    "tracking": Tracking,
}
_CHOICES = ("partition", "features", "model", "objective", "availability", "delay", "aggregate", "attack")
CODE = (("model", "path"), ("objective", "path"), ("data", "path"), ("data", "tokens"), ("public", "path"))
"""Settings that may name a function in a file."""
WHO = ("clients", "share", "every", "first")
"""What an entry of ``models`` says of whose network it is."""


def _registry(section: str) -> Mapping[str, Any]:
    """What a section chooses from, by name: dataclasses of settings, but for algorithms and data sets."""
    chosen: dict[str, Mapping[str, Any]] = {
        "algorithm": registered(),
        "data": SOURCES,
        "partition": PARTITIONS,
        "features": FEATURES,
        "model": MODELS,
        "objective": OBJECTIVES,
        "availability": AVAILABILITY,
        "delay": DELAYS,
        "aggregate": AGGREGATES,
        "attack": ATTACKS,
    }
    return chosen[section]


def load(path: Path | str | None = None, overrides: Sequence[str] = (), **top: Any) -> Experiment:
    """The experiment of a TOML file (none: the defaults), changed by ``key=value`` texts and by keywords.

    Code that it names (``imports``, ``model.path``, ``objective.path``, ``data.path``) is imported first.

    A keyword is a key with its value, a dotted one given as ``**{"data.clients": 5}``; None means not given.

    >>> load(None, ["data.clients=4", "partition.name=dirichlet"], rounds=3).rounds
    3
    """
    mapping = collect(path, overrides, **top)
    import_named(mapping)
    return from_mapping(mapping)


def collect(path: Path | str | None = None, overrides: Sequence[str] = (), **top: Any) -> dict[str, Any]:
    """What :func:`load` makes an experiment of: only what was given, as nested dicts, not yet checked.

    Code that a file names lies relative to the file, that of the other words to the working directory; what
    is imported is that of both.
    """
    mapping = {} if path is None else read_experiment(path)
    given: dict[str, Any] = {}
    for key, value in [*map(_parse_override, overrides), *top.items()]:
        if value is None:
            continue
        if key in given and not (type(given[key]) is type(value) and given[key] == value):
            raise SettingError(
                f"{key}: given twice, as {shown(given[key])} and as {shown(value)}; give it once"
            )
        given[key] = value
    before = mapping.get("imports", [])
    for key, value in given.items():
        _assign(mapping, key, value)
    if "imports" in given and isinstance(before, list) and isinstance(mapping["imports"], (list, tuple)):
        mapping["imports"] = [*before, *mapping["imports"]]
    return anchored(mapping, Path.cwd())


def read_experiment(path: Path | str) -> dict[str, Any]:
    """The settings of an experiment's file; code that it names lies relative to the file."""
    return anchored(read_toml(path), Path(path).absolute().parent)


def anchored(mapping: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same settings, with the files of code that they name as absolute paths."""

    def anchor(source: Any) -> Any:
        file = function_file(source) or source
        if not isinstance(file, str) or not is_file(file):
            return source
        return os.path.abspath(folder / os.path.expanduser(file)) + source[len(file) :]

    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}
    if isinstance(result.get("imports"), (list, tuple)):
        sources = list(map(anchor, result["imports"]))  # what is no text among them is refused later, by name
        result["imports"] = [source for place, source in enumerate(sources) if source not in sources[:place]]
    for section, key in CODE:
        table = result.get(section)
        if isinstance(table, dict) and function_file(table.get(key)) is not None:
            table[key] = anchor(table[key])
    if isinstance(result.get("models"), (list, tuple)):
        result["models"] = [
            {**entry, "path": anchor(entry["path"])} if _names_code(entry) else entry
            for entry in result["models"]
        ]
    return result


def _names_code(entry: Any) -> bool:
    """Whether a table names a function in a file."""
    return isinstance(entry, Mapping) and function_file(entry.get("path")) is not None


def code_named(mapping: Mapping[str, Any]) -> list[str]:
    """The files and modules of code that settings name."""
    imports = mapping.get("imports") or ()
    imports = check(imports, tuple[str, ...], ANY, "imports")
    named = [_table(mapping, section).get(key) for section, key in CODE]
    models = mapping.get("models")
    named += [entry["path"] for entry in models if _names_code(entry)] if isinstance(models, list) else []
    files = map(function_file, named)
    return list(dict.fromkeys([*imports, *(file for file in files if file is not None)]))


def import_given(imports: Imports | None) -> list[str]:
    """Import files and modules that a user gives, relative to the working directory: their sources."""
    given = [imports] if isinstance(imports, (str, Path)) else imports or ()
    sources: list[str] = anchored({"imports": list(map(str, given))}, Path.cwd())["imports"]
    for source in sources:
        import_code(source)
    return sources


def import_named(mapping: Mapping[str, Any]) -> None:
    """Import the code that settings name: what a user has written, never what was received."""
    for source in code_named(mapping):
        import_code(source)


def portable(experiment: Experiment) -> dict[str, Any]:
    """The settings as another machine may read them: code is named without the folder it lies in here."""
    mapping = to_mapping(experiment)
    mapping["imports"] = [code_name(source) for source in mapping["imports"]]
    for section, key in CODE:
        path = mapping[section].get(key)
        if function_file(path) is not None:
            mapping[section][key] = os.path.basename(path)
    for entry in filter(_names_code, mapping.get("models", ())):
        entry["path"] = os.path.basename(entry["path"])
    return mapping


def code_of(experiment: Experiment) -> tuple[Code, ...]:
    """The code that an experiment names, as it was imported in this process, and installed packages of it."""
    found = [code for thing in _things(experiment) if (code := installed_code(thing)) is not None]
    for source in code_named(to_mapping(experiment)):
        code = imported(code_name(source))
        if code is None:
            raise SettingError(f"imports: {source} is not imported; `load` the experiment, or --import it")
        found.append(code)
    return tuple(dict.fromkeys(found))


def _things(experiment: Experiment) -> Iterator[Any]:
    """What an experiment names that a package of somebody else may have registered."""
    yield registered()[experiment.algorithm]
    yield type(experiment.model.settings)
    yield type(experiment.aggregate.settings)
    yield type(experiment.attack.settings)
    yield from map(type, (*experiment.transforms, *experiment.local.augment))
    if experiment.data.path is None and experiment.data.name in SOURCES:
        yield SOURCES[experiment.data.name]


def from_mapping(mapping: Mapping[str, Any]) -> Experiment:
    """The experiment of nested mappings as TOML gives them; a key that is missing or None has its default.

    Nothing is imported: what is named has to be known.
    """
    if not isinstance(mapping, Mapping):
        raise SettingError(f"an experiment is a table of settings, got {shown(mapping)}")
    mapping = {key: value for key, value in mapping.items() if key not in BESIDE}
    tables = {section: _table(mapping, section) for section in (*_SECTIONS, "hyper")}
    if tables["model"].get("path") is not None and tables["model"].setdefault("name", CUSTOM) != CUSTOM:
        raise SettingError("model.name: the network is that of model.path; give one of them")
    if tables["objective"].get("path") is not None and tables["objective"].setdefault("name", OWN) != OWN:
        raise SettingError("objective.name: the objective is that of objective.path; give one of them")
    names = {section: _name(tables[section].get("name"), section) for section in _CHOICES}
    names["algorithm"] = _name(mapping.get("algorithm"), "algorithm")
    kinds = {section: _registry(section)[names[section]] for section in _CHOICES}
    kinds["hyper"] = registered()[names["algorithm"]].Hyper

    _refuse_unknown(mapping, tables, names, kinds)
    if mapping.get("columns"):  # each column says how it is scaled
        tables["data"].setdefault("normalise", False)
    parts: dict[str, Any] = {"hyper": build(kinds["hyper"], tables["hyper"], "hyper")}
    for section, cls in _SECTIONS.items():
        values = tables[section]
        if section in _CHOICES:
            common = _common(cls)
            own = {key: value for key, value in values.items() if key not in common}
            values = {key: value for key, value in values.items() if key in common}
            values["settings"] = build(kinds[section], own, section)
        parts[section] = build(cls, values, section)
    if parts["data"].path is None and parts["data"].name != OWN_DATA:
        _name(parts["data"].name, "data")
    top = {key: value for key, value in mapping.items() if key in _TOP and value is not None}
    parts["transforms"] = _transforms(mapping.get("transforms"))
    parts["models"] = _models(mapping.get("models"))
    parts["columns"] = read_columns(mapping.get("columns"))
    experiment = build(Experiment, {**top, **parts}, "")
    to_mapping(experiment)  # what cannot be written down cannot be run again
    return experiment


def _transforms(given: Any) -> tuple[Any, ...]:
    """The transforms of a list of tables, each with its name and its settings."""
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in given):
        raise SettingError(
            f"transforms: expected a list of tables, got {shown(given)}; write [[transforms]] and a name each"
        )
    made: list[Any] = []
    for place, entry in enumerate(given):
        where = f"transforms[{place}]"
        if "name" not in entry:
            raise SettingError(f"{where}.name: missing; known: {', '.join(TRANSFORMS)}")
        name = entry["name"]
        if not isinstance(name, str) or name not in TRANSFORMS:
            raise unknown(f"{where}.name", str(name), TRANSFORMS, what="name")
        own = {key: value for key, value in entry.items() if key != "name"}
        made.append(build(TRANSFORMS[name], own, where))
    Transforms(tuple(made))  # whether they go together
    return tuple(made)


def _models(given: Any) -> tuple[ModelGroup, ...]:
    """The networks of groups of clients: tables with the settings of ``[model]`` and whose it is."""
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in given):
        raise SettingError(
            f"models: expected a list of tables, got {shown(given)}; write [[models]], a network and its "
            "clients each"
        )
    return tuple(_model_group(entry, f"models[{place}]") for place, entry in enumerate(given))


def _model_group(given: Mapping[str, Any], where: str) -> ModelGroup:
    values = {key: value for key, value in given.items() if value is not None}
    who = {key: values.pop(key) for key in WHO if key in values}
    if "buffers" in values:
        raise SettingError(f"{where}.buffers: is the same for all networks; say it as model.buffers")
    if values.get("path") is not None and values.setdefault("name", CUSTOM) != CUSTOM:
        raise SettingError(f"{where}.name: the network is that of {where}.path; give one of them")
    name = values.pop("name", None)
    if not isinstance(name, str) or name not in MODELS:
        if name is None:
            raise SettingError(f"{where}.name: missing; known: {', '.join(MODELS)}")
        raise unknown(f"{where}.name", str(name), MODELS, what="name")
    common: dict[str, Any] = {key: values.pop(key) for key in ("path", "head", "adapters") if key in values}
    settings: Any = build(MODELS[name], values, where)
    choice = build(ModelChoice, {"name": name, **common, "settings": settings}, where)
    _check_choice(choice, where)
    group = build(ModelGroup, {"choice": choice, **who}, where)
    ways = [key for key in ("clients", "share", "every") if getattr(group, key)]
    if len(ways) != 1:
        found = f"{' and '.join(ways)}, which are several ways" if ways else "nobody"
        raise SettingError(f"{where}: say who has this network by clients, share or every; it says {found}")
    if group.first and not group.every:
        raise SettingError(f"{where}.first: is the first of every so many; give {where}.every too")
    return group


def _group_values(group: ModelGroup, where: str) -> dict[str, Any]:
    """A group's entry as it is written."""
    choice = _values(group.choice)
    values = {**choice, **_values(choice.pop("settings")), **{key: getattr(group, key) for key in WHO}}
    left_out = {"buffers", "settings", *(key for key in WHO if not values[key])}
    return {
        key: _plain(value, f"{where}.{key}")
        for key, value in values.items()
        if value is not None and key not in left_out
    }


def to_mapping(experiment: Experiment) -> dict[str, Any]:
    """Nested plain values that :func:`from_mapping` turns back into an equal experiment; None is left out."""
    mapping: dict[str, Any] = {key: _plain(getattr(experiment, key), key) for key in _TOP}
    for section in (*_SECTIONS, "hyper"):
        values = _values(getattr(experiment, section))
        values.update(_values(values.pop("settings")) if section in _CHOICES else {})
        mapping[section] = {
            key: _plain(value, f"{section}.{key}") for key, value in values.items() if value is not None
        }
    if experiment.transforms:
        names = {kind: name for name, kind in TRANSFORMS.items()}
        mapping["transforms"] = [
            {"name": names[type(transform)], **_plain(_values(transform), f"transforms[{place}]")}
            for place, transform in enumerate(experiment.transforms)
        ]
    if experiment.models:
        mapping["models"] = [
            _group_values(group, f"models[{place}]") for place, group in enumerate(experiment.models)
        ]
    if experiment.columns:
        mapping["columns"] = _plain(columns_mapping(experiment.columns), "columns")
    return mapping


def to_toml(experiment: Experiment) -> str:
    """The experiment as TOML, every setting written out; reading it back gives an equal experiment."""
    return toml_text(to_mapping(experiment))


def toml_text(mapping: Mapping[str, Any]) -> str:
    """Nested plain values as TOML: values first, then a table for every dict.

    >>> print(toml_text({"local": {"batch": 8}, "rounds": 3}), end="")
    rounds = 3
    <BLANKLINE>
    [local]
    batch = 8
    """
    lines = []
    for key, value in sorted(mapping.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{_toml_key(name)} = {_toml(entry)}" for name, entry in value.items()]
        else:
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def fingerprint(experiment: Experiment) -> str:
    """A SHA-256 of all settings but ``tracking`` and ``imports``: equal experiments have equal ones, and only
    they. Where code lies does not matter; what it is, is recorded beside.
    """
    left_out = ("tracking", "imports")
    mapping = {key: value for key, value in portable(experiment).items() if key not in left_out}
    canonical = json.dumps(mapping, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe_settings() -> list[Setting]:
    """Every setting there is, with its type, default, range and meaning, for help and documentation."""
    rows = list(_rows(Experiment, "", skip=(*_SECTIONS, "transforms", "models", "columns", "hyper")))
    for section, cls in _SECTIONS.items():
        rows += _rows(cls, section, skip=("settings",))
        if section in _CHOICES:
            for name, kind in _registry(section).items():
                rows += _rows(kind, section, only_for=f"{section}.name = {name}")
    rows += _rows(ModelGroup, "models", skip=("choice",))
    rows += _rows(Column, "columns.NAME", skip=("name",))
    for name, kind in AUGMENTATIONS.items():
        rows += _rows(kind, "local.augment", only_for=f"local.augment.name = {name}")
    for name, kind in TRANSFORMS.items():
        rows += _rows(kind, "transforms", only_for=f"transforms.name = {name}")
    for name, algorithm in registered().items():
        rows += _rows(algorithm.Hyper, "hyper", only_for=f"algorithm = {name}")
    return rows


def describe_class(cls: type, section: str) -> list[Setting]:
    """The settings of one dataclass, such as an algorithm's hyper-parameters."""
    return list(_rows(cls, section))


def _rows(cls: type, section: str, skip: Sequence[str] = (), only_for: str = "") -> Iterator[Setting]:
    """One row per field of a settings dataclass."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip or not meaning(field).text:  # without one it is for Python alone
            continue
        key = f"{section}.{field.name}" if section else field.name
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        allowed = meaning(field).allowed()
        if key in ("algorithm", "data.name", *(f"{choice}.name" for choice in _CHOICES)):
            allowed = "one of " + ", ".join(_registry(section or "algorithm"))
        yield Setting(
            key=key,
            type=type_words(hints[field.name]),
            default=None if default is dataclasses.MISSING or default is None else _plain(default, key),
            range=allowed,
            meaning=meaning(field).text,
            symbol=meaning(field).symbol,
            only_for=only_for,
        )


def read_toml(path: Path | str) -> dict[str, Any]:
    """A TOML file as nested dicts, or an error that names the file and, for bad syntax, the line."""
    try:
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise SettingError(f"{path}: is not a regular file")
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise SettingError(f"{path}: has more than {LARGEST_FILE >> 20} MB; is it an experiment?")
        text = content.decode("utf-8-sig")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise SettingError(
            f"{path}: not UTF-8 text (byte {error.start}); save the experiment as UTF-8"
        ) from None
    except FileNotFoundError:
        raise SettingError(f"{path}: no such experiment file") from None
    except OSError as error:
        raise SettingError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise SettingError(f"{path}: values are nested too deeply") from None
    except ValueError as error:  # bad syntax, a number of too many digits, a null character in the path
        raise SettingError(f"{ascii(str(path))[1:-1]}: not a TOML experiment: {error}") from None


def read_attack(words: Sequence[str] | None) -> Attack | None:
    """The attack of ``key=value`` texts, as a node may be told by; None where there are none.

    >>> read_attack(["name=scaling", "factor=7"])
    Scaling(of=(), factor=7.0)
    """
    values = dict(map(_parse_override, words or ()))
    if not values:
        return None
    name = _name(values.pop("name", None), "attack")
    return build(ATTACKS[name], values, "--attack")


def _parse_override(text: str) -> tuple[str, Any]:
    """``key=value`` as key and value: a TOML value where it is one, otherwise the bare text."""
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not all(part.strip() for part in key.split(".")):
        raise SettingError(f"{shown(text)}: expected key=value, as in local.epochs=5")
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return key, raw
    return key, parsed["value"] if len(parsed) == 1 else raw


def _assign(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Set ``a.b.c`` in nested dicts, making the tables on the way."""
    if key in _SECTIONS or key == "hyper":
        raise SettingError(f"{key}: is a table; set its keys one by one, as in {key}.KEY=VALUE")
    *tables, last = key.split(".")
    for depth, table in enumerate(tables):
        inner = mapping.setdefault(table, {})
        if not isinstance(inner, dict):
            raise SettingError(f"{key}: {'.'.join(tables[: depth + 1])} is not a table, it is {shown(inner)}")
        mapping = inner
    mapping[last] = value


def _table(mapping: Mapping[str, Any], section: str) -> dict[str, Any]:
    """A section of the experiment, empty where it is not given; None stands for a key's default."""
    table = mapping.get(section)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise SettingError(
            f"{section}: expected a table, got {shown(table)}; write [{section}] and its keys below"
        )
    return {key: value for key, value in table.items() if value is not None}


def _name(value: Any, section: str) -> str:
    """The name a section chooses, or its default; an error lists or guesses what there is."""
    cls, key, place = (
        (Experiment, "algorithm", "algorithm")
        if section == "algorithm"
        else (_SECTIONS[section], "name", f"{section}.name")
    )
    field = fields_of(cls)[key]
    name: str = check(field.default if value is None else value, str, meaning(field), place)
    known = _registry(section)
    if name not in known:
        raise unknown(place, name, known, what="name")
    return name


def _common(cls: type) -> set[str]:
    """The keys of a chosen section that do not belong to what is chosen."""
    return set(fields_of(cls)) - {"settings"}


def _refuse_unknown(
    mapping: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
    kinds: Mapping[str, type],
) -> None:
    """An error for the first key nobody knows; a key that belongs to another section is told so."""
    known: dict[str, set[str]] = {"": {*_TOP, *_SECTIONS, "transforms", "models", "columns", "hyper"}}
    for section, cls in _SECTIONS.items():
        known[section] = _common(cls)
    for section, kind in kinds.items():
        known[section] = known.get(section, set()) | set(fields_of(kind))
    for section, table in {"": mapping, **tables}.items():
        for key in table:
            if key in known[section]:
                continue
            word = key if isinstance(key, str) else shown(key)
            homes = [other for other in known if other and word in known[other]]
            if word in _TOP:
                homes = [""]
            if section in _CHOICES and (others := _having(section, word)):
                told = f"unknown key; {', '.join(others)} has it ({section}.name is {names[section]})"
                raise SettingError(f"{section}.{word}: {told}")
            if homes:
                place = f"{section}.{word}" if section else word
                home = f"{homes[0]}.{word}" if homes[0] else word
                raise SettingError(f"{place}: unknown key; did you mean {home}?")
            error = unknown(section, word, known[section])
            if section in _CHOICES:
                raise SettingError(f"{error} ({section}.name is {names[section]})")
            if section == "hyper":
                raise SettingError(f"{error} (algorithm is {names['algorithm']})")
            raise error


def _having(section: str, key: str) -> list[str]:
    """Which of what a section chooses from have a setting of that name."""
    kinds = _registry(section).items()
    return [name for name, kind in kinds if key in fields_of(kind)]


def _values(instance: Any) -> dict[str, Any]:
    """Field -> value of a dataclass instance, without going into its values."""
    cls: type = type(instance)
    return {name: getattr(instance, name) for name in fields_of(cls)}


def _plain(value: Any, place: str) -> Any:
    """A setting's value in the types TOML and JSON share; an error where it has none."""
    kind: type = type(value)
    if kind is bool or (kind is float and math.isfinite(value)) or (kind is str and value.isascii()):
        return value  # as most are
    try:
        if isinstance(value, Augmentation):
            value = written(value)
        if isinstance(value, (list, tuple)):
            return [_plain(entry, place) for entry in value]
        if isinstance(value, Mapping):
            return {check(key, str, ANY, place): _plain(entry, place) for key, entry in value.items()}
    except RecursionError:
        raise SettingError(f"{place}: nested too deeply") from None
    if hasattr(value, "tolist"):  # an array
        return _plain(value.tolist(), place)
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), str)
    return check(value, kind, ANY, place)


def _toml_key(key: str) -> str:
    """A key as TOML writes it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):  # JSON's escapes are TOML's too, but for the delete character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "{" + ", ".join(f"{_toml_key(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
