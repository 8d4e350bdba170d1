"""Quadratic programmes over the simplex against every possible set of positive entries."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from sartor.algorithms.server import simplex
from sartor.algorithms.server.simplex import head_mix, least_on_simplex


def reference(q: Tensor) -> Tensor:
    """The best of the optima on all faces of the simplex."""
    size, best, found = len(q), float("inf"), torch.zeros(len(q), dtype=torch.float64)
    for count in range(1, size + 1):
        for face in combinations(range(size), count):
            x = torch.linalg.solve(q[face, :][:, face], torch.ones(count, dtype=torch.float64))
            a = torch.zeros(size, dtype=torch.float64)
            a[list(face)] = x / x.sum()
            value = float(a @ q @ a)
            if bool((a >= 0).all()) and value < best:
                best, found = value, a
    return found


def programmes(count: int, size: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(count, size, rank, generator=generator, dtype=torch.float64)
    noise = torch.rand(count, size, generator=generator, dtype=torch.float64) ** 4 + 1e-6
    return factors @ factors.transpose(1, 2) + noise.diag_embed()


@pytest.mark.parametrize(("size", "rank", "scale"), [(2, 1, 1.0), (6, 2, 1e-8), (6, 9, 1e6)])
def test_a_programmes_optimum_is_the_best_of_all_faces(size: int, rank: int, scale: float) -> None:
    q = programmes(12, size, rank, seed=size) * scale
    expected = torch.stack([reference(one) for one in q])
    assert torch.allclose(least_on_simplex(q), expected, rtol=0, atol=1e-7)
    assert bool(((expected > 0).sum(dim=1) < size).any())  # some have entries that are 0


def test_large_programmes_satisfy_the_conditions_of_the_optimum() -> None:
    q = programmes(5, 60, 7, seed=3)
    a = least_on_simplex(q)
    assert torch.allclose(a.sum(dim=1), torch.ones(5, dtype=torch.float64))
    slope = (q @ a[:, :, None])[:, :, 0]
    value = (slope * a).sum(dim=1, keepdim=True)
    assert bool((slope >= value * (1 - 1e-6)).all())
    assert float(((slope - value).abs() * (a > 0)).max()) <= 1e-6 * float(value.max())


def test_a_mix_is_what_its_formula_says_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(5, generator=generator, dtype=torch.float64)
    flat = h.flatten(1)
    expected = torch.stack(
        [reference(variance.diag() + (flat[i] - flat) @ (flat[i] - flat).T) for i in range(5)]
    )
    assert torch.allclose(head_mix(h, variance), expected, rtol=0, atol=1e-8)
    monkeypatch.setattr(simplex, "BLOCK", 2 * 5**2)
    assert torch.allclose(head_mix(h, variance), expected, rtol=0, atol=1e-8)


def test_clients_without_variance_and_one_client_alone() -> None:
    """Whoever knows its head exactly keeps it; of equal ones all count alike."""
    h = torch.tensor([[0.0, 1.0], [3.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert torch.allclose(head_mix(h, torch.zeros(3)), torch.eye(3, dtype=torch.float64), atol=1e-9)
    same = torch.ones(4, 2, dtype=torch.float64)
    assert torch.allclose(head_mix(same, torch.zeros(4)), torch.full((4, 4), 0.25).double())
    assert head_mix(torch.ones(1, 3), torch.ones(1)).tolist() == [[1.0]]
