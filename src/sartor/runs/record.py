"""A run folder: the only place that knows what a run stores, and under which names.

==================  ==================================================================================
config.toml         the experiment, every setting written out
environment.json    versions, platform, device, the time the run started, and the hashes of imported code
partition.npz       which client holds which samples, where the data was partitioned
rounds.jsonl        one line per round, written as the run goes
clients.parquet     one row per client and evaluation
summary.json        the result; written last, so a folder that has one is of a finished run
models.safetensors  the final models
checkpoints/        the last states of the run, to continue from; see :mod:`sartor.runs.checkpoint`
clients.arrow       the client rows while the run goes on, until ``clients.parquet`` is written
states/             client states that are too large for memory
==================  ==================================================================================

Files are written beside their place and moved there once complete, so a file that exists is whole; only
``rounds.jsonl`` and ``clients.arrow`` grow in place, and an end cut off by a crash is left out when they are
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from sartor.errors import SartorError
from sartor.extensions import Code, code_name, function_file, import_again
from sartor.files import leftovers, replacing, sync, write, writing
from sartor.runs.experiment import (
    Experiment,
    code_named,
    code_of,
    fingerprint,
    from_mapping,
    read_toml,
    to_toml,
)
from sartor.runs.participation import by_round

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    import pyarrow as arrow
    import torch

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
PARTITION = "partition.npz"
ROUNDS = "rounds.jsonl"
CLIENTS = "clients.parquet"
SUMMARY = "summary.json"
MODELS = "models.safetensors"
GROWING_CLIENTS = "clients.arrow"
STATES = "states"
"""The folder of client states that are too large for memory."""
FILES = (CONFIG, ENVIRONMENT, PARTITION, ROUNDS, CLIENTS, SUMMARY, MODELS)


class RunFolder:
    """The folder of one run, for writing (:meth:`create`) or for reading (:meth:`open`).

    While writing it is a context manager: on leaving, also by an error or an interruption, the rows kept so
    far are on disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds: IO[bytes] | None = None

    @classmethod
    def create(cls, path: Path | str | None, experiment: Experiment) -> RunFolder:
        """A new folder with the experiment and the environment in it; no folder of another run is touched.

        Without a path it is ``runs/<algorithm>-<data>-s<seed>-<fingerprint>`` under the current folder, with
        a number behind it where that is taken.
        """
        folder = cls._claim(experiment) if path is None else cls._take(Path(path))
        run = cls(folder)
        run._store(CONFIG, to_toml(experiment).encode())
        imports = [asdict(code) for code in code_of(experiment)]
        run._store(ENVIRONMENT, _json_bytes({**environment(experiment.engine.device), "imports": imports}))
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The folder of an earlier run, to read from."""
        folder = Path(path)
        if not folder.is_dir():
            raise SartorError(f"{folder}: no such run folder")
        if not (folder / CONFIG).is_file():
            raise SartorError(f"{folder}: not a run folder, it has no {CONFIG}")
        return cls(folder)

    @staticmethod
    def _claim(experiment: Experiment) -> Path:
        """Make the first free default folder; making it is what claims it, so two runs never share one."""
        own = experiment.data.path
        data = (
            experiment.data.name if own is None else Path(function_file(own) or own).resolve().stem or "own"
        )
        name = f"{experiment.algorithm}-{data}-s{experiment.seed}-{fingerprint(experiment)[:8]}"
        folder, number = Path("runs") / name, 1
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    folder.mkdir()
                    return folder
                except FileExistsError:
                    number += 1
                    folder = folder.with_name(f"{name}-{number}")

    @staticmethod
    def _take(folder: Path) -> Path:
        """Make the folder asked for, or use it if no run is in it."""
        with writing(folder):
            if folder.exists() and not folder.is_dir():
                raise SartorError(f"{folder}: is a file; give a folder that does not exist yet")
            folder.mkdir(parents=True, exist_ok=True)
            held = next((name for name in FILES if (folder / name).exists()), None)
            if held is None:
                try:
                    (folder / CONFIG).touch(exist_ok=False)  # claims it: of two runs at once, one fails here
                    return folder
                except FileExistsError:
                    held = CONFIG
            raise SartorError(f"{folder}: already holds a run ({held}); give another folder or remove it")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process continue this run meanwhile; the system undoes it when a process is killed."""
        if sys.platform == "win32":  # a folder cannot be locked there
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SartorError(
                    f"{self.path}: another process is at this run; wait for it or stop it"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(handle)

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
            _append(self._rounds, (to_json(row) + "\n").encode())

    def add_clients(self, columns: Mapping[str, Any]) -> None:
        """Keep the rows of one evaluation: column -> a value per client, or one value for all of them.

        A column that is missing in some evaluations is empty there. The rows are in a file when this
        returns: every evaluation a stream of its own, one behind the other.
        """
        content = _stream(_table(columns))
        path = self.path / GROWING_CLIENTS
        if not path.exists() and (earlier := self._client_table()) is not None:
            self._store(GROWING_CLIENTS, _stream(earlier))
        with writing(path), open(path, "ab", buffering=0) as file:
            _append(file, content)

    def write_clients(self) -> None:
        """Put all client rows kept so far into their final file."""
        growing = self.path / GROWING_CLIENTS
        if not growing.exists():
            return
        import pyarrow.parquet as parquet

        tables = _streams(growing)
        if tables:
            with self._replacing(CLIENTS) as temporary:
                parquet.write_table(_joined(tables), temporary)
        growing.unlink()

    def sync(self) -> None:
        """Have the rows written so far on the disk, not only with the system: a checkpoint relies on them."""
        for name in (ROUNDS, GROWING_CLIENTS):
            with writing(self.path / name), contextlib.suppress(FileNotFoundError):
                sync(self.path / name)

    def cut(self, round: int) -> None:
        """Forget the rows of all rounds after this one, and what an interruption left half written."""
        for leftover in leftovers(self.path):
            leftover.unlink()
        lines: list[str] = []
        last = None
        if round >= 0 and (self.path / ROUNDS).exists():
            whole = self._read_text(ROUNDS).split("\n")[:-1]
            for number, line in enumerate(whole, start=1):
                row = _parsed(line, f"{self.path / ROUNDS}, line {number}")
                # After an earlier run of no rounds there is a row 0; else rounds count from 1 without a gap.
                if row.get("round") not in ((0, 1) if last is None else (last + 1,)) or row["round"] > round:
                    break
                last = row["round"]
                lines.append(line + "\n")
                if last == round:
                    break  # what follows may be damaged, it is not needed
        if round > 0 and last != round:
            raise SartorError(
                f"{self.path / ROUNDS}: the row of round {(last or 0) + 1} is missing or damaged; "
                f"run it anew: sartor run {self.path / CONFIG}"
            )
        self._store(ROUNDS, "".join(lines).encode())
        self._cut_clients(round)

    def _cut_clients(self, round: int) -> None:
        """Client rows up to a round, in the growing file, from where they were."""
        import pyarrow.compute as compute

        table = self._client_table()
        if table is not None:
            table = table.filter(compute.less_equal(table["round"], round))
            if len(table):
                self._store(GROWING_CLIENTS, _stream(table))
            else:
                (self.path / GROWING_CLIENTS).unlink(missing_ok=True)
        (self.path / CLIENTS).unlink(missing_ok=True)

    def extend(self, rounds: int) -> None:
        """Make it an unfinished run of so many rounds, all else as it was."""
        content = self._read_text(CONFIG)
        (self.path / SUMMARY).unlink(missing_ok=True)
        self._store(CONFIG, re.sub(r"(?m)^rounds = \d+$", f"rounds = {rounds}", content, count=1).encode())

    def withdraw(self) -> None:
        """Take back what :meth:`create` made, of a run that was refused before its first round."""
        with contextlib.suppress(OSError):  # what is not ours stays
            for name in FILES:
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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the result; the last thing a run does."""
        self._store(SUMMARY, _json_bytes(summary))

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
        then = {code.name: code for code in self.imports}
        for source in code_named(config):
            if code_name(source) not in then:
                raise SartorError(f"{self.path / ENVIRONMENT}: does not say which {code_name(source)} it was")
            import_again(then[code_name(source)], str(self.path))
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
        return self._read_object(SUMMARY)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / SUMMARY).is_file()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One dict per round; none before the first round has ended."""
        path = self.path / ROUNDS
        if not path.exists():
            return []
        rows = []
        *lines, tail = self._read_text(ROUNDS).split(
            "\n"
        )  # a whole line ends in a newline: the rest was cut off
        del tail
        for number, line in enumerate(lines, start=1):
            rows.append(_parsed(line, f"{path}, line {number}"))
        return rows

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
        """All client rows. A growing file holds them all, whether or not the final one is there too."""
        if (self.path / GROWING_CLIENTS).exists():
            tables = _streams(self.path / GROWING_CLIENTS)
            return _joined(tables) if tables else None
        if not (self.path / CLIENTS).exists():
            return None
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        try:
            return parquet.read_table(self.path / CLIENTS)
        except (OSError, arrow.ArrowException) as error:
            raise SartorError(f"{self.path / CLIENTS}: damaged or not readable: {error}") from None

    @property
    def models(self) -> dict[str, torch.Tensor]:
        """The stored tensors by name."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / MODELS
        if not path.is_file():
            raise SartorError(f"{path}: this run has stored no models")
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SartorError(f"{path}: damaged or not readable: {error}") from None
        return tensors

    def _read_text(self, name: str) -> str:
        """A text file of the folder."""
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            hint = "; the run has not finished" if name == SUMMARY else ""
            raise SartorError(f"{path}: missing{hint}") from None
        except UnicodeDecodeError:
            raise SartorError(f"{path}: damaged, it is not UTF-8 text") from None
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


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a run's numbers and times may depend on besides the experiment."""
    return {
        **{package: _version(package) for package in ("sartor", "torch", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "device": device,
        "device_name": _device_name(device),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
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
    """A table as a stream that can stand behind others in a file."""
    import pyarrow as arrow

    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _streams(path: Path) -> list[arrow.Table]:
    """The tables in a file of streams, up to where a crash cut it off."""
    import pyarrow as arrow

    tables = []
    with arrow.OSFile(str(path)) as file:
        while file.tell() < file.size():
            try:
                tables.append(arrow.ipc.open_stream(file).read_all())
            except (OSError, arrow.ArrowException):
                break
    return tables


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


def _version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source folder
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


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
