"""Free energy: known digits, derivatives along evolutions, swirls that raise it, the printed sign, energies, faults."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import Tanh
from helmscope.fields.noise import IsotropicNoise, MatrixNoise
from helmscope.meanfield import (
    CircleGrid,
    Density,
    Grid,
    SphereGrid,
    ZonalGrid,
    density_interaction_energy,
    evolve,
    free_energy,
    free_energy_as_printed,
    free_energy_rate,
)
from helmscope.theory import max_energy, min_energy

CIRCLE = CircleGrid(degree=32)
START = Density.from_function(CIRCLE, lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
HALF = IsotropicNoise(0.5)


def height(x: torch.Tensor) -> torch.Tensor:
    return x[..., 0]


def right(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[-1])[0].to(x).expand_as(x)


def test_known_curves() -> None:
    path = evolve(right, START, times=[0, 0.25, 0.5, 1, 2, 3], noise=HALF, tol=1e-11)
    known = [-0.8866194672, -1.0042195061, -1.0938903150, -1.2099136761, -1.3017633086, -1.3244103308]
    found = [free_energy(density, noise=HALF, potential=height) for density in path]
    assert found == pytest.approx(known, abs=6e-11)
    printed = [free_energy_as_printed(density, noise=HALF, potential=height) for density in path]
    assert printed == sorted(printed)
    assert (printed[0], printed[-1]) == pytest.approx((-0.88662, -0.05563), abs=5e-6)
    assert free_energy_rate(START, noise=HALF, potential=height).total == pytest.approx(-0.5334936490538903, abs=1e-15)


def derivative(flow: object, start: Density, noise: IsotropicNoise, **options: object) -> float:
    """dF/dt from five values along the evolution."""
    h = 0.004
    path = evolve(flow, start, times=[0.0, h, 2 * h, 3 * h, 4 * h], noise=noise, tol=1e-12)
    values = [free_energy(density, noise=noise, **options) for density in path]  # type: ignore[arg-type]
    return sum(c * v for c, v in zip((-25, 48, -36, 16, -3), values, strict=True)) / (12 * h)


def swirl(x: torch.Tensor) -> torch.Tensor:
    """No rotation: its divergence on the sphere is not 0."""
    return torch.stack([-2 * x[..., 1] * x[..., 0], x[..., 0], 0.5 * x[..., 1]], -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("grid", [CIRCLE, SphereGrid(degree=16)], ids=repr)
def test_the_rate_with_a_swirl_is_the_derivative(grid: Grid) -> None:
    field = lambda x: right(x) + swirl(x)  # noqa: E731
    center = torch.tensor([0.3, 1.0, -0.5])[: grid.dim]
    start = Density.von_mises_fisher(grid, kappa=1.5, center=center)
    rate = free_energy_rate(start, noise=HALF, potential=height, field=field)
    assert rate.relaxation < 0
    assert abs(rate.swirl_work) > 0.01
    assert abs(rate.swirl_expansion) > 0.01
    assert rate.total == pytest.approx(derivative(field, start, HALF, potential=height), abs=2e-6)


def test_a_swirl_can_raise_the_free_energy() -> None:
    """From the Gibbs density: the relaxation is 0, and the swirl drives the density away from the minimum of F."""
    gibbs = Density.von_mises_fisher(SphereGrid(degree=20), kappa=2.0)
    field = lambda x: right(x) + 3 * swirl(x)  # noqa: E731
    first = free_energy(gibbs, noise=HALF, potential=height)
    assert free_energy_rate(gibbs, noise=HALF, potential=height).total == pytest.approx(0, abs=1e-12)
    assert free_energy_rate(gibbs, noise=HALF, potential=height, field=field).relaxation == pytest.approx(0, abs=1e-12)
    later = evolve(field, gibbs, times=[0.5], noise=HALF, tol=1e-6)[0]
    assert free_energy(later, noise=HALF, potential=height) > first + 0.05


def test_a_rotation_about_the_axis_changes_nothing() -> None:
    gibbs = Density.von_mises_fisher(SphereGrid(degree=16), kappa=2.0)
    turning = lambda x: right(x) + torch.stack([0 * x[..., 0], -x[..., 2], x[..., 1]], -1)  # noqa: E731
    rate = free_energy_rate(gibbs, noise=HALF, potential=height, field=turning)
    assert abs(rate.total) < 1e-12


def test_a_mlp_with_its_helmholtz_split() -> None:
    generator = torch.Generator().manual_seed(0)
    w_in, w_out = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 3), (3, 6)))
    mlp = hs.MLP(w_in=w_in, w_out=w_out / 2, activation=Tanh())
    start = Density.von_mises_fisher(SphereGrid(degree=20), kappa=1.0)
    split = hs.fields.helmholtz(mlp)
    rate = free_energy_rate(start, noise=HALF, potential=split, field=mlp)
    assert rate.total == pytest.approx(derivative(mlp, start, HALF, potential=split), abs=1e-4 * abs(rate.total))


@pytest.mark.parametrize("grid", [CIRCLE, SphereGrid(degree=20), ZonalGrid(dim=8, degree=28)], ids=repr)
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_usa_descends_its_free_energy(grid: Grid, beta: float) -> None:
    field = hs.USA(beta=beta, value=-0.5 * torch.eye(grid.dim)) if beta else hs.USA(beta=0.0)
    start = Density.von_mises_fisher(grid, kappa=1.0)
    noise = IsotropicNoise(0.1)
    rate = free_energy_rate(start, noise=noise, field=field)
    assert rate.total == rate.relaxation < 0
    assert rate.total == pytest.approx(derivative(field, start, noise, field=field), rel=1e-5)


def test_energies_of_uniform_densities_and_of_clouds() -> None:
    for dim in (2, 3, 512):
        for beta in (1.0, 4.0, 9.0):
            uniform = Density.uniform(ZonalGrid(dim=dim, degree=40))
            assert density_interaction_energy(uniform, beta=beta) == pytest.approx(
                min_energy(beta=beta, dim=dim), rel=1e-14
            )
    density = Density.von_mises_fisher(SphereGrid(degree=24), kappa=3.0)
    points, weights = density.cloud()
    pairs = (4.0 * points @ points.mT).exp()
    assert density_interaction_energy(density, beta=4.0) == pytest.approx(
        float(weights @ pairs @ weights) / 8, rel=1e-10
    )
    sharp = Density.von_mises_fisher(ZonalGrid(dim=3, degree=120), kappa=300.0)
    assert 0.95 < density_interaction_energy(sharp, beta=4.0) / max_energy(beta=4.0) < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: free_energy(START, noise=HALF, field=hs.SA(beta=1.0)), "SA with noise has no free energy in the flat"),
        (
            lambda: free_energy_rate(START, noise=HALF, field=hs.SA(beta=1.0)),
            "SA with noise has no free energy in the flat",
        ),
        (lambda: free_energy(START, noise=HALF), "by potential= or by field=USA.*, but neither is given"),
        (lambda: free_energy(START, noise=HALF, field=hs.USA(beta=1.0), potential=height), "but both are given"),
        (lambda: free_energy(START, noise=HALF, field=right), "field is .*, but it must be USA: a force needs its pot"),
        (lambda: free_energy_rate(START, noise=HALF, field=hs.USA(beta=1.0), potential=height), "must be a force"),
        (lambda: free_energy(START, noise=MatrixNoise(torch.eye(2)), potential=height), "the same noise everywhere"),
        (lambda: free_energy("rho", noise=HALF, potential=height), "density is 'rho', but it must be a Density"),
        (lambda: free_energy(START, noise=HALF, potential=3), "potential is 3, but it must be a Potential"),
        (lambda: free_energy(START, noise=HALF, potential=lambda x: x), "potential returns .* one number for each"),
        (lambda: density_interaction_energy(START, beta=0.0), "beta is 0, but the interaction energy has the factor"),
        (lambda: density_interaction_energy(START, beta=90.0), "with beta=90 needs a"),
        (
            lambda: free_energy(Density.uniform(ZonalGrid(dim=3, degree=8)), noise=HALF, potential=lambda x: x[..., 1]),
            "the gradient of potential does not point along the meridians",
        ),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()  # type: ignore[operator]


def test_noise_is_a_number_or_an_object() -> None:
    for function in (free_energy, free_energy_as_printed, lambda *a, **k: free_energy_rate(*a, **k).total):
        assert function(START, noise=0.5, potential=height) == function(START, noise=HALF, potential=height)
    with pytest.raises(hs.HelmscopeError, match=r"noise is -0\.5, but it must be a finite number >= 0"):
        free_energy(START, noise=-0.5, potential=height)
