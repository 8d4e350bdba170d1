"""Checkpoints: the complete state of a run on disk, from which it continues to the same numbers.

A checkpoint is one file, ``checkpoints/round-000012.safetensors`` in the run folder. Its tensors are those of
the server's state and of the federation; a JSON text beside them holds everything else: how the tensors fit
together, the round, and which experiment and data it belongs to. Randomness follows from the seed, so there
are no generators to save. The file is complete or not there, its checksum tells damage, and the last two are
kept.

Where several processes share a run, each stores the states of the clients at home there in a part beside that
file, ``round-000000012.1-of-4.part``. The file itself is written last, by the first process, and names the
parts by their checksums: without it they are no checkpoint. Any number of processes can continue from it.

The server's state is rebuilt from a description of its structure. Only classes that the algorithm itself
knows are made: a checkpoint is data, it never decides what is imported or called.

>>> structure, tensors = pack({"w": torch.ones(2), "losses": (0.5, float("inf"))}, "server")
>>> list(tensors)
['server.w']
>>> unpack(structure, tensors, {}, torch.device("cpu"))
{'w': tensor([1., 1.]), 'losses': (0.5, inf)}
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sartor.engines import sharded as distributed
from sartor.errors import SartorError
from sartor.federation.homes import Homes
from sartor.federation.states import STATES, states_in
from sartor.files import writing
from sartor.runs.record import RunFolder, hash_of, identity

log = logging.getLogger(__name__)

FORMAT = 2
FOLDER = "checkpoints"
KEPT = 2


class _Damaged(Exception):
    """A file that cannot be what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round."""

    round: int
    seconds: float
    """How long the run had taken."""
    data: str
    """The hash of the data and its partition."""
    structure: dict[str, Any]
    tensors: dict[str, Tensor]
    """All but the states of clients, which are read when they are wanted."""
    path: Path = Path()
    parts: tuple[str, ...] = ("",)
    """The checksum of each home's part; the first is in the file itself, and others may be missing."""

    def server(self, algorithm: Any, template: Any, device: torch.device) -> Any:
        """The server's state; ``template`` is what the algorithm starts from."""
        known = known_classes(algorithm, template)
        try:
            return unpack(self.structure["server"], self.tensors, known, device)
        except KeyError as error:
            raise SartorError(
                f"{algorithm.name}: the checkpoint of round {self.round} has {error} in the server's state, "
                "which this version of the method does not know; continue with the version that began the run"
            ) from None

    def federation(self, device: torch.device) -> dict[str, Any]:
        """What :meth:`Federation.restore` takes."""
        restored: dict[str, Any] = unpack(self.structure["federation"], self.tensors, {}, device)
        return restored

    def states(self, homes: Homes) -> Iterator[dict[str, Tensor]]:
        """What was saved of the clients' states, home by home; those alone that have clients at home here."""
        ranks = len(self.parts)
        for rank in range(ranks) if homes.ranks != ranks else (homes.rank,):
            if not rank or self.parts[rank]:
                with safe_open(self.part(rank), framework="pt") as file:
                    yield states_in(_Stored(file, filter(_is_state, file.keys())))

    def part(self, rank: int) -> Path:
        """The file that holds the states of the clients at home at a rank."""
        return self.path.with_name(_part_name(self.round, rank, len(self.parts))) if rank else self.path

    def check_parts(self, ranks: Iterable[int]) -> None:
        """Compare these parts with their checksums."""
        for rank in ranks:
            if self.parts[rank] and _file_checksum(self.part(rank)) != self.parts[rank]:
                raise _Damaged(f"{self.part(rank).name} is not what was written")


def save(
    folder: RunFolder,
    *,
    round: int,
    seconds: float,
    data: str,
    server: Any,
    federation: Mapping[str, Any],
    homes: Homes | None = None,
) -> None:
    """Store the state of a run after a round; of the older checkpoints one stays.

    All processes of the run do this together: each stores what is at home there.
    """
    states = {name: value for name, value in federation.items() if _is_state(name)}
    rest = {name: value for name, value in federation.items() if not _is_state(name)}
    homes = homes or Homes(0)
    parts = [""]
    if homes.ranks > 1:
        parts = distributed.all_said(distributed.together(lambda: _save_part(folder, round, states, homes)))

    def seal() -> None:
        content = {"round": round, "seconds": seconds, "data": data, "parts": parts}
        _seal(folder, content, {"server": server, "federation": rest}, states)

    distributed.together(seal if distributed.rank() == 0 else lambda: None)


