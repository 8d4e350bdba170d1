"""Grouping by principal components: against scikit-learn, on planted groups, and at every edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor

from sartor import random
from sartor.algorithms.server import grouping
from sartor.algorithms.server.grouping import group, lloyd, seeds

KEY = random.stream(0, "groups")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(
    populations: int, each: int, dimension: int, noise: float = 0.05, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows around so many centres in turn, and which centre each belongs to."""
    truth = torch.arange(populations).repeat(each)
    rows = normal(populations, dimension, seed=seed)[truth] + noise * normal(
        len(truth), dimension, seed=seed + 1
    )
    return rows, truth


def same_partition(a: Tensor, b: Tensor) -> bool:
    """Whether two labellings divide alike, whatever the names of their groups."""
    return bool(torch.equal(a[:, None] == a, b[:, None] == b))


# Against scikit-learn --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "d", "groups"), [(30, 50, 2), (40, 300, 4), (90, 20, 6), (200, 7, 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_scikit_learns_pca_and_kmeans(m: int, d: int, groups: int, seed: int) -> None:
    rows = normal(m, d, seed=seed) * torch.linspace(3, 1, d, dtype=torch.float64) + 5
    starts = rows[:groups] + 0.1 * normal(groups, d, seed=seed + 9)
    found = group(rows, starts, groups, KEY, most=300)
    pca = PCA(groups - 1, svd_solver="full").fit(rows.numpy())
    start = pca.transform(starts.numpy())
    kmeans = KMeans(groups, init=start, n_init=1, max_iter=300, tol=0, algorithm="lloyd")
    labels = kmeans.fit_predict(pca.transform(rows.numpy()))
    assert len(np.unique(labels)) == groups  # scikit-learn moves empty groups, here they stay
    assert found.members.tolist() == labels.tolist()
    expected = torch.from_numpy(pca.inverse_transform(kmeans.cluster_centers_))
    torch.testing.assert_close(found.representatives, expected, rtol=1e-8, atol=1e-8)


def test_a_representative_is_its_groups_mean_on_the_plane() -> None:
    """From the singular value decomposition of the centred rows."""
    rows, starts = normal(25, 60) + 3, normal(3, 60, seed=1) + 3
    found = group(rows, starts, 3, KEY)
    mean = rows.mean(dim=0)
    plane = torch.linalg.svd(rows - mean, full_matrices=False).Vh[:2]
    for number in found.members.unique().tolist():
        centre = rows[found.members == number].mean(dim=0)
        expected = mean + (centre - mean) @ plane.T @ plane
        torch.testing.assert_close(found.representatives[number], expected, rtol=1e-9, atol=1e-9)


def test_one_group_is_the_mean() -> None:
    rows = normal(11, 40)
    found = group(rows, rows[:1], 1, KEY)
    assert not found.members.any()
    torch.testing.assert_close(found.representatives, rows.mean(dim=0, keepdim=True), rtol=1e-12, atol=1e-12)


# Planted groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("populations", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_well_separated_populations_are_found(populations: int, seed: int) -> None:
    rows, truth = planted(populations, 8, 400, seed=seed)
    found = group(rows, rows.mean(dim=0, keepdim=True), populations, random.stream(seed, "groups"))
    assert same_partition(found.members, truth)


def test_groups_keep_the_place_of_their_starts() -> None:
    rows, truth = planted(4, 6, 100)
    centres = torch.stack([rows[truth == number].mean(dim=0) for number in (2, 0, 3, 1)])
    found = group(rows, centres, 4, KEY)
    assert torch.equal(torch.tensor([2, 0, 3, 1])[found.members], truth)
    assert float((found.representatives - centres).norm()) < 0.5


def test_starts_that_coincide_are_parted() -> None:
    """Two of three begin at one population; without new starts one would stay empty for ever."""
    rows, truth = planted(3, 6, 100)
    at = [rows[truth == number].mean(dim=0) for number in (0, 1)]
    found = group(rows, torch.stack([at[0], at[1], at[0]]), 3, KEY)
    assert same_partition(found.members, truth)
    assert found.members[truth == 0].unique().tolist() == [0]
    assert found.members[truth == 1].unique().tolist() == [1]


# Edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_a_single_row(groups: int) -> None:
    """It is every group's where they are new, and else the first one's; the others stay."""
    row = normal(1, 9)
    found = group(row, row + 1, groups, KEY)
    torch.testing.assert_close(found.representatives, row.expand(groups, 9), rtol=1e-12, atol=1e-12)
    starts = row + normal(groups, 9, seed=1)
    found = group(row, starts, groups, KEY)
    assert found.members.tolist() == [0]
    torch.testing.assert_close(found.representatives[:1], row, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.representatives[1:], starts[1:])


@pytest.mark.parametrize("m", [2, 3, 4])
def test_fewer_rows_than_groups(m: int) -> None:
    """Every row is a group of its own, and its representative; the others coincide with one of them."""
    rows = normal(m, 30)
    found = group(rows, rows.mean(dim=0, keepdim=True), 6, KEY)
    assert len(found.members.unique()) == m
    torch.testing.assert_close(found.representatives[found.members], rows, rtol=1e-10, atol=1e-10)
    distance = torch.cdist(found.representatives, rows).amin(dim=1)
    assert float(distance.max()) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_rows_are_one_group(dtype: torch.dtype) -> None:
    rows = normal(1, 33).to(dtype).expand(7, -1).contiguous()
    found = group(rows, rows[:1] * 1.5, 4, KEY)
    assert not found.members.any()
    torch.testing.assert_close(found.representatives, rows[:1].expand(4, -1))


def test_rows_on_a_line() -> None:
    """Rank 1 where three axes are asked for."""
    places = torch.tensor([0.0, 0.1, 5.0, 5.1, 9.0, 9.1, 20.0, 20.1], dtype=torch.float64)
    direction = normal(50) / normal(50).norm()
    rows = 2 + places[:, None] * direction
    for seed in range(5):
        found = group(rows, rows[:1], 4, random.stream(seed, "groups"))
        assert torch.isfinite(found.representatives).all()
        off = found.representatives - 2
        torch.testing.assert_close((off @ direction)[:, None] * direction, off, rtol=1e-9, atol=1e-9)
    starts = 2 + torch.tensor([0.0, 5.0, 9.0, 20.0], dtype=torch.float64)[:, None] * direction
    assert group(rows, starts, 4, KEY).members.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_group_without_rows_stays_at_its_start() -> None:
    rows, truth = planted(2, 5, 60)
    far = rows.mean(dim=0) + 30 * normal(60, seed=4)
    starts = torch.stack([rows[truth == 0].mean(dim=0), far, rows[truth == 1].mean(dim=0)])
    found = group(rows, starts, 3, KEY)
    assert torch.equal(found.members, 2 * truth)
    assert torch.equal(found.representatives[1], far)


def test_a_large_common_part_does_not_hide_the_groups() -> None:
    """Deviations of a thousandth in single precision, where squares of the rows have no digit of them."""
    rows, truth = planted(3, 8, 500)
    shifted = (1000 + rows).float()
    found = group(shifted, shifted[:1], 3, KEY)
    assert same_partition(found.members, truth)


def test_no_matrix_of_the_models_size_is_made() -> None:
    """It would take 320 GB."""
    rows = torch.zeros(4, 200_000, dtype=torch.float64)
    rows[:2, 0], rows[2:, 1] = 1, 2
    assert same_partition(group(rows, rows[:1], 2, KEY).members, torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize(("piece", "block"), [(1, 1), (7, 3), (64, 100)])
def test_pieces_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch, piece: int, block: int) -> None:
    rows, starts = normal(20, 65), normal(4, 65, seed=1)
    whole = group(rows, starts, 4, KEY)
    monkeypatch.setattr(grouping, "PIECE", piece)
    monkeypatch.setattr(grouping, "BLOCK", block)
    parts = group(rows, starts, 4, KEY)
    assert torch.equal(parts.members, whole.members)
    torch.testing.assert_close(parts.representatives, whole.representatives, rtol=1e-10, atol=1e-10)


