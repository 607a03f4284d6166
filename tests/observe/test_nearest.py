"""Nearest neighbors against all distances from differences, and where the search alone would go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from helmscope.observe import nearest
from helmscope.observe.nearest import NearestNeighbors, distinct_points
from helmscope.types import HelmscopeError


def cloud(n: int, d: int, seed: int = 0, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loops(points: torch.Tensor, k: int) -> np.ndarray:
    """Distances to the k nearest other points, one pair at a time."""
    x = points.double().numpy()
    found = []
    for i in range(len(x)):
        others = sorted(float(np.sqrt(((x[i] - x[j]) ** 2).sum())) for j in range(len(x)) if j != i)
        found.append(others[:k])
    return np.array(found)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(3, 90), d=st.integers(1, 6), k=st.integers(1, 12), grid=st.booleans(), seed=st.integers(0, 99))
def test_distances_equal_loops(n: int, d: int, k: int, grid: bool, seed: int) -> None:
    k = min(k, n - 1)
    points = cloud(n, d, seed)
    points = (2 * points).round() if grid else points  # many equal distances, and copies
    found = NearestNeighbors.of(points, k)
    np.testing.assert_allclose(found.distances.numpy(), loops(points, k), rtol=1e-14, atol=0)
    own = torch.linalg.vector_norm(points.unsqueeze(1) - points[found.indices], dim=-1)
    torch.testing.assert_close(own, found.distances, rtol=1e-15, atol=0)
    assert not (found.indices == torch.arange(n).unsqueeze(-1)).any()
    assert all(len(set(row)) == k for row in found.indices.tolist())


def test_blocks_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud(500, 20)
    whole = NearestNeighbors.of(points, 4)
    monkeypatch.setitem(nearest.NUMBERS, "cpu", 3_000)
    monkeypatch.setattr(nearest, "GROUP", 7)
    parts = NearestNeighbors.of(points, 4)
    assert torch.equal(whole.distances, parts.distances)
    assert torch.equal(whole.indices, parts.indices)


def test_agrees_with_a_tree_in_float32() -> None:
    points = cloud(3_000, 5, dtype=torch.float32)
    expected = cKDTree(points.double().numpy()).query(points.double().numpy(), k=4)[0][:, 1:]
    np.testing.assert_allclose(NearestNeighbors.of(points, 3).distances.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_close_points_far_from_the_others_are_found(precision: str) -> None:
    """Squared distances of 1e-12 next to squared norms of 1 are lost in a product of float32 matrices."""
    points = cloud(400, 8)
    points[200:] = points[:200] + 1e-6 * cloud(200, 8, seed=1)
    points[:3] *= 1e4
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = NearestNeighbors.of(points, 2).distances.numpy()
    finally:
        torch.set_float32_matmul_precision(before)
    np.testing.assert_allclose(found, loops(points, 2), rtol=1e-12)


def test_a_cluster_larger_than_the_candidates_is_searched_again() -> None:
    """Within a tight cluster the float32 search sees only rounding errors: the bound finds out, at every point."""
    points = torch.cat([cloud(60, 6), 3 + 1e-9 * cloud(60, 6, seed=1)])
    np.testing.assert_allclose(NearestNeighbors.of(points, 5).distances.numpy(), loops(points, 5), rtol=1e-12)


def test_the_bound_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without searching again where the bound does not hold, the cluster gets wrong neighbors."""
    points = torch.cat([cloud(60, 6), 3 + 1e-9 * cloud(60, 6, seed=1)])
    right = nearest._Search.candidates

    def without_bound(self: nearest._Search, block: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices, bound = right(self, block, count)
        return indices, torch.full_like(bound, torch.inf)

    monkeypatch.setattr(nearest._Search, "candidates", without_bound)
    assert np.abs(NearestNeighbors.of(points, 5).distances.numpy() / loops(points, 5) - 1).max() > 0.01


def test_a_shift_changes_nothing() -> None:
    points = cloud(300, 4).round(decimals=3)
    moved = NearestNeighbors.of(points + 1024, 3).distances
    torch.testing.assert_close(moved, NearestNeighbors.of(points, 3).distances, rtol=1e-9, atol=0)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), kinds=st.integers(1, 10), seed=st.integers(0, 99))
def test_distinct_points_equal_loops(n: int, kinds: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = cloud(kinds, 3)[torch.randint(kinds, (n,), generator=generator)]
    points = points + 1e-9 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    kept: list[int] = []
    for i in range(n):
        if all(float((points[i] - points[j]).norm()) > 1e-6 for j in kept):
            kept.append(i)
    assert distinct_points(points, 1e-6).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize(
    ("points", "k", "message"),
    [
        (torch.zeros(3, 2), 3, r"points have shape \(3, 2\), but 3 nearest neighbors need at least 4 points, \(n, d\)"),
        (torch.zeros(3), 1, r"points have shape \(3,\), but 1 nearest"),
        (torch.zeros(3, 2), 0, "k is 0, but it must be a whole number >= 1"),
        (torch.full((5, 2), torch.nan), 1, "points hold a number that is not finite, but all must be finite"),
    ],
)
def test_bad_input(points: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(HelmscopeError, match=message):
        NearestNeighbors.of(points, k)


def test_points_that_a_search_in_float32_leaves_unsure_are_searched_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many points in few dimensions are closer than its rounding errors; none needs a comparison with all points."""
    points = cloud(2_000, 2) / 8 + torch.tensor([3.0, 4.0]).double()
    points[0] *= 3_000  # moves the mean away from the others
    searched: list[torch.dtype] = []
    right = nearest._Search.candidates

    def counting(self: nearest._Search, block: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        searched.append(self.rows.dtype)
        return right(self, block, count)

    monkeypatch.setattr(nearest._Search, "candidates", counting)
    expected = cKDTree(points.numpy()).query(points.numpy(), k=3)[0][:, 1:]
    np.testing.assert_allclose(NearestNeighbors.of(points, 2).distances.numpy(), expected, rtol=1e-12)
    assert set(searched) == {torch.float32, torch.float64}
