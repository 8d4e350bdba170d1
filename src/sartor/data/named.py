"""Data as an experiment names them: a public or registered set, a function in a file, a folder or a table."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sartor.data.clients import ClientData, from_clients, relabel
from sartor.data.heart import read_heart_disease
from sartor.data.leaf import from_leaf, is_leaf
from sartor.data.loaders import from_folder, from_table, is_dataset, source_from_dataset, source_from_table
from sartor.data.readers import TABLES
from sartor.data.schema import Column
from sartor.data.settings import COLUMN_KEYS, TEXT_KEYS, Data
from sartor.data.sources import SOURCES, Loaded, Loader, Source, data_folder, load_source
from sartor.data.tables import from_schema, prepared
from sartor.data.texts import TextColumn
from sartor.errors import DataError, SettingError
from sartor.extensions import call, find_function, function_file

Function = TypeVar("Function", bound=Callable[..., Loaded])


def register_data(name: str) -> Callable[[Function], Function]:
    """Make a data set known as ``data.name``: a function that gives its samples.

    What it gives is ``{client: (x, y)}`` or a :class:`~sartor.data.ClientData`, which are divided among
    clients already, or a :class:`~sartor.data.Source`, which the experiment's ``partition`` divides. It is
    given those of ``seed``, ``clients`` and ``folder`` (of downloaded data) that it declares.

    >>> import numpy as np
    >>> @register_data("coins")
    ... def coins(seed: int, clients: int) -> Loaded:
    ...     '''Tosses of a coin.'''
    ...     generator = np.random.default_rng(seed)
    ...     tosses = generator.integers(0, 2, (clients, 10))
    ...     return {f"client {k}": (generator.normal(size=(10, 3)), tosses[k]) for k in range(clients)}
    >>> read_data(Data(name="coins", clients=3), seed=0).train.count.tolist()
    [8, 8, 8]
    >>> SOURCES.remove("coins")
    """

    def added(function: Function) -> Function:
        SOURCES.add(name, Loader(function))
        return function

    return added


@register_data("heart-disease")
def heart_disease(folder: Path) -> Loaded:
    """Patients of four hospitals (Fed-Heart-Disease), from UCI's files."""
    return read_heart_disease(folder / "heart-disease")


def named_by(word: str | None) -> str:
    """The setting that a word for data is for: ``name``, or ``path`` of data of a user's own.

    >>> named_by("digits"), named_by("mine.py:load"), named_by("mine.csv")
    ('name', 'path', 'path')
    """
    if word is not None and not isinstance(word, str):
        raise SettingError(
            "data: give the name of a data set, the path of a table or a folder, or a function as in "
            "'mine.py:load', as a text; {client: (x, y)} or ClientData; or a Source or a torch data set, "
            f"which a partition divides; got a {type(word).__name__}"
        )
    if word is None or word in SOURCES:
        return "name"
    own = function_file(word) is not None or os.path.exists(word) or Path(word).suffix.lower() in TABLES
    return "path" if own else "name"


def read_data(
    settings: Data,
    seed: int,
    targets: str = "class",
    columns: Sequence[Column] = (),
    tokens: TextColumn | None = None,
) -> Source | ClientData:
    """The samples that an experiment names, not yet divided among clients, or divided already.

    ``targets`` says what a target is (:mod:`sartor.data.samples`), ``columns`` are the schema of a table.
    ``tokens`` is how other samples of the same experiment were read, whose texts these are numbered like.
    """
    if columns and (settings.path is None or function_file(settings.path) is not None):
        raise SettingError("columns: only for an own table; give data.path, or leave [columns] out")
    if settings.path is None:
        loader = SOURCES.get(settings.name)
        if not isinstance(loader, Loader):
            return load_source(settings.name, settings.folder)
        return _called(
            loader.function, f"data.name = {settings.name!r}", settings, seed, settings.name, targets
        )
    if function_file(settings.path) is not None:
        _refuse_columns(settings)
        what = f"data.path = {settings.path!r}"
        name = Path(settings.path).name.partition(".py:")[0]
        return _called(find_function(settings.path, "data.path"), what, settings, seed, name, targets)
    path = Path(settings.path)
    options: dict[str, Any] = {
        "validation_fraction": settings.validation,
        "seed": seed,
        "targets": targets,
        "labels": settings.labels,
    }
    if not path.exists():
        raise DataError(f"data.path = {settings.path!r}: no such file or folder")
    if columns:
        return prepared(from_schema(path, columns, **options))
    if is_leaf(path):
        _refuse_columns(settings)
        if settings.labels is not None:
            raise SettingError("data.labels: classes of LEAF's files are numbers; leave it out")
        return from_leaf(path, validation_fraction=settings.validation, seed=seed)
    if path.is_dir():
        _refuse_columns(settings)
        return from_folder(path, **options)
    return _table(path, settings, options, tokens)


def decides_clients(settings: Data) -> bool:
    """Whether the clients are those of a function that is told how many there should be."""
    function = None
    if settings.path is None:
        loader = SOURCES.get(settings.name)
        function = loader.function if isinstance(loader, Loader) else None
    elif function_file(settings.path) is not None:
        function = find_function(settings.path, "data.path")
    return function is not None and "clients" in inspect.signature(function).parameters


def _table(
    path: Path, settings: Data, options: dict[str, Any], tokens: TextColumn | None
) -> Source | ClientData:
    """A table without a schema, of clients or to be divided."""
    if settings.label_column is None:
        raise SettingError(
            "data.path: a table needs [columns], which `sartor data TABLE` proposes, or data.label_column, "
            "and data.client_column where rows are somebody's"
        )
    said = ("feature_columns", "text_column", *TEXT_KEYS)
    options |= {key: getattr(settings, key) for key in said}
    options["tokens"] = tokens or settings.tokens
    if settings.client_column is not None:
        options["split_column"] = settings.split_column
        return from_table(path, settings.client_column, settings.label_column, **options)
    if settings.split_column is not None:
        raise SettingError("data.split_column: a partition divides these rows; leave it out, or name clients")
    for unused in ("validation_fraction", "seed"):  # what divides the rows has them
        del options[unused]
    return source_from_table(path, settings.label_column, **options)


def _refuse_columns(settings: Data) -> None:
    for key in COLUMN_KEYS:
        if getattr(settings, key) is not None:
            raise SettingError(f"data.{key}: only for a table, and {settings.path} is none; leave it out")


def _called(
    function: Callable[..., Any], what: str, settings: Data, seed: int, name: str, targets: str
) -> Source | ClientData:
    """What a user's function gives."""
    given = call(function, what, seed=seed, clients=settings.clients, folder=data_folder(settings.folder))
    if isinstance(given, Source):
        return given
    if isinstance(given, ClientData):
        if settings.validation and given.validation is None:
            raise SettingError(
                f"data.validation: {what} gives ClientData without validation samples; leave it out, or give "
                "such samples there"
            )
        return _numbered(given, settings, what)
    if is_dataset(given):
        return source_from_dataset(given, name=name, targets=targets)
    if not isinstance(given, Mapping):
        raise DataError(
            f"{what}: expected {{client: (x, y)}}, ClientData, a Source or a torch data set, it gives a "
            f"{type(given).__name__}"
        )
    made = from_clients(given, validation_fraction=settings.validation, seed=seed, targets=targets, name=name)
    return _numbered(made, settings, what)


def _numbered(data: ClientData, settings: Data, what: str) -> ClientData:
    """The data with their classes in the order of the run's list, where there is one."""
    return data if settings.labels is None else relabel(data, settings.labels, what)
