"""A model's stages, and what is done to the rows of a matrix of models with numbers of each stage's own."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.algorithms.server.similarity import cosines, mixtures
from sartor.federation.reduction import PLAIN, Reducer
from sartor.model.parts import Part
from sartor.model.task import Task


def stages_of(task: Task, layers: bool = False) -> list[Part]:
    """The stages a model declares: by default body and head; the whole model where it has no head.

    With ``layers`` every module with parameters of its own is one.
    """
    if layers:
        found: dict[str, list[slice]] = {}
        for name, place in task.places.items():
            found.setdefault(name.rpartition(".")[0] or "model", []).append(place)
        return [Part(layer, tuple(places)) for layer, places in found.items()]
    if not task.stages:
        return [Part("model", (slice(0, task.size),))]
    return [task.part(name) for name in task.stages]


def cosines_by_stage(
    known: dict[str, Tensor], rows: Tensor, clients: Tensor, stages: list[Part], trust: Tensor | None = None
) -> dict[str, Tensor]:
    """The known cosines, [N, N] for each stage, with those between the rows of some clients in their place.

    ``trust``, one factor for each of the rows, brings the cosines of those that count for less nearer to 0.
    """
    pairs = (clients[:, None], clients[None, :])
    similar = {}
    for stage in stages:
        own = stage.take(rows)
        cosine = cosines(own, own)
        if trust is not None:
            cosine = trust[:, None] * trust * cosine
        similar[stage.name] = known[stage.name].index_put(pairs, cosine)
    return similar


def mixed_by_stage(
    rows: Tensor, weights: dict[str, Tensor], stages: list[Part], reducer: Reducer = PLAIN
) -> Tensor:
    """Σ_j ω_ij row_j with each stage's own weights, [m, d], or what stands in its place by ``reducer``."""
    first = next(iter(weights.values()))
    mixed = rows.new_empty(len(first), rows.shape[1])
    places = torch.arange(len(first), device=rows.device)
    for stage in stages:
        own, theirs = weights[stage.name], stage.take(rows)
        if reducer.rule is None:
            made = mixtures(theirs, places, own.__getitem__)
        else:
            made = reducer.sums("delta", theirs, own)
        mixed = stage.put(mixed, made)
    return mixed


def spread_out(agreed: dict[str, Tensor], stages: list[Part], like: Tensor) -> Tensor:
    """One number per client and stage as a number for every entry of the models, [m, d]."""
    result = torch.zeros_like(like)
    for stage in stages:
        result = stage.put(result, agreed[stage.name][:, None].expand(-1, stage.size))
    return result