# What must not matter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", ["new", "given"])
def test_the_signs_of_eigenvectors_do_not_matter(monkeypatch: pytest.MonkeyPatch, starts: str) -> None:
    rows = normal(30, 80)
    begin = rows[:1] if starts == "new" else normal(4, 80, seed=1)
    expected = group(rows, begin, 4, KEY)
    eigh = torch.linalg.eigh

    def flipped(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = eigh(matrix)
        return values, vectors * torch.where(torch.arange(len(values)) % 2 == 0, -1.0, 1.0)

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    found = group(rows, begin, 4, KEY)
    assert torch.equal(found.members, expected.members)
    torch.testing.assert_close(found.representatives, expected.representatives, rtol=1e-12, atol=1e-12)


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows, starts = normal(30, 80), normal(4, 80, seed=1)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    found, permuted = group(rows, starts, 4, KEY), group(rows[order], starts, 4, KEY)
    assert torch.equal(found.members[order], permuted.members)
    torch.testing.assert_close(found.representatives, permuted.representatives, rtol=1e-10, atol=1e-10)


def test_it_is_a_function_of_the_key() -> None:
    rows = normal(30, 80)
    results = [group(rows, rows[:1], 4, random.stream(seed, "groups")) for seed in (0, 0, *range(1, 8))]
    assert torch.equal(results[0].members, results[1].members)
    assert torch.equal(results[0].representatives, results[1].representatives)
    assert any(not torch.equal(results[0].members, other.members) for other in results[2:])


# Lloyd and k-means++ ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(m=st.integers(1, 30), k=st.integers(1, 4), groups=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_lloyd_ends_where_nothing_moves(m: int, k: int, groups: int, seed: int) -> None:
    points, starts = normal(m, k, seed=seed), normal(groups, k, seed=seed + 1)
    members, centres = lloyd(points, starts, most=1000)
    squares = torch.cdist(points, centres).square()
    mine = squares.gather(1, members[:, None])
    assert bool((mine <= squares + 1e-12).all())
    for number in range(groups):
        inside = points[members == number]
        if len(inside):
            torch.testing.assert_close(centres[number], inside.mean(dim=0), rtol=1e-12, atol=1e-12)
    before = torch.cdist(points, starts).square().amin(dim=1).sum()
    assert float(mine.sum()) <= float(before) + 1e-12


def test_lloyd_counts_its_iterations() -> None:
    """Each point drags the boundary on by one."""
    points = torch.tensor([[float(2**place)] for place in range(8)])
    starts = torch.tensor([[0.0], [3.0]])
    seen = [lloyd(points, starts, most=most)[0].tolist() for most in (0, 1, 100)]
    assert seen[0] != seen[1] != seen[2]


def test_lloyd_may_stop_at_small_distances() -> None:
    points = torch.tensor([[float(2**place)] for place in range(8)]) * 1e-6
    starts = torch.tensor([[0.0], [3.0e-6]])
    members, centres = lloyd(points, starts, enough=1e-3)
    first = lloyd(points, starts, most=0)[0]
    assert torch.equal(members, first)
    torch.testing.assert_close(centres[1], points[first == 1].mean(dim=0))
    assert not torch.equal(lloyd(points, starts)[0], first)


def test_seeds_are_drawn_by_squared_distance() -> None:
    points = torch.tensor([[0.0], [1.0], [3.0], [0.0]], dtype=torch.float64)
    draws = [float(seeds(points, points[:1], 1, random.stream(seed, "groups"))) for seed in range(2000)]
    assert 0.0 not in draws
    assert draws.count(1.0) / 2000 == pytest.approx(0.1, abs=0.03)


def test_the_first_seed_is_any_point() -> None:
    points = torch.tensor([[0.0], [1.0], [50.0]], dtype=torch.float64)
    draws = [float(seeds(points, points[:0], 1, random.stream(seed, "groups"))) for seed in range(1500)]
    assert all(draws.count(value) / 1500 == pytest.approx(1 / 3, abs=0.05) for value in (0.0, 1.0, 50.0))


def test_seeds_are_different_points_while_there_are_any() -> None:
    points = torch.tensor([[0.0], [0.0], [2.0], [5.0]], dtype=torch.float64)
    for seed in range(30):
        drawn = seeds(points, points[:0], 3, random.stream(seed, "groups")).flatten().tolist()
        assert sorted(drawn) == [0.0, 2.0, 5.0]
    assert seeds(points[:2], points[:1], 2, KEY).flatten().tolist() == [0.0, 0.0]
