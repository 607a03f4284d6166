"""Harmonics against SciPy, mpmath, closed forms and kernel sums. Bounds are a few times the measured errors."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import scipy.special
import torch

from helmscope.geometry import harmonics as hm
from helmscope.geometry import surface
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError

F64 = torch.float64
AXES = torch.cat([torch.eye(3, dtype=F64), -torch.eye(3, dtype=F64)])


def random_points(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    return retract(torch.randn(n, dim, dtype=F64, generator=torch.Generator().manual_seed(seed)))


def near_poles(n: int) -> torch.Tensor:
    return retract(random_points(n, 3, seed=1) * torch.tensor([1e-2, 1e-2, 1.0]))


def grid(n: int = 201) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=F64)


def test_circle_angle_is_atan2():
    t = torch.linspace(-math.pi, math.pi, 1001, dtype=F64)[1:]
    x = torch.stack([t.cos(), t.sin()], -1)
    assert (hm.circle_angle(3 * x) - t).abs().max() < 2e-15
    assert (hm.circle_angle(x.float()).double() - t).abs().max() < 1e-6
    axes = torch.tensor([0, 0.5, 1, -0.5], dtype=F64) * math.pi
    assert torch.equal(hm.circle_angle(AXES[[0, 1, 3, 4], :2]), axes)


def test_gradient_of_circle_angle_everywhere():
    t = torch.arange(16, dtype=F64) * (math.pi / 8)
    x = torch.cat([torch.stack([t.cos(), t.sin()], -1), AXES[[0, 1, 3, 4], :2]])
    tangent = torch.stack([-x[:, 1], x[:, 0]], -1)
    assert torch.allclose(surface.gradient(hm.circle_angle, x), tangent, rtol=0, atol=1e-15)


@pytest.mark.parametrize("degree", [0, 1, 2, 7, 8, 200])
def test_fourier_modes(degree):
    t = torch.linspace(-math.pi, math.pi, 301, dtype=F64)
    cos, sin = hm.fourier(torch.stack([t.cos(), t.sin()], -1), degree)
    k = torch.arange(degree + 1, dtype=F64)
    assert cos.shape == sin.shape == (301, degree + 1)
    assert (cos - torch.cos(k * t[:, None])).abs().max() < 1e-13  # 6e-14 at degree 200: 200 roundings of x
    assert (sin - torch.sin(k * t[:, None])).abs().max() < 1e-13


def test_fourier_modes_are_eigenfunctions():
    x = random_points(5, 2)
    assert torch.autograd.gradcheck(lambda y: torch.stack(hm.fourier(y, 5)), x.clone().requires_grad_(True))
    for k in range(6):
        for part in (0, 1):
            lap = surface.laplacian(lambda y, k=k, part=part: hm.fourier(y, 5)[part][..., k], x)
            assert torch.allclose(lap, -(k**2) * hm.fourier(x, 5)[part][..., k], rtol=0, atol=1e-13)


def scipy_harmonics(x: torch.Tensor, degree: int) -> np.ndarray:
    x, y, z = x.numpy().T
    theta, phi = np.arctan2(np.hypot(x, y), z), np.arctan2(y, x)
    out = np.empty((len(x), (degree + 1) ** 2))
    for deg in range(degree + 1):
        for m in range(deg + 1):  # SciPy's include the Condon-Shortley sign (-1)^m
            value = (-1) ** m * math.sqrt(2 if m else 1) * scipy.special.sph_harm_y(deg, m, theta, phi)
            out[:, deg * deg + deg - m] = value.imag
            out[:, deg * deg + deg + m] = value.real
    return out


def test_spherical_harmonics_against_scipy_to_degree_200():
    x = random_points(12, 3)
    assert abs(hm.spherical_harmonics(x, 200).numpy() - scipy_harmonics(x, 200)).max() < 3e-13  # measured 1.1e-13
    near = torch.cat([near_poles(8), AXES])  # here SciPy itself loses digits at high degree: see the mpmath test
    assert abs(hm.spherical_harmonics(near, 20).numpy() - scipy_harmonics(near, 20)).max() < 1e-13


@pytest.mark.parametrize("m", [0, 1, 7, 60, 199, 200])
def test_spherical_harmonics_near_the_poles_against_mpmath(m):
    deg = 200
    with mpmath.workdps(40):
        for point in torch.cat([near_poles(2), AXES[[2, 5]]]):
            x, y, z = (mpmath.mpf(c) for c in point.tolist())
            r = mpmath.sqrt(x * x + y * y + z * z)
            # Y_lm ~ (x + iy)^m C_(l-m)^(m+1/2)(z): the Legendre function without its sin theta
            norm = mpmath.sqrt((2 * deg + 1) / (4 * mpmath.pi) * mpmath.fac(deg - m) / mpmath.fac(deg + m))
            zonal = mpmath.fac2(2 * m - 1) * mpmath.gegenbauer(deg - m, m + mpmath.mpf(1) / 2, z / r)
            power = ((x + 1j * y) / r) ** m * norm * zonal * (mpmath.sqrt(2) if m else 1)
            value = hm.spherical_harmonics(point, deg)
            assert abs(value[deg * deg + deg + m].item() - power.real) < 3e-13
            assert m == 0 or abs(value[deg * deg + deg - m].item() - power.imag) < 3e-13


def test_spherical_harmonics_at_the_poles():
    poles = hm.spherical_harmonics(AXES[[2, 5]], 200)
    deg = torch.arange(201)
    zonal = deg * deg + deg
    height = torch.sqrt((2 * deg.to(F64) + 1) / (4 * math.pi))
    assert (poles[0, zonal] / height - 1).abs().max() < 1e-14
    assert (poles[1, zonal] / height - (-1.0) ** deg).abs().max() < 1e-14
    poles[:, zonal] = 0
    assert torch.equal(poles, torch.zeros_like(poles))


def test_spherical_harmonics_layout_and_sign():
    x = random_points(4, 3)
    u, v, w = x.unbind(-1)
    a, b = math.sqrt(3 / (4 * math.pi)), math.sqrt(15 / (4 * math.pi))
    rows = [torch.full_like(u, math.sqrt(1 / (4 * math.pi))), a * v, a * w, a * u]
    rows += [b * u * v, b * v * w, math.sqrt(5 / (16 * math.pi)) * (3 * w * w - 1), b * u * w, b / 2 * (u * u - v * v)]
    for degree in range(3):
        expected = torch.stack(rows[: (degree + 1) ** 2], -1)
        assert torch.allclose(hm.spherical_harmonics(x, degree), expected, rtol=0, atol=1e-15)


def test_addition_theorem():
    x, y = torch.cat([random_points(6, 3), near_poles(4), AXES]), torch.cat([random_points(10, 3, seed=2), AXES])
    left, right = hm.spherical_harmonics(x, 60), hm.spherical_harmonics(y, 60)
    legendre = hm.gegenbauer((x * y).sum(-1), 60, dim=3)
    for deg in range(61):
        block = slice(deg * deg, (deg + 1) ** 2)
        total = (left[:, block] * right[:, block]).sum(-1) * 4 * math.pi / (2 * deg + 1)
        assert (total - legendre[:, deg]).abs().max() < 3e-14


def test_spherical_harmonics_are_orthonormal():
    degree = 12
    s, w = hm.zonal_quadrature(degree + 1, dim=3)
    phi = torch.arange(2 * degree + 1, dtype=F64) * (2 * math.pi / (2 * degree + 1))
    r = torch.sqrt(1 - s * s)[:, None]
    x = torch.stack([r * phi.cos(), r * phi.sin(), s[:, None].expand(-1, len(phi))], -1)
    values = hm.spherical_harmonics(x, degree)
    gram = torch.einsum("i,ijk,ijl->kl", w, values, values) * (4 * math.pi / len(phi))
    assert (gram - torch.eye((degree + 1) ** 2, dtype=F64)).abs().max() < 1e-14


def test_gradient_of_spherical_harmonics_everywhere():
    x = torch.cat([random_points(3, 3), near_poles(2)])
    # retract, because the formula holds only for unit vectors
    assert torch.autograd.gradcheck(lambda y: hm.spherical_harmonics(retract(y), 4), x.clone().requires_grad_(True))
    y = AXES.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(hm.spherical_harmonics(y, 200).sum(), y)
    assert bool(torch.isfinite(slope).all())
    # sum_m |grad_S Y_lm|^2 = l (l + 1) (2l + 1) / (4 pi), the same at every point
    jacobian = torch.stack([torch.func.jacrev(lambda z: hm.spherical_harmonics(z, 30)[900:])(p) for p in AXES])
    size = project(AXES[:, None], jacobian).square().sum((-1, -2))
    assert (size / (30 * 31 * 61 / (4 * math.pi)) - 1).abs().max() < 1e-13


def test_spherical_harmonics_are_eigenfunctions():
    x = torch.cat([random_points(3, 3), AXES])
    values = hm.spherical_harmonics(x, 4)
    for deg in range(5):
        for index in range(deg * deg, (deg + 1) ** 2):
            lap = surface.laplacian(lambda y, i=index: hm.spherical_harmonics(y, 4)[..., i], x)
            assert (lap + deg * (deg + 1) * values[:, index]).abs().max() < 1e-13


def test_float32_accuracy():
    x = torch.cat([random_points(20, 3), near_poles(10), AXES]).float()
    low, exact = hm.spherical_harmonics(x, 150), hm.spherical_harmonics(x.double(), 150)
    assert low.dtype == torch.float32
    assert (low - exact).abs().max() < 2e-5  # values reach 7: 150 roundings
    cos, sin = hm.fourier(x[:, :2].contiguous(), 20)
    assert cos.dtype == sin.dtype == hm.gegenbauer(x[:, 0], 9, dim=5).dtype == torch.float32
    assert (hm.gegenbauer(x[:, 0], 9, dim=5) - hm.gegenbauer(x[:, 0].double(), 9, dim=5)).abs().max() < 1e-6


def test_the_result_at_a_point_does_not_depend_on_the_batch():
    x = random_points(103, 3)
    spherical, circular = hm.spherical_harmonics(x, 12), hm.fourier(x[:, :2], 12)
    for i in range(0, 103, 6):
        assert torch.equal(hm.spherical_harmonics(x[i], 12), spherical[i])
        assert torch.equal(hm.fourier(x[i, :2], 12)[1], circular[1][i])
        assert torch.equal(hm.circle_angle(x[i, :2]), hm.circle_angle(x[:, :2])[i])


def test_gegenbauer_against_scipy():
    s, k = grid(), np.arange(201)
    column = s.numpy()[:, None]
    assert abs(hm.gegenbauer(s, 200, dim=2).numpy() - scipy.special.eval_chebyt(k, column)).max() < 5e-14
    assert abs(hm.gegenbauer(s, 200, dim=3).numpy() - scipy.special.eval_legendre(k, column)).max() < 1e-13
    for dim in (4, 7, 130):
        order, k = (dim - 2) / 2, np.arange(31)
        classical = scipy.special.eval_gegenbauer(k, order, column)
        at_one = scipy.special.eval_gegenbauer(k, order, 1.0)
        assert abs(hm.gegenbauer(s, 30, dim=dim).numpy() - classical / at_one).max() < 1e-14
        assert (abs(hm.gegenbauer_c(s, 30, order=order).numpy() - classical) / at_one).max() < 1e-14


@pytest.mark.parametrize("dim", [2, 3, 4, 9, 1024])
def test_gegenbauer_at_the_ends(dim):
    ends = hm.gegenbauer(torch.tensor([1.0, -1.0], dtype=F64), 50, dim=dim)
    sign = (-1.0) ** torch.arange(51)
    assert (ends - torch.stack([torch.ones(51), sign])).abs().max() < 1e-14
    assert hm.gegenbauer(grid(5), 0, dim=dim).shape == (5, 1)


@pytest.mark.parametrize("dim", [2, 3, 5, 12])
def test_gegenbauer_orthogonality(dim):
    s, w = hm.zonal_quadrature(21, dim=dim)
    p = hm.gegenbauer(s, 20, dim=dim)
    size = torch.tensor([hm.harmonic_dimension(k, dim=dim) for k in range(21)], dtype=F64).sqrt()
    gram = (p * size).T @ (w[:, None] * p * size)
    assert (gram - torch.eye(21, dtype=F64)).abs().max() < 1e-13


def test_zonal_polynomials_are_eigenfunctions():
    for dim in (2, 3, 5):
        x = random_points(3, dim)
        for k in range(5):
            lap = surface.laplacian(lambda y, k=k, dim=dim: hm.gegenbauer(y[..., 0], k, dim=dim)[..., k], x)
            assert torch.allclose(lap, -k * (k + dim - 2) * hm.gegenbauer(x[:, 0], k, dim=dim)[:, k], atol=1e-12)


def test_gegenbauer_c_overflows_at_the_documented_degree():
    s = torch.tensor(1.0, dtype=F64)
    assert torch.isfinite(hm.gegenbauer_c(s, 310, order=512)).sum() == 304
    assert torch.isfinite(hm.gegenbauer_c(s.float(), 30, order=512)).sum() == 19


def test_harmonic_dimension():
    assert [hm.harmonic_dimension(k, dim=2) for k in range(4)] == [1, 2, 2, 2]
    assert [hm.harmonic_dimension(k, dim=4) for k in range(5)] == [(k + 1) ** 2 for k in range(5)]
    for dim in (2, 3, 6, 40):  # homogeneous polynomials are harmonics of degree k, k-2, ... times powers of |x|^2
        assert sum(hm.harmonic_dimension(k, dim=dim) for k in (7, 5, 3, 1)) == math.comb(7 + dim - 1, 7)


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 16, 128, 1024])
@pytest.mark.parametrize("points", [1, 2, 3, 20, 200])
def test_quadrature_moments(dim, points):
    s, w = hm.zonal_quadrature(points, dim=dim)
    assert s.shape == w.shape == (points,)
    assert bool((w > 0).all())
    assert bool((s.diff() > 0).all())
    moment = 1.0  # E s^k = 1 3 ... (k - 1) / (d (d + 2) ... (d + k - 2)): 1/d, 3/(d (d + 2)), ...
    for k in range(0, min(2 * points, 41), 2):
        moment *= (k - 1) / (dim + k - 2) if k else 1
        assert abs((w * s**k).sum().item() / moment - 1) < 1e-14
        assert (w * s ** (k + 1)).sum().abs() < 1e-16


def test_quadrature_against_scipy_and_mpmath():
    s, w = hm.zonal_quadrature(40, dim=2)
    nodes, _ = scipy.special.roots_chebyt(40)
    assert abs(s.numpy() - nodes).max() < 3e-16
    assert (w * 40 - 1).abs().max() < 2e-14
    for dim in (3, 6):
        s, w = hm.zonal_quadrature(40, dim=dim)
        nodes, weights = scipy.special.roots_gegenbauer(40, (dim - 2) / 2)
        assert abs(s.numpy() - nodes).max() < 3e-16
        assert abs(w.numpy() - weights / weights.sum()).max() < 2e-15  # mostly SciPy's: 5e-17 against mpmath
    # the smallest of 64 weights in dim 1024 is 1.7e-46, and accurate in relative terms
    s, w = hm.zonal_quadrature(64, dim=1024)
    with mpmath.workdps(40):
        scale = mpmath.gegenbauer(64, 511, 0)
        close = [(s[i].item(), s[i].item() + 1e-9) for i in (0, 31)]
        node = [mpmath.findroot(lambda z: mpmath.gegenbauer(64, 511, z) / scale, pair) for pair in close]
        weight = [(1 - z * z) / mpmath.gegenbauer(63, 511, z) ** 2 for z in node]
        assert abs((w[0] / w[31]).item() / (weight[0] / weight[1]) - 1) < 1e-13


def test_zonal_coefficients():
    def f(s: torch.Tensor) -> torch.Tensor:
        return torch.stack([3 * s**3 - s, torch.exp(2 * (s - 1))])

    for dim in (2, 3, 8):
        a, s = hm.zonal_coefficients(f, 20, dim=dim), grid()
        assert (a[1] - hm.exponential_coefficients(2.0, 20, dim=dim)).abs().max() < 1e-13
        assert (hm.gegenbauer(s, 20, dim=dim) @ a.T - f(s).T).abs().max() < 2e-13
    assert abs(hm.zonal_coefficients(lambda s: s**100, 0, dim=3).item() * 101 - 1) < 1e-13
    kink = hm.zonal_coefficients(torch.relu, 2, dim=3, points=1000)
    assert torch.allclose(kink, torch.tensor([1 / 4, 1 / 2, 5 / 16], dtype=F64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("d", [3, 5, 8])
def test_hodge_series_solves_its_ode(d):
    """(1-s^2) h'' - (d+1) s h' - (d-1) h = -g for h = sum_k g_k / ((k+1)(k+d-1)) C_k^(d/2), g = s f' + (d-1) f."""

    def g(s: torch.Tensor) -> torch.Tensor:
        return s / torch.cosh(s) ** 2 + (d - 1) * torch.tanh(s)

    k = torch.arange(41, dtype=F64)
    # C_k^(d/2) are the zonal polynomials of dimension d + 2 up to C_k(1)
    g_k = hm.zonal_coefficients(g, 40, dim=d + 2) / hm.gegenbauer_c(torch.tensor(1.0, dtype=F64), 40, order=d / 2)
    s = torch.linspace(-0.9, 0.9, 37, dtype=F64, requires_grad=True)
    h = hm.gegenbauer_c(s, 40, order=d / 2) @ (g_k / ((k + 1) * (k + d - 1)))
    (h1,) = torch.autograd.grad(h.sum(), s, create_graph=True)
    (h2,) = torch.autograd.grad(h1.sum(), s)
    residual = (1 - s**2) * h2 - (d + 1) * s * h1 - (d - 1) * h + g(s)
    assert residual.abs().max() < 1e-12


@pytest.mark.parametrize("dim", [2, 3, 4, 10, 128, 1024])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.5, 4.0, 30.0, 300.0, 1e4])
def test_exponential_series_sums_to_the_exponential(beta, dim):
    degree = hm.exponential_degree(beta, dim=dim, tol=1e-15)
    a = hm.exponential_coefficients(beta, degree, dim=dim)
    s = grid()
    assert bool((a >= 0).all())
    assert (hm.gegenbauer(s, degree, dim=dim) @ a - torch.exp(beta * (s - 1))).abs().max() < 1e-14  # measured 2e-15


@pytest.mark.parametrize(("beta", "dim"), [(1e-3, 3), (0.5, 2), (4.0, 2), (4.0, 3), (30.0, 7), (300.0, 1024), (1e4, 2)])
def test_exponential_coefficients_against_mpmath(beta, dim):
    degree = hm.exponential_degree(beta, dim=dim, tol=1e-14)
    a = hm.exponential_coefficients(beta, degree + 20, dim=dim)
    order = mpmath.mpf(dim - 2) / 2
    with mpmath.workdps(40):
        for k in (0, 1, 2, degree // 2, degree, degree + 20):
            bessel = mpmath.besseli(k + order, beta) * mpmath.exp(-beta) * mpmath.gamma(order + 1)
            exact = (2 / mpmath.mpf(beta)) ** order * bessel * hm.harmonic_dimension(k, dim=dim)
            assert abs(a[k].item() / exact - 1) < 1e-14  # relative, down to 1e-90; measured 4e-15


def test_exponential_coefficients_in_extreme_cases():
    assert hm.exponential_coefficients(0, 3, dim=2).tolist() == [1, 0, 0, 0]
    assert hm.exponential_degree(0, dim=3, tol=1e-300) == 0
    assert hm.exponential_degree(7, dim=3, tol=1) == 0
    a = hm.exponential_coefficients(1e4, 20000, dim=1024)  # the first and the last ones are below 1e-308
    assert bool(torch.isfinite(a).all())
    assert abs(a.sum().item() - 1) < 1e-14
    assert hm.exponential_coefficients(2.0, 3000, dim=2).shape == (3001,)


def test_exponential_degree_is_the_smallest():
    for beta, dim in ((0.5, 2), (4.0, 3), (30.0, 3), (30.0, 512)):
        a = hm.exponential_coefficients(beta, 400, dim=dim)
        for tol in (1e-3, 1e-12, 1e-40):
            degree = hm.exponential_degree(beta, dim=dim, tol=tol)
            assert a[degree + 1 :].sum() <= tol < a[degree:].sum()


def per_mode(a: torch.Tensor) -> torch.Tensor:
    count = 2 * torch.arange(len(a)) + 1
    return (a * 4 * math.pi / count).repeat_interleave(count)


@pytest.mark.parametrize("beta", [0.5, 4.0, 30.0])
def test_kernel_sums_through_moments(beta):
    """sum_j e^(beta <x_i, x_j>) in O(n) by moments, on S^1 and S^2."""
    circle, sphere = random_points(50, 2), random_points(50, 3)

    a = hm.exponential_coefficients(beta, hm.exponential_degree(beta, dim=2, tol=1e-15), dim=2)
    cos, sin = hm.fourier(circle, len(a) - 1)
    fast = cos @ (a * cos.sum(0)) + sin @ (a * sin.sum(0))
    dense = torch.exp(beta * (circle @ circle.T - 1)).sum(-1)
    assert (fast / dense - 1).abs().max() < 2e-14

    a = hm.exponential_coefficients(beta, hm.exponential_degree(beta, dim=3, tol=1e-15), dim=3)
    modes = hm.spherical_harmonics(sphere, len(a) - 1)
    fast = modes @ (per_mode(a) * modes.sum(0))
    dense = torch.exp(beta * (sphere @ sphere.T - 1)).sum(-1)
    assert (fast / dense - 1).abs().max() < 2e-14


def test_kernel_gradient_through_moments():
    """The velocity sum_j e^(beta <x, x_j>) x_j is the gradient in x of sum_j e^(beta <x, x_j>) / beta."""
    beta, x = 4.0, random_points(20, 3)
    a = hm.exponential_coefficients(beta, hm.exponential_degree(beta, dim=3, tol=1e-15), dim=3)
    moments = per_mode(a) * hm.spherical_harmonics(x, len(a) - 1).sum(0)
    fast = surface.gradient(lambda y: hm.spherical_harmonics(y, len(a) - 1) @ moments, x)
    dense = beta * project(x, torch.exp(beta * (x @ x.T - 1)) @ x)
    assert (fast - dense).abs().max() < 1e-13


def test_dimensions_whose_squares_overflow_int64():
    """As dim -> infinity, sqrt(dim) <x, e> becomes normal, and the coefficient of degree 0 of e^(beta s) becomes 1."""
    s, w = hm.zonal_quadrature(4, dim=10**18)
    assert float((w * s**4).sum() * 1e36) == pytest.approx(3.0, rel=1e-12)
    assert hm.exponential_degree(1.0, dim=10**18, tol=1e-3) == hm.exponential_degree(1.0, dim=10**9, tol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hm.fourier(torch.ones(3), 2), "x has shape"),
        (lambda: hm.spherical_harmonics(torch.ones(4, 2), 2), "x has shape"),
        (lambda: hm.spherical_harmonics(torch.ones(4, 3, dtype=torch.int64), 2), "x has shape"),
        (lambda: hm.spherical_harmonics(torch.ones(4, 3), -1), "degree is -1"),
        (lambda: hm.gegenbauer(torch.ones(2), 2, dim=1), "dim is 1"),
        (lambda: hm.gegenbauer_c(torch.ones(2), 2, order=0), "order is 0"),
        (lambda: hm.gegenbauer_c(torch.tensor(1), 2, order=1), "s has dtype torch.int64"),
        (lambda: hm.zonal_quadrature(0, dim=3), "points is 0"),
        (lambda: hm.zonal_coefficients(torch.exp, 5, dim=3, points=5), "points is 5"),
        (lambda: hm.zonal_coefficients(torch.exp, 400, dim=1024), "degree is 400"),
        (lambda: hm.exponential_coefficients(-1.0, 5, dim=3), "beta is -1.0"),
        (lambda: hm.exponential_degree(1.0, dim=3, tol=0), "tol is 0"),
        (lambda: hm.fourier(torch.tensor([1.0, 0.0]), 10**12), "degree is 10{12} at 1 points, but that makes"),
        (lambda: hm.spherical_harmonics(torch.eye(3), 10**6), "degree is 10{6} at 3 points, but that makes"),
        (lambda: hm.gegenbauer(torch.ones(2), 10**400, dim=3), "degree is 10{70}"),
        (lambda: hm.gegenbauer_c(torch.ones(2), 10**12, order=1), "degree is 10{12} at 2 points, but that makes"),
        (lambda: hm.zonal_quadrature(10**12, dim=3), "points is 10{12}, but that makes"),
        (lambda: hm.exponential_coefficients(1e300, 5, dim=3), r"beta is 1e\+300, but that makes"),
    ],
)
def test_bad_input_raises(call, message):
    with pytest.raises(HelmscopeError, match=message):
        call()
