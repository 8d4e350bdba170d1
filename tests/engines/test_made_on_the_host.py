"""What a scan knows of its clients is made on the host: the numbers that a device would find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_engines import network
from test_pieces import Again, captures, federation, vectors, weights  # noqa: F401
from test_schedule import BATCHES, SIZES

from helpers import federation_of
from sartor import random
from sartor.client.local import Batches
from sartor.engines.schedule import plan, sample_table, samples_at, scan_table
from sartor.engines.stacked import told as told_of_calls
from sartor.engines.stacked.engine import StackedEngine
from sartor.engines.stacked.graphs import EARNED, STRIDES, Coming
from sartor.engines.stacked.told import Told, joined, parted


@given(
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 9), st.integers(0, 10**6)), min_size=1),
    st.booleans(),
)
def test_keys_are_those_of_the_streams(who: list[tuple[int, int, int]], one_seed: bool) -> None:
    """Of one seed or many, clients in one round or in several."""
    seeds, rounds, numbers = (np.array(part, dtype=np.int64) for part in zip(*who, strict=True))
    found = random.keys(int(seeds[0]) if one_seed else seeds, "batch", rounds, numbers)
    for key, (seed, *rest) in zip(found.tolist(), who, strict=True):
        assert key == random.stream(who[0][0] if one_seed else seed, "batch", *rest)


@given(st.integers(0, 2**40), st.integers(1, 5), st.booleans())
def test_keys_of_several_rounds_are_a_row_for_each(first: int, clients: int, one_seed: bool) -> None:
    rounds, numbers = np.arange(first, first + 4), np.arange(clients) * 7
    seed = 3 if one_seed else np.arange(clients)
    rows = random.keys(seed, "batch", rounds[:, None], numbers)
    for row, round in zip(rows, rounds, strict=True):
        assert np.array_equal(row, random.keys(seed, "batch", np.full(clients, round), numbers))


@given(BATCHES, SIZES, st.integers(0, 14), st.booleans())
def test_a_plan_knows_where_the_samples_of_every_turn_lie(
    batches: Batches, sizes: list[int], lanes: int, own: bool
) -> None:
    made = plan(batches, np.array(sizes, dtype=np.int64), lanes, own=own)
    if made.table is None or not made.shape.steps:
        return
    n, start = torch.tensor(sizes), torch.arange(len(sizes)) * 1000
    order = torch.arange(made.shape.places)[None, :] % n[:, None].clamp(min=1)
    rows, turns, begin, real = torch.from_numpy(made.table)
    index, expected = sample_table(batches, order, start, n, rows, turns, made.shape.width)
    first = torch.where(real > 0, start[rows.clamp(max=len(sizes) - 1)], 0)
    assert torch.equal(real, expected)
    assert torch.equal(samples_at(order, begin, real, first, torch.arange(made.shape.width)), index)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_full_batches_are_the_orders_one_after_the_other(
    width: int, in_turn: int, clients: int, steps: int, shuffled: bool
) -> None:
    batches = Batches(size=width, steps=1 + steps, shuffled=shuffled)
    made = plan(batches, np.full(clients, width * in_turn))
    assert made.shape.full
    keys = torch.arange(clients) if shuffled else None
    lanes = torch.arange(clients).expand(made.shape.steps, clients)
    turns = torch.arange(made.shape.steps)[:, None].expand(made.shape.steps, clients)
    size, start = torch.full((clients,), width * in_turn), torch.arange(9) * 1000
    given = (keys, width, torch.arange(made.shape.places), torch.arange(clients) + 2, start, size)
    whole = torch.full(turns.shape, width)
    found, expected = (scan_table(batches, *given, lanes, turns, full) for full in (whole, None))
    assert all(map(torch.equal, found, expected))
    assert found[0].is_contiguous()


def test_arrays_travel_in_one_and_begin_where_kernels_expect_them() -> None:
    parts = [np.arange(3), np.arange(10).reshape(2, 5), np.zeros(0, dtype=np.int64), np.array([7])]
    there = torch.from_numpy(joined(parts))
    found = list(parted(there, [part.shape for part in parts]))
    for part, own in zip(parts, found, strict=True):
        assert np.array_equal(part, own.numpy())
        assert own.storage_offset() % 2 == 0


def test_rounds_to_come_are_told_once_they_follow_each_other() -> None:
    """A row for each, with the mark that its call will have; others are told of one call at a time."""
    parts = [np.array([4, 5, 9]), np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)]
    told = Told(b"who", parts, {1: lambda rounds: rounds, 2: lambda rounds: 10 * rounds + parts[0]})

    def rounds(*which: int) -> np.ndarray:
        return np.array(which, dtype=np.int64)

    def count(which: np.ndarray) -> int:
        rows, marks = told.coming(which, 4)
        assert np.array_equal(rows[0], told.numbers(which))
        assert marks[0] == told.mark(which)
        for later, (row, mark) in enumerate(zip(rows, marks, strict=True)):
            assert np.array_equal(row, told.numbers(which + later))
            assert mark == told.mark(which + later)
        return len(rows)

    assert told.numbers(rounds(7, 7, 8)).tolist() == [4, 5, 9, 0, 7, 7, 8, 0, 74, 75, 89, 0]
    assert [count(rounds(*[first] * 3)) for first in (7, 8, 12, 20, 20, 21)] == [1, 4, 4, 1, 1, 4]
    assert [count(rounds(*which)) for which in ((25, 25, 26), (26, 26, 26), (27, 27, 27))] == [1, 1, 4]


def test_long_graphs_are_captured_where_they_are_wanted_often(captures: list[Again]) -> None:  # noqa: F811
    """136 steps a call: 16 in a row at once, four of the 8 that are left once they were wanted so often."""
    made = federation_of("stacked", network(), vectors((8,) * 2), local={"batch": 1, "epochs": 17})
    assert isinstance(made.engine, StackedEngine)
    found: list[set[int]] = []
    for _ in range(EARNED // 2):
        weights(made, cohorts=[[0, 1]])
        (steps,) = made.engine.graphs.taken.values()
        found.append(set(steps._captured))
    assert found == [{16, 1}] * (EARNED // 2 - 1) + [set(STRIDES)]


@pytest.mark.parametrize("settings", [{}, {"chunk": 3}, {"lanes": 2}])
def test_a_cohort_that_comes_again_is_captured_and_gives_the_same(
    captures: list[Again],  # noqa: F811
    settings: dict[str, Any],
) -> None:
    """As a whole: in the same places lie other clients' keys, orders and samples, a round later."""
    cohorts = [[3, 5, 8], [3, 5, 8], [8, 5, 3], [3, 5, 8]]
    made = federation(**settings)
    expected = weights(federation("loop"), cohorts=cohorts)
    torch.testing.assert_close(weights(made, cohorts=cohorts), expected, rtol=1e-9, atol=1e-9)
    assert isinstance(made.engine, StackedEngine)
    assert made.engine.graphs.captured


def test_what_is_told_ahead_is_what_each_round_would_be_told(
    captures: list[Again],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same clients for longer than is told at once, and others in between."""
    told: list[int] = []
    usual = Coming.put

    def noting(self: Coming, numbers: np.ndarray, *others: Any) -> None:
        told.append(len(numbers))
        usual(self, numbers, *others)

    monkeypatch.setattr(Coming, "put", noting)
    monkeypatch.setattr(told_of_calls, "AHEAD", 4)
    cohorts = [*[[3, 5, 8]] * 9, [2, 3, 5], *[[3, 5, 8]] * 3, [5, 3, 8]]
    made, expected = federation(), federation("loop")
    for one in (made, expected):
        one.round = 3
    torch.testing.assert_close(
        weights(made, cohorts=cohorts), weights(expected, cohorts=cohorts), rtol=1e-9, atol=1e-9
    )
    assert told[:3] == [1, 4, 4]
    assert max(told) == 4