def _save_part(folder: RunFolder, round: int, states: Mapping[str, Tensor], homes: Homes) -> str:
    """Store the states at home here; the checksum of their file. Those of the first are in the checkpoint."""
    if not homes.rank or not states:
        return ""
    name = f"{FOLDER}/{_part_name(round, homes.rank, homes.ranks)}"
    folder.write_tensors(name, states)
    return _file_checksum(folder.path / name)


def _seal(
    folder: RunFolder, content: dict[str, Any], values: Mapping[str, Any], states: Mapping[str, Tensor]
) -> None:
    """Write the file without which there is no checkpoint; of the older ones the last stays."""
    structure, tensors = {}, dict(states)
    for name, value in values.items():
        structure[name], own = pack(value, name)
        tensors.update(own)
    content = {
        **content,
        "experiment": identity(folder.config),
        "structure": structure,
    }
    text = json.dumps(content, allow_nan=False)
    folder.sync()  # the rows of these rounds are there before the checkpoint that counts on them
    metadata = {"format": str(FORMAT), "content": text, "sha256": _checksum(text, tensors)}
    folder.write_tensors(f"{FOLDER}/{_name(content['round'])}", tensors, metadata)
    for path in paths(folder)[KEPT:]:
        path.unlink(missing_ok=True)
    for path in _orphans(folder):
        path.unlink(missing_ok=True)


def latest(folder: RunFolder) -> Checkpoint | None:
    """The last checkpoint that is whole, or None before the first.

    Damaged ones are passed over with a warning; one of another experiment or of a newer version is refused.
    """
    found = paths(folder)
    for path in found:
        read, damage = None, None
        try:
            read = _read(path, identity(folder.config))
            # Each process looks at some of the parts, and all of them take the same checkpoint.
            read.check_parts(range(distributed.rank(), len(read.parts), distributed.world()))
        except _Damaged as error:
            damage = str(error)
        damage = distributed.first_said(damage)
        if damage is None:
            return read
        log.warning("%s: damaged (%s); taking the checkpoint before it", path, damage)
    if found:
        raise SartorError(
            f"{folder.path / FOLDER}: every checkpoint is damaged; "
            f"run it anew: sartor run {folder.path / 'config.toml'}"
        )
    return None


def forget_after(folder: RunFolder, round: int) -> None:
    """Remove the checkpoints after a round: the run continues from there."""
    for path in paths(folder):
        if path.name > _name(round):
            with writing(path):
                path.unlink()
    for path in _orphans(folder):
        with writing(path):
            path.unlink()


def paths(folder: RunFolder) -> list[Path]:
    """The checkpoints of a run, the last first."""
    return sorted((folder.path / FOLDER).glob("round-*.safetensors"), reverse=True)


def _orphans(folder: RunFolder) -> list[Path]:
    """The parts that belong to no checkpoint."""
    whole = {path.stem for path in paths(folder)}
    return [
        path for path in (folder.path / FOLDER).glob("round-*.part") if path.name.split(".")[0] not in whole
    ]


def _name(round: int) -> str:
    return f"round-{round:09d}.safetensors"


def _part_name(round: int, rank: int, ranks: int) -> str:
    return f"round-{round:09d}.{rank}-of-{ranks}.part"


def _is_state(name: str) -> bool:
    return name.startswith(STATES)


