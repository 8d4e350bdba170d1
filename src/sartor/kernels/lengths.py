"""The lengths of rows: the Euclidean norm of what every client sends, found where it was computed."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.kernels.gpu import HAS_TRITON

SHORT = 1 << 16
"""Numbers of a row up to which one program of a kernel is enough for it."""


def lengths(rows: Tensor) -> Tensor:
    """The norm of every row of a matrix."""
    short = 0 < rows.shape[1] <= SHORT and rows.dtype == torch.float32
    if rows.is_cuda and HAS_TRITON and short:
        from sartor.kernels import lengths_triton

        found: Tensor = lengths_triton.lengths(rows)
        return found
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms
