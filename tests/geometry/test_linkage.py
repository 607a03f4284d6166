"""Pairwise distances and single linkage against loops, naive merging and SciPy; independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import linkage
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from scipy.spatial.distance import squareform

from helmscope.geometry import sphere
from helmscope.geometry.linkage import (
    clusters,
    collapse_padding,
    components,
    pairs_within,
    pairs_within_chord,
    pairwise_angles,
    spanning_tree,
)
from support import oracles

F64, F32 = torch.float64, torch.float32
PROPERTY = settings(max_examples=500, deadline=None, derandomize=True)


def ulps(error, dtype, scale=1.0):
    """The largest error, in units of eps times ``scale``."""
    return float((torch.as_tensor(error).double().abs() / scale).max()) / torch.finfo(dtype).eps


def tokens(*shape, seed=0, dtype=F64):
    return sphere.retract(torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))).to(dtype)


@st.composite
def clouds(draw):
    """Tokens (..., n, d), some coincident, antipodal, tied in distance or 1e-12 (in float32 1e-6) apart."""
    dtype, shape = draw(st.sampled_from([F64, F32])), draw(st.sampled_from([(), (2,), (2, 1)]))
    n, d, seed = draw(st.integers(1, 7)), draw(st.integers(2, 5)), draw(st.integers(0, 2**32 - 1))
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, n, d, dtype=F64, generator=source)
    if draw(st.booleans()):
        x = x.round()
        x[..., 0] += (x == 0).all(-1)
    picked = x[..., torch.randint(draw(st.integers(1, n)), (n,), generator=source), :]
    picked = picked * torch.randint(2, (n, 1), generator=source).mul(2).sub(1)
    gap = draw(st.sampled_from([0.0, 1e-12 if dtype is F64 else 1e-6, 1e-3]))
    return sphere.retract(picked + gap * torch.randn(*shape, n, d, dtype=F64, generator=source)).to(dtype)


def systems(x):
    """The clouds of a batch along one flat axis."""
    return x.reshape(-1, *x.shape[-2:])


# Distances ------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(clouds())
def test_pairwise_angles_agree_with_a_loop_over_angle(x):
    batched = pairwise_angles(x)
    assert batched.shape == (*x.shape[:-1], x.shape[-2])
    assert torch.equal(batched, batched.mT)
    assert torch.equal(batched.diagonal(dim1=-2, dim2=-1), torch.zeros_like(x[..., 0]))
    for cloud, distance in zip(systems(x), systems(batched), strict=True):
        for i in range(len(cloud)):
            for j in range(i):
                expected = sphere.angle(cloud[i], cloud[j])
                assert ulps(distance[i, j] - expected, x.dtype, float(expected) + 1e-30) <= 2  # 1.6


@pytest.mark.parametrize(("dtype", "gap"), [(F64, 1e-12), (F32, 1e-6)])
def test_pairwise_angles_resolve_distances_that_a_gram_matrix_cannot(dtype, gap):
    """30 tokens on the circle, token k at k gaps from the first: the only error is the rounding of the coordinates."""
    phi = 0.3 + gap * torch.arange(30, dtype=F64)
    x = torch.stack([phi.cos(), phi.sin()], -1).to(dtype)
    chord = (x.double()[:, None] - x.double()).norm(dim=-1)
    assert ulps(pairwise_angles(x) - chord, dtype, chord + 1e-30) <= 3
    gram = (x @ x.T).clamp(-1, 1).arccos()
    assert (gram - chord).abs().max() > 5 * chord.max()


@PROPERTY
@given(clouds())
def test_gradients_of_pairwise_angles_are_finite_for_coincident_and_antipodal_tokens(x):
    x.requires_grad_()
    (slope,) = torch.autograd.grad(pairwise_angles(x).sum(), x)
    assert slope.isfinite().all()


def test_gradients_of_pairwise_angles_are_right_and_0_at_coincident_and_antipodal_tokens():
    x = tokens(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(pairwise_angles, [x], atol=1e-7, rtol=1e-7)
    corners = torch.stack([x[0, 0], x[0, 0], -x[0, 0]]).detach().requires_grad_()
    (slope,) = torch.autograd.grad(pairwise_angles(corners).sum(), corners)
    assert torch.equal(slope, torch.zeros_like(slope))


# Spanning trees -------------------------------------------------------------------------------------------------------


@PROPERTY
@given(clouds())
def test_spanning_tree_has_the_heights_of_naive_merging(x):
    tree, distance = spanning_tree(x), pairwise_angles(x)
    assert tree.length.shape == tree.child.shape == tree.parent.shape == (*x.shape[:-2], x.shape[-2] - 1)
    lengths, children, parents = (t.reshape(len(systems(x)), x.shape[-2] - 1) for t in tree)
    for k, cloud in enumerate(systems(x)):
        in_tree = [0]
        for length, child, parent in zip(lengths[k], children[k].tolist(), parents[k].tolist(), strict=True):
            assert parent in in_tree
            assert child not in in_tree
            assert length == systems(distance)[k][child, parent]
            in_tree.append(child)
        heights = torch.tensor(oracles.merge_heights(cloud.double().tolist()), dtype=F64)
        if len(heights):
            assert ulps(lengths[k].sort().values - heights, x.dtype, heights + 1e-30) <= 3  # 2.0


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize(("n", "d"), [(2, 2), (40, 3), (100, 8)])
def test_spanning_tree_agrees_with_scipy(n, d, dtype):
    x = tokens(3, n, d, seed=n, dtype=dtype)
    repeated = torch.cat([x, x[:, ::2]], 1)
    for cloud, length in zip(x, spanning_tree(x).length, strict=True):
        distance = pairwise_angles(cloud).double().numpy()
        assert np.array_equal(np.sort(minimum_spanning_tree(distance).data), length.sort().values.double().numpy())
    for cloud, length in zip(repeated, spanning_tree(repeated).length, strict=True):
        heights = linkage(squareform(pairwise_angles(cloud).double().numpy()), "single")[:, 2]
        assert np.array_equal(heights, length.sort().values.double().numpy())


def test_ties_go_to_the_lower_index():
    tree = spanning_tree(torch.eye(5, dtype=F64))
    assert tree.child.tolist() == [1, 2, 3, 4]
    assert tree.parent.tolist() == [0, 0, 0, 0]
    assert torch.equal(tree.length, torch.full((4,), torch.pi / 2, dtype=F64))


@pytest.mark.parametrize("shape", [(1, 3), (4, 1, 3), (2, 5, 1, 3)])
def test_one_token_has_a_tree_without_edges(shape):
    tree = spanning_tree(tokens(*shape))
    assert [tuple(t.shape) for t in tree] == [(*shape[:-2], 0)] * 3
    assert tree.length.dtype == F64
    assert tree.child.dtype == tree.parent.dtype == torch.long


# Components and clusters ----------------------------------------------------------------------------------------------


def lowest_members(adjacent):
    """SciPy's component labels, each replaced by the smallest node index of its component."""
    _, labels = connected_components(adjacent.numpy(), directed=False)
    return [int(np.flatnonzero(labels == label)[0]) for label in labels]


@PROPERTY
@given(st.integers(1, 12), st.floats(0, 0.4), st.integers(0, 2**32 - 1))
def test_components_agree_with_scipy_on_random_graphs(n, share, seed):
    """Graphs with each edge given in one direction only, without self-loops."""
    adjacent = (torch.rand(2, n, n, generator=torch.Generator().manual_seed(seed)) < share).triu(1)
    assert components(adjacent).tolist() == [lowest_members(graph) for graph in adjacent]
    assert torch.equal(components(adjacent.mT), components(adjacent))


@pytest.mark.parametrize("n", [2, 64, 300])
def test_components_follow_long_chains(n):
    """A batch of two paths through all nodes in random order, one of them cut in the middle."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    whole = torch.zeros(n, n, dtype=torch.bool)
    whole[order[:-1], order[1:]] = True
    cut = whole.clone()
    cut[order[n // 2 - 1], order[n // 2]] = False
    label = components(torch.stack([whole, cut]))
    assert label[0].tolist() == [0] * n
    for half in (order[: n // 2], order[n // 2 :]):
        assert label[1, half].tolist() == [int(half.min())] * len(half)


@PROPERTY
@given(clouds(), st.sampled_from([0.0, 1e-9, 1e-2]) | st.floats(0.05, 3.2))
def test_clusters_agree_with_naive_linkage(x, max_angle):
    expected = [oracles.cluster_labels(cloud.double().tolist(), max_angle) for cloud in systems(x)]
    assert clusters(x, max_angle).reshape(-1, x.shape[-2]).tolist() == expected


def test_clusters_are_the_components_of_the_tree_without_its_longer_edges():
    x = tokens(50, 3)
    tree = spanning_tree(x)
    for max_angle in tree.length.tolist():
        kept = torch.zeros(50, 50, dtype=torch.bool)
        short = tree.length <= max_angle
        kept[tree.child[short], tree.parent[short]] = True
        assert torch.equal(components(kept), clusters(x, max_angle))


def test_padding_adds_no_cluster_and_no_tree_length():
    x, batch_real = tokens(3, 6, 3), torch.rand(3, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    for cloud, real, filled in zip(x, batch_real, collapse_padding(x, batch_real), strict=True):
        assert torch.equal(filled[real], cloud[real])
        assert torch.equal(filled[~real], cloud[real][:1].expand(int((~real).sum()), 3))
        assert spanning_tree(filled).length.sort().values.tolist()[-int(real.sum()) + 1 :] == (
            spanning_tree(cloud[real]).length.sort().values.tolist()
        )
        assert len(set(clusters(filled, 0.5).tolist())) == oracles.cluster_count(cloud[real].tolist(), 0.5)


# Batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("shape", [(1, 3), (7, 2), (33, 5), (3, 5, 8), (2, 3, 4, 3), (9, 64)])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, y, v: sphere.project(x, v),
        lambda x, y, v: sphere.retract(x + v),
        lambda x, y, v: sphere.angle(x, y),
        lambda x, y, v: sphere.log(x, y),
        lambda x, y, v: sphere.exp(x, v),
        sphere.parallel_transport,
        lambda x, y, v: sphere.pull_back(x, v, y),
        lambda x, y, v: sphere.tangent_basis(x),
    ],
)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(f, shape, dtype):
    x, y, v = tokens(3, *shape, dtype=dtype)
    v = sphere.project(x, v)
    batched = f(x, y, v)
    for index in np.ndindex(shape[:-1]):
        assert torch.equal(f(x[index], y[index], v[index]), batched[index])


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("shape", [(1, 5, 3), (7, 4, 2), (3, 33, 5), (2, 3, 9, 8), (5, 30, 64), (2, 130, 3)])
def test_a_cloud_has_the_same_bits_alone_and_in_a_batch(shape, dtype):
    x = tokens(*shape, dtype=dtype)
    angles, tree, label = systems(pairwise_angles(x)), spanning_tree(x), clusters(x, 0.5)
    for k, cloud in enumerate(systems(x)):
        assert torch.equal(pairwise_angles(cloud), angles[k])
        for alone, batched in zip(spanning_tree(cloud), tree, strict=True):
            assert torch.equal(alone, batched.reshape(-1, shape[-2] - 1)[k])
        assert torch.equal(clusters(cloud, 0.5), label.reshape(-1, shape[-2])[k])


def test_functions_of_points_broadcast():
    x, y = tokens(2, 4, 3)
    v = sphere.project(x[0], y)
    assert torch.equal(sphere.angle(x[:, None], y)[2, 1], sphere.angle(x[2], y[1]))
    assert torch.equal(sphere.log(x[:, None], y)[2, 1], sphere.log(x[2], y[1]))
    assert torch.equal(
        sphere.parallel_transport(x[0], y[:, None], v)[2, 1], sphere.parallel_transport(x[0], y[2], v[1])
    )


def test_trees_and_clusters_require_no_gradient():
    x = tokens(2, 5, 3).requires_grad_()
    assert not spanning_tree(x).length.requires_grad
    assert torch.equal(clusters(x, 0.5), clusters(x.detach(), 0.5))


# Pairs within a distance ----------------------------------------------------------------------------------------------


def hard_pairs(dtype: torch.dtype) -> torch.Tensor:
    """Clouds with pairs that coincide, are opposite, or lie within rounding of 0.1 radians, with norms that are a bit
    off; the last cloud has little else."""
    spread = tokens(3, 24, 7).to(dtype)
    spread[1, 5:9], spread[1, 9:12] = spread[1, :1], -spread[1, :1]
    turn = 0.1 + torch.arange(-12, 12, dtype=F64) * torch.finfo(dtype).eps / 8
    edge = torch.zeros(1, 24, 7, dtype=F64)
    edge[0, :, 0], edge[0, :, 1] = turn.cos(), turn.sin()
    edge[0, :8] = torch.eye(7, dtype=F64)[0]
    return torch.cat([spread, edge.to(dtype)]) * (1 + 1e-7)


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("max_angle", [0.0, 0.1, 1.3, math.pi, 4.0])
def test_pairs_within_a_radius_are_those_of_the_angles_to_the_last_bit(max_angle, dtype):
    x = hard_pairs(dtype)
    assert torch.equal(pairs_within(x, max_angle), pairwise_angles(x) <= max_angle)
    assert torch.equal(pairs_within(x[0], max_angle), pairwise_angles(x[0]) <= max_angle)
    chord = 2 * math.sin(min(max_angle, math.pi) / 2)
    exact = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    assert torch.equal(pairs_within_chord(x, chord), exact <= chord)


def test_most_pairs_are_decided_without_their_exact_distance(monkeypatch):
    x, asked, cdist = tokens(4, 64, 16), [], torch.cdist

    def counting(a, b, **options):
        asked.append(a.shape[0] * a.shape[-2] * b.shape[-2])
        return cdist(a, b, **options)

    monkeypatch.setattr(torch, "cdist", counting)
    pairs_within(x, 0.5)
    assert sum(asked) < 4 * 64**2 / 10


def test_pairs_within_a_radius_can_be_vectorized():
    x = tokens(3, 6, 4)
    assert torch.equal(torch.vmap(lambda cloud: pairs_within(cloud, 1.0))(x), pairs_within(x, 1.0))
    assert torch.equal(torch.vmap(lambda cloud: clusters(cloud, 1.0))(x), clusters(x, 1.0))
