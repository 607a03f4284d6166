"""Stationary densities: fixed points by brute force, Gibbs densities, long evolutions, stability, branches, faults."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, Stratonovich
from helmscope.geometry.harmonics import zonal_quadrature
from helmscope.meanfield import (
    CircleGrid,
    Density,
    Grid,
    SphereGrid,
    StationaryStatus,
    ZonalGrid,
    evolve,
    growth_rates,
    stationary,
    stationary_density,
)

CONVERGED = StationaryStatus.CONVERGED


def partition(grid: Grid, values: torch.Tensor, beta: float) -> torch.Tensor:
    """Z at the points of the grid by summing the kernel over all pairs; on a zonal grid averaged over the parallels."""
    if not isinstance(grid, ZonalGrid):
        return (beta * grid.points @ grid.points.mT).exp() @ (grid.weights * values)
    s, u, w = grid.cosines, *zonal_quadrature(60, dim=grid.dim - 1)
    sine = (1 - s * s).sqrt()
    inner = s[:, None, None] * s[None, :, None] + (sine[:, None] * sine)[..., None] * u
    return ((beta * inner).exp() @ w) @ (grid.weights * values)


@pytest.mark.parametrize("grid", [CircleGrid(degree=40), SphereGrid(degree=22), ZonalGrid(dim=8, degree=48)], ids=repr)
@pytest.mark.parametrize("kind", ["SA", "USA"])
def test_clustered_states_are_powers_of_the_partition_function(grid: Grid, kind: str) -> None:
    beta, c, share = (4.0, 0.7, 0.6) if kind == "SA" else (1.0, 0.7, 0.8)
    nu = share * hs.meanfield.critical_nu(getattr(hs, kind)(beta), dim=grid.dim) * c
    field = getattr(hs, kind)(beta, value=c * torch.eye(grid.dim, dtype=torch.float64))
    found = stationary_density(field, grid, IsotropicNoise(nu))
    assert found.status is CONVERGED
    assert found.residual < 1e-10
    assert found.stable
    assert found.truncation < 1e-9
    assert float(found.mean.norm()) > 0.5
    assert found.rotations == (0 if isinstance(grid, ZonalGrid) else grid.dim - 1)
    z = partition(grid, found.values, beta)
    expected = z ** (c / (nu * beta)) if kind == "SA" else (c * (z - z.max()) / (nu * beta)).exp()
    expected = expected / grid.mean_of(expected)
    assert float((found.values - expected).abs().max() / expected.max()) < 1e-8


def test_zonal_and_full_grids_agree() -> None:
    for plain in (CircleGrid(degree=40), SphereGrid(degree=22)):
        zonal = ZonalGrid(dim=plain.dim, degree=40)
        first, second = (stationary_density(hs.SA(beta=4.0), grid, IsotropicNoise(0.1)) for grid in (plain, zonal))
        assert float(first.mean.norm()) == pytest.approx(float(second.mean.norm()), abs=1e-10)
        assert first.entropy == pytest.approx(second.entropy, abs=1e-10)
        assert first.growth_rate == pytest.approx(second.growth_rate, abs=1e-8)


def test_a_perturbation_decays_at_the_rate_of_the_spectrum() -> None:
    """The evolution as the slow oracle: the state is reached, and the rest vanishes like e^{growth_rate t}."""
    grid, field, noise = CircleGrid(degree=24), hs.SA(beta=4.0), IsotropicNoise(0.15)
    found = stationary_density(field, grid, noise)
    start = Density.von_mises_fisher(grid, kappa=3.0)
    path = evolve(field, start, times=[10.0, 14.0, 16.0], noise=noise, tol=1e-10)
    far, near, nearer = (float((density.modes - found.modes).norm()) for density in path)
    assert nearer < near < far < 0.01
    assert math.log(nearer / near) / 2 == pytest.approx(found.growth_rate, abs=1e-3)


def test_uniform_is_found_and_its_growth_rate_is_the_closed_form() -> None:
    for grid in (CircleGrid(degree=24), SphereGrid(degree=14), ZonalGrid(dim=6, degree=16)):
        found = stationary_density(hs.SA(beta=4.0), grid, IsotropicNoise(0.05), start=Density.uniform(grid))
        expected = float(growth_rates(hs.SA(beta=4.0), dim=grid.dim, nu=0.05, degree=grid.degree)[1:].max())
        assert found.growth_rate == pytest.approx(expected, abs=1e-10)
        assert not found.stable
        assert found.rotations == 0


def test_repulsive_attention_has_the_uniform_state() -> None:
    field = hs.SA(beta=2.0, value=-torch.eye(3))
    start = Density.von_mises_fisher(SphereGrid(degree=12), kappa=0.5)
    found = stationary_density(field, start.grid, IsotropicNoise(0.05), start=start)
    assert found.status is CONVERGED
    assert float((found.values - 1).abs().max()) < 1e-12
    assert found.stable


def test_an_unstable_state_of_two_clusters() -> None:
    """Opposite clusters on the circle: stationary by symmetry, unstable, and left at the rate of the spectrum."""
    grid, field, noise = CircleGrid(degree=32), hs.SA(beta=2.0), IsotropicNoise(0.08)
    start = Density.from_function(grid, lambda x: (1.5 * (2 * x[..., 0] ** 2 - 1)).exp(), normalize=True)
    found = stationary_density(field, grid, noise, start=start)
    assert found.status is CONVERGED
    assert float(found.mean.norm()) < 1e-10
    assert float(found.values.max()) > 1.5
    assert found.growth_rate > 0
    assert found.rotations == 1
    modes = found.modes.clone()
    modes[2] += 1e-6
    times = [0.25 * k for k in range(61)]
    path = evolve(field, Density(grid, modes), times=times, noise=noise)
    first, second = (float(path[k].mean.norm()) for k in (-9, -1))
    assert math.log(second / first) / 2 == pytest.approx(found.growth_rate, rel=1e-3)


def gibbs(grid: Grid, nu: float) -> Density:
    return Density.from_function(grid, lambda x: (potential(x) / nu).exp(), normalize=True)


def potential(x: torch.Tensor) -> torch.Tensor:
    return x[..., 0] + 0.5 * x[..., 0] * x[..., 1] - 0.3 * x[..., -1] ** 2


def force(x: torch.Tensor) -> torch.Tensor:
    grad = torch.zeros_like(x)
    grad[..., 0] += 1 + 0.5 * x[..., 1]
    grad[..., 1] += 0.5 * x[..., 0]
    grad[..., -1] += -0.6 * x[..., -1]
    return grad


@pytest.mark.parametrize("grid", [CircleGrid(degree=32), SphereGrid(degree=20)], ids=repr)
def test_forces_with_a_potential_have_gibbs_densities(grid: Grid) -> None:
    found = stationary_density(force, grid, IsotropicNoise(0.5))
    assert found.status is CONVERGED
    assert float((found.values - gibbs(grid, 0.5).values).abs().max()) < 1e-9
    assert found.stable
    assert found.rotations == 0


def test_known_means() -> None:
    right = lambda x: torch.eye(2)[0].to(x).expand_as(x)  # noqa: E731
    found = stationary_density(right, CircleGrid(degree=32), IsotropicNoise(0.5))
    assert float(found.mean[0]) == pytest.approx(0.6977746579640083, abs=1e-14)
    noise = MatrixNoise(torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64)), process=Stratonovich())
    found = stationary_density(None, CircleGrid(degree=64), noise)
    twice = 2 * found.grid.points[:, 0] ** 2 - 1
    assert float(found.grid.mean_of(found.values * twice)) == pytest.approx(0.16912003679316695, abs=1e-14)


def test_a_swirl_on_the_sphere_against_a_long_evolution() -> None:
    grid, noise = SphereGrid(degree=16), IsotropicNoise(0.5)
    swirl = lambda x: force(x) + torch.stack([-x[..., 1], x[..., 0] + x[..., 2], -x[..., 0]], -1)  # noqa: E731
    found = stationary_density(swirl, grid, noise)
    late = evolve(swirl, Density.uniform(grid), times=[12.0], noise=noise, tol=1e-7)[0]
    assert float((found.modes - late.modes).abs().max()) < 1e-6
    assert float((found.values - gibbs(grid, 0.5).values).abs().max()) > 0.05


def test_attention_with_other_matrices_stays_where_it_is() -> None:
    grid, noise = CircleGrid(degree=12), IsotropicNoise(0.2)
    field = hs.SA(beta=2.0, query_key=torch.diag(torch.tensor([1.0, 1.5], dtype=torch.float64)))
    start = Density.von_mises_fisher(grid, kappa=3.0, center=torch.tensor([0.2, 1.0]))
    found = stationary_density(field, grid, noise, start=start)
    assert found.status is CONVERGED
    assert found.stable
    path = evolve(field, found, times=[2.0], noise=noise)
    assert float((path[0].modes - found.modes).norm()) < 1e-9
    assert float(found.mean[1]) > 0.5


@pytest.mark.parametrize("kind", ["attention", "force"])
def test_krylov_and_dense_methods_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = CircleGrid(degree=30)
    field = hs.SA(beta=4.0) if kind == "attention" else force
    dense = stationary_density(field, grid, IsotropicNoise(0.1))
    monkeypatch.setattr(stationary, "DENSE", 16)  # too few for this density, so that the estimate must be refined
    krylov = stationary_density(field, grid, IsotropicNoise(0.1))
    assert krylov.status is CONVERGED
    assert krylov.rotations == dense.rotations
    assert float((krylov.values - dense.values).abs().max()) < 1e-9
    assert krylov.growth_rate == pytest.approx(dense.growth_rate, abs=1e-7)


def test_status_names_what_went_wrong() -> None:
    few = stationary_density(hs.SA(beta=4.0), CircleGrid(degree=16), IsotropicNoise(0.004))
    assert few.status is StationaryStatus.UNRESOLVED
    start = Density.von_mises_fisher(CircleGrid(degree=32), kappa=1.0)
    hasty = stationary_density(hs.SA(beta=4.0), start.grid, IsotropicNoise(0.1), start=start, max_iterations=1)
    assert hasty.status is StationaryStatus.NOT_CONVERGED
    assert hasty.residual > 1e-6
    assert repr(hasty).endswith("Newton's method did not converge>")


CIRCLE = CircleGrid(degree=16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((hs.SA(beta=1.0), CIRCLE, None), "noise is None, but a stationary density needs noise with nu > 0"),
        ((hs.SA(beta=1.0), CIRCLE, IsotropicNoise(0.0)), "a stationary density needs noise with nu > 0"),
        ((hs.SA(beta=1.0), 3, IsotropicNoise(0.1)), "grid is 3, but it must be a grid"),
        ((lambda x, t: t * x, CIRCLE, IsotropicNoise(0.1)), "depends on time, but then no density is stationary"),
        (
            (hs.SA(beta=1.0), CIRCLE, IsotropicNoise(0.1), Density.uniform(CircleGrid(degree=8))),
            "start is .*CircleGrid",
        ),
        ((hs.SA(beta=90.0), CIRCLE, IsotropicNoise(0.1)), "with beta=90 needs a"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        stationary_density(*arguments[:3], start=arguments[3] if len(arguments) > 3 else None)  # type: ignore[arg-type]
