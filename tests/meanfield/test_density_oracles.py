"""Independent slow roads to the same densities: finite differences, loops over quadrature points, particles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.special import ive, sph_harm_y

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, Stratonovich
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield.drift import AttentionDrift, CloudDrift, drift_of
from helmscope.meanfield.forward_equation import ForwardEquation

F64 = torch.float64
QUERY_KEY = torch.tensor([[1.0, 0.3], [-0.2, 0.7]], dtype=F64)
VALUE = torch.tensor([[0.8, 0.1], [0.4, 1.1]], dtype=F64)


# Finite differences on the circle -------------------------------------------------------------------------------------


def finite_differences(points: int, start, velocity, diffusion, *, time: float) -> tuple[np.ndarray, np.ndarray]:
    """rho_t = -(rho b)' + (a rho')' by differences of fluxes at the midpoints, second order, and SciPy's stiff solver.

    ``velocity(t, mid, rho)`` is b at the midpoints, ``diffusion(mid)`` is a there.
    """
    h = 2 * math.pi / points
    t, mid = h * np.arange(points), h * (np.arange(points) + 0.5)

    def rate(_: float, rho: np.ndarray) -> np.ndarray:
        after = np.roll(rho, -1)
        flux = velocity(t, mid, rho) * (rho + after) / 2 - diffusion(mid) * (after - rho) / h
        return -(flux - np.roll(flux, 1)) / h

    result = solve_ivp(rate, (0, time), start(t), method="LSODA", rtol=1e-10, atol=1e-12)
    return t, result.y[:, -1]


def extrapolated(*args, time: float) -> tuple[np.ndarray, np.ndarray]:
    """Two grids, combined to fourth order."""
    t, coarse = finite_differences(80, *args, time=time)
    _, fine = finite_differences(160, *args, time=time)
    return t, (4 * fine[::2] - coarse) / 3


def attention_velocity(beta: float, query_key: np.ndarray, value: np.ndarray, *, normalized: bool):
    """b at the midpoints by a plain sum over all points, with weight h rho each."""

    def velocity(t: np.ndarray, mid: np.ndarray, rho: np.ndarray) -> np.ndarray:
        b = np.empty_like(mid)
        y = np.stack([np.cos(t), np.sin(t)], -1)
        for i, angle in enumerate(mid):
            x = np.array([math.cos(angle), math.sin(angle)])
            kernel = np.exp(beta * (y @ (query_key.T @ x)))
            mean = (kernel * rho) @ y / len(t) * 2 * math.pi
            total = (kernel * rho).sum() / len(t) * 2 * math.pi if normalized else 1.0
            b[i] = (value @ mean) @ np.array([-math.sin(angle), math.cos(angle)]) / total
        return b

    return velocity


def two_bumps(t: np.ndarray) -> np.ndarray:
    return (1 + 0.5 * np.sin(t) + 0.3 * np.cos(2 * t)) / (2 * math.pi)


def two_bumps_density(degree: int) -> Density:
    return Density.from_function(
        CircleGrid(degree), lambda x: (1 + 0.5 * x[..., 1] + 0.3 * (2 * x[..., 0] ** 2 - 1)) / (2 * math.pi)
    )


@pytest.mark.parametrize("field", [hs.SA, hs.USA])
@pytest.mark.parametrize("matrices", [False, True], ids=["V = I", "matrices"])
def test_noisy_attention_by_finite_differences(field, matrices: bool) -> None:
    """To 1e-5, the error of the differences: SA and USA with nu = 0.1, with Q^T K and V or without."""
    b, v = (QUERY_KEY, VALUE) if matrices else (torch.eye(2, dtype=F64),) * 2
    velocity = attention_velocity(1.5, b.numpy(), v.numpy(), normalized=field is hs.SA)
    t, rho = extrapolated(two_bumps, velocity, lambda mid: 0.1, time=0.4)
    given = field(beta=1.5, query_key=b, value=v) if matrices else field(beta=1.5)
    path = evolve(given, two_bumps_density(24), times=[0.4], noise=IsotropicNoise(0.1))
    computed = path[0](torch.from_numpy(np.stack([np.cos(t), np.sin(t)], -1)))
    assert np.abs(computed.numpy() - rho).max() < 1e-5
    assert np.abs(rho - two_bumps(t)).max() > 0.01


def test_anisotropic_noise_by_finite_differences() -> None:
    """Stratonovich with M = diag(2, 1/2) on the circle: Sigma = 2 sin^2 + cos^2 / 2, beta = Sigma' / 2, by hand."""
    sigma = lambda t: 2 * np.sin(t) ** 2 + 0.5 * np.cos(t) ** 2  # noqa: E731
    slope = lambda t: 1.5 * np.sin(2 * t)  # noqa: E731
    velocity = lambda t, mid, rho: np.cos(mid) - slope(mid) / 2  # noqa: E731  # b - Sigma' = Sigma'/2 - Sigma'
    t, rho = extrapolated(two_bumps, velocity, sigma, time=0.3)
    noise = MatrixNoise(torch.diag(torch.tensor([2.0, 0.5], dtype=F64)), process=Stratonovich())
    force = lambda x: torch.tensor([0.0, 1.0], dtype=F64).expand_as(x)  # noqa: E731  # <(0, 1), tangent> = cos t
    path = evolve(force, two_bumps_density(24), times=[0.3], noise=noise)
    computed = path[0](torch.from_numpy(np.stack([np.cos(t), np.sin(t)], -1)))
    assert np.abs(computed.numpy() - rho).max() < 3e-6


