"""A run folder: the only place that knows what a run stores, and under which names.

==================  ==================================================================================
config.toml         the experiment, every setting written out
environment.json    versions, platform, device and the time the run started
partition.npz       which client holds which samples, where the data was partitioned
rounds.jsonl        one line per round, written as the run goes
clients.parquet     one row per client and evaluation
summary.json        the result; written last, so a folder that has one is of a finished run
models.safetensors  the final models
==================  ==================================================================================

Files are written beside their place and moved there once complete, so a file that exists is whole; only
``rounds.jsonl`` grows in place, and a last line cut off by a crash is left out when it is read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from sartor.errors import SartorError
from sartor.experiment import Experiment, fingerprint, load, read_toml, to_toml

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
FILES = (CONFIG, ENVIRONMENT, PARTITION, ROUNDS, CLIENTS, SUMMARY, MODELS)


class RunFolder:
    """The folder of one run, for writing (:meth:`create`) or for reading (:meth:`open`).

    While writing it is a context manager: on leaving, also by an error or an interruption, the rows kept so
    far are on disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds: IO[str] | None = None
        self._tables: list[arrow.Table] = []
        self._tables_written = 0

    @classmethod
    def create(cls, path: Path | str | None, experiment: Experiment) -> RunFolder:
        """A new folder with the experiment and the environment in it; no folder of another run is touched.

        Without a path it is ``runs/<algorithm>-<data>-s<seed>-<fingerprint>`` under the current folder, with
        a number behind it where that is taken.
        """
        folder = cls._claim(experiment) if path is None else cls._take(Path(path))
        run = cls(folder)
        run._store(CONFIG, to_toml(experiment).encode())
        run._store(ENVIRONMENT, _json_bytes(environment(experiment.engine.device)))
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
        data = experiment.data.name if own is None else Path(own).resolve().stem or "own"
        name = f"{experiment.algorithm}-{data}-s{experiment.seed}-{fingerprint(experiment)[:8]}"
        folder, number = Path("runs") / name, 1
        with _writing(folder):
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
        with _writing(folder):
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
            with _writing(self.path / ROUNDS):
                rounds.close()
        self.write_clients()

    def add_round(self, row: Mapping[str, Any]) -> None:
        """Append one round; it is in the file when this returns."""
        with _writing(self.path / ROUNDS):
            if self._rounds is None:
                self._rounds = open(self.path / ROUNDS, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
            self._rounds.write(to_json(row) + "\n")
            self._rounds.flush()

    def add_clients(self, columns: Mapping[str, Any]) -> None:
        """Keep the rows of one evaluation: column -> a value per client, or one value for all of them.

        A column that is missing in some evaluations is empty there.
        """
        self._tables.append(_table(columns))

    def write_clients(self) -> None:
        """Put all client rows kept so far on disk."""
        if len(self._tables) == self._tables_written:
            return
        import pyarrow.parquet as parquet

        self._tables = [_joined(self._tables)]
        with self._replacing(CLIENTS) as temporary:
            parquet.write_table(self._tables[0], temporary)
        self._tables_written = 1

    def write_partition(self, partition: Any) -> None:
        """Store which client holds which samples, a :class:`sartor.data.partitions.Partition`."""
        with self._replacing(PARTITION) as temporary:
            partition.save(temporary)

    def write_models(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store named tensors."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with self._replacing(MODELS) as temporary:
            try:
                save_file(_separate(tensors), temporary)
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
        """The experiment, checked against today's settings."""
        return load(self.path / CONFIG)

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
    def clients(self) -> dict[str, list[Any]]:
        """Column -> values, a row per client and evaluation; ready for a data frame."""
        if self._tables:
            table = _joined(self._tables)
        elif not (self.path / CLIENTS).exists():
            return {}
        else:
            import pyarrow as arrow
            import pyarrow.parquet as parquet

            try:
                table = parquet.read_table(self.path / CLIENTS)
            except (OSError, arrow.ArrowException) as error:
                raise SartorError(f"{self.path / CLIENTS}: damaged or not readable: {error}") from None
        columns: dict[str, list[Any]] = table.to_pydict()
        return columns

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
        with self._replacing(name) as temporary:
            temporary.write_bytes(content)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """A path to write to; what is there at the end is made durable and moved to ``name`` in one step."""
        # The ending is kept, because numpy adds its own to a name without it.
        path, temporary = self.path / name, self.path / f".unfinished-{name}"
        with _writing(path):
            try:
                yield temporary
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


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


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the disk reports, such as being full, into one clear error."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise SartorError(
            f"{path}: cannot be written: {reason}; free some space or choose another folder"
        ) from None
