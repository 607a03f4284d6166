"""Growth rates around the uniform density: known digits, mpmath, differences of the equation, evolution, faults."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise
from helmscope.meanfield import CircleGrid, Density, Grid, SphereGrid, ZonalGrid, critical_nu, evolve, growth_rates
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.growth import bessel_ratios
from helmscope.meanfield.linearization import Linearization

GRIDS = [CircleGrid(degree=24), SphereGrid(degree=16), ZonalGrid(dim=8, degree=20)]


def test_known_critical_noise() -> None:
    assert critical_nu(hs.SA(beta=4.0), dim=2) == pytest.approx(0.2158806527561376, abs=1e-16)
    assert critical_nu(hs.SA(beta=4.0), dim=3) == pytest.approx(0.18766778760042, abs=1e-14)
    assert critical_nu(hs.SA(beta=4.0), dim=3) == pytest.approx((1 / math.tanh(4) - 0.25) / 4, abs=1e-16)
    assert critical_nu(hs.SA(beta=0.0), dim=5) == 0.2
    assert critical_nu(hs.SA(beta=4.0, value=-torch.eye(3)), dim=3) == 0


@pytest.mark.parametrize("beta", [1e-3, 4.0, 300.0, 3000.0])
@pytest.mark.parametrize("dim", [2, 3, 17, 20000])
def test_bessel_ratios_with_thirty_digits(beta: float, dim: int) -> None:
    mpmath.mp.dps = 30
    order = mpmath.mpf(dim) / 2 - 1
    found = bessel_ratios(beta, 40, dim=dim)
    for k in (1, 2, 7, 40):
        expected = mpmath.besseli(order + k, beta) / mpmath.besseli(order, beta)
        assert float(found[k]) == pytest.approx(float(expected), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("dim", [2, 3, 40])
def test_rates_of_usa_with_thirty_digits(dim: int) -> None:
    mpmath.mp.dps = 30
    beta, nu, order = mpmath.mpf("2.5"), 0.07, mpmath.mpf(dim) / 2 - 1
    found = growth_rates(hs.USA(beta=2.5), dim=dim, nu=nu, degree=6)
    for k in range(7):
        mu = mpmath.gamma(mpmath.mpf(dim) / 2) * (2 / beta) ** order * mpmath.besseli(order + k, beta)
        assert float(found[k]) == pytest.approx(float(k * (k + dim - 2) * (mu / beta - nu)), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@pytest.mark.parametrize("kind", ["SA", "USA", "repulsive", "other sign"])
def test_differences_of_the_equation(grid: Grid, kind: str) -> None:
    """Central differences of the right-hand side at the uniform density, mode by mode."""
    eye = torch.eye(grid.dim)
    field = {
        "SA": hs.SA(beta=4.0),
        "USA": hs.USA(beta=2.0),
        "repulsive": hs.SA(beta=3.0, value=-0.5 * eye),
        "other sign": hs.USA(beta=2.0, query_key=-eye, value=-eye),
    }[kind]
    nu, h, uniform = 0.1, 1e-4, Density.uniform(grid).modes
    equation = ForwardEquation.of(field, grid, IsotropicNoise(nu))
    expected = growth_rates(field, dim=grid.dim, nu=nu, degree=grid.degree)
    for i in range(1, min(len(uniform), 30)):
        step = torch.zeros_like(uniform)
        step[i] = h
        rates = [equation.rate(uniform + s * step, 0.0) - equation.decay * (uniform + s * step) for s in (1, -1)]
        difference = (rates[0] - rates[1]) / (2 * h)
        assert abs(float(difference[i] - expected[grid.degrees[i]])) < 1e-8
        difference[i] = 0
        assert float(difference.abs().max()) < 1e-8


@pytest.mark.parametrize("grid", [CircleGrid(degree=16), SphereGrid(degree=14)], ids=repr)
def test_a_small_perturbation_grows_at_its_rate(grid: Grid) -> None:
    field, nu, t = hs.SA(beta=4.0), 0.05, 0.5
    rates = growth_rates(field, dim=grid.dim, nu=nu, degree=2)
    for k in (1, 2):
        modes = Density.uniform(grid).modes.clone()
        i = int((grid.degrees == k).nonzero()[0])
        modes[i] = 1e-6
        times = [t * j / 12 for j in range(13)]  # short steps: the tolerance is relative to the uniform part
        after = evolve(field, Density(grid, modes), times=times, noise=IsotropicNoise(nu))[-1].modes[i]
        assert math.log(float(after) / 1e-6) / t == pytest.approx(float(rates[k]), abs=1e-8)


def test_uniform_is_stable_exactly_above_the_critical_noise() -> None:
    for field in (hs.SA(beta=4.0), hs.USA(beta=3.0), hs.SA(beta=2.0, query_key=-torch.eye(3), value=-torch.eye(3))):
        nu = critical_nu(field, dim=3)
        assert float(growth_rates(field, dim=3, nu=1.001 * nu)[1:].max()) < 0
        assert float(growth_rates(field, dim=3, nu=0.999 * nu)[1:].max()) > 0


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_linearization_at_other_densities(grid: Grid) -> None:
    """Against central differences, for attention and forces, isotropic and anisotropic noise."""
    axis = torch.zeros(grid.dim, dtype=torch.float64)
    axis[0] = 1.0
    noises = [IsotropicNoise(0.2), MatrixNoise(0.3 * torch.eye(grid.dim, dtype=torch.float64) + 0.2 * torch.diag(axis))]
    fields = [hs.SA(beta=3.0), hs.USA(beta=1.5), lambda x: axis.to(x).expand_as(x)]
    modes, generator = Density.von_mises_fisher(grid, kappa=1.0).modes, torch.Generator().manual_seed(0)
    for noise in noises:
        for field in fields:
            equation = ForwardEquation.of(field, grid, noise)
            direction = torch.randn(len(modes), generator=generator, dtype=torch.float64) / (1 + grid.eigenvalues)
            direction[0] = 0
            h = 1e-4
            difference = (equation.rate(modes + h * direction, 0.0) - equation.rate(modes - h * direction, 0.0)) / (
                2 * h
            )
            expected = difference - equation.decay * direction
            found = Linearization(equation, modes).apply(direction)
            assert float((found - expected).abs().max()) < 1e-7 * (1 + float(expected.abs().max()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: growth_rates(hs.SA(beta=1.0), dim=1), "dim is 1, but it must be a whole number >= 2"),
        (lambda: growth_rates(hs.SA(beta=1.0), dim=3, nu=-0.1), "nu is -0.1, but it must be a finite number >= 0"),
        (lambda: growth_rates(hs.SA(beta=1.0, causal=True), dim=3), "field is SA.*no mask, bias or positions"),
        (lambda: critical_nu(torch.zeros_like, dim=3), "field is .*, but it must be SA or USA with a number for beta"),
        (lambda: critical_nu(hs.SA(beta=1.0, value=torch.ones(3, 3)), dim=3), "multiples of I for query_key and value"),
        (lambda: critical_nu(hs.SA(beta=1.0, value=-torch.eye(2)), dim=3), "value has shape"),
        (lambda: critical_nu(hs.USA(beta=2000.0), dim=3), "beta is 2000, but at this beta the energy is not finite"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()  # type: ignore[operator]
