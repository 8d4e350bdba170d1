"""A model in use: new rows in, classes with probabilities or numbers out; written to and read from one file.

A file needs no Sartor: ``.pt2`` is a program of ``torch.export``, ``.onnx`` runs wherever ONNX does. Both
take samples after the preprocessing and give what the network puts out; a JSON text inside (``sartor.json``,
or the entry ``sartor`` of the metadata) has the preprocessing, the names of the classes and the model card.
Nothing of anybody's data is in it but what the preprocessing has learned.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sartor import nests
from sartor.errors import SartorError, SettingError
from sartor.files import write
from sartor.model.objectives import MultiLabel, Regression
from sartor.model.task import Task
from sartor.nests import Nest
from sartor.runs.card import card_text
from sartor.runs.record import to_json, write_text
from sartor.runs.signature import Signature

FORMATS = {"torch": ".pt2", "onnx": ".onnx"}
"""What a model is written as, with the ending of the file's name."""
TEXT = "sartor.json"
"""The text that goes with a model, in a ``.pt2`` file."""
PROPERTY = "sartor"
"""The same in the metadata of an ONNX file."""
VERSION = 1
CHUNK = 1024
"""Rows that are predicted at once."""
PROBE = 5
"""Samples that an exported model is tried on."""
TOLERANCE = 1e-4
"""How far what ONNX computes may lie from what PyTorch does, beside the largest output."""


def kind_of(task: Task) -> str:
    """What a task's outputs are: scores of ``classes``, of ``labels``, ``numbers``, or plain ``outputs``."""
    objective = task.objective
    if isinstance(objective, MultiLabel):
        return "labels"
    if isinstance(objective, Regression):
        return "numbers"
    return "classes" if task.classes is not None else "outputs"


