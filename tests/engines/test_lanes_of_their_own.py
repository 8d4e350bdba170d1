"""A lane for every client, those with most steps first, changes no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_narrowing import in_steps
from test_pieces import Again, captures, federation, weights  # noqa: F401
from test_schedule import BATCHES, SIZES, check_turns

from sartor.client.local import Batches
from sartor.engines.schedule import bucket, plan
from sartor.engines.stacked.engine import StackedEngine


@given(BATCHES, SIZES, st.booleans())
def test_those_who_still_train_are_the_first_lanes(batches: Batches, sizes: list[int], rounded: bool) -> None:
    clients, counts = len(sizes), np.array([batches.count(size) for size in sizes])
    made = plan(batches, np.array(sizes, dtype=np.int64), rounded=rounded, own=True)
    if made.rows is None:
        assert len(set(counts.tolist())) == 1
        return
    assert made.order is not None
    assert made.shape.steps == counts.max()
    rows, turns = in_steps(made, clients)
    check_turns(rows, turns, counts)
    for step, there in enumerate(rows):
        busy = int((counts > step).sum())
        assert there[:busy].tolist() == made.order[:busy].tolist()
        assert (there[busy:] == clients).all()
    assert [(s.busy, s.left) for s in made.stretches] == [
        (int((counts >= end).sum()), int((counts > end).sum())) for end in sorted({*counts.tolist()} - {0})
    ]
    for stretch in made.stretches:
        assert stretch.lanes == min(clients, bucket(stretch.busy, 4))
    assert sorted(made.order.tolist()) == list(range(clients))


def test_fewer_lanes_than_clients_are_shared() -> None:
    batches, sizes = Batches(size=4), np.array([9, 1, 30, 4])
    assert plan(batches, sizes, 2, own=True).order is None
    assert plan(batches, sizes, 4, own=True).order is not None


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_run_gives_what_the_loop_gives(
    captures: list[Again],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    graphs: bool,
) -> None:
    """In pieces, as a whole where cohorts come again, and with nothing captured."""
    monkeypatch.setattr(StackedEngine, "keeps_lanes", True)
    settings: dict[str, Any] = {"cohorts": [[0, 3, 5, 8], [1, 2, 4, 9], [0, 3, 5, 8], [3, 6, 7, 8]] * 2}
    expected = weights(federation("loop"), name, **settings)
    found = weights(federation(graphs=graphs), name, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert bool(captures) is graphs
