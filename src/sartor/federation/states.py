"""Client states: one row per client, addressed by client number. The server has no way to them.

A row that was never written reads as the state's initial value and takes no memory, so that a million
clients may have a state of any size and only those that trained are stored. Which place of the storage a
client's row has is known on the host, so that reading and writing rows never waits for the device.

Rows lie in memory, or in a file where they would not fit. What a checkpoint refers to in a file is never
written over: rows saved once are followed by their newer versions, and the file is copied without the old
ones when they are most of it. So a checkpoint of a file is its index alone, and it stays whole whenever the
process ends.

Where several processes share a run, each has the rows of the clients that are at home there and files of its
own. What all of them saved can be loaded by any number of processes: each takes the rows of its clients.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sartor.errors import DataError, SartorError
from sartor.federation.exchange import ClientFunction, Outcome, Work, argument_names
from sartor.federation.functions import name_of
from sartor.federation.homes import Homes, home_folder
from sartor.federation.rows import RowFile, checksums, row_bytes
from sartor.kernels.device import free_bytes, put_rows, rows_at

WHERE = ("auto", "memory", "disk")

STATES = "states."
"""How the names of states begin among what a federation saves."""

ON_DEVICE_BYTES = 4 << 30
"""A state stays on the GPU up to this size; of a larger one only a cohort's rows travel there."""

SHARE_OF_MEMORY = 0.25
"""``auto`` puts states into files where all of them together would take more of the free host memory."""

COMPACT_BYTES = 64 << 20
"""A file smaller than this is left as it is, however many of its rows are old."""

KEPT = 2
"""How many checkpoints may be in use: a file goes with so many calls of ``save`` after the last it is in."""

WRITTEN_BYTES = 4 << 20
"""How much is copied at once where rows of clients at home here are picked out among others."""

PIECE_BYTES = 16 << 20
"""How much of a file is in memory at once where all of it is gone through."""


def grouped_name(name: str, group: int) -> str:
    """The name of a state at the clients of a group, where it has another shape in each."""
    return f"{name}@{group}"


