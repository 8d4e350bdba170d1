"""Quadratic programmes over the simplex, many at once: the best mix of estimates that differ in variance."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 24
"""Numbers of the matrices that are held at once."""
FLOOR = 1e-13
"""The least variance, in units of the largest distance: of equally good mixes the most even one is taken."""
PATIENCE = 3
"""Exchanges of whole sets in a row that may leave as many signs wrong, before entries change one by one."""


def least_on_simplex(q: Tensor) -> Tensor:
    """argmin of aᵀ Q a over the simplex for each of several positive definite matrices, [n, m, m].

    A vector x ≥ 0 with Q x ≥ 1, and equality where x > 0, has the direction of a. Which entries are positive
    is guessed, all at first; one batch of linear equations gives x and Q x, and entries of the wrong sign
    change sides (block principal pivoting, Júdice and Pires 1994): a few batches, and it is the optimum.

    >>> least_on_simplex(torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[1.0, 2.0], [2.0, 9.0]]])).tolist()
    [[0.75, 0.25], [1.0, 0.0]]
    """
    dtype, size, q = q.dtype, q.shape[-1], q.double()
    unit = torch.eye(size, dtype=q.dtype, device=q.device)
    q = q / q.diagonal(dim1=1, dim2=2).amax(dim=1)[:, None, None]
    positive = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    fewest = torch.full((len(q),), size + 1, device=q.device)
    patience = torch.full_like(fewest, PATIENCE)
    places = torch.arange(size, device=q.device)
    for _ in range(10 * size + 20):
        both = positive[:, :, None] & positive[:, None, :]
        x = torch.linalg.solve(torch.where(both, q, unit), positive.to(q.dtype)[:, :, None])[:, :, 0]
        slack = (q @ x[:, :, None])[:, :, 0] - 1
        wrong = torch.where(positive, x < 0, slack < -1e-9)
        count = wrong.sum(dim=1)
        if not bool(count.any()):
            break
        better = count < fewest
        patience = torch.where(better, PATIENCE, patience - 1)
        fewest = torch.minimum(fewest, count)
        last = torch.where(wrong, places, -1).amax(dim=1, keepdim=True)
        positive = positive ^ (wrong & ((patience >= 0)[:, None] | (places == last)))
    x = x.clamp(min=0)
    mix: Tensor = (x / x.sum(dim=1, keepdim=True)).to(dtype)
    return mix


def head_mix(h: Tensor, variance: Tensor) -> Tensor:
    """a_i = argmin over the simplex of Σ_j a_j² V_j + ‖Σ_j a_j (h_i − h_j)‖², one row for each client."""
    h, variance = h.flatten(1).double(), variance.double()
    h = h - h.mean(dim=0)
    gram, clients = h @ h.T, len(h)
    variance = variance.clamp(min=FLOOR * gram.diagonal().max() + 1e-300)
    rows = max(1, BLOCK // clients**2)
    mixes = []
    for first in range(0, clients, rows):
        to = gram[first : first + rows]  # ⟨h_i − h_j, h_i − h_k⟩ = g_ii − g_ij − g_ik + g_jk
        own = to.diagonal(offset=first)[:, None, None]
        mixes.append(least_on_simplex(own - to[:, :, None] - to[:, None, :] + gram + variance.diag()))
    return torch.cat(mixes)
