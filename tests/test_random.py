"""The keyed streams: even, independent, and a function of their key alone."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_convolution import DEVICE, kernels
from torch import Tensor

from sartor import random

MILLION = 1_000_000
SIGNED = st.integers(-(2**63), 2**63 - 1)


def bits(words: Tensor) -> np.ndarray:
    """The words as unsigned numbers."""
    return words.numpy().view(np.uint64)


def chi_square(observed: np.ndarray, expected: float | np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean: about normal for many cells."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = observed.size - 1
    # Wilson and Hilferty: the cube root of a chi-square is nearly normal.
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.fixture(scope="module")
def words() -> np.ndarray:
    return bits(random.words(random.stream(1, "test", 2, 3), torch.arange(MILLION)))


def splitmix(seed: int, count: int) -> list[int]:
    """SplitMix64 as published: a counter and two multiplications, in unbounded integers."""
    mask, state, result = (1 << 64) - 1, seed & ((1 << 64) - 1), []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        result.append(z ^ (z >> 31))
    return result


@given(SIGNED)
def test_words_are_splitmix_started_at_the_key(key: int) -> None:
    assert bits(random.words(key, torch.arange(5))).tolist() == splitmix(key, 5)


@pytest.mark.parametrize("places", [0, 56])
def test_high_and_low_bytes_are_uniform(words: np.ndarray, places: int) -> None:
    low = (words >> np.uint64(places)) & np.uint64(0xFF)
    assert abs(chi_square(np.bincount(low.astype(int), minlength=256), MILLION / 256)) < 5


def test_uniform_numbers_fill_a_thousand_cells_evenly() -> None:
    draws = random.uniform(random.stream(5, "cells"), MILLION)
    assert draws.dtype == torch.float64
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    cells = np.bincount((draws * 1000).long().numpy(), minlength=1000)
    assert abs(chi_square(cells, MILLION / 1000)) < 5


def test_uniform_numbers_have_53_bits() -> None:
    scaled = random.uniform(random.stream(5, "bits"), 10_000) * 2.0**53
    assert bool((scaled == scaled.floor()).all())
    assert bool(((scaled % 2) == 1).any())


def test_each_bit_is_set_half_of_the_time(words: np.ndarray) -> None:
    for place in range(64):
        ones = int(((words >> np.uint64(place)) & np.uint64(1)).sum())
        assert abs(ones - MILLION / 2) < 5 * math.sqrt(MILLION / 4), f"bit {place}"


def test_draws_are_not_correlated_with_later_draws() -> None:
    draws = random.uniform(random.stream(7, "serial"), MILLION).numpy() - 0.5
    for lag in (1, 2, 3, 64):
        correlation = float(np.mean(draws[:-lag] * draws[lag:])) * 12
        assert abs(correlation) < 5 / math.sqrt(MILLION), f"lag {lag}"


@pytest.mark.parametrize(
    "other",
    [
        ("cohort", 0, 1, 1),
        ("batch", 0, 2, 1),
        ("batch", 0, 1, 2),
        ("batch", 0, 1, 1 << 40),
        ("batch", 1, 1, 1),
        ("batch", -1, 1, 1),
        ("batch", 2**63, 1, 1),
        ("batch", 0, 1, 1, 0),
        ("batch", 0, 1),
    ],
)
def test_streams_with_one_thing_different_are_independent(other: tuple[str, int, int]) -> None:
    purpose, seed, *values = other
    here = random.words(random.stream(0, "batch", 1, 1), torch.arange(200_000))
    key = random.stream(seed, purpose, *values)
    there = bits(random.words(key, torch.arange(200_000)))
    differing = np.unpackbits((bits(here) ^ there).view(np.uint8))
    assert abs(float(differing.mean()) - 0.5) < 5 * 0.5 / math.sqrt(differing.size)
    assert len(np.intersect1d(bits(here), there)) == 0


def test_round_and_client_do_not_stand_in_for_each_other() -> None:
    keys = {random.stream(0, "batch", round, client) for round in range(200) for client in range(200)}
    assert len(keys) == 200 * 200


def test_first_words_of_neighbouring_keys_are_uniform() -> None:
    """Cohorts and batches use few words of many streams, so the words across streams must be random too."""
    keys = random.stream(0, "batch", 1, torch.arange(100_000))
    assert isinstance(keys, Tensor)
    first = bits(random.words(keys, torch.zeros(1, dtype=torch.int64)))
    for places in (0, 56):
        part = ((first >> np.uint64(places)) & np.uint64(0xFF)).astype(int)
        assert abs(chi_square(np.bincount(part, minlength=256), len(first) / 256)) < 5
    values = (first >> np.uint64(11)).astype(float) * 2.0**-53 - 0.5
    assert abs(float(np.mean(values[1:] * values[:-1])) * 12) < 5 / math.sqrt(len(values))


@given(SIGNED, st.lists(st.integers(0, 2**62), min_size=1, max_size=4), st.text(max_size=10))
def test_integers_and_tensors_give_the_same_keys(seed: int, values: list[int], purpose: str) -> None:
    plain = random.stream(seed, purpose, *values)
    tensor = random.stream(seed, purpose, *[torch.tensor([value]) for value in values])
    assert isinstance(plain, int)
    assert isinstance(tensor, Tensor)
    assert tensor.tolist() == [plain]
    index = torch.arange(7)
    assert torch.equal(random.words(plain, index), random.words(tensor, index))
    assert torch.equal(random.uniform(plain, 7), random.uniform(tensor, 7))
    assert torch.equal(random.normal(plain, 7), random.normal(tensor, 7))


def test_tensor_keys_broadcast() -> None:
    keys = random.stream(3, "batch", torch.arange(5)[:, None], torch.arange(4)[None, :])
    assert isinstance(keys, Tensor)
    assert keys.shape == (5, 4)
    for round, client in itertools.product(range(5), range(4)):
        assert int(keys[round, client]) == random.stream(3, "batch", round, client)


def test_integer_is_the_streams_first_word_without_its_sign() -> None:
    for key in (0, -1, 2**62, random.stream(0, "initial")):
        value = random.integer(key)
        assert 0 <= value < 2**63
        assert value == splitmix(int(key), 1)[0] & (2**63 - 1)


def test_normal_numbers_have_the_normal_distribution() -> None:
    draws = random.normal(random.stream(11, "normal"), MILLION).numpy()
    assert np.isfinite(draws).all()
    assert abs(draws.mean()) < 5 / math.sqrt(MILLION)
    assert abs(draws.var() - 1) < 5 * math.sqrt(2 / MILLION)
    assert abs((draws**3).mean()) < 5 * math.sqrt(15 / MILLION)
    assert abs((draws**4).mean() - 3) < 5 * math.sqrt(96 / MILLION)
    ordered = torch.from_numpy(np.sort(draws))
    expected = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    steps = torch.arange(MILLION + 1, dtype=torch.float64) / MILLION
    distance = max(float((steps[1:] - expected).max()), float((expected - steps[:-1]).max()))
    assert distance * math.sqrt(MILLION) < 2.2  # Kolmogorov and Smirnov: exceeded once in 8000 streams
    assert abs(float(np.mean(draws[1:] * draws[:-1]))) < 5 / math.sqrt(MILLION)


# Cohorts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("population", "count"), [(6, 3), (5, 1), (5, 4)])
def test_all_subsets_are_equally_likely(population: int, count: int) -> None:
    draws = 6000
    chosen = Counter(
        tuple(random.choose(random.stream(0, "cohort", round), population, count)) for round in range(draws)
    )
    subsets = list(itertools.combinations(range(population), count))
    assert set(chosen) == set(subsets)
    observed = np.array([chosen[subset] for subset in subsets])
    assert abs(chi_square(observed, draws / len(subsets))) < 5


@given(SIGNED, st.integers(1, 10**12), st.integers(0, 60))
def test_a_choice_is_sorted_and_has_no_duplicates(key: int, population: int, count: int) -> None:
    chosen = random.choose(key, population, count)
    assert len(chosen) == min(count, population)
    assert all(a < b for a, b in itertools.pairwise(chosen))
    assert all(0 <= number < population for number in chosen)


def test_the_cost_of_a_choice_does_not_depend_on_the_population() -> None:
    def seconds(population: int) -> float:
        begin = time.process_time()
        for key in range(20):
            random.choose(key, population, 100)
        return time.process_time() - begin

    seconds(1000)
    assert seconds(10**15) < 20 * seconds(1000) + 0.1  # anything that walks 10^15 clients never ends


# Shuffled batches ------------------------------------------------------------------------------------------


def test_every_epoch_is_a_permutation_of_the_clients_samples() -> None:
    sizes = torch.tensor([1, 2, 5, 32, 33, 100])
    keys = random.stream(0, "batch", 1, torch.arange(len(sizes)))
    order = random.shuffled(keys, sizes, torch.arange(320))
    for row, size in zip(order.tolist(), sizes.tolist(), strict=True):
        epochs = [row[first : first + size] for first in range(0, 320 - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        if size >= 32:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_a_shuffle_depends_neither_on_the_other_clients_nor_on_the_length() -> None:
    sizes = torch.tensor([7, 3, 12])
    keys = random.stream(0, "batch", 4, torch.tensor([8, 2, 5]))
    together = random.shuffled(keys, sizes, torch.arange(60))
    for place in range(3):
        own = slice(place, place + 1)
        whole = int(sizes[place]) * (24 // int(sizes[place]))
        alone = random.shuffled(keys[own], sizes[own], torch.arange(24))
        assert torch.equal(alone[0, :whole], together[place, :whole])


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_sample_is_equally_likely_in_every_place_and_order(epoch: int) -> None:
    clients, size = 24_000, 4
    keys = random.stream(0, "batch", 1, torch.arange(clients))
    order = random.shuffled(keys, torch.full((clients,), size), torch.arange(2 * size))
    part = order[:, epoch * size : (epoch + 1) * size]
    permutations = Counter(map(tuple, part.tolist()))
    assert len(permutations) == 24
    assert abs(chi_square(np.array(list(permutations.values())), clients / 24)) < 5
    for place in range(size):
        assert abs(chi_square(np.bincount(part[:, place].numpy()), clients / size)) < 5


def test_the_two_epochs_of_a_client_are_independent() -> None:
    clients, size = 24_000, 3
    keys = random.stream(0, "batch", 1, torch.arange(clients))
    order = random.shuffled(keys, torch.full((clients,), size), torch.arange(6))
    pairs = Counter(map(tuple, order.tolist()))
    assert len(pairs) == 36
    assert abs(chi_square(np.array(list(pairs.values())), clients / 36)) < 5


@kernels
@pytest.mark.parametrize("places", [1, 24, 300, random.FEW])
def test_the_kernel_shuffles_alike(places: int) -> None:
    from sartor.kernels import shuffle_triton as random_kernels

    sizes = torch.tensor([1, 0, 7, 20, 300, 5000])
    keys = random.stream(0, "batch", 4, torch.arange(len(sizes)))
    ours = random_kernels.shuffled(keys.to(DEVICE), sizes.to(DEVICE), places)
    assert torch.equal(ours.cpu(), random.shuffled(keys, sizes, torch.arange(places)))


@kernels
@pytest.mark.parametrize(("size", "width", "batches"), [(12, 4, 3), (12, 4, 2), (150, 10, 15), (6, 3, 11)])
def test_the_kernel_lays_out_batches_alike(size: int, width: int, batches: int) -> None:
    """Also of fewer than a pass, and of several."""
    from sartor.kernels import shuffle_triton as random_kernels

    numbers, start = torch.tensor([4, 0, 7]), torch.arange(9) * 1000
    places = size * -(-batches * width // size)
    keys = random.stream(0, "batch", 4, numbers)
    sizes = torch.full((3,), size)
    keys, sizes, start, numbers = (part.to(DEVICE) for part in (keys, sizes, start, numbers))
    ours = random_kernels.in_batches(keys, sizes, places, start, numbers, batches, width)
    order = random_kernels.shuffled(keys, sizes, places)
    for row, batch in enumerate(ours):
        assert torch.equal(batch, start[numbers, None] + order[:, row * width : (row + 1) * width])
    there = (part.cpu() for part in (keys, sizes, torch.arange(places), start, numbers))
    assert torch.equal(ours.cpu(), random.in_batches(*there, batches, width))


@kernels
def test_the_kernel_divides_exactly() -> None:
    """Every number of places and every size that it is for: an epoch too many would be another shuffle."""
    sizes, places = torch.arange(1, random.FEW + 1), torch.arange(random.FEW)
    quotient = ((places.float()[None] + 0.5) * (1.0 / sizes.float()[:, None])).int()
    assert torch.equal(quotient, (places[None] // sizes[:, None]).int())


def test_networks_draw_from_the_seed_as_pytorch_sets_it() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    random.seed_torch(5)
    assert torch.equal(torch.rand(3), expected)
