"""The picture of the house and the table of its rooms, from the imports as they are.

Storeys are the layers of the import-linter contract in ``pyproject.toml``; layers that do not import each
other share one. Lines are imports, without those that follow from others. The picture is inline SVG in the
page's own colours, and nothing is loaded.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import grimp

import sartor

ROOT = Path(__file__).parent.parent
PACKAGE = Path(sartor.__file__).parent
WORDS = {
    "api": "sartor.run",
    "commands": "the command line",
    "report": "run folders as a page",
    "studies": "many runs, the papers' tables",
    "remote": "clients on real machines",
    "runs": "one run, the only round loop",
    "robust": "rules and attacks",
    "engines": "clients simulated here",
    "algorithms": "a method, one file",
    "transforms": "what happens to messages",
    "federation": "map a function over clients",
    "data": "what clients hold",
    "client": "what one client can do",
    "privacy": "what noise is worth",
    "model": "a model as a vector",
    "random": "draws from keys",
    "kernels": "many clients, one kernel",
}
"""What each room is, for its box."""
WALL = ("engines", "algorithms")
"""The rooms on the two sides of the wall."""

WIDTH, CENTRES = 720, {1: (360,), 2: (150, 570), 3: (97, 420, 623)}
BOX, HEIGHT, STOREY = 190, 44, 72
NARROW = {"robust": 140}
"""Boxes that lines of others pass on both sides."""
ACCENT = "var(--md-typeset-a-color, #4a64d9)"


@cache
def layers() -> tuple[tuple[str, ...], ...]:
    """The layers of the contract, from the top; each with its rooms."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (found,) = (entry for entry in contract["contracts"] if entry["type"] == "layers")
    return tuple(tuple(re.split(r"\s*[|:]\s*", layer)) for layer in found["layers"])


@cache
def ground() -> tuple[str, ...]:
    """What any room may use: the lowest layers, as far as they hold single modules only."""
    found: list[str] = []
    for layer in reversed(layers()):
        if any((PACKAGE / room).is_dir() for room in layer):
            break
        found = [*layer, *found]
    return tuple(found)


@cache
def imports() -> dict[str, frozenset[str]]:
    """By room the rooms it imports."""
    graph = grimp.build_graph("sartor", exclude_type_checking_imports=True, cache_dir=None)
    rooms = [room for layer in layers() for room in layer]
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for module in graph.modules:
        room = _room(module)
        if room in found:
            found[room] |= {_room(other) for other in graph.find_modules_directly_imported_by(module)}
    return {room: frozenset((others & set(rooms)) - {room}) for room, others in found.items()}


def _room(module: str) -> str:
    return (*module.split("."), "")[1]


def storeys() -> list[list[str]]:
    """The rooms above the ground, storey by storey from the top."""
    found: list[list[str]] = []
    for layer in layers():
        rooms = [room for room in layer if room not in ground()]
        apart = found and not any(imports()[above] & set(rooms) for above in found[-1])
        if apart and len(found[-1]) + len(rooms) in CENTRES:
            found[-1] += rooms
        elif rooms:
            found.append(rooms)
    return found


def lines() -> list[tuple[str, str]]:
    """Who imports whom, above the ground and without what follows from other imports."""
    found = []
    for room, others in imports().items():
        above = {other for other in others if other not in ground()}
        found += [
            (room, other)
            for other in sorted(above)
            if not any(other in reached(between) for between in above if between != other)
        ]
    return [(room, other) for room, other in found if room not in ground()]


def reached(room: str) -> frozenset[str]:
    """All rooms that a room imports, directly or not."""
    found = set(imports()[room])
    for other in imports()[room]:
        found |= reached(other)
    return frozenset(found)


def picture() -> str:
    """The house as SVG."""
    places = {
        room: (CENTRES[len(rooms)][column], storey * STOREY)
        for storey, rooms in enumerate(storeys())
        for column, room in enumerate(rooms)
    }
    height = (len(storeys()) + 1) * STOREY - (STOREY - HEIGHT)
    parts = []
    for room, other in lines():
        (x1, y1), (x2, y2) = places[room], places[other]
        parts.append(
            f'<line x1="{x1}" y1="{y1 + HEIGHT}" x2="{x2}" y2="{y2}" stroke="currentColor" '
            f'stroke-opacity="0.5" stroke-width="1.5"><title>{room} imports {other}</title></line>'
        )
    for room, (x, y) in places.items():
        width = NARROW.get(room, BOX)
        parts += _box(x - width // 2, y, width, room, WORDS[room])
    (x1, y), (x2, _) = places[WALL[0]], places[WALL[1]]
    middle = (x1 + x2) // 2
    parts += [
        f'<line x1="{middle}" y1="{y - 4}" x2="{middle}" y2="{y + HEIGHT + 4}" style="stroke: {ACCENT}" '
        f'stroke-width="3"><title>the wall: neither {WALL[0]} nor {WALL[1]} import the other</title></line>',
        f'<text x="{middle - 8}" y="{y + HEIGHT // 2 + 4}" text-anchor="end">the wall</text>',
    ]
    parts += _box(55, len(storeys()) * STOREY, WIDTH - 110, ", ".join(ground()), "any room may use these")
    return "\n".join(
        [
            '<figure id="house">',
            f'<svg viewBox="-1 -1 {WIDTH + 2} {height + 2}" width="{WIDTH}" height="{height}" role="img" '
            'aria-labelledby="house-title" font-size="12" font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">',
            '<title id="house-title">The rooms of Sartor; a line leads down to what is imported</title>',
            *parts,
            "</svg>",
            "</figure>",
        ]
    )


def _box(x: int, y: int, width: int, name: str, words: str) -> list[str]:
    middle = x + width // 2
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" fill="none" '
        'stroke="currentColor" stroke-opacity="0.6"/>',
        f'<text x="{middle}" y="{y + 18}" text-anchor="middle" font-weight="bold">{name}</text>',
        f'<text x="{middle}" y="{y + 34}" text-anchor="middle">{words}</text>',
    ]


def table() -> str:
    """Every room, what its docstring says it is for, and what it imports, the ground left out."""
    rows = ["| room | what it is for | imports |", "| --- | --- | --- |"]
    order = [room for layer in layers() for room in layer]
    for room in order:
        folder = PACKAGE / room
        file = folder / "__init__.py" if folder.is_dir() else PACKAGE / f"{room}.py"
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        words = docstring.partition("\n")[0].replace("``", "`").replace("|", "\\|")
        words = re.sub(r":\w+:`(.*?)`", r"`\1`", words)
        others = [other for other in order if other in imports()[room] and other not in ground()]
        name = f"`{room}/`" if folder.is_dir() else f"`{room}.py`"
        rows.append(f"| {name} | {words} | {', '.join(others)} |")
    return "\n".join(rows)
