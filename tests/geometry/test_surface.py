"""Calculus on the sphere, and Brownian motion, whose generator is the Laplacian.

Against closed forms, and against finite differences along geodesics with 50 digits. Bounds are in units of
eps = 2^-52 times the natural size of the quantity. A number in a comment beside a bound is the largest error in 4,000
other cases.
"""

from __future__ import annotations

import functools
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmscope.geometry import sphere, surface
from helmscope.types import HelmscopeError

PROPERTY = settings(max_examples=500, deadline=None, derandomize=True)
OPERATORS = [surface.gradient, surface.divergence, surface.hessian, surface.laplacian]


def ulps(error, scale=1.0):
    """The largest error in units of eps = 2^-52 times ``scale``."""
    return float(error.detach().abs().max()) / (torch.finfo(torch.float64).eps * scale)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def points(draw, most=6):
    """A point of S^(d-1), d = 2..most, a vector a and a matrix m."""
    d, seed = draw(st.integers(2, most)), draw(st.integers(0, 2**32 - 1))
    x, a, *m = normal(d + 2, d, seed=seed)
    if draw(st.booleans()):  # tied or zero entries
        x = x.round() + (x.round() == 0).all() * torch.eye(d, dtype=torch.float64)[0]
    return sphere.retract(x), a, torch.stack(m)


def tangent_projector(x):
    return torch.eye(x.shape[-1], dtype=x.dtype) - x.unsqueeze(-1) * x.unsqueeze(-2)


# Closed forms ---------------------------------------------------------------------------------------------------------


@PROPERTY
@given(points())
def test_derivatives_of_a_quadratic_function(case):
    x, a, m = case
    s, p, d = m + m.T, tangent_projector(x), len(x)
    f = lambda y: ((y @ s) * y).sum(-1) / 2 + y @ a  # noqa: E731
    slope, scale = s @ x + a, float(s.norm() + a.norm())
    assert ulps(surface.gradient(f, x) - p @ slope, scale) <= 2  # 1.2
    assert ulps(surface.hessian(f, x) - (p @ s @ p - (x @ slope) * p), scale) <= 2  # 1.3
    assert ulps(surface.laplacian(f, x) - (s.trace() - x @ s @ x - (d - 1) * (x @ slope)), d * scale) <= 2  # 1.6


@PROPERTY
@given(points())
def test_divergence_of_a_linear_field(case):
    x, a, m = case
    expected = m.trace() - len(x) * (x @ m @ x) - (len(x) - 1) * (a @ x)
    error = surface.divergence(lambda y: y @ m.T + a, x) - expected
    assert ulps(error, len(x) * float(m.norm() + a.norm())) <= 2  # 1.4


@PROPERTY
@given(points())
def test_divergence_of_a_swirl_is_not_0_on_the_sphere(case):
    """R = r s(v.x) with r.v = 0 has div R = 0, but div_S(PR) = -(r.x) [(v.x) s' + (d-1) s]."""
    x, v, m = case
    r = m[0] - (m[0] @ v) / (v @ v) * v
    s = torch.tanh(v @ x)
    expected = -(r @ x) * ((v @ x) * (1 - s**2) + (len(x) - 1) * s)
    field = lambda y: torch.tanh(y @ v).unsqueeze(-1) * r  # noqa: E731
    assert ulps(surface.divergence(field, x) - expected, len(x) * float(m[0].norm() * (1 + v.norm()))) <= 1  # 0.4


