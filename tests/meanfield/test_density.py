"""Densities: closed forms of von Mises-Fisher laws, clouds and observables, pair shares, refusals."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import ive, ndtr

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import (
    CircleGrid,
    Density,
    DensityPath,
    Grid,
    SphereGrid,
    ZonalGrid,
    entropy_rate,
    evolve,
    free_energy,
    free_energy_rate,
    stationary_density,
)
from support.refusal import refused

CIRCLE, SPHERE, ZONAL = CircleGrid(degree=32), SphereGrid(degree=24), ZonalGrid(dim=8, degree=40)


def mean_length(dim: int, kappa: float) -> float:
    """A_d = I_{d/2}(kappa) / I_{d/2-1}(kappa), by SciPy."""
    return float(ive(dim / 2, kappa) / ive(dim / 2 - 1, kappa))


def fisher_information(density: Density) -> float:
    """E |grad_S log rho|^2 = int |grad rho|^2 / rho dm."""
    squares = density.grid.gradient(density.modes).square().sum(-1)
    return float(density.grid.mean_of(squares / density.values))


@pytest.mark.parametrize(
    ("grid", "kappa", "entropy", "fisher"),
    [
        (SPHERE, 2.0, 2.051614997568417, 2.149258882910192),
        (ZonalGrid(dim=3, degree=32), 2.0, 2.051614997568417, 2.149258882910192),
        (ZONAL, 5.0, 2.386109327559289, 17.30574174222759),
    ],
    ids=["S^2", "zonal, d=3", "zonal, d=8"],
)
def test_entropy_and_fisher_information_of_von_mises_fisher(
    grid: Grid, kappa: float, entropy: float, fisher: float
) -> None:
    density = Density.von_mises_fisher(grid, kappa=kappa)
    assert abs(density.entropy - entropy) < 4e-15 * 10
    assert abs(fisher_information(density) - fisher) < 1e-12
    assert abs(fisher - (grid.dim - 1) * kappa * mean_length(grid.dim, kappa)) < 1e-12
    assert abs(float(density.mean[0]) - mean_length(grid.dim, kappa)) < 1e-14
    assert float(density.mean[1:].abs().max()) < 1e-15


def test_uniform_entropies() -> None:
    assert abs(Density.uniform(SPHERE).entropy - 2.531024246969291) < 1e-14
    assert abs(Density.uniform(ZONAL).entropy - 3.480307254729491) < 1e-14
    assert abs(Density.uniform(CIRCLE).entropy - math.log(2 * math.pi)) < 1e-15


def test_a_density_is_its_function() -> None:
    center = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64) / 3
    density = Density.von_mises_fisher(SPHERE, kappa=3.0, center=5 * center)
    x = hs.Uniform(n=30, dim=3).sample(seed=0)
    exact = 3 / (4 * math.pi * math.sinh(3)) * torch.exp(3 * x @ center)
    assert torch.allclose(density(x), exact, rtol=0, atol=1e-14)
    assert torch.allclose(density.mean, mean_length(3, 3.0) * center, rtol=0, atol=4e-15)
    assert "S^2, degree 24" in repr(density)
    same = Density.from_function(SPHERE, lambda x: 3 / (4 * math.pi * math.sinh(3)) * torch.exp(3 * x @ center))
    assert torch.allclose(same.modes, density.modes, rtol=0, atol=1e-14)
    scaled = Density.from_function(SPHERE, lambda x: torch.exp(3 * x @ center), normalize=True)
    assert torch.allclose(scaled.modes, density.modes, rtol=0, atol=1e-14)


def test_negative_values_are_reported_and_clipped() -> None:
    """1 + 1.5 cos t is negative where cos t < -2/3."""
    modes = (CIRCLE.degrees == 0).double()
    modes[1] = 1.5 / math.sqrt(2)
    density = Density(CIRCLE, modes)
    edge = math.acos(-2 / 3)
    exact = -((math.pi - edge) - 1.5 * math.sin(edge)) / math.pi
    assert abs(density.negative_mass - exact) < 2e-4  # the quadrature of a function with a kink, 132 points
    assert abs(density.minimum + 0.5) < 1e-14
    assert "negative mass" in repr(density)
    _, weights = density.cloud()
    assert float(weights.min()) == 0
    assert abs(float(weights.sum()) - 1) < 1e-15
    refused(lambda: evolve(None, density, times=[1]), "start has the negative mass", "at least 0")
    assert "entropy" not in repr(density)
    noise = IsotropicNoise(0.5)
    height = lambda x: x[..., 0]  # noqa: E731
    needs_logarithm = {
        "the density": lambda: density.entropy,
        "density": lambda: entropy_rate(density, None, noise),
        "density ": lambda: hs.meanfield.fisher_information(density),
        "density h": lambda: free_energy(density, noise=noise, potential=height),
        "density ha": lambda: free_energy_rate(density, noise=noise, potential=height),
        "start": lambda: stationary_density(None, CIRCLE, noise, start=density),
    }
    for name, call in needs_logarithm.items():
        refused(call, name, f"negative mass {density.negative_mass:.3g}", "truncation error")


def test_negative_values_of_a_truncated_series_are_accepted() -> None:
    """The series of a von Mises density with kappa = 10 up to degree 20, where rounding gives way to truncation."""
    whole = Density.von_mises_fisher(CIRCLE, kappa=10.0)
    cut = Density(CIRCLE, whole.modes * (CIRCLE.degrees <= 12))
    assert 1e-6 < cut.negative_mass < 1e-4
    assert abs(cut.entropy - whole.entropy) < 1e-3
    assert entropy_rate(cut, None, IsotropicNoise(0.5)).total > 0


# Observables on the cloud ---------------------------------------------------------------------------------------------


def energy_by_series(density: Density, beta: float) -> float:
    """(1 / 2 beta) int int e^{beta <x, y>} rho rho, diagonal in the harmonics."""
    multipliers = density.grid.exponential_multipliers(beta)
    return math.exp(beta) * float((multipliers * density.modes**2).sum()) / (2 * beta)


@pytest.mark.parametrize("grid", [CIRCLE, SphereGrid(degree=14)], ids=repr)
def test_observables_run_on_the_cloud(grid: Grid) -> None:
    start = Density.von_mises_fisher(grid, kappa=1.0)
    path = evolve(hs.SA(beta=2.0), start, times=[0, 0.5], noise=IsotropicNoise(0.2))
    measured = hs.track(
        path.trajectory,
        energy=lambda x, weights=None: hs.interaction_energy(x, beta=2.0, weights=weights),
        order=hs.order_parameter,
        inner=partial(hs.mean_inner_product, distinct=False),
    )
    for k, density in enumerate(path):
        length = float(density.mean.norm())
        assert abs(float(measured["energy"][k].squeeze()) - energy_by_series(density, 2.0)) < 1e-12
        assert abs(float(measured["order"][k].squeeze()) - length) < 1e-13
        assert abs(float(measured["inner"][k].squeeze()) - length**2) < 1e-13


def test_moments_of_a_zonal_cloud() -> None:
    """Mean and covariance are exact, in any dimension: E x x^T = diag(q, (1 - q)/(d - 1), ...), q = E s^2."""
    points, weights = Density.von_mises_fisher(ZONAL, kappa=5.0).cloud()
    length = mean_length(8, 5.0)
    second = 1 - 7 * length / 5  # E s^2 = 1 - (d - 1) A / kappa
    covariance = (weights[:, None] * points).mT @ points
    exact = torch.full((8,), (1 - second) / 7, dtype=torch.float64)
    exact[0] = second
    assert torch.allclose(covariance, exact.diag(), rtol=0, atol=1e-14)
    assert torch.allclose((weights @ points), length * torch.eye(8, dtype=torch.float64)[0], rtol=0, atol=1e-14)


# Pairs ----------------------------------------------------------------------------------------------------------------


def test_aligned_pair_shares_of_uniform_densities_are_caps() -> None:
    for cosine in (-1.0, -0.3, 0.0, 0.5, 0.999, 1.0):
        assert abs(Density.uniform(CIRCLE).aligned_pair_share(cosine) - math.acos(cosine) / math.pi) < 1e-14
        assert abs(Density.uniform(SPHERE).aligned_pair_share(cosine) - (1 - cosine) / 2) < 1e-14
    at_high_dim = Density.uniform(ZonalGrid(dim=4096, degree=4)).aligned_pair_share(1 / 64)
    assert abs(at_high_dim - (1 - ndtr(1.0))) < 1e-4  # sqrt(d) <x, y> is normal up to O(1/d)


def test_aligned_pair_share_on_the_circle_is_an_integral() -> None:
    """P(|s - t| < a) by a double sum over 2,000 points, with a halfway between two of their distances."""
    density = Density.von_mises_fisher(CIRCLE, kappa=2.0)
    t = 2 * math.pi * (np.arange(2000) + 0.5) / 2000
    values = np.exp(2 * np.cos(t))
    values /= values.mean()
    gaps = np.abs((t[:, None] - t + math.pi) % (2 * math.pi) - math.pi)
    angle = 254.5 * math.pi / 1000
    exact = (values @ (gaps < angle) @ values) / 2000**2
    assert abs(density.aligned_pair_share(math.cos(angle)) - exact) < 1e-6


@pytest.mark.parametrize(("grid", "kappa"), [(SPHERE, 3.0), (ZONAL, 5.0)], ids=["S^2", "zonal, d=8"])
def test_aligned_pair_share_against_sampling(grid: Grid, kappa: float) -> None:
    x, y = hs.VonMisesFisher(n=40_000, dim=grid.dim, kappa=kappa).sample(batch=2, seed=0)
    for cosine in (0.2, 0.6, 0.9):
        share = float(((x * y).sum(-1) > cosine).double().mean())
        exact = Density.von_mises_fisher(grid, kappa=kappa).aligned_pair_share(cosine)
        assert abs(share - exact) < 3.5 * math.sqrt(exact * (1 - exact) / 40_000)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_what_is_no_density_is_refused() -> None:
    refused(lambda: Density.from_function(CIRCLE, lambda x: 1 + x[..., 0]), "integrates to 6.28319", "normalize=True")
    refused(lambda: Density.from_function(CIRCLE, lambda x: x[..., 0]), "the value -1", "at least 0")
    refused(lambda: Density.from_function(CIRCLE, lambda x: 0 * x[..., 0], normalize=True), "integrates to 0")
    refused(lambda: Density.from_function(CIRCLE, lambda x: x[..., 0] / 0), "must be finite")
    refused(lambda: Density.from_function(CIRCLE, lambda x: x), "one number for each of the 132 points")
    refused(lambda: Density.from_function(CIRCLE, lambda x: 1.0), "function returns 1.0")
    refused(lambda: Density(CIRCLE, torch.ones(3)), "modes is", "(65,)")
    refused(lambda: Density(CIRCLE, 2 * Density.uniform(CIRCLE).modes), "total mass 2")
    refused(lambda: Density(CIRCLE, torch.full((65,), math.nan)), "NaN")
    refused(lambda: Density("circle", torch.ones(3)), "grid is 'circle'")


def test_what_a_grid_cannot_hold_is_refused() -> None:
    step = lambda x: (x[..., 0] > 0).double()  # noqa: E731
    refused(lambda: Density.from_function(CIRCLE, step, normalize=True), "degree is 32", "raise degree")
    text = refused(lambda: Density.von_mises_fisher(CIRCLE, kappa=400.0), "degree is 32", "kappa=400")
    needed = int(text.split("degree=")[1].split()[0])
    assert Density.von_mises_fisher(CircleGrid(needed), kappa=400.0).negative_mass < 1e-5
    refused(lambda: Density.von_mises_fisher(CIRCLE, kappa=-1.0), "kappa is -1")
    refused(lambda: Density.von_mises_fisher(SPHERE, kappa=1.0, center=torch.ones(2)), "center", "(3,)")
    refused(lambda: Density.von_mises_fisher(SPHERE, kappa=1.0, center=torch.zeros(3)), "center", "nonzero")


def test_what_is_not_zonal_is_refused() -> None:
    off_axis = torch.eye(8, dtype=torch.float64)[3]
    refused(lambda: Density.von_mises_fisher(ZONAL, kappa=1.0, center=off_axis), "center", "first axis")
    refused(
        lambda: Density.from_function(ZONAL, lambda x: torch.exp(x[..., 3]), normalize=True), "first coordinate only"
    )
    flat = ZonalGrid(dim=2, degree=16)
    refused(lambda: Density.from_function(flat, lambda x: 1 + 0.5 * x[..., 1], normalize=True), "first coordinate only")
    refused(lambda: Density.uniform(CIRCLE).aligned_pair_share(1.5), "level is 1.5", "[-1, 1]")


def test_a_path_is_a_sequence_of_densities() -> None:
    path = evolve(None, Density.von_mises_fisher(CIRCLE, kappa=1.0), times=[0, 1], noise=IsotropicNoise(0.1))
    assert isinstance(path, DensityPath)
    assert len(path) == len(list(path)) == 2
    assert path[-1].entropy > path[0].entropy
    assert path.minimum.shape == path.negative_mass.shape == (2,)
    assert repr(path) == "<DensityPath on S^1, degree 32: 2 times, 0 to 1; finished>"
