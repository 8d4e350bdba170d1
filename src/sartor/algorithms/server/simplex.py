"""Weights on the simplex: the nearest point of it, and the best mix of estimates that differ in variance."""

from __future__ import annotations

import torch
from torch import Tensor


def project(x: Tensor, scale: Tensor) -> Tensor:
    """Each row's point of the simplex that is nearest where entry j counts ``scale[j]``.

    a_j = max(0, x_j − ν / scale_j), with ν such that the entries add up to 1: those with the largest
    x_j scale_j are the positive ones.
    """
    order = (x * scale).argsort(dim=1, descending=True, stable=True)
    sums = torch.cumsum(x.gather(1, order), dim=1)
    levels = (sums - 1) / torch.cumsum(1 / scale.gather(1, order), dim=1)
    positive = (x * scale).gather(1, order) > levels
    last = positive.sum(dim=1, keepdim=True).clamp(min=1) - 1
    return (x - levels.gather(1, last) / scale).clamp(min=0)


def head_mix(h: Tensor, variance: Tensor, iterations: int) -> Tensor:
    """a_i = argmin over the simplex of Σ_j a_j² V_j + ‖Σ_j a_j (h_i − h_j)‖², one row for each client.

    Accelerated projected gradients, restarted when they point backwards, a fixed number of steps. Distances
    are measured by a diagonal that bounds the curvature, Q_i ≤ 2 diag(V_j + r_j Σ_k r_k), r_j = ‖h_i − h_j‖,
    so that clients of very different variance do not slow each other down.
    """
    h, variance = h.flatten(1).double(), variance.double()
    gram = h @ h.T
    norms = gram.diagonal()
    r = (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0).sqrt()
    scale = 2 * (variance + r * r.sum(dim=1, keepdim=True))
    scale = scale.clamp(min=1e-12 * float(scale.max()) + 1e-300)

    def slope(a: Tensor) -> Tensor:
        spread = a @ gram
        total = a.sum(dim=1, keepdim=True)
        inner = (norms[:, None] - gram) * total - spread.diagonal()[:, None] + spread
        return 2 * (variance * a + inner)

    a = torch.full_like(gram, 1 / len(gram))
    ahead, momentum = a, a.new_ones(len(a), 1)
    for _ in range(iterations):
        after = project(ahead - slope(ahead) / scale, scale)
        backwards = ((ahead - after) * scale * (after - a)).sum(dim=1, keepdim=True) > 0
        grown = torch.where(backwards, 1.0, (1 + (1 + 4 * momentum**2).sqrt()) / 2)
        ahead = after + torch.where(backwards, 0.0, (momentum - 1) / grown) * (after - a)
        a, momentum = after, grown
    return a
