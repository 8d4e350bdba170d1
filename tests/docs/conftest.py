"""What pages and examples register or import is theirs: the next test finds things as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import sartor.runs.experiment  # noqa: F401  # registers all that is built in
from sartor import extensions
from sartor.algorithms import base
from sartor.client.augment import AUGMENTATIONS
from sartor.data.sources import SOURCES
from sartor.federation.attacks import ATTACKS
from sartor.federation.reduction import AGGREGATES
from sartor.model.networks import MODELS
from sartor.model.objectives import OBJECTIVES
from sartor.transforms import TRANSFORMS

REGISTRIES = (base._REGISTRY, AUGMENTATIONS, SOURCES, AGGREGATES, ATTACKS, TRANSFORMS, MODELS, OBJECTIVES)


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    before = [dict(registry) for registry in REGISTRIES]
    imported = dict(extensions._IMPORTED)
    yield
    for registry, known in zip(REGISTRIES, before, strict=True):
        registry._known.clear()
        registry._known.update(known)  # type: ignore[arg-type]
    extensions._IMPORTED.clear()
    extensions._IMPORTED.update(imported)
