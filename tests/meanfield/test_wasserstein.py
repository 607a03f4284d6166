"""Otto's geometry: both examples of the lecture, the definition of the gradient, the continuity equation, geodesics."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import brentq

from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import (
    CircleGrid,
    Density,
    SphereGrid,
    ZonalGrid,
    benamou_brenier_energy,
    continuity_potential,
    descent_velocity,
    descent_velocity_as_printed,
    evolve,
    functional_rate,
    internal_energy_gradient,
    wasserstein_gradient,
    wasserstein_inner_product,
)
from helmscope.meanfield import wasserstein as module
from helmscope.meanfield.grid import Grid
from helmscope.types import HelmscopeError

GRIDS = {"circle": CircleGrid(degree=24), "sphere": SphereGrid(degree=16), "zonal": ZonalGrid(dim=6, degree=20)}


def smooth_density(grid: Grid) -> Density:
    return Density.from_function(grid, lambda x: (0.8 * x[:, 0] + 0.3 * x[:, 0] ** 2).exp(), normalize=True)


def skewed_density(grid: Grid) -> Density:
    if isinstance(grid, ZonalGrid):
        return smooth_density(grid)
    return Density.from_function(grid, lambda x: (0.8 * x[:, 0] - 0.5 * x[:, 1] * x[:, 0]).exp(), normalize=True)


def total(density: Density, values: torch.Tensor) -> float:
    """int f dx with respect to surface area, of values at the points."""
    return float(density.grid.mean_of(values)) * math.exp(density.grid.log_area)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_internal_energies(grid: Grid) -> None:
    """f = int u(p): -div(p u'' grad p), which is -Lap p for u = p log p and -Lap p^2 for u = p^2."""
    density = skewed_density(grid)
    p = density.values * math.exp(-grid.log_area)
    heat = internal_energy_gradient(density, lambda p: p * p.log())
    assert float((heat - grid.eigenvalues * density.modes).abs().max()) < 1e-11
    porous = internal_energy_gradient(density, lambda p: p**2)
    squared = grid.eigenvalues * grid.analyze(p**2) * math.exp(grid.log_area)
    assert float((porous - squared).abs().max()) < 1e-9
    for u, slope in ((lambda p: p * p.log(), 1 + p.log()), (lambda p: p**2, 2 * p), (torch.exp, p.exp())):
        general = wasserstein_gradient(density, slope)
        assert float((general - internal_energy_gradient(density, u)).abs().max()) < 1e-8
    assert float(internal_energy_gradient(density, lambda p: 3 * p).abs().max()) == 0  # mass does not change


def test_potential_energies() -> None:
    """f = int u p: -div(p grad u), in closed form on the circle and on S^2."""
    circle = GRIDS["circle"]
    t = 2 * math.pi * torch.arange(len(circle.points), dtype=torch.float64) / len(circle.points)
    density = Density.from_function(circle, lambda x: (1 + 0.5 * x[:, 1]) / (2 * math.pi))
    gradient = circle.synthesize(wasserstein_gradient(density, lambda x: x[:, 0] * x[:, 1]))
    expected = -(0.5 * t.cos() * (2 * t).cos() - 2 * (1 + 0.5 * t.sin()) * (2 * t).sin())
    assert float((gradient - expected).abs().max()) < 1e-12
    sphere = GRIDS["sphere"]
    z = sphere.points[:, 2]
    density = Density.from_function(sphere, lambda x: (1 + 0.5 * x[:, 2]) / (4 * math.pi))
    gradient = sphere.synthesize(wasserstein_gradient(density, lambda x: x[:, 2]))
    assert float((gradient + 0.5 * (1 - z**2) - 2 * z * (1 + 0.5 * z)).abs().max()) < 1e-11


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_the_gradient_represents_the_derivative(grid: Grid) -> None:
    """d/de f(p + e h) = <nabla_W2 f, h>_p, with the derivative by central differences."""
    density = skewed_density(grid)
    area = math.exp(grid.log_area)
    h = wasserstein_gradient(density, lambda x: torch.sin(2 * x[:, 0]))
    assert float(h[0]) == 0
    u = lambda x: x[:, 0] ** 2 + 0.3 * x[:, 0]  # noqa: E731
    functionals = {
        "internal": (lambda p: total(density, (p / area) ** 2), 2 * density.values / area),
        "potential": (lambda p: float(grid.mean_of(u(grid.points) * p)), u(grid.points)),
    }
    step = 1e-4
    for f, variation in functionals.values():
        change = step * grid.synthesize(h)
        slope = (f(density.values + change) - f(density.values - change)) / (2 * step)
        gradient = wasserstein_gradient(density, variation)
        assert abs(wasserstein_inner_product(density, gradient, h) - slope) < 1e-9 * max(1, abs(slope))
        assert abs(wasserstein_inner_product(density, h, gradient) - slope) < 1e-9 * max(1, abs(slope))
    printed = float(grid.mean_of(u(density.values[:, None]) * grid.synthesize(h)))  # nabla_L2 f = u(p), as printed
    assert abs(printed - slope) > 1e-2


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_descent_descends_and_the_printed_sign_ascends(grid: Grid) -> None:
    density = smooth_density(grid)
    u = lambda x: torch.cos(x[:, 0]) + x[:, 0]  # noqa: E731
    right, printed = descent_velocity(density, u), descent_velocity_as_printed(density, u)
    rate = functional_rate(density, u, right)
    assert rate < -0.01
    assert functional_rate(density, u, printed) == -rate
    transport = -grid.divergence(density.values[:, None] * right)  # the continuity equation
    gradient = wasserstein_gradient(density, u)
    assert float((transport + gradient).abs().max()) < 1e-13
    assert abs(rate + wasserstein_inner_product(density, gradient, gradient)) < 1e-8


def test_the_printed_sign_on_a_gaussian() -> None:
    """f = int x^2 / 2 on N(0, 1), where df/dp = x^2 / 2: x' = +x raises f at the rate +1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    x, w = torch.from_numpy(nodes).requires_grad_(), torch.from_numpy(weights / weights.sum())
    (gradient,) = torch.autograd.grad((x**2 / 2).sum(), x)
    x = x.detach()
    for sign in (1, -1):
        assert abs(float(w @ (gradient * sign * x)) - sign) < 1e-14
        h = 1e-5
        f = [float(w @ ((1 + s * h * sign) * x) ** 2) / 2 for s in (1, -1)]
        assert abs((f[0] - f[1]) / (2 * h) - sign) < 1e-10