# Loops on S^2 ---------------------------------------------------------------------------------------------------------


def naive_rate(modes: np.ndarray, degree: int, beta: float, nu: float, *, normalized: bool) -> np.ndarray:
    """int rho <b, grad Y> - nu int <grad rho, grad Y> by SciPy's harmonics on a quadrature of its own, in loops."""
    z, wz = np.polynomial.legendre.leggauss(16)
    theta, phi = np.meshgrid(np.arccos(z), 2 * math.pi * (np.arange(33) + 0.5) / 33, indexing="ij")
    theta, phi, weights = theta.ravel(), phi.ravel(), np.repeat(wz / 2 / 33, 33)
    harmonics, slopes = [], []  # values at all nodes, and components along theta and phi
    for k in range(degree + 1):
        for m in range(-k, k + 1):
            value, jacobian = sph_harm_y(k, abs(m), theta, phi, diff_n=1)
            scale = (-1) ** m * math.sqrt(4 * math.pi) * (math.sqrt(2) if m else 1)
            part = np.imag if m < 0 else np.real
            harmonics.append(scale * part(value))
            slopes.append(scale * part(np.stack([jacobian[..., 0], jacobian[..., 1] / np.sin(theta)], -1)))
    x = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], -1)
    density = np.array(harmonics).T @ modes
    mass = weights * density
    rate = np.zeros_like(modes)
    for i, here in enumerate(x):
        kernel = np.exp(beta * (x @ here)) * mass
        pull = kernel @ x / (kernel.sum() if normalized else 1.0)
        t, p = theta[i], phi[i]
        south = np.array([math.cos(t) * math.cos(p), math.cos(t) * math.sin(p), -math.sin(t)])
        east = np.array([-math.sin(p), math.cos(p), 0.0])
        velocity = np.array([pull @ south, pull @ east])
        slope = np.array([each[i] for each in slopes])
        rate += weights[i] * (slope @ (density[i] * velocity - nu * slope.T @ modes))
    return rate


@pytest.mark.parametrize("field", [hs.SA, hs.USA])
def test_right_hand_side_on_the_sphere_by_loops(field) -> None:
    degree = 9
    grid = SphereGrid(degree)
    modes = (grid.degrees == 0).double()
    modes[1:] = 0.3 * torch.cos(torch.arange(1, len(modes), dtype=F64)) * torch.exp(-grid.degrees[1:].double())
    beta = 0.9
    equation = ForwardEquation.of(field(beta=beta), grid, IsotropicNoise(0.2))
    computed = equation.rate(modes, 0.0) - equation.decay * modes
    exact = naive_rate(modes.numpy(), degree, beta, 0.2, normalized=field is hs.SA)
    # degree 9 leaves out 1e-8 of the kernel, and aliases 1 / Z as much
    assert np.abs(computed.numpy() - exact).max() < 1e-9
    assert np.abs(exact).max() > 0.03


def test_the_series_and_the_cloud_have_the_same_drift() -> None:
    """SA and USA with V = I, by convolution and as a weighted cloud of tokens."""
    for grid in (CircleGrid(20), SphereGrid(16)):
        modes = Density.von_mises_fisher(grid, kappa=1.5).modes
        flipped = hs.USA(beta=1.0, query_key=-torch.eye(grid.dim, dtype=F64))  # the kernel e^{-<x, y>}
        for field in (hs.SA(beta=2.0), hs.SA(beta=0.0), flipped):
            series, cloud = drift_of(field, grid), CloudDrift(grid, field)
            assert isinstance(series, AttentionDrift)
            assert torch.allclose(series.components(modes, 0.0), cloud.components(modes, 0.0), rtol=0, atol=1e-10)


# Particles without noise ----------------------------------------------------------------------------------------------


def von_mises_quantiles(n: int) -> np.ndarray:
    """Quantiles (i + 1/2)/n of the density ~ e^{cos t} on (-pi, pi)."""
    edges = np.linspace(-math.pi, math.pi, 200_001)
    masses = np.exp(np.cos((edges[1:] + edges[:-1]) / 2))
    return np.interp((np.arange(n) + 0.5) / n, np.concatenate([[0.0], np.cumsum(masses) / masses.sum()]), edges)


@pytest.mark.parametrize("field", [hs.SA(beta=2.0), hs.USA(beta=1.0), hs.SA(beta=1.0, value=-torch.eye(2))])
def test_continuity_equation_against_particles_at_quantiles(field) -> None:
    """2,000 tokens at the quantiles of a von Mises law, until t = 1/2: E e^{ikt}, k = 1, 2, 3, to 1e-6."""
    angles = torch.from_numpy(von_mises_quantiles(2000))
    x0 = torch.stack([angles.cos(), angles.sin()], -1)
    final = hs.integrate(field, x0, [0, 0.5], stepper=hs.RK4(h=0.1)).states[-1]
    path = evolve(field, Density.von_mises_fisher(CircleGrid(48), kappa=1.0), times=[0.5])
    assert path.outcome.ok
    t = torch.atan2(final[:, 1], final[:, 0])
    for k in (1, 2, 3):
        assert abs(float(torch.cos(k * t).mean()) - float(path.modes[0, 2 * k - 1]) / math.sqrt(2)) < 1e-6


@pytest.mark.parametrize("field", [hs.SA(beta=2.0), hs.USA(beta=1.0)])
def test_continuity_equation_against_particles_on_the_sphere(field) -> None:
    """4,000 tokens on a spiral with the quantiles of z for kappa = 1, until t = 1/2: moments of z to 2e-4."""
    n = 4000
    u = (torch.arange(n, dtype=F64) + 0.5) / n
    z = torch.log(math.exp(-1) + u * (math.exp(1) - math.exp(-1)))
    phi = math.pi * (3 - math.sqrt(5)) * torch.arange(n, dtype=F64)
    sine = (1 - z * z).sqrt()
    x0 = torch.stack([z, sine * phi.cos(), sine * phi.sin()], -1)
    final = hs.integrate(field, x0, [0, 0.5], stepper=hs.RK4(h=0.1)).states[-1]
    path = evolve(field, Density.von_mises_fisher(SphereGrid(28), kappa=1.0), times=[0.5])
    assert path.outcome.ok
    grid, values = path.grid, path[0].values
    for power in (1, 2, 3):
        exact = float(grid.mean_of(values * grid.points[:, 0] ** power))
        assert abs(float((final[:, 0] ** power).mean()) - exact) < 2e-4


# Particles with noise -------------------------------------------------------------------------------------------------

SYSTEMS = 20


def toward_first_axis(x: torch.Tensor) -> torch.Tensor:
    return 3 * torch.eye(x.shape[-1], dtype=x.dtype)[0].expand_as(x)


