"""How many cases the fuzz tests try: few with all other tests, ``SARTOR_FUZZ`` of each by ``make fuzz``."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("SARTOR_FUZZ", "12"))
MOST_GROWTH = 1 << 30
"""Bytes by which the process may grow during a test."""

settings.register_profile(
    "fuzz",
    parent=settings.get_profile("sartor"),
    max_examples=CASES,
    suppress_health_check=list(HealthCheck),
    database=None,
)
settings.load_profile("sartor")


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MOST_GROWTH, f"the process has grown by {grown >> 20} MB"
