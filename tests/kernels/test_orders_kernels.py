"""What stands in the middle of columns, by counting, is what it is by putting them in order.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch
from test_convolution import DEVICE, kernels
from torch import Tensor

from sartor.robust import orders


def cloud(n: int, kind: torch.dtype, size: int = 301) -> Tensor:
    """Rows with numbers that are equal now and then."""
    rows = torch.randn(n, size, generator=torch.Generator().manual_seed(n), dtype=kind)
    return rows.mul(4).round().div(4)


def shares(n: int, equal: bool) -> Tensor:
    weights = torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.1
    return torch.full((n,), 1 / n) if equal else weights / weights.sum()


@kernels
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("n", [1, 2, 5, 10, 16, 100])
def test_counting_finds_what_ordering_finds(n: int, equal: bool, kind: torch.dtype) -> None:
    from sartor.kernels import orders_triton

    rows, weights = cloud(n, kind, 301 if n <= orders.FEW else 40), shares(n, equal)
    there = rows.to(DEVICE), weights.to(DEVICE)
    assert torch.equal(orders_triton.median(*there).cpu(), orders.median(rows, weights))
    for share in (0.0, 0.1, 0.3, 0.45):
        expected = orders.trimmed_mean(rows, weights, share)
        found = orders_triton.trimmed_mean(*there, share).cpu()
        assert found.dtype == kind
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@kernels
def test_a_row_without_weight_is_not_counted() -> None:
    from sartor.kernels import orders_triton

    rows, weights, others = cloud(7, torch.float32), shares(7, False), torch.tensor([0, 1, 3, 4, 6])
    weights[[2, 5]] = 0
    weights /= weights.sum()
    rows[2], rows[5] = 1e30, -1e30
    there = rows.to(DEVICE), weights.to(DEVICE)
    expected = orders.median(rows[others], weights[others])
    assert torch.equal(orders_triton.median(*there).cpu(), expected)
    trimmed = orders.trimmed_mean(rows[others], weights[others], 0.2)
    torch.testing.assert_close(orders_triton.trimmed_mean(*there, 0.2).cpu(), trimmed)


@kernels
@pytest.mark.parametrize(("n", "near"), [(1, 1), (4, 2), (6, 2), (9, 5), (9, 9)])
def test_the_mean_near_the_median_is_that_of_chosen_rows(n: int, near: int) -> None:
    from sartor.kernels import orders_triton

    rows = torch.randn(n + 2, 500, generator=torch.Generator().manual_seed(n))  # no two are as near
    chosen = torch.arange(n) + 1
    weights = torch.zeros(n + 2).index_fill(0, chosen, 1 / n)
    found = orders_triton.mean_near_median(rows.to(DEVICE), weights.to(DEVICE), near).cpu()
    torch.testing.assert_close(found, orders.mean_near_median(rows, chosen, near))


@kernels
def test_equal_numbers_have_themselves_as_their_mean() -> None:
    """To the bit, and whatever is cut off; a view of every other column is read in its place."""
    from sartor.kernels import orders_triton

    rows = cloud(1, torch.float32, 602).mul(1 / 3).expand(9, -1)[:, ::2].to(DEVICE)
    for share in (0.1, 0.3):
        found = orders_triton.trimmed_mean(rows, shares(9, False).to(DEVICE), share)
        assert torch.equal(found, rows[0])
