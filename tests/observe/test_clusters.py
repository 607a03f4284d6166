"""Cluster counts and merge trees against loops and SciPy's single linkage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.cluster.hierarchy as hierarchy
import torch
from scipy.spatial.distance import squareform

import helmscope as hs
from support import oracles

F64 = torch.float64
SIZES = [(1, 3), (2, 2), (7, 2), (12, 3), (9, 16)]


def circle(*angles: float) -> torch.Tensor:
    given = torch.tensor(angles, dtype=F64)
    return torch.stack([given.cos(), given.sin()], -1)


def cluster_start(batch: int, seed: int) -> torch.Tensor:
    """Twelve tokens near three random centers, in random order."""
    generator = torch.Generator().manual_seed(seed)
    centers = hs.Uniform(3, 4).sample(batch, seed=seed).repeat_interleave(4, 1)
    x = centers + 0.05 * torch.randn(batch, 12, 4, dtype=F64, generator=generator)
    x = x[:, torch.randperm(12, generator=generator)]
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("max_angle", [0.0, 0.1, 0.5, 1.0, 3.2])
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_count_is_the_loop(n, d, max_angle):
    x = hs.Uniform(n, d).sample(10, seed=n)
    assert hs.cluster_count(x, max_angle=max_angle).tolist() == [
        oracles.cluster_count(c, max_angle) for c in x.tolist()
    ]


@pytest.mark.parametrize("max_angle", [0.05, 0.1, 0.2, 0.4])
def test_count_of_clustered_clouds_is_the_loop(max_angle):
    x = cluster_start(20, seed=1)
    counts = hs.cluster_count(x, max_angle=max_angle)
    assert counts.tolist() == [oracles.cluster_count(cloud, max_angle) for cloud in x.tolist()]
    assert counts.dtype == torch.long
    assert hs.cluster_count(x.reshape(4, 5, 12, 4), max_angle=max_angle).tolist() == counts.reshape(4, 5).tolist()


def test_count_leaves_padding_out():
    """Whatever lies under the mask, a new point or a bridge between clusters, changes nothing."""
    x = cluster_start(40, seed=2)
    mask = torch.rand(40, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 5] = True
    for max_angle in (0.05, 0.1, 0.3):
        loops = [oracles.cluster_count(c[m].tolist(), max_angle) for c, m in zip(x, mask, strict=True)]
        assert hs.cluster_count(x, max_angle=max_angle, weights=mask).tolist() == loops
    bridge = circle(0.0, 0.5, 1.0)
    assert hs.cluster_count(bridge, max_angle=0.6).item() == 1
    assert hs.cluster_count(bridge, max_angle=0.6, weights=torch.tensor([True, False, True])).item() == 2


def test_a_chain_is_one_cluster_and_the_radius_counts_as_close():
    chain = circle(*(0.1 * k for k in range(12)))
    assert hs.cluster_count(chain, max_angle=0.1 + 1e-12).item() == 1
    assert hs.cluster_count(chain, max_angle=0.1 - 1e-12).item() == 12
    right_angle = hs.observe.merge_tree(circle(0.0, math.pi / 2)).height.item()
    assert hs.cluster_count(circle(0.0, math.pi / 2), max_angle=right_angle).item() == 1
    assert hs.cluster_count(circle(0.3, 0.3, 0.3), max_angle=0.0).item() == 1


def test_count_sees_the_smallest_distances():
    # an inner product cannot tell 1e-9 from 0
    x = circle(0.0, 1e-9, 2.5e-9)
    assert [hs.cluster_count(x, max_angle=r).item() for r in (5e-10, 1.2e-9, 2e-9)] == [3, 2, 1]


# The merge tree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_heights_are_the_loop(n, d):
    x = hs.Uniform(n, d).sample(6, seed=n)
    tree = hs.observe.merge_tree(x)
    loops = np.array([oracles.merge_heights(cloud) for cloud in x.tolist()])
    assert tree.height.shape == tree.left.shape == tree.right.shape == (6, n - 1)
    assert np.abs(tree.height.numpy() - loops).max(initial=0.0) < 1e-15
    assert (tree.height.diff(dim=-1) >= 0).all()
    edges = hs.sphere.angle(*(x.gather(-2, end[..., None].expand(6, n - 1, d)) for end in (tree.left, tree.right)))
    assert torch.allclose(edges, tree.height, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("n", "d"), SIZES[1:])
def test_linkage_is_that_of_scipy(n, d):
    for cloud in hs.Uniform(n, d).sample(5, seed=10 + n):
        ours = hs.observe.merge_tree(cloud).linkage().numpy()
        distances = squareform(hs.geometry.linkage.pairwise_angles(cloud).numpy(), checks=False)
        theirs = hierarchy.linkage(distances, method="single")
        assert np.array_equal(ours[:, [0, 1, 3]], theirs[:, [0, 1, 3]])
        assert np.abs(ours[:, 2] - theirs[:, 2]).max() < 1e-15
        assert hierarchy.is_valid_linkage(ours)
        for max_angle in (0.1, 0.5, 1.0):
            cut = hierarchy.fcluster(ours, max_angle, criterion="distance")
            assert hs.cluster_count(cloud, max_angle=max_angle).item() == cut.max()


def test_a_circle_by_hand():
    tree = hs.observe.merge_tree(circle(0.0, 1.0, 1.1, 3.0))
    assert tree.height.tolist() == pytest.approx([0.1, 1.0, 1.9], rel=0, abs=1e-15)
    assert tree.linkage().tolist() == [
        [1.0, 2.0, pytest.approx(0.1), 2.0],
        [0.0, 4.0, pytest.approx(1.0), 3.0],
        [3.0, 5.0, pytest.approx(1.9), 4.0],
    ]


def test_coincident_and_antipodal_tokens():
    e = torch.eye(2, dtype=F64)
    tree = hs.observe.merge_tree(torch.stack([e[0], e[0], -e[0]]))
    assert tree.height.tolist() == [0.0, math.pi]
    assert tree.linkage()[:, 3].tolist() == [2.0, 3.0]


def test_one_token_has_an_empty_tree():
    tree = hs.observe.merge_tree(circle(0.3))
    assert tree.height.shape == (0,)
    assert tree.linkage().shape == (0, 4)
    assert hs.cluster_count(circle(0.3), max_angle=0.1).item() == 1


# Refusals -------------------------------------------------------------------------------------------------------------

X = hs.Uniform(4, 3).sample(2, seed=0)
NOBODY = torch.zeros(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hs.observe.merge_tree(X).linkage(), r"height has shape \(2, 3\).*one cloud"),
        (lambda: hs.cluster_count(X, max_angle=-0.1), r"max_angle is -0\.1.*>= 0"),
        (lambda: hs.cluster_count(X, max_angle=math.nan), "max_angle is nan.*finite"),
        (lambda: hs.cluster_count(2 * X, max_angle=0.1), "x holds a token of norm 2.*unit sphere"),
        (lambda: hs.observe.merge_tree(2 * X), "x holds a token of norm 2.*unit sphere"),
        (lambda: hs.observe.merge_tree(X.tolist()), "x is a list.*tensor"),
        (lambda: hs.cluster_count(X, max_angle=0.1, weights=-torch.ones(4)), "weights holds the entry -1.*>= 0"),
        (lambda: hs.cluster_count(X, max_angle=0.1, weights=[True] * 4), "weights .*list.*tensor"),
        (lambda: hs.cluster_count(X, max_angle=0.1, weights=NOBODY), "weights .*without any"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