def states_in(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states among what a federation saved, by their own names."""
    return {name[len(STATES) :]: value for name, value in saved.items() if name.startswith(STATES)}


class StateStore:
    """Named states of the clients at home here, each a table with one row per client.

    ``where`` is ``memory``, ``disk`` or ``auto``, which decides by size. Files lie in the folder that
    :meth:`keep_in` names; without one they are temporary and a checkpoint holds the rows themselves.

    >>> store = StateStore(1_000_000, torch.device("cpu"))
    >>> store.declare("c", torch.zeros(2))
    >>> store.write("c", np.array([7, 3]), torch.ones(2, 2))
    >>> store.rows("c", np.array([3, 999_999])).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        clients: int,
        device: torch.device,
        where: str = "auto",
        groups: np.ndarray | None = None,
        homes: Homes | None = None,
    ) -> None:
        if where not in WHERE:
            raise SartorError(f"engine.states = {where!r}: must be one of {', '.join(WHERE)}")
        self.clients, self.device, self.where = clients, device, where
        self._homes = homes or Homes(clients)
        self._groups = groups
        """The group of every client, where states may have another shape in each."""
        self._tables: dict[str, _Table] = {}
        self._folder: Path | None = None
        self._continues = True
        self._in_memory: dict[str, int] = {}
        self._left: dict[Path, int] = {}
        """Files of homes that are no more, and how many calls of ``save`` they stay."""

    def keep_in(self, folder: Path, continues: bool = True) -> None:
        """Put files into this folder, before any row is written; each home has its own part of it.

        With ``continues=False`` they belong to another process, and :meth:`load` copies from them.
        """
        self._folder, self._continues = folder, continues
        for name, table in self._tables.items():
            if isinstance(table, _FileTable) and table.untouched:
                self.declare(name, table.initial)

    def declare(self, name: str, initial: Tensor) -> None:
        """A state that starts with the same value at every client."""
        initial = initial.detach().contiguous()
        whole = initial.nbytes * self._homes.count
        on_device = self.device.type != "cpu" and whole <= ON_DEVICE_BYTES
        host = whole + sum(size for other, size in self._in_memory.items() if other != name)
        self._in_memory.pop(name, None)
        free = free_bytes(torch.device("cpu")) / self._homes.beside
        large = not on_device and host > SHARE_OF_MEMORY * free
        if whole and (self.where == "disk" or (self.where == "auto" and large)):
            self._tables[name] = self._file_table(name, initial)
            return
        if not on_device:
            self._in_memory[name] = whole
        place = self.device if on_device else torch.device("cpu")
        self._tables[name] = _MemoryTable(self._homes.count, initial, place)

    def initial(self, name: str) -> Tensor:
        """What every client begins with."""
        return self._tables[name].initial

    def rows(self, name: str, numbers: np.ndarray) -> Tensor:
        """The states of some clients that are at home here, on the device."""
        return self._tables[self.table_of(name, numbers)].read(self._homes.rows(numbers)).to(self.device)

    def write(self, name: str, numbers: np.ndarray, rows: Tensor) -> None:
        """Replace the states of some clients, each given once; of those at home elsewhere nothing is kept."""
        here = self._homes.here(numbers)
        if not len(here):
            return
        table = self._tables[self.table_of(name, numbers[here])]
        if len(here) == len(numbers):
            table.write(self._homes.rows(numbers), rows)
            return
        step = max(1, WRITTEN_BYTES // max(1, rows[:1].nbytes))
        for part in (here[first : first + step] for first in range(0, len(here), step)):
            table.write(self._homes.rows(numbers[part]), rows_at(part, rows))

    @property
    def whole(self) -> bool:
        """Whether all clients are at home here."""
        return self._homes.ranks == 1

    def table_of(self, name: str, numbers: np.ndarray) -> str:
        """The name of the table that holds a state of these clients, all of one group."""
        if name in self._tables or self._groups is None or not len(numbers):
            return name
        return grouped_name(name, int(self._groups[numbers[0]]))

    def save(self) -> dict[str, Tensor]:
        """What :meth:`load` needs, on the host: the rows ever written, or where they lie in a file.

        What the last two calls gave stays valid while a third is put away.
        """
        saved: dict[str, Tensor] = {}
        _forget(self._left)
        for name, table in self._tables.items():
            parts = table.save()
            parts["numbers"] = torch.from_numpy(self._homes.numbers(parts["numbers"].numpy()))
            parts["home"] = torch.tensor([self._homes.rank, self._homes.ranks])
            saved[f"{name}.initial"] = table.initial.cpu().clone()
            saved.update({f"{name}.{part}": value for part, value in parts.items()})
        return saved

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take the states back to what :meth:`save` saw; other states are gone."""
        self._tables.clear()
        self._in_memory.clear()
        if self._folder is not None and self._continues and self._homes.rank == 0:
            ranks = self._homes.ranks
            used = {home_folder(self._folder, rank, ranks) for rank in range(ranks)}
            files = (path for path in self._folder.rglob("*.rows") if path.parent not in used)
            self._left = dict.fromkeys(files, KEPT + 1)
        self.add(saved)

    def add(self, saved: Mapping[str, Tensor]) -> None:
        """Take in what :meth:`save` gave at another home, after :meth:`load`: the clients at home here."""
        for key, initial in saved.items():
            name, _, part = key.rpartition(".")
            if part != "initial":
                continue
            if f"{name}.rows" in saved:
                if name not in self._tables:
                    self.declare(name, initial)
                self.write(name, saved[f"{name}.numbers"].numpy(), saved[f"{name}.rows"])
            elif self._folder is None:
                raise DataError(
                    f"checkpoint: the client states {name!r} lie in files of a run folder; name it"
                )
            else:
                self._add_file(name, initial, {part: saved[f"{name}.{part}"] for part in _FileTable.INDEX})

    def _add_file(self, name: str, initial: Tensor, index: Mapping[str, Tensor]) -> None:
        """Go on with a file where it is this home's, else copy the rows of clients at home here.

        Every row is checked, so that a damaged or newer file is found here and not trained on.
        """
        assert self._folder is not None
        rank, ranks = index["home"].tolist()
        folder = home_folder(self._folder, rank, ranks)
        new = self._tables.setdefault(name, self._file_table(name, initial))
        numbers = index["numbers"].numpy()
        here = self._homes.here(numbers)
        if isinstance(new, _FileTable) and new.folder == folder:
            new.go_on(index, numbers, self._homes.rows(numbers))
            return
        if isinstance(new, _FileTable):
            new.begin_anew()
        table = _FileTable(0, initial, name, folder)
        for part, rows in table.stored(index, numbers, here):
            self.write(name, numbers[part], rows)

    @property
    def bytes_per_client(self) -> int:
        """What a client's states take, in the mean where they differ between groups."""
        total = 0
        for name, table in self._tables.items():
            _, grouped, group = name.rpartition("@")
            holders = self.clients
            if grouped and self._groups is not None:
                holders = int((self._groups == int(group)).sum())
            total += table.initial.nbytes * holders
        return round(total / max(1, self.clients))

    def names_for(self, work: Work) -> list[str]:
        """The states that a client function takes: its arguments that are not sent."""
        shared, own = work.shared, work.own
        wanted = [name for name in argument_names(work.function) if name not in shared and name not in own]
        for name in wanted:
            if name not in self:
                raise SartorError(
                    f"{name_of(work.function)} takes {name!r}, which is neither sent (shared, each) "
                    "nor a declared state"
                )
        return wanted

    def attached(self, work: Work, policy: str) -> Work:
        """The work with its clients' states, and with their buffers where they keep their own."""
        own = {name: self.rows(name, work.numbers) for name in self.names_for(work)}
        buffers = work.buffers
        if buffers is not None and policy == "local":
            buffers = self.rows("buffers", work.numbers)
        if not own and buffers is work.buffers:
            return work
        return work._replace(own={**work.own, **own}, buffers=buffers)

    def check(self, function: ClientFunction, outcome: Outcome) -> None:
        """Refuse an outcome that keeps what was not declared, or something else than was declared."""
        for name, value in outcome.kept.items():
            if name not in self:
                known = ", ".join(self) or "none"
                raise SartorError(
                    f"{name_of(function)} keeps {name!r}, which is no declared state (declared: {known})"
                )
            initial = self.initial(self.table_of(name, outcome.clients))
            if value.shape[1:] != initial.shape or not torch.can_cast(value.dtype, initial.dtype):
                found, declared = (
                    f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"
                    for shape, dtype in ((value.shape[1:], value.dtype), (initial.shape, initial.dtype))
                )
                raise SartorError(
                    f"{name_of(function)} keeps {name!r} as {found}, which was declared as {declared}; a "
                    "state has the same form in every round"
                )

    def __contains__(self, name: object) -> bool:
        return name in self._tables or (
            self._groups is not None and grouped_name(str(name), int(self._groups[0])) in self._tables
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __getitem__(self, name: str) -> Tensor:
        """A copy of all clients' rows; every process of a run has to ask for it."""
        everyone = np.arange(self.clients)
        own = self.rows(name, everyone[self._homes.here(everyone)])
        return self._homes.gathered(everyone, [own])[0]

    def _file_table(self, name: str, initial: Tensor) -> _FileTable:
        folder = self._folder if self._continues else None
        if folder is not None:
            folder = home_folder(folder, self._homes.rank, self._homes.ranks)
        return _FileTable(self._homes.count, initial, name, folder)


class _Table(Protocol):
    """The rows of one state."""

    initial: Tensor

    def read(self, numbers: np.ndarray) -> Tensor: ...

    def write(self, numbers: np.ndarray, rows: Tensor) -> None: ...

    def save(self) -> dict[str, Tensor]: ...


class _MemoryTable:
    """Rows in memory of the device or of the host. Place 0 holds the initial value."""

    def __init__(self, clients: int, initial: Tensor, device: torch.device) -> None:
        self.initial = initial.to(device).clone()
        self._device = device
        self._places = np.zeros(clients, dtype=np.int64)
        self._used = 1
        self._rows = self.initial[None].clone()

    def read(self, numbers: np.ndarray) -> Tensor:
        return rows_at(self._places[numbers], self._rows)

    def write(self, numbers: np.ndarray, rows: Tensor) -> None:
        new = numbers[self._places[numbers] == 0]
        self._places[new] = np.arange(self._used, self._used + len(new))
        self._used += len(new)
        if self._used > len(self._rows):
            grown = self._room()
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        put_rows(self._places[numbers], self._rows, rows.to(self._rows))

    def _room(self) -> Tensor:
        """Place for more rows: for all of them on a host that lets them have it.

        There memory takes none before something is written to it, unless PyTorch was told to fill it. Else
        there is twice as much each time, so that a row is copied once on average; while that is done, old
        and new rows are held.
        """
        whole = len(self._places) + 1
        capacity = min(max(self._used, 2 * len(self._rows)), whole)
        if self._device.type == "cpu" and not torch.are_deterministic_algorithms_enabled():
            fit = free_bytes(self._device) // max(1, self.initial.nbytes)
            with suppress(RuntimeError):  # a system that lends no more than it has
                return self.initial.new_empty((max(capacity, min(whole, fit)), *self.initial.shape))
        return self.initial.new_empty((capacity, *self.initial.shape))

    def save(self) -> dict[str, Tensor]:
        numbers = np.flatnonzero(self._places)
        return {"numbers": torch.from_numpy(numbers), "rows": self.read(numbers).cpu()}


class _FileTable:
    """Rows in a file. Place 0 means never written, place k the k-th row of the file.

    Rows up to ``_saved`` are in a checkpoint and stay as they are; those behind are written over in place.
    """

    INDEX = ("numbers", "places", "checks", "file", "home")

    def __init__(self, clients: int, initial: Tensor, name: str, folder: Path | None) -> None:
        self.initial = initial.cpu().clone()
        self._name, self.folder = name, folder
        self._places = np.zeros(clients, dtype=np.int64)
        self._checks = np.zeros(clients, dtype=np.uint32)
        self._used = self._saved = self._generation = 0
        self._opened: RowFile | None = None
        self._old: dict[Path, int] = {}

    @property
    def untouched(self) -> bool:
        """Whether nothing was written or loaded yet."""
        return self._opened is None

    def read(self, numbers: np.ndarray) -> Tensor:
        rows = self.initial.expand(len(numbers), *self.initial.shape).clone(
            memory_format=torch.contiguous_format
        )
        places = self._places[numbers]
        written = np.flatnonzero(places)
        if len(written):
            row_bytes(rows)[written] = self._file.read(places[written] - 1)
        return rows

    def write(self, numbers: np.ndarray, rows: Tensor) -> None:
        new = numbers[self._places[numbers] <= self._saved]
        self._places[new] = np.arange(self._used, self._used + len(new)) + 1
        self._used += len(new)
        data = row_bytes(rows.detach().to("cpu", self.initial.dtype))
        self._file.write(self._places[numbers] - 1, data)
        self._checks[numbers] = checksums(data)

    def save(self) -> dict[str, Tensor]:
        numbers = np.flatnonzero(self._places)
        if self.folder is None:
            return {"numbers": torch.from_numpy(numbers), "rows": self.read(numbers)}
        _forget(self._old)
        if self._used > 2 * len(numbers) and self._used * self.initial.nbytes > COMPACT_BYTES:
            self._compact(numbers)
        self._file.sync()
        self._saved = self._used
        return {
            "numbers": torch.from_numpy(numbers),
            "places": torch.from_numpy(self._places[numbers]),
            "checks": torch.from_numpy(self._checks[numbers].astype(np.int64)),
            "file": torch.tensor([self._generation, self._used]),
        }

    def stored(
        self, index: Mapping[str, Tensor], numbers: np.ndarray, wanted: np.ndarray, mode: str = "rb"
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """The rows of an index that :meth:`save` gave, piece by piece, each compared with its checksum."""
        assert self.folder is not None
        places, checks = index["places"].numpy(), index["checks"].numpy()
        self._generation, self._used = index["file"].tolist()
        path = self._path(self.folder, self._generation)
        self._opened = RowFile(path, self.initial.nbytes, mode)
        for piece in self._pieces(len(wanted)):
            part = wanted[piece]
            rows = self._file.read(places[part] - 1)
            wrong = np.flatnonzero(checksums(rows) != checks[part])
            if len(wrong):
                who = f"client {numbers[part][wrong[0]]}"
                raise DataError(f"{path}: the state of {who} is not the one the checkpoint was made with")
            values = torch.from_numpy(rows).view(self.initial.dtype)
            yield part, values.view(len(rows), *self.initial.shape)

    def go_on(self, index: Mapping[str, Tensor], numbers: np.ndarray, own: np.ndarray) -> None:
        """Go on with the file of an index; ``own`` are its clients' rows in this table."""
        assert self.folder is not None
        for _ in self.stored(index, numbers, np.arange(len(numbers)), "r+b"):
            pass
        self._places[own], self._checks[own] = index["places"].numpy(), index["checks"].numpy()
        self._saved = self._used
        path = self._path(self.folder, self._generation)
        self._old = {other: KEPT for other in self._files() if other != path}

    def begin_anew(self) -> None:
        """Begin with a file of its own, beside those that checkpoints may refer to."""
        if self.untouched and self.folder is not None and not self._old:
            self._old = dict.fromkeys(self._files(), KEPT + 1)
            numbers = (int(path.name.split(".")[-2]) for path in self._old)
            self._generation = 1 + max(numbers, default=-1)

    def _files(self) -> Iterator[Path]:
        assert self.folder is not None
        return self.folder.glob(f"{glob.escape(self._name)}.*.rows")

    def _compact(self, numbers: np.ndarray) -> None:
        """Copy the rows that count to a new file; the old one stays while a checkpoint may refer to it."""
        assert self.folder is not None
        self._old[self._path(self.folder, self._generation)] = KEPT
        self._generation += 1
        copy = RowFile(self._path(self.folder, self._generation), self.initial.nbytes, "w+b")
        for part in self._pieces(len(numbers)):
            copy.write(np.arange(part.start, part.stop), self._file.read(self._places[numbers[part]] - 1))
        self._file.close()
        self._opened = copy
        self._places[numbers] = np.arange(len(numbers)) + 1
        self._used = len(numbers)

    def _pieces(self, rows: int) -> Iterator[slice]:
        step = max(1, PIECE_BYTES // self.initial.nbytes)
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def _path(self, folder: Path, generation: int) -> Path:
        return folder / f"{self._name}.{generation}.rows"

    @property
    def _file(self) -> RowFile:
        if self._opened is None:
            path = None if self.folder is None else self._path(self.folder, self._generation)
            self._opened = RowFile(path, self.initial.nbytes, "w+b")
        return self._opened


def _forget(files: dict[Path, int]) -> None:
    """A call of ``save`` has come: remove the files that no checkpoint refers to any more."""
    for path in list(files):
        files[path] -= 1
        if not files[path]:
            path.unlink(missing_ok=True)
            del files[path]
            with suppress(OSError):  # of a home that is no more, where this was the last file
                path.parent.rmdir()