@PROPERTY
@given(points(), st.integers(0, 5))
def test_harmonics_of_degree_k_have_the_eigenvalue_minus_k_times_k_plus_d_minus_2(case, k):
    x, a, _ = case
    d, a = len(x), sphere.retract(a)

    def zonal(y):  # Gegenbauer's recurrence, with value 1 at y = a
        s = y @ a
        before, now = torch.ones_like(s), s
        for j in range(1, k):
            before, now = now, ((2 * j + d - 2) * s * now - j * before) / (j + d - 2)
        return now if k else before

    def sectoral(y):  # Re (y_1 + i y_2)^k
        real, imaginary = torch.ones_like(y[..., 0]), torch.zeros_like(y[..., 0])
        for _ in range(k):
            real, imaginary = real * y[..., 0] - imaginary * y[..., 1], real * y[..., 1] + imaginary * y[..., 0]
        return real

    for f in (zonal, sectoral):
        assert ulps(surface.laplacian(f, x) + k * (k + d - 2) * f(x), d * max(k, 1) ** 3) <= 4  # 3.0


def test_eigenvalues_of_the_printed_hessian():
    """U = x^T diag(1, 2, 4) x / 2 has {1, 3}, {-1, 2} and {-3, -2} at the axes [Helmholtz Transformer, no. 9]."""
    x = torch.eye(3, dtype=torch.float64)
    h = surface.hessian(lambda y: (y**2 * y.new_tensor([1.0, 2.0, 4.0])).sum(-1) / 2, x)
    basis = sphere.tangent_basis(x)
    printed = torch.tensor([[1.0, 3.0], [-1.0, 2.0], [-3.0, -2.0]], dtype=torch.float64)
    assert ulps(torch.linalg.eigvalsh(basis.mT @ h @ basis) - printed) <= 8  # 6, by eigvalsh


def test_second_order_of_a_printed_layer():
    """1/2 Hess phi(Pf, Pf) - (x.f) <grad phi, Pf> for phi = x_0 x_1 + sin x_2 [Helmholtz Transformer, no. 8]."""
    x, f = torch.tensor([[1, 2, 2], [0.3, -0.5, 0.7]], dtype=torch.float64) / torch.tensor([[3.0], [1.0]])
    phi = lambda y: y[..., 0] * y[..., 1] + y[..., 2].sin()  # noqa: E731
    v = sphere.project(x, f)
    value = v @ surface.hessian(phi, x) @ v / 2 - (x @ f) * (surface.gradient(phi, x) @ v)
    assert ulps(value + 0.6962566498755095) <= 1


# Finite differences along geodesics -----------------------------------------------------------------------------------


def bumpy(a, m):
    """A function sin(a.x) x^T m x + e^(a.x) and a field sin(a.x) m x + e^(a.x) a, both without symmetry."""
    f = lambda x: (x @ a).sin() * ((x @ m.T) * x).sum(-1) + (x @ a).exp()  # noqa: E731
    field = lambda x: (x @ a).sin().unsqueeze(-1) * (x @ m.T) + (x @ a).exp().unsqueeze(-1) * a  # noqa: E731
    return f, field


def size(a, m):
    """A bound on the order of magnitude of the second derivatives of ``bumpy``."""
    return float((1 + a.norm()) ** 2 * (m.norm() + a.norm().exp()))


def differences(x, a, m, v):
    """f', f'' and <v, (P field)'> along the geodesic with unit tangent v at x, by central differences of step 1e-15."""
    h = mpmath.mpf(10) ** -15
    x, a, v, *m = ([mpmath.mpf(entry) for entry in row.tolist()] for row in (x, a, v, *m))
    x = [c / mpmath.norm(x) for c in x]
    v = [b - mpmath.fdot(x, v) * c for b, c in zip(v, x, strict=True)]
    v = [b / mpmath.norm(v) for b in v]

    def at(s):
        point = [mpmath.cos(s) * c + mpmath.sin(s) * b for b, c in zip(v, x, strict=True)]
        sine, growth = mpmath.sin(mpmath.fdot(a, point)), mpmath.exp(mpmath.fdot(a, point))
        image = [mpmath.fdot(row, point) for row in m]
        field = [sine * b + growth * c for b, c in zip(image, a, strict=True)]
        tangential = mpmath.fdot(v, field) - mpmath.fdot(point, field) * mpmath.fdot(v, point)
        return sine * mpmath.fdot(point, image) + growth, tangential

    (f_low, v_low), (f_mid, _), (f_high, v_high) = at(-h), at(0), at(h)
    first, second = (f_high - f_low) / (2 * h), (f_high - 2 * f_mid + f_low) / h**2
    return [float(first), float(second), float((v_high - v_low) / (2 * h))]


