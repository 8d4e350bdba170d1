"""What the final models say of every test and validation sample, client by client.

Counts are enough for a client's metrics; intervals, curves, thresholds and subgroups need the samples one by
one. A simulated run stores what its models put out beside its models (``outputs.npz``): for each split and
sample the client, the truth, the outputs of the client's own and of the shared model, and the sample's value
of ``evaluate.by``. Deployed runs have no such file: what models say of a node's samples stays there.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.data.clients import ClientData, LazySplit
from sartor.errors import SettingError
from sartor.runs.predictor import kind_of
from sartor.runs.result import personal_rows, rows_of_clients

if TYPE_CHECKING:
    from sartor.model.task import Task
    from sartor.runs.run import Run

MOST_NUMBERS = 2_000_000
"""``evaluate.outputs = auto`` stores so many numbers at most."""
MOST_VALUES = 20
"""Different values of a column that results are shown apart by."""
SPLITS = ("test", "validation")
KINDS = ("personal", "shared")


@dataclass(frozen=True)
class Outputs:
    """Those of one split, a row for each sample; samples of a client stand together."""

    client: np.ndarray
    """The number of the client."""
    truth: np.ndarray
    by_model: dict[str, np.ndarray]
    """``personal`` and ``shared``: what the model puts out."""
    group: np.ndarray | None
    """The sample's value of ``evaluate.by``."""
    names: tuple[str, ...]
    """The clients, by number."""


def final_outputs(run: Run) -> bytes | None:
    """The file of a run that has come to its end; None where it has none."""
    wanted, task, data = run.experiment.evaluate.outputs, run.federation.task, run.data
    splits = {name: split for name in SPLITS if (split := getattr(data, name)) is not None}
    if wanted == "no" or not run.federation.engine.pools or kind_of(task) not in ("classes", "numbers"):
        return None
    if isinstance(data.train, LazySplit) or nests.leaves(data.test.y)[0].dim() > 1:
        return None
    samples = sum(int(split.count.sum()) for split in splits.values())
    if wanted == "auto" and samples * len(KINDS) * (task.width or 1) > MOST_NUMBERS:
        return None
    held = {"names": np.array(list(data.names))}
    for name, split in splits.items():
        clients = np.repeat(np.arange(data.clients), split.count)
        held[f"{name}_client"] = clients
        held[f"{name}_truth"] = _joined([split.of(client)[1] for client in range(data.clients)])
        for kind, outputs in _by_model(run, task, split).items():
            held[f"{name}_{kind}"] = outputs
        if run.experiment.evaluate.by is not None:
            values = values_of(data, run.experiment.evaluate.by, split)
            held[f"{name}_group"] = np.concatenate([values[_rows(split, c)] for c in range(data.clients)])
    if not any(f"test_{kind}" in held for kind in KINDS):
        return None
    file = io.BytesIO()
    np.savez_compressed(file, **held)  # type: ignore[arg-type]
    return file.getvalue()


def _rows(split: Any, client: int) -> slice:
    return slice(int(split.start[client]), int(split.start[client] + split.count[client]))


def _by_model(run: Run, task: Task, split: Any) -> dict[str, np.ndarray]:
    """What a client's own and the shared model put out, where the run has their vectors."""
    names, found = run.data.names, {}
    personal, own_buffers = (
        personal_rows(run.final, task, names),
        rows_of_clients(run.final, "personal_buffers", task),
    )
    everyone = range(len(names))
    if personal is not None and all(personal[client] is not None for client in everyone):
        parts = []
        for client in everyone:
            w, buffers = personal[client], None if own_buffers is None else own_buffers[client]
            assert w is not None
            parts.append(_put_out(task.of_client(client), w, split.of(client)[0], buffers))
        found["personal"] = _joined(parts)
    w, buffers = run.algorithm.shared(run.server), run.final.get("buffers")
    kept = run.experiment.model.buffers == "local" and task.buffer_size  # then each client has its own
    if w is not None and not kept:
        if w.dim() == 2:
            w = w[run.evaluations[max(run.evaluations)]["shared_pooled"]["best_model"]]
        parts = [_put_out(task, w.cpu(), split.of(client)[0], buffers) for client in everyone]
        found["shared"] = _joined(parts)
    return found


def _put_out(task: Task, w: Tensor, x: Any, buffers: Tensor | None) -> Tensor:
    if not nests.length(x):
        return torch.zeros(0)
    with torch.no_grad():
        x = nests.mapped(lambda leaf: leaf.cpu(), x)
        outputs: Tensor = task.outputs(w.cpu(), x, None if buffers is None else buffers.cpu())
    return outputs.float()


def _joined(parts: list[Tensor]) -> np.ndarray:
    there = [part for part in parts if len(part)]
    return torch.cat(there).cpu().numpy() if there else np.zeros(0, np.float32)


def read_outputs(content: bytes) -> dict[str, Outputs]:
    """The splits of a stored file."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        held = {name: file[name] for name in file.files}
    return {
        name: Outputs(
            held[f"{name}_client"],
            held[f"{name}_truth"],
            {kind: held[f"{name}_{kind}"] for kind in KINDS if f"{name}_{kind}" in held},
            held.get(f"{name}_group"),
            tuple(held["names"].tolist()),
        )
        for name in SPLITS
        if f"{name}_client" in held
    }


def values_of(data: ClientData, by: str, split: Any) -> np.ndarray:
    """The value of a column, or of a leaf of the samples, for every row of a split, as a text.

    Columns of a table are as they were before they were scaled.
    """
    table, moments = data.preprocessing.table, data.preprocessing.moments
    leaves: Mapping[str, Tensor] = nests.paths(split.x, "x")
    flat = list(leaves) == ["x"] and table is not None and leaves["x"].shape[1:] == (len(table.columns),)
    if table is not None and by in table.columns and hasattr(table, "values"):
        return np.array(table.values(split.x, by))  # a reader whose columns are not one number each
    if table is not None and by in table.columns and flat:
        place = list(table.columns).index(by)
        values = leaves["x"][:, place].double()
        if moments is not None:
            own = moments["x"]
            deviation = float((own.squares[place] / max(own.number, 1)).sqrt())
            values = values * (deviation or 1.0) + float(own.mean[place])
        found = values.round(decimals=4) + 0.0  # no value is minus 0
    else:
        path = by if by in leaves else f"x.{by}"
        if path not in leaves or leaves[path].dim() != 1:
            known = [*(table.columns if table is not None else ()), *(name for name in leaves if name != "x")]
            raise SettingError(
                f"evaluate.by = {by!r}: no column of the table, nor a leaf of the samples with a value each; "
                f"there are {', '.join(known) or 'none'}"
            )
        found = leaves[path]
    texts = np.array([f"{value:g}" for value in found.tolist()])
    if len(set(texts.tolist())) > MOST_VALUES:
        raise SettingError(
            f"evaluate.by = {by!r}: {len(set(texts.tolist()))} different values, at most {MOST_VALUES}; "
            "name a column of groups"
        )
    return texts
