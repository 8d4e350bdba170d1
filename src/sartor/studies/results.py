"""Measured numbers on file: a line of JSON for each, with what it takes to tell what they are of.

The first line is what all numbers of a file share (``about``: settings, seeds, command, hardware). Every
other line is one of them:

===========  =========================================================================================
key          what was measured, in the words of the script that did
method       the method
code         a hash of the method's source when it ran: see :func:`method_code`
fingerprint  of the experiment (:func:`sartor.runs.experiment.fingerprint`), of its first seed where there are
             several; null where the experiment cannot be written as settings alone
sartor       the version that ran it
date         the day it was measured
numbers      what came out
===========  =========================================================================================

>>> from tempfile import mkdtemp
>>> kept = Results(Path(mkdtemp()) / "mine.jsonl", {"seeds": [0]})
>>> kept.add("iid", {"accuracy": 0.5}, method="fedavg", experiment={"rounds": 3})
>>> Results(kept.path).numbers, Results(kept.path).stale()
({'iid': {'accuracy': 0.5}}, {})
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from sartor.algorithms import registered
from sartor.algorithms.base import Algorithm
from sartor.errors import SartorError
from sartor.files import write
from sartor.runs.experiment import fingerprint, from_mapping
from sartor.runs.record import environment, to_json

METHODS = "sartor.algorithms"
CONTRACT = (METHODS, f"{METHODS}.base", f"{METHODS}.cards")
"""What all methods share and none of them is."""
CARD = frozenset(Algorithm.__annotations__) - {"buffers", "Hyper"}
"""What a method declares of itself, and what does not change its numbers."""


@dataclass(frozen=True)
class Record:
    """A line of a file."""

    key: str
    method: str
    code: str
    fingerprint: str | None
    sartor: str
    date: str
    numbers: dict[str, Any]


class Results:
    """A file of measured numbers, read if it is there and written whole after each that is added."""

    def __init__(self, path: Path, about: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.about = dict(about or {})
        self.records: dict[str, Record] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        number = 0
        try:
            with self.path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        self.about = json.loads(line)["about"] | self.about
                    else:
                        record = Record(**json.loads(line))
                        self.records[record.key] = record
        except (ValueError, KeyError, TypeError) as error:
            raise SartorError(f"{self.path}, line {number}: not a file of results ({error})") from None

    @property
    def numbers(self) -> dict[str, dict[str, Any]]:
        """What was measured, by key."""
        return {key: record.numbers for key, record in self.records.items()}

    def add(
        self,
        key: str,
        numbers: Mapping[str, Any],
        *,
        method: str,
        experiment: Mapping[str, Any] | None = None,
    ) -> None:
        """Store what was measured of a method in an experiment, in place of what was there under this key."""
        made = None
        if experiment is not None:
            made = fingerprint(from_mapping({**experiment, "algorithm": method}))
        today = datetime.now(UTC).date().isoformat()
        version = str(environment()["sartor"])
        self.records[key] = Record(key, method, method_code(method), made, version, today, dict(numbers))
        self.write()

    def write(self) -> None:
        """Write the file, a line each."""
        lines = [to_json({"about": self.about}), *(to_json(asdict(each)) for each in self.records.values())]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, ("\n".join(lines) + "\n").encode())

    def stale(self) -> dict[str, str]:
        """Methods whose source has changed since their numbers were taken, with the day of the oldest."""
        found: dict[str, str] = {}
        for record in self.records.values():
            if record.method in registered() and record.code != method_code(record.method):
                found[record.method] = min(record.date, found.get(record.method, record.date))
        return dict(sorted(found.items()))


# The source of a method -------------------------------------------------------------------------------------


@cache
def method_code(method: str) -> str:
    """A hash of what a method does: of its own module and of those that it imports of other methods.

    Comments, docstrings, imports, the words of settings, what the method declares of itself for its card and
    for transforms, and the form of the text are no part of it.
    """
    made = registered()[method]
    classes = (made if isinstance(made, type) else type(made)).__mro__
    return code_hash((each.__module__ for each in classes if each.__module__.startswith(METHODS)), _source)


def code_hash(modules: Iterable[str], source: Callable[[str], str | None]) -> str:
    """A hash of modules and what they import of :data:`METHODS`, by what they do and not by their names.

    ``source`` gives the text of a module, None where there is no such file.
    """
    waiting, seen = list(modules), dict.fromkeys(CONTRACT, "")
    while waiting:
        name = waiting.pop()
        text = None if name in seen else source(name)
        if text is not None:
            seen[name], imported = _module(text)
            waiting += imported
    return hashlib.sha256("".join(sorted(seen.values())).encode()).hexdigest()[:12]


@cache
def _module(text: str) -> tuple[str, tuple[str, ...]]:
    """The hash of a module's text, and the modules of methods that it imports."""
    tree = ast.parse(text)
    return hashlib.sha256(repr(_form(tree)).encode()).hexdigest(), tuple(_imported(tree))


@cache
def _source(module: str) -> str | None:
    """The text of a module; a package is what it holds, and has none."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name inside a module
        return None
    if found is None or found.origin is None or found.submodule_search_locations is not None:
        return None
    return Path(found.origin).read_text(encoding="utf-8")


def _imported(tree: ast.Module) -> Iterator[str]:
    """The modules of methods that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(METHODS):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(METHODS))


def _form(node: Any) -> Any:
    """A syntax tree as plain values, the same in every version of Python, without words and imports.

    >>> _form(ast.parse("def f(x):\\n 'Words.'\\n return x # why")) == _form(ast.parse("def f(x): return x"))
    True
    >>> _form(ast.parse("x - y")) == _form(ast.parse("x + y"))
    False
    """
    if isinstance(node, list):
        return [_form(each) for each in node if not _says_nothing(each)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setting":
        fields["args"] = node.args[:1]  # the default; behind it are words
    if isinstance(node, ast.ClassDef):
        fields["body"] = [each for each in node.body if not _declares(each)]
    if isinstance(node, ast.FunctionDef):  # what its replies are changes of is for transforms
        fields["decorator_list"] = [
            each for each in node.decorator_list if "changes(" not in ast.unparse(each)
        ]
    left_out = ("ctx", "kind", "type_comment", "type_ignores")
    return [
        type(node).__name__,
        *((name, _form(value)) for name, value in fields.items() if name not in left_out),
    ]


def _declares(node: ast.stmt) -> bool:
    """Whether a statement of a class is for its card."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return all(isinstance(each, ast.Name) and each.id in CARD for each in targets)


def _says_nothing(node: Any) -> bool:
    """Whether a statement does nothing: a text that stands alone, or an import."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
