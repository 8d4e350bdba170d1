"""Paired statistics: against scipy, counting and hand values, and under swaps and reorderings."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from sartor.studies.statistics import (
    EXACT,
    bootstrap_interval,
    cliques,
    critical_difference,
    holm,
    ranking,
    signed_ranks,
)

DIFFERENCES = st.lists(st.integers(-4, 4).map(lambda tenths: tenths / 10), min_size=1, max_size=30)


def draws(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.2, 1.0, count)


# Signed ranks ----------------------------------------------------------------------------------------------


def test_signed_ranks_of_a_small_sample_by_hand() -> None:
    # Ranks of |d|: 1, 2, 3.5, 3.5, 5; the zero is left out.
    test = signed_ranks([0.1, -0.2, 0.3, 0.3, 0.0, 0.5])
    assert (test.better, test.equal, test.worse) == (4, 1, 1)
    assert (test.positive, test.negative) == (13.0, 2.0)
    assert test.rank_biserial == pytest.approx(11 / 15)
    # Sums of ranks of at most 2: {}, {1}, {2}; of 32 choices, at both ends.
    assert test.p == pytest.approx(2 * 3 / 32)


@pytest.mark.parametrize("count", [5, 20, EXACT])
def test_the_exact_p_value_is_scipys_where_there_are_no_ties(count: int) -> None:
    differences = draws(count, seed=count)
    expected = stats.wilcoxon(differences, method="exact")
    test = signed_ranks(differences)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert min(test.positive, test.negative) == expected.statistic


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
@settings(max_examples=60)
def test_the_exact_p_value_with_ties_is_the_share_of_signs(differences: list[int]) -> None:
    test = signed_ranks(differences)
    ranks = stats.rankdata([abs(value) for value in differences if value])
    sums = [
        sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    low = sum(total <= min(test.positive, test.negative) for total in sums) / len(sums)
    assert test.p == pytest.approx(min(1.0, 2 * low))


@pytest.mark.parametrize("decimals", [6, 1])
def test_the_approximation_is_scipys_with_ties_and_zeros(decimals: int) -> None:
    differences = np.round(draws(200), decimals)
    expected = stats.wilcoxon(differences, zero_method="wilcox", correction=False, method="approx")
    assert signed_ranks(differences).p == pytest.approx(expected.pvalue, rel=1e-9)


def test_the_approximation_continues_the_exact_values() -> None:
    more = draws(EXACT + 1)
    exact, approximate = stats.wilcoxon(more, method="exact").pvalue, signed_ranks(more).p
    assert approximate != exact
    assert approximate == pytest.approx(exact, rel=0.1)


@given(DIFFERENCES)
@example([0.0, 0.0, 0.1, -0.1])
@settings(max_examples=60)
def test_swapping_two_methods_turns_the_signs_and_nothing_else(differences: list[float]) -> None:
    test, turned = signed_ranks(differences), signed_ranks([-value for value in differences])
    assert (test.better, test.positive, test.p) == (turned.worse, turned.negative, turned.p)
    assert test.rank_biserial == -turned.rank_biserial
    low, high = bootstrap_interval(differences, seed=3, draws=50)
    assert bootstrap_interval([-value for value in differences], seed=3, draws=50) == (-high, -low)


@given(DIFFERENCES, st.randoms())
@settings(max_examples=60)
def test_the_order_of_clients_changes_nothing(differences: list[float], order: object) -> None:
    mixed = list(differences)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    assert signed_ranks(mixed) == signed_ranks(differences)
    assert bootstrap_interval(mixed, 1, draws=50) == bootstrap_interval(differences, 1, draws=50)


def test_differences_that_differ_by_rounding_are_ties() -> None:
    assert 0.9 - 0.8 != 0.8 - 0.7
    test = signed_ranks([0.9 - 0.8, -(0.8 - 0.7), 0.5])
    assert (test.positive, test.negative) == (4.5, 1.5)
    assert signed_ranks([0.1 + 0.2 - 0.3]).equal == 1


def test_no_difference_at_all_is_no_evidence() -> None:
    test = signed_ranks([0.0, 0.0])
    assert (test.p, test.rank_biserial, test.equal) == (1.0, 0.0, 2)


@pytest.mark.parametrize("values", [[[1.0]], [1.0, math.nan]])
def test_only_finite_numbers_in_a_line_are_taken(values: object) -> None:
    with pytest.raises(ValueError, match="one finite number per pair"):
        signed_ranks(values)


# Holm ------------------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    # In order: 4 × 0.005, 3 × 0.01, 2 × 0.03, and 0.04 raised to the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_no_correction_and_bonferronis(p_values: list[float]) -> None:
    corrected = holm(p_values)
    for p, q in zip(p_values, corrected, strict=True):
        assert p <= q <= min(1.0, len(p_values) * p)
    order = np.argsort(p_values)
    assert (np.diff(np.asarray(corrected)[order]) >= 0).all()


# The bootstrap ---------------------------------------------------------------------------------------------


def test_the_bootstrap_of_two_values_has_three_means() -> None:
    # The mean of two draws from {0, 1} is 0, ½, 1 with probabilities ¼, ½, ¼.
    assert bootstrap_interval([1.0, 0.0], seed=0, level=0.95) == (0.0, 1.0)
    assert bootstrap_interval([1.0, 0.0], seed=0, level=0.4) == (0.5, 0.5)


def test_the_bootstrap_of_many_values_is_the_normal_interval() -> None:
    values = draws(400)
    low, high = bootstrap_interval(values, seed=0)
    reach = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - reach, abs=0.15 * reach)
    assert high == pytest.approx(values.mean() + reach, abs=0.15 * reach)
    wider = bootstrap_interval(values, seed=0, level=0.99)
    assert wider[0] < low < high < wider[1]


def test_the_bootstrap_follows_from_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = draws(30)
    assert bootstrap_interval(values, seed=5) == bootstrap_interval(values, seed=5)
    assert bootstrap_interval(values, seed=5) != bootstrap_interval(values, seed=6)
    monkeypatch.setattr("sartor.studies.statistics.BLOCK", 100)  # a few draws at a time
    low, high = bootstrap_interval(values, seed=5)
    reach = 1.96 * values.std() / math.sqrt(30)
    assert (low, high) == pytest.approx((values.mean() - reach, values.mean() + reach), abs=0.3 * reach)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([], seed=0)


# Ranks of many methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("decimals", [6, 1])
@pytest.mark.parametrize("methods", [3, 5])
def test_friedman_is_scipys(methods: int, decimals: int) -> None:
    scores = np.round(np.random.default_rng(1).random((25, methods)), decimals)
    expected = stats.friedmanchisquare(*scores.T)
    found = ranking(scores)
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue)
    assert sum(found.ranks) == pytest.approx(methods * (methods + 1) / 2)


def test_ranks_by_hand() -> None:
    found = ranking([[0.9, 0.5, 0.5], [0.9, 0.8, 0.1]])
    assert found.ranks == (1.0, 2.25, 2.75)
    assert ranking([[0.5, 0.5]] * 4).p == 1.0
    assert ranking([[0.3 - 0.1, 0.2]]).ranks == (1.5, 1.5)
    # Two methods, one better in all of 4 blocks: χ² = 4.
    assert ranking([[1, 0]] * 4).statistic == pytest.approx(4.0)
    with pytest.raises(ValueError, match="at least two methods"):
        ranking([[0.5]])


def test_the_order_of_methods_and_blocks_only_reorders_the_ranks() -> None:
    scores = np.random.default_rng(2).random((10, 4))
    found = ranking(scores)
    mixed = ranking(scores[::-1, [2, 0, 3, 1]])
    assert mixed.ranks == pytest.approx([found.ranks[place] for place in (2, 0, 3, 1)])
    assert (mixed.p, mixed.critical_difference) == pytest.approx((found.p, found.critical_difference))


@pytest.mark.parametrize(
    ("methods", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (8, 3.031), (10, 3.164)]
)
def test_nemenyis_critical_values_are_those_of_the_printed_table(methods: int, q: float) -> None:
    scale = math.sqrt(methods * (methods + 1) / (6 * 30))
    assert critical_difference(methods, 30) / scale == pytest.approx(q, abs=1e-3)
    assert critical_difference(methods, 30, alpha=0.1) < critical_difference(methods, 30)


@given(st.lists(st.integers(4, 40).map(lambda rank: rank / 4), min_size=2, max_size=8), st.floats(0.1, 4))
def test_cliques_are_the_largest_groups_within_the_difference(ranks: list[float], reach: float) -> None:
    found = cliques(ranks, reach)
    for clique in found:
        assert ranks[clique[-1]] - ranks[clique[0]] <= reach
        assert not any(set(clique) < set(other) for other in found)
    for one, other in itertools.combinations(range(len(ranks)), 2):
        together = any(one in clique and other in clique for clique in found)
        assert together == (abs(ranks[one] - ranks[other]) <= reach)
