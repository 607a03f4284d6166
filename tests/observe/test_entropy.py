"""Entropies of clouds: closed forms, SciPy's trees, NumPy's eigenvalues; and the entropy of all prompts along depth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from scipy.special import digamma, gammaln

import helmscope as hs
from helmscope.observe import (
    entropy_along_depth,
    gaussian_entropy,
    gaussian_fisher_information,
    matrix_entropy,
    neighbor_entropy,
)
from helmscope.observe.entropy import PooledClouds, moments_of, surface_fisher_information
from helmscope.observe.neighbor_entropy import NeighborDistances, distinct, principal_projection
from helmscope.types import Trajectory

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def by_tree(points: np.ndarray, k: int) -> float:
    """Kozachenko-Leonenko by SciPy's tree."""
    n, p = points.shape
    distances = cKDTree(points).query(points, k + 1)[0][:, k]
    return digamma(n) - digamma(k) + p / 2 * math.log(math.pi) - gammaln(p / 2 + 1) + p * np.log(distances).mean()


# --- functions of one cloud


def test_gaussian_quantities_are_those_of_the_weighted_covariance() -> None:
    x, weights = normal(2, 30, 3), torch.rand(2, 30, dtype=F64, generator=torch.Generator().manual_seed(1))
    weights[0, :9] = 0
    for k in range(2):
        kept = weights[k] > 0
        c = np.cov(x[k][kept].T.numpy(), aweights=weights[k][kept].numpy(), ddof=0)
        entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * c)[1]
        assert float(gaussian_entropy(x, weights)[k]) == pytest.approx(entropy, rel=1e-12)
        assert float(gaussian_fisher_information(x, weights)[k]) == pytest.approx(np.trace(np.linalg.inv(c)), rel=1e-12)
    assert gaussian_entropy(x[0, :3]) == -torch.inf


@pytest.mark.parametrize("centered", [False, True])
def test_the_matrix_entropy_is_that_of_normalized_eigenvalues(centered: bool) -> None:
    x, weights = normal(20, 4) + 1, torch.arange(20, dtype=F64)
    points, m = x.numpy(), weights.numpy() / weights.numpy().sum()
    moved = points - (m @ points if centered else 0)
    values = np.linalg.eigvalsh((m[:, None] * moved).T @ moved)
    shares = values / values.sum()
    expected = -(shares * np.log(shares)).sum()
    assert float(matrix_entropy(x, weights, centered=centered)) == pytest.approx(expected, rel=1e-12)


def test_matrix_entropy_closed_forms() -> None:
    assert float(matrix_entropy(torch.eye(5, dtype=F64))) == pytest.approx(math.log(5), rel=1e-14)
    assert float(matrix_entropy(torch.eye(5, dtype=F64), centered=True)) == pytest.approx(math.log(4), rel=1e-14)
    assert abs(float(matrix_entropy(torch.ones(4, 3, dtype=F64)))) < 1e-14
    assert bool(matrix_entropy(torch.ones(4, 3, dtype=F64), centered=True).isnan())


def test_the_surface_information_is_the_rate_of_the_gaussian_entropy_under_diffusion() -> None:
    """Each of the points diffuses on S^3: E x decays as e^(-3 nu t), and traceless second moments as e^(-8 nu t)."""
    x = hs.sphere.retract(normal(40, 4) + torch.tensor([1.0, 0.0, 0.5, 0.0]))
    mean, second, eye = x.mean(0), x.T @ x / 40, torch.eye(4, dtype=F64) / 4

    def entropy(t: float) -> float:
        m = math.exp(-3 * t) * mean
        c = eye + math.exp(-8 * t) * (second - eye) - torch.outer(m, m)
        return 0.5 * float(torch.logdet(c))

    h = 1e-5
    rate = (entropy(h) - entropy(-h)) / (2 * h)
    assert float(surface_fisher_information(moments_of(x))) == pytest.approx(rate, rel=1e-7)
    assert bool(surface_fisher_information(moments_of(x[:3])).isnan())


# --- nearest neighbors