def test_continuity_potential_on_the_circle() -> None:
    """rho phi' = c - H with H' = h, and c such that int phi' = 0."""
    grid = CircleGrid(degree=40)
    density = skewed_density(grid)
    t = 2 * math.pi * torch.arange(len(grid.points), dtype=torch.float64) / len(grid.points)
    h, antiderivative = (2 * t).cos() + 0.5 * t.sin(), (2 * t).sin() / 2 - 0.5 * t.cos()
    phi = continuity_potential(density, grid.analyze(h))
    rho = density.values
    constant = grid.mean_of(antiderivative / rho) / grid.mean_of(1 / rho)
    slope = (constant - antiderivative) / rho
    assert float((grid.gradient(phi)[:, 0] - slope).abs().max()) < 1e-10
    energy = wasserstein_inner_product(density, grid.analyze(h), grid.analyze(h))
    assert abs(energy - float(grid.mean_of(slope**2 * rho))) < 1e-12


def test_finite_differences_agree() -> None:
    n = 1200
    t = 2 * np.pi * np.arange(n) / n
    rho = lambda t: np.exp(0.8 * np.cos(t) - 0.5 * np.sin(t) * np.cos(t))  # noqa: E731
    scale = rho(t).mean()
    flux = rho(t + np.pi / n) / scale * (n / (2 * np.pi)) ** 2
    matrix = np.diag(flux + np.roll(flux, 1))
    matrix -= np.roll(np.diag(flux), 1, 1) + np.roll(np.diag(flux), 1, 1).T
    phi = np.linalg.lstsq(matrix, np.cos(2 * t), rcond=None)[0]
    grid = CircleGrid(degree=24)
    ours = continuity_potential(skewed_density(grid), grid.analyze(grid.points[:, 0] ** 2 - grid.points[:, 1] ** 2))
    at = torch.from_numpy(np.stack([np.cos(t), np.sin(t)], -1))
    assert np.abs(grid.evaluate(ours, at).numpy() - (phi - phi.mean())).max() < 1e-5  # h^2 = 2.7e-5


@pytest.mark.parametrize("grid", [GRIDS["sphere"], SphereGrid(degree=26), GRIDS["zonal"]], ids=str)
def test_a_known_potential_is_found(grid: Grid) -> None:
    """S^2 at degree 26 has 729 modes, for conjugate gradients."""
    density = skewed_density(grid)
    phi = grid.analyze(grid.points[:, 0] ** 3 + 0.5 * grid.points[:, 0])
    phi[0] = 0
    h = wasserstein_gradient(density, grid.synthesize(phi))
    assert float((continuity_potential(density, h) - phi).abs().max()) < 1e-10