@dataclass(frozen=True)
class Predictor:
    """A model in use."""

    signature: Signature
    kind: str
    """What its outputs are; see :func:`kind_of`."""
    card: Mapping[str, Any]
    """What there is to know of it: data, method, settings, metrics."""
    outputs: Callable[[Nest], Any]
    """What the network puts out for samples after the preprocessing."""
    module: Callable[[], nn.Module] | None = None
    """The network itself, which takes what ``arguments`` makes of samples, where it can be exported."""
    arguments: Callable[[Nest], tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def predict(self, table: Any, where: str = "table") -> dict[str, Any]:
        """What the model says of new rows, as columns: ``prediction``, and probabilities where it has such.

        ``table`` is as for :meth:`~sartor.runs.result.Result.predict`.
        """
        x = self.signature.inputs(table, where)
        count = nests.length(x)
        parts = [
            self._outputs(nests.rows(x, slice(begin, begin + CHUNK)), where)
            for begin in range(0, count, CHUNK)
        ]
        outputs = torch.cat(parts) if parts else self._outputs(self.signature.blank(1)[0], where)[:0]
        return self._columns(outputs)

    def _outputs(self, x: Nest, where: str) -> Tensor:
        try:
            with torch.no_grad():
                outputs = self.outputs(x)
        except IndexError as error:
            raise SartorError(
                f"{where}: the model cannot take these samples ({error}); it knows no tokens or categories "
                "beyond those that it was trained with"
            ) from error
        if not isinstance(outputs, Tensor):
            raise SartorError(
                f"the model puts out a {type(outputs).__name__}, not one array; use Result.model instead"
            )
        return outputs

    def _columns(self, outputs: Tensor) -> dict[str, Any]:
        if self.kind == "classes":
            return self._classes(outputs)
        if self.kind == "labels":
            chances = torch.sigmoid(outputs.double())
            names = self._names(outputs.shape[1])
            says = {f"prediction_{name}": (outputs[:, k] > 0).long() for k, name in enumerate(names)}
            likely = {f"probability_{name}": chances[:, k] for k, name in enumerate(names)}
            return {name: value.numpy() for name, value in {**says, **likely}.items()}
        if self.kind == "numbers":
            flat = outputs.flatten(1).double().numpy() if outputs.dim() > 1 else outputs[:, None].numpy()
            names = [""] if flat.shape[1] == 1 else [f"_{k}" for k in range(flat.shape[1])]
            return {f"prediction{name}": flat[:, k] for k, name in enumerate(names)}
        return {"prediction": outputs.numpy()}

    def _classes(self, outputs: Tensor) -> dict[str, Any]:
        if outputs.dim() != 2:  # a class for every pixel or word
            return {"prediction": outputs.argmax(1 if outputs.dim() == 4 else -1).numpy()}
        names, chosen = self._names(outputs.shape[1]), outputs.argmax(1).numpy()
        prediction = chosen if self.signature.labels is None else np.array(names)[chosen]
        chances = torch.softmax(outputs.double(), 1).numpy()
        likely = {f"probability_{name}": chances[:, k] for k, name in enumerate(names)}
        return {"prediction": prediction, **likely}

    def _names(self, count: int) -> list[str]:
        """What outputs are called: the classes, those beyond them by number."""
        known = list(self.signature.labels or ())
        return [*known, *(str(place) for place in range(len(known), count))]

    # Files ----------------------------------------------------------------------------------------

    def save(self, path: Path, format: str | None = None) -> Path:
        """Write the model to one file, whole or not at all, and its card as text beside it.

        ``format`` is ``torch`` or ``onnx``; left out, it follows from the ending of the name.
        """
        format = format or next((name for name, end in FORMATS.items() if path.suffix == end), "torch")
        if format not in FORMATS:
            raise SettingError(f"format = {format!r}: one of {', '.join(FORMATS)}")
        if path.suffix != FORMATS[format]:
            path = path.with_name(path.name + FORMATS[format])
        if path.suffix == ".onnx":
            _need_onnx()
        content = self._torch_bytes() if format == "torch" else self._onnx_bytes()
        write_text(path.with_suffix(".md"), card_text(self.card))
        write(path, content)
        return path

    def _text(self) -> str:
        """All that goes with the network."""
        told = {"version": VERSION, "kind": self.kind, "signature": self.signature.to_mapping()}
        return to_json({**told, "card": self.card})

    def _program(self) -> tuple[torch.export.ExportedProgram, tuple[Tensor, ...], nn.Module]:
        """The network as a program of any number of samples, with made-up samples to try it on."""
        if self.module is None or self.arguments is None:
            raise SartorError("an exported model cannot be exported again; take the run that it is of")
        network = _Leaves(self.module(), list(self.signature.x), self.arguments).eval()
        probe = self._probe()
        batch = torch.export.Dim("batch", min=1)
        shapes = (tuple({0: batch} for _ in probe),)
        try:
            with _quiet(), torch.no_grad():
                program = torch.export.export(network, probe, dynamic_shapes=shapes)
        except Exception as error:  # whatever torch says about this module is the reason
            reason = next(iter(str(error).strip().splitlines()), "")
            raise SartorError(
                f"the model cannot be exported ({type(error).__name__}: {reason}); "
                "Result.model gives the module itself"
            ) from error
        return program, probe, network

    def _probe(self) -> tuple[Tensor, ...]:
        """Made-up samples: numbers around 0, and whole numbers that are 0."""
        generator = torch.Generator().manual_seed(0)
        blank = nests.leaves(self.signature.blank(PROBE)[0])
        return tuple(
            torch.randn(leaf.shape, generator=generator).to(leaf.dtype) if leaf.is_floating_point() else leaf
            for leaf in blank
        )

    def _torch_bytes(self) -> bytes:
        program, _, _ = self._program()
        file = io.BytesIO()
        with _quiet():
            torch.export.save(program, file, extra_files={TEXT: self._text()})
        return file.getvalue()

    def _onnx_bytes(self) -> bytes:
        program, probe, network = self._program()
        try:
            with _quiet():
                made = torch.onnx.export(program, dynamo=True, verbose=False)
            assert made is not None
        except Exception as error:  # as above
            reason = next(iter(str(error).strip().splitlines()), "")
            raise SartorError(
                f"the model cannot be written as ONNX ({type(error).__name__}: {reason}); take --format torch"
            ) from error
        proto = made.model_proto
        entry = proto.metadata_props.add()
        entry.key, entry.value = PROPERTY, self._text()
        content: bytes = proto.SerializeToString()
        run = _session(content)
        for count in (1, PROBE):
            some = tuple(leaf[:count] for leaf in probe)
            with torch.no_grad():
                wanted = network(*some)
            _check_equal(run(some), wanted)
        return content


class _Leaves(nn.Module):
    """A network that takes the leaves of a sample one after the other and gives one tensor."""

    def __init__(self, network: nn.Module, paths: list[str], arguments: Callable[[Nest], Any]) -> None:
        super().__init__()
        self.network, self._paths, self._called_with = network, paths, arguments

    def forward(self, *leaves: Tensor) -> Tensor:
        places, names = self._called_with(nests.built(dict(zip(self._paths, leaves, strict=True)), "x"))
        found = self.network(*places, **names)
        outputs: Tensor = found if isinstance(found, Tensor) else found.logits  # Hugging Face's have such
        return outputs


def load_predictor(path: Path) -> Predictor:
    """A model that was exported, in use again: the file is read, no code of it is executed."""
    if not path.is_file():
        raise SartorError(f"{path}: no such file")
    if path.suffix not in FORMATS.values():
        raise SartorError(
            f"{path}: expected an exported model, whose name ends in {' or '.join(FORMATS.values())}"
        )
    text, outputs = _read_onnx(path) if path.suffix == ".onnx" else _read_torch(path)
    try:
        told = json.loads(text)
        signature, version = told["signature"], told["version"]
    except (ValueError, KeyError, TypeError):
        raise SartorError(f"{path}: holds a model, but not one that Sartor exported") from None
    if version != VERSION:
        raise SartorError(f"{path}: of version {version}, this Sartor reads {VERSION}; export it again")
    read = Signature.from_mapping(signature, str(path))
    return Predictor(read, told["kind"], told["card"], lambda x: outputs(tuple(nests.leaves(x))))


def _read_torch(path: Path) -> tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]:
    extra = {TEXT: ""}
    try:
        with _quiet():
            network = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # a damaged file surfaces as almost anything
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SartorError(f"{path}: cannot be read as a model ({reason})") from None
    return extra[TEXT], lambda leaves: network(*leaves)


