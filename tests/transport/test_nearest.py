"""The entropy of nearest neighbors: laws of known entropy on spheres and in R^d, a plain loop, bad input."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.theory.starts import Uniform
from helmscope.transport.nearest import nearest_neighbor_entropy
from helmscope.types import HelmscopeError
from support.transport_oracles import unit_cloud


def normal(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("dim", "area"), [(2, 2 * math.pi), (3, 4 * math.pi), (4, 2 * math.pi**2)])
def test_uniform_points_of_a_sphere_have_the_logarithm_of_its_area(dim: int, area: float) -> None:
    """k log r_i has a standard deviation of about pi / sqrt(6), whence the error of the mean."""
    n = 4000
    found = nearest_neighbor_entropy(Uniform(n=n, dim=dim).sample(seed=1), on_sphere=True)
    assert found == pytest.approx(math.log(area), abs=4 * math.pi / math.sqrt(6 * n))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_normal_points_have_their_entropy(dim: int) -> None:
    found = nearest_neighbor_entropy(normal(4000, dim, 1), on_sphere=False)
    assert found == pytest.approx(dim * math.log(2 * math.pi * math.e) / 2, abs=0.1)


@pytest.mark.parametrize("on_sphere", [False, True])
def test_agrees_with_a_plain_loop(on_sphere: bool) -> None:
    x = unit_cloud(30, 3, 1) if on_sphere else normal(30, 3, 1)
    k, total = (2, 0.0) if on_sphere else (3, 0.0)
    for i in range(30):
        distances = [
            math.acos(float((x[i] * x[j]).sum())) if on_sphere else math.dist(x[i].tolist(), x[j].tolist())
            for j in range(30)
            if j != i
        ]
        total += math.log(min(distances))
    ball = math.pi if k == 2 else 4 * math.pi / 3
    wanted = math.log(29) + 0.5772156649015329 + math.log(ball) + k * total / 30
    assert nearest_neighbor_entropy(x, on_sphere=on_sphere) == pytest.approx(wanted, abs=1e-10)


def test_quasi_random_points_repel_each_other_and_overestimate_the_entropy() -> None:
    """Why the points must be independent: on the unit square the entropy is 0."""
    regular = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(1024, dtype=torch.float64)
    independent = torch.rand(1024, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert abs(nearest_neighbor_entropy(independent, on_sphere=False)) < 0.15
    assert nearest_neighbor_entropy(regular, on_sphere=False) > 0.3


def test_bad_input() -> None:
    with pytest.raises(HelmscopeError, match="x has 1 point"):
        nearest_neighbor_entropy(normal(1, 2, 0), on_sphere=False)
    with pytest.raises(HelmscopeError, match="equal points"):
        nearest_neighbor_entropy(torch.zeros(3, 2, dtype=torch.float64), on_sphere=False)
