"""The library's front door: :func:`run` takes names, or a user's own model and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from sartor.runs.execute import execute
from sartor.runs.inputs import RunSettings, gather
from sartor.runs.observers import Observer
from sartor.runs.result import Result


def run(
    algorithm: str | None = None,
    *,
    out: str | Path | None = None,
    store: bool = True,
    progress: bool = False,
    observers: Sequence[Observer] = (),
    **settings: Unpack[RunSettings],
) -> Result:
    """Run an algorithm and return its :class:`~sartor.runs.result.Result`.

    ``data`` is a data set's name, or your own, taken as it is: ``{client: (x, y)}``, or a
    :class:`~sartor.data.ClientData`. ``model`` is a network's name, its section, as in
    ``{"name": "mlp", "hidden": 32}``, a class or function that builds an ``nn.Module``, anew for every seed,
    a ready one, or a :class:`Task`; ``head`` names the module that is a personal head. ``objective`` is what
    it is trained for: a name, its section, an :class:`Objective` or a loss function. Each may be a function
    in a file: ``data="mine.py:load"``, ``model="net.py:build"``. ``clients``, ``rounds``, ``seed``,
    ``engine`` and ``device`` are settings of the experiment; every other one goes by section:
    ``hyper={"lr": 0.05}``, ``local={"epochs": 2}``, ``partition={"name": "dirichlet", "alpha": 0.1}``;
    ``engine`` is a name or such a section. ``models`` are those of clients with models of their own: a list
    of mappings, each with a ``model`` and who has it, as in ``{"model": "mlp", "hidden": 32, "every": 2}``.
    ``experiment`` is a TOML file or a mapping to start from; ``imports`` are files or modules of your own to
    import first. ``store=False`` writes no run folder. ``observers`` are told what happens and may stop the
    run: see :class:`~sartor.runs.observers.Observer`.

    >>> import torch
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> result = run("separate", data={"a": (x, y), "b": (-x, y)}, rounds=1, store=False)
    >>> result.personal.shape[0]
    2
    """
    inputs = gather(settings, algorithm).inputs()
    return execute(
        inputs.experiment,
        data=inputs.data,
        task=inputs.task,
        own=inputs.own,
        out=out,
        store=store,
        progress=progress,
        observers=observers,
    )
