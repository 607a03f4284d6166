"""Grids of harmonics: transforms against SciPy and plain sums, calculus against autograd, exact kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import eval_chebyt, eval_gegenbauer, ive, sph_harm_y

import helmscope as hs
from helmscope.geometry import surface
from helmscope.geometry.harmonics import harmonic_dimension
from helmscope.meanfield import CircleGrid, Grid, SphereGrid, ZonalGrid
from support.refusal import refused

GRIDS = [CircleGrid(degree=7), SphereGrid(degree=6), ZonalGrid(dim=2, degree=7), ZonalGrid(dim=3, degree=6)]
GRIDS += [ZonalGrid(dim=8, degree=5), ZonalGrid(dim=512, degree=5)]


def each_grid(test):
    return pytest.mark.parametrize("grid", GRIDS, ids=repr)(test)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis_of(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """The basis at unit vectors x by SciPy: (n, modes)."""
    columns, points = [], x.numpy()
    if isinstance(grid, CircleGrid):
        t = np.arctan2(points[:, 1], points[:, 0])
        for k in range(grid.degree + 1):
            columns += [np.ones_like(t)] if k == 0 else [math.sqrt(2) * np.cos(k * t), math.sqrt(2) * np.sin(k * t)]
    elif isinstance(grid, SphereGrid):
        theta, phi = np.arccos(points[:, 2]), np.arctan2(points[:, 1], points[:, 0])
        for k in range(grid.degree + 1):
            for m in range(-k, k + 1):
                value = (-1) ** m * sph_harm_y(k, abs(m), theta, phi) * math.sqrt(4 * math.pi)
                columns.append(value.real if m == 0 else math.sqrt(2) * (value.imag if m < 0 else value.real))
    else:
        order = (grid.dim - 2) / 2
        for k in range(grid.degree + 1):
            if grid.dim == 2:
                values = eval_chebyt(k, points[:, 0])
            else:
                values = eval_gegenbauer(k, order, points[:, 0]) / eval_gegenbauer(k, order, 1.0)
            columns.append(math.sqrt(harmonic_dimension(k, dim=grid.dim)) * values)
    return torch.from_numpy(np.stack(columns, -1))


@each_grid
def test_synthesis_is_the_sum_of_the_harmonics_of_scipy(grid: Grid) -> None:
    basis, modes = basis_of(grid, grid.points), normal(2, 3, len(grid.degrees))
    assert torch.allclose(grid.synthesize(modes), modes @ basis.mT, rtol=0, atol=2e-13 * float(basis.abs().max()))
    x = hs.Uniform(n=9, dim=grid.dim).sample(seed=1)
    assert torch.allclose(grid.evaluate(modes, x), modes @ basis_of(grid, x).mT, rtol=0, atol=1e-12)


@each_grid
def test_analysis_is_the_quadrature_of_the_harmonics_of_scipy(grid: Grid) -> None:
    basis, values = basis_of(grid, grid.points), torch.sin(3 * grid.points @ normal(grid.dim, 2, seed=2)).mT
    assert torch.allclose(grid.analyze(values), (values * grid.weights) @ basis, rtol=0, atol=1e-13)
    modes = normal(2, len(grid.degrees), seed=3)
    assert torch.allclose(grid.analyze(grid.synthesize(modes)), modes, rtol=0, atol=1e-13)
    assert abs(float(grid.weights.sum()) - 1) < 1e-14
    assert torch.allclose(grid.mean_of(values), values @ grid.weights, rtol=0, atol=1e-15)


@each_grid
def test_basis_is_orthonormal_and_ordered_by_degree(grid: Grid) -> None:
    basis = grid.synthesize(torch.eye(len(grid.degrees), dtype=torch.float64))
    gram = (basis * grid.weights) @ basis.mT
    assert torch.allclose(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=2e-13)
    assert torch.equal(grid.degrees, grid.degrees.sort().values)
    counts = torch.bincount(grid.degrees).tolist()
    zonal = isinstance(grid, ZonalGrid)
    assert counts == [1 if zonal else harmonic_dimension(k, dim=grid.dim) for k in range(grid.degree + 1)]
    assert torch.equal(basis[0], torch.ones_like(basis[0])) or torch.allclose(basis[0], torch.ones_like(basis[0]))


@each_grid
def test_points_and_frame_are_orthonormal(grid: Grid) -> None:
    full = torch.cat([grid.points[:, None], grid.frame], 1)
    wanted = torch.eye(full.shape[1], dtype=torch.float64).expand(len(full), -1, -1)
    assert torch.allclose(full @ full.mT, wanted, rtol=0, atol=1e-14)


@each_grid
def test_gradient_is_that_of_autograd(grid: Grid) -> None:
    modes = normal(len(grid.degrees), seed=4) / (1 + grid.degrees)
    interior = slice(None) if grid.dim < 500 else (grid.cosines.abs() < 0.2)  # P_k beyond is of no weight
    exact = grid.components(surface.gradient(lambda x: grid.evaluate(modes, x), grid.points))[interior]
    assert torch.allclose(grid.gradient(modes)[interior], exact, rtol=0, atol=1e-11 * (1 + float(exact.abs().max())))


@each_grid
def test_value_and_gradient_at_once(grid: Grid) -> None:
    modes = normal(2, len(grid.degrees), seed=11)
    value, gradient = grid.value_and_gradient(modes)
    assert torch.allclose(value, grid.synthesize(modes), rtol=0, atol=1e-12)
    assert torch.allclose(gradient, grid.gradient(modes), rtol=0, atol=1e-12)


@each_grid
def test_divergence_is_that_of_autograd(grid: Grid) -> None:
    """Of grad(sin u), u of low degree, so that its coefficients are those of a smooth function."""
    direction = torch.eye(grid.dim, dtype=torch.float64)[0]
    if not isinstance(grid, ZonalGrid):
        direction = normal(grid.dim, seed=5)
    field = lambda x: direction * (x @ direction)[..., None] ** 2  # noqa: E731
    computed = grid.divergence(grid.components(field(grid.points)))
    sample = grid.points[:: max(1, len(grid.points) // 40)]
    exact = surface.divergence(field, sample)
    assert torch.allclose(grid.evaluate(computed, sample), exact, rtol=0, atol=1e-12 * (1 + float(exact.abs().max())))


@each_grid
def test_divergence_is_minus_the_adjoint_of_the_gradient(grid: Grid) -> None:
    modes = normal(3, len(grid.degrees), seed=6)
    components = normal(3, *grid.frame.shape[:2], seed=7)
    left = (grid.divergence(components) * modes).sum(-1)
    right = -grid.mean_of((components * grid.gradient(modes)).sum(-1))
    assert torch.allclose(left, right, rtol=1e-12, atol=1e-11)
    assert torch.equal(grid.divergence(components)[:, 0].abs(), torch.zeros(3, dtype=torch.float64))


@each_grid
def test_laplacian_is_diagonal(grid: Grid) -> None:
    modes = normal(len(grid.degrees), seed=8)
    laplacian = grid.divergence(grid.gradient(modes))
    assert torch.allclose(laplacian, -grid.eigenvalues * modes, rtol=0, atol=1e-12 * float(grid.eigenvalues.max()))
    k = grid.degrees.double()
    assert torch.equal(grid.eigenvalues, k * (k + grid.dim - 2))


@pytest.mark.parametrize("beta", [0.0, 0.7, -2.5, 4.0])
@pytest.mark.parametrize("grid", [CircleGrid(24), SphereGrid(24), ZonalGrid(dim=5, degree=24)], ids=repr)
def test_convolution_with_the_exponential_kernel(grid: Grid, beta: float) -> None:
    """lambda_k = Gamma(d/2) (2/beta)^(d/2-1) I_{k+d/2-1}(beta) by SciPy, and the naive sum over the quadrature."""
    multipliers = grid.exponential_multipliers(beta)
    order, k = grid.dim / 2 - 1, grid.degrees.numpy()
    if beta:
        size = abs(beta)
        exact = math.gamma(order + 1) * (2 / size) ** order * ive(k + order, size) * np.sign(beta) ** k
    else:
        exact = (k == 0).astype(float)
    assert np.abs(multipliers.numpy() - exact).max() < 4e-15
    if isinstance(grid, ZonalGrid):
        return  # a meridian is no quadrature of the sphere
    modes = (grid.degrees == 0).double() + 0.1 * normal(len(grid.degrees)) / (1 + grid.degrees) ** 4
    kernel = torch.exp(beta * grid.points[:5] @ grid.points.mT - abs(beta))
    naive = kernel @ (grid.weights * grid.synthesize(modes))
    assert torch.allclose(grid.synthesize(multipliers * modes)[:5], naive, rtol=0, atol=1e-14)


def test_products_are_free_of_aliasing() -> None:
    """The coefficients of a product of two functions are those on a grid of twice the degree."""
    for small, large in ((CircleGrid(6), CircleGrid(12)), (SphereGrid(6), SphereGrid(12))):
        size = len(small.degrees)
        one, other = normal(size, seed=9), normal(size, seed=10)
        product = small.analyze(small.synthesize(one) * small.synthesize(other))
        pad = torch.zeros(len(large.degrees) - size, dtype=torch.float64)
        exact = large.analyze(large.synthesize(torch.cat([one, pad])) * large.synthesize(torch.cat([other, pad])))
        assert torch.allclose(product, exact[:size], rtol=0, atol=1e-12)


def test_area_and_repr() -> None:
    assert abs(CircleGrid(4).log_area - math.log(2 * math.pi)) < 1e-15
    assert abs(SphereGrid(4).log_area - math.log(4 * math.pi)) < 1e-14
    assert repr(SphereGrid(4)) == "SphereGrid(degree=4)"
    assert repr(ZonalGrid(dim=8, degree=4)) == "ZonalGrid(dim=8, degree=4)"


@pytest.mark.parametrize("kind", [CircleGrid, SphereGrid, lambda degree: ZonalGrid(dim=4, degree=degree)])
def test_bad_degrees_are_refused(kind) -> None:
    refused(lambda: kind(0), "degree is 0", ">= 1")
    refused(lambda: kind(2.5), "degree is 2.5")
    refused(lambda: kind(10**9), "degree is 1000000000", "this machine has")


def test_grids_that_do_not_exist_are_refused() -> None:
    refused(lambda: ZonalGrid(dim=1), "dim is 1", ">= 2")
    refused(lambda: ZonalGrid(dim=10**6, degree=100), "degree is 100", "1e300", "lower degree")


def test_a_degree_that_is_too_small_names_one_that_would_do() -> None:
    text = refused(lambda: CircleGrid(8).exponential_multipliers(9.0), "degree is 8", "beta=9")
    needed = int(text.split("degree=")[1].split()[0])
    CircleGrid(needed).exponential_multipliers(9.0)
    refused(lambda: CircleGrid(needed - 1).exponential_multipliers(9.0), f"degree={needed}")
    refused(lambda: CircleGrid(8).exponential_multipliers(math.nan), "beta is nan")