class _Stored(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for.

    They are copies: the file's own memory is not aligned as PyTorch aligns it, which can change last bits.
    """

    def __init__(self, file: Any, names: Iterable[str]) -> None:
        self._file, self._names = file, tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name).clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _file_checksum(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    except OSError as error:
        raise _Damaged(f"{path.name}: {error.strerror}") from None
    return digest.hexdigest()


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(f"{hash_of(tensors)} {text}".encode()).hexdigest()


def _read(path: Path, experiment: str) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            version = metadata.get("format", "")
            if version.isdecimal() and int(version) > FORMAT:
                raise SartorError(
                    f"{path}: of a newer Sartor (format {version}, this one reads {FORMAT}); "
                    "install that version to continue the run"
                )
            stored, text = _Stored(file, file.keys()), metadata["content"]
            if _checksum(text, stored) != metadata["sha256"]:
                raise _Damaged("its checksum does not fit")
            tensors = {name: stored[name] for name in stored if not _is_state(name)}
        content = json.loads(text)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _Damaged(str(error) or type(error).__name__) from None
    if content["experiment"] != experiment:
        raise SartorError(
            f"{path}: of another experiment than config.toml describes; put back the settings "
            "that the run was started with (the number of rounds may change)"
        )
    return Checkpoint(
        content["round"],
        content["seconds"],
        content["data"],
        content["structure"],
        tensors,
        path,
        tuple(content.get("parts", [""])),
    )


# A value as JSON and tensors ------------------------------------------------------------------------------


def pack(value: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """A value of dataclasses, dicts, lists, tuples, tensors, arrays and plain values as JSON and tensors."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, name, tensors), tensors


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Tensor):
        return {"tensor": _put(value.detach(), name, tensors), **_layout(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: _put(torch.from_numpy(np.array(value, order="C")), name, tensors)}
    if type(value) is dict:
        return {
            "dict": [
                [_pack(key, f"{name}.key", tensors), _pack(entry, f"{name}.{key}", tensors)]
                for key, entry in value.items()
            ]
        }
    if type(value) in (list, tuple):
        kind = "list" if type(value) is list else "tuple"
        return {kind: [_pack(entry, f"{name}.{place}", tensors) for place, entry in enumerate(value)]}
    if is_record(value):
        parts = {field: _pack(getattr(value, field), f"{name}.{field}", tensors) for field in _fields(value)}
        return {"class": _class_name(type(value)), "fields": parts}
    raise SartorError(
        f"{name}: a checkpoint cannot hold a {type(value).__name__}; use dataclasses, dicts, lists, tuples, "
        "tensors, arrays, numbers and texts"
    )


def unpack(
    structure: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, type], device: torch.device
) -> Any:
    """The value that :func:`pack` took apart; of classes only these are made, another is a KeyError."""

    def made(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "float" in part:
            return float(part["float"])
        if "tensor" in part:
            return _placed(tensors[part["tensor"]], part, device)
        if "array" in part:
            return tensors[part["array"]].numpy().copy()
        if "number" in part:
            return tensors[part["number"]].numpy()[()]
        if "dict" in part:
            return {made(key): made(entry) for key, entry in part["dict"]}
        if "list" in part:
            return [made(entry) for entry in part["list"]]
        if "tuple" in part:
            return tuple(made(entry) for entry in part["tuple"])
        return _instance(
            classes[part["class"]], {name: made(entry) for name, entry in part["fields"].items()}
        )

    return made(structure)


def is_record(value: Any) -> bool:
    """Whether a value is an instance with named fields: of a dataclass or a named tuple."""
    return (is_dataclass(value) and not isinstance(value, type)) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )


def known_classes(algorithm: Any, template: Any) -> dict[str, type]:
    """The classes a server's state may have: those of its first state and of the algorithm's modules."""
    classes = set(_classes_of(template))
    for cls in type(algorithm).__mro__[:-1]:
        for value in vars(sys.modules.get(cls.__module__, object)).values():
            if isinstance(value, type) and (is_dataclass(value) or hasattr(value, "_fields")):
                classes.add(value)
    return {_class_name(cls): cls for cls in classes}


def _classes_of(value: Any) -> Iterator[type]:
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from _classes_of(entry)
    elif is_record(value):
        yield type(value)
        for field in _fields(value):
            yield from _classes_of(getattr(value, field))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _classes_of(entry)


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _fields(value: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(value)) if is_dataclass(value) else tuple(value._fields)


def _instance(cls: type, values: dict[str, Any]) -> Any:
    """An instance with these fields, as it was: nothing of the class is run that could change them."""
    if not is_dataclass(cls):
        return cls(**values)
    expected = {field.name for field in fields(cls)}
    if expected != set(values):
        raise KeyError(f"{_class_name(cls)} with {', '.join(sorted(expected ^ set(values)))}")
    instance = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _put(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under its name, or one like it where that is taken."""
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _layout(tensor: Tensor) -> dict[str, Any]:
    """Where a tensor lies: its device, and in memory where that is not one row after the other.

    Products over a matrix are added in an order that depends on how it lies, so last bits do too.
    """
    placed: dict[str, Any] = {} if tensor.device.type == "cpu" else {"on": "device"}
    offset = tensor.storage_offset() % 64  # memory is aligned to 64 bytes
    if offset or not tensor.is_contiguous():
        placed["stride"], placed["offset"] = list(tensor.stride()), offset
    return placed


def _placed(stored: Tensor, part: Mapping[str, Any], device: torch.device) -> Tensor:
    """A stored tensor where it lay."""
    target = device if part.get("on") else torch.device("cpu")
    if "stride" not in part:
        return stored.to(target, copy=True)
    stride, offset, shape = part["stride"], part["offset"], stored.shape
    reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    memory = stored.new_empty(max(reach, offset) if stored.numel() else offset, device=target)
    # Along an expanded dimension, of stride 0, all entries are one.
    single = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    values = stored[tuple(slice(size) for size in single)]
    memory.as_strided(single, stride, offset).copy_(values)
    return memory.as_strided(shape, stride, offset)