def _read_onnx(path: Path) -> tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]:
    _need_onnx()
    import onnx

    content = path.read_bytes()
    try:
        found = {entry.key: entry.value for entry in onnx.load_model_from_string(content).metadata_props}
        run = _session(content)
    except Exception as error:  # as above
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SartorError(f"{path}: cannot be read as a model ({reason})") from None
    return found.get(PROPERTY, ""), run


def _session(content: bytes) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """What an ONNX model computes."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(leaves: tuple[Tensor, ...]) -> Tensor:
        given = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
        try:
            return torch.from_numpy(session.run(None, given)[0])
        except InvalidArgument as error:  # what an index out of range is here
            raise IndexError(str(error).strip().splitlines()[-1]) from error

    return run


def _check_equal(found: Tensor, wanted: Tensor) -> None:
    """Refuse an ONNX model that computes something else."""
    apart = float((found - wanted).abs().max()) if found.shape == wanted.shape else float("inf")
    if not apart <= TOLERANCE * (1 + float(wanted.abs().max())):
        raise SartorError(
            f"the model does not compute the same in ONNX (by {apart:.2g} apart); take --format torch"
        )


def _need_onnx() -> None:
    """Say what to install where it is not there."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SartorError(f"ONNX needs the package {error.name}; pip install 'sartor[onnx]'") from None
    del onnx, onnxruntime


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks of exporters about themselves."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
