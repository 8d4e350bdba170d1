"""The lengths of rows, by a kernel or not.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch
from test_convolution import DEVICE, kernels

from sartor.kernels.lengths import lengths


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 70])
def test_a_row_has_its_norm(size: int, kind: torch.dtype) -> None:
    rows = torch.randn(3, size, dtype=kind, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(lengths(rows), rows.square().sum(1).sqrt())


@kernels
@pytest.mark.parametrize("size", [1, 3, 130, 5770, 8192, 20_001])
def test_the_kernel_finds_the_norms(size: int) -> None:
    """Also of rows that lie apart, or across."""
    from sartor.kernels import lengths_triton

    wide = torch.randn(5, size + 3, generator=torch.Generator().manual_seed(size))
    for rows in (wide[:, :size].contiguous(), wide[:, 1 : size + 1], wide.t()[:size].clone().t()):
        found = lengths_triton.lengths(rows.to(DEVICE)).cpu()
        torch.testing.assert_close(found, torch.linalg.vector_norm(rows, dim=1), rtol=1e-6, atol=0)


@kernels
def test_what_is_no_number_shows_in_the_norm() -> None:
    from sartor.kernels import lengths_triton

    rows = torch.ones(4, 9000)
    rows[1, 8999], rows[2, 3], rows[3, 0] = torch.inf, torch.nan, 1e30
    found = lengths_triton.lengths(rows.to(DEVICE)).cpu()
    assert found.isfinite().tolist() == torch.linalg.vector_norm(rows, dim=1).isfinite().tolist()