def test_conjugate_gradients_agree_with_the_dense_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SphereGrid(degree=12)
    density = skewed_density(grid)
    h = torch.randn(169, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h[0] = 0
    dense = continuity_potential(density, h)
    monkeypatch.setattr(module, "MAX_DENSE", 0)
    assert float((continuity_potential(density, h) - dense).abs().max()) < 1e-12
    monkeypatch.setattr(module, "MAX_ITERATIONS", 3)
    with pytest.raises(HelmscopeError, match="conjugate gradients do not converge in 3 steps"):
        continuity_potential(density, h)


def geodesic(grid: CircleGrid, times: list[float]) -> tuple[list[Density], float]:
    """(id + t u)_# rho for u = -0.4 sin(theta) + 0.1 cos(2 theta), a gradient, and the squared length int u^2 rho."""
    shift = lambda a: -0.4 * np.sin(a) + 0.1 * np.cos(2 * a)  # noqa: E731
    slope = lambda a: -0.4 * np.cos(a) - 0.2 * np.sin(2 * a)  # noqa: E731
    start = Density.von_mises_fisher(grid, kappa=0.7)
    angles = 2 * np.pi * np.arange(len(grid.points)) / len(grid.points)
    path = []
    for t in times:
        origin = np.array([brentq(lambda a, y=y, t=t: a + t * shift(a) - y, y - 1, y + 1, xtol=1e-15) for y in angles])
        points = torch.from_numpy(np.stack([np.cos(origin), np.sin(origin)], -1))
        values = grid.evaluate(start.modes, points) / torch.from_numpy(1 + t * slope(origin))
        path.append(Density(grid, grid.analyze(values)))
    return path, float(grid.mean_of(start.values * torch.from_numpy(shift(angles)) ** 2))


def test_energy_of_a_geodesic_is_the_squared_distance() -> None:
    grid = CircleGrid(degree=32)
    errors = []
    for count in (5, 9, 17):
        times = np.linspace(0, 1, count).tolist()
        path, squared = geodesic(grid, times)
        errors.append(abs(benamou_brenier_energy(path, times) - squared))
    assert errors[-1] < 1e-5
    assert np.log2(errors[1] / errors[2]) > 3  # 3.7 measured
    n = 400
    angles = (np.arange(n) + 0.5) / n
    points = torch.from_numpy(np.stack([np.cos(2 * np.pi * angles), np.sin(2 * np.pi * angles)], -1))
    weights = [(grid.evaluate(density.modes, points) / n).numpy() for density in (path[0], path[-1])]
    weights = [w / w.sum() for w in weights]
    distance = float(ot.wasserstein_circle(angles, angles, *weights, p=2).item()) * (2 * np.pi) ** 2
    assert abs(distance - squared) < 1e-4  # atoms every 0.016 radians
    mixture = [Density(grid, (1 - t) * path[0].modes + t * path[-1].modes) for t in times]
    assert benamou_brenier_energy(mixture, times) > 1.02 * squared


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_energy_of_a_gradient_flow_is_what_its_free_energy_loses(grid: Grid) -> None:
    """||d_t rho||^2 = -dF/dt along d_t rho = -nabla_W2 F, F = nu Ent + int V."""
    grid = SphereGrid(degree=9) if isinstance(grid, SphereGrid) else grid
    nu, start = 0.3, Density.von_mises_fisher(grid, kappa=0.5)
    first = torch.eye(grid.dim, dtype=torch.float64)[0]
    path = evolve(lambda x: first.expand_as(x), start, times=np.linspace(0, 0.2, 9).tolist(), noise=IsotropicNoise(nu))
    free = [-nu * path[k].entropy - float(path[k].mean[0]) for k in (0, -1)]  # V = -<x, first>
    assert abs(benamou_brenier_energy(path) - (free[0] - free[1])) < 2e-6
    assert free[0] - free[1] > 0.01


def test_bad_input() -> None:
    grid = GRIDS["circle"]
    density, zero = Density.uniform(grid), torch.zeros(len(grid.degrees), dtype=torch.float64)
    one = zero.clone()
    one[0] = 1
    u = lambda x: x[:, 0]  # noqa: E731
    negative = Density(grid, one + 2 * grid.analyze(grid.points[:, 0]))
    for call, message in (
        (lambda: wasserstein_gradient(grid, u), "density is CircleGrid"),
        (lambda: wasserstein_gradient(density, zero), "first_variation gives"),
        (lambda: wasserstein_gradient(density, lambda x: x[:, 0] / 0), "first_variation is not finite"),
        (lambda: continuity_potential(density, zero[1:]), "h is"),
        (lambda: continuity_potential(density, one), "h integrates to 1"),
        (lambda: continuity_potential(negative, zero), "needs a positive density"),
        (lambda: internal_energy_gradient(negative, lambda p: p * p.log()), "second derivative"),
        (lambda: functional_rate(density, u, zero), "velocity is"),
        (lambda: benamou_brenier_energy([density] * 3, [0, 1, 2]), "at least 4"),
        (lambda: benamou_brenier_energy([density] * 4, [0, 2, 1, 3]), "times must increase"),
        (
            lambda: benamou_brenier_energy([density] * 3 + [Density.uniform(CircleGrid(degree=24))], range(4)),
            "several grids",
        ),
    ):
        with pytest.raises(HelmscopeError, match=message):
            call()