@pytest.mark.parametrize("dimensions", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 4])
def test_nearest_neighbors_are_those_of_a_tree(dimensions: int, k: int) -> None:
    x = normal(700, dimensions)
    found = neighbor_entropy(x, principal_axes=dimensions, neighbors=k)
    assert float(found) == pytest.approx(by_tree(x.numpy(), k), abs=1e-10)  # a rotation changes no distance


@pytest.mark.parametrize(
    ("dimensions", "normal_bias", "cube_bias"), [(2, -0.007, 0.025), (4, -0.049, 0.260), (8, -0.016, 1.141)]
)
def test_known_entropies_have_the_documented_bias(dimensions: int, normal_bias: float, cube_bias: float) -> None:
    """At N = 2,000 and k = 4; the standard deviation of one estimate is below 0.05 and 0.025."""
    exact = dimensions / 2 * math.log(2 * math.pi * math.e)
    found = [
        float(neighbor_entropy(normal(2000, dimensions, seed=s), principal_axes=dimensions)) - exact for s in range(3)
    ]
    assert np.mean(found) == pytest.approx(normal_bias, abs=4 * 0.05 / 3**0.5)
    cube = [torch.rand(2000, dimensions, dtype=F64, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    found = [float(neighbor_entropy(3 * x, principal_axes=dimensions)) - dimensions * math.log(3) for x in cube]
    assert np.mean(found) == pytest.approx(cube_bias, abs=4 * 0.025 / 3**0.5)


def test_the_projection_is_that_of_principal_axes_and_scales() -> None:
    x = normal(300, 6) * torch.tensor([5.0, 4.0, 3.0, 0.1, 0.1, 0.1])
    points = principal_projection(x, 3)
    u, s, _ = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
    assert np.abs(points.numpy()) == pytest.approx(np.abs(u * s)[:, :3], abs=1e-9)
    one, three = (neighbor_entropy(scale * x, principal_axes=2) for scale in (1.0, 3.0))
    assert float(three - one) == pytest.approx(2 * math.log(3), abs=1e-10)


def test_copies_are_left_out_and_weights_must_be_equal() -> None:
    x = normal(50, 2)
    twice = torch.cat([x, x, x[:5] + 1e-9])
    assert int((~distinct(twice)).sum()) == 55
    assert float(neighbor_entropy(twice, principal_axes=2)) == pytest.approx(
        float(NeighborDistances.of(principal_projection(twice, 2)[:50], 4).entropy), abs=1e-6
    )
    weights = torch.ones(105, dtype=F64)
    weights[50:] = 0
    assert float(neighbor_entropy(twice, weights, principal_axes=2)) == pytest.approx(by_tree(x.numpy(), 4), abs=1e-10)
    with pytest.raises(hs.HelmscopeError, match="weights are 1 to 2, but nearest neighbors need equal ones"):
        neighbor_entropy(x, torch.tensor([1.0, 2.0] * 25), principal_axes=2)
    with pytest.raises(hs.HelmscopeError, match="principal_axes is 9, but nearest-neighbor entropy needs at most 8"):
        neighbor_entropy(normal(50, 20), principal_axes=9)
    with pytest.raises(hs.HelmscopeError, match="x has 4 distinct points, but the neighbor number 4 needs at least 5"):
        neighbor_entropy(x[:4], principal_axes=2)


def test_the_jackknife_leaves_out_one_group_after_the_other() -> None:
    """Groups are clumps, so that all spare neighbors of a point can be in one group; the oracle computes every cloud
    again."""
    centers = 10 * normal(6, 3, seed=4)
    points = torch.cat([centers[k] + normal(30, 3, seed=k) for k in range(6)])
    points = torch.cat([points, normal(40, 3, seed=9)])
    group = torch.cat([torch.arange(6).repeat_interleave(30), torch.arange(40) % 6])
    found = NeighborDistances.of(points, 4).without_groups(group, 6)
    expected = [by_tree(points[group != k].numpy(), 4) for k in range(6)]
    assert found.numpy() == pytest.approx(expected, abs=1e-9)
    with pytest.raises(hs.HelmscopeError, match="group 0 leaves 4 points"):
        NeighborDistances.of(points[:8], 4).without_groups(torch.tensor([0] * 4 + [1] * 4), 2)


def scaled_by_halves(points: np.ndarray, group: np.ndarray, groups: int, neighbors: int) -> np.ndarray:
    """The replicates of the nearest-neighbor entropy, with every half searched again by a tree."""
    whole = by_tree(points, neighbors)
    left = np.array([by_tree(points[group != k], neighbors) for k in range(groups)])
    influence = (groups - 1) * (left.mean() - left)
    source, actual, linear = np.random.default_rng(0), [], []
    for _ in range(16):
        first = source.permutation(groups)[: groups // 2]
        inside, others = np.isin(group, first), np.setdiff1d(np.arange(groups), first)
        actual.append(by_tree(points[inside], neighbors) - by_tree(points[~inside], neighbors))
        linear.append(influence[first].mean() - influence[others].mean())
    return whole + np.sqrt(np.square(actual).sum() / np.square(linear).sum()) * influence


@pytest.mark.parametrize("groups", [2, 5, 6])
def test_replicates_are_scaled_by_independent_halves(groups: int) -> None:
    """Clumps, so that too few of the spare neighbors of a point may be in its half."""
    points = torch.cat([10 * normal(1, 3, seed=k) + normal(40, 3, seed=k) for k in range(groups)])
    points = torch.cat([points, normal(40, 3, seed=99)])
    group = torch.cat([torch.arange(groups).repeat_interleave(40), torch.arange(40) % groups])
    found = NeighborDistances.of(points, 4).replicates(group, groups)
    assert found.numpy() == pytest.approx(scaled_by_halves(points.numpy(), group.numpy(), groups, 4), abs=1e-9)
    assert float(found.mean()) == pytest.approx(by_tree(points.numpy(), 4), abs=1e-9)


def test_groups_of_copies_have_no_replicate() -> None:
    """Groups whose points were all left out as copies do not count, in the jackknife or in the halves."""
    points, group = normal(60, 3), torch.arange(60) % 5
    found = NeighborDistances.of(points, 4).replicates(2 * group, 10).numpy()
    assert found[::2] == pytest.approx(scaled_by_halves(points.numpy(), group.numpy(), 5, 4), abs=1e-9)
    assert np.isnan(found[1::2]).all()
    twice = path()
    states = torch.cat([twice.states, twice.states], 1)
    measured = entropy_along_depth(Trajectory(twice.times, states))
    assert np.isfinite(measured.neighbor_entropy.values[:, :6]).all()
    assert np.isnan(measured.neighbor_entropy.values[:, 6:]).all()
    assert (measured.copy_count.values[:, 6:] == 11).all()


def test_halves_need_more_points_than_neighbors() -> None:
    points = normal(11, 2)
    with pytest.raises(hs.HelmscopeError, match="a half of the groups has 4 points, but neighbor number 4 needs"):
        NeighborDistances.of(points, 4).replicates(torch.tensor([0] * 3 + [1] * 4 + [2] * 4), 3)


# --- along depth


def path(prompts: int = 6, n: int = 12, d: int = 4, depths: int = 3) -> Trajectory:
    x = hs.sphere.retract(normal(depths, prompts, n, d, seed=7) + torch.tensor([0.5] + [0.0] * (d - 1)))
    return Trajectory(torch.arange(float(depths)), x)


def test_the_values_are_jackknife_pseudo_values_of_all_tokens() -> None:
    trajectory = path()
    measured = entropy_along_depth(trajectory)
    functions = {
        "gaussian_entropy": gaussian_entropy,
        "fisher_information": gaussian_fisher_information,
        "matrix_entropy": matrix_entropy,
        "centered_matrix_entropy": lambda x: matrix_entropy(x, centered=True),
        "surface_fisher_information": lambda x: surface_fisher_information(moments_of(x)),
    }
    for k in range(3):
        x = trajectory.states[k, :, 1:]  # without the first token
        for name, function in functions.items():
            whole = float(function(x.flatten(0, 1)))
            left = [float(function(torch.cat([x[:p], x[p + 1 :]]).flatten(0, 1))) for p in range(6)]
            expected = [6 * whole - 5 * each for each in left]
            assert measured[name].values[k] == pytest.approx(expected, rel=1e-8, abs=1e-8), name
        points = principal_projection(x.flatten(0, 1), 3).numpy()
        group = np.arange(6).repeat(11)
        assert measured.neighbor_entropy.values[k] == pytest.approx(scaled_by_halves(points, group, 6, 4), abs=1e-9)
    assert measured.attrs["rank"] == 4
    assert measured.attrs["undefined"] == "none"
    assert measured.attrs["principal_axes"] == 3
    assert measured["rank"].values.tolist() == [4, 4, 4]
    assert all("long_name" in value.attrs for value in measured.data_vars.values())


def test_ranks_that_change_are_not_minus_infinity() -> None:
    trajectory = path()
    trajectory.states[1, ..., 3] = 0  # at depth 1 in a hyperplane
    measured = entropy_along_depth(trajectory)
    assert measured.gaussian_entropy.isnull().all("system").values.tolist() == [False, True, False]
    assert measured["rank"].values.tolist() == [4, 3, 4]
    assert measured.attrs["undefined"].startswith("NaN at time 1: there the covariance")
    trajectory.states[..., 3] = 0  # at all depths: an entropy in three dimensions
    again = entropy_along_depth(trajectory)
    assert again.attrs["rank"] == 3
    assert again.attrs["undefined"] == "none"
    expected = gaussian_entropy(hs.sphere.retract(trajectory.states[2, :, 1:, :3]).flatten(0, 1))
    common = PooledClouds.of(hs.observe.without_first_token(trajectory))
    assert float(common.moments[2].whole.gaussian_entropy) == pytest.approx(float(expected), rel=1e-12)


def test_a_prompt_without_which_the_rank_falls_makes_the_depth_undefined() -> None:
    trajectory = path()
    trajectory.states[0, 1:, :, 3] = 0  # only the first system leaves the hyperplane
    measured = entropy_along_depth(trajectory)
    assert bool(measured.gaussian_entropy[0].isnull().all())
    assert int(measured["rank"][0]) == 4


def test_identical_tokens_unequal_weights_and_few_prompts() -> None:
    same = Trajectory(torch.zeros(1), torch.eye(3, dtype=F64)[:1].expand(1, 4, 5, 3).clone())
    measured = entropy_along_depth(same)
    assert bool(measured.gaussian_entropy.isnull().all())
    assert bool(measured.neighbor_entropy.isnull().all())
    assert float(measured.copy_count.sum()) == 4 * 4 - 1
    weighted = Trajectory(torch.zeros(1), path(depths=1).states, weights=torch.rand(1, 6, 12, dtype=F64) + 0.5)
    assert bool(entropy_along_depth(weighted).neighbor_entropy.isnull().all())
    assert not bool(entropy_along_depth(weighted).gaussian_entropy.isnull().any())
    with pytest.raises(hs.HelmscopeError, match="1 prompt, but statistics over prompts need at least 2"):
        entropy_along_depth(path(prompts=1))
    with pytest.raises(hs.HelmscopeError, match="principal_axes is 9"):
        entropy_along_depth(path(), principal_axes=9)
    broken = path()
    broken.states[1, 2, 3] = torch.nan
    with pytest.raises(hs.HelmscopeError, match="system 2 hold NaN or infinite entries at time 1, token 3"):
        entropy_along_depth(broken)


def test_the_interval_of_uniform_tokens_contains_their_entropy() -> None:
    """Uniform unit vectors in R^8: C = I/8 and 4 log(2 pi e / 8); the surface information is 0."""
    x = hs.Uniform(21, 8).sample(40, seed=2)
    measured = hs.stats.reduce_replicates(entropy_along_depth(Trajectory(torch.zeros(1), x[None])))
    exact = {"gaussian_entropy": 4 * math.log(2 * math.pi * math.e / 8), "surface_fisher_information": 0.0}
    for name, value in exact.items():
        assert measured[f"{name}_low"].item() < value < measured[f"{name}_high"].item()
    assert measured.fisher_information.item() == pytest.approx(64, rel=0.02)


def test_entropy_has_a_picture_with_halves() -> None:
    recording = hs.record("A", ["Once upon a time there was a cat", "The dog ran home to eat"])
    measured = entropy_along_depth(recording)
    assert measured.half.values[:3].tolist() == ["", "attention", "mlp"]
    assert hs.plot(measured).axes
