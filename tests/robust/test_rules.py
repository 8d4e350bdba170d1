"""Robust rules: small cases by hand, what a few rows cannot do, and what no rule may depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from sartor.errors import SettingError
from sartor.federation.reduction import Mean, Reducer, Reduction
from sartor.robust.centres import Bulyan, CentredClipping, GeometricMedian, Median, TrimmedMean
from sartor.robust.selections import Krum, MultiKrum, NormFilter, Similarity
from sartor.runs.experiment import from_mapping
from sartor.runs.setup import set_up

RULES: dict[str, Reduction] = {
    "median": Median(),
    "trimmed-mean": TrimmedMean(),
    "geometric-median": GeometricMedian(),
    "centred-clipping": CentredClipping(),
    "bulyan": Bulyan(),
    "krum": Krum(),
    "multi-krum": MultiKrum(),
    "norm-filter": NormFilter(),
    "similarity": Similarity(),
}


def reduced(rule: Reduction, rows: Any, weights: Any = None) -> Tensor:
    rows = torch.as_tensor(rows, dtype=torch.float64)
    share = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    return Reducer(rule).sum("x", rows, share.double() / share.sum())


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


# By hand ----------------------------------------------------------------------------------------------


def test_the_median_has_half_of_the_weight_on_either_side() -> None:
    assert reduced(Median(), column(5, 1, 2)).tolist() == pytest.approx([2])
    assert reduced(Median(), column(5, 1, 2, 4)).tolist() == pytest.approx([3])  # between 2 and 4
    # Weights 1, 1, 4 of 6: below 9 there are 2/6, so 9 is the median; all alike it is 2.
    assert reduced(Median(), column(1, 2, 9), [1, 1, 4]).tolist() == pytest.approx([9])
    assert reduced(Median(weights="equal"), column(1, 2, 9), [1, 1, 4]).tolist() == pytest.approx([2])
    assert reduced(Median(), [[1, 9], [2, 8], [3, 1]]).tolist() == pytest.approx([2, 8])


def test_the_trimmed_mean_leaves_out_a_share_at_both_ends() -> None:
    # A fifth of five is one at either end: (2 + 3 + 7) / 3.
    assert reduced(TrimmedMean(share=0.2), column(3, 100, 2, 7, -50)).tolist() == pytest.approx([4])
    # A quarter of three are three quarters of a row: (1/4 · 1 + 1 · 2 + 1/4 · 7) / 1.5.
    assert reduced(TrimmedMean(share=0.25), column(1, 2, 7)).tolist() == pytest.approx([8 / 3])
    # Weights 1/2, 1/4, 1/4, of which 1/4 goes at either end: 1/4 of the first, 1/4 of the second.
    assert reduced(TrimmedMean(share=0.25), column(1, 3, 90), [2, 1, 1]).tolist() == pytest.approx([2])
    assert reduced(TrimmedMean(share=0), column(1, 3, 8)).tolist() == pytest.approx([4])


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    # Of a triangle with angles below 120° all three sides are seen from it at 120°: here (0, 1/√3).
    triangle = [[-1, 0], [1, 0], [0, math.sqrt(3)]]
    found = reduced(GeometricMedian(steps=200, tolerance=1e-9), triangle)
    assert found.tolist() == pytest.approx([0, 1 / math.sqrt(3)], abs=1e-5)
    # On a line it is the median, also where that is one of the rows.
    assert reduced(GeometricMedian(steps=200, tolerance=1e-9), column(0, 1, 10)).tolist() == pytest.approx(
        [1], abs=1e-5
    )
    # More than half of the weight in one row: it is that row.
    found = reduced(GeometricMedian(steps=200, tolerance=1e-9), [[4, 4], [0, 0], [1, 7]], [3, 1, 1])
    assert found.tolist() == pytest.approx([4, 4], abs=1e-4)


def test_krum_takes_the_row_nearest_to_its_neighbours() -> None:
    # n = 5, f = 1: two nearest others. Scores of 0, 1, 3, 7, 50: 1+9, 1+4, 4+9, 16+36, 43²+47².
    rows = column(0, 1, 3, 7, 50)
    assert reduced(Krum(share=0.2), rows).tolist() == pytest.approx([1])
    # All but the f = 1 worst: (0 + 1 + 3 + 7) / 4, and with weights as the method has them.
    assert reduced(MultiKrum(share=0.2), rows).tolist() == pytest.approx([2.75])
    assert reduced(MultiKrum(share=0.2), rows, [3, 1, 1, 1, 9]).tolist() == pytest.approx([11 / 6])


def test_bulyan_averages_near_the_median_of_what_krum_chose() -> None:
    # n = 7, f = 1: Krum chooses 5 of them, with 4, 3, 2 … nearest others as fewer are left; the mean is that
    # of the 3 numbers nearest to the median of the five.
    rows = column(0, 1, 2, 3, 4, 5, 1000)
    # Of equal scores the row nearest to all goes, which is the larger one here. With 4 others, 2 and 3 have
    # 4+1+1+4: 3 goes. Left 0 1 2 4 5 1000, 3 others: 2 has 1+4+4, 1 has 1+1+9: 2 goes. Left 0 1 4 5 1000, 2
    # others: 1 and 4 have 1+9: 4 goes. Left 0 1 5 1000, 1 other: 0 and 1 have 1: 1 goes. Left 0 5 1000: 0 and
    # 5 have 25: 5 goes. Of 1 2 3 4 5 the three nearest to the median 3 are 2, 3 and 4.
    assert reduced(Bulyan(share=0.14), rows).tolist() == pytest.approx([3])
    # Without attackers all are chosen, and all are near enough.
    assert reduced(Bulyan(share=0), column(1, 2, 6)).tolist() == pytest.approx([3])


def test_clipping_is_around_the_centre() -> None:
    # From v = 2, the median, distances 1, 0, 8; radius 2: moves by (−1 + 0 + 2) / 3.
    rule = CentredClipping(radius=2, steps=1)
    assert reduced(rule, column(1, 2, 10)).tolist() == pytest.approx([7 / 3])
    # The next time from there: distances 4/3, 1/3, 23/3.
    reducer, share = Reducer(rule), torch.full((3,), 1 / 3, dtype=torch.float64)
    for expected in (7 / 3, 7 / 3 + (-4 / 3 - 1 / 3 + 2) / 3):
        assert reducer.sum("x", column(1, 2, 10), share).tolist() == pytest.approx([expected])
    # Two times in one round is the same.
    twice = reduced(CentredClipping(radius=2, steps=2), column(1, 2, 10))
    assert twice.tolist() == pytest.approx([7 / 3 + 1 / 9])


def test_the_filter_goes_by_the_distance_from_the_medians() -> None:
    # The median is 3; distances 2, 1, 0, 1, 6, their median 1. Within twice that: 1, 2, 3 and 4.
    assert reduced(NormFilter(factor=2), column(1, 2, 3, 4, 9)).tolist() == pytest.approx([2.5])
    assert reduced(NormFilter(factor=1), column(1, 2, 3, 4, 9)).tolist() == pytest.approx([3])


def test_similarity_leaves_out_who_is_unlike_all_others() -> None:
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 3.3], dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    trusted = Reducer(Similarity(by=("cosine",))).trusted("x", rows)
    assert trusted.tolist() == [True] * 5 + [False]
    # A row a hundred times as long has the same angle: distances tell.
    long = rows * torch.tensor([1, 1, 1, 1, 100, 1.0])[:, None]
    assert Reducer(Similarity(by=("cosine",))).trusted("x", long)[4]
    assert not Reducer(Similarity(by=("distance",))).trusted("x", long)[4]
    assert Reducer(Similarity()).trusted("x", long).tolist() == [True] * 4 + [False] * 2


def test_similarity_takes_copies_for_one_and_opposition_for_what_most_are_not() -> None:
    rows = torch.tensor([[1.0, 0.2], [0.2, 1.0], [0.7, 0.7], [1.0, 0.2], [1.0, 0.2]])
    assert Reducer(Similarity(by=("copies",))).trusted("x", rows).tolist() == [True] * 3 + [False] * 2
    # Medians of the cosines with the five others, by angle: 1/2 at 0° and 60°, 0 at −90°, −1/2 at 180°. Most
    # have 1/2, so what is below −1/4 is opposed to them.
    unit = torch.tensor([0.0, 60.0, 60.0, 0.0, -90.0, 180.0]).deg2rad()
    rows = torch.stack([unit.cos(), unit.sin()], dim=1)
    assert Reducer(Similarity(by=("cosine",))).trusted("x", rows).tolist() == [True] * 5 + [False]
    # Where most are not alike there is nothing to be opposed to.
    cross = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    assert Reducer(Similarity()).trusted("x", cross).all()


@pytest.mark.parametrize("step", [1e-2, 1e-4])
def test_models_that_are_alike_are_no_copies(step: float) -> None:
    """Models after a short step differ by little of their length, and a copy among them by rounding alone."""
    drawn = torch.Generator().manual_seed(3)
    start, changes = torch.randn(400, generator=drawn), torch.randn(6, 400, generator=drawn)
    models = start + step * changes
    copied = torch.cat([models, start + (models[4:5] - start)])  # what the attack mimic sends
    for rows in (copied, copied.double(), 1e3 * copied):
        assert Reducer(Similarity(by=("copies",))).trusted("w", rows).tolist() == [True] * 6 + [False]
    changes = torch.cat([changes, changes[4:5]])
    assert Reducer(Similarity(by=("copies",))).trusted("delta", changes).tolist() == [True] * 6 + [False]


# What is so for every row there can be ----------------------------------------------------------------

numbers = st.floats(-10, 10, allow_nan=False, width=32)


def cloud(n: int) -> st.SearchStrategy[Tensor]:
    return st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=n, max_size=n).map(
        lambda rows: torch.tensor(rows, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_rows_in_another_order_give_the_same(name: str, data: Any) -> None:
    # Of rows at equal distances Krum takes the first, so that rows in general position are drawn here.
    rows = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(_seed(data)))
    order = torch.tensor(data.draw(st.permutations(range(9))))
    assert torch.allclose(reduced(RULES[name], rows), reduced(RULES[name], rows[order]), atol=1e-9)


def _seed(data: Any) -> int:
    return int(data.draw(st.integers(0, 10_000)))


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=15)
@given(row=st.lists(numbers, min_size=1, max_size=4), n=st.integers(1, 9))
def test_equal_rows_give_that_row(name: str, row: list[float], n: int) -> None:
    rows = torch.tensor(row, dtype=torch.float64).expand(n, -1)
    assert torch.allclose(reduced(RULES[name], rows), rows[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in RULES if name != "similarity"])
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_a_shift_of_all_rows_shifts_the_result(name: str, data: Any) -> None:
    generator = torch.Generator().manual_seed(_seed(data))
    rows = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    shift = torch.tensor(data.draw(st.lists(numbers, min_size=3, max_size=3)), dtype=torch.float64)
    moved = reduced(RULES[name], rows + shift)
    assert torch.allclose(moved, reduced(RULES[name], rows) + shift, atol=1e-4)


def test_distances_are_the_same_after_a_shift_and_angles_after_a_turn() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.9, -0.1], [0.8, 0.0], [0.0, 3.0]])
    turned = rows @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    for other in (rows - 5, turned):
        rule = Reducer(Similarity(by=("distance",)))
        assert rule.trusted("x", rows).tolist() == rule.trusted("x", other).tolist() == [True] * 4 + [False]
    opposed = torch.cat([rows[:4], -rows[:1]])
    for other in (opposed, 7 * opposed @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]])):
        assert Reducer(Similarity(by=("cosine",))).trusted("x", other).tolist() == [True] * 4 + [False]


# f rows of n that may be anything: what is given stays near the others.
BREAKDOWN = {
    "median": (Median(), 9, 4),
    "trimmed-mean": (TrimmedMean(share=0.4), 10, 4),
    "geometric-median": (GeometricMedian(), 9, 4),
    "centred-clipping": (CentredClipping(), 9, 4),
    "krum": (Krum(share=0.33), 9, 3),
    "multi-krum": (MultiKrum(share=0.33), 9, 3),
    "bulyan": (Bulyan(share=0.2), 11, 2),
    "norm-filter": (NormFilter(), 9, 4),
    "similarity": (Similarity(by=("distance",)), 9, 4),
}


@pytest.mark.parametrize("name", BREAKDOWN)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_so_many_attackers_cannot_take_it_far(name: str, data: Any) -> None:
    rule, n, attackers = BREAKDOWN[name]
    honest = data.draw(cloud(n - attackers))
    far = st.sampled_from([1e3, 1e5, 1e8, -1e4])
    bad = torch.stack([data.draw(far) * row for row in data.draw(cloud(attackers))])
    found = reduced(rule, torch.cat([honest, bad]))
    reach = torch.linalg.vector_norm(honest - honest.mean(dim=0), dim=1).max()
    # It may be a few times as far from the honest mean as the honest rows are, however far the others are.
    assert float(torch.linalg.vector_norm(found - honest.mean(dim=0))) <= 20 * float(reach) + 1e-6


def test_the_mean_has_no_such_bound_and_a_majority_wins() -> None:
    honest, bad = torch.zeros(5, 2), torch.full((4, 2), 1e8)
    assert reduced(Mean(weights="equal"), torch.cat([honest, bad])).min() > 1e7
    for rule in (Median(), GeometricMedian(), NormFilter()):
        assert reduced(rule, torch.cat([honest, torch.full((6, 2), 1e8)])).min() > 1e7
    # By weight: one row with two thirds of it is a majority.
    assert reduced(Median(), column(0, 1, 2, 1e8), [1, 1, 1, 6]).item() == pytest.approx(1e8)


# Settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "share", "clients", "message"),
    [
        ("krum", 0.4, 10, r"krum needs 2f \+ 3 = 11 replies where f = 4 of 10 clients"),
        ("multi-krum", 0.3, 4, r"needs 2f \+ 3 = 7 replies where f = 2 of 4"),
        ("bulyan", 0.2, 10, r"bulyan needs 4f \+ 3 = 11 replies where f = 2 of 10"),
    ],
)
def test_too_many_attackers_are_refused_before_anything_starts(
    name: str, share: float, clients: int, message: str
) -> None:
    mapping = {"data": {"clients": clients}, "aggregate": {"name": name, "share": share}}
    with pytest.raises(SettingError, match=message):
        set_up(from_mapping(mapping))
    set_up(from_mapping({**mapping, "data": {"clients": 30}}))


@pytest.mark.parametrize("name", RULES)
def test_a_round_with_one_or_two_replies_has_a_value(name: str) -> None:
    assert reduced(RULES[name], column(4)).tolist() == pytest.approx([4])
    assert 2 <= reduced(RULES[name], column(2, 4)).item() <= 4


@pytest.mark.parametrize("name", RULES)
def test_a_quantity_without_numbers_stays_so(name: str) -> None:
    """As the norm layers' parameters of a network that has none; and nobody's replies are zero."""
    assert reduced(RULES[name], torch.zeros(5, 0)).shape == (0,)
    assert Reducer(RULES[name]).sum("x", torch.zeros(0, 2), torch.zeros(0)).tolist() == [0, 0]
    if RULES[name].selects:
        assert Reducer(RULES[name]).trusted("x", torch.zeros(5, 0)).all()


def test_fewer_replies_take_the_attackers_that_they_allow() -> None:
    # share = 0.45 of four is f = 2, for which seven are needed; f = 0 is what four allow: all are used.
    assert reduced(MultiKrum(share=0.45), column(1, 2, 3, 6)).tolist() == pytest.approx([3])
    assert reduced(Bulyan(share=0.24), column(1, 2, 3, 6)).tolist() == pytest.approx([3])


@pytest.mark.parametrize("case", ["sparse", "a row is the coordinates' median", "near a row", "equal rows"])
def test_the_geometric_median_leaves_a_row_that_it_begins_at(case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    if case == "sparse":  # most rows have nothing at each place, and one has nothing at all
        rows = torch.zeros(9, 50, dtype=torch.float64)
        for place in range(1, 9):
            rows[place, 5 * place : 5 * place + 3] = 1 + torch.rand(3, generator=generator).double()
    elif case != "equal rows":
        rows[0] = rows[1:].median(dim=0).values + (1e-5 if case == "near a row" else 0)
    else:
        rows[:4] = rows[0]
    weights = torch.full((9,), 1 / 9, dtype=torch.float64)

    def cost(point: Any) -> float:
        return float(weights @ torch.linalg.vector_norm(rows - torch.as_tensor(point), dim=1))

    starts = [*rows, rows.mean(0)]
    best = min(float(minimize(cost, start.numpy(), method="BFGS").fun) for start in starts)
    rule = GeometricMedian()
    found, _ = rule.reduce(0, rows, weights, rule.init(rows[0]))
    assert cost(found) <= 1.001 * best