@pytest.mark.parametrize(
    ("field", "grid"),
    [
        (hs.SA(beta=2.0), CircleGrid(40)),
        (hs.SA(beta=2.0), SphereGrid(24)),
        (toward_first_axis, ZonalGrid(dim=8, degree=24)),
    ],
    ids=["SA on S^1", "SA on S^2", "force, d=8"],
)
def test_noisy_particles_follow_the_density(field, grid) -> None:
    """Three moments of s = x_1 of 10,000 tokens at t = 0.1 over 20 systems, within 4 standard errors of their mean.

    Steps of 0.01: those of 0.02 shift the moments on the circle by about one standard error. SA in dimension 8, which
    sums pair by pair, is below.
    """
    noise = IsotropicNoise(0.5)
    x0 = hs.VonMisesFisher(n=10_000, dim=grid.dim, kappa=2.0).sample(batch=SYSTEMS, seed=1)
    stepper = hs.solve.StochasticHeun(h=0.01)
    final = hs.integrate(field, x0, [0, 0.1], stepper=stepper, noise=noise, seed=2).states[-1]
    path = evolve(field, Density.von_mises_fisher(grid, kappa=2.0), times=[0.1], noise=noise)
    values, s = path[0].values, grid.points[:, 0]
    before = Density.von_mises_fisher(grid, kappa=2.0)
    for power in (1, 2, 3):
        samples = (final[..., 0] ** power).mean(-1)
        error = float(samples.std() / math.sqrt(SYSTEMS))
        exact = float(grid.mean_of(values * s**power))
        assert abs(float(samples.mean()) - exact) < 4 * error
    moved = float(path[0].mean[0] - before.mean[0])
    assert abs(moved) > 10 * float(final[..., 0].mean(-1).std() / math.sqrt(SYSTEMS))


def moments_in_dimension_8(n: int, systems: int, *, h: float, seed: int) -> torch.Tensor:
    """(system, power): the first three moments of x_1 at t = 0.1, under SA with beta = 4 and nu = 0.05, in float32."""
    x0 = hs.VonMisesFisher(n=n, dim=8, kappa=4.0).sample(batch=systems, seed=seed).float()
    options = {"stepper": hs.solve.StochasticHeun(h=h), "noise": IsotropicNoise(0.05), "seed": seed + 1000}
    s = hs.integrate(hs.SA(beta=4.0), x0, [0, 0.1], **options).states[-1][..., 0].double()
    return torch.stack([(s**power).mean(-1) for power in (1, 2, 3)], -1)


def moments_of_the_density(field: object, noise: IsotropicNoise | None) -> torch.Tensor:
    grid = ZonalGrid(dim=8, degree=24)
    values = evolve(field, Density.von_mises_fisher(grid, kappa=4.0), times=[0.1], noise=noise)[0].values
    return torch.stack([grid.mean_of(values * grid.points[:, 0] ** power) for power in (1, 2, 3)])


def test_ten_thousand_noisy_tokens_in_dimension_8_follow_the_density() -> None:
    """Three moments over 20 systems, within 4 standard errors; attention and noise each move the mean by more than 15.

    One step of 0.1, whose error is far below that, as the slow test shows. 8 seconds.
    """
    exact = moments_of_the_density(hs.SA(beta=4.0), IsotropicNoise(0.05))
    samples = moments_in_dimension_8(10_000, SYSTEMS, h=0.1, seed=1)
    error = samples.std(0) / math.sqrt(SYSTEMS)
    assert bool(((samples.mean(0) - exact).abs() < 4 * error).all())
    assert bool((error > STANDARD_ERROR).all())
    for field, noise in ((None, IsotropicNoise(0.05)), (hs.SA(beta=4.0), None)):
        assert float((moments_of_the_density(field, noise) - exact)[0].abs()) > 15 * float(error[0])


STANDARD_ERROR = 4e-4  # below those of the moments above: 5e-4 to 8e-4


@pytest.mark.slow
def test_errors_of_the_particles_in_dimension_8_are_below_their_standard_errors() -> None:
    """Those of the step, of order h, are at most the difference between steps of 0.1 and 0.05, and those of finite n,
    of order 1 / n, are a hundredth of those of 100 tokens.
    """
    exact = moments_of_the_density(hs.SA(beta=4.0), IsotropicNoise(0.05))
    coarse, fine = (
        torch.cat([moments_in_dimension_8(100, 2000, h=h, seed=seed) for seed in range(2, 7)]).mean(0)
        for h in (0.1, 0.05)
    )
    assert bool(((coarse - fine).abs() < STANDARD_ERROR).all())
    assert bool(((fine - exact).abs() / 100 < 0.1 * STANDARD_ERROR).all())


def test_the_start_of_the_particles_is_the_density() -> None:
    assert abs(float(Density.von_mises_fisher(ZonalGrid(8, 24), kappa=2.0).mean[0]) - ive(4, 2) / ive(3, 2)) < 1e-14
