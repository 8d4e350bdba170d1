"""What users add: files and packages of their own, imported by name, and registries that find them.

A file (``mine.py``) or an installed module (``package.module``) is executed once by :func:`import_code`, and
registers what it has: algorithms, models, data sets. :func:`find_function` and :func:`imported` only look at
what was imported, so a name that came over the wire starts nothing. What was imported is known by its file's
name and its SHA-256, the same on every machine.

Installed packages are found by entry points: a :class:`Registry` imports those of its group when a name is
not known or names are listed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from sartor.errors import SartorError, SettingError

log = logging.getLogger(__name__)

T = TypeVar("T")
PREFIX = "imported."
"""Stands before a file's name without its ending: its module's name, which hides no other module."""
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>[^\W\d]\w*)", re.DOTALL)
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Code:
    """A file (its absolute path) or an installed module (its dotted name), and the SHA-256 of its source."""

    source: str
    sha256: str

    @property
    def name(self) -> str:
        """What it is called on every machine: the file's name, or the module's."""
        return code_name(self.source)


_IMPORTED: dict[str, Code] = {}
_GROUPS: set[str] = set()
"""The groups of entry points that registries look at."""


def is_file(source: str) -> bool:
    """Whether a source is a file, not an installed module.

    >>> is_file("mine.py"), is_file("package.module")
    (True, False)
    """
    return source.endswith(".py") or os.sep in source


def code_name(source: str) -> str:
    """What a source is called on every machine.

    >>> code_name("/home/anna/mine.py"), code_name("package.module")
    ('mine.py', 'package.module')
    """
    return Path(source).name if is_file(source) else source


def function_file(reference: Any) -> str | None:
    """The file of a function in a file, None for anything else.

    >>> function_file("nets/mine.py:build"), function_file("table.csv")
    ('nets/mine.py', None)
    """
    found = _FUNCTION.fullmatch(reference) if isinstance(reference, str) else None
    return None if found is None else found["file"]


def imported(name: str) -> Code | None:
    """What was imported under a name."""
    return _IMPORTED.get(name)


def read_code(source: str) -> Code:
    """A source with its hash; nothing is executed."""
    return Code(source, hashlib.sha256(_content(source)).hexdigest())


def import_code(source: str, expected: str | None = None) -> Code:
    """Execute a file or import a module, once; ``expected`` is the SHA-256 that it must have.

    A file that was changed since is executed again. An error in it is told with its line.
    """
    content = _content(source)
    code = Code(source, hashlib.sha256(content).hexdigest())
    if expected is not None and code.sha256 != expected:
        raise SartorError(f"{source}: has changed (SHA-256 {code.sha256[:12]}, not {expected[:12]})")
    known = _IMPORTED.get(code.name)
    if known is not None and known.sha256 != code.sha256 and known.source != code.source:
        raise SettingError(f"{source}: {known.source} is imported already; give one of them another name")
    if known is None or known.sha256 != code.sha256:
        if is_file(source):
            _execute(source, content)
        else:
            with _told(source):
                importlib.import_module(source)
    _IMPORTED[code.name] = code
    return code


def import_again(then: Code, run: str) -> None:
    """Import what a run was made with, if it is the same; else say what is missing or has changed.

    What was imported in this process already counts, wherever it lies.
    """
    now = _IMPORTED.get(then.name)
    if now is None:
        try:
            now = read_code(then.source)
        except SettingError as error:
            raise SartorError(
                f"{run}: was made with {then.name} (SHA-256 {then.sha256[:12]}), and {error}; "
                f"put it back, or say where it lies now: --import PATH/{then.name}"
            ) from None
    if now.sha256 != then.sha256:
        raise SartorError(
            f"{run}: was made with another {then.name} (SHA-256 {then.sha256[:12]}; {now.source} has "
            f"{now.sha256[:12]}); put that back, or name a copy of it by --import; with the new one it is "
            "another run: `sartor run` it anew"
        )
    if then.name not in _IMPORTED:
        import_code(now.source, then.sha256)


def installed_code(thing: Any) -> Code | None:
    """The package of a class or a function, if it is one that adds to Sartor by an entry point."""
    return installed(_home(thing)[0].partition(".")[0])


def installed(package: str) -> Code | None:
    """A package that adds to Sartor by an entry point, with the hash of its source; nothing is executed."""
    if package not in _IMPORTED and package != __name__.partition(".")[0]:
        found = entry_points()  # once for all groups, as it reads what every package says of itself
        points = [point for group in sorted(_GROUPS) for point in found.select(group=group)]
        if package in {point.module.partition(".")[0] for point in points}:
            _IMPORTED[package] = read_code(package)
    return _IMPORTED.get(package)


def find_function(reference: str, key: str) -> Callable[..., Any]:
    """The function ``file.py:name`` of a file that was imported here; nothing is executed."""
    found = _FUNCTION.fullmatch(reference)
    if found is None:
        raise SettingError(f"{key} = {reference!r}: expected a function in a file, as in mine.py:build")
    name = code_name(found["file"])
    if name not in _IMPORTED:
        raise SettingError(f"{key} = {reference!r}: {name} is not imported here; give it by --import {name}")
    function = getattr(sys.modules[_module_name(name)], found["function"], None)
    if not inspect.isroutine(function) and not inspect.isclass(function):
        raise SettingError(f"{key} = {reference!r}: {name} has no function {found['function']}")
    made: Callable[..., Any] = function
    return made


def call(function: Callable[..., T], what: str, **offered: Any) -> T:
    """Call a user's function with those of the offered arguments that it declares.

    >>> call(lambda seed: seed + 1, "mine", seed=1, clients=3)
    2
    """
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in offered:
            raise SettingError(
                f"{what}: asks for {parameter.name!r}; a function here may have {', '.join(offered)}"
            )
    names = {parameter.name for parameter in named}
    code = getattr(inspect.unwrap(function), "__code__", None)
    with _told("" if code is None else code.co_filename, what):
        return function(**{name: value for name, value in offered.items() if name in names})


class Registry(Mapping[str, T]):
    """Things by name, those of installed packages and of users included.

    Entry points of ``group`` are imported when a name is not known or names are listed; importing one
    registers what it has.

    >>> colours: Registry[int] = Registry("sartor.colours", "colour", {"red": 1})
    >>> colours.add("blue", 2)
    >>> list(colours), colours["red"], "green" in colours
    (['blue', 'red'], 1, False)
    """

    def __init__(self, group: str, what: str, own: Mapping[str, T] | None = None) -> None:
        self.group, self.what = group, what
        self._known: dict[str, T] = dict(own or {})
        self._loaded = False
        _GROUPS.add(group)

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            self._load_installed()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        self._load_installed()
        return iter(sorted(self._known))

    def __len__(self) -> int:
        self._load_installed()
        return len(self._known)

    def __repr__(self) -> str:
        return f"Registry({', '.join(self)})"

    def add(self, name: str, value: T) -> None:
        """Make a thing known. A name is given once; the same thing made again takes its own place."""
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith((".toml", ".py")):
            raise SartorError(f"{self.what} {name!r}: a name has letters, digits, '-', '_' and '.' only")
        held = self._known.get(name)
        if held is not None and _home(held) != _home(value):
            raise SartorError(f"{self.what} {name!r} is registered already, by {_home(held)[0]}")
        self._known[name] = value

    def remove(self, name: str) -> None:
        """Forget a thing."""
        del self._known[name]

    def _load_installed(self) -> None:
        """Import the entry points of the group, once; what cannot be imported is left out, and said so."""
        if self._loaded:
            return
        self._loaded = True
        failed: set[str] = set()
        for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, point.value)):
            package = point.dist.name if point.dist is not None else point.value
            if package in failed:
                continue
            try:
                point.load()
            except Exception as error:  # whatever somebody's package does, others can work
                failed.add(package)
                log.warning(
                    "package %s is left out, as its %s (%s, entry point of %s) cannot be imported: %s: %s",
                    package, self.what, point.value, self.group, type(error).__name__, error,
                )  # fmt: skip


def _home(thing: Any) -> tuple[str, str]:
    """The module and the name of a class, a function or what was made by one."""
    thing = thing if hasattr(thing, "__qualname__") else getattr(thing, "function", type(thing))
    return str(getattr(thing, "__module__", "")), str(getattr(thing, "__qualname__", ""))


def _module_name(name: str) -> str:
    return PREFIX + name.removesuffix(".py") if is_file(name) else name


def _content(source: str) -> bytes:
    """The source text of a file, or of all files of the package that an installed module belongs to."""
    if is_file(source):
        path = Path(source)
        if not source.endswith(".py") or not _NAME.fullmatch(path.name):
            raise SettingError(f"{source}: expected a Python file, as in mine.py, or an installed module")
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise SettingError(f"{source}: no such file to import") from None
        except (OSError, ValueError) as error:
            raise SettingError(f"{source}: cannot be imported: {error}") from None
    top = source.partition(".")[0]
    # Of the package itself, as looking for a module inside it would execute it.
    spec = importlib.util.find_spec(top) if _MODULE.fullmatch(source) else None
    if spec is None:
        raise SettingError(
            f"{source}: no such installed module; a file to import is named with its ending, as in mine.py"
        )
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [(folder, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    if not folders and spec.origin is not None and Path(spec.origin).is_file():
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    return b"".join(
        f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode() + text
        for folder, path in files
        for text in [path.read_bytes()]
    )


def _execute(source: str, content: bytes) -> None:
    """Make a module of a file's text: what was read and hashed, not what may stand there by now."""
    name = _module_name(code_name(source))
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with _told(source):
            exec(compile(content, source, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise


@contextmanager
def _told(source: str, what: str = "") -> Iterator[None]:
    """Turn an error in a user's file into one message with its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        line = _line(error, source)
        if line is None and isinstance(error, SartorError):
            raise
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, SyntaxError):
            reason = error.msg
        if not isinstance(error, SartorError):
            reason = f"{type(error).__name__}: {reason}"
        place = source if line is None else f"{source}, line {line}"
        raise SartorError(f"{what}: {place}: {reason}" if what else f"{place}: {reason}") from error


def _line(error: BaseException, source: str) -> int | None:
    """The line of a file where an error came up, the innermost one."""
    if isinstance(error, SyntaxError) and error.filename == source:
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == source:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
