"""A run folder: the only place that knows what a run stores, and under which names.

==================  ==================================================================================
config.toml         the experiment, every setting written out
environment.json    versions, platform, device, the time the run started, and the hashes of the method's
                    source and of imported code
partition.npz       which client holds which samples, where the data was partitioned
signature.json      what the model takes and gives, and the preprocessing; see :mod:`sartor.runs.signature`
rounds.jsonl        one line per round, written as the run goes
clients.parquet     one row per client and evaluation
summary.json        the result; written last, so a folder that has one is of a finished run
models.safetensors  the final models
outputs.npz         what they say of every test sample, in simulations; see :mod:`sartor.runs.outputs`
checkpoints/        the last states of the run, to continue from; see :mod:`sartor.runs.checkpoint`
clients.arrow       the client rows while the run goes on, until ``clients.parquet`` is written
states/             client states that are too large for memory
==================  ==================================================================================

Files are written beside their place and moved there once complete, so a file that exists is whole; only
``rounds.jsonl`` and ``clients.arrow`` grow in place, and an end cut off by a crash is left out when they are
read. The experiment is written last of what a run begins with: a folder without it has not begun.

Records are sealed (:mod:`sartor.runs.seals`): every line of ``rounds.jsonl``, every evaluation in
``clients.arrow``, ``clients.parquet`` and ``summary.json``. One that is damaged, or missing, is named and
never read over.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from sartor.algorithms.source import method_code
from sartor.errors import SartorError
from sartor.extensions import Code, code_name, function_file, import_again
from sartor.files import UNFINISHED, Busy, alone, leftovers, replacing, sync, write, writing
from sartor.runs.experiment import (
    Experiment,
    code_named,
    code_of,
    fingerprint,
    from_mapping,
    read_toml,
    to_mapping,
    to_toml,
)
from sartor.runs.participation import by_round
from sartor.runs.seals import BLANK, KEY, is_whole, sealed

if TYPE_CHECKING:
    import pyarrow as arrow
    import torch

CONFIG = "config.toml"
SEAL_LINE = "\n# seal of the lines above; remove it to change them: "
"""What stands before the seal of the experiment, at its end."""
ENVIRONMENT = "environment.json"
PARTITION = "partition.npz"
SIGNATURE = "signature.json"
ROUNDS = "rounds.jsonl"
CLIENTS = "clients.parquet"
SUMMARY = "summary.json"
DIVERGED = "diverged.json"
"""In place of the summary, how a run failed that would fail so again."""
MODELS = "models.safetensors"
OUTPUTS = "outputs.npz"
GROWING_CLIENTS = "clients.arrow"
STATES = "states"
"""The folder of client states that are too large for memory."""
FILES = (CONFIG, ENVIRONMENT, PARTITION, SIGNATURE, ROUNDS, CLIENTS, SUMMARY, MODELS)
BEGINNING = f"{UNFINISHED}run"
"""Lies in a folder until all is written that a run begins with; then another run may have the folder."""


class RunFolder:
    """The folder of one run, for writing (:meth:`create`) or for reading (:meth:`open`).

    While writing it is a context manager: on leaving, also by an error or an interruption, the rows kept so
    far are on disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds: IO[bytes] | None = None

    @classmethod
    def create(
        cls,
        path: Path | str | None,
        experiment: Experiment,
        partition: Any = None,
        signature: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """A new folder with what a run begins with; no folder of another run is touched.

        Without a path it is ``runs/<algorithm>-<data>-s<seed>-<fingerprint>`` under the current folder, with
        a number behind it where that is taken. A folder whose run was killed before it began is used again.
        """
        for folder in _default_folders(experiment) if path is None else [Path(path)]:
            run = cls(folder)
            held = run._begin(experiment, partition, signature)
            if held is None:
                return run
            taken = run._taken(held)
        raise taken

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Refuse, without touching it, what :meth:`create` would: a file, or a folder with another run."""
        run = cls(path)
        run._require_folder()
        held = run._held()
        if held is not None:
            raise run._taken(held)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The folder of an earlier run, to read from."""
        folder = Path(path)
        if not folder.is_dir():
            raise SartorError(f"{folder}: no such run folder")
        if not (folder / CONFIG).is_file():
            if cls.is_free(folder) and any(folder.iterdir()):
                raise SartorError(
                    f"{folder}: its run was stopped before it began; start it again as it was started, "
                    f"`sartor run ... --out {folder}` uses the folder"
                )
            raise SartorError(f"{folder}: not a run folder, it has no {CONFIG}")
        return cls(folder)

    @classmethod
    def is_free(cls, folder: Path) -> bool:
        """Whether a run may begin in a folder: it is not there, holds no run, or one that never began."""
        return cls(folder)._held() is None

    def _begin(
        self, experiment: Experiment, partition: Any, signature: Mapping[str, Any] | None
    ) -> str | None:
        """Write what a run begins with, the experiment last; or the file that tells of another run here."""
        with writing(self.path):
            self._require_folder()
            self.path.mkdir(parents=True, exist_ok=True)
            held = self._held()
            if held is not None:
                return held
            try:
                with self.alone():
                    held = self._held()  # another process may have begun a moment ago
                    if held is None:
                        self._write_beginning(experiment, partition, signature)
                    return held
            except Busy:  # it is about to
                return CONFIG

    def _write_beginning(
        self, experiment: Experiment, partition: Any, signature: Mapping[str, Any] | None
    ) -> None:
        (self.path / BEGINNING).touch()
        self._store(ENVIRONMENT, _json_bytes(self._about(experiment)))
        if partition is not None:
            self.write_partition(partition)
        if signature is not None:
            self._store(SIGNATURE, _json_bytes(signature))
        self._store(CONFIG, _sealed_config(to_toml(experiment)))
        (self.path / BEGINNING).unlink()

    def _require_folder(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise SartorError(f"{self.path}: is a file; give a folder that does not exist yet")

    def _taken(self, held: str) -> SartorError:
        return SartorError(f"{self.path}: already holds a run ({held}); give another folder or remove it")

    def _held(self) -> str | None:
        """A file of a run that has begun here."""
        if (self.path / CONFIG).exists():
            return CONFIG
        if (self.path / BEGINNING).exists():
            return None
        return next((name for name in FILES if (self.path / name).exists()), None)

    def _about(self, experiment: Experiment) -> dict[str, Any]:
        """What a run tells of its making, and which experiment it is."""
        return {
            **environment(experiment.engine.device),
            "method": method_code(experiment.algorithm),
            "imports": [asdict(code) for code in code_of(experiment)],
            "experiment": identity(to_mapping(experiment)),
        }

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process continue this run meanwhile; the system undoes it when a process is killed."""
        with alone(self.path, "another process is at this run; wait for it or stop it"):
            yield

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SartorError:
            if error is None:  # otherwise the error that ended the run is the one to show
                raise

    def close(self) -> None:
        """Put the client rows on disk and let go of the open file; writing may go on afterwards."""
        if self._rounds is not None:
            rounds, self._rounds = self._rounds, None
            with writing(self.path / ROUNDS):
                rounds.close()
        self.write_clients()

    def add_round(self, row: Mapping[str, Any]) -> None:
        """Append one round; it is in the file when this returns."""
        with writing(self.path / ROUNDS):
            if self._rounds is None:
                self._rounds = open(self.path / ROUNDS, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            _append(self._rounds, _line(row))

    def add_clients(self, columns: Mapping[str, Any]) -> None:
        """Keep the rows of one evaluation: column -> a value per client, or one value for all of them.

        A column that is missing in some evaluations is empty there. The rows are in a file when this
        returns: every evaluation a stream of its own, one behind the other.
        """
        content = _stream(_table(columns))
        path = self.path / GROWING_CLIENTS
        if not path.exists() and (earlier := self._stored_clients()) is not None:
            self._store(GROWING_CLIENTS, _stream(earlier))
        with writing(path), open(path, "ab", buffering=0) as file:
            _append(file, content)

    def write_clients(self) -> None:
        """Put all client rows kept so far into their final file."""
        growing = self.path / GROWING_CLIENTS
        if not growing.exists():
            return
        table = self._client_table()
        if table is not None:
            self._store(CLIENTS, _parquet(table))
        with writing(growing):
            growing.unlink()

    def sync(self) -> None:
        """Have the rows written so far on the disk, not only with the system: a checkpoint relies on them."""
        for name in (ROUNDS, GROWING_CLIENTS):
            with writing(self.path / name), contextlib.suppress(FileNotFoundError):
                sync(self.path / name)

    def cut(self, round: int) -> None:
        """Forget the rows of all rounds after this one, and what an interruption left half written.

        What is damaged after the round is made again; before it, the run cannot go on.
        """
        with writing(self.path):
            for leftover in leftovers(self.path):
                leftover.unlink()
        rows: list[dict[str, Any]] = []
        for _, row in self._numbered_rounds() if round >= 0 else ():
            if row is None or row["round"] > round:
                break
            rows.append(row)
            if row["round"] == round:
                break  # what follows may be damaged, it is not needed
        last = rows[-1]["round"] if rows else None
        if round > 0 and last != round:
            raise SartorError(
                f"{self.path / ROUNDS}: the row of round {(last or 0) + 1} is missing or damaged; "
                f"{self._anew()}"
            )
        self._store(ROUNDS, b"".join(map(_line, rows)))
        self._cut_clients(round, rows)

    def _cut_clients(self, round: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Client rows up to a round, in the growing file, from where they were."""
        import pyarrow.compute as compute

        table = None if round < 0 else self._stored_clients()
        if table is not None:
            table = table.filter(compute.less_equal(table["round"], round))
            self._check_clients(table, rows)
        elif rows:
            self._check_clients(None, rows)
        with writing(self.path):
            if table is not None and len(table):
                self._store(GROWING_CLIENTS, _stream(table))
            else:
                (self.path / GROWING_CLIENTS).unlink(missing_ok=True)
            (self.path / CLIENTS).unlink(missing_ok=True)

    def extend(self, rounds: int) -> None:
        """Make it an unfinished run of so many rounds, all else as it was."""
        content = self._read_text(CONFIG)
        with writing(self.path):
            (self.path / SUMMARY).unlink(missing_ok=True)
        longer = re.sub(r"(?m)^rounds = \d+$", f"rounds = {rounds}", content, count=1)
        self._store(CONFIG, _sealed_config(longer))

    def withdraw(self) -> None:
        """Take back what :meth:`create` made, of a run that was refused before its first round."""
        with contextlib.suppress(OSError):  # what is not ours stays
            for name in (*FILES, DIVERGED, OUTPUTS, BEGINNING):
                (self.path / name).unlink(missing_ok=True)
            for empty in (self.path / STATES, self.path):
                with contextlib.suppress(OSError):
                    empty.rmdir()

    def write_partition(self, partition: Any) -> None:
        """Store which client holds which samples, a :class:`sartor.data.partitions.Partition`."""
        partition.save(self.path / PARTITION)

    def write_models(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store named tensors."""
        self.write_tensors(MODELS, tensors)

    def write_tensors(
        self, name: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
    ) -> None:
        """Store named tensors in a file of this name, with texts beside them."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with self._replacing(name) as temporary:
            try:
                save_file(separate(tensors), temporary, metadata)
            except SafetensorError as error:  # how it reports a full disk
                raise OSError(str(error)) from None

    def write_outputs(self, content: bytes) -> None:
        """Store what the final models say of every sample."""
        self._store(OUTPUTS, content)

    @property
    def outputs(self) -> bytes | None:
        """What :meth:`write_outputs` stored; None where there is nothing."""
        return self._read_bytes(OUTPUTS) if (self.path / OUTPUTS).is_file() else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the result; the last thing a run does."""
        self._store(SUMMARY, sealed(_json_bytes({**summary, KEY: BLANK})))

    def write_diverged(self, message: str, data: str) -> None:
        """Store how the run failed, and the hash of its data."""
        self._store(DIVERGED, _json_bytes({"message": message, "data": data}))

    def begin_again(self) -> None:
        """Forget how the run failed: it is tried once more."""
        with writing(self.path):
            (self.path / DIVERGED).unlink(missing_ok=True)

    @property
    def diverged(self) -> dict[str, Any] | None:
        """The ``message`` with which the run failed, and the hash of its ``data``; None if it did not."""
        return self._read_object(DIVERGED) if (self.path / DIVERGED).is_file() else None

    @property
    def config(self) -> dict[str, Any]:
        """The experiment as nested dicts, as it was stored."""
        return read_toml(self.path / CONFIG)

    @property
    def experiment(self) -> Experiment:
        """The experiment, checked against today's settings.

        Code that it names is imported if it is what the run was made with, else there is an error.
        """
        config = self.config
        if identity(config) != self.environment.get("experiment"):
            raise SartorError(
                f"{self.path / CONFIG}: is not the experiment that the run was started with; put back its "
                "settings (rounds, checkpoint and tracking may change)"
            )
        content = self._read_text(CONFIG)
        if SEAL_LINE in content and not is_whole(content.encode()):
            raise SartorError(
                f"{self.path / CONFIG}: is not what was written; put it back, or remove its last line, which "
                "says so, if you have changed rounds, checkpoint or tracking"
            )
        then = {code.name: code for code in self.imports}
        for source in code_named(config):
            if code_name(source) not in then:
                raise SartorError(f"{self.path / ENVIRONMENT}: does not say which {code_name(source)} it was")
            import_again(then.pop(code_name(source)), str(self.path))
        for package in then.values():  # which added to Sartor by an entry point
            import_again(package, str(self.path))
        return from_mapping(config)

    @property
    def imports(self) -> tuple[Code, ...]:
        """The code that the run was made with."""
        try:
            return tuple(Code(**entry) for entry in self.environment.get("imports", ()))
        except TypeError:
            raise SartorError(f"{self.path / ENVIRONMENT}: damaged, in imports") from None

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform and device of the run."""
        return self._read_object(ENVIRONMENT)

    @property
    def summary(self) -> dict[str, Any]:
        """The result of a finished run."""
        summary = self._read_object(SUMMARY)
        if not is_whole(self._read_text(SUMMARY).encode()):
            raise SartorError(f"{self.path / SUMMARY}: damaged, its seal does not fit; {self._anew()}")
        return {key: value for key, value in summary.items() if key != KEY}

    @property
    def signature(self) -> dict[str, Any]:
        """What the model takes and gives, as it was stored."""
        return self._read_object(SIGNATURE)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / SUMMARY).is_file()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One dict per round; none before the first round has ended."""
        rows = []
        for number, row in self._numbered_rounds():
            if row is None:
                again = "" if self.finished else "`sartor resume` makes it again if it can, or "
                raise SartorError(
                    f"{self.path / ROUNDS}, line {number}: damaged, or not the line of the next round; "
                    f"{again}{self._anew()}"
                )
            rows.append(row)
        told = self.summary.get("rounds") if self.finished else None
        if told not in (None, rows[-1]["round"] if rows else 0):
            raise SartorError(f"{self.path / ROUNDS}: its last rows are missing; {self._anew()}")
        return rows

    def _numbered_rounds(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """The lines with their numbers, as the rows that follow each other; None for one that does not."""
        path, last = self.path / ROUNDS, None
        if not path.exists():
            return
        *lines, _ = self._read_bytes(ROUNDS).split(b"\n")  # what has no newline behind it was cut off
        for number, line in enumerate(lines, start=1):
            row = _row(line)
            # After an earlier run of no rounds there is a row 0; else rounds count from 1 without a gap.
            if row is None or row.get("round") not in ((0, 1) if last is None else (last + 1,)):
                yield number, None
                return
            last = row["round"]
            yield number, row

    @property
    def participants(self) -> dict[int, list[int]]:
        """Round -> the numbers of the clients whose answers it used."""
        return by_round(self.rounds)

    @property
    def clients(self) -> dict[str, list[Any]]:
        """Column -> values, a row per client and evaluation; ready for a data frame."""
        table = self._client_table()
        if table is None:
            return {}
        columns: dict[str, list[Any]] = table.to_pydict()
        return columns

    def _client_table(self) -> arrow.Table | None:
        """All client rows, of every evaluation that the rounds tell of."""
        table = self._stored_clients()
        self._check_clients(table, (row for _, row in self._numbered_rounds() if row is not None))
        return table

    def _stored_clients(self) -> arrow.Table | None:
        """The client rows that are whole. A growing file holds them all, whether or not there is another."""
        if (self.path / GROWING_CLIENTS).exists():
            tables = list(_streams(self._read_bytes(GROWING_CLIENTS)))
            return _joined(tables) if tables else None
        if not (self.path / CLIENTS).exists():
            return None
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        content = self._read_bytes(CLIENTS)
        if not is_whole(content):
            raise SartorError(f"{self.path / CLIENTS}: damaged, its seal does not fit; {self._anew()}")
        try:
            # Threads of Arrow's that are still being made when Python ends abort it, if torch was imported.
            table = parquet.ParquetFile(arrow.BufferReader(content)).read(use_threads=False)
            return table.replace_schema_metadata(None)
        except (OSError, arrow.ArrowException) as error:
            raise SartorError(f"{self.path / CLIENTS}: damaged or not readable: {error}") from None

    def _check_clients(self, table: arrow.Table | None, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse client rows that lack an evaluation which the rounds tell of."""
        there = set() if table is None else set(table["round"].unique().to_pylist())
        missing = next(
            (row["round"] for row in rows if "evaluation" in row and row["round"] not in there), None
        )
        if missing is not None:
            name = GROWING_CLIENTS if (self.path / GROWING_CLIENTS).exists() else CLIENTS
            raise SartorError(
                f"{self.path / name}: the rows of round {missing} are missing or damaged; {self._anew()}"
            )

    def _anew(self) -> str:
        return f"run it anew: sartor run {self.path / CONFIG}"

    @property
    def models(self) -> dict[str, torch.Tensor]:
        """The stored tensors by name."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / MODELS
        expected = self.summary.get("model_sha256") if self.finished else None
        if not path.is_file():
            raise SartorError(f"{path}: this run has stored no models")
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SartorError(f"{path}: damaged or not readable: {error}") from None
        if expected not in (None, hash_of(tensors)):
            raise SartorError(f"{path}: damaged, its checksum is not that of {SUMMARY}; {self._anew()}")
        return tensors

    def _read_text(self, name: str) -> str:
        """A text file of the folder."""
        try:
            return self._read_bytes(name).decode()
        except UnicodeDecodeError:
            raise SartorError(f"{self.path / name}: damaged, it is not UTF-8 text") from None

    def _read_bytes(self, name: str) -> bytes:
        """A file of the folder."""
        path = self.path / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            hint = "; the run has not finished" if name == SUMMARY else ""
            raise SartorError(f"{path}: missing{hint}") from None
        except OSError as error:
            raise SartorError(f"{path}: cannot be read: {error.strerror or error}") from None

    def _read_object(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder that holds one object."""
        return _parsed(self._read_text(name), str(self.path / name))

    def _store(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        write(self.path / name, content)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """A path to write to; what is there at the end is moved to ``name`` in one step."""
        path = self.path / name
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as temporary:
                yield temporary


def identity(config: Mapping[str, Any]) -> str:
    """The sha256 of a stored experiment without what may change when it is continued."""
    changing = ("rounds", "checkpoint", "tracking")
    lasting = {key: value for key, value in config.items() if key not in changing}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode()).hexdigest()


def _default_folders(experiment: Experiment) -> Iterator[Path]:
    """The folders for a run that was given none, in the order they are taken."""
    own = experiment.data.path
    data = experiment.data.name if own is None else Path(function_file(own) or own).resolve().stem or "own"
    name = f"{experiment.algorithm}-{data}-s{experiment.seed}-{fingerprint(experiment)[:8]}"
    yield Path("runs") / name
    for number in itertools.count(2):
        yield Path("runs") / f"{name}-{number}"


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a run's numbers and times may depend on besides the experiment."""
    return {
        **{package: _version(package) for package in ("sartor", "torch", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "device": device,
        "device_name": _device_name(device),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def to_json(value: Any) -> str:
    """One line of strict JSON; a number that is not finite becomes null, arrays and tensors become lists."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Store a JSON file that belongs to no run, whole or not at all; makes its folder."""
    write_text(path, _json_bytes(value).decode())


def write_text(path: Path, text: str) -> None:
    """Store a text file that belongs to no run, whole or not at all; makes its folder."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text.encode())


def _json_bytes(value: Any) -> bytes:
    """JSON for a file of its own, indented to be read."""
    return (json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=2) + "\n").encode()


def _plain(value: Any) -> Any:
    """A value in JSON's types."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _plain(value.tolist())
    raise TypeError(f"cannot store a {type(value).__name__} as JSON")


def _parsed(text: str, place: str) -> dict[str, Any]:
    """A JSON object, or an error that names the place."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SartorError(f"{place}: damaged JSON: {error}") from None
    if not isinstance(value, dict):
        raise SartorError(f"{place}: damaged, expected a JSON object")
    return value


def _line(row: Mapping[str, Any]) -> bytes:
    """A row as a sealed line."""
    return sealed((to_json({**row, KEY: BLANK}) + "\n").encode())


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line, without its seal; None if it is not what was written."""
    if not is_whole(line + b"\n"):
        return None
    row = _parsed(line.decode(), ROUNDS)
    del row[KEY]
    return row


def _table(columns: Mapping[str, Any]) -> arrow.Table:
    """An Arrow table of columns given as sequences, arrays, tensors, or single values to repeat."""
    import numpy as np
    import pyarrow as arrow

    host = {
        name: column.cpu().numpy() if hasattr(column, "cpu") else column for name, column in columns.items()
    }
    lengths = {name: len(column) for name, column in host.items() if np.ndim(column)}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"client columns must be equally long, got {lengths}")
    rows = next(iter(lengths.values()))
    return arrow.table(
        {name: column if name in lengths else arrow.repeat(column, rows) for name, column in host.items()}
    )


def _joined(tables: Sequence[arrow.Table]) -> arrow.Table:
    """All tables below each other, over the union of their columns."""
    import pyarrow as arrow

    return arrow.concat_tables(tables, promote_options="permissive")


def separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the host, none sharing memory with another, as the file format wants them."""
    separate: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        separate[name] = tensor
    return separate


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of names, types, shapes and values: equal hashes are equal to the bit."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> Any:
    """The values of a tensor one after the other in memory, of any type and however it lies."""
    import torch

    if tensor.dtype is torch.bfloat16:  # numpy has no such type
        tensor = tensor.detach().view(torch.int16)
    return tensor.numpy(force=True).ravel()


def _stream(table: arrow.Table) -> bytes:
    """A table as a sealed stream that can stand behind others in a file."""
    import pyarrow as arrow

    table = table.replace_schema_metadata({KEY: BLANK})
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sealed(sink.getvalue().to_pybytes(), first=True)


def _streams(content: bytes) -> Iterator[arrow.Table]:
    """The tables of streams behind each other, up to one that was cut off or is damaged."""
    import pyarrow as arrow

    file, begin = arrow.BufferReader(content), 0
    while begin < len(content):
        try:
            table = arrow.ipc.open_stream(file).read_all()
        except (OSError, ValueError, arrow.ArrowException):
            return
        if not is_whole(content[begin : file.tell()], first=True):
            return
        yield table.replace_schema_metadata(None)
        begin = file.tell()


def _parquet(table: arrow.Table) -> bytes:
    """A table as a sealed Parquet file."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    sink = arrow.BufferOutputStream()
    with parquet.ParquetWriter(sink, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({KEY: BLANK})
    return sealed(sink.getvalue().to_pybytes())


def _append(file: IO[bytes], content: bytes) -> None:
    """Write at the end of a file, all or nothing."""
    before = file.seek(0, os.SEEK_END)
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(before)
        raise


@functools.cache
def _version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source folder
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


@functools.cache
def _device_name(device: str) -> str:
    """The name of the device that trains."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _sealed_config(text: str) -> bytes:
    """The text of an experiment with its seal as a comment behind it, in place of one that it had."""
    return sealed(f"{text.partition(SEAL_LINE)[0].rstrip()}\n{SEAL_LINE}{BLANK}\n".encode())
