"""Attention at large beta, where Z spans e^{2 beta}: closed forms by mpmath, loops, evolutions and stationary states.

A von Mises-Fisher density of concentration kappa about e has Z(x) = L(|kappa e + beta x|) / L(kappa), with
L(r) = Gamma(d/2) (2 / r)^{d/2-1} I_{d/2-1}(r), and the velocity (1 / beta) grad_S log Z = kappa A_d(r) / r P_x e,
A_d = I_{d/2} / I_{d/2-1}.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import (
    CircleGrid,
    Density,
    Grid,
    SphereGrid,
    StationaryStatus,
    ZonalGrid,
    bifurcation_diagram,
    evolve,
    stationary_density,
)
from helmscope.meanfield.attention_sums import attention_sums
from helmscope.meanfield.drift import drift_of

F64 = torch.float64
GRIDS = [CircleGrid(80), SphereGrid(26), ZonalGrid(dim=2, degree=80), ZonalGrid(dim=3, degree=64)]
GRIDS += [ZonalGrid(dim=8, degree=64), ZonalGrid(dim=512, degree=48)]


def log_bessel(r: mpmath.mpf, dim: int) -> mpmath.mpf:
    """log L(r), by the series of positive terms 0F1(d/2; r^2 / 4)."""
    return mpmath.log(mpmath.hyp0f1(mpmath.mpf(dim) / 2, r * r / 4))


def closed_form(heights: list[float], kappa: float, beta: float, dim: int) -> tuple[list[float], list[float]]:
    """log Z and the component of the velocity toward e, at points with <x, e> = s."""
    logs, components = [], []
    with mpmath.workdps(40):
        for s in map(mpmath.mpf, heights):
            r = mpmath.sqrt(kappa**2 + beta**2 + 2 * kappa * beta * s)
            logs.append(float(log_bessel(r, dim) - log_bessel(mpmath.mpf(kappa), dim)))
            # L' / (r L) = 0F1(d/2 + 1; r^2 / 4) / (d 0F1(d/2; r^2 / 4))
            half = mpmath.mpf(dim) / 2
            ratio = mpmath.hyp0f1(half + 1, r * r / 4) / mpmath.hyp0f1(half, r * r / 4) / dim
            components.append(float(kappa * ratio * mpmath.sqrt(1 - s * s)))
    return logs, components


def cluster(grid: Grid, kappa: float) -> torch.Tensor:
    """The values of a von Mises-Fisher density, all of them to rounding."""
    values = (kappa * (grid.points[:, 0] - 1)).exp()
    return values / grid.mean_of(values)


def sample_points(grid: Grid) -> torch.Tensor:
    """Forty points, the two nearest to e and to -e among them."""
    order = grid.points[:, 0].argsort()
    return torch.unique(torch.cat([order[:: max(1, len(order) // 40)], order[-1:]]))


def toward_first_axis(grid: Grid, components: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The components of tangent vectors along P e / |P e|."""
    pole = grid.frame[at, :, 0]  # P e in the frame
    return (components * pole).sum(-1) / pole.norm(dim=-1).clamp(min=1e-300)