@PROPERTY
@given(points(most=5))
@mpmath.workdps(50)
def test_operators_agree_with_finite_differences_along_geodesics(case):
    x, a, m = case
    f, field = bumpy(a, m)
    frame = torch.linalg.qr(sphere.tangent_basis(x) @ m[1:, 1:]).Q  # a random orthonormal frame
    first, second, spread = torch.tensor([differences(x, a, m, v) for v in frame.T], dtype=x.dtype).T
    h, scale = surface.hessian(f, x), size(a, m)
    assert ulps(frame.T @ surface.gradient(f, x) - first, scale) <= 1  # 0.5
    assert ulps((frame.T @ h @ frame).diagonal() - second, scale) <= 2  # 1.4
    assert ulps(torch.cat([h - h.T, (h @ x).unsqueeze(0)]), scale) <= 1  # 0.4
    assert ulps(surface.laplacian(f, x) - second.sum(), scale) <= 2  # 1.1
    assert ulps(surface.divergence(field, x) - spread.sum(), scale) <= 2  # 1.0


@PROPERTY
@given(points(most=4))
def test_results_do_not_depend_on_the_extension_off_the_sphere(case):
    x, a, m = case
    f, field = bumpy(a, m)
    for operator in (surface.gradient, surface.divergence, surface.hessian):
        g = field if operator is surface.divergence else f
        other = operator(lambda y, g=g: g(sphere.retract(y)) * (y * y).sum(), x)
        assert ulps(other - operator(g, x), size(a, m)) <= 2  # 1.2


# Brownian motion, whose generator is nu Lap_S -------------------------------------------------------------------------


def test_brownian_increment_is_tangent_with_covariance_2_nu_h_p():
    n, nu, h = 200_000, 0.7, 0.03
    x = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    step = sphere.brownian_increment(x.expand(n, 3), nu=nu, duration=h, generator=torch.Generator().manual_seed(1))
    assert ulps((step * x).sum(-1)) <= 3
    expected = 2 * nu * h * (torch.eye(3) - x.outer(x))
    spread = torch.outer(expected.diagonal(), expected.diagonal())
    assert ((step.T @ step / n - expected).abs() <= 4 * ((spread + expected**2) / n).sqrt()).all()
    assert (step.mean(0).abs() <= 4 * (expected.diagonal() / n).sqrt()).all()


def mean_after_one_step(nu, h, d):
    """E<N(x + dB), x> = E (1 + 2 nu h c)^(-1/2), c chi-squared with d - 1 degrees of freedom."""
    k = (d - 1) / 2
    share = mpmath.quad(lambda c: c ** (k - 1) * mpmath.exp(-c / 2) / mpmath.sqrt(1 + 2 * nu * h * c), [0, 1, 10, 100])
    return float(share / (2**k * mpmath.gamma(k)))


@pytest.mark.parametrize(("h", "steps", "n"), [(0.1, 5, 200_000), (0.001, 500, 10_000)])
def test_retracted_brownian_motion_decorrelates_at_rate_nu_times_d_minus_1(h, steps, n):
    nu, d, source = 0.5, 3, torch.Generator().manual_seed(2)
    x = torch.zeros(n, d, dtype=torch.float64)
    x[:, 0] = 1
    for _ in range(steps):
        x = sphere.retract(x + sphere.brownian_increment(x, nu=nu, duration=h, generator=source))
    error = 4 * float(x[:, 0].std()) / math.sqrt(n)
    assert abs(float(x[:, 0].mean()) - mean_after_one_step(nu, h, d) ** steps) <= error
    if h < 0.01:  # the rate of the continuous process: the discretization error is O(h)
        assert abs(float(x[:, 0].mean()) - math.exp(-nu * (d - 1) * h * steps)) <= error


