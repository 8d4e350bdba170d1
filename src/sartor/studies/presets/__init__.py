"""Ready-made experiments: TOML files that come with the package.

>>> "comfed/digits" in names()
True
>>> path("comfed/digits").name
'comfed-digits.toml'
"""

from __future__ import annotations

from pathlib import Path

from sartor.settings import unknown

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all presets, ``paper/table``."""
    return sorted(file.stem.replace("-", "/", 1) for file in _FOLDER.glob("*.toml"))


def path(name: str) -> Path:
    """The file of a preset, which ``sartor run ALGORITHM NAME`` and ``sartor.run(experiment=...)`` take."""
    if name not in names():
        raise unknown("preset", name, names(), what="name")
    return _FOLDER / f"{name.replace('/', '-', 1)}.toml"