@pytest.mark.parametrize("beta", [20.0, 40.0])
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_sums_have_the_digits_of_the_closed_form(grid: Grid, beta: float) -> None:
    """At all points, though Z spans 35 orders of magnitude at beta = 40; on S^2 the degree limits kappa."""
    kappa = 8.0 if isinstance(grid, SphereGrid) else beta
    at = sample_points(grid)
    log_z, pulls = attention_sums(grid, beta, cluster(grid, kappa), at)
    logs, components = closed_form(grid.points[at, 0].tolist(), kappa, beta, grid.dim)
    assert torch.allclose(log_z, torch.tensor(logs, dtype=F64), rtol=0, atol=1e-11)
    exact = torch.tensor(components, dtype=F64)
    assert torch.allclose(toward_first_axis(grid, pulls, at), exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("beta", [-20.0, 20.0, 40.0])
def test_sums_by_loops(beta: float) -> None:
    """Two clusters of unequal mass on S^2, off the axes, with plain sums at a few points."""
    grid = SphereGrid(16)
    centers = torch.tensor([[0.6, 0.0, 0.8], [0.0, -0.8, 0.6]], dtype=F64)
    values = ((12 * (grid.points @ centers.mT - 1)).exp() * torch.tensor([1.0, 0.2], dtype=F64)).sum(-1)
    at = torch.arange(0, len(values), 97)
    log_z, pulls = attention_sums(grid, beta, values, at)
    points, masses = grid.points.tolist(), (grid.weights * values).tolist()
    for i, index in enumerate(at.tolist()):
        x, total, mean = points[index], 0.0, [0.0, 0.0, 0.0]
        for y, mass in zip(points, masses, strict=True):
            term = mass * math.exp(beta * sum(a * b for a, b in zip(x, y, strict=True)))
            total += term
            mean = [m + term * b for m, b in zip(mean, y, strict=True)]
        assert abs(float(log_z[i]) - math.log(total)) < 1e-12
        expected = grid.frame[index] @ torch.tensor(mean, dtype=F64) / total
        assert torch.allclose(pulls[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [20.0, 40.0])
@pytest.mark.parametrize(
    "grid", [CircleGrid(80), SphereGrid(44), ZonalGrid(dim=3, degree=64), ZonalGrid(dim=8, degree=64)], ids=repr
)
def test_the_velocity_of_a_narrow_cluster(grid: Grid, beta: float) -> None:
    """Series where Z has its digits, sums elsewhere: 6 digits at all points, 9 where there is mass."""
    values = cluster(grid, 20.0)
    at = sample_points(grid)
    found = drift_of(hs.SA(beta=beta), grid).components(grid.analyze(values), 0.0, values)[at]
    _, components = closed_form(grid.points[at, 0].tolist(), 20.0, beta, grid.dim)
    error = (toward_first_axis(grid, found, at) - torch.tensor(components, dtype=F64)).abs()
    assert float(error.max()) < 1e-6
    assert float((error * values[at] / values.max()).max()) < 1e-9


@pytest.mark.parametrize("beta", [20.0, 40.0])
@pytest.mark.parametrize("grid", [CircleGrid(120), ZonalGrid(dim=3, degree=96), ZonalGrid(dim=8, degree=96)], ids=repr)
def test_both_forms_of_the_equation_agree_at_large_beta(grid: Grid, beta: float) -> None:
    """The values at the antipode, 1e-17 of the largest, are lost in the plain form only, and do no harm there."""
    values = cluster(grid, 20.0)
    start = Density(grid, grid.analyze(values), grid.analyze(values.log()))
    paths = [
        evolve(hs.SA(beta=beta), start, times=[0.1], noise=IsotropicNoise(0.02), positive=positive, tol=1e-9)
        for positive in (False, True)
    ]
    assert all(path.outcome.ok for path in paths)
    assert float((paths[0].modes - paths[1].modes).abs().max()) < 1e-8
    assert 0 < float(paths[1].minimum[0]) < 1e-14


def test_a_narrow_cluster_on_the_sphere_is_the_zonal_one() -> None:
    field, options = hs.SA(beta=20.0), {"times": [0.02], "noise": IsotropicNoise(0.02)}
    sphere, zonal = (
        evolve(field, Density.von_mises_fisher(grid, kappa=12.0), **options)
        for grid in (SphereGrid(34), ZonalGrid(dim=3, degree=48))
    )
    assert sphere.outcome.ok
    x = hs.Uniform(n=50, dim=3).sample(seed=0)
    assert torch.allclose(sphere[0](x), zonal[0](x), rtol=0, atol=1e-8)


@pytest.mark.parametrize("grid", [CircleGrid(96), ZonalGrid(dim=3, degree=96), ZonalGrid(dim=8, degree=96)], ids=repr)
def test_stationary_clusters_at_large_beta(grid: Grid) -> None:
    """rho ~ Z^{1 / (nu beta)} to 1e-8, at nu beta = 0.4.

    For beta -> infinity the cluster is Gaussian with a variance s of each coordinate, b = -x / (1 + beta s), so that
    s' = -2 s / (1 + beta s) + 2 nu: the slowest perturbation decays at the rate 2 (1 - nu beta)^2 = 0.72, and at finite
    beta up to a term of order 1 / beta, which is eliminated.
    """
    rates = []
    for beta in (20.0, 40.0):
        found = stationary_density(hs.SA(beta=beta), grid, IsotropicNoise(0.4 / beta))
        assert found.status is StationaryStatus.CONVERGED
        log_z, _ = attention_sums(grid, beta, found.values, torch.arange(len(found.values)))
        expected = ((log_z - log_z.max()) / 0.4).exp()
        expected = expected / grid.mean_of(expected)
        assert float((found.values - expected).abs().max() / expected.max()) < 1e-8
        rates.append(found.growth_rate)
    assert 2 * rates[1] - rates[0] == pytest.approx(-0.72, abs=2e-3)


def test_the_branch_of_clusters_at_large_beta() -> None:
    """Followed from nu_c = 0.0328 to 0.012, it passes through the stationary densities found alone."""
    nus = [0.012, 0.02, 0.03]
    branch = bifurcation_diagram(hs.SA, betas=[30.0], nus=nus, dim=2, degree=120)
    for nu, order in zip(nus, branch.order_parameter.values[0], strict=True):
        alone = stationary_density(hs.SA(beta=30.0), CircleGrid(120), IsotropicNoise(nu))
        assert float(alone.mean.norm()) == pytest.approx(order, abs=1e-10)
