"""The force of ``helmscope density``: its velocity, its potential, and what its swirl does to the free energy."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import (
    AxisForce,
    CircleGrid,
    Density,
    SphereGrid,
    ZonalGrid,
    evolve,
    free_energy,
    free_energy_rate,
    stationary_density,
)
from helmscope.observe import density_overview
from support.refusal import refused

F64 = torch.float64


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_the_velocity_by_loops(dim: int) -> None:
    x = torch.nn.functional.normalize(
        torch.randn(7, dim, generator=torch.Generator().manual_seed(0), dtype=F64), dim=-1
    )
    found = AxisForce(strength=1.3, swirl=-0.6)(x)
    for point, velocity in zip(x.tolist(), found.tolist(), strict=True):
        force = [1.3 + 0.6 * point[1], -0.6 * point[0]] + (dim - 2) * [0.0]
        radial = sum(f * p for f, p in zip(force, point, strict=True))
        assert velocity == pytest.approx([f - radial * p for f, p in zip(force, point, strict=True)], abs=1e-14)


@pytest.mark.parametrize("grid", [CircleGrid(24), SphereGrid(20), ZonalGrid(dim=8, degree=24)], ids=repr)
def test_the_stationary_density_is_that_of_its_potential(grid) -> None:
    """~ e^{h <x, e> / nu}, and no longer with a swirl."""
    found = stationary_density(AxisForce(strength=0.6), grid, IsotropicNoise(0.3))
    assert torch.allclose(found.modes, Density.von_mises_fisher(grid, kappa=2.0).modes, rtol=0, atol=1e-10)
    if isinstance(grid, ZonalGrid):
        refused(lambda: evolve(AxisForce(swirl=1.0), found, times=[1.0]), "meridians", "simulate particles")
        return
    turned = stationary_density(AxisForce(strength=0.6, swirl=0.5), grid, IsotropicNoise(0.3))
    assert float(turned.mean[1]) > 0.05  # along the rotation


@pytest.mark.parametrize("grid", [CircleGrid(24), SphereGrid(20)], ids=repr)
def test_the_work_of_the_swirl_by_quadrature(grid) -> None:
    """-int rho <R, grad U> = h s E x_2, and div R = 0."""
    center = torch.zeros(grid.dim, dtype=F64)
    center[:2] = torch.tensor([0.6, 0.8])
    density, force = Density.von_mises_fisher(grid, kappa=2.0, center=center), AxisForce(strength=1.3, swirl=-0.6)
    rate = free_energy_rate(density, noise=0.4, potential=force.potential, field=force)
    mean = 0.0
    for weight, value, point in zip(grid.weights.tolist(), density.values.tolist(), grid.points.tolist(), strict=True):
        mean += weight * value * point[1]
    assert rate.swirl_work == pytest.approx(1.3 * -0.6 * mean, abs=1e-12)
    assert rate.swirl_expansion == pytest.approx(0, abs=1e-10)


def test_the_overview_has_the_free_energy_of_the_linear_equation() -> None:
    """U = cos t, nu = 1/2: the known digits; with a strong swirl F rises at its rate."""
    start = Density.from_function(CircleGrid(24), lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
    noise = IsotropicNoise(0.5)
    measured = density_overview(evolve(AxisForce(), start, times=[0, 1, 3], noise=noise, tol=1e-11))
    known = [-0.8866194672, -1.2099136761, -1.3244103308]
    assert measured.free_energy.values[:, 0] == pytest.approx(known, abs=1e-10)
    assert measured.free_energy_rate.values[0, 0] == pytest.approx(-0.5334936490538903, abs=1e-12)
    swirling = AxisForce(swirl=4.0)
    h = 1e-4
    path = evolve(swirling, start, times=[0, h, 2 * h], noise=noise, tol=1e-13)
    measured = density_overview(path)
    before, _, after = (free_energy(density, noise=noise, potential=swirling.potential) for density in path)
    assert float(measured.free_energy_rate[1, 0]) == pytest.approx((after - before) / (2 * h), abs=1e-6)
    assert float(measured.free_energy_rate[1, 0]) > 0


def test_bad_input() -> None:
    refused(lambda: AxisForce(strength=math.nan), "strength is nan")
    refused(lambda: AxisForce(swirl="fast"), "swirl is 'fast'")
