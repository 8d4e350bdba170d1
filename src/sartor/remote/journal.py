"""Client states on a node: in files, one for every exchange, so that each can be taken back.

What a client keeps of an exchange is *staged* under the exchange's number. It becomes the client's state when
the server says that the reply was used, and is thrown away when it says that it was not: a client whose reply
was not used has not moved. A server that continues from a checkpoint takes nodes back to that exchange; up to
the exchange before which it never goes back, files are merged into one.

===============================  ==================================================
000000000012.staged.safetensors  kept of exchange 12, not yet known whether it counts
000000000011.used.safetensors    kept of exchange 11, which counts
000000000009.base.safetensors    the states after exchange 9
===============================  ==================================================

A row has its checksum beside it, so that a damaged file is found and not trained on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sartor.errors import DataError, SartorError
from sartor.federation.rows import checksums, row_bytes
from sartor.files import OWNER_ALONE, leftovers, private_folder, write
from sartor.runs.record import separate

MOST_FILES = 16
"""So many files of used exchanges are merged."""

_PARTS = ("numbers", "rows", "checks")
_KINDS = ("staged", "used", "base")
"""The later one counts where an exchange has two files."""

Rows = dict[str, tuple[Tensor, Tensor]]
"""Numbers of clients and their rows, for each state."""


@dataclass
class _Entry:
    """What was kept of an exchange: in a file, or in memory where there is no folder."""

    exchange: int
    kind: str
    path: Path | None
    held: Rows | None

    def rows(self) -> Rows:
        if self.held is not None:
            return self.held
        assert self.path is not None
        try:
            with safe_open(self.path, framework="pt") as file:
                stored = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.path}: client states cannot be read: {error}") from None
        rows = {}
        names = {key.rpartition(".")[0] for key in stored}
        if stored.keys() != {f"{name}.{part}" for name in names for part in _PARTS}:
            raise DataError(f"{self.path}: client states are damaged: not every state has all of its parts")
        for name in sorted(names):
            numbers, values, checks = (stored[f"{name}.{part}"] for part in _PARTS)
            counted = numbers.dtype == checks.dtype == torch.int64
            if not counted or not torch.equal(_checks(numbers, values), checks):
                raise DataError(f"{self.path}: client states are damaged: {name!r} has another checksum")
            rows[name] = (numbers, values)
        return rows


class Journal:
    """The states of the clients of one node in one run; without a folder they are lost with the process.

    >>> journal = Journal(None)
    >>> journal.stage(1, {"c": (torch.tensor([4, 7]), torch.tensor([1.0, 2.0]))})
    >>> journal.settle(1, [7])["c"]
    (tensor([7]), tensor([2.]))
    >>> journal.states()["c"]
    (tensor([7]), tensor([2.]))
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._entries: dict[int, _Entry] = {}
        if folder is not None:
            private_folder(folder)
            for leftover in leftovers(folder):
                leftover.unlink()
            for path in sorted(folder.glob("[0-9]*.safetensors"), key=lambda path: _KINDS.index(_kind(path))):
                exchange = int(path.name.split(".")[0])
                if exchange in self._entries:  # the process ended between writing a file and removing another
                    self._remove(exchange)
                self._entries[exchange] = _Entry(exchange, _kind(path), path, None)

    def stage(self, exchange: int, rows: Rows) -> None:
        """Put away what clients keep of an exchange."""
        self._write(exchange, "staged", rows)

    def settle(self, exchange: int, used: Iterable[int]) -> Rows:
        """Let what these clients kept of an exchange count, and nothing else of it; what counts now.

        Nothing where the exchange is settled already or was never staged.
        """
        entry = self._entries.get(exchange)
        if entry is None or entry.kind != "staged":
            return {}
        rows, chosen = entry.rows(), torch.tensor(sorted(used), dtype=torch.int64)
        kept = {name: _chosen(*pair, chosen) for name, pair in rows.items()}
        if not len(chosen):
            self._remove(exchange)
            return {}
        whole = all(len(kept[name][0]) == len(rows[name][0]) for name in rows)
        if whole and entry.path is not None:
            target = self._path(exchange, "used")
            os.replace(entry.path, target)
            self._entries[exchange] = _Entry(exchange, "used", target, None)
        else:
            self._write(exchange, "used", kept)
            if entry.path is not None:
                entry.path.unlink(missing_ok=True)
        return kept

    def go_back(
        self,
        exchange: int,
        without: Iterable[int] = (),
        keep: Iterable[int] = (),
        counted: Iterable[int] = (),
    ) -> None:
        """Forget everything after an exchange, and these before it; of those to keep, what is staged stays,
        and what was used if it is among those that are known to count.

        Told the same twice, as by a server that was stopped in between, a journal goes back no further.
        """
        gone, staying, used = set(without), set(keep), set(keep) & set(counted)
        for number, entry in list(self._entries.items()):
            if number in used or (number in staying and entry.kind == "staged"):
                continue
            if number > exchange or (number in gone and entry.kind != "base"):
                if entry.kind == "base":
                    raise SartorError(
                        f"{entry.path}: client states are of a later time than the checkpoint the run "
                        "continues from; begin the run again"
                    )
                self._remove(number)

    def has(self, exchange: int) -> bool:
        """Whether what clients kept of an exchange that counts is here."""
        entry = self._entries.get(exchange)
        if entry is not None and entry.kind != "staged":
            return True
        return any(entry.kind == "base" and number > exchange for number, entry in self._entries.items())

    def states(self) -> Rows:
        """What counts: for every state the clients that ever kept it, and their rows."""
        return self._merged([entry for entry in self._entries.values() if entry.kind != "staged"])

    def merge(self, exchange: int) -> None:
        """Put the states up to an exchange into one file, if there are many."""
        old = [
            entry for number, entry in self._entries.items() if number <= exchange and entry.kind != "staged"
        ]
        if len(old) <= MOST_FILES:
            return
        last = max(entry.exchange for entry in old)
        self._write(last, "base", self._merged(old))
        for entry in old:
            if entry.exchange != last:
                self._remove(entry.exchange)
            elif entry.path is not None and entry.kind != "base":
                entry.path.unlink(missing_ok=True)

    def _merged(self, entries: list[_Entry]) -> Rows:
        rows: dict[str, dict[int, Tensor]] = {}
        for entry in sorted(entries, key=lambda entry: entry.exchange):
            for name, (numbers, values) in entry.rows().items():
                rows.setdefault(name, {}).update(zip(numbers.tolist(), values, strict=True))
        return {
            name: (torch.tensor(list(held), dtype=torch.int64), torch.stack(list(held.values())))
            for name, held in rows.items()
            if held
        }

    def _write(self, exchange: int, kind: str, rows: Rows) -> None:
        if self._folder is None:
            self._entries[exchange] = _Entry(exchange, kind, None, rows)
            return
        tensors: dict[str, Tensor] = {}
        for name, (numbers, values) in rows.items():
            checks = _checks(numbers, values)
            tensors |= {f"{name}.numbers": numbers, f"{name}.rows": values, f"{name}.checks": checks}
        path = self._path(exchange, kind)
        write(path, save(separate(tensors)), OWNER_ALONE)
        self._entries[exchange] = _Entry(exchange, kind, path, None)

    def _remove(self, exchange: int) -> None:
        entry = self._entries.pop(exchange)
        if entry.path is not None:
            entry.path.unlink(missing_ok=True)

    def _path(self, exchange: int, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{exchange:012d}.{kind}.safetensors"


def rows_of(numbers: Tensor, kept: Mapping[str, Tensor]) -> Rows:
    """What clients keep, as a journal takes it."""
    return {name: (numbers, value) for name, value in kept.items()}


def _checks(numbers: Tensor, rows: Tensor) -> Tensor:
    """The checksum of each row, of whose it is, and of its type and shape."""
    parts = [row_bytes(part.detach().cpu()) for part in (numbers, rows)]
    form = np.frombuffer(f"{rows.dtype} {tuple(rows.shape[1:])}".encode(), np.uint8)
    parts.append(np.tile(form, (len(numbers), 1)))
    return torch.from_numpy(checksums(np.hstack(parts)).astype(np.int64))


def _kind(path: Path) -> str:
    return path.name.split(".")[1]


def _chosen(numbers: Tensor, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.isin(numbers, chosen)
    return numbers[places], rows[places]
