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
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sartor import nests
from sartor.client.local import Client
from sartor.data.clients import ClientData, LazySplit
from sartor.data.preprocessing import NumberColumns, TableReader
from sartor.engines import sharded as distributed
from sartor.errors import SettingError
from sartor.federation.exchange import Reply
from sartor.runs.evaluation import model_in, personal_models
from sartor.runs.predictor import kind_of
from sartor.runs.result import personal_rows, rows_of_clients

if TYPE_CHECKING:
    from sartor.model.task import Task
    from sartor.runs.run import Run

MOST_NUMBERS, MOST_WORK = 2_000_000, 2 * 10**9
"""``evaluate.outputs = auto`` stores so many numbers at most, of so many samples × parameters."""
MOST_ASKED = 10**8
"""Numbers that clients are asked for at once, which are held for a moment."""
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
    much = samples * len(KINDS) * (task.width or 1) > MOST_NUMBERS or samples * task.size > MOST_WORK
    if wanted == "auto" and much:
        return None
    held = {"names": np.array(list(data.names))}
    for name, split in splits.items():
        clients = np.repeat(np.arange(data.clients), split.count)
        held[f"{name}_client"] = clients
        held[f"{name}_truth"] = _joined([split.of(client)[1] for client in range(data.clients)])
        for kind, outputs in _by_model(run, task, name, split).items():
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


def _by_model(run: Run, task: Task, name: str, split: Any) -> dict[str, np.ndarray]:
    """What a client's own and the shared model put out on the split of that name."""
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
            parts.append(_put_out(run, task.of_client(client), w, split.of(client)[0], buffers))
        found["personal"] = _joined(parts)
    elif (asked := _asked(run, name, split)) is not None:
        found["personal"] = asked
    w, buffers = run.algorithm.shared(run.server), run.final.get("buffers")
    kept = run.experiment.model.buffers == "local" and task.buffer_size  # then each client has its own
    if w is not None and not kept:
        if w.dim() == 2:
            w = w[run.evaluations[max(run.evaluations)]["shared_pooled"]["best_model"]]
        parts = [_put_out(run, task, w, split.of(client)[0], buffers) for client in everyone]
        found["shared"] = _joined(parts)
    return found


def _asked(run: Run, name: str, split: Any) -> np.ndarray | None:
    """What clients' own models put out that are not stored as vectors: made as for their evaluation.

    None where there are no such models, where their rows would be too many, filled up to those of the largest
    client, and where several processes share the run: the one that stores would wait for the others.
    """
    federation, count = run.federation, split.count
    everyone, longest = np.arange(federation.clients), max(1, int(count.max()))
    call = personal_models(run.algorithm, run.server, everyone)
    much = len(everyone) * longest * (federation.task.width or 1) > MOST_ASKED
    if call is None or much or distributed.world() > 1:
        return None
    function, blank = call.function, federation.blank_sample()

    @wraps(function)
    def put_out(client: Client, hyper: Any, **arguments: Any) -> Reply:
        model = model_in(function(client, hyper, **arguments), function)
        outputs = partial(client.outputs, model) if isinstance(model, Tensor) else model
        rows, _ = client.gather(lambda batch: outputs(batch.x), outputs(blank)[0], name)
        rows = rows[:longest]  # the engine may have clients of other runs beside these
        return Reply(rows=torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])]))

    rows = federation.ask(put_out, everyone, call.shared, call.each)["rows"].float().cpu()
    return _joined([rows[client, : count[client]] for client in everyone])


def _put_out(run: Run, task: Task, w: Tensor, x: Any, buffers: Tensor | None) -> Tensor:
    """What a model puts out for samples, where the run is computed and as many at once as it evaluates."""
    device, batch = run.federation.engine.device, run.experiment.evaluate.batch
    w, buffers = w.to(device), None if buffers is None else buffers.to(device)
    parts = [torch.zeros(0)]
    with torch.no_grad():
        for begin in range(0, nests.length(x), batch):
            some = nests.mapped(lambda leaf: leaf.to(device), nests.rows(x, slice(begin, begin + batch)))
            parts.append(task.outputs(w, some, buffers).float().cpu())
    return _whole(parts)


def _whole(parts: list[Tensor]) -> Tensor:
    there = [part for part in parts if len(part)]
    return torch.cat(there) if there else torch.zeros(0)


def _joined(parts: list[Tensor]) -> np.ndarray:
    return _whole(parts).cpu().numpy()


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
    table = data.preprocessing.table
    if table is not None and by in table.columns:
        texts = np.array(_column(data, table, by, split.x))
    else:
        leaves: Mapping[str, Tensor] = nests.paths(split.x, "x")
        path = by if by in leaves else f"x.{by}"
        if path not in leaves or leaves[path].dim() != 1:
            known = [*(table.columns if table is not None else ()), *(name for name in leaves if name != "x")]
            raise SettingError(
                f"evaluate.by = {by!r}: no column of the table, nor a leaf of the samples with a value each; "
                f"there are {', '.join(known) or 'none'}"
            )
        texts = np.array([f"{value:g}" for value in leaves[path].tolist()])
    if len(set(texts.tolist())) > MOST_VALUES:
        raise SettingError(
            f"evaluate.by = {by!r}: {len(set(texts.tolist()))} different values, at most {MOST_VALUES}; "
            "name a column of groups"
        )
    return texts


def _column(data: ClientData, table: TableReader, by: str, x: Any) -> list[str]:
    """A column of a table, of its numbers before they were scaled."""
    words = table.values(x, by)
    if words is None:
        raise SettingError(f"evaluate.by = {by!r}: is neither a category nor one number in this table")
    if data.preprocessing.moments is None or not isinstance(table, NumberColumns):
        return words
    own, place = data.preprocessing.moments["x"], list(table.columns).index(by)
    deviation = float((own.squares[place] / max(own.number, 1)).sqrt())
    values = x[:, place].double() * (deviation or 1.0) + float(own.mean[place])
    return [f"{value:g}" for value in (values.round(decimals=4) + 0.0).tolist()]  # no value is minus 0
