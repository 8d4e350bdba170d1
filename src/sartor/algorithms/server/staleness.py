"""What an update's age does to it: weights that fall with staleness, and delay compensation.

The weights are those of FedAsync (Xie et al. 2019), the compensation is that of DC-ASGD (Zheng et al. 2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("constant", "polynomial", "hinge")
TINY = 1e-7
"""Keeps DC-ASGD's adaptive factor finite where no gradient was seen."""


def decay(ages: Tensor, kind: str, exponent: float = 0.5, slope: float = 10.0, grace: float = 4.0) -> Tensor:
    """s(u) of updates that are u versions old; s(0) = 1.

    ``constant``: 1. ``polynomial``: (u + 1)^−exponent. ``hinge``: 1 up to ``grace``, then
    1 / (slope (u − grace) + 1).

    >>> decay(torch.tensor([0.0, 3.0]), "polynomial").tolist()
    [1.0, 0.5]
    """
    if kind == "constant":
        return torch.ones_like(ages)
    if kind == "polynomial":
        return (ages + 1) ** -exponent
    return 1 / (slope * (ages - grace).clamp(min=0) + 1)


def pseudo_gradient(change: Tensor, work: Tensor) -> Tensor:
    """r = −Δ / Σ_k η_k, the mean gradient of a client's steps, row by row; 0 where it took none."""
    steps = work[:, None]
    return torch.where(steps > 0, -change / steps, 0.0)


def compensate(change: Tensor, work: Tensor, drift: Tensor, lam: float | Tensor) -> Tensor:
    """Changes Δ = −Σ η_k · r with r replaced by r + λ r⊙r⊙(w − w_start), row by row.

    ``drift`` is w − w_start: how far the model has moved since. r⊙r stands for the Hessian's diagonal, which
    is coarse for several local steps, so the correction |λ r (w − w_start)| is at most the gradient itself.
    """
    correction = lam * pseudo_gradient(change, work) * drift
    return change * (1 + correction.clamp(-1, 1))


def adaptive_factors(
    change: Tensor, work: Tensor, square: Tensor, memory: float, lam: float
) -> tuple[Tensor, Tensor]:
    """DC-ASGD's λ = λ0 / √(ms + 10⁻⁷), row by row, and ms ← memory · ms + (1 − memory) r⊙r after the last.

    The mean square belongs to the server: it moves in the order in which the updates arrive.
    """
    factors = []
    for r in pseudo_gradient(change, work):
        square = memory * square + (1 - memory) * r * r
        factors.append(lam / (square + TINY).sqrt())
    return torch.stack(factors), square
