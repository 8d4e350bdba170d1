"""The source of a method, as a hash: whether a method still does what it did when its numbers were taken."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sartor.algorithms.base import Algorithm, registered

METHODS = "sartor.algorithms"
CONTRACT = (METHODS, f"{METHODS}.base", f"{METHODS}.cards")
"""What all methods share and none of them is."""
CARD = frozenset(Algorithm.__annotations__) - {"buffers", "Hyper"}
"""What a method declares of itself, and what does not change its numbers."""


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