def test_brownian_increment_is_reproducible_and_vanishes_without_noise():
    x = sphere.retract(torch.ones(4, 3, dtype=torch.float32))
    draw = functools.partial(sphere.brownian_increment, x, duration=0.1)
    first, same, other = (draw(nu=1, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert first.dtype == torch.float32
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(draw(nu=0), torch.zeros(4, 3))
    assert torch.equal(sphere.brownian_increment(x, nu=1, duration=0), torch.zeros(4, 3))


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, "much", None, True])
@pytest.mark.parametrize("name", ["nu", "duration"])
def test_brownian_increment_rejects_invalid_nu_and_duration(name, bad):
    with pytest.raises(HelmscopeError) as caught:
        sphere.brownian_increment(torch.eye(2), **({"nu": 1.0, "duration": 1.0} | {name: bad}))
    assert str(caught.value) == f"{name} is {bad!r}, but it must be a finite number >= 0"


# Graphs, batches, errors ----------------------------------------------------------------------------------------------


def operand(operator):
    """A vector field for the divergence, a scalar function for the other operators."""
    f, field = bumpy(normal(3, seed=1), normal(3, 3, seed=2))
    return field if operator is surface.divergence else f


@pytest.mark.parametrize("operator", OPERATORS)
def test_graph_is_kept_if_and_only_if_x_requires_a_gradient(operator):
    x, f = sphere.retract(normal(2, 3)), operand(operator)
    plain = operator(f, x)
    assert not plain.requires_grad
    assert not x.requires_grad
    leaf = x.clone().requires_grad_()
    assert operator(f, leaf).requires_grad
    assert operator(f, 1 * leaf).requires_grad
    assert torch.equal(operator(f, leaf), plain)
    assert torch.autograd.gradcheck(functools.partial(operator, f), [leaf], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_work_under_no_grad(operator):
    x, f = sphere.retract(normal(2, 3)), operand(operator)
    with torch.no_grad():
        plain, differentiable = operator(f, x), operator(f, x.clone().requires_grad_())
    assert torch.equal(plain, operator(f, x))
    assert not plain.requires_grad
    assert differentiable.requires_grad


@pytest.mark.parametrize("operator", OPERATORS)
def test_points_of_a_batch_are_independent(operator):
    x, f = sphere.retract(normal(2, 4, 3)), operand(operator)
    batched = operator(f, x)
    for i in range(2):
        for j in range(4):
            assert ulps(operator(f, x[i, j]) - batched[i, j], 10) <= 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_constant_has_no_derivative(operator):
    x = sphere.retract(normal(4, 3))
    if operator is surface.divergence:  # a constant vector c is not parallel: div_S(P c) = -(d-1) <x, c>
        assert ulps(operator(lambda y: torch.ones_like(y).detach(), x) + 2 * x.sum(-1)) <= 2
    else:
        constant = operator(lambda y: y.new_ones(y.shape[:-1]), x)
        assert torch.equal(constant, torch.zeros_like(operator(lambda y: y.sum(-1), x)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_functions_of_the_wrong_shape_raise(operator):
    x = sphere.retract(normal(4, 3))
    wanted = "a vector field" if operator is surface.divergence else "a scalar function"
    wanted += f" must return one {'vector' if operator is surface.divergence else 'number'} per point"
    wrong = (lambda y: y.sum(-1)) if operator is surface.divergence else (lambda y: 1 * y)
    shown = "(4,)" if operator is surface.divergence else "(4, 3)"
    for f, shape in ((wrong, shown), (lambda y: y.sum(), "()")):
        with pytest.raises(HelmscopeError) as caught:
            operator(f, x)
        assert str(caught.value) == f"f returns shape {shape} for points of shape (4, 3), but {wanted}"
