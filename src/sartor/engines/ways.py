"""Which way a step of many clients is computed: by its size on a GPU, or as measured once, and remembered.

``together`` hands every layer to kernels that serve all lanes at once, which small layers need: alone they do
not fill the device. ``apart`` runs each lane's step by PyTorch's own operations, all lanes side by side in
one captured graph: that is for large layers without such kernels, as convolutions in groups or in bfloat16,
and for models that cannot be stacked at all but whose steps can be traced.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import files, nests
from sartor.client.local import Client
from sartor.client.settings import Local
from sartor.data.clients import ClientData
from sartor.engines.stacked.engine import StackedEngine
from sartor.errors import SartorError
from sartor.federation.exchange import Reply, Work
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task

log = logging.getLogger(__name__)

WAYS = ("together", "apart")

SMALL, LARGE = 1 << 23, 1 << 25
"""Numbers that the layers of one client's step give, where some of them have no kernels for all clients.

With fewer than ``SMALL`` clients together are ahead, two to four times; with ``LARGE`` and more clients apart
are, and begin sooner. In between both are tried.
"""

SERVED = 1 << 27
"""The same where all layers have kernels: with fewer numbers clients together are ahead.

An H200 had ResNet-18 and a vision transformer at a quarter of it. With more both are tried.
"""

MOST_LANES = 10
"""Clients that are measured; more would only take longer."""

STEPS = 8


def choose_way(task: Task, data: ClientData, settings: FederationSettings, clients: int, folder: Path) -> str:
    """The way that ``auto`` means, for so many clients at once; what was measured is kept in ``folder``."""
    if settings.device != "cuda" or task.groups is not None:
        return "together"
    if task.why_not_stackable(data.train.x, data.train.y) is not None:
        return "apart"
    width = settings.local.batch or int(data.train.count.max(initial=1))
    numbers = task.activations(data.train.x) * width
    served = task.has_kernels
    if numbers < (SERVED if served else SMALL):
        return "together"
    if numbers >= LARGE and not served:
        return "apart"
    lanes = min(clients, MOST_LANES, data.clients)
    kind = [task.size, sorted(map(str, task.shapes.items())), str(nests.form(data.train.x)), str(task.dtype)]
    about = [torch.cuda.get_device_name(), torch.__version__, settings.precision, lanes, width, kind]
    return remembered(folder / "ways.json", json.dumps(about), lambda: measured(task, data, settings, lanes))


def remembered(path: Path, key: str, measure: Callable[[], dict[str, float]]) -> str:
    """The quickest way by the file's figures; measured and written down where it has none."""
    try:
        known: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
        figures = known[key]
        return min(figures, key=figures.__getitem__)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        figures = measure()
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps({**known, key: figures}, indent=1).encode())
    except (OSError, ValueError, TypeError) as error:
        log.info("what was measured is not kept: %s", error)
    return min(figures, key=figures.__getitem__)


def measured(task: Task, data: ClientData, settings: FederationSettings, lanes: int) -> dict[str, float]:
    """Milliseconds that a step of so many clients takes each way."""
    largest = np.argsort(-data.train.count, kind="stable")[:lanes]
    some, figures = data.some(np.sort(largest)), {}
    local = Local(batch=settings.local.batch, steps=STEPS)
    for way in WAYS:
        tried = replace(settings, way=way, local=local, chunk=0, lanes=0)
        try:
            figures[way] = _milliseconds(StackedEngine(task, some, tried), task)
        except (SartorError, RuntimeError) as error:  # out of memory, say
            log.info("a step of clients %s: %s", way, error)
    return figures or {"together": 0.0}


def _milliseconds(engine: StackedEngine, task: Task) -> float:
    numbers = np.arange(len(engine.names))
    device = engine.device
    buffers = task.initial_buffers(device) if task.buffer_size else None
    work = Work(_descend, None, numbers, np.ones_like(numbers), {"w": task.initial(device)}, {}, buffers)
    for _ in range(3):  # traced, captured, replayed
        engine.run(work)
    engine.wait()
    begin = time.perf_counter()
    engine.run(work)
    engine.wait()
    return (time.perf_counter() - begin) / STEPS * 1e3


def _descend(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lr=1e-3))
