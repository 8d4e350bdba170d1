"""LEAF's JSON files (Caldas et al. 2018), whose clients are the authors of the samples.

A file has ``users``, ``num_samples`` and ``user_data``, the samples of every user as ``x`` and ``y``. What
they are follows from them: 784 pixels and a class in FEMNIST, by writer; 80 characters and the next one in
Shakespeare, by role.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sartor.data.clients import ClientData, Samples, from_clients
from sartor.data.readers import check_file, check_fits
from sartor.data.texts import FIRST, PADDING, UNKNOWN
from sartor.errors import DataError

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's Shakespeare; the first is token 2, after padding and what is not known."""
_TOKENS = {letter: FIRST + place for place, letter in enumerate(LETTERS)}
SIDE = 28
FEMNIST_CLASSES = 62


def is_leaf(path: Path) -> bool:
    """Whether a path is one of LEAF's files, or a folder of such."""
    if path.is_dir():
        return any(path.glob("*.json")) or any((path / "train").glob("*.json"))
    return path.suffix == ".json"


def from_leaf(
    path: str | Path,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    least: int = 2,
) -> ClientData:
    """The clients of a LEAF file, or of a folder of them, each with its name there.

    A folder with ``train`` and ``test`` has both splits, as LEAF's ``preprocess.sh -t sample`` leaves them;
    otherwise test samples are drawn. Users with fewer than ``least`` samples to train on are left out, as
    one sample cannot be both trained and tested on.
    """
    path = Path(path)
    whole = path.is_dir() and (path / "train").is_dir()
    train = _users(_files(path / "train" if whole else path))
    test = _users(_files(path / "test")) if whole and (path / "test").is_dir() else {}
    alone = next((user for user in test if user not in train), None)
    if alone is not None:
        raise DataError(
            f"{path / 'test'}: user {alone!r} has no training samples; divide LEAF's data by sample "
            "(preprocess.sh -t sample)"
        )
    clients: dict[str, Samples | Mapping[str, Samples]] = {}
    length = max((_longest(x) for held in (train, test) for _, x, _ in held.values()), default=0)
    for user, (where, x, y) in train.items():
        if len(y) >= least or user in test:
            own = {"train": _samples(x, y, where, length)}
            if user in test:
                where, x, y = test[user]
                own["test"] = _samples(x, y, where, length)
            clients[user] = own
    if not clients:
        raise DataError(f"{path}: no user has {least} samples")
    data = from_clients(
        clients,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        name=path.stem,
    )
    most = FEMNIST_CLASSES if data.train.x.is_floating_point() else FIRST + len(LETTERS)
    return replace(data, classes=max(most, data.classes or 0))


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no json files; expected LEAF's")
    return files


def _users(files: Sequence[Path]) -> dict[str, tuple[str, list[Any], list[Any]]]:
    """The samples of every user, and where they are."""
    found: dict[str, tuple[str, list[Any], list[Any]]] = {}
    for file in files:
        held = _read(file)
        for user in held["users"]:
            where = f"{file}: user {user!r}"
            own = held["user_data"].get(user)
            if (
                not isinstance(own, dict)
                or not isinstance(own.get("x"), list)
                or not isinstance(own.get("y"), list)
            ):
                raise DataError(f"{where}: user_data has no lists x and y of it")
            if len(own["x"]) != len(own["y"]):
                raise DataError(f"{where}: {len(own['x'])} samples in x but {len(own['y'])} labels in y")
            if user in found:
                raise DataError(f"{where}: is in {found[user][0].partition(': user')[0]} too")
            if own["y"]:
                found[user] = where, own["x"], own["y"]
    return found


def _read(file: Path) -> dict[str, Any]:
    check_file(file)
    check_fits(file, 4 * file.stat().st_size)  # numbers as Python objects take more than their digits
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: line {error.lineno}: is no JSON ({error.msg})") from None
    users = held.get("users") if isinstance(held, dict) else None
    if not isinstance(users, list) or not isinstance(held.get("user_data"), dict):
        raise DataError(f"{file}: not LEAF's JSON, which has users, num_samples and user_data")
    if not all(isinstance(user, str) for user in users):
        raise DataError(f"{file}: users are texts")
    read: dict[str, Any] = held
    return read


def _longest(x: list[Any]) -> int:
    return max((len(text) for text in x if isinstance(text, str)), default=0)


def _samples(x: list[Any], y: list[Any], where: str, length: int) -> Samples:
    """The samples of one user: texts and the character after them, or images and their class."""
    if all(isinstance(text, str) for text in x):
        return _characters(x, y, where, length)
    sizes = {len(row) if isinstance(row, list) else -1 for row in x}
    if sizes != {SIDE * SIDE}:
        raise DataError(
            f"{where}: samples are neither texts (Shakespeare) nor {SIDE * SIDE} pixels (FEMNIST); read them "
            "in a function of your own, as in data.path=mine.py:load"
        )
    try:
        return torch.tensor(x, dtype=torch.float32).view(-1, 1, SIDE, SIDE), y
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: a pixel is no number ({error})") from None


def _characters(x: list[str], y: list[Any], where: str, length: int) -> Samples:
    wrong = next(
        (row for row, letter in enumerate(y) if not isinstance(letter, str) or len(letter) != 1), None
    )
    if wrong is not None:
        raise DataError(f"{where}: y[{wrong}] is {y[wrong]!r:.40}, expected the character after the text")
    if not min(map(len, x)):
        raise DataError(f"{where}: x[{[*map(len, x)].index(0)}] is an empty text")
    tokens = ([_TOKENS.get(letter, UNKNOWN) for letter in text] for text in x)
    rows = [[*text, *[PADDING] * (length - len(text))] for text in tokens]
    return torch.tensor(rows), torch.tensor([_TOKENS.get(letter, UNKNOWN) for letter in y])
