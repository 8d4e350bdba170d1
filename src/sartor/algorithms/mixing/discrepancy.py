"""How far two sets of features are apart: the maximum mean discrepancy with Gaussian kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.model.batch import Batch

KERNELS = 5
"""Kernels whose widths double from one to the next."""


def mean_discrepancy(z: Tensor, other: Tensor, batch: Batch) -> Tensor:
    """Σ_ab q_a q_b [k(z_a, z_b) + k(o_a, o_b) − 2 k(z_a, o_b)] over the samples of a batch.

    The widths follow from the mean squared distance between different points, the middle kernel having that
    one. Padding has weight 0.
    """
    points = torch.cat([z.flatten(1), other.flatten(1)])
    size = len(z)
    real = points.new_ones(size) if batch.weight is None else batch.weight.to(points.dtype)
    real = torch.cat([real, real])
    lengths = (points * points).sum(dim=1)
    squares = (lengths[:, None] + lengths - 2 * points @ points.T).clamp(min=0)
    count = real.sum()
    width = (real @ squares @ real) / (count * (count - 1)).clamp(min=1)
    width = width.detach().clamp(min=torch.finfo(points.dtype).tiny)
    kernel = sum(torch.exp(-squares / (width * 2.0 ** (k - KERNELS // 2))) for k in range(KERNELS))
    sign = torch.cat([real[:size], -real[size:]]) / real[:size].sum()
    return sign @ torch.as_tensor(kernel) @ sign
