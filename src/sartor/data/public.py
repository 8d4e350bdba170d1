"""Public samples: named by an experiment, loaded by everyone who takes part, and never sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from sartor import nests
from sartor.data.moments import Moments
from sartor.data.named import read_data
from sartor.data.settings import Data, Public
from sartor.data.sources import SOURCES, Source
from sartor.errors import DataError
from sartor.settings import unknown


def read_public(
    settings: Public,
    seed: int,
    *,
    folder: str | None = None,
    features: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """The public samples of an experiment, or None; they are normalised by their own mean and deviation.

    >>> read_public(Public(name="digits", count=100), seed=0).shape
    torch.Size([100, 1, 8, 8])
    """
    if not settings.wanted:
        return None
    if settings.name is not None and settings.name not in SOURCES:
        raise unknown("public.name", settings.name, SOURCES, what="name")
    source = read_data(Data(name=settings.name or "", path=settings.path, folder=folder), seed)
    if not isinstance(source, Source):
        raise DataError("public: expected samples that are not divided among clients (a Source)")
    x = source.train_x
    if not isinstance(x, torch.Tensor):
        raise DataError(f"public: its samples are {nests.words(x)}; public samples are one array each")
    if settings.count > len(x):
        raise DataError(f"public.count: {settings.count}, but {source.name} has {len(x)} samples")
    if settings.count:
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: settings.count]]
    x = x if features is None else features(x)
    return Moments.of(x).normalise(x.clone()) if settings.normalise else x


def hash_of(x: torch.Tensor) -> str:
    """What public samples are known by."""
    return hashlib.sha256(
        f"{list(x.shape)} {x.dtype}".encode() + x.contiguous().numpy().tobytes()
    ).hexdigest()
