"""Basins by gradient ascent, and the saddles that join them, on landscapes where both are known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import Tanh
from helmscope.geometry import sphere
from helmscope.geometry.critical_points import find_critical_points
from helmscope.meanfield import label_basins, saddle_connections


def starts(n, d, seed=0):
    return hs.Uniform(n=n, dim=d).sample(seed=seed)


def product(x):
    """x y z on S^2: four maxima at the corners of a tetrahedron, six saddles at +-e_k, four minima."""
    return x.prod(-1)


PRODUCT = find_critical_points(product, starts(128, 3))


def test_labels_are_the_octants_of_the_maxima() -> None:
    """By symmetry the planes x_i = +-x_j are invariant; in an octant with xyz > 0 the flow ends at its center."""
    x = starts(200, 3, seed=1)
    x = x[product(x) > 1e-3]
    labels = label_basins(product, x, PRODUCT)
    assert torch.equal(PRODUCT.points[labels].sign(), x.sign())
    flipped = label_basins(lambda y: -product(y), x, find_critical_points(lambda y: -product(y), starts(128, 3)))
    assert (PRODUCT.points[flipped].sign() != x.sign()).any()  # the wrong sign of U


def test_each_pair_of_maxima_is_joined_by_one_saddle() -> None:
    connections = saddle_connections(product, PRODUCT)
    assert len(connections) == 6
    assert all(c.joins_two for c in connections)
    pairs = {tuple(sorted(c.basins)) for c in connections}
    assert pairs == set(itertools.combinations(PRODUCT.basins.tolist(), 2))
    height = 1 / (3 * math.sqrt(3))
    assert all(abs(barrier - height) < 1e-12 for c in connections for barrier in c.barriers)
    for c in connections:  # a saddle at e_k is halfway between the corners that it joins
        middle = PRODUCT.points[list(c.basins)].sum(0)
        assert torch.allclose(sphere.retract(middle), PRODUCT.points[c.saddle], atol=1e-10)


def test_on_the_circle_a_saddle_may_join_a_basin_with_itself() -> None:
    height = lambda x: x[..., 0]  # noqa: E731
    found = find_critical_points(height, starts(16, 2))
    (connection,) = saddle_connections(height, found)
    assert connection.basins == (0, 0)
    assert not connection.joins_two
    assert connection.barriers == (2.0, 2.0)


def test_points_on_a_ridge_and_lost_maxima_have_no_label() -> None:
    double_well = lambda x: x[..., 0] ** 2  # noqa: E731
    found = find_critical_points(double_well, starts(32, 2))
    ridge = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert label_basins(double_well, ridge, found).tolist() == [-1]
    one_side = starts(64, 2)
    one_side = one_side[one_side[:, 0] > 0.75]
    half = find_critical_points(double_well, one_side)
    assert len(half.basins) == 1
    there, missing = torch.tensor([[0.6, 0.8], [-0.6, 0.8]], dtype=torch.float64)[:, None]
    assert label_basins(double_well, there, half).tolist() == [0]
    assert label_basins(double_well, missing, half).tolist() == [-1]


def test_the_landscape_of_an_mlp() -> None:
    """Labels agree with a plain ascent in many small steps."""
    g = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
    split = hs.helmholtz(hs.MLP(w_in=2 * normal(24, 3), w_out=normal(3, 24), b_in=normal(24), activation=Tanh()))
    found = find_critical_points(split, starts(48, 3))
    assert len(found.basins) == 2
    x = starts(24, 3, seed=2)
    labels = label_basins(split, x, found)
    step = 0.2 / found.scale
    y = x
    for _ in range(600):
        y = sphere.retract(y + step * sphere.project(y, split.gradient(y)))
    nearest = sphere.angle(y[:, None], found.points[found.basins]).argmin(-1)
    assert torch.equal(labels, found.basins[nearest])
    assert len(labels.unique()) == 2
    (connection,) = saddle_connections(split, found)
    assert connection.joins_two
    assert min(connection.barriers) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: label_basins(product, torch.eye(3), None), "critical_points is None, but it must be the result of"),
        (lambda: saddle_connections(product, None), "critical_points is None, but it must be the result of"),
        (lambda: label_basins(product, torch.eye(2), PRODUCT), r"x has shape \(2, 2\), but it must be \(n, d\) with d"),
        (lambda: label_basins(product, torch.eye(3), PRODUCT, horizon=0), "horizon is 0, but"),
        (
            lambda: label_basins(product, torch.eye(3), find_critical_points(lambda x: 0 * x[..., 0], torch.eye(3))),
            "no nondegenerate maximum of U",
        ),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()
