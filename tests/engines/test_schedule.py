"""Plans: every client takes its turns, in order, in one lane at a time, and no lane idles needlessly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sartor.client.local import Batches
from sartor.engines.schedule import bucket, pack, pieces, plan, sample_table

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)
COUNTS = st.lists(st.integers(0, 15), min_size=1, max_size=10)
BATCHES = st.builds(
    Batches,
    size=st.integers(0, 20),
    epochs=st.integers(0, 3),
    steps=st.sampled_from([0, 0, 1, 5]),
    shuffled=st.booleans(),
)


def check_turns(rows: np.ndarray, turns: np.ndarray, counts: np.ndarray) -> None:
    """Every client takes exactly its turns, in order, in one lane, and at most one of them in a step."""
    clients = len(counts)
    assert rows.shape == turns.shape
    assert rows.min(initial=0) >= 0
    assert rows.max(initial=0) <= clients
    for client in range(clients):
        steps, lanes = np.nonzero(rows == client)  # by step, then by lane
        assert turns[steps, lanes].tolist() == list(range(counts[client]))
        assert len(set(steps.tolist())) == len(steps)
        assert len(set(lanes.tolist())) <= 1


def fewest_steps(counts: list[int], lanes: int) -> int:
    """The shortest makespan, by trying every way to deal the clients to the lanes."""
    best = sum(counts)
    for deal in itertools.product(range(lanes), repeat=len(counts)):
        best = min(
            best, max(sum(c for c, d in zip(counts, deal, strict=True) if d == lane) for lane in range(lanes))
        )
    return best


@given(COUNTS, st.integers(1, 8))
def test_packing_gives_every_client_its_turns(counts: list[int], lanes: int) -> None:
    rows, turns = pack(np.array(counts), lanes)
    assert rows.shape[1] == lanes
    check_turns(rows, turns, np.array(counts))


@given(COUNTS, st.integers(1, 8))
def test_packing_is_within_grahams_bound(counts: list[int], lanes: int) -> None:
    """A lane that finishes last began its last client when all others were busy."""
    rows, _ = pack(np.array(counts), lanes)
    longest = max(counts)
    assert len(rows) >= max(longest, -(-sum(counts) // lanes))
    assert len(rows) * lanes <= sum(counts) + (lanes - 1) * longest


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_best(counts: list[int], lanes: int) -> None:
    """Graham 1969: longest first needs at most 4/3 − 1/(3m) times the steps of the best way."""
    rows, _ = pack(np.array(counts), lanes)
    assert len(rows) * 3 * lanes <= fewest_steps(counts, lanes) * (4 * lanes - 1)


@given(COUNTS, st.integers(1, 8))
def test_packing_is_the_same_every_time(counts: list[int], lanes: int) -> None:
    first, second = pack(np.array(counts), lanes), pack(np.array(counts), lanes)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(BATCHES, SIZES, st.integers(0, 14), st.booleans())
def test_a_plan_gives_every_client_its_turns(
    batches: Batches, sizes: list[int], lanes: int, rounded: bool
) -> None:
    n = np.array(sizes, dtype=np.int64)
    counts = np.array([batches.count(size) for size in sizes])
    made = plan(batches, n, lanes, rounded)
    if made.rows is None or made.turns is None:
        # Everybody takes the same number of steps, each in a lane of its own.
        assert not made.shape.packed
        assert made.shape.lanes == len(sizes)
        assert counts.tolist() == [made.shape.steps] * len(sizes)
    else:
        assert made.shape.packed
        assert len(made.rows) == made.shape.steps * made.shape.lanes
        check_turns(made.rows.reshape(-1, made.shape.lanes), made.turns.reshape(-1, made.shape.lanes), counts)
        if lanes and lanes < len(sizes):
            assert made.shape.lanes == lanes


@given(BATCHES, SIZES, st.booleans())
def test_a_plan_that_chooses_its_lanes_wastes_little(
    batches: Batches, sizes: list[int], rounded: bool
) -> None:
    counts = [batches.count(size) for size in sizes]
    made = plan(batches, np.array(sizes, dtype=np.int64), 0, rounded)
    assert made.shape.lanes <= len(sizes)
    longest = max(counts)
    steps = (
        bucket(2 * longest, 16) if rounded else 2 * longest
    )  # Graham's bound with as many lanes as keep busy
    assert longest <= made.shape.steps <= max(steps, 0)


@given(BATCHES, SIZES, st.integers(0, 14), st.booleans())
def test_every_turn_has_its_samples_and_an_epoch_has_each_once(
    batches: Batches, sizes: list[int], lanes: int, rounded: bool
) -> None:
    """Samples in their own order, so that the arithmetic of turns, offsets and short batches remains."""
    n = torch.tensor(sizes)
    made = plan(batches, n.numpy(), lanes, rounded)
    shape = made.shape
    if shape.steps == 0:
        return
    order = torch.arange(shape.places)[None, :] % n[:, None].clamp(min=1)
    start = torch.arange(len(sizes)) * 1000
    if made.rows is None or made.turns is None:
        rows = torch.arange(len(sizes)).expand(shape.steps, -1)
        turns = torch.arange(shape.steps)[:, None].expand(-1, len(sizes))
    else:
        rows, turns = torch.from_numpy(made.rows), torch.from_numpy(made.turns)
    index, real = sample_table(batches, order, start, n, rows, turns, shape.width)
    assert index.shape == (*rows.shape, shape.width)
    assert bool((real[rows == len(sizes)] == 0).all())
    width = batches.size or max(*sizes, 1)
    for client, size in enumerate(sizes):
        mine = rows == client
        by_turn = torch.argsort(turns[mine])
        seen = [
            (row[:count] - 1000 * client).tolist()
            for row, count in zip(index[mine][by_turn], real[mine][by_turn].tolist(), strict=True)
        ]
        epoch = [list(range(first, min(first + width, size))) for first in range(0, size, width)]
        assert seen == list(itertools.islice(itertools.cycle(epoch), len(seen))) if epoch else seen == []
        alone = [range(piece.start, piece.stop) for piece in pieces(batches, size)]
        assert seen == [[place % size for place in piece] for piece in alone]
    if shape.full:
        assert bool((real == shape.width).all())
    # Padding points at a sample of the client, never at another's.
    inside = (index - 1000 * rows.clamp(max=len(sizes) - 1)[..., None])[rows < len(sizes)]
    assert bool(((inside >= 0) & (inside < max(*sizes, 1))).all())


@given(BATCHES, SIZES)
def test_a_rounded_plan_has_room_for_the_exact_one(batches: Batches, sizes: list[int]) -> None:
    n = np.array(sizes, dtype=np.int64)
    exact, rounded = plan(batches, n).shape, plan(batches, n, rounded=True).shape
    assert rounded.places >= exact.places
    assert rounded.width >= exact.width
    assert rounded.lanes >= exact.lanes


@given(st.integers(1, 10**9), st.sampled_from([1, 2, 8, 16]))
def test_buckets_round_up_and_not_far(number: int, grain: int) -> None:
    rounded = bucket(number, grain)
    assert rounded >= number
    assert bucket(rounded, grain) == rounded
    assert bucket(number + 1, grain) >= rounded
    assert rounded * grain < number * (grain + 2)  # at most two grains too many
    assert number > grain or rounded == number


@pytest.mark.parametrize("grain", [2, 8, 16])
def test_few_bucket_sizes_arise(grain: int) -> None:
    for power in range(4, 15):
        sizes = {bucket(number, grain) for number in range(2**power + 1, 2 ** (power + 1) + 1)}
        assert len(sizes) <= grain
        assert 2 ** (power + 1) in sizes


def test_counts_of_steps() -> None:
    assert [Batches(size=4, epochs=2).count(n) for n in (0, 1, 4, 5, 8)] == [0, 2, 2, 4, 4]
    assert [Batches(size=0, epochs=2).count(n) for n in (0, 1, 9)] == [0, 2, 2]
    assert [Batches(size=4, epochs=2, steps=3).count(n) for n in (0, 1, 9)] == [0, 3, 3]
    n = torch.tensor([0, 1, 4, 5, 8])
    for batches in (Batches(size=4, epochs=2), Batches(size=0, epochs=2), Batches(size=4, steps=3)):
        expected = [int(batches.count(int(size))) for size in n]
        assert batches.count(n).tolist() == expected
        assert batches.count(n.numpy()).tolist() == expected


@given(batches=BATCHES, sizes=SIZES, rounded=st.booleans())
@settings(deadline=None)
def test_exact_plans_take_every_batch_as_wide_as_it_is(
    batches: Batches, sizes: list[int], rounded: bool
) -> None:
    held = np.array(sizes)
    made = plan(batches, held, rounded=rounded, exact=True)
    assert made.rows is not None
    assert made.turns is not None
    assert made.shape.full  # nothing has a weight
    width, taken, first = made.shape.width, np.zeros_like(held), 0
    for steps, lanes, wide, *_ in made.stretches:
        there = slice(first, first + steps * lanes)
        rows, turns = (table[there].reshape(steps, lanes) for table in (made.rows, made.turns))
        assert (rows == rows[0]).all()
        for lane in np.flatnonzero(rows[0] < len(held)):
            client = rows[0, lane]
            for turn in turns[:, lane]:
                assert turn == taken[client]
                in_pass = turn % max(1, int(batches.in_turn(sizes[client], width)))
                assert wide == min(width, sizes[client] - in_pass * width)
                taken[client] += 1
        first += steps * lanes
    assert taken.tolist() == np.asarray(batches.count(held)).tolist()
    assert first == len(made.rows) == len(made.turns)
