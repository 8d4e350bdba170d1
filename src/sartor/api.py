"""The library's front door: :func:`run` takes names, or a user's own model and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sartor.data.clients import ClientData
from sartor.model.task import Task
from sartor.runs.execute import execute
from sartor.runs.inputs import merge_settings, prepare_inputs
from sartor.runs.observers import Observer
from sartor.runs.result import Result


def run(
    algorithm: str | None = None,
    *,
    data: str | Mapping[str, Any] | ClientData | None = None,
    model: str | nn.Module | Task | None = None,
    experiment: str | Path | Mapping[str, Any] | None = None,
    head: str | None = None,
    clients: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    engine: str | Mapping[str, Any] | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    store: bool = True,
    progress: bool = False,
    observers: Sequence[Observer] = (),
    **sections: Mapping[str, Any],
) -> Result:
    """Run an algorithm and return its :class:`~sartor.runs.result.Result`.

    ``data`` is a data set's name, or your own, taken as it is: ``{client: (x, y)}``, or a
    :class:`~sartor.data.ClientData`. ``model`` is a network's name, any ``nn.Module``, or a :class:`Task`;
    ``head`` names the module that is a personal head. Every other setting goes by section:
    ``hyper={"lr": 0.05}``, ``local={"epochs": 2}``, ``partition={"name": "dirichlet", "alpha": 0.1}``;
    ``engine`` is a name or such a section.
    ``experiment`` is a TOML file or a mapping to start from. ``store=False`` writes no run folder.
    ``observers`` are told what happens and may stop the run: see :class:`~sartor.runs.observers.Observer`.

    >>> import torch
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> result = run("separate", data={"a": (x, y), "b": (-x, y)}, rounds=1, store=False)
    >>> result.personal.shape[0]
    2
    """
    given = merge_settings(
        experiment, sections, algorithm=algorithm, rounds=rounds, seed=seed, engine=engine, device=device
    )
    inputs = prepare_inputs(given, data=data, model=model, head=head, clients=clients)
    return execute(
        inputs.experiment,
        data=inputs.data,
        task=inputs.task,
        out=out,
        store=store,
        progress=progress,
        observers=observers,
    )
