"""What rules count by: every way to order columns gives the same, and what follows is the definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sartor.federation.reduction import Reducer
from sartor.robust import orders
from sartor.robust.centres import GeometricMedian, Median, TrimmedMean
from sartor.robust.selections import NormFilter


def cloud(n: int, d: int = 301, seed: int = 0) -> Tensor:
    """Rows with numbers that are equal now and then."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).mul(4).round().div(4)


def shares(n: int) -> Tensor:
    weights = torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.1
    return weights / weights.sum()


@pytest.mark.parametrize("n", range(1, orders.FEW + 1))
def test_a_network_that_orders_zeros_and_ones_orders_everything(n: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    columns = list(itertools.product((0, 1), repeat=n)) if n <= 8 else None
    rows = torch.randint(0, 2, (n, 4096), generator=drawn) if columns is None else torch.tensor(columns).T
    found = orders.compared(rows.to(torch.int8))
    assert torch.equal(found, rows.to(torch.int8).sort(dim=0).values)
    assert torch.equal(orders.compared(cloud(n)), cloud(n).sort(dim=0).values)


@pytest.mark.parametrize("n", [1, 2, 5, 10, 16, 17])
@pytest.mark.parametrize("equal", [True, False])
def test_blocks_and_the_way_to_order_change_nothing(
    n: int, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights = cloud(n), torch.full((n,), 1 / n) if equal else shares(n)
    median, trimmed = orders.median(rows, weights), orders.trimmed_mean(rows, weights, 0.2)
    elsewhere: tuple[str, Any] = ("by_numpy", lambda rows: False)  # as a device sorts
    for setting, value in (("CACHED", 7 * n), ("SORTED", 5 * n), elsewhere, ("FEW", 0)):
        monkeypatch.setattr(orders, setting, value)
        assert torch.equal(orders.median(rows, weights), median)
        assert torch.allclose(orders.trimmed_mean(rows, weights, 0.2), trimmed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 4, 9, 20])
def test_the_weighted_median_is_where_half_of_the_weight_is_reached(n: int) -> None:
    rows, weights = cloud(n, 40), shares(n)
    for place, found in enumerate(orders.median(rows, weights)):
        column = rows[:, place]
        below, above = weights[column < found].sum(), weights[column > found].sum()
        assert below <= 0.5 + orders.EPSILON
        assert above <= 0.5 + orders.EPSILON


def test_distances_by_blocks_are_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, centre = cloud(6).double(), cloud(1, seed=1)[0].double()
    expected = torch.stack([(row - centre).square().sum().sqrt() for row in rows])
    for numbers in (orders.CACHED, 7, 1):
        monkeypatch.setattr(orders, "CACHED", numbers)
        assert torch.allclose(orders.distances_from(centre, rows), expected, rtol=1e-14)


@pytest.mark.parametrize("factor", [1.0, 1e2, 1e6])
@pytest.mark.parametrize("equal", [True, False])
def test_unit_vectors_to_the_rows_cancel_at_the_geometric_median(factor: float, equal: bool) -> None:
    rows = 3 + 0.01 * torch.randn(10, 500, generator=torch.Generator().manual_seed(0))  # near each other
    rows[:3] *= factor
    weights = torch.full((10,), 0.1) if equal else shares(10)
    found, _ = GeometricMedian(steps=200, tolerance=1e-6).reduce(0, rows, weights, {})
    apart = (rows - found).double()
    pull = (weights[:, None] * apart / torch.linalg.vector_norm(apart, dim=1, keepdim=True)).sum(dim=0)
    assert float(torch.linalg.vector_norm(pull)) < 2e-3


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), GeometricMedian(), NormFilter()])
def test_a_row_without_weight_is_not_there(rule: Median) -> None:
    rows, weights = cloud(6), shares(6)
    weights[2] = 0
    others = torch.tensor([0, 1, 3, 4, 5])
    found = Reducer(rule).sum("x", rows, weights)
    assert torch.equal(found, Reducer(rule).sum("x", rows[others], weights[others]))
    assert not Reducer(rule).sum("x", rows, torch.zeros(6)).any()
