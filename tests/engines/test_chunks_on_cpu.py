"""On a CPU a chunk holds as many clients as a cache has models of, and gives what other chunks give."""

from __future__ import annotations

import pytest
from test_engines import assert_close, ended, plain, vectors

from helpers import federation_of
from sartor.engines.stacked import engine as stacked
from sartor.engines.stacked.engine import StackedEngine

EVERYONE = [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize(("models", "chunk"), [(1, 4), (5, 5), (1000, 1000)])
def test_a_chunk_is_what_a_cache_holds_but_four_at_least(
    models: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = plain()
    one = task.size * task.initial().element_size()
    monkeypatch.setattr(stacked, "STEPPED", models * one + one // 2)
    federation = federation_of("stacked", task, vectors(), local={"batch": 8})
    found = ended("separate", federation, EVERYONE)
    assert isinstance(federation.engine, StackedEngine)
    assert federation.engine.chunk == chunk
    expected = ended("separate", federation_of("loop", plain(), vectors(), local={"batch": 8}), EVERYONE)
    assert_close(expected, found, 1e-11)
